"""Steps that a GPU publishes in pinned memory while a captured graph runs, served by a native thread.

Called by :mod:`duckllm.moe.device_experts`; csrc/transport/exchange.h states what both sides write, and in
what order, and :mod:`duckllm.kernels.exchange` is the GPU's side. Knows neither torch nor CUDA: memory comes
as arrays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from duckllm import _native

if TYPE_CHECKING:
    from duckllm.transport.flock import Flock
    from duckllm.transport.transport import Transport

# Without anything to do within a program, the thread looks so long before it sleeps between looks. Layers of
# a step come every few hundred microseconds, slow workers take some milliseconds.
SPIN_US = 10_000
# A GPU on which nothing is published for so long within a program does not go on.
GPU_TIMEOUT_S = 60.0
# Without a flock to ask about workers, nothing is to be done about a program in which nothing happens.
_STALL_MS = 1000

LINE_WORDS, REPLY_LINES = _native.EXCHANGE_LINE_WORDS, _native.EXCHANGE_REPLY_LINES
Program = _native.Program


@dataclass(frozen=True)
class LaneArrays:
    """Where a lane's steps lie.

    Shapes:
        x, y: [M, H] f32; topk_ids: [M, K] int32; topk_weights: [M, K] f32; a step of fewer experts uses the
        first T * K of them
    """

    x: npt.NDArray[np.float32]
    topk_ids: npt.NDArray[np.int32]
    topk_weights: npt.NDArray[np.float32]
    y: npt.NDArray[np.float32]


class Exchange:
    """Serves programs, one at a time.

    Args:
        control: Flags; zeros at first.
        lanes: Memory of each lane.
        server: Who computes: :meth:`Transport.server`, :meth:`LocalExperts.server`, or
            ``_native.echo_server()``.
        flock: Brings back the workers of that transport, and is asked about silent ones.
        transport: That transport.
        spin_us: How long the thread looks without sleeping.
        gpu_timeout_s: How long the GPU may publish nothing while it waits for nothing, seconds.

    Shapes:
        control: [1 + (1 + REPLY_LINES) * lanes, LINE_WORDS] int32

    Threading: one thread at a time.
    """

    def __init__(
        self,
        control: npt.NDArray[np.int32],
        lanes: Sequence[LaneArrays],
        server: _native.LaneServer,
        *,
        flock: Flock | None = None,
        transport: Transport | None = None,
        spin_us: int = SPIN_US,
        gpu_timeout_s: float = GPU_TIMEOUT_S,
    ) -> None:
        self._flock, self._transport = flock, transport
        self._native = _native.Exchange(
            control,
            [(lane.x, lane.topk_ids, lane.topk_weights, lane.y) for lane in lanes],
            server,
            spin_us=spin_us,
            gpu_timeout_ms=round(1000 * gpu_timeout_s),
        )

    @property
    def flock(self) -> Flock | None:
        """Who brings workers back."""
        return self._flock

    @property
    def num_answered(self) -> int:
        """Steps answered so far."""
        return self._native.num_answered

    def start(self, program: Program, num_tokens: Sequence[int]) -> None:
        """Begins to serve a program; its graph is to be replayed next, and no other may be running.

        Args:
            program: The steps that the graph publishes, in their order.
            num_tokens: Of each lane; rows behind them are padding.

        Raises:
            ValueError: A step does not fit the lanes.
            RuntimeError: A program is under way.
        """
        self._native.start(program, num_tokens)

    def finish(self, silence_s: float | None = None) -> None:
        """Waits until every step is answered.

        Args:
            silence_s: How long nothing may happen until the flock is asked about who is late, seconds.

        Raises:
            WorkerLostError: A worker is lost. As after any exception the GPU is free of waiting, and goes
                through the rest of its graph.
            RuntimeError: The GPU does not go on, or waited too long.
            KeyboardInterrupt: Ctrl-C.
        """
        stall_ms = _STALL_MS if silence_s is None else max(1, round(1000 * silence_s))
        with contextlib.nullcontext() if self._transport is None else self._transport.typed_errors():
            while not self._native.finish(stall_ms):
                if self._flock is not None and silence_s is not None and (late := self._native.late()):
                    self._flock.drop_silent(late, silence_s)
        if self._transport is not None:
            self._transport.note_unreached()

    def abort(self) -> None:
        """Ends the program under way, if there is one, and frees the GPU of waiting."""
        self._native.abort()
