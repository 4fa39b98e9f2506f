"""Weights on their way to a GPU, through a fixed amount of CPU memory.

Called by what loads layers there. A tensor may be mapped from a file: what is read of it goes by small pieces
into memory that the GPU may access, from where it is copied while the next piece is read. Knows bytes and no
names.
"""

from __future__ import annotations

from itertools import cycle

import torch

# Both halves. One of them takes longer to cross over than the other copy takes to be started.
STAGING_BYTES = 32 << 20


class Staging:
    """Copies tensors to a device.

    Args:
        device: Where to; with a CPU the same is done in memory of the same kind.
        num_bytes: CPU memory that it takes, for as long as it is there.

    Threading:
        One thread at a time. Tensors can be used in the stream that is current in it, and in what waits for
        that.
    """

    def __init__(self, device: torch.device, num_bytes: int = STAGING_BYTES) -> None:
        self.device = device
        is_cuda = device.type == "cuda"
        self._piece_bytes = num_bytes // 2
        # Each with what happens when it has crossed over.
        halves = [
            (
                torch.empty(self._piece_bytes, dtype=torch.uint8, pin_memory=is_cuda),
                torch.cuda.Event() if is_cuda else None,  # type: ignore[no-untyped-call]
            )
            for _ in range(2)
        ]
        self._halves = cycle(halves)

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor's copy on the device; the tensor itself is not needed any more when this returns.

        Shapes:
            tensor, result: any, of any type; result contiguous. One that is not is copied whole before.
        """
        result = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        source, target = (each.view(-1).view(torch.uint8) for each in (tensor.contiguous(), result))
        for start in range(0, len(source), self._piece_bytes):
            half, has_crossed = next(self._halves)
            if has_crossed is not None:
                has_crossed.synchronize()
            piece = source[start : start + self._piece_bytes]
            half[: len(piece)].copy_(piece)
            target[start : start + len(piece)].copy_(half[: len(piece)], non_blocking=True)
            if has_crossed is not None:
                has_crossed.record(torch.cuda.current_stream(self.device))
        return result
