"""Whole replies with guesses and lanes against replies with neither: texts, ends, log probabilities."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from duckllm import LLM, RequestOutput, SamplingParams
from duckllm.errors import ConfigError

DUCK = [{"role": "user", "content": "What is a duck?"}]
SWAN = [{"role": "user", "content": "What is a swan?"}]
GREEDY = SamplingParams(temperature=0, max_tokens=40)
SAMPLED = SamplingParams(temperature=1.2, top_p=0.97, seed=5, max_tokens=40)
CASES = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "several": replace(SAMPLED, n=3),
    "stop string": replace(GREEDY, stop=["wild", "suddenly"]),
    "stop string kept": replace(GREEDY, stop="or away; ", include_stop_str_in_output=True),
    "stop string across guesses": replace(GREEDY, stop=["quickly down"]),
    "log probabilities": replace(SAMPLED, logprobs=3),
    "penalties": replace(SAMPLED, presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.3),
    "bias": replace(GREEDY, logit_bias={37: 4.0, 259: -100.0}),
    "longer than it would be": replace(GREEDY, min_tokens=45, max_tokens=60),
    "one token": replace(GREEDY, max_tokens=1),
    "two tokens": replace(GREEDY, max_tokens=2),
    "on behind its end": replace(GREEDY, ignore_eos=True, max_tokens=70),
}


@pytest.fixture(scope="module")
def plain(demo_folder: Path) -> Iterator[LLM]:
    with LLM(demo_folder, workers=2, max_model_len=200, draft="off", lanes="off") as llm:
        yield llm


@pytest.fixture(scope="module")
def guessing(demo_folder: Path) -> Iterator[LLM]:
    options = {"draft": "on", "draft_tokens": 3, "lanes": "on"}
    with LLM(demo_folder, workers=2, max_model_len=200, **options) as llm:
        yield llm


def without_times(outputs: list[RequestOutput]) -> list[object]:
    return [(output.prompt_token_ids, output.outputs) for output in outputs]


@pytest.mark.parametrize("params", list(CASES.values()), ids=list(CASES))
def test_replies_are_the_same(plain: LLM, guessing: LLM, params: SamplingParams) -> None:
    expected = plain.chat([DUCK, SWAN], params)
    got = guessing.chat([DUCK, SWAN], params)
    assert without_times(got) == without_times(expected)
    if params.max_tokens is None or params.max_tokens > 2:  # the last token needs no guess
        assert sum(output.metrics.num_accepted_tokens for output in got) > 0


@pytest.mark.parametrize(
    "params", [CASES["stop string"], CASES["log probabilities"]], ids=["stop", "logprobs"]
)
def test_streams_add_up_to_the_same(plain: LLM, guessing: LLM, params: SamplingParams) -> None:
    [expected] = plain.chat(DUCK, params)[0].outputs
    outputs = list(guessing.stream(DUCK, params))
    assert "".join(output.text for output in outputs) == expected.text
    assert tuple(token for output in outputs for token in output.token_ids) == expected.token_ids
    assert [len(output.token_ids) for output in outputs] == [1] * len(outputs)
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == (
        expected.finish_reason,
        expected.stop_reason,
    )
    if params.logprobs is not None:
        assert tuple(each for output in outputs for each in output.logprobs or ()) == expected.logprobs


def test_a_stream_that_is_left_leaves_nothing_behind(plain: LLM, guessing: LLM) -> None:
    stream = guessing.stream(DUCK, GREEDY)
    for _ in range(5):
        next(stream)
    stream.close()
    engine = guessing._engine
    assert engine.kv_cache.num_available_pages == engine.kv_cache.num_pages
    assert engine.drafter is not None
    assert engine.drafter._kept == {}
    assert without_times(guessing.chat(SWAN, GREEDY)) == without_times(plain.chat(SWAN, GREEDY))


def test_stats_count_guesses(guessing: LLM) -> None:
    before = guessing.stats()
    [output] = guessing.chat(DUCK, GREEDY)
    after = guessing.stats()
    metrics = output.metrics
    assert after.num_draft_tokens - before.num_draft_tokens == metrics.num_draft_tokens > 0
    assert after.num_accepted_tokens - before.num_accepted_tokens == metrics.num_accepted_tokens > 0
    assert after.num_generated_tokens - before.num_generated_tokens == metrics.num_generated_tokens
    assert after.acceptance is not None
    assert after.step_parts_s["draft_s"] > 0
    assert after.num_steps - before.num_steps == metrics.num_generated_tokens - metrics.num_accepted_tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft": "maybe"}, "draft: got 'maybe', expected one of auto, on, off, stateless"),
        ({"draft_tokens": 0}, "draft_tokens: got 0, expected a whole number from 1 to 8"),
        ({"lanes": True}, "lanes: got True, expected one of auto, on, off"),
    ],
)
def test_options_are_checked(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(**options)  # type: ignore[arg-type]


def test_guesses_need_a_layer_that_makes_them(demo_checkpoint: Path, tmp_path: Path) -> None:
    """A checkpoint saved without it answers, and refuses to be asked for guesses."""
    layers = json.loads((demo_checkpoint / "config.json").read_text())["num_hidden_layers"]
    tensors: dict[str, torch.Tensor] = {}
    for path in demo_checkpoint.iterdir():
        if path.suffix == ".safetensors":
            tensors |= load_file(path)
        elif path.is_file() and "index" not in path.name:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    kept = {name: tensor for name, tensor in tensors.items() if f"layers.{layers}." not in name}
    assert len(kept) < len(tensors)
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ConfigError, match="draft: got on, expected auto or off, as the checkpoint has no layer"
    ):
        LLM(tmp_path, workers=0, draft="on")
    with LLM(tmp_path, workers=0, max_model_len=100) as llm:
        [output] = llm.chat(DUCK, replace(GREEDY, max_tokens=5))
        assert output.outputs[0].text == "verb: to move ("
        assert output.metrics.num_draft_tokens == 0
