"""DeepSeek-V3.2 on the host: everything of the model but the routed experts.

Called by the engine, through :mod:`duckllm.models.registry`; calls the layers and an expert executor. Knows
no worker, request or text. The multi-token-prediction layer of a checkpoint is not loaded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from duckllm.errors import CheckpointError, UnsupportedModelError
from duckllm.layers.linear import GatedMLP, Linear, load_tensor
from duckllm.layers.mla import LatentCache, MLAShape, MLAttention
from duckllm.layers.norm import RMSNorm
from duckllm.layers.rope import RotaryTable
from duckllm.layers.runtime import LinearRuntime
from duckllm.moe.router import GroupLimitedRouter
from duckllm.text.quiet import quiet_transformers
from duckllm.weights.architectures import check_bounds
from duckllm.weights.checkpoint import load_json

if TYPE_CHECKING:
    from duckllm.moe.executor import ExpertExecutor
    from duckllm.weights.host_tensors import HostTensors

# Features of config.json that have one supported value; an absent one has it.
_ONLY = {
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "mlp_bias": False,
    "rope_interleave": True,
}
# What transformers and Python raise on values that they did not foresee; RecursionError is a RuntimeError.
_UNREADABLE = (
    *(TypeError, ValueError, AttributeError, LookupError, ArithmeticError, MemoryError),
    *(RuntimeError, AssertionError),
)
_SHOWN_CHARS = 300
_ROPE_TYPES = ("default", "yarn")
# One kind of layer; older transformers (5.17) give it the second name.
_SPARSE_LAYER_TYPES = ("indexed_attention", "deepseek_sparse_attention")


@dataclass(frozen=True)
class DeepseekV32Config:
    """The configuration of one checkpoint, checked; names as in config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    is_moe_layer: tuple[bool, ...]
    n_shared_experts: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention: MLAShape
    inv_freq: torch.Tensor
    rope_attention_scaling: float

    @classmethod
    def load(cls, folder: Path) -> DeepseekV32Config:
        """Reads ``config.json``.

        Raises:
            CheckpointError: The file is missing or malformed, or a value contradicts another.
            UnsupportedModelError: A feature that this implementation does not have, by name.
        """
        from huggingface_hub.errors import StrictDataclassError
        from transformers import DeepseekV32Config as Parser

        check_bounds(load_json(Path(folder) / "config.json"))
        with quiet_transformers():
            try:
                parsed = Parser.from_pretrained(folder, local_files_only=True)
            except (*_UNREADABLE, OSError, StrictDataclassError) as error:
                raise _unreadable(error, f"{Path(folder) / 'config.json'}") from error
            return cls.from_parsed(parsed)

    @classmethod
    def from_parsed(cls, parsed: Any) -> DeepseekV32Config:
        """Checks a configuration that transformers has parsed. Raises as :meth:`load`."""
        try:
            return cls._from_parsed(parsed)
        except _UNREADABLE as error:
            raise _unreadable(error) from error

    @classmethod
    def _from_parsed(cls, parsed: Any) -> DeepseekV32Config:
        _check_supported(parsed)
        _check_consistent(parsed)
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        rope = parsed.rope_parameters
        rope_dim = parsed.qk_rope_head_dim
        scaling = (parsed.qk_nope_head_dim + rope_dim) ** -0.5
        if rope["rope_type"] == "yarn":
            inv_freq, attention_scaling = ROPE_INIT_FUNCTIONS["yarn"](parsed, torch.device("cpu"))
            scaling *= _yarn_mscale(rope["factor"], rope.get("mscale_all_dim") or 0) ** 2
        else:
            exponents = torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim
            inv_freq, attention_scaling = 1.0 / rope["rope_theta"] ** exponents, 1.0
        if not (bool(torch.isfinite(inv_freq).all()) and math.isfinite(attention_scaling * scaling)):
            raise CheckpointError(
                f"config.json: rope_scaling: got {dict(rope)!r}, expected values that give finite rotations"
            )
        return cls(
            vocab_size=parsed.vocab_size,
            hidden_size=parsed.hidden_size,
            intermediate_size=parsed.intermediate_size,
            moe_intermediate_size=parsed.moe_intermediate_size,
            num_hidden_layers=parsed.num_hidden_layers,
            is_moe_layer=tuple(kind == "sparse" for kind in parsed.mlp_layer_types),
            n_shared_experts=parsed.n_shared_experts,
            n_routed_experts=parsed.n_routed_experts,
            num_experts_per_tok=parsed.num_experts_per_tok,
            n_group=parsed.n_group,
            topk_group=parsed.topk_group,
            norm_topk_prob=parsed.norm_topk_prob,
            routed_scaling_factor=parsed.routed_scaling_factor,
            rms_norm_eps=parsed.rms_norm_eps,
            max_position_embeddings=parsed.max_position_embeddings,
            tie_word_embeddings=parsed.tie_word_embeddings,
            attention=MLAShape(
                hidden_size=parsed.hidden_size,
                num_heads=parsed.num_attention_heads,
                q_lora_rank=parsed.q_lora_rank,
                kv_lora_rank=parsed.kv_lora_rank,
                qk_nope_head_dim=parsed.qk_nope_head_dim,
                qk_rope_head_dim=rope_dim,
                v_head_dim=parsed.v_head_dim,
                scaling=scaling,
                attention_bias=parsed.attention_bias,
                index_num_heads=parsed.index_n_heads,
                index_head_dim=parsed.index_head_dim,
                index_topk=parsed.index_topk,
            ),
            inv_freq=inv_freq,
            rope_attention_scaling=attention_scaling,
        )

    @property
    def cache_elements_per_token(self) -> int:
        """Numbers that the KV cache holds for one token, over all layers."""
        shape = self.attention
        return self.num_hidden_layers * (shape.kv_lora_rank + shape.qk_rope_head_dim + shape.index_head_dim)


def _unreadable(error: BaseException, name: str = "config.json") -> CheckpointError:
    """The first of what the parser says, which may repeat itself and shows values of any length."""
    detail = " ".join(str(error).split()).partition(" Errors: ")[0] or type(error).__name__
    if len(detail) > _SHOWN_CHARS:
        detail = detail[: _SHOWN_CHARS - 3] + "..."
    return CheckpointError(f"{name}: cannot be read: {detail}")


def _yarn_mscale(factor: float, mscale_all_dim: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale_all_dim * math.log(factor) + 1.0


def _check_supported(parsed: Any) -> None:
    for field, supported in _ONLY.items():
        got = getattr(parsed, field, supported)
        if got != supported:
            raise UnsupportedModelError(f"config.json: {field}: got {got!r}, expected {supported!r}")
    rope_type = (parsed.rope_parameters or {}).get("rope_type")
    if rope_type not in _ROPE_TYPES:
        raise UnsupportedModelError(
            f"config.json: rope_scaling type: got {rope_type!r}, expected one of {', '.join(_ROPE_TYPES)}"
        )
    if parsed.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
        got = parsed.rope_parameters["partial_rotary_factor"]
        raise UnsupportedModelError(f"config.json: partial_rotary_factor: got {got!r}, expected 1.0")
    factor = parsed.rope_parameters.get("factor", 1.0)
    if not (isinstance(factor, (int, float)) and 1 <= factor < math.inf):
        raise CheckpointError(f"config.json: rope_scaling factor: got {factor!r}, expected a number from 1")
    if parsed.num_key_value_heads != parsed.num_attention_heads:
        raise UnsupportedModelError(
            f"config.json: num_key_value_heads: got {parsed.num_key_value_heads}, "
            f"expected num_attention_heads, {parsed.num_attention_heads}"
        )
    unknown = set(parsed.layer_types or ()) - set(_SPARSE_LAYER_TYPES)
    if unknown:
        raise UnsupportedModelError(
            f"config.json: layer_types: got {sorted(unknown)}, expected {_SPARSE_LAYER_TYPES[0]} alone"
        )


def _check_consistent(parsed: Any) -> None:
    def require(field: str, condition: bool, expected: str) -> None:
        if not condition:
            raise CheckpointError(
                f"config.json: {field}: got {getattr(parsed, field)!r}, expected {expected}"
            )

    for field in (
        *("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers"),
        *("num_attention_heads", "n_routed_experts", "num_experts_per_tok", "n_group", "topk_group"),
        *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        *("index_topk", "index_n_heads", "index_head_dim", "max_position_embeddings"),
    ):
        value = getattr(parsed, field)
        require(field, isinstance(value, int) and value >= 1, "an integer of at least 1")
    experts, groups = parsed.n_routed_experts, parsed.n_group
    require("n_group", experts % groups == 0, f"a divisor of n_routed_experts, {experts}")
    require("n_group", experts // groups >= 2, f"at most half of n_routed_experts, {experts}")
    require("topk_group", parsed.topk_group <= groups, f"at most n_group, {groups}")
    candidates = parsed.topk_group * (experts // groups)
    require("num_experts_per_tok", parsed.num_experts_per_tok <= candidates, f"at most {candidates}")
    require("qk_rope_head_dim", parsed.qk_rope_head_dim % 2 == 0, "an even number")
    require("index_head_dim", parsed.index_head_dim >= parsed.qk_rope_head_dim, "at least qk_rope_head_dim")
    require("n_shared_experts", (parsed.n_shared_experts or 0) >= 0, "0 or more")
    kinds = parsed.mlp_layer_types
    require("mlp_layer_types", len(kinds) == parsed.num_hidden_layers, "one entry a layer")
    require("mlp_layer_types", set(kinds) <= {"dense", "sparse"}, "dense or sparse for each layer")


def _linear_runtime(config: DeepseekV32Config) -> LinearRuntime:
    """The native linear layers' threads, as many as PyTorch has, and scratch for the widest input."""
    shape = config.attention
    return LinearRuntime.new(
        max(
            config.hidden_size,
            config.intermediate_size,
            config.moe_intermediate_size * config.n_shared_experts,
            shape.q_lora_rank,
            shape.num_heads * shape.v_head_dim,
        ),
        torch.get_num_threads(),
    )


class MoEBlock:
    """Routed experts, computed elsewhere, plus the shared expert, computed here meanwhile."""

    def __init__(
        self,
        tensors: HostTensors,
        prefix: str,
        layer: int,
        config: DeepseekV32Config,
        experts: ExpertExecutor,
        dtype: torch.dtype,
        runtime: LinearRuntime | None,
    ) -> None:
        self.layer, self.experts = layer, experts
        num_experts, hidden_size = config.n_routed_experts, config.hidden_size
        self.router = GroupLimitedRouter(
            load_tensor(tensors, f"{prefix}.gate.weight", (num_experts, hidden_size), torch.float32),
            load_tensor(tensors, f"{prefix}.gate.e_score_correction_bias", (num_experts,), torch.float32),
            num_groups=config.n_group,
            topk_group=config.topk_group,
            top_k=config.num_experts_per_tok,
            normalize=config.norm_topk_prob,
            scaling_factor=config.routed_scaling_factor,
        )
        self.shared: GatedMLP | None = None
        if config.n_shared_experts:
            shared_size = config.moe_intermediate_size * config.n_shared_experts
            self.shared = GatedMLP(
                tensors, f"{prefix}.shared_experts", hidden_size, shared_size, dtype, runtime
            )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output for tokens [T, H], without the residual."""
        pending = self.experts.submit(self.layer, x.float(), *self.router(x))
        shared = self.shared(x) if self.shared is not None else None
        routed = pending.wait().to(x.dtype)
        return routed if shared is None else shared.add_(routed)


class DecoderLayer:
    """Attention and MLP, each behind a norm and added to what came in."""

    def __init__(
        self,
        tensors: HostTensors,
        layer: int,
        config: DeepseekV32Config,
        experts: ExpertExecutor,
        dtype: torch.dtype,
        runtime: LinearRuntime | None,
    ) -> None:
        prefix = f"model.layers.{layer}"
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(tensors, f"{prefix}.input_layernorm", size, eps)
        self.attention = MLAttention(tensors, f"{prefix}.self_attn", config.attention, dtype, runtime)
        self.mlp_norm = RMSNorm(tensors, f"{prefix}.post_attention_layernorm", size, eps)
        self.mlp: MoEBlock | GatedMLP = (
            MoEBlock(tensors, f"{prefix}.mlp", layer, config, experts, dtype, runtime)
            if config.is_moe_layer[layer]
            else GatedMLP(tensors, f"{prefix}.mlp", size, config.intermediate_size, dtype, runtime)
        )


class DeepseekV32ForCausalLM:
    """The host's part of a DeepSeek-V3.2 model.

    Args:
        config: The checked configuration.
        tensors: The host's tensors of the converted model.
        experts: Who computes the routed experts.
        max_tokens: The longest context, for the table of rotations.
        dtype: Of weights and activations; norms, routing, softmax and the sums of experts are float32 always.

    Reference:
        ``DeepseekV32ForCausalLM`` of transformers in float32 with eager attention; tests/parity, 2e-3 on the
        logits.
    """

    def __init__(
        self,
        config: DeepseekV32Config,
        tensors: HostTensors,
        experts: ExpertExecutor,
        *,
        max_tokens: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.config, self.dtype, self.max_tokens = config, dtype, max_tokens
        vocabulary = (config.vocab_size, config.hidden_size)
        runtime = _linear_runtime(config) if dtype == torch.float32 else None
        # As it is stored: of each token one row is read, and converted then.
        self.embedding = load_tensor(tensors, "model.embed_tokens.weight", vocabulary, None)
        self.layers = [
            DecoderLayer(tensors, layer, config, experts, dtype, runtime)
            for layer in range(config.num_hidden_layers)
        ]
        self.norm = RMSNorm(tensors, "model.norm", config.hidden_size, config.rms_norm_eps)
        head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
        self.head = Linear.load(tensors, head, *vocabulary, dtype, runtime=runtime)
        self.rotary = RotaryTable(config.inv_freq, config.rope_attention_scaling, max_tokens)

    def new_kv_cache(self, max_tokens: int) -> LatentCache:
        """An empty cache for ``max_tokens`` tokens."""
        shape = self.config.attention
        latent_dim = shape.kv_lora_rank + shape.qk_rope_head_dim
        return LatentCache.allocate(
            self.config.num_hidden_layers, max_tokens, latent_dim, shape.index_head_dim, self.dtype
        )

    @torch.inference_mode()
    def forward(self, token_ids: torch.Tensor, start: int, kv_cache: LatentCache) -> torch.Tensor:
        """The hidden states of consecutive tokens, which are added to the cache.

        Args:
            token_ids: The tokens at positions [start, start + T).
            start: Number of tokens that the cache holds already.
            kv_cache: From :meth:`new_kv_cache`; holds the tokens at positions [0, start).

        Shapes:
            token_ids: [T] int64; result: [T, H], normalised

        Raises:
            WorkerLostError: A worker went away, or did not answer in time; the step may be repeated.
        """
        positions = torch.arange(start, start + token_ids.shape[0])
        cos, sin = self.rotary.rows(positions)
        hidden = F.embedding(token_ids, self.embedding).to(self.dtype)
        for index, layer in enumerate(self.layers):
            latents, index_keys = kv_cache.latents[index], kv_cache.index_keys[index]
            hidden = hidden + layer.attention(layer.input_norm(hidden), cos, sin, latents, index_keys, start)
            hidden = hidden + layer.mlp(layer.mlp_norm(hidden))
        return self.norm(hidden)

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits of the next token after each of these.

        Shapes:
            hidden: [T, H] from :meth:`forward`; result: [T, V] f32
        """
        return self.head(hidden).float()
