from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from duckllm.errors import ConfigError
from duckllm.sampling_params import SamplingParams, StructuredOutputsParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("temperature", 1_000_001),
        ("temperature", 10**400),
        ("top_p", 10**400),
        ("min_p", float("nan")),
        ("temperature", True),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("seed", -1),
        ("seed", 1.0),
        ("max_tokens", 0),
        ("max_tokens", 2.0),
        ("ignore_eos", 1),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1_000_001),
        ("repetition_penalty", float("nan")),
        ("frequency_penalty", 2.1),
        ("frequency_penalty", "much"),
        ("presence_penalty", -2.1),
        ("presence_penalty", True),
        ("min_tokens", -1),
        ("min_tokens", 2**31),
        ("logprobs", -1),
        ("logprobs", 21),
        ("logprobs", True),
        ("n", 0),
        ("n", 16385),
        ("include_stop_str_in_output", None),
        ("skip_special_tokens", "no"),
        ("logit_bias", [1]),
        ("logit_bias", {1: 100.5}),
        ("logit_bias", {1: float("nan")}),
        ("logit_bias", {"1": 1}),
        ("logit_bias", {-1: 1}),
        ("logit_bias", {True: 1}),
        ("stop", ""),
        ("stop", 5),
        ("stop", b"x"),
        ("stop_token_ids", 5),
        ("stop_token_ids", "5"),
        ("stop_token_ids", {5}),
    ],
)
def test_a_bad_value_is_an_error_that_names_field_and_value(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**{field: value})
    shown = repr(value)[:38]
    assert str(caught.value).startswith(f"{field}: got {shown}")
    assert ", expected " in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("logit_bias", {3: 1, 4: 101}, "{4: 101}"),
        ("stop", ["a", ""], "''"),
        ("stop", ["a", 5], "5"),
        ("stop", ["\udcff"], "text that UTF-8 cannot hold"),
        ("stop_token_ids", [1, -2], "-2"),
        ("stop_token_ids", [1.0], "1.0"),
        ("stop_token_ids", [False], "False"),
    ],
)
def test_what_is_wrong_in_a_collection_is_named_alone(field: str, value: object, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**{field: value})
    assert str(caught.value).startswith(f"{field}: got {named}, expected a ")


def test_min_tokens_are_no_more_than_max_tokens() -> None:
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    with pytest.raises(ConfigError, match="min_tokens: got 6, expected an integer from 0 to max_tokens=5"):
        SamplingParams(min_tokens=6, max_tokens=5)


def test_several_greedy_replies_are_refused() -> None:
    assert SamplingParams(n=2, temperature=0.5).n == 2
    with pytest.raises(ConfigError, match="n: got 2, expected 1 with temperature=0"):
        SamplingParams(n=2, temperature=0.0)


def test_stop_is_one_string_or_several() -> None:
    assert SamplingParams().stop_strings == ()
    assert SamplingParams(stop="ab").stop_strings == ("ab",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams(stop=()).stop_strings == ()


def test_params_can_be_changed_and_hashed() -> None:
    params = SamplingParams(stop=["a"], logit_bias={1: 2}, stop_token_ids=[3])
    changed = dataclasses.replace(params, seed=1)
    assert changed != params
    assert dataclasses.replace(changed, seed=None) == params
    assert hash(dataclasses.replace(changed, seed=None)) == hash(params)


def test_an_unknown_field_is_named() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)


def test_defaults_come_from_the_generation_config() -> None:
    assert SamplingParams.from_generation_config({"do_sample": False, "temperature": 0.6}).greedy
    assert SamplingParams.from_generation_config({}).greedy
    sampled = SamplingParams.from_generation_config(
        {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": None, "eos_token_id": 1}
    )
    assert sampled == SamplingParams(temperature=0.6, top_p=0.95)


def test_a_models_own_repetition_penalty_is_a_default() -> None:
    assert SamplingParams.from_generation_config(
        {"repetition_penalty": 1.05, "temperature": 0.7}
    ) == SamplingParams(temperature=0.0, repetition_penalty=1.05)
    sampled = {"do_sample": True, "repetition_penalty": 1.05, "temperature": 0.7, "top_k": 20}
    expected = SamplingParams(temperature=0.7, top_k=20, repetition_penalty=1.05)
    assert SamplingParams.from_generation_config(sampled) == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {},
            "structured_outputs: got none, expected exactly one of json, regex, choice, grammar, json_object",
        ),
        ({"json_object": False}, "structured_outputs: got none, "),
        ({"regex": "a", "choice": ["b"]}, "structured_outputs: got choice and regex, expected exactly one"),
        ({"json_object": 1}, "structured_outputs.json_object: got 1, expected True, or None"),
        ({"json": 3}, "structured_outputs.json: got 3, expected a JSON Schema, as a mapping or its text"),
        (
            {"json": "{"},
            "structured_outputs.json: got '{', expected a JSON Schema, as a mapping or its text (",
        ),
        ({"json": "[]"}, "structured_outputs.json: got '[]', expected a JSON Schema"),
        ({"json": {"const": float("nan")}}, "structured_outputs.json: got {'const': nan}, expected a JSON"),
        ({"json": {"const": object}}, "structured_outputs.json: got {'const': <class 'object'>}, expected"),
        ({"json": '{"const": "\\ud800"}'}, "structured_outputs.json: got text that UTF-8 cannot hold"),
        ({"regex": ""}, "structured_outputs.regex: got '', expected text, not empty"),
        ({"regex": b"a"}, "structured_outputs.regex: got b'a', expected text"),
        ({"grammar": ["a"]}, "structured_outputs.grammar: got ['a'], expected text"),
        ({"choice": "yes"}, "structured_outputs.choice: got 'yes', expected a list of texts"),
        ({"choice": []}, "structured_outputs.choice: got [], expected a list of texts that are not empty"),
        ({"choice": ["yes", ""]}, "structured_outputs.choice[1]: got '', expected a text that is not"),
        ({"choice": ["\ud800"]}, "structured_outputs.choice[0]: got text that UTF-8 cannot hold"),
    ],
)
def test_structured_outputs_that_make_no_sense_name_the_field(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        StructuredOutputsParams(**values)
    assert str(raised.value).startswith(message)


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(3000):
        schema = {"items": schema}
    message = r"structured_outputs\.json: got a value that is nested too deeply, expected a JSON Schema"
    with pytest.raises(ConfigError, match=message):
        StructuredOutputsParams(json=schema)


def test_structured_outputs_are_values() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {"const": "é"}}}
    one, other = (StructuredOutputsParams(json=dict(schema)) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    assert one.schema == '{"type": "object", "properties": {"b": {}, "a": {"const": "é"}}}'
    assert StructuredOutputsParams(json=one.schema).schema == one.schema
    assert StructuredOutputsParams(json_object=True).schema == '{"type": "object"}'
    params = SamplingParams(structured_outputs=one)
    assert params == SamplingParams(structured_outputs=other)
    assert hash(params) == hash(SamplingParams(structured_outputs=other))
    assert params != SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a"]))
    with pytest.raises(
        ConfigError, match=r"structured_outputs: got .* expected StructuredOutputsParams, or None"
    ):
        SamplingParams(structured_outputs={"json": {}})  # type: ignore[arg-type]
