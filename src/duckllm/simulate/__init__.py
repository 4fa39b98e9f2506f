"""Flocks that are not there: real host, real step loops, experts and links that only take the time."""
