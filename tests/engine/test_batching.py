"""Many requests at a time give what each gives alone, whatever the steps, the room and the order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from duckllm.engine.engine import Engine
from duckllm.engine.kv_cache import PAGE_TOKENS
from duckllm.models.causal_lm import CausalLM
from duckllm.models.registry import load_config, load_model
from duckllm.sampling_params import SamplingParams
from support.experts import DictTensors, TorchExperts
from support.families import deepseek_v32, write_model
from support.models import greedy, step_sizes
from support.reference import read_checkpoint

CONTEXT = 64
# Beginnings that prompts share.
STEMS = [[5, 9, 200, 31, 77, 12, 8] * 5, [3] * 20, [*range(2, 40)]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    folder: Path = tmp_path_factory.mktemp("model")
    small = {"num_hidden_layers": 2, "index_topk": 8, "max_position_embeddings": CONTEXT}
    write_model(folder, deepseek_v32("small", **small), seed=1)
    tensors = read_checkpoint(folder)
    experts = TorchExperts(tensors)
    return load_model(load_config(folder), DictTensors(tensors), experts, max_tokens=CONTEXT)


def make_engine(model: CausalLM, *, step: int = 256, pages: int = 40, seqs: int = 64) -> Engine:
    return Engine(
        model,
        max_model_len=CONTEXT,
        max_step_tokens=step,
        cache_tokens=pages * PAGE_TOKENS,
        max_num_seqs=seqs,
    )


@pytest.fixture(scope="module")
def alone(model: CausalLM) -> Callable[[list[int], int], list[int]]:
    """The reply to a prompt, computed alone, the whole prompt at once, in an empty cache."""
    known: dict[tuple[int, ...], list[int]] = {}

    def reply(prompt: list[int], count: int) -> list[int]:
        if len(known.get(tuple(prompt), [])) < count:
            known[tuple(prompt)] = greedy(make_engine(model), prompt, min(24, CONTEXT - len(prompt)))
        return known[tuple(prompt)][:count]

    return reply


PROMPTS = st.builds(
    lambda stem, length, tail: (STEMS[stem][:length] + tail)[: CONTEXT - 25],
    st.integers(0, len(STEMS) - 1),
    st.integers(1, 38),
    st.lists(st.integers(2, 6), max_size=3),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prompts=st.lists(PROMPTS, min_size=1, max_size=6),
    counts=st.lists(st.integers(1, 12), min_size=6, max_size=6),
    step=st.sampled_from([1, 3, 7, 16, 64]),
    pages=st.integers(4, 14),
    seqs=st.integers(1, 6),
    order=st.randoms(use_true_random=False),
)
def test_any_mix_gives_what_each_gives_alone(
    model: CausalLM,
    alone: Callable[[list[int], int], list[int]],
    prompts: list[list[int]],
    counts: list[int],
    step: int,
    pages: int,
    seqs: int,
    order: object,
) -> None:
    """Streams read in any order, some given up half way, in a cache that may be too small for all."""
    engine = make_engine(model, step=step, pages=pages, seqs=seqs)
    streams: list[tuple[Iterator[int], list[int], list[int]]] = []
    for prompt, count in zip(prompts, counts, strict=False):
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        request = engine.new_request(prompt, params)
        if order.random() < 0.5:  # type: ignore[attr-defined]
            engine.add(request)
        streams.append((engine.run(request), [], alone(prompt, count)))
    while streams:
        number = order.randrange(len(streams))  # type: ignore[attr-defined]
        stream, got, expected = streams[number]
        token = next(stream, None)
        if token is not None:
            got.append(token)
            assert got == expected[: len(got)]
            if order.random() < 0.03:  # type: ignore[attr-defined]
                stream.close()  # type: ignore[attr-defined]
                del streams[number]
            continue
        assert got == expected
        del streams[number]
    assert engine.kv_cache.num_available_pages == engine.kv_cache.num_pages


def test_a_batch_takes_as_many_steps_as_its_longest(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(model)
    sizes = step_sizes(model, monkeypatch)
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    requests = [engine.new_request([10 * number + 2] * 4, params) for number in range(8)]
    for request in requests:
        engine.add(request)
    for request in requests:
        assert len(list(engine.run(request))) == 5
    assert sizes == [32, 8, 8, 8, 8]


def test_the_next_turn_computes_only_what_is_new(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reply is part of what is kept."""
    engine = make_engine(model)
    sizes = step_sizes(model, monkeypatch)
    first = greedy(engine, STEMS[0][:20], 13)
    sizes.clear()
    turn = [*STEMS[0][:20], *first, 9, 9, 9]
    assert len(greedy(engine, turn, 2)) == 2
    assert sizes == [len(turn) - 2 * PAGE_TOKENS, 1]
