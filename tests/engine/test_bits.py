"""What the model computes of a token is the same to the last bit, however it comes to be computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from duckllm.demo import load_questions
from duckllm.engine.engine import Drafting, Engine
from duckllm.engine.request import Request
from duckllm.models.causal_lm import CausalLM
from duckllm.models.mtp import MTPLayer
from duckllm.sampling_params import SamplingParams
from duckllm.text import Tokenizer
from support.drafting import GROUPED, SPARSE, load, make_engine, make_model

Subject = tuple[CausalLM, MTPLayer, list[int], int]
Rows = dict[int, torch.Tensor]


@pytest.fixture(scope="module", params=["sparse", "grouped", "demo"])
def subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, demo_folder: Any
) -> Subject:
    """A model, its layer of multi-token prediction, a prompt, and the longest context."""
    if request.param == "demo":
        model, mtp = load(demo_folder, 256)
        text = " ".join(each.question for each in load_questions()[:20])
        prompt = Tokenizer(demo_folder).apply_chat_template([{"role": "user", "content": text}])
        assert len(prompt) > 150, "the sparse attention must choose"
        return model, mtp, prompt[:190], 256
    spec = SPARSE if request.param == "sparse" else GROUPED
    model, mtp = make_model(tmp_path_factory.mktemp("model"), spec, max_tokens=64)
    return model, mtp, [5, 9, 20, 31, 7, 12, 8, 40, 41, 3] * 4, 64


def computed_rows(engine: Engine, request: Request, rows: Rows) -> None:
    """Runs a request and gathers the hidden state of each of its tokens, those computed twice too."""
    sample = engine._sample

    def gathering(*arguments: Any) -> Any:
        result = sample(*arguments)
        for each in result:
            if each.request is request:
                for number, row in enumerate(each.hidden):
                    before = rows.setdefault(each.start + number, row)
                    assert torch.equal(before, row)
        return result

    engine._sample = gathering  # type: ignore[method-assign]
    list(engine.run(request))
    engine._sample = sample  # type: ignore[method-assign]


def params(seed: int | None = None) -> SamplingParams:
    options: dict[str, Any] = {"temperature": 0.0} if seed is None else {"temperature": 1.0, "seed": seed}
    return SamplingParams(max_tokens=12, ignore_eos=True, **options)


@pytest.mark.parametrize("seed", [None, 3])
def test_bits_depend_on_the_tokens_alone(subject: Subject, seed: int | None) -> None:
    model, mtp, prompt, context = subject
    alone = make_engine(model, context=context, step=context)
    expected: Rows = {}
    request = alone.new_request(prompt, params(seed))
    computed_rows(alone, request, expected)
    assert sorted(expected) == list(range(len(prompt) + 11))

    def check(engine: Engine, first: int = 0) -> None:
        rows: Rows = {}
        again = engine.new_request(prompt, params(seed))
        computed_rows(engine, again, rows)
        assert again.token_ids == request.token_ids
        assert min(rows) == first
        for position, row in rows.items():
            assert torch.equal(row, expected[position]), position

    def make(step: int = context, drafts: int = 0, **options: Any) -> Engine:
        drafting = Drafting(mtp, drafts, "on") if drafts else None
        return make_engine(model, drafting, context=context, step=step, pages=60, **options)

    for step in (1, 7, 32):
        check(make(step))
    check(make(step=19, lanes="on"))
    check(make(step=23, drafts=2, lanes="on"))
    cached = make()
    check(cached)
    check(cached, first=(len(prompt) - 1) // 16 * 16)
    check_in_company(make(step=40, drafts=1, lanes="on"), prompt, check)


def check_in_company(engine: Engine, prompt: list[int], check: Callable[[Engine], None]) -> None:
    """Beside others, in pages that lie in no order as some were given back before."""
    leavers = [engine.new_request([number, *prompt[:20]], params()) for number in range(2, 8)]
    for leaver in leavers:
        engine.add(leaver)
    engine.step()
    for leaver in leavers[::2]:
        engine.abort(leaver)
    check(engine)
