"""How large tiles may be on a card."""

from __future__ import annotations

import torch


def has_large_shared_memory(device: int) -> bool:
    """Whether this is a data centre's card: others have some 100 KiB for a multiprocessor."""
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor >= 160 << 10
