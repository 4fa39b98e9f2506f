"""Grammars with parts and control tokens: free thoughts before a form, calls in the midst of free text."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from duckllm import SamplingParams, StructuredOutputsParams
from duckllm.engine.engine import Drafting, Engine
from duckllm.errors import ConfigError
from duckllm.models.causal_lm import CausalLM
from duckllm.models.mtp import MTPLayer
from duckllm.text.grammar import GrammarTable
from duckllm.text.grammar_trial import GrammarTrial
from support.drafting import GROUPED, Remembering, make_engine, make_model
from support.grammars import EOS, TOKENS, new_request, random_logits, run, tiny_table

# Tokens that are no text: the marks of this markup.
BEGIN, END = 0, 2
ARGUMENTS = StructuredOutputsParams(
    json={
        "type": "object",
        "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "y": {"enum": ["ab", "é"]}},
        "required": ["x"],
        "additionalProperties": False,
    }
)
DIGITS = StructuredOutputsParams(regex="[0-9]{2}x?")
OTHER_WORDS = StructuredOutputsParams(grammar='start: "cd" | "ab" "c"')


def spell(token_ids: Sequence[int]) -> str:
    """The text with its marks, each of which stands where its token does."""
    marks = {BEGIN: b"<", END: b">"}
    return b"".join(marks.get(each, TOKENS[each]) for each in token_ids if each != EOS).decode()


def is_call(text: str) -> bool:
    value = json.loads(text)
    assert list(value) in (["x"], ["x", "y"])
    assert type(value["x"]) is int
    return 0 <= value["x"] <= 99 and value.get("y", "ab") in ("ab", "é")


def is_thought_then_digits(text: str) -> bool:
    return re.fullmatch("[^<>]*>[0-9]{2}x?", text) is not None


def is_thought_in_text_then_call(text: str) -> bool:
    thought, found, rest = text.partition("},")
    return bool(found) and "<" not in thought and is_call(rest)


def is_free_with_calls(text: str) -> bool:
    free, *calls = text.split("<")
    assert "zz" not in free
    for call in calls:
        name, arguments, after = call[0], call[1 : call.index(">")], call[call.index(">") + 1 :]
        assert (name == "f" and is_call(arguments)) or (name == "g" and arguments in ("cd", "abc"))
        assert "zz" not in after
    return True


GRAMMARS: dict[str, tuple[StructuredOutputsParams, Callable[[str], object]]] = {
    "thought, digits": (
        StructuredOutputsParams(
            grammar=f"start: TEXT <[{END}]> @digits\nTEXT: /(?s:.*)/",
            parts={"digits": DIGITS},
            control_token_ids=[END],
        ),
        is_thought_then_digits,
    ),
    "thought that ends in text, call": (
        StructuredOutputsParams(
            grammar="start: thought @call\nthought[lazy]: /(?s:.*)},/", parts={"call": ARGUMENTS}
        ),
        is_thought_in_text_then_call,
    ),
    "calls in free text": (
        StructuredOutputsParams(
            grammar=f'start: TEXT (<[{BEGIN}]> ("f" @f | "g" @g) <[{END}]> TEXT)*\n'
            "TEXT: /(?s:.*)/ & ~/(?s:.*zz.*)/",
            parts={"f": ARGUMENTS, "g": OTHER_WORDS},
            control_token_ids=[BEGIN, END],
        ),
        is_free_with_calls,
    ),
}


@pytest.fixture(scope="module")
def table() -> GrammarTable:
    return tiny_table()


@pytest.mark.parametrize("name", GRAMMARS)
def test_control_tokens_come_where_the_grammar_has_them(table: GrammarTable, name: str) -> None:
    outputs, matches = GRAMMARS[name]
    num_marks, num_stopped = 0, 0
    for seed in range(60):
        options: dict[str, Any] = {"temperature": 1.5, "seed": seed} if seed % 2 else {}
        bias = {EOS: 2, BEGIN: 4, END: 4, TOKENS.index(b"},"): seed % 3}
        request = new_request(table, outputs, max_tokens=150, logit_bias=bias, **options)
        run(request, random_logits(len(TOKENS), seed))
        assert request.finish_reason in ("stop", "length"), request.stop_reason
        if request.finish_reason == "stop":
            assert matches(spell(request.output_token_ids)), spell(request.output_token_ids)
            num_stopped += 1
        used = set(request.output_token_ids) - {EOS}
        assert used & {BEGIN, END} <= set(outputs.control_token_ids)
        num_marks += len(used & {BEGIN, END})
    assert num_stopped > 10
    assert (num_marks > 10) == bool(outputs.control_token_ids)


def test_a_control_token_needs_leave(table: GrammarTable) -> None:
    for grammar in (f'start: "a" (<[{END}]> | "b")', 'start: "a" (<[*]> | "b")'):
        for allowed, expected in (([], b"ab"), ([BEGIN], b"ab"), ([END], b"a")):
            outputs = StructuredOutputsParams(grammar=grammar, control_token_ids=allowed)
            request = new_request(table, outputs, logit_bias={END: 100})
            run(request, random_logits(len(TOKENS), 1))
            if grammar.count("*"):
                assert (END in request.output_token_ids) == (END in allowed)
            else:
                assert b"".join(TOKENS[each] for each in request.output_token_ids) == expected
    # Nor does an end token end a thought, however much the model wants it.
    outputs, _ = GRAMMARS["thought, digits"]
    request = new_request(table, outputs, max_tokens=30, logit_bias={EOS: 100, END: -100})
    assert run(request, random_logits(len(TOKENS), 1)).finish_reason == "length"
    assert EOS not in request.output_token_ids
    # A stop token cuts where the grammar has it.
    request = new_request(table, outputs, max_tokens=30, logit_bias={END: 2}, stop_token_ids=[END])
    run(request, random_logits(len(TOKENS), 1))
    assert (request.finish_reason, request.stop_reason) == ("stop", END)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[CausalLM, MTPLayer]:
    return make_model(tmp_path_factory.mktemp("model"), GROUPED, max_tokens=64)


def replies(engine: Engine, table: GrammarTable, name: str) -> list[tuple[int, ...]]:
    """Greedy and sampled ones, two of them to one prompt, several at once."""
    engine.grammar_table = table
    outputs, _ = GRAMMARS[name]
    bias = {EOS: 2.0, BEGIN: 3.0, END: 3.0}
    each: list[dict[str, Any]] = [{"temperature": 0.0}, *({"temperature": 1.2, "seed": n} for n in range(3))]
    requests = [
        engine.new_request(
            [5, 9, 20],
            SamplingParams(max_tokens=40, structured_outputs=outputs, logit_bias=bias, **options),
            index=number % 2,
        )
        for number, options in enumerate(each)
    ]
    for request in requests:
        engine.add(request)
    for request in requests:
        list(engine.run(request))
    return [request.output_token_ids for request in requests]


@pytest.mark.parametrize("lanes", ["off", "on"])
def test_no_token_depends_on_guesses_or_lanes(
    pair: tuple[CausalLM, MTPLayer], table: GrammarTable, lanes: str
) -> None:
    model, mtp = pair
    ends = frozenset({EOS})
    for name, (_, matches) in GRAMMARS.items():
        expected = replies(make_engine(model, eos_token_ids=ends), table, name)
        assert all(matches(spell(reply)) for reply in expected if len(reply) < 40)
        right = Remembering(model)
        for reply in expected:
            right.learn([20, *reply])
        for layer in (mtp, right):
            engine = make_engine(model, Drafting(layer, 3, "on"), eos_token_ids=ends, lanes=lanes)
            assert replies(engine, table, name) == expected, name
        assert engine.stats.metrics().num_accepted_tokens > 0


def test_grammars_are_compiled_in_other_threads_while_steps_are_computed(
    pair: tuple[CausalLM, MTPLayer], table: GrammarTable, demo_checkpoint: Path
) -> None:
    model, _ = pair
    engine = make_engine(model, eos_token_ids=frozenset({EOS}))
    name = "calls in free text"
    expected = replies(make_engine(model, eos_token_ids=frozenset({EOS})), table, name)
    engine.grammar_table = table
    found: list[object] = []

    def prepare(worker: int) -> None:
        for number in range(20):
            pattern = f"[a-z]{{{number + 1}}}{worker}" if number % 5 else "("
            outputs = StructuredOutputsParams(regex=pattern)
            try:
                engine.new_request([3], SamplingParams(structured_outputs=outputs))
                found.append(pattern)
            except ConfigError as error:
                found.append(error.field)

    threads = [threading.Thread(target=prepare, args=(worker,)) for worker in range(3)]
    for thread in threads:
        thread.start()
    assert replies(engine, table, name) == expected
    for thread in threads:
        thread.join()
    assert found.count("structured_outputs.regex") == 12
    assert len(set(found)) == 49


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"regex": "a", "parts": {"a": DIGITS}}, "parts"),
        ({"json_object": True, "control_token_ids": [3]}, "control_token_ids"),
        ({"grammar": "start: @a", "parts": {"a": "[0-9]"}}, "parts"),
        ({"grammar": "start: @a", "parts": {"A-": DIGITS}}, "parts"),
        ({"grammar": "start: @a", "parts": [DIGITS]}, "parts"),
        ({"grammar": "start: @a", "parts": {"a": GRAMMARS["thought, digits"][0]}}, "parts"),
        (
            {"grammar": "start: @a", "parts": {"a": StructuredOutputsParams(grammar="start: <[2]>")}},
            "parts.a",
        ),
        ({"grammar": 'start: "a"', "control_token_ids": ["<b>"]}, "control_token_ids"),
        ({"grammar": 'start: "a"', "control_token_ids": 3}, "control_token_ids"),
    ],
)
def test_parts_and_control_tokens_are_checked(values: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as raised:
        StructuredOutputsParams(**values)
    assert raised.value.field == f"structured_outputs.{field}"


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def wide(width: int, depth: int) -> dict[str, Any]:
    if depth == 0:
        return {"type": "string"}
    return {"type": "object", "properties": {f"k{n}": wide(width, depth - 1) for n in range(width)}}


@pytest.mark.parametrize(
    "outputs",
    [
        {"regex": "a{1000}{1000}"},
        {"json": nested(90)},
        {"json": wide(30, 3)},
        {"json": wide(1000, 1)},
        {
            "json": {
                "allOf": [
                    {"anyOf": [{"properties": {f"{n}{m}": {"type": "null"}}} for n in range(4)]}
                    for m in range(8)
                ]
            }
        },
        {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}},
        {"grammar": 'start: a{1000}\na: b{1000}\nb: c{1000}\nc: "x"'},
        # These end the process that tries them out, by time and by depth.
        {"json": {"type": "string", "allOf": [{"pattern": f"a{number}b"} for number in range(60)]}},
        {"grammar": "\n".join(f'r{n}: r{n + 1} | "a{n}"' for n in range(3000)) + '\nr3000: "z"\nstart: r0'},
    ],
)
def test_what_would_be_too_large_to_follow_is_refused(table: GrammarTable, outputs: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected one "):
        new_request(table, StructuredOutputsParams(**outputs))


def test_a_part_that_cannot_be_kept_to_is_named(table: GrammarTable) -> None:
    for part, field in (
        (StructuredOutputsParams(json={"uniqueItems": True}), "structured_outputs.parts.b.json"),
        (StructuredOutputsParams(regex="("), "structured_outputs.parts.b.regex"),
    ):
        outputs = StructuredOutputsParams(grammar='start: @a "," @b', parts={"a": DIGITS, "b": part})
        with pytest.raises(ConfigError) as raised:
            new_request(table, outputs)
        assert raised.value.field == field
    for grammar, parts in (("start: @a @c", {"a": DIGITS}), ("start: a", {"a": DIGITS})):
        with pytest.raises(ConfigError) as raised:
            new_request(table, StructuredOutputsParams(grammar=grammar, parts=parts))
        assert raised.value.field == "structured_outputs.grammar"
    outputs = StructuredOutputsParams(grammar='start: "a"', control_token_ids=[len(TOKENS)])
    with pytest.raises(ConfigError) as raised:
        new_request(table, outputs)
    assert raised.value.field == "structured_outputs.control_token_ids"


def test_the_process_that_tries_grammars_out_begins_anew_and_ends() -> None:
    trial = GrammarTrial()
    good = "start: /[a-c]/"
    assert trial.why_not(good) == ""
    assert "unknown name" in trial.why_not("start: b")
    process = trial._process
    assert process is not None
    assert process.poll() is None
    process.kill()
    process.wait()
    assert trial.why_not(good) == ""
    process = trial._process
    assert process is not None
    del trial
    assert process.poll() is not None
