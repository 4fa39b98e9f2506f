"""Triton kernels for a host with an NVIDIA GPU, from compute capability 8.0 on."""
