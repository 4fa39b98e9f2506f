"""DeepSeek-V3.2 in miniature, for training: MLA, DSA indexer, group-limited sigmoid MoE, one MTP layer.

Letters: B sequences, T tokens, H hidden size, E experts, K experts per token. Parameters are named as in
the official checkpoint, so that exporting is a matter of types.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCK = 128
E4M3_MAX = 448.0
INITIAL_STD = 0.02


@dataclass(frozen=True)
class ModelConfig:
    """Sizes, named as config.json names them."""

    vocab_size: int = 8192
    hidden_size: int = 256
    intermediate_size: int = 768
    moe_intermediate_size: int = 128
    num_hidden_layers: int = 6
    first_k_dense_replace: int = 1
    n_routed_experts: int = 32
    num_experts_per_tok: int = 4
    n_group: int = 4
    topk_group: int = 2
    routed_scaling_factor: float = 1.5
    num_attention_heads: int = 8
    q_lora_rank: int = 128
    kv_lora_rank: int = 64
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 16
    v_head_dim: int = 32
    index_n_heads: int = 4
    index_head_dim: int = 32
    index_topk: int = 128
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6

    @property
    def qk_head_dim(self) -> int:
        """Width of a query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True)
class Phase:
    """What the forward pass does, which changes in the course of training.

    Args:
        fake_quantise: Round FP8 weights as the exported checkpoint has them; gradients pass straight through.
        indexer: Run the indexer and compute its loss.
        sparse: Attend to the indexer's choice only.
    """

    fake_quantise: bool = False
    indexer: bool = False
    sparse: bool = False


def quantise_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight as e4m3 values and one scale per 128x128 block.

    Shapes: weight: [..., out, in]; values: the same, float8_e4m3fn; scales, f32: [..., ceil(out/128),
        ceil(in/128)].
    """
    *lead, rows, columns = weight.shape
    block_rows, block_columns = -(-rows // BLOCK), -(-columns // BLOCK)
    padding = (0, block_columns * BLOCK - columns, 0, block_rows * BLOCK - rows)
    blocks = F.pad(weight.float(), padding).view(*lead, block_rows, BLOCK, block_columns, BLOCK)
    scales = blocks.abs().amax((-3, -1), keepdim=True).clamp_min(1e-10) / E4M3_MAX
    values = (blocks / scales).to(torch.float8_e4m3fn)
    values = values.reshape(*lead, block_rows * BLOCK, block_columns * BLOCK)[..., :rows, :columns]
    return values, scales.squeeze(-1).squeeze(-2)


def dequantise_blocks(values: Tensor, scales: Tensor) -> Tensor:
    """The weight that values and block scales stand for, f32."""
    rows, columns = values.shape[-2:]
    wide = scales.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
    return values.float() * wide[..., :rows, :columns]


def rounded(weight: Tensor, phase: Phase) -> Tensor:
    """The weight as it will be exported, if the phase asks for it; its gradient is the weight's own."""
    if not phase.fake_quantise:
        return weight
    with torch.no_grad():
        change = dequantise_blocks(*quantise_blocks(weight)) - weight
    return weight + change


def random_weight(*shape: int) -> nn.Parameter:
    """A Gaussian parameter."""
    return nn.Parameter(torch.randn(*shape) * INITIAL_STD)


class Linear(nn.Module):
    """A linear layer without bias, exported in FP8."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = random_weight(out_features, in_features)

    def forward(self, x: Tensor, phase: Phase) -> Tensor:
        """The layer's output, in x's type."""
        return F.linear(x, rounded(self.weight, phase).to(x.dtype))


class RMSNorm(nn.Module):
    """Root mean square norm, computed in f32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        """The scaled input, in its type."""
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps).to(x.dtype)


@dataclass(frozen=True)
class RopeTables:
    """Cosines and sines of the rotary embedding, [T, rope / 2]."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def make(cls, config: ModelConfig, num_tokens: int, device: torch.device) -> RopeTables:
        """Tables for positions 0 to ``num_tokens - 1``."""
        size = config.qk_rope_head_dim
        exponent = torch.arange(0, size, 2, device=device).float() / size
        angle = torch.arange(num_tokens, device=device).float()[:, None] / config.rope_theta**exponent
        return cls(angle.cos(), angle.sin())

    def first(self, num_tokens: int) -> RopeTables:
        """The tables of the first positions."""
        return RopeTables(self.cos[:num_tokens], self.sin[:num_tokens])

    def interleaved(self, x: Tensor) -> Tensor:
        """Rotates pairs of neighbours: attention's way."""
        even, odd = x[..., 0::2].float(), x[..., 1::2].float()
        return torch.stack(self._rotate(even, odd), -1).flatten(-2).to(x.dtype)

    def halves(self, x: Tensor) -> Tensor:
        """Rotates the first half against the second: the indexer's way."""
        half = x.shape[-1] // 2
        return torch.cat(self._rotate(x[..., :half].float(), x[..., half:].float()), -1).to(x.dtype)

    def _rotate(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a * self.cos - b * self.sin, b * self.cos + a * self.sin


class Indexer(nn.Module):
    """Scores, for each query, how much each key matters."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.wq_b = Linear(config.q_lora_rank, config.index_n_heads * config.index_head_dim)
        self.wk = Linear(config.hidden_size, config.index_head_dim)
        self.k_norm = nn.LayerNorm(config.index_head_dim, eps=1e-6)
        self.weights_proj = nn.Linear(config.hidden_size, config.index_n_heads, bias=False)
        nn.init.normal_(self.weights_proj.weight, std=INITIAL_STD)

    def forward(self, x: Tensor, q_latent: Tensor, rope: RopeTables, phase: Phase) -> Tensor:
        """The scores [B, T, T] f32; later keys are not masked."""
        heads, size = self.config.index_n_heads, self.config.index_head_dim
        q = self.wq_b(q_latent, phase).unflatten(-1, (heads, size)).transpose(1, 2)
        k = self.k_norm(self.wk(x, phase).float())
        q, k = self._with_rope(q, rope), self._with_rope(k, rope)
        scores = F.relu(torch.einsum("bhtd,bsd->bhts", q.float(), k.float()) * size**-0.5)
        weights = F.linear(x.float(), self.weights_proj.weight.float()) * heads**-0.5
        return torch.einsum("bhts,bth->bts", scores, weights)

    def _with_rope(self, x: Tensor, rope: RopeTables) -> Tensor:
        size = self.config.qk_rope_head_dim
        return torch.cat((rope.halves(x[..., :size]), x[..., size:]), -1)


class Attention(nn.Module):
    """Multi-head latent attention; ``index_loss`` holds the indexer's loss of the last forward pass."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        hidden, heads = config.hidden_size, config.num_attention_heads
        self.q_a_proj = Linear(hidden, config.q_lora_rank)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.rms_norm_eps)
        self.q_b_proj = Linear(config.q_lora_rank, heads * config.qk_head_dim)
        self.kv_a_proj_with_mqa = Linear(hidden, config.kv_lora_rank + config.qk_rope_head_dim)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, config.rms_norm_eps)
        self.kv_b_proj = Linear(config.kv_lora_rank, heads * (config.qk_nope_head_dim + config.v_head_dim))
        self.o_proj = Linear(heads * config.v_head_dim, hidden)
        self.indexer = Indexer(config)
        self.index_loss: Tensor | None = None

    def forward(self, x: Tensor, rope: RopeTables, phase: Phase) -> Tensor:
        """Attention over the whole sequence [B, T, H]."""
        q_latent = self.q_a_layernorm(self.q_a_proj(x, phase))
        q, k, v = self._project(x, q_latent, rope, phase)
        if phase.indexer:
            scores = self.indexer(x.detach(), q_latent.detach(), rope, phase)
            out = self._attend_indexed(q, k, v, scores, phase)
        else:
            self.index_loss = None
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2), phase)

    def _project(
        self, x: Tensor, q_latent: Tensor, rope: RopeTables, phase: Phase
    ) -> tuple[Tensor, Tensor, Tensor]:
        config, heads = self.config, self.config.num_attention_heads
        nope, rank = config.qk_nope_head_dim, config.kv_lora_rank
        q = self.q_b_proj(q_latent, phase).unflatten(-1, (heads, -1)).transpose(1, 2)
        q = torch.cat((q[..., :nope], rope.interleaved(q[..., nope:])), -1)
        latent = self.kv_a_proj_with_mqa(x, phase)
        k_rope = rope.interleaved(latent[..., rank:])
        kv = self.kv_b_proj(self.kv_a_layernorm(latent[..., :rank]), phase)
        kv = kv.unflatten(-1, (heads, -1)).transpose(1, 2)
        k = torch.cat((kv[..., :nope], k_rope[:, None].expand(-1, heads, -1, -1)), -1)
        return q, k, kv[..., nope:]

    def _attend_indexed(self, q: Tensor, k: Tensor, v: Tensor, scores: Tensor, phase: Phase) -> Tensor:
        """Attention beside the indexer, whose loss is how far its choice is from attention's weights."""
        num_tokens, most = q.shape[2], self.config.index_topk
        causal = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~causal, float("-inf"))
        mask = causal[None]
        if phase.sparse and num_tokens > most:
            mask = causal & (scores >= scores.topk(most, -1).values[..., -1:])
        logits = (q.float() @ k.float().transpose(-1, -2)) * self.config.qk_head_dim**-0.5
        weights = logits.masked_fill(~mask[:, None], float("-inf")).softmax(-1)
        target = weights.detach().sum(1)
        target = target / target.sum(-1, keepdim=True)
        chosen = scores.masked_fill(~mask, float("-inf")).log_softmax(-1).masked_fill(~mask, 0)
        self.index_loss = (target * (target.clamp_min(1e-9).log() - chosen)).sum(-1).mean()
        return weights.to(v.dtype) @ v


class MLP(nn.Module):
    """A gated feed-forward layer."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, intermediate)
        self.up_proj = Linear(hidden, intermediate)
        self.down_proj = Linear(intermediate, hidden)

    def forward(self, x: Tensor, phase: Phase) -> Tensor:
        """down(silu(gate(x)) * up(x))."""
        return self.down_proj(F.silu(self.gate_proj(x, phase)) * self.up_proj(x, phase), phase)


class MoE(nn.Module):
    """Routed experts with a capacity of twice the even share, and one shared expert.

    ``load`` and ``balance_loss`` describe the last forward pass.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        experts, hidden = config.n_routed_experts, config.hidden_size
        intermediate = config.moe_intermediate_size
        self.gate = random_weight(experts, hidden)
        self.register_buffer("e_score_correction_bias", torch.zeros(experts))
        self.gate_proj = random_weight(experts, intermediate, hidden)
        self.up_proj = random_weight(experts, intermediate, hidden)
        self.down_proj = random_weight(experts, hidden, intermediate)
        self.shared_experts = MLP(hidden, intermediate)
        self.load = torch.zeros(experts)
        self.balance_loss = torch.zeros(())

    def forward(self, x: Tensor, phase: Phase) -> Tensor:
        """The chosen experts' weighted sum and the shared expert [B, T, H]."""
        rows = x.reshape(-1, x.shape[-1])
        topk_ids, topk_weights = self._route(rows)
        out = self._experts(rows, topk_ids, topk_weights, phase)
        return (out.to(x.dtype) + self.shared_experts(rows, phase)).view_as(x)

    def _route(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        config = self.config
        scores = F.linear(rows.float(), self.gate.float()).sigmoid()
        choice = scores + self.e_score_correction_bias
        groups = choice.unflatten(-1, (config.n_group, -1)).topk(2, -1).values.sum(-1)
        best = groups.topk(config.topk_group, -1).indices
        allowed = torch.zeros_like(groups, dtype=torch.bool).scatter_(1, best, True)
        allowed = allowed.repeat_interleave(config.n_routed_experts // config.n_group, 1)
        topk_ids = choice.masked_fill(~allowed, float("-inf")).topk(config.num_experts_per_tok, -1).indices
        weights = scores.gather(1, topk_ids)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * config.routed_scaling_factor
        self.load = torch.bincount(topk_ids.flatten(), minlength=config.n_routed_experts).float()
        share = (scores / scores.sum(-1, keepdim=True)).mean(0)
        self.balance_loss = share @ (self.load / topk_ids.numel()) * config.n_routed_experts
        return topk_ids, weights

    def _experts(self, rows: Tensor, topk_ids: Tensor, topk_weights: Tensor, phase: Phase) -> Tensor:
        """Sorts tokens by expert into buffers of equal size; what does not fit is dropped."""
        experts, hidden = self.config.n_routed_experts, rows.shape[-1]
        flat = topk_ids.flatten()
        order = flat.argsort(stable=True)
        expert, token = flat[order], order // topk_ids.shape[1]
        count = torch.bincount(flat, minlength=experts)
        capacity = int(flat.numel() / experts * 2.0)
        slot = torch.arange(flat.numel(), device=rows.device) - (count.cumsum(0) - count)[expert]
        dropped = experts * capacity
        place = torch.where(slot < capacity, expert * capacity + slot, dropped)
        buffer = rows.new_zeros(dropped + 1, hidden).index_copy(0, place, rows[token])
        x = buffer[:-1].view(experts, capacity, hidden)
        gate, up, down = (
            rounded(weight, phase).to(x.dtype).transpose(1, 2)
            for weight in (self.gate_proj, self.up_proj, self.down_proj)
        )
        y = torch.bmm(F.silu(torch.bmm(x, gate)) * torch.bmm(x, up), down).view(dropped, hidden)
        y = torch.cat((y, y.new_zeros(1, hidden)))[place].float() * topk_weights.flatten()[order, None]
        return torch.zeros(rows.shape, device=rows.device).index_add_(0, token, y)


class Block(nn.Module):
    """A layer: attention, then a feed-forward or mixture-of-experts part."""

    def __init__(self, config: ModelConfig, is_moe: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MoE(config) if is_moe else MLP(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, rope: RopeTables, phase: Phase) -> Tensor:
        """Both parts, each added to its input."""
        x = x + self.self_attn(self.input_layernorm(x), rope, phase)
        return x + self.mlp(self.post_attention_layernorm(x), phase)


class Model(nn.Module):
    """The whole model with its MTP layer, which predicts the token after the next."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        nn.init.normal_(self.embed_tokens.weight, std=INITIAL_STD)
        self.layers = nn.ModuleList(
            Block(config, layer >= config.first_k_dense_replace) for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(hidden, eps)
        self.lm_head = nn.Linear(hidden, config.vocab_size, bias=False)
        nn.init.normal_(self.lm_head.weight, std=INITIAL_STD)
        self.enorm, self.hnorm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.eh_proj = Linear(2 * hidden, hidden)
        self.mtp = Block(config, is_moe=True)
        self.mtp_norm = RMSNorm(hidden, eps)

    def forward(self, ids: Tensor, phase: Phase) -> tuple[Tensor, Tensor]:
        """Hidden states for the next token, and the MTP layer's for the one after.

        Shapes: ids: [B, T]; results: [B, T, H] and [B, T - 1, H].
        """
        num_tokens = ids.shape[1]
        rope = RopeTables.make(self.config, num_tokens, ids.device)
        x = self.embed_tokens(ids)
        if ids.is_cuda:
            x = x.to(torch.bfloat16)
        for layer in self.layers:
            x = layer(x, rope, phase)
        hidden = self.norm(x)
        following = self.enorm(self.embed_tokens(ids[:, 1:]).to(hidden.dtype))
        draft = self.eh_proj(torch.cat((following, self.hnorm(hidden[:, :-1])), -1), phase)
        return hidden, self.mtp_norm(self.mtp(draft, rope.first(num_tokens - 1), phase))

    def blocks(self) -> list[Block]:
        """Every layer, the MTP layer last."""
        return [*self.layers, self.mtp]

    def moes(self) -> list[MoE]:
        """Every mixture-of-experts part."""
        return [block.mlp for block in self.blocks() if isinstance(block.mlp, MoE)]
