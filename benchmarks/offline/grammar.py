"""What a grammar costs a token: following it, and choosing among what it allows.

    python benchmarks/offline/grammar.py [--replies 20]

For the demo model's vocabulary of 8192 tokens, and for one of 129280, as many as DeepSeek-V3's, made up of
random words, numbers, signs and Chinese characters. Replies are sampled from random logits under a JSON
Schema, any JSON object and a regular expression, and with one tool and twenty of them: free text that may
come to a call, and a call that must be. Each text is verified. Times are medians over all tokens, and the
worst: what a grammar has not seen yet takes longer. Then what is made to be hard to compile, with the longest
that another thread waited meanwhile. One JSON line at the end.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Literal

import numpy as np
import torch

from duckllm.bench.machine import commit
from duckllm.engine.sampler import Sampler
from duckllm.errors import ConfigError
from duckllm.sampling_params import SamplingParams, StructuredOutputsParams
from duckllm.text import Tokenizer
from duckllm.text.chat import ChatOptions, Tool
from duckllm.text.formats.known import HERMES
from duckllm.text.formats.reply_grammar import reply_grammar
from duckllm.text.grammar import GrammarTable
from duckllm.weights.resolve import resolve_model

LARGE = 129280
MAX_TOKENS = 200
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 5},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PATTERN = "[A-Za-z ]{10,60}[0-9]{3}"


def has_the_schemas_keys(text: str) -> object:
    return list(json.loads(text)) == ["name", "age", "tags"]


GRAMMARS: dict[str, tuple[StructuredOutputsParams, Callable[[str], object]]] = {
    "JSON Schema": (StructuredOutputsParams(json=SCHEMA), has_the_schemas_keys),
    "any JSON object": (
        StructuredOutputsParams(json_object=True),
        lambda text: isinstance(json.loads(text), dict),
    ),
    "regular expression": (StructuredOutputsParams(regex=PATTERN), re.compile(PATTERN).fullmatch),
}


def forms(table: GrammarTable) -> dict[str, tuple[StructuredOutputsParams, Callable[[str], object]]]:
    """What replies must keep to, and what a whole text must be."""
    begin, end = (int(number) for number in np.flatnonzero(~table.is_text)[:2])
    marks = {"<tool_call>": begin, "</tool_call>": end}

    def parts(text: str) -> list[int | str]:
        return [marks.get(piece, piece) for piece in re.split("(</?tool_call>)", text) if piece]

    def calling(num_tools: int, choice: Literal["auto", "required"]) -> StructuredOutputsParams:
        tools = [Tool(f"tool_{number}", "", SCHEMA, strict=True) for number in range(num_tools)]
        options = ChatOptions(tools, choice, parallel_tool_calls=False)
        outputs = reply_grammar(parts, None, HERMES, options, None, begins_in_reasoning=False)
        assert outputs is not None
        return outputs

    def is_call(text: str) -> object:
        return has_the_schemas_keys(json.dumps(json.loads(text)["arguments"]))

    found = dict(GRAMMARS)
    for num_tools in (1, 20):
        found[f"text, {num_tools} tools"] = calling(num_tools, "auto"), lambda text: True
        found[f"call, {num_tools} tools"] = calling(num_tools, "required"), is_call
    return found


def made_up(size: int) -> list[bytes]:
    """The 256 bytes, and tokens such as a byte-level BPE has."""
    order = random.Random(1)
    letters, signs = "etaoinshrdlucmfwypvbgkjqxz", "{}[]\",:;()=<>/\\ \n\t.-_'"
    tokens = dict.fromkeys(bytes([byte]) for byte in range(256))
    while len(tokens) < size:
        kind, length = order.random(), order.choice([2, 3, 3, 4, 4, 5, 6, 7, 8, 9])
        if kind < 0.85:
            word = "".join(letters[min(25, int(order.expovariate(0.18)))] for _ in range(length))
            token = order.choice(["", " "]) + order.choice([word, word, word.capitalize()])
        elif kind < 0.93:
            token = "".join(order.choice(signs + "0123456789") for _ in range(1 + length // 3))
        else:
            token = "".join(chr(order.randrange(0x4E00, 0x9FFF)) for _ in range(1 + length // 4))
        tokens[token.encode()] = None
    return list(tokens)


def measure(
    table: GrammarTable,
    name: str,
    outputs: StructuredOutputsParams,
    is_right: Callable[[str], object],
    num_replies: int,
) -> dict[str, float]:
    """Microseconds of each part."""
    begin = time.perf_counter()
    table.grammar(outputs, [])  # compiled once for all replies
    compile_s = time.perf_counter() - begin
    times: dict[str, list[float]] = {"follow": [], "greedy": [], "sampled": [], "free greedy": [], "free": []}
    greedy, sampled = Sampler(SamplingParams(temperature=0.0)), Sampler(SamplingParams(seed=1))
    numbers = torch.Generator().manual_seed(1)
    for _ in range(num_replies):
        grammar, token_ids = table.grammar(outputs, []), []
        while not grammar.is_finished and len(token_ids) < MAX_TOKENS:
            logits = 2 * torch.randn(table.end, generator=numbers)

            def timed(part: str, choose: Callable[[], int]) -> int:
                start = time.perf_counter()
                chosen = choose()
                times[part].append(time.perf_counter() - start)
                return chosen

            allowed = grammar.allowed
            timed("greedy", lambda: greedy.sample(logits, token_ids, allowed))  # noqa: B023
            timed("free greedy", lambda: greedy.sample(logits, token_ids))  # noqa: B023
            timed("free", lambda: sampled.sample(logits, token_ids))  # noqa: B023
            token_ids.append(timed("sampled", lambda: sampled.sample(logits, token_ids, allowed)))  # noqa: B023
            start = time.perf_counter()
            grammar.accept(token_ids[-1])
            _ = grammar.allowed
            times["follow"].append(time.perf_counter() - start)
        if grammar.is_finished and not is_right(b"".join(table.tokens[each] for each in token_ids).decode()):
            raise SystemExit(f"{name}: a text that is not of the grammar")
    medians = {part: statistics.median(each) * 1e6 for part, each in times.items()}
    worst = max(times["follow"]) * 1e6
    return medians | {"worst follow": worst, "compile": compile_s * 1e6, "tokens": len(times["follow"])}


def hard() -> dict[str, StructuredOutputsParams]:
    """What takes long to compile, or can be refused at once alone."""
    order = random.Random(1)
    words = ["".join(order.choice("abcdefghijklm") for _ in range(12)) for _ in range(200_000)]
    nested: dict[str, object] = {}
    for _ in range(60):
        nested = {"type": "object", "properties": {"a": nested, "b": {"type": "string"}}}
    wide = {"type": "object", "properties": {f"k{number}": {"type": "string"} for number in range(10_000)}}
    return {
        "a{1000}{1000}": StructuredOutputsParams(regex="a{1000}{1000}"),
        r"(\w{1,100}\s){1,100}": StructuredOutputsParams(regex=r"(\w{1,100}\s){1,100}"),
        "an enum of 10000": StructuredOutputsParams(json={"enum": words[:10_000]}),
        "an enum of 200000": StructuredOutputsParams(json={"enum": words}),
        "60 objects in each other": StructuredOutputsParams(json=nested),
        "10000 properties": StructuredOutputsParams(json=wide),
        "a multiple of 99991": StructuredOutputsParams(json={"type": "integer", "multipleOf": 99991}),
    }


def compile_beside(table: GrammarTable, outputs: StructuredOutputsParams) -> tuple[float, float, bool]:
    """Seconds to compile it, the longest that another thread waited, and whether it was refused."""
    beats, is_over = [time.perf_counter()], threading.Event()

    def beat() -> None:
        while not is_over.wait(0.0005):
            beats.append(time.perf_counter())

    thread = threading.Thread(target=beat)
    thread.start()
    begin, is_refused = time.perf_counter(), False
    try:
        table.grammar(outputs, [])
    except ConfigError:
        is_refused = True
    took_s = time.perf_counter() - begin
    is_over.set()
    thread.join()
    return took_s, max((after - before for before, after in pairwise(beats)), default=took_s), is_refused


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replies", type=int, default=20, help="replies for each grammar")
    num_replies = parser.parse_args().replies
    torch.set_num_threads(1)
    line: dict[str, object] = {"benchmark": "offline/grammar", "commit": commit()}
    for size in (8192, LARGE):
        tokenizer, tokens = Tokenizer(resolve_model(None)), [*made_up(LARGE - 2), b"", b""]
        start = time.perf_counter()
        table = GrammarTable.of(tokenizer, size) if size == 8192 else GrammarTable(tokens)
        made_s = time.perf_counter() - start
        print(f"{size} tokens: table made in {made_s:.2f} s; microseconds a token:")
        for name, (outputs, is_right) in forms(table).items():
            found = measure(table, name, outputs, is_right, num_replies)
            print(
                f"  {name:18s}  follow {found['follow']:5.0f} (worst {found['worst follow']:5.0f})"
                f"  greedy {found['greedy']:5.0f}, free {found['free greedy']:5.0f}"
                f"  sampled {found['sampled']:5.0f}, free {found['free']:5.0f}  ({found['tokens']} tokens,"
                f" compiled in {found['compile'] / 1000:.0f} ms)"
            )
            line[f"{name}, {size}"] = {part: round(value, 1) for part, value in found.items()}
    print(f"{LARGE} tokens: compiled in, another thread waited at most:")
    for name, outputs in hard().items():
        took_s, waited_s, is_refused = compile_beside(table, outputs)
        verdict = "refused" if is_refused else "taken"
        print(f"  {name:24s}  {took_s * 1e3:6.1f} ms  {waited_s * 1e3:6.1f} ms  {verdict}")
        line[f"compile {name}"] = {"ms": round(took_s * 1e3, 1), "waited_ms": round(waited_s * 1e3, 1)}
    print(json.dumps(line))


if __name__ == "__main__":
    main()
