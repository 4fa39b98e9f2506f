"""One file per architecture family, and a registry table."""
