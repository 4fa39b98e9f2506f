"""What guessing tokens ahead is worth: with the layer's prefix, without, and with a layer that is no good.

    python benchmarks/offline/speculative.py [--model FOLDER] [--workers 2] [--rounds 5] [--tokens 64]

The program

1. makes a copy of the model whose layer of multi-token prediction has the columns of its projection in random
   order, so that it guesses nonsense,
2. verifies that every way to guess gives the same tokens, greedy and sampled with a seed,
3. measures in turns replies to ``--questions`` questions: tokens a second and the share of guesses that were
   right, beside the ceiling: the tokens that a step gave, times the speed without guesses, as if a step with
   guesses took no longer,
4. prints one JSON line. Medians of the rounds.

``auto`` turns itself off where it does not pay: the share of steps that checked a guess says so.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from duckllm import LLM, SamplingParams
from duckllm.bench.machine import commit, cpu_name
from duckllm.config import available_cores
from duckllm.demo import CHECKPOINT, load_questions
from duckllm.outputs import RequestOutput

# Name, options of LLM, whether its layer is the random one.
WAYS: dict[str, tuple[dict[str, object], bool]] = {
    "off": ({"draft": "off"}, False),
    "auto": ({"draft": "auto"}, False),
    "on, 1 token": ({"draft": "on"}, False),
    "on, 2 tokens": ({"draft": "on", "draft_tokens": 2}, False),
    "on, 3 tokens": ({"draft": "on", "draft_tokens": 3}, False),
    "stateless": ({"draft": "stateless"}, False),
    "random layer, on": ({"draft": "on"}, True),
    "random layer, auto": ({"draft": "auto"}, True),
}


@dataclass(frozen=True)
class Round:
    """Tokens a second, tokens a step, guesses that were right of all, and steps with a guess of all."""

    tokens_per_s: float
    tokens_per_step: float
    acceptance: float | None
    guessing: float


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=CHECKPOINT, help="a checkpoint; the demo model's")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64, help="most tokens of each reply")
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=0.0, help="of what is measured")
    return parser.parse_args()


def with_random_layer(checkpoint: Path, folder: Path) -> Path:
    """A copy whose ``eh_proj`` has its columns in random order."""
    copy = folder / "random-layer"
    shutil.copytree(checkpoint, copy)
    found = False
    for path in copy.glob("*.safetensors"):
        tensors = load_file(path)
        for name in tensors:
            if name.endswith("eh_proj.weight"):
                order = torch.randperm(tensors[name].shape[1], generator=torch.Generator().manual_seed(1))
                tensors[name] = (
                    tensors[name]
                    .view(torch.uint8 if tensors[name].itemsize == 1 else torch.int16)[:, order]
                    .view(tensors[name].dtype)
                )
                found = True
        save_file(tensors, path, metadata={"format": "pt"})
    if not found:
        raise SystemExit(f"{checkpoint}: no layer of multi-token prediction: nothing measured")
    return copy


def ask(llm: LLM, questions: list[str], params: SamplingParams) -> list[RequestOutput]:
    return [llm.chat([{"role": "user", "content": question}], params)[0] for question in questions]


def measure(llm: LLM, questions: list[str], params: SamplingParams) -> Round:
    before = llm.stats()
    start = time.perf_counter()
    outputs = ask(llm, questions, params)
    seconds = time.perf_counter() - start
    after = llm.stats()
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    drafts = after.num_draft_tokens - before.num_draft_tokens
    right = after.num_accepted_tokens - before.num_accepted_tokens
    steps = after.num_steps - before.num_steps
    most = max(1, llm._engine.drafter.num_tokens) if llm._engine.drafter else 1
    return Round(
        num_tokens / seconds, num_tokens / steps, right / drafts if drafts else None, drafts / most / steps
    )


def main() -> None:
    arguments = parse_arguments()
    questions = [each.question for each in load_questions() if each.kind == "define"][: arguments.questions]
    params = SamplingParams(
        temperature=arguments.temperature, seed=1, max_tokens=arguments.tokens, ignore_eos=True
    )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        random_layer = with_random_layer(arguments.model, folder)
        llms = {
            name: stack.enter_context(
                LLM(random_layer if is_random else arguments.model, workers=arguments.workers, **options)
            )
            for name, (options, is_random) in WAYS.items()
        }
        for checked in (params, SamplingParams(temperature=1.0, seed=7, max_tokens=arguments.tokens)):
            expected = [output.outputs[0].token_ids for output in ask(llms["off"], questions, checked)]
            for name, llm in llms.items():
                if [output.outputs[0].token_ids for output in ask(llm, questions, checked)] != expected:
                    raise SystemExit(f"{name}: other tokens than without guesses: nothing measured")
        rounds: dict[str, list[Round]] = {name: [] for name in llms}
        for _ in range(arguments.rounds):
            for name, llm in llms.items():
                rounds[name].append(measure(llm, questions, params))
    report(arguments, rounds)


def report(arguments: argparse.Namespace, rounds: dict[str, list[Round]]) -> None:
    print(f"{cpu_name()}, {available_cores()} cores, {arguments.workers} workers; verified")
    base = statistics.median(each.tokens_per_s for each in rounds["off"])
    print(
        f"{'':20s} {'tok/s':>7s} {'x off':>6s} {'ceiling':>8s} {'of it':>6s} {'right':>7s} {'guessing':>9s}"
    )
    figures = {}
    for name, own in rounds.items():
        speed = statistics.median(each.tokens_per_s for each in own)
        ceiling = base * statistics.median(each.tokens_per_step for each in own)
        ceiling /= statistics.median(each.tokens_per_step for each in rounds["off"])
        right = [each.acceptance for each in own if each.acceptance is not None]
        acceptance = statistics.median(right) if right else None
        guessing = statistics.median(each.guessing for each in own)
        shown = "-" if acceptance is None else f"{acceptance:.1%}"
        print(
            f"{name:20s} {speed:7.1f} {speed / base:6.2f} {ceiling:8.1f} {speed / ceiling:6.0%} {shown:>7s} "
            f"{guessing:9.0%}"
        )
        figures[name] = {
            "tokens_per_s": round(speed, 1),
            "acceptance": None if acceptance is None else round(acceptance, 4),
            "guessing_steps": round(guessing, 3),
        }
    summary = {
        "benchmark": "offline/speculative",
        "commit": commit(),
        "machine": f"{cpu_name()}, {available_cores()} cores",
        "model": arguments.model.name,
        "workers": arguments.workers,
        "rounds": arguments.rounds,
        "tokens": arguments.tokens,
        "temperature": arguments.temperature,
        "ways": figures,
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
