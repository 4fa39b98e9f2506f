"""Decode steps of a GPU host as CUDA graphs: no Python between layers.

Used by :mod:`duckllm.models.causal_lm` and :mod:`duckllm.models.mtp` for steps of few rows. What differs from
step to step of one shape, that is tokens, positions and pages, lies in memory of fixed addresses, which a
graph's first node copies to the device; experts are asked for and waited for inside the graph
(:mod:`duckllm.moe.device_experts`). A shape is captured when it comes for the second time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from duckllm.kernels.half_rows import MAX_GROUPED_ROWS
from duckllm.kernels.step_rows import PAGE_TOKENS, StepRows
from duckllm.layers.cuda_runtime import CudaRuntime
from duckllm.layers.cuda_step import CudaStep, fill_rows
from duckllm.layers.mla import MLAShape
from duckllm.layers.step import LayerCache, SequenceStep
from duckllm.models.step_times import StepTimes
from duckllm.moe.device_experts import DeviceExperts

if TYPE_CHECKING:
    from duckllm.models.causal_lm import CausalLM
    from duckllm.models.mtp import MTPLayer
    from duckllm.moe.executor import ExpertExecutor
    from duckllm.transport.exchange import Program

LaneInput = tuple[torch.Tensor, Sequence[SequenceStep]]

# Up to so many rows there is a graph for each number of them; above, for multiples of 8.
_EXACT_ROWS = 16
_ROW_STEP = 8
_MOST_LANES = 2
# Layers behind which a step is cut into graphs. Launching one takes longer the more kernels it has, and the
# GPU begins when it is launched as a whole: the first is short, and the others are launched beside it.
_CUTS = (1, 6, 20, 40)


class CapturedSteps:
    """Graphs of a model's steps.

    Args:
        model: Whose.
        experts: Of a GPU host.
    """

    def __init__(self, model: CausalLM, experts: ExpertExecutor) -> None:
        if not isinstance(experts, DeviceExperts) or not isinstance(model.runtime, CudaRuntime):
            raise TypeError(f"experts: got {type(experts).__name__}, expected those of a GPU host")
        self._model, self._experts, self._runtime = model, experts, model.runtime
        indexers = [shape.indexer for shape in model.config.attention if isinstance(shape, MLAShape)]
        self._topk = min((each.topk for each in indexers if each is not None), default=None)
        self._graphs: dict[tuple[object, ...], _Graph] = {}
        self._seen: set[tuple[object, ...]] = set()
        self._pool = torch.cuda.graph_pool_handle()  # memory that all graphs share, as one runs at a time
        # The last step's hidden states, and the tokens of its lanes; the logits are there once the event is.
        self._last: tuple[torch.Tensor, list[int]] | None = None
        self._logits: torch.Tensor | None = None  # [2 lanes of rows, V] f32, pinned
        self._logits_event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def takes(self, lanes: Sequence[LaneInput], what: str = "forward") -> bool:
        """Whether a step of these lanes is one for a graph: of few rows, and not the first of its shape.

        A prompt's length may never come again, and capturing costs several times what the step does.
        """
        if not all(0 < len(token_ids) <= MAX_GROUPED_ROWS for token_ids, _ in lanes):
            return False
        shape = (what, *(_padded(len(token_ids)) for token_ids, _ in lanes))
        if shape in self._seen:
            return True
        self._seen.add(shape)
        return False

    def forward(self, lanes: Sequence[LaneInput], kv_cache: Sequence[LayerCache]) -> torch.Tensor:
        """As :meth:`CausalLM.forward_lanes`; :meth:`logits_of` has the logits of what it gives."""
        model = self._model

        def compute(inputs: Sequence[_LaneInputs], after: Callable[[int], None]) -> torch.Tensor:
            from duckllm.models.causal_lm import Lane

            running = [Lane(number, each.step, each.embedded) for number, each in enumerate(inputs)]
            hidden = model.advance(running, kv_cache, StepTimes(), after)
            logits = model.head(hidden)
            if self._logits is None:
                shape = (_MOST_LANES * MAX_GROUPED_ROWS, logits.shape[1])
                self._logits = torch.empty(shape, pin_memory=True)
            self._logits[: len(logits)].copy_(logits, non_blocking=True)
            return hidden

        self._last = None
        hidden = self._run("forward", lanes, kv_cache, compute)
        self._last = hidden, [len(token_ids) for token_ids, _ in lanes]
        return hidden

    def logits_of(self, hidden: torch.Tensor, rows: Sequence[int] | None) -> torch.Tensor | None:
        """The logits [T, V] of what the last :meth:`forward` gave, or of ``rows``; None of anything else."""
        if self._last is None or self._last[0] is not hidden:
            return None
        assert self._logits is not None
        numbers = self._last[1]
        firsts = accumulate(map(_padded, numbers), initial=0)
        places = [
            first + row for first, number in zip(firsts, numbers, strict=False) for row in range(number)
        ]
        self._logits_event.synchronize()
        # Not by PyTorch, which shares out a row's numbers: its threads then want all cores for a while, and
        # workers and the exchange wait for theirs.
        return torch.from_numpy(
            self._logits.numpy()[places if rows is None else [places[row] for row in rows]]
        )

    def draft(
        self,
        layer: MTPLayer,
        hidden: torch.Tensor,
        token_ids: torch.Tensor,
        sequences: Sequence[SequenceStep],
        cache: LayerCache,
    ) -> torch.Tensor:
        """As :meth:`MTPLayer.forward`."""

        def compute(inputs: Sequence[_LaneInputs], after: object) -> torch.Tensor:
            (own,) = inputs
            return layer.advance(own.hidden, own.embedded, own.step, cache)

        return self._run("draft", [(token_ids, sequences)], [cache], compute, hidden)

    def _run(
        self,
        what: str,
        lanes: Sequence[LaneInput],
        kv_cache: Sequence[LayerCache],
        compute: Compute,
        hidden: torch.Tensor | None = None,
    ) -> torch.Tensor:
        sizes = tuple(_padded(len(token_ids)) for token_ids, _ in lanes)
        longest = max(each.stop for _, sequences in lanes for each in sequences)
        selects = self._topk is not None and longest > self._topk
        # Graphs hold addresses: another cache has others.
        key = (what, sizes, selects, kv_cache[0][0].data_ptr(), kv_cache[-1][-1].data_ptr())
        graph = self._graphs.get(key)
        if graph is None:
            inputs = [self._new_inputs(size, longest if selects else 0) for size in sizes]
            graph = self._graphs[key] = self._capture(inputs, compute)
        for each, (token_ids, sequences) in zip(graph.inputs, lanes, strict=True):
            each.fill(F.embedding(token_ids, self._model.embedding), sequences, hidden)
        numbers = [len(token_ids) for token_ids, _ in lanes]

        def replay() -> None:
            for each in graph.graphs:
                each.replay()
            self._logits_event.record()

        self._experts.run(graph.program, numbers, replay)
        # A copy: the next step of this shape writes the same memory.
        if len(numbers) == 1:
            return graph.output[: numbers[0]].clone()
        parts = graph.output.tensor_split(list(accumulate(sizes))[:-1])
        return torch.cat([part[:number] for part, number in zip(parts, numbers, strict=True)])

    def _new_inputs(self, num_rows: int, longest: int) -> _LaneInputs:
        model = self._model
        num_pages = -(-model.max_tokens // PAGE_TOKENS)
        tables = self._runtime.rotations(model.rotary)
        return _LaneInputs.new(num_rows, num_pages, model.config.hidden_size, longest, tables)

    def _capture(self, inputs: list[_LaneInputs], compute: Compute) -> _Graph:
        """Computes once as any step, so that kernels are compiled and buffers are there, and captures."""

        def work(after: Callable[[int], None] = lambda layer: None) -> torch.Tensor:
            for each in inputs:
                each.copy()
                each.step.selection = None
            return compute(inputs, after)

        stream = torch.cuda.Stream(self._runtime.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream().wait_stream(stream)
        stream.synchronize()
        graphs: list[torch.cuda.CUDAGraph] = []
        with ExitStack() as stack:

            def begin() -> None:
                graphs.append(torch.cuda.CUDAGraph())
                stack.enter_context(
                    torch.cuda.graph(
                        graphs[-1], pool=self._pool, stream=stream, capture_error_mode="thread_local"
                    )
                )
                stack.enter_context(self._runtime.lanes.capture(len(inputs)))

            def after(layer: int) -> None:
                if layer + 1 in _CUTS:
                    self._runtime.lanes.gather()
                    stack.close()
                    begin()

            begin()
            with self._experts.record() as program:
                output = work(after)
        return _Graph(graphs, program, inputs, output)


Compute = Callable[[Sequence["_LaneInputs"], Callable[[int], None]], torch.Tensor]


@dataclass(frozen=True)
class _Graph:
    graphs: Sequence[torch.cuda.CUDAGraph]  # one behind the other
    program: Program
    inputs: Sequence[_LaneInputs]
    output: torch.Tensor


@dataclass(frozen=True)
class _LaneInputs:
    """What a lane's rows are made of, in pinned memory and on the device.

    Shapes:
        host, device: bytes; words: [4, R] int32; pages: [R, P] int32; host_embedded: [R, H] f32, all in
        ``host``; embedded, hidden: [R, H] f32 on the device
    """

    host: torch.Tensor
    device: torch.Tensor
    words: torch.Tensor
    pages: torch.Tensor
    host_embedded: torch.Tensor
    embedded: torch.Tensor
    hidden: torch.Tensor
    step: CudaStep

    @classmethod
    def new(
        cls,
        num_rows: int,
        num_pages: int,
        hidden_size: int,
        longest: int,
        tables: tuple[torch.Tensor, torch.Tensor],
    ) -> _LaneInputs:
        sizes = (4 * num_rows, num_rows * num_pages, num_rows * hidden_size)
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + -(-size // 4) * 4)  # 16 bytes
        host = torch.zeros(starts[-1], dtype=torch.int32, pin_memory=True)
        device = torch.zeros(starts[-1], dtype=torch.int32, device=tables[0].device)

        def views(whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            parts = [whole[start : start + size] for start, size in zip(starts, sizes, strict=False)]
            embedded = parts[2].view(torch.float32).view(num_rows, hidden_size)
            return parts[0].view(4, num_rows), parts[1].view(num_rows, num_pages), embedded

        words, pages, host_embedded = views(host)
        words[3] = -1
        (positions, contexts, firsts, slots), device_pages, embedded = views(device)
        rows = StepRows(positions, contexts, firsts, slots, device_pages, *tables)
        hidden = torch.zeros(num_rows, hidden_size, device=device.device)
        return cls(host, device, words, pages, host_embedded, embedded, hidden, CudaStep(rows, longest))

    def copy(self) -> None:
        """To the device."""
        self.device.copy_(self.host, non_blocking=True)

    def fill(
        self, embedded: torch.Tensor, sequences: Sequence[SequenceStep], hidden: torch.Tensor | None
    ) -> None:
        """The rows of a step; those behind them are nobody's."""
        num_rows = len(embedded)
        self.words[:3, num_rows:] = 0
        self.words[3, num_rows:] = -1
        fill_rows(sequences, self.words.numpy(), self.pages.numpy())
        self.host_embedded[:num_rows] = embedded
        if hidden is not None:
            self.hidden[:num_rows] = hidden


def _padded(num_rows: int) -> int:
    """Rows of the graph for so many."""
    return num_rows if num_rows <= _EXACT_ROWS else -(-num_rows // _ROW_STEP) * _ROW_STEP
