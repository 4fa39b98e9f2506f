"""Requests to tokens: the step loop, sampling and the KV cache."""
