"""The demo model against transformers in float32: questions, and conversations past the sparse border."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV32ForCausalLM

from duckllm.demo import load_questions
from duckllm.engine.engine import Engine
from duckllm.layers import indexer
from duckllm.layers.rope import rotate_interleaved
from duckllm.text import Tokenizer
from support.attention import watch_selections
from support.models import TOLERANCE, all_logits, build_model, difference, greedy, greedy_replies
from support.reference import load_reference, reference_greedy, reference_logits

# Where the border of a selection is nearer than this to a tie, float32 rounding decides it.
UNDECIDED = 1e-6
EOS = 1
FIRST = "What was my first question?"


@pytest.fixture(scope="module")
def reference(demo_checkpoint: Path) -> DeepseekV32ForCausalLM:
    return load_reference(demo_checkpoint)


@pytest.fixture(scope="module")
def tokenizer(demo_checkpoint: Path) -> Tokenizer:
    return Tokenizer(demo_checkpoint)


def conversation(first: int, num_turns: int) -> list[dict[str, str]]:
    messages = []
    for question in load_questions()[first : first + num_turns]:
        messages.append({"role": "user", "content": question.question})
        messages.append({"role": "assistant", "content": question.answer})
    return messages


def test_greedy_tokens_equal_the_reference(
    reference: DeepseekV32ForCausalLM, tokenizer: Tokenizer, demo_folder: Path
) -> None:
    """64 steps on 20 questions. The reference judges each reply at once: token by token its likeliest.

    It makes three of the replies itself too, with its own cache, which takes longer.
    """
    engine = Engine(
        build_model(demo_folder),
        max_model_len=512,
        max_step_tokens=256,
        cache_tokens=2048,
        eos_token_ids=frozenset({EOS}),
    )
    questions = load_questions()[::9]
    assert len(questions) == 20
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": each.question}]) for each in questions
    ]
    replies = greedy_replies(engine, prompts, 64, ignore_eos=False)
    for question, prompt, reply in zip(questions, prompts, replies, strict=True):
        logits = reference_logits(reference, prompt + reply[:-1])[len(prompt) - 1 :]
        assert reply == logits.argmax(-1).tolist(), question
        assert EOS not in reply[:-1]
        assert len(reply) == 64 or reply[-1] == EOS
    for prompt, reply in list(zip(prompts, replies, strict=True))[::7]:
        assert reply == reference_greedy(reference, prompt, 64, EOS)


@pytest.mark.parametrize("first", [0, 40, 80, 120])
def test_logits_of_conversations_equal_the_reference(
    first: int,
    reference: DeepseekV32ForCausalLM,
    tokenizer: Tokenizer,
    demo_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Up to 300 tokens, of which those from the 129th on attend to 128 selected ones.

    Its four index heads give many scores of exactly zero, whose ties are decided by position, and now and
    then one that is zero but for rounding: positions where such a one lies on the border are left out and
    counted.
    """
    tokens = tokenizer.apply_chat_template(conversation(first, 12))[:300]
    assert len(tokens) > 200
    undecided = torch.zeros(len(tokens), dtype=torch.bool)

    def watch(_indexer: Any, _step: Any, _x: Any, scores: torch.Tensor | None, _selection: Any) -> None:
        assert scores is not None
        best = scores.topk(129, dim=-1).values
        gap = best[:, -2] - best[:, -1]
        undecided.logical_or_((gap > 0) & (gap < UNDECIDED))

    with monkeypatch.context() as watching:
        watch_selections(watching, watch)
        logits = all_logits(build_model(demo_folder), tokens, len(tokens))
    expected = reference_logits(reference, tokens)
    assert int(undecided.sum()) <= len(tokens) // 50
    assert difference(logits[~undecided], expected[~undecided]) <= TOLERANCE
    assert difference(logits[:128], expected[:128]) <= TOLERANCE


@pytest.mark.parametrize("step_tokens", [37, 1])
def test_chunks_and_single_tokens_equal_the_whole(
    step_tokens: int, reference: DeepseekV32ForCausalLM, tokenizer: Tokenizer, demo_folder: Path
) -> None:
    tokens = tokenizer.apply_chat_template(conversation(3, 4))[:128]
    logits = all_logits(build_model(demo_folder), tokens, step_tokens)
    assert difference(logits, reference_logits(reference, tokens)) <= TOLERANCE


def test_an_interleaved_indexer_is_rejected(
    reference: DeepseekV32ForCausalLM,
    tokenizer: Tokenizer,
    demo_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens = tokenizer.apply_chat_template(conversation(0, 12))[:300]
    monkeypatch.setattr(indexer, "rotate_half_split", rotate_interleaved)
    logits = all_logits(build_model(demo_folder), tokens, len(tokens))
    assert difference(logits, reference_logits(reference, tokens)) > 100 * TOLERANCE


@pytest.mark.parametrize(
    ("num_tokens", "is_found"),
    # The model was trained at up to 1024 tokens, and finds nothing behind them: neither here nor in the
    # reference, which must then be equally lost.
    [
        (500, True),
        pytest.param(1000, True, marks=pytest.mark.slow),
        pytest.param(1700, False, marks=pytest.mark.slow),
    ],
)
def test_the_first_question_is_found_as_far_back_as_the_reference_finds_it(
    num_tokens: int,
    is_found: bool,
    reference: DeepseekV32ForCausalLM,
    tokenizer: Tokenizer,
    demo_folder: Path,
) -> None:
    """Prefilled in steps of 256. The reference judges the reply: token by token its likeliest."""
    questions = load_questions()[60:]
    asked: list[dict[str, str]] = []
    prompt: list[int] = []
    for question in questions:
        asked.append({"role": "user", "content": question.question})
        asked.append({"role": "assistant", "content": question.answer})
        prompt = tokenizer.apply_chat_template([*asked, {"role": "user", "content": FIRST}])
        if len(prompt) >= num_tokens:
            break
    assert num_tokens <= len(prompt) < num_tokens + 300
    engine = Engine(
        build_model(demo_folder, max_tokens=4096),
        max_model_len=4096,
        max_step_tokens=256,
        cache_tokens=4096,
        eos_token_ids=frozenset({EOS}),
    )
    reply = greedy(engine, prompt, 24, ignore_eos=False)
    logits = reference_logits(reference, prompt + reply[:-1])[len(prompt) - 1 :]
    assert reply == logits.argmax(-1).tolist()
    assert (tokenizer.decode(reply) == questions[0].question) == is_found
