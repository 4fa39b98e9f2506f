"""Guessing ahead changes no token: right and wrong guesses, ends of every kind, caches, interruptions."""

from __future__ import annotations

import pytest
import torch

from duckllm.engine.engine import Drafting, Engine
from duckllm.engine.kv_cache import PAGE_TOKENS
from duckllm.engine.request import Request
from duckllm.models.causal_lm import CausalLM
from duckllm.models.mtp import MTPLayer
from duckllm.sampling_params import SamplingParams
from support.attention import slots_of
from support.drafting import GROUPED, SPARSE, Remembering, make_engine, make_model
from support.models import greedy, step_sizes

PROMPT = [5, 9, 20, 31, 7, 12, 8, 40, 41, 3]


@pytest.fixture(scope="module", params=[SPARSE, GROUPED], ids=["sparse", "grouped"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[CausalLM, MTPLayer]:
    return make_model(tmp_path_factory.mktemp("model"), request.param, max_tokens=64)


def knowing(model: CausalLM, *replies: list[int]) -> Remembering:
    """Guesses right what came once in these."""
    layer = Remembering(model)
    for reply in replies:
        layer.learn(reply)
    return layer


def run(engine: Engine, prompt: list[int] = PROMPT, **params: object) -> Request:
    request = engine.new_request(prompt, SamplingParams(**{"temperature": 0.0, **params}))  # type: ignore[arg-type]
    list(engine.run(request))
    return request


@pytest.mark.parametrize("num_tokens", [1, 2, 5])
def test_right_and_wrong_guesses_give_the_same_reply(
    pair: tuple[CausalLM, MTPLayer], num_tokens: int
) -> None:
    model, mtp = pair
    expected = greedy(make_engine(model), PROMPT, 40)
    for layer in (mtp, knowing(model, PROMPT + expected), knowing(model, [*range(60)])):
        engine = make_engine(model, Drafting(layer, num_tokens, "on"))
        request = run(engine, max_tokens=40)
        assert list(request.output_token_ids) == expected
        assert request.num_draft_tokens > 0
        assert engine.kv_cache.num_available_pages == engine.kv_cache.num_pages


def test_right_guesses_save_steps_and_are_counted(
    pair: tuple[CausalLM, MTPLayer], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = pair
    expected = greedy(make_engine(model), PROMPT, 13)
    engine = make_engine(model, Drafting(knowing(model), 2, "on"))
    sizes = step_sizes(model, monkeypatch)
    monkeypatch.setattr(  # by place, as the reply may repeat tokens
        Request,
        "add_draft",
        lambda self, logits: self.draft_token_ids.append(
            expected[self.num_output_tokens + len(self.draft_token_ids)]
        ),
    )
    request = run(engine, max_tokens=13)
    assert list(request.output_token_ids) == expected
    # The first token, then three a step; the last step needs one token less than it could have.
    assert sizes == [len(PROMPT), 3, 3, 3, 3]
    assert (request.num_draft_tokens, request.num_accepted_tokens) == (8, 8)
    assert request.metrics().num_accepted_tokens == 8


def test_seeded_replies_do_not_depend_on_guesses(pair: tuple[CausalLM, MTPLayer]) -> None:
    model, mtp = pair
    params = {"temperature": 1.5, "seed": 3, "max_tokens": 30, "top_k": 20}
    params |= {"presence_penalty": 0.7, "repetition_penalty": 1.2, "logit_bias": {4: 2.0}, "min_tokens": 5}
    expected = run(make_engine(model), **params).output_token_ids
    assert len(set(expected)) > 10
    right = knowing(model, PROMPT + list(expected))
    for layer in (mtp, right):
        request = run(make_engine(model, Drafting(layer, 3, "on")), **params)
        assert request.output_token_ids == expected
    assert request.num_accepted_tokens > 0


@pytest.mark.parametrize("length", range(1, 12))
def test_a_reply_ends_where_it_has_to(pair: tuple[CausalLM, MTPLayer], length: int) -> None:
    """At max_tokens, at the context's end, at a stop token and at an end token: nothing behind it is kept."""
    model, _ = pair
    whole = greedy(make_engine(model), PROMPT, 30)
    layer = knowing(model, PROMPT + whole)
    drafting = Drafting(layer, 4, "on")
    assert list(run(make_engine(model, drafting), max_tokens=length).output_token_ids) == whole[:length]
    context = make_engine(model, drafting, context=len(PROMPT) + length)
    request = run(context)
    assert (list(request.output_token_ids), request.finish_reason) == (whole[:length], "length")
    end = whole[length - 1]
    expected = whole[: whole.index(end) + 1]
    request = run(make_engine(model, drafting), stop_token_ids=[end], max_tokens=30)
    assert (list(request.output_token_ids), request.stop_reason) == (expected, end)
    engine = make_engine(model, drafting, eos_token_ids=frozenset([end]))
    request = run(engine, max_tokens=30)
    assert (list(request.output_token_ids), request.finish_reason) == (expected, "stop")
    assert engine.kv_cache.num_available_pages == engine.kv_cache.num_pages


def guesses_of(engine: Engine, request: Request) -> list[list[int]]:
    """What is guessed after each step."""
    guesses = []
    engine.add(request)
    while request.finish_reason is None:
        engine.step()
        guesses.append(list(request.draft_token_ids))
    return [each for each in guesses if each]


def test_guesses_do_not_depend_on_chunks_cache_or_company(pair: tuple[CausalLM, MTPLayer]) -> None:
    """The layer's own cache holds the same whatever way the tokens came into it."""
    model, mtp = pair
    prompt, params = (PROMPT * 4)[:38], SamplingParams(temperature=0, max_tokens=12)
    drafting = Drafting(mtp, 2, "on")
    engine = make_engine(model, drafting)
    request = engine.new_request(prompt, params)
    expected = guesses_of(engine, request)
    assert len({guess for each in expected for guess in each}) > 2
    for step in (5, 16, 23):
        other = make_engine(model, drafting, step=step)
        assert guesses_of(other, other.new_request(prompt, params)) == expected
    # The prompt's first pages are there, and the reply's.
    again = engine.new_request(prompt, params)
    assert guesses_of(engine, again) == expected
    beside = make_engine(model, drafting)
    for first in (1, 2):
        beside.add(beside.new_request([first, *prompt[:9]], params))
    assert guesses_of(beside, beside.new_request(prompt, params)) == expected
    # What follows a prefix may differ from what followed when it was computed.
    fresh, turn = make_engine(model, drafting), [*prompt[: 2 * PAGE_TOKENS], 1, 2, 3]
    wanted = guesses_of(fresh, fresh.new_request(turn, params))
    assert guesses_of(engine, engine.new_request(turn, params)) == wanted


def test_a_shared_prefix_is_computed_but_for_its_last_token(
    pair: tuple[CausalLM, MTPLayer], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, mtp = pair
    engine = make_engine(model, Drafting(mtp, 1, "on"))
    prompt = (PROMPT * 4)[:38]
    greedy(engine, prompt, 2)
    sizes = step_sizes(model, monkeypatch)
    greedy(engine, prompt, 1)
    assert sizes == [38 - 2 * PAGE_TOKENS + 1]


def test_without_guesses_the_layer_lags_by_less_than_a_page_and_catches_up(
    pair: tuple[CausalLM, MTPLayer],
) -> None:
    """Pages are known to others only once the layer's rows are in them, too."""
    model, _ = pair
    layer = Remembering(model)
    engine = make_engine(model, Drafting(layer, 1, "auto"))
    engine.choices.policies["drafts"] = "off"
    request = engine.new_request(PROMPT, SamplingParams(temperature=0, max_tokens=45))
    engine.add(request)
    lags = []
    while request.finish_reason is None:
        engine.step()
        assert request.draft_token_ids == []
        assert engine.drafter is not None
        lags.append(len(request.token_ids) - 1 - layer.num_rows)
        ready = engine.drafter.num_ready(request)
        table = engine.scheduler._running.get(request)
        if table is not None:
            assert len(table.hashes) == ready // PAGE_TOKENS
            rows = engine.kv_cache.tensors[-1][0][slots_of(engine.kv_cache.sequence(table, 0, 0, ready))]
            assert rows[1:, 0].tolist() == request.token_ids[1:ready]
    assert max(lags) == PAGE_TOKENS - 1
    assert lags[-1] == 0
    assert request.num_draft_tokens == 0
    # Both caches of every full page are there for the next turn.
    _, cached = engine.kv_cache.open([*request.token_ids, 1])
    assert cached == (len(request.token_ids) - 1) // PAGE_TOKENS * PAGE_TOKENS


def test_the_layers_rows_are_those_of_confirmed_tokens(pair: tuple[CausalLM, MTPLayer]) -> None:
    model, _ = pair
    expected = greedy(make_engine(model), PROMPT, 30)
    layer = knowing(model, (PROMPT + expected)[:25], [*range(60)])
    engine = make_engine(model, Drafting(layer, 3, "on"))
    request = engine.new_request(PROMPT, SamplingParams(temperature=0, max_tokens=30))
    engine.add(request)
    readies: list[int] = []
    while request.finish_reason is None:
        engine.step()
        table = engine.scheduler._running.get(request)
        if table is not None:
            assert engine.drafter is not None
            ready = engine.drafter.num_ready(request) + bool(request.draft_token_ids)
            rows = engine.kv_cache.tensors[-1][0][slots_of(engine.kv_cache.sequence(table, 0, 0, ready))]
            assert rows[1:, 0].tolist() == request.token_ids[1:ready]
            readies.append(len(request.token_ids) - ready)
    assert list(request.output_token_ids) == expected
    assert 0 < request.num_accepted_tokens < request.num_draft_tokens
    assert readies.count(0) > 5


def test_a_stateless_guess_sees_one_token(pair: tuple[CausalLM, MTPLayer]) -> None:
    """It is the layer's on an empty cache, and the reply is the same."""
    model, mtp = pair
    expected = greedy(make_engine(model), PROMPT, 20)
    engine = make_engine(model, Drafting(mtp, 1, "on", is_stateless=True))
    request = engine.new_request(PROMPT, SamplingParams(temperature=0, max_tokens=20))
    engine.add(request)
    plain = make_engine(model)
    while request.finish_reason is None:
        engine.step()
        if not request.draft_token_ids:
            continue
        tokens = torch.tensor(request.token_ids)
        sequence = plain.kv_cache.sequence
        table, _ = plain.kv_cache.open([])
        assert plain.kv_cache.reserve(table, 64)
        hidden = model.forward(tokens[:-1], [sequence(table, 0, 0, len(tokens) - 1)], plain.kv_cache.tensors)
        alone = mtp.forward(hidden[-1:], tokens[-1:], [sequence(table, 0, 0, 1)], mtp.new_kv_cache(64))
        assert request.draft_token_ids == [int(model.compute_logits(alone).argmax())]
        plain.kv_cache.close(table)
    assert list(request.output_token_ids) == expected


def test_a_lost_step_of_the_layer_is_made_good(
    pair: tuple[CausalLM, MTPLayer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted between the model and the layer, tokens that were chosen stay and the rest goes on."""
    model, mtp = pair
    expected = greedy(make_engine(model), PROMPT, 20)
    drafting = Drafting(mtp, 2, "on")
    forward, calls = mtp.forward, 0

    def failing(*arguments: object) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            raise KeyboardInterrupt
        return forward(*arguments)

    monkeypatch.setattr(mtp, "forward", failing)
    engine = make_engine(model, drafting)
    request = engine.new_request(PROMPT, SamplingParams(temperature=0, max_tokens=20))
    other = engine.new_request(PROMPT[:4], SamplingParams(temperature=0, max_tokens=3))
    engine.add(other)
    interruptions = 0
    while request.finish_reason is None:
        try:
            list(engine.run(request))
        except KeyboardInterrupt:
            interruptions += 1
            engine.add(other) if other.finish_reason is None else None
    assert interruptions > 3
    assert list(request.output_token_ids) == expected
    assert other.num_output_tokens == 3
    engine.abort(other)
    assert engine.kv_cache.num_available_pages == engine.kv_cache.num_pages


def test_steps_of_the_layer_keep_to_the_limit(pair: tuple[CausalLM, MTPLayer]) -> None:
    """Rows that waited may come together: they are cut into steps."""
    model, _ = pair
    layer = Remembering(model)
    engine = make_engine(model, Drafting(layer, 1, "auto"), step=7)
    sizes: list[int] = []
    forward = layer.forward
    layer.forward = lambda hidden, *rest: sizes.append(len(hidden)) or forward(hidden, *rest)  # type: ignore[method-assign]
    engine.choices.policies["drafts"] = "off"
    requests = [
        engine.new_request([first, *PROMPT], SamplingParams(temperature=0, max_tokens=20))
        for first in range(1, 4)
    ]
    for request in requests:
        engine.add(request)
    while any(request.finish_reason is None for request in requests):
        engine.step()
    assert max(sizes) == 7
    assert sum(sizes) == sum(len(request.token_ids) - 1 for request in requests)


def test_what_was_kept_of_a_request_that_is_computed_again_counts_once(
    pair: tuple[CausalLM, MTPLayer],
) -> None:
    """It lost its pages while the layer still had to see its tokens."""
    model, mtp = pair
    engine = make_engine(model, Drafting(mtp, 2, "auto"))
    expected = guesses_of(engine, engine.new_request(PROMPT, SamplingParams(temperature=0, max_tokens=9)))
    engine = make_engine(model, Drafting(mtp, 2, "auto"))
    engine.choices.policies["drafts"] = "off"
    request = engine.new_request(PROMPT, SamplingParams(temperature=0, max_tokens=9))
    engine.add(request)
    engine.step()
    engine.scheduler.remove(request)  # as for who came before it
    engine.choices.policies["drafts"] = "on"
    again = guesses_of(engine, request)
    assert len(again) > 2
    assert again == expected[-len(again) :]


def test_a_context_in_the_least_room_is_computed_to_its_end(pair: tuple[CausalLM, MTPLayer]) -> None:
    """Room for guesses is asked for no further than the context can go."""
    model, mtp = pair
    context = 2 * PAGE_TOKENS
    engine = make_engine(model, Drafting(mtp, 8, "on"), context=context, pages=2)
    request = engine.new_request(PROMPT, SamplingParams(temperature=0, ignore_eos=True))
    engine.add(request)
    for _ in range(context):
        engine.step()
    assert (len(request.token_ids), request.finish_reason) == (context, "length")
    assert list(request.output_token_ids) == greedy(make_engine(model), PROMPT, context - len(PROMPT))


def test_nothing_is_guessed_that_could_not_be_taken(pair: tuple[CausalLM, MTPLayer]) -> None:
    """A reply's last token is chosen behind its last guess."""
    engine = make_engine(pair[0], context=len(PROMPT) + 6)
    for params, most in (({"max_tokens": 5}, [4, 3, 2, 1]), ({}, [5, 4, 3, 2])):
        request = engine.new_request(PROMPT, SamplingParams(temperature=0, ignore_eos=True, **params))  # type: ignore[arg-type]
        got = [request.most_drafts(8)]
        for token_id in (1, 2, 3):
            request.append(token_id)
            got.append(request.most_drafts(8))
        assert got == most
        assert request.most_drafts(1) == 1
