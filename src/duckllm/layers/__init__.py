"""Attention, rope, norm and linear layers; explicit inputs, no globals."""
