"""Log probabilities of a prompt's tokens, whatever steps it is computed in and whatever of it is cached."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from duckllm.engine import engine as engine_module
from duckllm.engine.engine import Drafting, Engine
from duckllm.engine.request import Request
from duckllm.errors import ConfigError, ModelError
from duckllm.models.causal_lm import CausalLM
from duckllm.models.mtp import MTPLayer
from duckllm.outputs import PromptLogprobs
from duckllm.sampling_params import SamplingParams
from engine.test_interruptions import interrupted_at
from support.drafting import GROUPED, Remembering, make_engine, make_model
from support.models import all_logits, step_sizes

PROMPT = [5, 9, 20, 31, 7, 12, 8, 40, 41, 3, 17, 22, 60, 2, 33] * 3  # two pages and a part of a third
NUM_TOP = 3


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[CausalLM, MTPLayer]:
    return make_model(tmp_path_factory.mktemp("model"), GROUPED, max_tokens=64)


@pytest.fixture
def model(pair: tuple[CausalLM, MTPLayer]) -> CausalLM:
    return pair[0]


def asking(engine: Engine, prompt: list[int] = PROMPT, **params: Any) -> Request:
    given = {"temperature": 0, "max_tokens": 3, "prompt_logprobs": NUM_TOP, **params}
    return engine.new_request(prompt, SamplingParams(**given))


def found_by(engine: Engine, prompt: list[int] = PROMPT, **params: Any) -> PromptLogprobs:
    request = asking(engine, prompt, **params)
    list(engine.run(request))
    assert request.prompt_logprobs is not None
    return request.prompt_logprobs


@pytest.fixture
def expected(model: CausalLM) -> PromptLogprobs:
    return found_by(make_engine(model))


def test_they_are_the_log_softmax_of_the_rows_before(model: CausalLM, expected: PromptLogprobs) -> None:
    """In float64, of the whole prompt computed at once."""
    logits = all_logits(model, PROMPT, len(PROMPT)).double().numpy()
    assert expected[0] is None
    assert len(expected) == len(PROMPT)
    ranks = set()
    for row, token_id, found in zip(logits, PROMPT[1:], expected[1:], strict=False):
        assert found is not None
        logprobs = row - row.max() - np.log(np.exp(row - row.max()).sum())
        order = np.argsort(-row, kind="stable").tolist()
        assert list(found) == list(dict.fromkeys([token_id, *order[:NUM_TOP]]))
        assert found[token_id].rank == order.index(token_id) + 1
        ranks.add(found[token_id].rank)
        for other, each in found.items():
            assert each.logprob == pytest.approx(logprobs[other], abs=1e-5)
    assert len(ranks) > 10


def sizes_of_logits(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the number of rows whose logits are computed."""
    sizes: list[int] = []
    compute = model.compute_logits

    def counting(hidden: torch.Tensor, rows: list[int] | None = None) -> torch.Tensor:
        logits = compute(hidden, rows)
        sizes.append(len(logits))
        return logits

    monkeypatch.setattr(model, "compute_logits", counting)
    return sizes


@pytest.mark.parametrize("step", [1, 7, 16, 64])
@pytest.mark.parametrize("rows", [1, 5])
def test_steps_and_pieces_change_nothing(
    step: int, rows: int, model: CausalLM, expected: PromptLogprobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "_LOGPROB_ROWS", rows)
    sizes = sizes_of_logits(model, monkeypatch)
    assert found_by(make_engine(model, step=step)) == expected
    assert max(sizes) == min(rows, step)


def test_no_token_depends_on_them(model: CausalLM) -> None:
    engine = make_engine(model)
    with_them, without = asking(engine), asking(engine, prompt_logprobs=None)
    assert list(engine.run(with_them)) == list(engine.run(without))
    assert without.prompt_logprobs is None


def test_what_is_cached_is_computed_again_for_them_and_for_nobody_else(
    model: CausalLM, expected: PromptLogprobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(model)
    sizes = step_sizes(model, monkeypatch)
    list(engine.run(asking(engine, prompt_logprobs=None, max_tokens=1)))
    assert found_by(engine, max_tokens=1) == expected
    list(engine.run(asking(engine, prompt_logprobs=None, max_tokens=1)))
    assert sizes == [45, 45, 45 - 32]
    assert engine.kv_cache.num_available_pages == engine.kv_cache.num_pages


def test_nobody_is_waited_for_to_compute_a_common_beginning(
    model: CausalLM, expected: PromptLogprobs
) -> None:
    """What another one is about to compute would be of no use here; who asks for less waits for it."""
    for asks, num_computed in ((NUM_TOP, 64 - len(PROMPT)), (None, 0)):
        engine = make_engine(model, step=64)
        first, second = asking(engine, prompt_logprobs=None), asking(engine, prompt_logprobs=asks)
        engine.add(first)
        engine.add(second)
        engine.step()
        assert second.num_computed_tokens == num_computed
        list(engine.run(second))
        assert second.prompt_logprobs == (expected if asks else None)


def test_who_loses_its_pages_goes_on_where_it_was(
    model: CausalLM, expected: PromptLogprobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken out after two of its three pages; they are in the cache and are of use but for the last row."""
    engine = make_engine(model, step=16)
    request = asking(engine)
    engine.add(request)
    engine.step()
    engine.step()
    assert request.prompt_logprobs == expected[:33]
    engine.abort(request)
    assert request.most_cached_tokens == 32
    rows = sizes_of_logits(model, monkeypatch)
    sizes = step_sizes(model, monkeypatch)
    list(engine.run(request))
    assert request.prompt_logprobs == expected
    assert request.most_cached_tokens == len(request.token_ids)
    assert sizes[0] == 13
    assert rows[0] == 12


@pytest.mark.parametrize("drafts", [0, 3])
def test_an_interruption_at_any_line_changes_nothing(
    drafts: int, pair: tuple[CausalLM, MTPLayer], expected: PromptLogprobs
) -> None:
    model, _ = pair
    drafting = Drafting(Remembering(model), drafts, "on") if drafts else None
    engine = make_engine(model, drafting, step=20)
    was_interrupted = 0
    for line in range(1, 10**6, 167):
        request = asking(engine)
        if not interrupted_at(line, lambda request=request: list(engine.run(request))):  # type: ignore[misc]
            break
        was_interrupted += 1
        list(engine.run(request))
        assert request.prompt_logprobs == expected
        engine.kv_cache.clear()
    assert was_interrupted > 5


def test_a_prompt_of_one_token_has_none(model: CausalLM) -> None:
    assert found_by(make_engine(model), [5]) == (None,)


def test_broken_logits_fail_who_asks_alone(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(model)
    compute = model.compute_logits

    def broken(hidden: torch.Tensor, rows: list[int] | None = None) -> torch.Tensor:
        logits = compute(hidden, rows).clone()
        if len(logits) > 2:
            logits[4, 7] = torch.nan
        return logits

    monkeypatch.setattr(model, "compute_logits", broken)
    other, request = asking(engine, [7, 8], prompt_logprobs=None), asking(engine)
    engine.add(other)
    engine.add(request)
    with pytest.raises(ModelError, match="logits: got nan"):
        engine.step()
    assert engine.concerned() == [request]
    engine.abort(request)
    assert len(list(engine.run(other))) == 3


@pytest.mark.parametrize("number", [-1, 21, 1.0, True])
def test_a_wrong_number_is_refused(number: Any) -> None:
    with pytest.raises(ConfigError, match=r"prompt_logprobs: got .*, expected an integer from 0 to 20"):
        SamplingParams(prompt_logprobs=number)


def test_the_first_of_several_replies_has_them(model: CausalLM) -> None:
    engine = make_engine(model)
    params = SamplingParams(prompt_logprobs=0, n=2, max_tokens=1)
    replies = [engine.new_request(PROMPT, params, index=index) for index in range(2)]
    for reply in replies:
        list(engine.run(reply))
        reply.num_given_tokens = len(reply.token_ids)
    first, second = (reply.given_output().prompt_logprobs for reply in replies)
    assert second is None
    assert first is not None
    assert [set(each or ()) for each in first[1:]] == [{token} for token in PROMPT[1:]]
