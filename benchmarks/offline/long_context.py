"""Decode at long contexts: the demo model, and a layer of DeepSeek-V3.2's widths, sparse and dense.

    python benchmarks/offline/long_context.py [--rounds 9] [--contexts 2048 4096 8192 16384 32768]

The program

1. verifies that the demo model's logits are the same whether a context was prefilled in chunks or decoded
   token by token, and that the wide layer, whose weights are random, gives a row the same bits alone as
   beside another,
2. measures the demo's time for a token behind 128 to 4000 tokens, and of the wide layer's attention the
   whole, the choice of the selected tokens (the indexer) and the attention to them,
   with sparse attention and without,
3. prints the ceiling beside each: the bytes that a token reads at the speed of a plain read by one thread, or
   its multiply-adds at the speed of a large f32 matrix product, whichever takes longer, both measured here,
4. prints one JSON line.

Every figure is the median of the rounds, on one thread. The indexer's part grows with the context, as every
index key is read; the attention's grows up to index_topk.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from decode import bytes_per_token, read_gb_per_s

from duckllm.bench.machine import commit, cpu_name
from duckllm.config import available_cores
from duckllm.layers.cpu_runtime import CpuRuntime
from duckllm.layers.indexer import IndexerShape
from duckllm.layers.mla import MLAShape, MLAttention
from duckllm.layers.rope import RotaryTable
from duckllm.layers.step import SequenceStep, StepContext
from duckllm.models.causal_lm import CausalLM
from duckllm.models.registry import load_config, load_model
from duckllm.moe.local import LocalExperts
from duckllm.weights.architectures import layout_of
from duckllm.weights.host_tensors import HostTensors
from duckllm.weights.manifest import Manifest
from duckllm.weights.resolve import resolve_model

DEMO_CONTEXTS = (128, 256, 512, 1024, 2048, 4000)
STEP_TOKENS = 256
READ_BYTES = 512 << 20
GEMM = 1536
# DeepSeek-V3.2's config.json, as far as one dense layer needs it.
WIDE = {
    "architectures": ["DeepseekV32ForCausalLM"],
    **{"vocab_size": 1, "hidden_size": 7168, "intermediate_size": 1, "moe_intermediate_size": 1},
    **{"num_hidden_layers": 2, "first_k_dense_replace": 1, "n_routed_experts": 2, "num_experts_per_tok": 1},
    **{"num_attention_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512},
    **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    **{"index_n_heads": 64, "index_head_dim": 128},
}
INDEX_TOPK = 2048
PREFIX = "model.layers.0.self_attn"


class RandomTensors:
    """Host tensors of the layer, in BF16, made as they are asked for."""

    def __init__(self) -> None:
        self._shapes = layout_of(WIDE, {}).host_shapes
        self._generator = torch.Generator().manual_seed(0)

    def get(self, name: str) -> torch.Tensor:
        """A tensor; matrices keep the size of what they are multiplied with."""
        shape = self._shapes[name]
        scale = shape[-1] ** -0.5 if len(shape) == 2 else 1.0
        return (torch.randn(shape, generator=self._generator) * scale).bfloat16()

    def stored_linear(self, name: str) -> tuple[torch.Tensor, None]:
        """A layer's weight as it is stored, which has no scales."""
        return self.get(f"{name}.weight"), None

    def linear(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A layer's weight in ``dtype``."""
        return self.get(f"{name}.weight").to(dtype)


def wide_attention(is_sparse: bool) -> MLAttention:
    """The layer, with the same weights either way but for the indexer."""
    indexer = IndexerShape(WIDE["index_n_heads"], WIDE["index_head_dim"], INDEX_TOPK, rope_interleave=False)
    shape = MLAShape(
        hidden_size=WIDE["hidden_size"],
        num_heads=WIDE["num_attention_heads"],
        q_lora_rank=WIDE["q_lora_rank"],
        kv_lora_rank=WIDE["kv_lora_rank"],
        qk_nope_head_dim=WIDE["qk_nope_head_dim"],
        qk_rope_head_dim=WIDE["qk_rope_head_dim"],
        v_head_dim=WIDE["v_head_dim"],
        scaling=(WIDE["qk_nope_head_dim"] + WIDE["qk_rope_head_dim"]) ** -0.5,
        attention_bias=False,
        rope_interleave=True,
        indexer=indexer if is_sparse else None,
    )
    runtime = CpuRuntime.new(max(WIDE["hidden_size"], shape.max_in_features), 1)
    return MLAttention(RandomTensors(), PREFIX, shape, runtime)  # type: ignore[arg-type]


def median_ms(rounds: int, run: Callable[[], object]) -> float:
    run()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return 1e3 * statistics.median(seconds)


def ceilings() -> tuple[float, float]:
    """GB/s of a plain read and GFLOP/s of a matrix product, one thread, the fastest of some."""
    memory = np.ones(READ_BYTES, np.uint8)
    read = max(read_gb_per_s(memory) for _ in range(5))
    a = torch.randn(GEMM, GEMM)
    gemm = 2e-6 * GEMM**3 / min(median_ms(1, lambda: a @ a) for _ in range(5))
    return read, gemm


def demo_model() -> tuple[CausalLM, int]:
    """The demo model with its experts in this process, and the bytes that a token reads of its weights."""
    folder = resolve_model(None)
    experts = LocalExperts(Manifest.load(folder), max_step_tokens=STEP_TOKENS)
    model = load_model(load_config(folder), HostTensors(folder), experts, max_tokens=4096)
    return model, sum(bytes_per_token(folder))


def prefill(model: CausalLM, tokens: torch.Tensor, cache: list, step_tokens: int) -> torch.Tensor:
    hidden = torch.empty(0)
    for start in range(0, len(tokens), step_tokens):
        chunk = tokens[start : start + step_tokens]
        hidden = model.forward(chunk, [SequenceStep.of(0, start, len(chunk))], cache)
    return model.compute_logits(hidden[-1:])


def measure_demo(rounds: int, read: float) -> list[dict[str, float]]:
    model, weight_bytes = demo_model()
    tokens = torch.randint(2, 8000, (4096,), generator=torch.Generator().manual_seed(0))
    whole = prefill(model, tokens[:300], model.new_kv_cache(512), STEP_TOKENS)
    single = prefill(model, tokens[:300], model.new_kv_cache(512), 1)
    if (whole - single).abs().max() > 2e-3:
        raise SystemExit("prefill and decode give other logits: nothing measured")
    shape = model.config.attention[0]
    cache = model.new_kv_cache(4096)
    lines, known = [], 0
    print("demo model, verified\ncontext  ms/token  ceiling ms  of ceiling")
    for context in DEMO_CONTEXTS:
        for start in range(known, context, STEP_TOKENS):
            chunk = tokens[start : min(start + STEP_TOKENS, context)]
            model.forward(chunk, [SequenceStep.of(0, start, len(chunk))], cache)
        known = context
        step = tokens[context : context + 1]

        def token(step: torch.Tensor = step, context: int = context) -> torch.Tensor:
            hidden = model.forward(step, [SequenceStep.of(0, context, 1)], cache)
            return model.compute_logits(hidden)

        took = median_ms(rounds, token)
        latents = min(context, shape.indexer.topk) * shape.cache_widths[0]  # type: ignore[union-attr]
        cached = 4 * len(model.layers) * (latents + context * shape.cache_widths[1])
        ceiling = (weight_bytes + cached) / read / 1e6
        print(f"{context:7d} {took:9.2f} {ceiling:11.2f} {ceiling / took:11.1%}")
        lines.append({"context": context, "ms": round(took, 3), "ceiling_ms": round(ceiling, 3)})
    return lines


class WideLayer:
    """The wide layer's attention at the end of a context of random latents and index keys."""

    def __init__(self, is_sparse: bool, longest: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.attention = wide_attention(is_sparse)
        widths = self.attention.shape.cache_widths
        self.cache = tuple(torch.randn(longest, width, generator=generator) for width in widths)
        self.x = torch.randn(2, WIDE["hidden_size"], generator=generator)
        self.q = torch.randn(1, WIDE["num_attention_heads"], widths[0], generator=generator)
        self.q_latent = torch.randn(1, WIDE["q_lora_rank"], generator=generator)
        rope = WIDE["qk_rope_head_dim"]
        self.rotary = RotaryTable(1e4 ** -(torch.arange(0, rope, 2) / rope), 1.0, longest)
        self.is_sparse = is_sparse
        shapes = layout_of(WIDE, {}).host_shapes
        names = [name for name in shapes if name.startswith(PREFIX) and (is_sparse or "indexer" not in name)]
        self.num_weights = sum(math.prod(shapes[name]) for name in names)
        # BF16 but for the up-projections of keys and values, which are multiplied in f32.
        self.weight_bytes = sum((4 if "kv_b" in name else 2) * math.prod(shapes[name]) for name in names)

    def decode(self, context: int, num_tokens: int = 1) -> torch.Tensor:
        """The attention's output for the last tokens of a context."""
        return self.attention(self.x[-num_tokens:], self.step(context, num_tokens), self.cache)

    def step(self, context: int, num_tokens: int = 1) -> StepContext:
        """The last tokens of a context."""
        start = context - num_tokens
        rows = self.rotary.rows(torch.arange(start, context))
        return StepContext([SequenceStep.of(0, start, num_tokens)], *rows)

    def choose(self, context: int) -> npt.NDArray[np.int32] | None:
        """What the last token of a context attends to."""
        if self.attention.indexer is None:
            return None
        x = self.x[-1:]
        start = WIDE["q_lora_rank"]
        k = self.attention.inputs(x)[:, start : start + WIDE["index_head_dim"]]
        return self.attention.indexer(x, k, self.q_latent, self.step(context), self.cache[1])

    def attend(self, context: int, selection: npt.NDArray[np.int32] | None) -> npt.NDArray[np.float32]:
        """The attention to it."""
        native, latents = self.attention.runtime.attention, self.cache[0].numpy()
        value_dim = WIDE["kv_lora_rank"]
        step = self.step(context).native
        return native.attend(step, self.q.numpy(), latents, latents, 1, value_dim, 1.0, 0, selection)

    def ceiling_ms(self, context: int, read: float, gemm: float) -> float:
        """The least that a token takes, by its bytes or its arithmetic."""
        attended = min(context, INDEX_TOPK) if self.is_sparse else context
        scored = context if self.is_sparse and context > INDEX_TOPK else 0
        width, heads, index_size = self.q.shape[-1], self.q.shape[1], WIDE["index_head_dim"]
        num_bytes = self.weight_bytes + 4 * (attended * width + scored * index_size)
        flops = 2 * (self.num_weights + attended * heads * (width + WIDE["kv_lora_rank"]))
        flops += 2 * scored * WIDE["index_n_heads"] * index_size
        return max(num_bytes / read, flops / gemm) / 1e6


@torch.inference_mode()
def measure_wide(contexts: list[int], rounds: int, read: float, gemm: float) -> list[dict[str, float | str]]:
    lines: list[dict[str, float | str]] = []
    for kind in ("sparse", "dense"):
        layer = WideLayer(kind == "sparse", max(contexts))
        if layer.is_sparse:
            if not torch.equal(layer.decode(max(contexts), 2)[1:], layer.decode(max(contexts))):
                raise SystemExit("a row gives other bits beside another: nothing measured")
            print("\none layer of DeepSeek-V3.2's attention, random weights, BF16, verified")
            print("           context  ms/token  indexer ms  attention ms  ceiling ms  of ceiling")
        for context in contexts:
            selection = layer.choose(context)
            took = median_ms(rounds, partial(layer.decode, context))
            choosing = median_ms(rounds, partial(layer.choose, context))
            attending = median_ms(rounds, partial(layer.attend, context, selection))
            ceiling = layer.ceiling_ms(context, read, gemm)
            print(
                f"{kind:>8s} {context:9d} {took:9.2f} {choosing:11.2f} {attending:13.2f}"
                f" {ceiling:11.2f} {ceiling / took:11.1%}"
            )
            parts = {"ms": took, "indexer_ms": choosing, "attention_ms": attending, "ceiling_ms": ceiling}
            rounded = {name: round(ms, 3) for name, ms in parts.items()}
            lines.append({"kind": kind, "context": context} | rounded)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 4096, 8192, 16384, 32768])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    read, gemm = ceilings()
    print(f"{cpu_name()}, {available_cores()} cores, one thread: {read:.1f} GB/s, {gemm:.0f} GFLOP/s in f32")
    demo = measure_demo(arguments.rounds, read)
    wide = measure_wide(arguments.contexts, arguments.rounds, read, gemm)
    summary = {
        "benchmark": "offline/long_context",
        "commit": commit(),
        "machine": f"{cpu_name()}, {available_cores()} cores",
        "rounds": arguments.rounds,
        "read_gb_per_s": round(read, 1),
        "gflop_per_s": round(gemm, 1),
        "demo": demo,
        "wide": wide,
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
