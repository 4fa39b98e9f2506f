"""The demo model's 360 questions and 98 choices, in every format and wire type, beside transformers.

    python benchmarks/quality/demo_suite.py [--formats fp9 fp8 int8 int4] [--wires f32 bf16] [--workers 2]
        [--every 1]

The program

1. scores the checkpoint with transformers in float32, weights dequantised: an answer counts where each of its
   tokens, the end token too, is the likeliest behind the ones before it, which is when greedy decoding writes
   it; of a choice, the answer with the highest log probability,
2. has the answers written by the same checkpoint here, greedily, through workers, in each format and with
   each type of activations and partial sums on the wire; an answer counts where it is right word for word,
3. verifies that formats that hold the same weights give the same replies and the same log probabilities,
4. prints a table and one JSON line.

``off`` is the largest difference of an answer's log probability from transformers', in nats, over all answers
of all choices. The tasks for lm-evaluation-harness in ``examples/lm-eval`` are of the same questions. The
reference is the one of the tests (``tests/support/reference.py``), independent of the package.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import track

from duckllm import LLM, SamplingParams
from duckllm.bench.machine import commit, cpu_name
from duckllm.config import LOSSLESS_FORMATS, WIRE_DTYPES, available_cores
from duckllm.demo import CHECKPOINT
from duckllm.demo.suite import MAX_TOKENS, RECALL, TASKS, Choice, SuiteItem, load_choices, load_suite
from duckllm.text import Tokenizer

T = TypeVar("T")
CHOICES = "choices"
COLUMNS = (*TASKS, RECALL, "all", CHOICES)
BATCH = 60  # questions between two movements of the bar
FORMATS = (*LOSSLESS_FORMATS, "int8", "int4")  # the first hold the checkpoint's own weights


@dataclass(frozen=True)
class Scores:
    """What one way of computing gives.

    Args:
        right: Of each task, how many answers.
        replies: The replies, empty where only likeliest tokens were looked at.
        logprobs: Of each answer of each choice.
    """

    right: Counter[str]
    replies: tuple[str, ...]
    logprobs: tuple[float, ...]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--wires", nargs="+", default=list(WIRE_DTYPES), choices=WIRE_DTYPES)
    parser.add_argument("--workers", type=int, default=2, help="at least 1: without any there is no wire")
    parser.add_argument("--every", type=int, default=1, help="take each so-manieth question, to try it")
    return parser.parse_args()


def shown(items: Sequence[T], title: str) -> Iterable[T]:
    console = Console(stderr=True)
    return track(items, title, console=console, transient=True, disable=not console.is_terminal)


def in_batches(items: Sequence[T]) -> list[Sequence[T]]:
    return [items[first : first + BATCH] for first in range(0, len(items), BATCH)]


def in_tokens(tokenizer: Tokenizer, chat: list[dict[str, str]], answer: str) -> tuple[list[int], list[int]]:
    """A prompt, and an answer with the end token behind it."""
    prompt = tokenizer.apply_chat_template(chat)
    whole = tokenizer.apply_chat_template([*chat, {"role": "assistant", "content": answer}])
    (end,) = tokenizer.eos_token_ids
    assert whole[: len(prompt)] == prompt
    return prompt, whole[len(prompt) : whole.index(end, len(prompt)) + 1]


def answers_of(choices: Sequence[Choice]) -> Iterator[tuple[list[dict[str, str]], str]]:
    """Each answer of each choice, behind its question."""
    for choice in choices:
        for answer in choice.choices:
            yield [{"role": "user", "content": choice.question}], answer


def num_right(choices: Sequence[Choice], logprobs: Sequence[float]) -> int:
    """How often the right answer is the likeliest."""
    found, first = 0, 0
    for choice in choices:
        own = logprobs[first : first + len(choice.choices)]
        found += own.index(max(own)) == choice.right
        first += len(choice.choices)
    return found


def score_reference(tokenizer: Tokenizer, suite: list[SuiteItem], choices: list[Choice]) -> Scores:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
    from support.reference import load_reference, reference_logits

    model = load_reference(CHECKPOINT)

    def behind(prompt: list[int], answer: list[int]) -> torch.Tensor:
        """Logits at each place of the answer, the last one aside: [n, V]."""
        return reference_logits(model, [*prompt, *answer[:-1]])[len(prompt) - 1 :]

    right: Counter[str] = Counter()
    for item in shown(suite, "transformers, questions"):
        prompt, answer = in_tokens(tokenizer, item.chat, item.answer)
        right[item.task] += behind(prompt, answer).argmax(-1).tolist() == answer
    logprobs = []
    for chat, text in shown(list(answers_of(choices)), "transformers, choices"):
        prompt, answer = in_tokens(tokenizer, chat, text)
        rows = behind(prompt, answer).double().log_softmax(-1)
        logprobs.append(float(rows.gather(1, torch.tensor(answer)[:, None]).sum()))
    right[CHOICES] = num_right(choices, logprobs)
    return Scores(right, (), tuple(logprobs))


def score(llm: LLM, title: str, suite: list[SuiteItem], choices: list[Choice]) -> Scores:
    right: Counter[str] = Counter()
    replies: list[str] = []
    greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    for items in shown(in_batches(suite), f"{title}, questions"):
        outputs = llm.chat([item.chat for item in items], greedy)
        for item, output in zip(items, outputs, strict=True):
            reply = output.outputs[0]
            replies.append(reply.text)
            right[item.task] += reply.text == item.answer and reply.finish_reason == "stop"
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    logprobs: list[float] = []
    pairs = [in_tokens(llm.tokenizer, *each) for each in answers_of(choices)]
    for part in shown(in_batches(pairs), f"{title}, choices"):
        outputs = llm.generate([[*prompt, *answer] for prompt, answer in part], asked)
        for (_, answer), output in zip(part, outputs, strict=True):
            assert output.prompt_logprobs is not None
            rows = output.prompt_logprobs[-len(answer) :]
            logprobs.append(sum((row or {})[token].logprob for row, token in zip(rows, answer, strict=True)))
    right[CHOICES] = num_right(choices, logprobs)
    return Scores(right, tuple(replies), tuple(logprobs))


def main() -> None:
    arguments = parse_arguments()
    suite, choices = load_suite()[:: arguments.every], load_choices()[:: arguments.every]
    tokenizer = Tokenizer(CHECKPOINT)
    reference = score_reference(tokenizer, suite, choices)
    found: dict[tuple[str, str], Scores] = {}
    for weight_format in arguments.formats:
        for wire in arguments.wires:
            options: dict[str, Any] = {
                "weight_format": weight_format,
                "wire_dtype": wire,
                "reply_dtype": wire,
            }
            with LLM(workers=arguments.workers, **options) as llm:
                found[weight_format, wire] = score(llm, f"{weight_format}, {wire}", suite, choices)
    verify(found)
    report(arguments, suite, choices, reference, found)


def verify(found: dict[tuple[str, str], Scores]) -> None:
    """Formats that hold the same weights must differ in nothing, on the same wire."""
    first: dict[str, tuple[str, Scores]] = {}
    for (weight_format, wire), scores in found.items():
        if weight_format in LOSSLESS_FORMATS:
            other, expected = first.setdefault(wire, (weight_format, scores))
            if scores != expected:
                raise SystemExit(f"{weight_format}, wire {wire}: other replies or numbers than in {other}")


def report(
    arguments: argparse.Namespace,
    suite: list[SuiteItem],
    choices: list[Choice],
    reference: Scores,
    found: dict[tuple[str, str], Scores],
) -> None:
    asked = Counter(item.task for item in suite)
    asked |= Counter({"all": len(suite), CHOICES: len(choices)})
    ways = {("transformers", "-"): reference, **found}
    print(f"{cpu_name()}, {available_cores()} cores, {arguments.workers} workers; right answers")
    print(f"{'format':12s} {'wire':5s}" + "".join(f"{name:>12s}" for name in COLUMNS) + f"{'off':>10s}")
    print(f"{'asked':18s}" + "".join(f"{asked[name]:12d}" for name in COLUMNS))
    lines = []
    for (name, wire), scores in ways.items():
        right = scores.right | Counter({"all": sum(scores.right[task] for task in (*TASKS, RECALL))})
        off = max(
            abs(mine - theirs) for mine, theirs in zip(scores.logprobs, reference.logprobs, strict=True)
        )
        print(f"{name:12s} {wire:5s}" + "".join(f"{right[each]:12d}" for each in COLUMNS) + f"{off:10.1e}")
        lines.append(
            {"format": name, "wire": wire, "off_nats": off, "right": {each: right[each] for each in COLUMNS}}
        )
    result = {
        "benchmark": "quality/demo_suite",
        "commit": commit(),
        "machine": f"{cpu_name()}, {available_cores()} cores",
        "model": "demo",
        "workers": arguments.workers,
        "asked": {name: asked[name] for name in COLUMNS},
        "ways": lines,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
