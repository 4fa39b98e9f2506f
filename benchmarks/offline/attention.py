"""Attention in native code against the PyTorch that it replaced, in one run.

    python benchmarks/offline/attention.py [--threads 1] [--rounds 9] [--rows 1 256]
                                           [--contexts 512 4096 32768]

The program takes the attention of DeepSeek-V3.2 (128 heads over latents of 512 + 64, to everything and to
2048 selected tokens; its indexer of 64 heads of 128) and of Qwen3-30B-A3B (32 query and 4 key heads of 128),
with random numbers, one row and many at the end of contexts, and

1. verifies some rows against float64, and that a row gives the same bits alone as in its step,
2. measures both ways in turns, one after the other in each round, over caches that lie in turn in more memory
   than the processor caches, as those of a model's layers do,
3. prints the ceiling beside them: the bytes that have to be read at the speed of a plain read, or the
   multiply-adds at the speed of a loop that does nothing else, whichever takes longer, both measured here,
4. prints one JSON line.

Figures are the medians of the rounds, and the fastest of them, which say more where other programs run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from duckllm import _native
from duckllm.bench.ceilings import FEWEST_REPEATS, Ceiling, fma_ceilings, read_ceiling
from duckllm.bench.machine import commit, cpu_name
from duckllm.config import available_cores
from duckllm.layers.cpu_runtime import CpuRuntime
from duckllm.layers.step import LayerCache, SequenceStep, StepContext, new_layer_cache

COLD_BYTES = 256 << 20  # of the caches that take turns
SCORE_BLOCK = 1 << 24  # elements of scores that the PyTorch way holds
MASK_BLOCK = 1 << 22
PAGE_TOKENS = 16


@dataclass(frozen=True)
class Kind:
    """One model's attention; ``topk`` selects among cached tokens, ``is_index`` is what selects them."""

    name: str
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    topk: int | None = None
    is_index: bool = False

    @property
    def is_latent(self) -> bool:
        """Whether the first numbers of a key are its value."""
        return self.kv_heads == 1 and not self.is_index

    @property
    def widths(self) -> tuple[int, ...]:
        """Numbers a token in each tensor of the cache."""
        if self.is_latent or self.is_index:
            return (self.key_dim,)
        return (self.kv_heads * self.key_dim, self.kv_heads * self.value_dim)


KINDS = (
    Kind("Qwen3-30B-A3B", 32, 4, 128, 128),
    Kind("DeepSeek-V3.2 dense", 128, 1, 576, 512),
    Kind("DeepSeek-V3.2 sparse", 128, 1, 576, 512, topk=2048),
    Kind("DeepSeek-V3.2 indexer", 64, 1, 128, 0, topk=2048, is_index=True),
)


class Case:
    """Rows at the end of a context, over several caches in turn."""

    def __init__(self, kind: Kind, rows: int, context: int, runtime: CpuRuntime) -> None:
        self.kind, self.rows, self.context, self.runtime = kind, rows, context, runtime
        generator = torch.Generator().manual_seed(0)
        self.q = torch.randn(rows, kind.heads, kind.key_dim, generator=generator)
        self.scale = kind.key_dim**-0.5
        self.weights = torch.randn(rows, kind.heads, generator=generator)
        num_caches = max(1, COLD_BYTES // (4 * sum(kind.widths) * context)) if rows == 1 else 1
        self.caches = [new_layer_cache(kind.widths, context) for _ in range(num_caches)]
        for cache in self.caches:
            for tensor in cache:
                tensor.normal_(generator=generator)
        self.turn = 0
        self.step = self.step_of(context - rows, rows)
        self.selection = None
        if kind.topk is not None and not kind.is_index:
            self.selection = np.stack([self.choose(position) for position in range(context - rows, context)])

    def step_of(self, start: int, rows: int) -> StepContext:
        """Rows of the context, which lies in order in pages."""
        pages = np.arange(-(-(start + rows) // PAGE_TOKENS), dtype=np.int32)
        sequence = SequenceStep.of(0, start, rows, pages, PAGE_TOKENS)
        return StepContext([sequence], torch.empty(0), torch.empty(0))

    def choose(self, position: int) -> np.ndarray:
        """A random selection."""
        assert self.kind.topk is not None
        rng = np.random.default_rng(position)
        return np.sort(rng.choice(position + 1, self.kind.topk, replace=False)).astype(np.int32)

    def _next_cache(self) -> LayerCache:
        self.turn += 1
        return self.caches[self.turn % len(self.caches)]

    def native(self, rows: slice | None = None) -> torch.Tensor:
        """The native way, of all rows or one."""
        kind, native = self.kind, self.runtime.attention
        cache = [each.numpy() for each in (self._next_cache() if rows is None else self.caches[0])]
        step, q, weights, selection = self.step, self.q, self.weights, self.selection
        if rows is not None:
            step = self.step_of(self.context - self.rows + rows.start, 1)
            q, weights = q[rows], weights[rows]
            selection = None if selection is None else selection[rows]
        if kind.is_index:
            assert kind.topk is not None
            return torch.from_numpy(
                native.select(step.native, q.numpy(), weights.numpy(), cache[0], kind.topk)
            )
        return torch.from_numpy(
            native.attend(
                step.native,
                q.numpy(),
                cache[0],
                cache[-1],
                kind.kv_heads,
                kind.value_dim,
                self.scale,
                0,
                selection,
            )
        )

    def pytorch(self) -> torch.Tensor:
        """The way that it replaced."""
        cache = self._next_cache()
        if self.kind.is_index:
            return self._pytorch_index(cache[0])
        if not self.kind.is_latent:
            return self._pytorch_grouped(*cache)
        if self.selection is not None and self.rows == 1:
            chosen = cache[0].index_select(0, torch.from_numpy(self.selection[0]).long())
            return self._latent_block(self.q, chosen, None)
        mask = torch.ones(self.rows, self.context, dtype=torch.bool).tril(self.context - self.rows)
        if self.selection is not None:
            mask = torch.zeros_like(mask).scatter_(1, torch.from_numpy(self.selection).long(), True)
        if self.rows == 1:
            return self._latent_block(self.q, cache[0], None)
        return self._in_blocks(
            SCORE_BLOCK // (self.kind.heads * self.context),
            lambda rows, stop: self._latent_block(self.q[rows], cache[0][:stop], mask[rows, :stop]),
        )

    def _in_blocks(self, block: int, compute: Callable[[slice, int], torch.Tensor]) -> torch.Tensor:
        parts, before = [], self.context - self.rows
        for first in range(0, self.rows, max(1, block)):
            rows = slice(first, min(first + max(1, block), self.rows))
            parts.append(compute(rows, before + rows.stop))
        return torch.cat(parts)

    def _latent_block(
        self, q: torch.Tensor, latents: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        scores = (q.reshape(-1, q.shape[-1]) @ latents.T).mul_(self.scale).view(*q.shape[:2], -1)
        if mask is not None:
            scores.masked_fill_(~mask[:, None, :], -torch.inf)
        weights = torch.softmax(scores, dim=-1).view(-1, latents.shape[0])
        return (weights @ latents[:, : self.kind.value_dim]).view(*q.shape[:2], -1)

    def _pytorch_grouped(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        kind, group = self.kind, self.kind.heads // self.kind.kv_heads

        def block(rows: slice, stop: int) -> torch.Tensor:
            count, mask = rows.stop - rows.start, None
            if self.rows > 1:
                mask = torch.arange(stop) <= torch.arange(stop - count, stop)[:, None]
                mask = mask.repeat_interleave(group, 0)
            grouped = self.q[rows].view(count, kind.kv_heads, group, -1).transpose(0, 1)
            attended = F.scaled_dot_product_attention(
                grouped.reshape(1, kind.kv_heads, count * group, -1),
                keys[:stop].view(stop, kind.kv_heads, -1).transpose(0, 1)[None],
                values[:stop].view(stop, kind.kv_heads, -1).transpose(0, 1)[None],
                attn_mask=mask,
                scale=self.scale,
            )
            return attended.view(kind.kv_heads, count, group, -1).transpose(0, 1).reshape(self.q[rows].shape)

        return self._in_blocks(MASK_BLOCK // (group * self.context), block)

    def _pytorch_index(self, keys: torch.Tensor) -> torch.Tensor:
        assert self.kind.topk is not None
        topk = self.kind.topk

        def block(rows: slice, stop: int) -> torch.Tensor:
            q = self.q[rows]
            products = torch.relu_(q.reshape(-1, q.shape[-1]) @ keys[:stop].T).view(*q.shape[:2], stop)
            scores = torch.bmm(self.weights[rows, None], products)[:, 0]
            if self.rows > 1:
                own = torch.arange(stop - q.shape[0], stop)[:, None]
                scores.masked_fill_(torch.arange(stop) > own, -torch.inf)
            threshold = scores.topk(topk, dim=-1).values[:, -1:]
            above, at = scores > threshold, scores == threshold
            room = topk - above.sum(dim=-1, keepdim=True)
            return (above | (at & (at.cumsum(dim=-1) <= room))).nonzero()[:, 1].view(-1, topk).int()

        return self._in_blocks(SCORE_BLOCK // (self.kind.heads * self.context), block)

    def verify(self) -> None:
        """Some rows against float64, and alone against in company."""
        self.turn = -1  # the first cache
        whole = self.native()
        for row in {0, self.rows // 2, self.rows - 1}:
            if not torch.equal(self.native(slice(row, row + 1))[0], whole[row]):
                raise SystemExit(f"{self.kind.name}: row {row} differs alone: nothing measured")
            if not self._is_right(row, whole[row]):
                raise SystemExit(f"{self.kind.name}: row {row} is wrong: nothing measured")

    def _is_right(self, row: int, result: torch.Tensor) -> bool:
        kind, stop = self.kind, self.context - self.rows + row + 1
        q = self.q[row].double().view(kind.kv_heads, -1, kind.key_dim)
        keys = self.caches[0][0][:stop].double().view(stop, kind.kv_heads, -1)
        products = torch.einsum("kgd,skd->kgs", q, keys)
        if kind.is_index:
            scores = self.weights[row].double() @ products[0].relu()
            worst = scores[result.long()].min()
            return (
                bool((scores > worst + 1e-3).sum() < len(result)) and len(set(result.tolist())) == kind.topk
            )
        if self.selection is not None:
            hidden = torch.ones(stop, dtype=torch.bool)
            hidden[torch.from_numpy(self.selection[row]).long()] = False
            products.masked_fill_(hidden, -torch.inf)
        values = self.caches[0][-1][:stop].double().view(stop, kind.kv_heads, -1)[..., : kind.value_dim]
        exact = torch.einsum("kgs,skd->kgd", torch.softmax(products * self.scale, -1), values)
        return bool((result.view_as(exact) - exact).abs().max() < 1e-5)

    def ceiling_ms(self, read: float, fma: float) -> float:
        """The least that the step takes, by its bytes or its arithmetic."""
        kind = self.kind
        seen = self.context - self.rows / 2 + 0.5
        tokens = self.context
        if self.selection is not None:
            seen = tokens = min(tokens, kind.topk or tokens)
        num_bytes = 4 * tokens * sum(kind.widths)
        flops = 2 * self.rows * seen * kind.heads * (kind.key_dim + kind.value_dim)
        return max(num_bytes / read, flops / fma) / 1e6


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def ceilings(threads: int) -> tuple[float, float]:
    """GB/s of a plain read and GFLOP/s of multiply-adds."""

    def best(ceiling: Ceiling) -> float:
        return max(spread.median for spread in ceiling.variants.values())

    isa = _native.select_isa()
    return best(read_ceiling(threads)), best(next(fma_ceilings(threads, [isa], FEWEST_REPEATS)))


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 4096, 32768])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 256])
    parser.add_argument("--kinds", nargs="+", default=[kind.name for kind in KINDS])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    runtime = CpuRuntime.new(64, arguments.threads)
    read, fma = ceilings(arguments.threads)
    print(f"{cpu_name()}, {available_cores()} cores, {arguments.threads} threads, {runtime.native.isa}:")
    print(f"{read:.1f} GB/s of plain read, {fma:.0f} GFLOP/s of multiply-adds")
    print(f"{'':22s}  rows  context  native ms    fastest  PyTorch ms    fastest  ceiling ms")
    lines = []
    for kind in (each for each in KINDS if each.name in arguments.kinds):
        for rows in arguments.rows:
            for context in arguments.contexts:
                if context < rows or (kind.topk is not None and context - rows < kind.topk):
                    continue
                case = Case(kind, rows, context, runtime)
                case.verify()
                case.pytorch()
                pairs = [(seconds(case.native), seconds(case.pytorch)) for _ in range(arguments.rounds)]
                figures = {"ceiling_ms": case.ceiling_ms(read, fma)}
                for way, each in zip(("native", "pytorch"), zip(*pairs, strict=True), strict=True):
                    figures[f"{way}_ms"] = 1e3 * statistics.median(each)
                    figures[f"{way}_fastest_ms"] = 1e3 * min(each)
                names = ("native_ms", "native_fastest_ms", "pytorch_ms", "pytorch_fastest_ms", "ceiling_ms")
                columns = " ".join(f"{figures[name]:11.3f}" for name in names)
                print(f"{kind.name:22s} {rows:5d} {context:8d}{columns}", flush=True)
                rounded = {name: round(ms, 4) for name, ms in figures.items()}
                lines.append({"kind": kind.name, "rows": rows, "context": context} | rounded)
    summary = {
        "benchmark": "offline/attention",
        "commit": commit(),
        "machine": f"{cpu_name()}, {available_cores()} cores",
        "isa": runtime.native.isa,
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "read_gb_per_s": round(read, 1),
        "gflop_per_s": round(fma, 1),
        "cases": lines,
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
