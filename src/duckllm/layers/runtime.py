"""What computes the layers of a model: its device, its forms of weights and its operations.

The models make one by :func:`new_runtime` and hand it to their layers, which say what is computed with what;
a runtime says how. There are two: :mod:`duckllm.layers.cpu_runtime` calls native code, and
:mod:`duckllm.layers.cuda_runtime` Triton kernels. Rows that linear layers take are of a form of the
runtime's own (:data:`Rows`), as one that comes from a norm may have been prepared for them; products are
plain tensors in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch

if TYPE_CHECKING:
    from duckllm.layers.rope import RotaryTable
    from duckllm.layers.step import LayerCache, SequenceStep
    from duckllm.moe.router import SigmoidRouting, SoftmaxRouting
    from duckllm.weights.host_tensors import HostTensors

Rows: TypeAlias = Any  # [T, K] f32, in the form that the runtime's linear layers take
Packed: TypeAlias = Any  # a linear layer's weight
Vector: TypeAlias = Any  # numbers for the runtime's operations
Step: TypeAlias = Any  # the contexts of a step's rows, with the `selection` of the last layer that chose one
HeadWeights: TypeAlias = Any  # a matrix for each head
Selection: TypeAlias = Any  # the positions that each row attends to
Fork: TypeAlias = Any  # a place in a step
Rotate: TypeAlias = Callable[..., torch.Tensor]  # rotate_interleaved or rotate_half_split of layers.rope


class Runtime(Protocol):
    """Operations of layers. T is the number of rows; sizes are those of the arguments.

    A row's result has the same bits whatever rows go with it, on a GPU in steps of up to 64 rows.
    """

    device: torch.device
    rounds_scales: bool  # whether a constant factor may be rounded into each scale of a weight

    def pack(self, weight: torch.Tensor, scales: torch.Tensor | None) -> Packed:
        """A stored weight, on the device.

        Shapes:
            weight: [N, K] float8_e4m3fn with scales f32, [ceil(N/128), ceil(K/128)] for blocks or [N, 1] for
            rows; bfloat16 or float32 without

        Raises:
            ValueError: The weight holds NaN bytes of e4m3.
        """

    def vector(self, values: torch.Tensor) -> Vector:
        """Numbers in f32, on the device."""

    def linear(self, x: Rows, weights: Sequence[Packed], bias: Vector | None, factor: float) -> torch.Tensor:
        """``factor * x W^T + b``, of weights whose outputs lie side by side: [T, N]."""

    def plain(self, x: Rows) -> torch.Tensor:
        """The rows themselves: [T, K] f32."""

    def rms_norm(self, x: torch.Tensor, weight: Vector, eps: float) -> Rows:
        """``x / sqrt(mean(x^2) + eps) * weight`` of each row; rows may lie apart."""

    def add_rms_norm(
        self, hidden: torch.Tensor, deltas: Sequence[torch.Tensor], weight: Vector, eps: float
    ) -> tuple[torch.Tensor, Rows]:
        """``hidden`` plus the sum of one or two ``deltas``, a new tensor, and the norm of that."""

    def silu_mul(self, gate_up: torch.Tensor) -> Rows:
        """``silu(gate) * up`` of [T, 2 I], gate first."""

    def scale_by_sigmoid(self, y: torch.Tensor, gate: torch.Tensor) -> None:
        """Multiplies each row with the sigmoid of its number in ``gate`` [T, 1]."""

    def route_by_sigmoid(
        self, logits: torch.Tensor, correction_bias: Vector, routing: SigmoidRouting
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts [T, K] int32, best first, and their weights f32: :mod:`duckllm.moe.router`."""

    def route_by_softmax(
        self, logits: torch.Tensor, routing: SoftmaxRouting
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As :meth:`route_by_sigmoid`."""

    def new_layer_cache(self, widths: Sequence[int], max_tokens: int) -> LayerCache:
        """An empty cache of one layer: one tensor [max_tokens, width] for each width."""

    def new_step(self, sequences: Sequence[SequenceStep], rotary: RotaryTable) -> Step:
        """The contexts of a step's rows, in order."""

    def active(self) -> AbstractContextManager[None]:
        """Around whatever is computed, in whichever thread."""

    def lane(self, number: int) -> AbstractContextManager[None]:
        """Where one of a step's lanes is computed."""

    def fork(self) -> Fork:
        """A place from which on something may be computed :meth:`beside` what follows."""

    def beside(self, fork: Fork) -> AbstractContextManager[None]:
        """Around what needs nothing that comes after ``fork``; its results may be used after :meth:`join`.

        What it reads has to be kept until then. On a CPU, and outside of captured steps, it is computed here.
        """

    def join(self) -> None:
        """What was computed beside this lane is finished before what follows."""

    def gather(self, lanes: Sequence[torch.Tensor]) -> torch.Tensor:
        """What the lanes of a step gave, one behind the other."""

    def to_cpu(self, values: torch.Tensor) -> torch.Tensor:
        """The numbers on the CPU, once they are computed."""

    def key_value_up(
        self, tensors: HostTensors, name: str, num_heads: int, nope_dim: int, v_dim: int, lora_rank: int
    ) -> tuple[HeadWeights, HeadWeights]:
        """Of MLA's up-projection, [heads * (nope + v), lora], the part of keys and that of values."""

    def store_latents(
        self,
        kv: torch.Tensor,
        norm_weight: Vector,
        eps: float,
        rotate: Rotate,
        step: Step,
        cache: torch.Tensor,
    ) -> None:
        """Stores latents, normalised, and rotated keys: [T, lora + rope]. ``kv`` may be changed."""

    def absorb(
        self, heads: torch.Tensor, key_up: HeadWeights, rotate: Rotate, step: Step, cache: torch.Tensor
    ) -> Any:
        """Queries [T, heads * (nope + rope)] in the absorbed form, for :meth:`attend_latents`."""

    def attend_latents(
        self,
        q: Any,
        cache: torch.Tensor,
        step: Step,
        scale: float,
        lora_rank: int,
        selection: Selection | None,
        most: int | None,
    ) -> Any:
        """Latents weighted by each head's attention, for :meth:`raise_values`.

        Whatever its context, a row of the layer sees ``most`` tokens at most, if that is known.
        """

    def raise_values(self, context: Any, value_up: HeadWeights) -> Rows:
        """The heads' values: [T, heads * v]."""

    def store_index_keys(
        self,
        k: torch.Tensor,
        norm: tuple[Vector, Vector, float],
        rope_dim: int,
        rotate: Rotate,
        step: Step,
        cache: torch.Tensor,
    ) -> None:
        """Stores the indexer's keys [T, D], layer-normed by weight, bias and eps, the first part rotated."""

    def select(
        self,
        q: torch.Tensor,
        head_weights: torch.Tensor,
        rope_dim: int,
        rotate: Rotate,
        step: Step,
        cache: torch.Tensor,
        topk: int,
    ) -> Selection:
        """The ``topk`` best positions of each row; queries [T, heads * D] come unrotated, and may change."""

    def store_heads(
        self,
        qkv: torch.Tensor,
        num_heads: int,
        num_kv_heads: int,
        norms: tuple[Vector, Vector, float] | None,
        rotary_dim: int,
        scaling: float,
        step: Step,
        cache: LayerCache,
    ) -> Any:
        """Stores keys and values of [T, (heads + 2 kv_heads) * D]; queries, for :meth:`attend_heads`.

        ``norms`` are the weights for query and key heads, and eps. The first ``rotary_dim`` of each head of
        queries and keys are rotated, half against half.
        """

    def attend_heads(
        self, q: Any, cache: LayerCache, step: Step, num_kv_heads: int, scaling: float, window: int | None
    ) -> Rows:
        """Attention's result for each head: [T, heads * D]."""


def new_runtime(device: torch.device, max_in_features: int, num_threads: int) -> Runtime:
    """The runtime of a device, for weights [any, up to ``max_in_features``].

    Raises:
        ConfigError: DUCK_FORCE_ISA names no instruction set, or one that this machine lacks.
    """
    if device.type == "cuda":
        from duckllm.layers.cuda_runtime import CudaRuntime

        return CudaRuntime(device)
    from duckllm.layers.cpu_runtime import CpuRuntime

    return CpuRuntime.new(max_in_features, num_threads)
