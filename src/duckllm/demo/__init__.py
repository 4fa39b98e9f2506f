"""The embedded demo model."""
