"""What a card can do, by which kernels are chosen and tiles are made."""

from __future__ import annotations

from functools import lru_cache

import torch


def has_large_shared_memory(device: int) -> bool:
    """Whether this is a data centre's card: others have some 100 KiB for a multiprocessor."""
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor >= 160 << 10


@lru_cache
def has_e4m3(device: int) -> bool:
    """Whether there is an instruction that widens e4m3."""
    return torch.cuda.get_device_capability(device) >= (8, 9)


@lru_cache
def can_start_early(device: int) -> bool:
    """Whether a kernel may start while the one before it runs, and wait within for its end.

    A kernel that does so (``launch_pdl``) waits before it reads anything but weights and before it writes, so
    that it ends behind all kernels before it. It lets the next one start when it starts itself.
    """
    return torch.cuda.get_device_capability(device) >= (9, 0)
