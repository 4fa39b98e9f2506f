"""Checkpoints whose weights are 4-bit already, a module for each layout; no code of the tools is in it."""
