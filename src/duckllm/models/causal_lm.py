"""A model on the host: everything but the routed experts, for every family.

Called by the engine, through :mod:`duckllm.models.registry`; calls the layers and an expert executor. Knows
no worker, request or text. What sets a family apart is in its :class:`ModelConfig`, which the family's module
makes. The multi-token-prediction layer of a checkpoint is not part of it; :mod:`duckllm.models.mtp` has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from duckllm.layers.gqa import GQAShape, GQAttention
from duckllm.layers.linear import GatedMLP, Linear, load_tensor
from duckllm.layers.mla import MLAShape, MLAttention
from duckllm.layers.norm import RMSNorm
from duckllm.layers.rope import RotaryTable
from duckllm.layers.runtime import Rows, Runtime, Step, new_runtime
from duckllm.layers.step import LayerCache, SequenceStep
from duckllm.models.config import ModelConfig
from duckllm.models.step_times import StepTimes
from duckllm.moe.router import GroupLimitedRouter, SoftmaxRouter, SoftmaxRouting

if TYPE_CHECKING:
    from duckllm.models.captured import CapturedSteps
    from duckllm.moe.executor import ExpertExecutor, PendingStep
    from duckllm.weights.host_tensors import HostTensors


CPU = torch.device("cpu")


def runtime_for(config: ModelConfig, device: torch.device) -> Runtime:
    """What computes the layers; on a CPU with PyTorch's number of threads, and room for the widest input."""
    widest = max(
        2 * config.hidden_size,  # eh_proj of a multi-token-prediction layer
        config.intermediate_size,
        config.shared.intermediate_size if config.shared else 0,
        *(shape.max_in_features for shape in config.attention),
    )
    return new_runtime(device, widest, torch.get_num_threads())


class MoEBlock:
    """Routed experts, computed elsewhere, plus the shared expert, computed here meanwhile."""

    def __init__(
        self,
        tensors: HostTensors,
        prefix: str,
        layer: int,
        config: ModelConfig,
        experts: ExpertExecutor,
        runtime: Runtime,
    ) -> None:
        self.layer, self.experts, self._runtime = layer, experts, runtime
        self.router = _load_router(tensors, f"{prefix}.gate", config, runtime)
        self.shared: GatedMLP | None = None
        if config.shared:
            self.shared = GatedMLP(
                tensors,
                f"{prefix}.{config.shared.name}",
                config.hidden_size,
                config.shared.intermediate_size,
                runtime,
                f"{prefix}.{config.shared.gate}" if config.shared.gate else None,
            )

    def submit(self, x: Rows, lane: int, times: StepTimes) -> PendingMLP:
        """Sends the tokens [T, H] to their experts, and computes the shared one."""
        logits, runtime = self.router.gate(x), self._runtime
        fork = runtime.fork()
        routed = self.experts.submit(self.layer, runtime.plain(x), *self.router.choose(logits), lane)
        times.lap("dispatch_s")
        shared = None
        if self.shared is not None:
            with runtime.beside(fork):
                shared = self.shared(x)
        times.lap("dense_s")
        return PendingMLP(routed, shared, x, runtime)


class PendingMLP:
    """The output of routed and shared experts, of which the first may still be on its way.

    Args:
        routed: The step at the routed experts.
        shared: The shared expert's output.
        x: What both are computed of, which is kept for them.
        runtime: Computes the shared expert, maybe beside the lane.
    """

    def __init__(self, routed: PendingStep, shared: torch.Tensor | None, x: Rows, runtime: Runtime) -> None:
        self._routed, self._shared, self._x, self._runtime = routed, shared, x, runtime

    def wait(self, times: StepTimes) -> tuple[torch.Tensor, ...]:
        """What makes the output for tokens [T, H], without the residual: one part, or two to be added."""
        routed = self._routed.wait()
        if self._shared is not None:  # a GPU may still be at it while the sum comes
            self._runtime.join()
        times.lap("wait_s")
        return (routed,) if self._shared is None else (routed, self._shared)


def _load_router(
    tensors: HostTensors, prefix: str, config: ModelConfig, runtime: Runtime
) -> GroupLimitedRouter | SoftmaxRouter:
    gate = Linear.load(tensors, prefix, config.num_experts, config.hidden_size, runtime=runtime)
    if isinstance(config.routing, SoftmaxRouting):
        return SoftmaxRouter(gate, config.routing, runtime)
    shape = (config.num_experts,)
    bias = load_tensor(tensors, f"{prefix}.e_score_correction_bias", shape, torch.float32)
    return GroupLimitedRouter(gate, runtime.vector(bias), config.routing, runtime)


def _load_attention(
    tensors: HostTensors,
    prefix: str,
    shape: MLAShape | GQAShape,
    runtime: Runtime,
) -> MLAttention | GQAttention:
    if isinstance(shape, GQAShape):
        return GQAttention(tensors, prefix, shape, runtime)
    return MLAttention(tensors, prefix, shape, runtime)


class DecoderLayer:
    """Attention and MLP, each behind a norm and added to what came in."""

    def __init__(
        self,
        tensors: HostTensors,
        layer: int,
        config: ModelConfig,
        experts: ExpertExecutor,
        runtime: Runtime,
    ) -> None:
        prefix = f"model.layers.{layer}"
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(tensors, f"{prefix}.input_layernorm", size, eps, runtime)
        self.attention = _load_attention(tensors, f"{prefix}.self_attn", config.attention[layer], runtime)
        self.mlp_norm = RMSNorm(tensors, f"{prefix}.post_attention_layernorm", size, eps, runtime)
        self.mlp: MoEBlock | GatedMLP = (
            MoEBlock(tensors, f"{prefix}.{config.moe_block}", layer, config, experts, runtime)
            if config.is_moe_layer[layer]
            else GatedMLP(tensors, f"{prefix}.mlp", size, config.intermediate_size, runtime)
        )

    def advance(self, lane: Lane, cache: LayerCache, times: StepTimes) -> None:
        """Takes a lane through the layer up to where it waits for experts; its tokens go into the cache."""
        hidden, x = self.input_norm.add(lane.hidden, lane.take(times))
        lane.hidden, x = self.mlp_norm.add(hidden, (self.attention(x, lane.step, cache),))
        times.lap("attention_s")
        if isinstance(self.mlp, MoEBlock):
            lane.pending = self.mlp.submit(x, lane.number, times)
        else:
            lane.deltas = (self.mlp(x),)
            times.lap("dense_s")


class Lane:
    """One of the micro-batches of a step on its way through the layers.

    Args:
        number: Which.
        step: Its contexts.
        hidden: What it is before the next layer, but for an MLP that is still computed.

    Shapes:
        hidden: [T, H]
    """

    def __init__(self, number: int, step: Step, hidden: torch.Tensor) -> None:
        self.number, self.step, self.hidden = number, step, hidden
        self.pending: PendingMLP | None = None
        # The last MLP's output, which is not yet in the hidden state: none, one, or two that are to be added.
        self.deltas: tuple[torch.Tensor, ...] = ()

    def take(self, times: StepTimes) -> tuple[torch.Tensor, ...]:
        """What the last MLP adds to the hidden state, [T, H] each, waited for; none before layer 0."""
        deltas, self.deltas = self.deltas, ()
        if self.pending is not None:
            deltas, self.pending = self.pending.wait(times), None
        return deltas

    def finish(self, norm: RMSNorm, times: StepTimes) -> Rows:
        """The hidden state [T, H] with the last MLP's output, normalised."""
        self.hidden, rows = norm.add(self.hidden, self.take(times))
        times.lap("combine_s")
        return rows


class CausalLM:
    """The host's part of a model, in float32.

    Args:
        config: The checked configuration.
        tensors: The host's tensors of the converted model.
        experts: Who computes the routed experts.
        max_tokens: The longest context, for the table of rotations.
        device: Where it is computed.

    Reference:
        The family's ``ForCausalLM`` of transformers in float32 with eager attention; tests/parity, 2e-3 on
        the logits.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: HostTensors,
        experts: ExpertExecutor,
        *,
        max_tokens: int,
        device: torch.device = CPU,
    ) -> None:
        self.config, self.max_tokens = config, max_tokens
        vocabulary = (config.vocab_size, config.hidden_size)
        self.runtime = runtime = runtime_for(config, device)
        # As it is stored: of each token one row is read, and converted then.
        self.embedding = load_tensor(tensors, "model.embed_tokens.weight", vocabulary, None)
        self.layers = [
            DecoderLayer(tensors, layer, config, experts, runtime)
            for layer in range(config.num_hidden_layers)
        ]
        self.norm = RMSNorm(tensors, "model.norm", config.hidden_size, config.rms_norm_eps, runtime)
        head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
        self.head = Linear.load(tensors, head, *vocabulary, runtime=runtime)
        self.rotary = RotaryTable(config.rotary.inv_freq, config.rotary.attention_scaling, max_tokens)
        self.captured: CapturedSteps | None = None
        if device.type == "cuda":
            from duckllm.models.captured import CapturedSteps

            self.captured = CapturedSteps(self, experts)

    def new_kv_cache(self, max_tokens: int) -> list[LayerCache]:
        """An empty cache for ``max_tokens`` tokens; memory is taken by the system only as it is written.

        Shapes:
            result: for each layer the tensors that its attention keeps, each [max_tokens, width]
        """
        return [
            self.runtime.new_layer_cache(shape.cache_widths, max_tokens) for shape in self.config.attention
        ]

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The embeddings of tokens: [T] int64 on the CPU to [T, H] f32 on the device."""
        return F.embedding(token_ids, self.embedding).float().to(self.runtime.device)

    def step_context(self, sequences: Sequence[SequenceStep]) -> Step:
        """What the layers share of a step: the contexts, and the rotations of their tokens' positions."""
        return self.runtime.new_step(sequences, self.rotary)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        sequences: Sequence[SequenceStep],
        kv_cache: list[LayerCache],
        times: StepTimes | None = None,
    ) -> torch.Tensor:
        """The hidden states of tokens of one context or several, which are added to the cache.

        Args:
            token_ids: The tokens, context by context.
            sequences: The contexts, in the order of their rows.
            kv_cache: From :meth:`new_kv_cache`; holds the tokens of each context before its own of the step.
            times: Where the time that each part took is added to.

        Shapes:
            token_ids: [T] int64; result: [T, H], normalised

        Raises:
            WorkerLostError: A worker went away, or did not answer in time; the step may be repeated.
        """
        return self.forward_lanes([(token_ids, sequences)], kv_cache, times)

    @torch.inference_mode()
    def forward_lanes(
        self,
        lanes: Sequence[tuple[torch.Tensor, Sequence[SequenceStep]]],
        kv_cache: list[LayerCache],
        times: StepTimes | None = None,
    ) -> torch.Tensor:
        """As :meth:`forward`, of a step in lanes: while one's experts are computed, another's attention is.

        Args:
            lanes: Tokens and contexts of each. Where a context is in two of them, the earlier tokens are in
                the earlier one, which is ahead in every layer.
            kv_cache: As for :meth:`forward`.
            times: As for :meth:`forward`.

        Shapes:
            result: [T, H], normalised, lane behind lane

        Raises:
            WorkerLostError: As for :meth:`forward`.
        """
        times = times or StepTimes()
        times.start()
        with self.runtime.active():
            if self.captured is not None and self.captured.takes(lanes):
                hidden = self.captured.forward(lanes, kv_cache)
                times.lap("device_s")
                return hidden
            running = [
                Lane(number, self.step_context(sequences), self.embed(token_ids))
                for number, (token_ids, sequences) in enumerate(lanes)
            ]
            return self.advance(running, kv_cache, times)

    def advance(
        self,
        running: Sequence[Lane],
        kv_cache: Sequence[LayerCache],
        times: StepTimes,
        after: Callable[[int], None] = lambda layer: None,
    ) -> torch.Tensor:
        """Takes lanes through all layers; the hidden states [T, H], normalised, lane behind lane.

        Args:
            running: The lanes.
            kv_cache: Of each layer.
            times: Where the time that each part took is added to.
            after: Called behind each layer but the last one with its number.
        """
        for number, (layer, cache) in enumerate(zip(self.layers, kv_cache, strict=False)):
            if number:
                after(number - 1)
            for lane in running:
                with self.runtime.lane(lane.number):
                    layer.advance(lane, cache, times)
        normalised = []
        for lane in running:
            with self.runtime.lane(lane.number):
                normalised.append(self.runtime.plain(lane.finish(self.norm, times)))
        return self.runtime.gather(normalised)

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor, rows: Sequence[int] | None = None) -> torch.Tensor:
        """The logits of the next token after each of these, or after those in ``rows``.

        Shapes:
            hidden: [T, H] from :meth:`forward`; result: [T or len(rows), V] f32, on the CPU
        """
        with self.runtime.active():
            logits = None if self.captured is None else self.captured.logits_of(hidden, rows)
            if logits is not None:
                return logits
            return self.runtime.to_cpu(self.head(hidden if rows is None else hidden[rows]))
