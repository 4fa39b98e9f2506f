"""Memory for sums that several programs of a kernel make together."""

from __future__ import annotations

import torch


class Workspace:
    """Partial sums of products on one stream: one at a time.

    Args:
        device: Where.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._partials = torch.empty(0, dtype=torch.float32, device=device)
        self._counts = torch.zeros(0, dtype=torch.int32, device=device)
        self._outgrown: list[torch.Tensor] = []  # graphs that were captured with it may still write there

    def reserve(self, num_tiles: int, num_partials: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for so many numbers, and zeroed counters for so many tiles.

        Zeroed once: whoever uses counters leaves zeros. So what is captured in a graph has to be reserved
        before, by computing the same once.
        """
        if self._partials.numel() < num_partials:
            self._outgrown.append(self._partials)
            self._partials = torch.empty(num_partials, dtype=torch.float32, device=self._device)
        if self._counts.numel() < num_tiles:
            self._outgrown.append(self._counts)
            self._counts = torch.zeros(num_tiles, dtype=torch.int32, device=self._device)
        return self._partials, self._counts
