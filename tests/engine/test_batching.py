"""How many steps many requests take, and what a conversation's next turn computes."""

from __future__ import annotations

from pathlib import Path

import pytest

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
