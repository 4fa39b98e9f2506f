"""Thin typed face of the native transport."""
