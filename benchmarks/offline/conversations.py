"""What many requests at once, and a conversation's kept cache, are worth.

    python benchmarks/offline/conversations.py [--model FOLDER] [--workers 2] [--rounds 5] [--turns 20]

The program

1. verifies that requests computed together give the tokens that each gives alone, and that a turn of a
   conversation whose beginning is in the KV cache gives the tokens of one computed from its first token,
2. measures 1, 8 and 64 requests at a time, each with a reply of ``--tokens`` tokens: tokens a second over all
   of them, beside that many times the speed of one alone, which is the ceiling where every request costs
   nothing more; and the longest that one waited, for its first token and between two tokens,
3. measures a conversation of ``--turns`` turns: time to the first token of each turn with what was computed
   kept, and with an empty cache, in turns within the same round,
4. prints one JSON line.

Every figure is the median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from duckllm import LLM, SamplingParams
from duckllm.bench.machine import commit, cpu_name
from duckllm.config import available_cores
from duckllm.weights.resolve import resolve_model

BATCHES = (1, 8, 64)
WORDS = ["duck", "swan", "goose", "heron", "crane", "gull", "tern", "loon", "teal", "coot", "rail", "snipe"]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a model's folder; the demo model by default")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32, help="tokens of each reply")
    parser.add_argument("--turns", type=int, default=20)
    return parser.parse_args()


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def questions(count: int, start: int = 0) -> list[str]:
    """Questions that differ from their first word on, so that none finds another's beginning in the cache."""
    return [
        f"{WORDS[number % len(WORDS)]} {number}: what is a {WORDS[(7 * number + 3) % len(WORDS)]}?"
        for number in range(start, start + count)
    ]


def verify(llm: LLM, params: SamplingParams) -> None:
    prompts = [[user(text)] for text in questions(8)]
    alone = []
    for prompt in prompts:
        llm._engine.kv_cache.clear()
        alone.append(llm.chat(prompt, params)[0].outputs[0].token_ids)
    llm._engine.kv_cache.clear()
    if [output.outputs[0].token_ids for output in llm.chat(prompts, params)] != alone:
        raise SystemExit("requests computed together give other tokens than alone: nothing measured")


def ask_together(llm: LLM, batch: int, params: SamplingParams) -> tuple[float, float, float]:
    """Tokens a second over all requests, the longest wait for a first token and between two, seconds."""
    llm._engine.kv_cache.clear()
    start = time.perf_counter()
    outputs = llm.chat([[user(text)] for text in questions(batch)], params)
    seconds = time.perf_counter() - start
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    firsts = [output.metrics.time_to_first_token_s or 0.0 for output in outputs]
    gaps = [output.metrics.inter_token_p99_s or 0.0 for output in outputs]
    return num_tokens / seconds, max(firsts), max(gaps)


def conversation(
    llm: LLM, forgetful: LLM, turns: int, params: SamplingParams
) -> list[tuple[int, float, float]]:
    """Of each turn: tokens of the prompt, and seconds to the first token with and without what was kept."""
    messages: list[dict[str, str]] = []
    figures = []
    llm._engine.kv_cache.clear()
    for text in questions(turns):
        messages.append(user(text))
        output = llm.chat(messages, params)[0]
        forgetful._engine.kv_cache.clear()
        anew = forgetful.chat(messages, params)[0]
        if anew.outputs[0].token_ids != output.outputs[0].token_ids:
            raise SystemExit("a turn from the cache gives other tokens than one without: nothing measured")
        first, first_anew = output.metrics.time_to_first_token_s, anew.metrics.time_to_first_token_s
        assert first is not None
        assert first_anew is not None
        figures.append((output.metrics.num_prompt_tokens, first, first_anew))
        messages.append({"role": "assistant", "content": output.outputs[0].text})
    return figures


def main() -> None:
    arguments = parse_arguments()
    folder = resolve_model(arguments.model)
    params = SamplingParams(temperature=0, max_tokens=arguments.tokens, ignore_eos=True)
    with (
        LLM(folder, workers=arguments.workers) as llm,
        LLM(folder, workers=arguments.workers) as forgetful,
    ):
        verify(llm, params)
        rounds = []
        together: dict[int, list[tuple[float, float, float]]] = {batch: [] for batch in BATCHES}
        for _ in range(arguments.rounds):
            for batch in BATCHES:
                together[batch].append(ask_together(llm, batch, params))
            rounds.append(conversation(llm, forgetful, arguments.turns, params))
    print(f"{cpu_name()}, {available_cores()} cores, {arguments.workers} workers; verified")
    print("requests  tok/s together  times one  of ceiling  longest wait s: first token  between two")
    batches = {
        batch: [statistics.median(column) for column in zip(*own, strict=True)]
        for batch, own in together.items()
    }
    one = batches[1][0]
    for batch, (speed, first, gap) in batches.items():
        print(
            f"{batch:8d} {speed:15.1f} {speed / one:10.2f} {speed / one / batch:11.1%} {first:28.3f} "
            f"{gap:12.3f}"
        )
    print("turn  prompt tokens  first token ms: kept  anew")
    turns = []
    for turn, figures in enumerate(zip(*rounds, strict=True), 1):
        kept, anew = (1e3 * statistics.median(each[column] for each in figures) for column in (1, 2))
        turns.append({"tokens": figures[0][0], "kept_ms": round(kept, 2), "anew_ms": round(anew, 2)})
        print(f"{turn:4d} {figures[0][0]:14d} {kept:21.1f} {anew:5.1f}")
    summary = {
        "benchmark": "offline/conversations",
        "commit": commit(),
        "machine": f"{cpu_name()}, {available_cores()} cores",
        "model": folder.name,
        "workers": arguments.workers,
        "rounds": arguments.rounds,
        "tokens": arguments.tokens,
        "tokens_per_s": {str(batch): round(own[0], 1) for batch, own in batches.items()},
        "longest_first_token_s": {str(batch): round(own[1], 4) for batch, own in batches.items()},
        "longest_inter_token_s": {str(batch): round(own[2], 4) for batch, own in batches.items()},
        "turns": turns,
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
