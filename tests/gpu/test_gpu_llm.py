"""Replies with the host part on a GPU: those of the CPU, with guesses and lanes, and past a lost worker."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from duckllm import LLM, SamplingParams
from duckllm.demo import load_questions

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0, max_tokens=60)


def conversations(count: int) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": each.question}] for each in load_questions()[:count]]


@pytest.mark.parametrize("workers", [0, 2])
def test_answers_are_the_cpus(demo_folder: Path, workers: int) -> None:
    answers = []
    for device in ("cpu", "cuda"):
        with LLM(demo_folder, workers=workers, max_model_len=400, device=device) as llm:
            answers.append([output.outputs[0].text for output in llm.chat(conversations(40), GREEDY)])
    assert answers[1] == answers[0]


@pytest.mark.parametrize("draft", ["off", "on"])
@pytest.mark.parametrize("lanes", ["off", "on"])
def test_a_killed_worker_changes_no_token(demo_folder: Path, draft: str, lanes: str) -> None:
    (first, second), params = conversations(2), SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with LLM(demo_folder, workers=2, device="cuda", draft=draft, lanes=lanes, max_model_len=200) as llm:
        expected = [output.outputs[0].token_ids for output in llm.chat([first, second], params)]
        for number in range(2):
            stream = llm.stream(first, params)
            tokens: list[int] = []
            for output in stream:
                tokens += output.token_ids
                if len(tokens) == 10 + number:
                    os.kill(llm.cluster_info().pids[number], signal.SIGKILL)
            assert tokens == list(expected[0])
        assert llm.chat([second], params)[0].outputs[0].token_ids == expected[1]
