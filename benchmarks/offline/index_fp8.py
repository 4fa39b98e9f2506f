"""What FP8 rounding of index queries and keys would change in sparse attention, on the demo model.

    python benchmarks/offline/index_fp8.py [--tokens 2000]

DeepSeek's own inference rotates both by a Hadamard matrix and rounds them to e4m3, with a scale for each
128 numbers, a power of two or not; here neither is done. The program takes the queries and keys of a
conversation, layer by layer, and prints which share of the selected tokens such a rounding would replace,
over all positions past index_topk. It verifies that the rotation alone replaces none. One JSON line at the
end.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable

import torch

from duckllm.bench.machine import commit
from duckllm.demo import load_questions
from duckllm.layers.indexer import Indexer
from duckllm.layers.step import SequenceStep, StepContext
from duckllm.models.registry import load_config, load_model
from duckllm.moe.local import LocalExperts
from duckllm.text import Tokenizer
from duckllm.weights.host_tensors import HostTensors
from duckllm.weights.manifest import Manifest
from duckllm.weights.resolve import resolve_model

BLOCK = 128
E4M3_MAX = 448.0
STEP_TOKENS = 256


def hadamard(size: int) -> torch.Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / math.sqrt(size)


def rounded(x: torch.Tensor, power_of_two: bool) -> torch.Tensor:
    """X as e4m3 times a scale for each 128 numbers of the last dimension, or for all where they are fewer."""
    blocks = x.unflatten(-1, (-1, min(BLOCK, x.shape[-1])))
    scale = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-10) / E4M3_MAX
    if power_of_two:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    return ((blocks / scale).to(torch.float8_e4m3fn).double() * scale).flatten(-2)


Change = Callable[[torch.Tensor], torch.Tensor]


def changes(head_dim: int) -> dict[str, Change]:
    """What may be done to queries and keys alike."""
    rotation = hadamard(head_dim)
    return {
        "rotated": lambda x: x @ rotation,
        "rotated, FP8": lambda x: rounded(x @ rotation, power_of_two=False),
        "rotated, FP8, scales powers of two": lambda x: rounded(x @ rotation, power_of_two=True),
        "FP8, not rotated": lambda x: rounded(x, power_of_two=False),
    }


def select_topk(scores: torch.Tensor, topk: int) -> torch.Tensor:
    """True at the ``topk`` largest of each row; among equal ones the lowest positions win."""
    order = scores.argsort(dim=-1, descending=True, stable=True)[:, :topk]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order, True)


def queries(indexer: Indexer, q_latent: torch.Tensor, step: StepContext) -> torch.Tensor:
    """The index queries of a step, rotated: [T, heads, D]."""
    q = indexer.query(q_latent).view(-1, indexer.shape.num_heads, indexer.shape.head_dim)
    indexer.rotate(q[..., : indexer.rope_dim], step.cos, step.sin, q[..., : indexer.rope_dim])
    return q


def replaced(chosen: torch.Tensor, other: torch.Tensor) -> tuple[int, int]:
    """Of the selected tokens, how many another selection lacks, and how many there are."""
    return int((chosen & ~other).sum()), int(chosen.sum())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2000, help="tokens of the conversation")
    num_tokens = parser.parse_args().tokens
    folder = resolve_model(None)
    messages = []
    for question in load_questions():
        messages.append({"role": "user", "content": question.question})
        messages.append({"role": "assistant", "content": question.answer})
    tokens = torch.tensor(Tokenizer(folder).apply_chat_template(messages)[:num_tokens])
    experts = LocalExperts(Manifest.load(folder), max_step_tokens=STEP_TOKENS)
    model = load_model(load_config(folder), HostTensors(folder), experts, max_tokens=len(tokens))
    shape = model.layers[0].attention.indexer.shape
    totals = {name: [0, 0] for name in changes(shape.head_dim)}
    original = Indexer.__call__

    def watched(
        self: Indexer,
        x: torch.Tensor,
        k: torch.Tensor | None,
        q_latent: torch.Tensor,
        step: StepContext,
        cache: torch.Tensor,
    ) -> object:
        selection = original(self, x, k, q_latent, step, cache)
        first, keys = step.sequences[0].start, cache[: step.sequences[0].stop]
        visible = torch.arange(keys.shape[0]) <= torch.arange(first, keys.shape[0])[:, None]
        q, doubles = queries(self, q_latent, step).double(), keys.double()
        weights = self.head_weights(x).double()

        def select(change: Change) -> torch.Tensor:
            scores = torch.einsum("th,ths->ts", weights, torch.relu(change(q) @ change(doubles).T))
            selection = select_topk(scores.masked_fill(~visible, -torch.inf), shape.topk)
            return selection[max(0, shape.topk - first) :]

        if keys.shape[0] > shape.topk:
            chosen = select(lambda x: x)
            for name, change in changes(shape.head_dim).items():
                missing, total = replaced(chosen, select(change))
                totals[name][0] += missing
                totals[name][1] += total
        return selection

    Indexer.__call__ = watched  # type: ignore[method-assign,assignment]
    cache = model.new_kv_cache(len(tokens))
    for start in range(0, len(tokens), STEP_TOKENS):
        chunk = tokens[start : start + STEP_TOKENS]
        model.forward(chunk, [SequenceStep.of(0, start, len(chunk))], cache)
    shares = {name: missing / total for name, (missing, total) in totals.items()}
    print(f"{len(tokens)} tokens, {len(model.layers)} layers; {shape.topk} tokens are selected by")
    print(
        f"{shape.num_heads} heads of {shape.head_dim}. Of {totals['rotated'][1]:,} these would be replaced:"
    )
    for name, share in shares.items():
        print(f"{name:40s} {share:9.4%}")
    if shares["rotated"] > 1e-4:
        raise SystemExit("a rotation alone replaces tokens: the figures mean nothing")
    line = {"benchmark": "offline/index_fp8", "commit": commit(), "tokens": len(tokens)}
    print(json.dumps(line | {"replaced": {name: round(share, 6) for name, share in shares.items()}}))


if __name__ == "__main__":
    main()
