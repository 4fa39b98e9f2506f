"""Helpers that several test folders share: random checkpoints, reference model, reference experts."""
