"""Routed experts of a host with a GPU: device tensors in and out, computed on workers or on this CPU.

Called by the models through :class:`duckllm.moe.executor.ExpertExecutor`, and by whoever captures and replays
their steps; calls the exchange within a captured graph, and an executor of CPU tensors outside of one. Knows
no kernels: :mod:`duckllm.kernels.exchange` is handed to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from duckllm import _native
from duckllm.moe.executor import ExpertExecutor, PendingStep
from duckllm.transport.exchange import LINE_WORDS, REPLY_LINES, Exchange, LaneArrays, Program
from duckllm.transport.flock import Flock
from duckllm.transport.transport import Transport


@dataclass(frozen=True)
class LaneBox:
    """Host memory of a lane's steps.

    Shapes:
        x, y: [M, H] f32; topk_ids: [M, K] int32; topk_weights: [M, K] f32; cpu, pinned where there is a GPU
    """

    x: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    y: torch.Tensor


@dataclass(frozen=True)
class Mailboxes:
    """What host and GPU write for each other (csrc/transport/exchange.h), and what the GPU keeps of it.

    Shapes:
        control: [1 + (1 + REPLY_LINES) * lanes, LINE_WORDS] int32, cpu, pinned where there is a GPU;
        state: [1 + lanes] int32, on the device: the epoch, and the tokens of each lane
    """

    control: torch.Tensor
    lanes: Sequence[LaneBox]
    state: torch.Tensor

    @classmethod
    def new(
        cls, num_lanes: int, max_tokens: int, hidden_size: int, top_k: int, device: torch.device
    ) -> Mailboxes:
        """Memory for lanes of up to ``max_tokens`` rows."""

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")

        lanes = tuple(
            LaneBox(
                zeros(max_tokens, hidden_size),
                zeros(max_tokens, top_k, dtype=torch.int32),
                zeros(max_tokens, top_k),
                zeros(max_tokens, hidden_size),
            )
            for _ in range(num_lanes)
        )
        control = zeros(1 + (1 + REPLY_LINES) * num_lanes, LINE_WORDS, dtype=torch.int32)
        return cls(control, lanes, torch.zeros(1 + num_lanes, dtype=torch.int32, device=device))

    def requests(self, lane: int) -> torch.Tensor:
        """The lane's line of requests, [LINE_WORDS] int32."""
        return self.control[1 + lane]

    def replies(self, lane: int) -> torch.Tensor:
        """The lane's lines of the reply, [REPLY_LINES, LINE_WORDS] int32."""
        first = 1 + len(self.lanes) + lane * REPLY_LINES
        return self.control[first : first + REPLY_LINES]

    def exchange(
        self,
        server: _native.LaneServer,
        *,
        flock: Flock | None = None,
        transport: Transport | None = None,
        **options: float,
    ) -> Exchange:
        """The thread that serves this memory; ``options`` as :class:`Exchange` has them."""
        arrays = [
            LaneArrays(lane.x.numpy(), lane.topk_ids.numpy(), lane.topk_weights.numpy(), lane.y.numpy())
            for lane in self.lanes
        ]
        return Exchange(
            self.control.numpy(),
            arrays,
            server,
            flock=flock,
            transport=transport,
            **options,  # type: ignore[arg-type]
        )


class ExchangeKernels(Protocol):
    """The GPU's side: :mod:`duckllm.kernels.exchange`, or a thread of a test."""

    def begin(self, boxes: Mailboxes) -> None:
        """Takes over what the host said before the replay."""

    def publish(
        self,
        boxes: Mailboxes,
        lane: int,
        index: int,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
    ) -> int:
        """Writes a step, and then its flags; how many these are."""

    def collect(
        self,
        boxes: Mailboxes,
        lane: int,
        index: int,
        num_rows: int,
        *,
        timeout_s: float,
    ) -> torch.Tensor:
        """Waits for a step's sum."""


class DeviceExperts:
    """The expert executor of a host with a GPU.

    While the current stream is captured, steps become kernels of the graph, and an entry of the program that
    :meth:`record` gives; :meth:`run` then replays the graph, without Python between its layers. Otherwise
    steps go through ``executor``.

    Args:
        executor: Computes steps of CPU tensors, on the same workers or experts.
        boxes: Memory of the lanes.
        exchange: Serves it.
        kernels: The GPU's side.
        timeout_s: How long a captured graph waits for one step; several times what workers are given, as the
            host is to give up first, seconds.

    Threading: one thread at a time.
    """

    def __init__(
        self,
        executor: ExpertExecutor,
        boxes: Mailboxes,
        exchange: Exchange,
        kernels: ExchangeKernels,
        *,
        timeout_s: float = 120.0,
    ) -> None:
        self._executor, self._boxes, self._exchange, self._kernels = executor, boxes, exchange, kernels
        self._timeout_s = timeout_s
        self._program: Program | None = None

    def submit(
        self, layer: int, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, lane: int = 0
    ) -> CapturedStep | CopiedStep:
        """Starts a step, or captures its start. Shapes as :class:`duckllm.moe.executor.ExpertExecutor`.

        Raises:
            RuntimeError: The stream is captured outside of :meth:`record`.
            ClusterError: The workers' connections are closed.
        """
        if not torch.cuda.is_current_stream_capturing():
            return CopiedStep.submit(self._executor, layer, x, topk_ids, topk_weights, lane)
        if self._program is None:
            raise RuntimeError("experts: got a captured step outside of record()")
        index, (num_rows, top_k) = len(self._program), topk_ids.shape
        num_flags = self._kernels.publish(self._boxes, lane, index, x, topk_ids, topk_weights)
        self._program.append(layer, lane, num_rows, top_k, num_flags)
        return CapturedStep(self._kernels, self._boxes, lane, index, num_rows, self._timeout_s)

    @contextlib.contextmanager
    def record(self) -> Iterator[Program]:
        """While a stream is captured: the program of what is submitted within, for :meth:`run`.

        Steps of several streams come in the order of submitting, those of one lane in the order in which the
        graph runs them.
        """
        program = Program()
        self._kernels.begin(self._boxes)
        self._program = program
        try:
            yield program
        finally:
            self._program = None

    def run(self, program: Program, num_tokens: Sequence[int], replay: Callable[[], None]) -> None:
        """Replays a captured graph and serves its steps; the whole again where a worker was lost.

        All steps are answered on return; the GPU may still be at what comes behind the last one. Everything
        that the graph writes has to bear being written twice.

        Args:
            program: Of the graph.
            num_tokens: Of each lane that the graph has; rows behind them are padding.
            replay: Launches the graph on the current stream.

        Raises:
            WorkerLostError: A worker is lost, and nothing took its place in time. After any exception the GPU
                has finished, no step is in flight, and the next program may be run.
            RuntimeError: GPU or host waited in vain for each other.
            KeyboardInterrupt: Ctrl-C, while steps are waited for or a worker is brought back.
        """
        unused = len(self._boxes.lanes) - len(num_tokens)
        counts = [*num_tokens, *(0 for _ in range(unused))]

        def attempt(silence_s: float | None = None) -> None:
            self._exchange.start(program, counts)
            try:
                replay()
                self._exchange.finish(silence_s)
            except BaseException:
                self._exchange.abort()
                torch.cuda.current_stream().synchronize()
                raise

        flock = self._exchange.flock
        if flock is None:
            attempt()
        else:
            flock.persist(attempt)


class CapturedStep:
    """A step of a graph that is being captured."""

    def __init__(
        self,
        kernels: ExchangeKernels,
        boxes: Mailboxes,
        lane: int,
        index: int,
        num_rows: int,
        timeout_s: float,
    ) -> None:
        self._kernels, self._boxes, self._timeout_s = kernels, boxes, timeout_s
        self._lane, self._index, self._num_rows = lane, index, num_rows

    def wait(self) -> torch.Tensor:
        """The weighted sum over each token's experts.

        Shapes: result: [T, H] f32, on the device
        """
        return self._kernels.collect(
            self._boxes, self._lane, self._index, self._num_rows, timeout_s=self._timeout_s
        )


class CopiedStep:
    """A step that an executor of CPU tensors computes."""

    def __init__(self, pending: PendingStep, held: tuple[torch.Tensor, ...], device: torch.device) -> None:
        self._pending, self._device = pending, device
        self._held = held  # which an executor may read until the step has been waited for

    @classmethod
    def submit(
        cls,
        executor: ExpertExecutor,
        layer: int,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        lane: int,
    ) -> CopiedStep:
        """Starts it, once what is on the current stream has given its tensors."""
        held = copy_to_cpu(x, topk_ids, topk_weights)
        return cls(executor.submit(layer, held[0], held[1], held[2], lane), held, x.device)

    def wait(self) -> torch.Tensor:
        """The weighted sum over each token's experts.

        Shapes: result: [T, H] f32, on the device

        Raises:
            WorkerLostError: A worker went away, and neither it nor another came back in time.
        """
        y = self._pending.wait()
        # PyTorch gives pinned memory to others only once the copy from it is over.
        return _pinned_copy(y).to(self._device, non_blocking=True)


def copy_to_cpu(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Tensors of a GPU in pinned memory, once the current stream has computed them."""
    copies = tuple(map(_pinned_copy, tensors))
    torch.cuda.current_stream().record_event().synchronize()
    return copies


def _pinned_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in pinned memory, complete once the current stream is at it."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
