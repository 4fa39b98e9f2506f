"""The runtime of a host with an NVIDIA GPU: layers by Triton kernels (:mod:`duckllm.kernels`).

What goes between kernels is float32, linear layers take it in f16 with a power of two for each 128 numbers,
and the KV cache is bf16. Weights stay as they are stored.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from duckllm.kernels import gqa, indexer, mla_decode, mla_rows, route, rowwise
from duckllm.kernels.dense_linear import multiply_dense
from duckllm.kernels.fp8_linear import multiply, to_half_rows
from duckllm.kernels.half_rows import Activations
from duckllm.kernels.step_rows import PAGE_TOKENS
from duckllm.kernels.workspace import Workspace
from duckllm.layers.cuda_step import CudaStep, new_rows
from duckllm.layers.rope import RotaryTable, rotate_interleaved
from duckllm.layers.runtime import Rotate
from duckllm.layers.step import LayerCache, SequenceStep
from duckllm.moe.device_experts import copy_to_cpu
from duckllm.moe.router import SigmoidRouting, SoftmaxRouting
from duckllm.weights.e4m3 import scale_shape
from duckllm.weights.host_tensors import HostTensors
from duckllm.weights.staging import Staging

CACHE_DTYPE = torch.bfloat16
# Contexts that attention over latents takes as short ones.
_SHORT_TOKENS = 2048


@dataclass(frozen=True)
class DeviceWeight:
    """A linear layer's weight on the GPU.

    Args:
        values: Bytes of e4m3, or bf16 or f32.
        scales: Block scales of e4m3.
        row_scales: What the outputs are multiplied with, where the checkpoint has a scale for each row.

    Shapes:
        values: [N, K]; scales: [ceil(N / 128), ceil(K / 128)] f32; row_scales: [N] f32
    """

    values: torch.Tensor
    scales: torch.Tensor | None = None
    row_scales: torch.Tensor | None = None


class CudaRuntime:
    """Operations on one GPU.

    Args:
        device: Which.
    """

    rounds_scales = True

    def __init__(self, device: torch.device) -> None:
        self.device = device if device.index is not None else torch.device(device.type, 0)
        torch.cuda.set_device(self.device)
        self.lanes = Lanes(self.device)
        self._staging = Staging(self.device)
        self._workspaces: dict[tuple[int, bool], Workspace] = {}  # of each stream
        self._tables: WeakKeyDictionary[RotaryTable, tuple[torch.Tensor, torch.Tensor]] = WeakKeyDictionary()

    def pack(self, weight: torch.Tensor, scales: torch.Tensor | None) -> DeviceWeight:
        """As :class:`duckllm.layers.runtime.Runtime` has it, and so are all that follow."""
        if scales is None:
            return DeviceWeight(self._moved(weight))
        codes = self._moved(weight.contiguous().view(torch.uint8))
        _refuse_nan(codes)
        factors, blocks = scales.float().contiguous().to(self.device), scale_shape(*weight.shape)
        if tuple(factors.shape) == blocks:
            return DeviceWeight(codes, factors)
        return DeviceWeight(codes, torch.ones(blocks, device=self.device), factors[:, 0])

    def _moved(self, weight: torch.Tensor) -> torch.Tensor:
        return weight if weight.device == self.device else self._staging.to_device(weight)

    def vector(self, values: torch.Tensor) -> torch.Tensor:
        return values.float().contiguous().to(self.device)

    def linear(
        self,
        x: Activations | torch.Tensor,
        weights: Sequence[DeviceWeight],
        bias: torch.Tensor | None,
        factor: float,
    ) -> torch.Tensor:
        products = [self._multiply(x, weight) for weight in weights]
        y = products[0] if len(products) == 1 else torch.cat(products, dim=1)
        if factor != 1.0:
            y *= factor
        if bias is not None:
            y += bias
        return y

    def _multiply(self, x: Activations | torch.Tensor, weight: DeviceWeight) -> torch.Tensor:
        if weight.scales is None:
            return multiply_dense(self.plain(x), weight.values, self._workspace())
        half = x.half if isinstance(x, Activations) else to_half_rows(x)
        y = multiply(half, weight.values, weight.scales, torch.float32)
        return y if weight.row_scales is None else y.mul_(weight.row_scales)

    def _workspace(self) -> Workspace:
        where = self.lanes.where
        if where not in self._workspaces:
            self._workspaces[where] = Workspace(self.device)
        return self._workspaces[where]

    def plain(self, x: Activations | torch.Tensor) -> torch.Tensor:
        return x.values if isinstance(x, Activations) else x

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> Activations:
        return rowwise.rms_norm(x, weight, eps)

    def add_rms_norm(
        self, hidden: torch.Tensor, deltas: Sequence[torch.Tensor], weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, Activations]:
        return rowwise.add_rms_norm(hidden, deltas, weight, eps)

    def silu_mul(self, gate_up: torch.Tensor) -> Activations:
        return rowwise.silu_mul(gate_up)

    def scale_by_sigmoid(self, y: torch.Tensor, gate: torch.Tensor) -> None:
        rowwise.scale_by_sigmoid(y, gate)

    def route_by_sigmoid(
        self, logits: torch.Tensor, correction_bias: torch.Tensor, routing: SigmoidRouting
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return route.route_by_sigmoid(
            logits,
            correction_bias,
            routing.top_k,
            routing.num_groups,
            routing.topk_group,
            routing.normalize,
            routing.scaling_factor,
        )

    def route_by_softmax(
        self, logits: torch.Tensor, routing: SoftmaxRouting
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return route.route_by_softmax(logits, routing.top_k, routing.normalize)

    def new_layer_cache(self, widths: Sequence[int], max_tokens: int) -> LayerCache:
        num_rows = -(-max_tokens // PAGE_TOKENS) * PAGE_TOKENS
        return tuple(torch.empty(num_rows, width, dtype=CACHE_DTYPE, device=self.device) for width in widths)

    def new_step(self, sequences: Sequence[SequenceStep], rotary: RotaryTable) -> CudaStep:
        rows = new_rows(sequences, *self.rotations(rotary))
        return CudaStep(rows, max(each.stop for each in sequences))

    def rotations(self, rotary: RotaryTable) -> tuple[torch.Tensor, torch.Tensor]:
        """A table's cosines and sines on the device."""
        if rotary not in self._tables:
            self._tables[rotary] = rotary.cos.to(self.device), rotary.sin.to(self.device)
        return self._tables[rotary]

    def active(self) -> contextlib.AbstractContextManager[None]:
        return torch.cuda.device(self.device)

    def lane(self, number: int) -> contextlib.AbstractContextManager[None]:
        return self.lanes.turn(number)

    def fork(self) -> torch.cuda.Event | None:
        return self.lanes.fork()

    def beside(self, fork: torch.cuda.Event | None) -> contextlib.AbstractContextManager[None]:
        return self.lanes.beside(fork)

    def join(self) -> None:
        self.lanes.join()

    def gather(self, lanes: Sequence[torch.Tensor]) -> torch.Tensor:
        self.lanes.gather()
        return lanes[0] if len(lanes) == 1 else torch.cat(tuple(lanes))

    def to_cpu(self, values: torch.Tensor) -> torch.Tensor:
        return copy_to_cpu(values)[0]

    def key_value_up(
        self, tensors: HostTensors, name: str, num_heads: int, nope_dim: int, v_dim: int, lora_rank: int
    ) -> tuple[mla_rows.HeadWeights, mla_rows.HeadWeights]:
        weight, scales = tensors.stored_linear(name)
        if scales is not None and tuple(scales.shape) != scale_shape(*weight.shape):  # of rows
            weight, scales = tensors.linear(name, torch.float32), None
        weight = self._moved(weight)
        if scales is not None:
            scales = scales.to(self.device)
            _refuse_nan(weight.view(torch.uint8))
        return (
            mla_rows.HeadWeights.stored(weight, scales, num_heads, 0, nope_dim),
            mla_rows.HeadWeights.stored(weight, scales, num_heads, nope_dim, v_dim),
        )

    def store_latents(
        self,
        kv: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        rotate: Rotate,
        step: CudaStep,
        cache: torch.Tensor,
    ) -> None:
        mla_rows.store_latents(kv, norm_weight, eps, rotate is rotate_interleaved, step.rows, cache)

    def absorb(
        self,
        heads: torch.Tensor,
        key_up: mla_rows.HeadWeights,
        rotate: Rotate,
        step: CudaStep,
        cache: torch.Tensor,
    ) -> torch.Tensor:
        return mla_rows.absorb(heads, key_up, rotate is rotate_interleaved, step.rows, cache.dtype)

    def attend_latents(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        step: CudaStep,
        scale: float,
        lora_rank: int,
        selection: indexer.Selection | None,
        most: int | None,
    ) -> torch.Tensor:
        is_short = most is not None and most <= _SHORT_TOKENS
        return mla_decode.attend_latents(q, cache, step.rows, scale, lora_rank, selection, is_short)

    def raise_values(self, context: torch.Tensor, value_up: mla_rows.HeadWeights) -> Activations:
        return mla_rows.raise_values(context, value_up)

    def store_index_keys(
        self,
        k: torch.Tensor,
        norm: tuple[torch.Tensor, torch.Tensor, float],
        rope_dim: int,
        rotate: Rotate,
        step: CudaStep,
        cache: torch.Tensor,
    ) -> None:
        indexer.store_index_keys(k, *norm, rope_dim, rotate is rotate_interleaved, step.rows, cache)

    def select(
        self,
        q: torch.Tensor,
        head_weights: torch.Tensor,
        rope_dim: int,
        rotate: Rotate,
        step: CudaStep,
        cache: torch.Tensor,
        topk: int,
    ) -> indexer.Selection:
        return indexer.select(q, head_weights, rope_dim, rotate is rotate_interleaved, step.rows, cache, topk)

    def store_heads(
        self,
        qkv: torch.Tensor,
        num_heads: int,
        num_kv_heads: int,
        norms: tuple[torch.Tensor, torch.Tensor, float] | None,
        rotary_dim: int,
        scaling: float,
        step: CudaStep,
        cache: LayerCache,
    ) -> torch.Tensor:
        """Queries [T, heads, D], multiplied with ``scaling``."""
        q_norm, k_norm, eps = norms or (None, None, 0.0)
        return gqa.store_heads(
            qkv, num_heads, num_kv_heads, q_norm, k_norm, eps, rotary_dim, scaling, step.rows, *cache
        )

    def attend_heads(
        self,
        q: torch.Tensor,
        cache: LayerCache,
        step: CudaStep,
        num_kv_heads: int,
        scaling: float,
        window: int | None,
    ) -> Activations:
        keys, values = cache
        return gqa.attend_heads(q, keys, values, step.rows, num_kv_heads, window)


class Lanes:
    """Streams of a captured step's lanes: while one waits for its experts, the other computes.

    A lane's turn at a layer begins when the lane before it has finished its own: a context's earlier tokens
    may be in that one, whose keys the later ones see. Each lane has a second stream, for what may be computed
    beside it: most kernels of a decode step are too small to fill the card.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.where = (0, False)  # whose turn it is, and whether beside it
        self._streams: list[torch.cuda.Stream] = []
        self._sides: list[torch.cuda.Stream] = []
        self._events: list[torch.cuda.Event] = []
        self._is_forked: set[int] = set()  # the lanes that something is computed beside

    @contextlib.contextmanager
    def capture(self, num_lanes: int) -> Iterator[None]:
        """While the current stream is captured: other lanes have streams beside it, until :meth:`gather`."""
        main = torch.cuda.current_stream(self._device)

        def new(count: int) -> list[torch.cuda.Stream]:
            return [torch.cuda.Stream(self._device) for _ in range(count)]  # type: ignore[no-untyped-call]

        self._streams, self._sides = [main, *new(num_lanes - 1)], new(num_lanes)
        self._events = [_event() for _ in self._streams]
        for event in self._events:
            event.record(main)
        try:
            yield
        finally:
            self._streams, self._sides, self._is_forked = [], [], set()

    def gather(self) -> None:
        """Lets the current stream wait for all lanes and what is beside them."""
        main = torch.cuda.current_stream(self._device)
        for stream in [*self._streams[1:], *(self._sides[lane] for lane in sorted(self._is_forked))]:
            main.wait_stream(stream)
        self._is_forked.clear()

    @contextlib.contextmanager
    def turn(self, number: int) -> Iterator[None]:
        """A lane's turn at a layer; outside of :meth:`capture` on the current stream."""
        self.where = number, False
        try:
            if not self._streams:
                yield
                return
            stream = self._streams[number]
            if number:
                stream.wait_event(self._events[number - 1])
            with torch.cuda.stream(stream):
                yield
            self._events[number].record(stream)
        finally:
            self.where = 0, False

    def fork(self) -> torch.cuda.Event | None:
        """This place in the lane whose turn it is; None outside of :meth:`capture`."""
        if not self._streams:
            return None
        event = _event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextlib.contextmanager
    def beside(self, fork: torch.cuda.Event | None) -> Iterator[None]:
        """Computes beside the lane whose turn it is, from ``fork`` on; here where that is None."""
        if fork is None:
            yield
            return
        lane, _ = self.where
        side = self._sides[lane]
        side.wait_event(fork)
        self._is_forked.add(lane)
        self.where = lane, True
        try:
            with torch.cuda.stream(side):
                yield
        finally:
            self.where = lane, False

    def join(self) -> None:
        """Lets the lane whose turn it is wait for what is beside it."""
        lane, _ = self.where
        if lane in self._is_forked:
            self._is_forked.remove(lane)
            torch.cuda.current_stream(self._device).wait_stream(self._sides[lane])


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def _refuse_nan(codes: torch.Tensor) -> None:
    num_nan = int(((codes & 0x7F) == 0x7F).sum())
    if num_nan:
        raise ValueError(f"weight: got {num_nan} NaN bytes (0x7f, 0xff), expected none")
