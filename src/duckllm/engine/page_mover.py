"""Pages of the KV cache as bytes: out of the tensors of all layers, and back into them.

Called by :class:`duckllm.engine.kv_cache.KvCache`. A page is a few rows of each of some hundred tensors. All
of them are copied by one operation, on a GPU into a buffer there, by a few kernels, which then crosses over
in one piece, through memory that the GPU may access. Knows no page numbers in use and no tiers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from duckllm.engine.page_files import PageBytes

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class PageMover:
    """Copies pages between tensors and bytes; on a GPU beside the steps, in a stream of its own.

    Args:
        tensors: What holds the rows, all of one type and on one device, in the order of a page's bytes.
        page_tokens: Rows of a page in each of them.

    Shapes:
        tensors: [pages * page_tokens, width] each, contiguous

    Threading:
        Any thread. Steps whose rows are read must have been launched in the stream that was the current one
        when this was made, or in what that waits for; they need not have ended. When :meth:`read` or
        :meth:`write` returns, it is done, whatever streams go on from there.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], page_tokens: int) -> None:
        first = tensors[0]
        assert all((each.dtype, each.device) == (first.dtype, first.device) for each in tensors)
        # As integers: a GPU's copy of numbers may make another NaN of one.
        self._dtype = _INTEGERS[first.dtype.itemsize]
        bits = [each.view(self._dtype) for each in tensors]
        self._pages = [each.view(len(each) // page_tokens, page_tokens * each.shape[1]) for each in bits]
        self._sizes = [each.shape[1] for each in self._pages]
        self.page_bytes = sum(self._sizes) * first.dtype.itemsize
        self._new_buffers: Callable[[], _GpuBuffers] | None = None
        self._idle: deque[_GpuBuffers] = deque()
        if first.device.type == "cuda":
            streams = (
                torch.cuda.current_stream(first.device),
                torch.cuda.Stream(first.device),  # type: ignore[no-untyped-call]
            )
            self._new_buffers = partial(_GpuBuffers, first.device, self.page_bytes, *streams)
            # For the thread of the steps and that of the disk. A third pair is needed only where the garbage
            # collector ends the cache in the middle of either.
            self._idle.extend(self._new_buffers() for _ in range(2))

    def read(self, page: int) -> PageBytes:
        """The content of a page."""
        with self._buffers() as gpu:
            if gpu is not None:
                self._gather(gpu.buffer, page)
                return gpu.fetch()
        content = np.empty(self.page_bytes, np.uint8)
        self._gather(torch.from_numpy(content), page)
        return content

    def write(self, page: int, content: PageBytes) -> None:
        """Gives a page its content."""
        with self._buffers() as gpu:
            if gpu is not None:
                gpu.send(content)
            self._scatter(page, torch.from_numpy(content) if gpu is None else gpu.buffer)

    @contextmanager
    def _buffers(self) -> Iterator[_GpuBuffers | None]:
        """Buffers of the caller's own for a while; None on a CPU."""
        if self._new_buffers is None:
            yield None
            return
        try:
            buffers = self._idle.pop()
        except IndexError:
            buffers = self._new_buffers()
        with buffers.in_stream():
            yield buffers
        self._idle.append(buffers)

    @torch.inference_mode()
    def _gather(self, buffer: torch.Tensor, page: int) -> None:
        torch._foreach_copy_(self._parts(buffer), self._rows(page))

    @torch.inference_mode()
    def _scatter(self, page: int, buffer: torch.Tensor) -> None:
        torch._foreach_copy_(self._rows(page), self._parts(buffer))

    def _parts(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        return list(buffer.view(self._dtype).split_with_sizes(self._sizes))

    def _rows(self, page: int) -> list[torch.Tensor]:
        return [each[page] for each in self._pages]


class _GpuBuffers:
    """A page on its way: a buffer on the GPU, and one in CPU memory that the GPU may access.

    What is launched while it is entered is behind the steps so far, and done at the end.

    Args:
        device: The GPU.
        page_bytes: Size of both.
        steps: The stream that steps are launched in.
        stream: The one for copies.
    """

    def __init__(
        self,
        device: torch.device,
        page_bytes: int,
        steps: torch.cuda.Stream,
        stream: torch.cuda.Stream,
    ) -> None:
        self.buffer = torch.empty(page_bytes, dtype=torch.uint8, device=device)
        self._pinned = torch.empty(page_bytes, dtype=torch.uint8, pin_memory=True)
        self._steps, self._stream = steps, stream

    @contextmanager
    def in_stream(self) -> Iterator[None]:
        """Launches what is inside behind the steps so far, and waits for it."""
        with torch.cuda.stream(self._stream):
            self._stream.wait_stream(self._steps)
            yield
            self._stream.synchronize()

    def fetch(self) -> PageBytes:
        """The buffer's content."""
        self._pinned.copy_(self.buffer, non_blocking=True)
        self._stream.synchronize()
        content: PageBytes = self._pinned.numpy().copy()
        return content

    def send(self, content: PageBytes) -> None:
        """Gives the buffer its content."""
        self._pinned.numpy()[:] = content
        self.buffer.copy_(self._pinned, non_blocking=True)
