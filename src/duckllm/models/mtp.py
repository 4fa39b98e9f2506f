"""The multi-token-prediction (MTP) layer of a checkpoint, which drafts the token after the next one.

It belongs to DeepSeek-V3 and V3.2, GLM-4.5 and GLM-5, and lies behind the layers that a token passes. Used
by :mod:`duckllm.engine.speculative`; a model without one pays nothing for it. Calls the layers of
:mod:`duckllm.models.causal_lm`, knows no engine and drafts no more than it is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from duckllm.errors import CheckpointError
from duckllm.layers.gqa import GQAShape
from duckllm.layers.linear import Linear
from duckllm.layers.mla import MLAShape
from duckllm.layers.norm import RMSNorm
from duckllm.layers.step import LayerCache, SequenceStep
from duckllm.models.causal_lm import CausalLM, DecoderLayer, Lane
from duckllm.models.step_times import StepTimes

if TYPE_CHECKING:
    from duckllm.layers.runtime import Step
    from duckllm.models.config import ModelConfig
    from duckllm.moe.executor import ExpertExecutor
    from duckllm.weights.host_tensors import HostTensors


class MTPLayer:
    """The layer of index ``num_hidden_layers``, over a model whose embedding, rotations and head it uses.

    With h_i what the model says of token i, after its last norm, and t_i+1 the token that follows:

        x_i = eh_proj [enorm(embedding of t_i+1), hnorm(h_i)]
        y_i = shared_head.norm(a decoder layer with routed experts, of x_1 .. x_i)

    and the model's head on y_i predicts t_i+2. Attention turns x_i by position i, as the model does h_i;
    counted from t_i+1's position it is the same, for angles between tokens are all that matters, and so whose
    position a row has is the caller's choice. Of several such layers the first is taken.

    Args:
        model: The loaded model.
        tensors: The host's tensors of the same converted model.
        experts: Who computes the layer's routed experts: one that has them. ``LocalExperts`` has every layer
            of a converted model; workers have what :func:`duckllm.moe.placement.plan_workers` gave them.

    Raises:
        CheckpointError: The checkpoint has no such layer, or a tensor of it is missing or misshapen.

    Reference:
        ``MtpModel`` of transformers in float32; tests/parity/test_mtp.py, 2e-3 on the logits.

    Source:
        DeepSeek-V3 Technical Report (arXiv 2412.19437), section 2.2, equations 21 to 23. It writes the hidden
        state first; checkpoints have eh_proj for the embedding first, as its name says. That h_i is
        normalised twice (the model's norm, then hnorm) is how the models were published and how the demo
        model is trained (examples/train-demo).
    """

    def __init__(self, model: CausalLM, tensors: HostTensors, experts: ExpertExecutor) -> None:
        config, self.model = model.config, model
        layer, size = config.num_hidden_layers, config.hidden_size
        prefix, eps = f"model.layers.{layer}", config.rms_norm_eps
        if f"{prefix}.eh_proj.weight" not in tensors:
            raise CheckpointError(
                f"{tensors.folder}: {prefix}: got none, expected a layer of multi-token prediction"
            )
        self._shape = draft_attention(config)
        self.embedding_norm = RMSNorm(tensors, f"{prefix}.enorm", size, eps, model.runtime)
        self.hidden_norm = RMSNorm(tensors, f"{prefix}.hnorm", size, eps, model.runtime)
        self.projection = Linear.load(tensors, f"{prefix}.eh_proj", size, 2 * size, runtime=model.runtime)
        extended = replace(
            config,
            attention=(*config.attention, self._shape),
            is_moe_layer=(*config.is_moe_layer, True),
        )
        self.layer = DecoderLayer(tensors, layer, extended, experts, model.runtime)
        self.norm = RMSNorm(tensors, f"{prefix}.shared_head.norm", size, eps, model.runtime)

    def new_kv_cache(self, max_tokens: int) -> LayerCache:
        """An empty cache for ``max_tokens`` tokens; see :meth:`CausalLM.new_kv_cache`.

        Shapes:
            result: the tensors that the layer's attention keeps, each [max_tokens, width]
        """
        return self.model.runtime.new_layer_cache(self._shape.cache_widths, max_tokens)

    @torch.inference_mode()
    def forward(
        self,
        hidden: torch.Tensor,
        token_ids: torch.Tensor,
        sequences: Sequence[SequenceStep],
        cache: LayerCache,
    ) -> torch.Tensor:
        """Hidden states for :meth:`CausalLM.compute_logits`, which predict the token after the next.

        Args:
            hidden: Of tokens of one context or several, from :meth:`CausalLM.forward`.
            token_ids: The token that follows each of these.
            sequences: The contexts and positions of ``hidden``, as :meth:`CausalLM.forward` was given them.
            cache: From :meth:`new_kv_cache`; holds each context's rows before its own of the step.

        Shapes:
            hidden: [T, H]; token_ids: [T] int64; result: [T, H], normalised

        Raises:
            WorkerLostError: A worker went away, or did not answer in time; the step may be repeated.
        """
        model, captured = self.model, self.model.captured
        with model.runtime.active():
            if captured is not None and captured.takes([(token_ids, sequences)], "draft"):
                return captured.draft(self, hidden, token_ids, sequences, cache)
            return self.advance(hidden, model.embed(token_ids), model.step_context(sequences), cache)

    def advance(
        self, hidden: torch.Tensor, embedded: torch.Tensor, step: Step, cache: LayerCache
    ) -> torch.Tensor:
        """As :meth:`forward`, with the embeddings [T, H] of the tokens that follow."""
        plain = self.model.runtime.plain
        joined = torch.cat((plain(self.embedding_norm(embedded)), plain(self.hidden_norm(hidden))), dim=-1)
        lane = Lane(0, step, self.projection(joined))
        times = StepTimes()
        self.layer.advance(lane, cache, times)
        return plain(lane.finish(self.norm, times))


def draft_attention(config: ModelConfig) -> MLAShape | GQAShape:
    """The last layer's; where that shares an earlier selection, with an indexer of its own all the same."""
    shape = config.attention[-1]
    if isinstance(shape, MLAShape) and shape.indexer is not None:
        return replace(shape, indexer=replace(shape.indexer, is_shared=False))
    return shape
