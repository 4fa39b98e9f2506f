"""Conversations past 900 tokens, beyond what sparse attention reads at once, from each tier of the cache."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from duckllm import LLM, SamplingParams
from duckllm.cli.main import app
from duckllm.demo import load_questions
from duckllm.engine.kv_cache import PAGE_TOKENS
from duckllm.outputs import CachedTokens

# With log probabilities, so that equal outputs are equal to the last bit.
GREEDY = SamplingParams(temperature=0, max_tokens=60, logprobs=3)
TOKENS = 900
FIRST, PREVIOUS = "What was my first question?", "What was my previous question?"
SESSION = ["chat", "--session", "ducks", "--workers", "0", "--json", "--prompt"]


def talk_past(llm: LLM) -> list[dict[str, str]]:
    """A conversation of more than 900 tokens, as the demo model's questions and answers."""
    messages: list[dict[str, str]] = []
    for question in load_questions()[1:]:
        messages.append({"role": "user", "content": question.question})
        messages.append({"role": "assistant", "content": question.answer})
        if len(llm.tokenizer.apply_chat_template(messages)) > TOKENS:
            return messages
    raise AssertionError


@pytest.mark.timeout(300)
def test_the_first_question_is_remembered_from_every_tier(demo_folder: Path, tmp_path: Path) -> None:
    options = {"workers": 0, "max_model_len": 1024}
    with LLM(demo_folder, **options) as llm:
        messages = talk_past(llm)
        asked = [[*messages, {"role": "user", "content": text}] for text in (FIRST, PREVIOUS)]
        expected = [llm.chat(each, GREEDY)[0] for each in asked]
        page_bytes = llm._engine.kv_cache.format.page_bytes
    assert expected[0].outputs[0].text == messages[0]["content"]
    assert expected[1].outputs[0].text == messages[-2]["content"]
    num_cached = (len(expected[0].prompt_token_ids) - 1) // PAGE_TOKENS * PAGE_TOKENS
    assert num_cached >= TOKENS - PAGE_TOKENS
    # The second question begins alike, up to its own words.
    assert expected[1].num_cached_tokens >= TOKENS - 2 * PAGE_TOKENS
    one_context = 64 * page_bytes
    with LLM(
        demo_folder,
        **options,
        kv_cache_bytes=one_context,
        kv_memory_bytes=4 * one_context,
        kv_disk_dir=tmp_path,
    ) as llm:
        assert llm.chat(asked[0], GREEDY)[0].metrics.cached_tokens == CachedTokens()
        other = list(range(10, 10 + 1000))
        llm.generate(other, SamplingParams(temperature=0, max_tokens=2))
        output = llm.chat(asked[0], GREEDY)[0]
        assert output.outputs == expected[0].outputs
        assert output.metrics.cached_tokens.total == num_cached
        assert output.metrics.cached_tokens.memory >= num_cached - 2 * PAGE_TOKENS
    with LLM(demo_folder, **options, kv_disk_dir=tmp_path) as llm:
        for question, expectation in zip(asked, expected, strict=True):
            output = llm.chat(question, GREEDY)[0]
            assert output.outputs == expectation.outputs
            if question is asked[0]:
                assert output.metrics.cached_tokens == CachedTokens(disk=num_cached)


@pytest.mark.timeout(120)
def test_a_session_goes_on_in_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUCKLLM_SESSION_DIR", str(tmp_path))

    here = CliRunner().invoke(app, [*SESSION, "List all prime numbers below 127."])
    assert here.exit_code == 0, here.output
    assert json.loads(here.stdout)["num_cached_tokens"] == 0
    kept = json.loads((tmp_path / "ducks" / "conversation.json").read_text())
    command = [sys.executable, "-m", "duckllm", *SESSION, FIRST]
    second = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert second["text"] == "List all prime numbers below 127."
    num_full = (len(kept["token_ids"]) - 1) // PAGE_TOKENS
    assert num_full > 5
    assert second["cached_tokens"] == {"device": 0, "memory": 0, "disk": num_full * PAGE_TOKENS}
