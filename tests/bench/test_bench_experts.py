"""Experts of the benchmarks of a GPU host: watched, left out, or computed with the weights of few layers."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from duckllm.layers.step import SequenceStep
from duckllm.models.causal_lm import CausalLM, MoEBlock
from duckllm.models.registry import load_config, load_model
from duckllm.weights.architectures import layout_of

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"
MODULES = ("random_model", "bench_experts", "full_size")
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2MoeForCausalLM"],  # with a shared expert
    "model_type": "qwen2_moe",
    "vocab_size": 300,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 256,
}


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    sys.path.insert(0, str(FOLDER))
    try:
        yield {name: importlib.import_module(name) for name in MODULES}
    finally:
        sys.path.remove(str(FOLDER))
        for name in MODULES:
            sys.modules.pop(name, None)


@pytest.fixture
def here(modules: dict[str, ModuleType]) -> Any:
    layout = layout_of(CONFIG, {})
    layers = modules["random_model"].random_layers(layout, 3)
    return modules["bench_experts"].ExpertsHere(layout, layers, 1)


@pytest.fixture
def load(modules: dict[str, ModuleType], tmp_path: Path) -> Any:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    parsed = load_config(tmp_path)
    tensors = modules["random_model"].RandomTensors(CONFIG, layout_of(CONFIG, {}))
    return lambda experts: load_model(parsed, tensors, experts, max_tokens=64)


def forward(model: CausalLM, num_rows: int = 4) -> torch.Tensor:
    sequences = [SequenceStep.of(0, 0, num_rows)]
    return model.forward(torch.arange(num_rows), sequences, model.new_kv_cache(64))


def test_layers_use_a_few_layers_units_in_turn(here: Any) -> None:
    assert [here.units[layer] is here.units[layer % 3] for layer in range(4)] == [True] * 4
    assert len({id(units) for units in here.units.values()}) == 3
    x = torch.randn(2, 128, generator=torch.Generator().manual_seed(0))
    ids, weights = torch.tensor([[0, 5, 7], [2, 3, 4]], dtype=torch.int32), torch.ones(2, 3)
    sums = [here.submit(layer, x, ids, weights).wait() for layer in range(4)]
    assert torch.equal(sums[0], sums[3])
    assert not torch.equal(sums[0], sums[1])
    assert 0.5 < sums[0].std().item() < 2


def test_what_is_asked_of_experts_is_noted_and_computed_as_before(
    modules: dict[str, ModuleType], here: Any, load: Any
) -> None:
    model = load(here)
    expected = forward(model)
    with modules["bench_experts"].asked(model) as watched:
        assert torch.equal(forward(model), expected)
        forward(model, 1)
    assert [layer for layer, *_ in watched.steps] == [0, 1, 2, 3] * 2
    assert watched.num_experts(1) == 4 * 3
    steps = [ids for _, _, ids, _ in watched.steps]
    assert watched.num_experts(4) == sum(len(set(ids.flatten().tolist())) for ids in steps)
    assert 3 * 4 < watched.num_experts(4) - 12 <= 12 * 4
    blocks = [layer.mlp for layer in model.layers if isinstance(layer.mlp, MoEBlock)]
    assert len(blocks) == 4
    assert all(block.experts is here for block in blocks)


def test_without_experts_the_shared_one_is_left(modules: dict[str, ModuleType], here: Any, load: Any) -> None:
    nobody = modules["bench_experts"].NoExperts()
    x = torch.ones(2, 8)
    assert torch.equal(nobody.submit(0, x, x.int(), x).wait(), torch.zeros(2, 8))
    without, whole = forward(load(nobody)), forward(load(here))
    assert without.isfinite().all()
    assert not torch.allclose(without, whole, atol=0.1)
    replayed = []
    with nobody.record() as program:
        nobody.submit(0, x, x.int(), x)
    nobody.run(program, [2], lambda: replayed.append(len(program)))
    assert replayed == [0]


def test_figures_follow_from_bytes_and_time(modules: dict[str, ModuleType]) -> None:
    bench = modules["full_size"].Bench(None, "cpu", CONFIG, layout_of(CONFIG, {}), read_gb_per_s=50.0)
    # 4 stripes of a scale section and 3 * 128 * 16 codes.
    assert bench.expert_bytes == 4 * (64 + 3 * 128 * 16)
    figures = bench.judge(2, 1e5, 20.0)
    assert figures == {
        "tokens_per_s": 20.0,
        "step_ms": 100.0,
        "gb_per_step": 2.483,
        "allowed_tokens_per_s": 40.27,  # 2 tokens in 2.483 GB / 50 GB/s
        "share": 0.497,
    }


@pytest.mark.parametrize("num_lanes", [1, 2])
def test_lanes_decode_the_tokens_that_are_decoded_without(
    modules: dict[str, ModuleType], here: Any, load: Any, num_lanes: int
) -> None:
    model = load(here)
    cache = model.new_kv_cache(96)
    for own in cache:
        for each in own:
            each.fill_(0.1)
    chosen: list[torch.Tensor] = []
    compute = model.compute_logits

    def watched(hidden: torch.Tensor) -> torch.Tensor:
        chosen.append(compute(hidden))
        return chosen[-1]

    model.compute_logits = watched
    modules["full_size"].decode(model, cache, 3, num_lanes, 10, 8)
    assert [each.shape for each in chosen] == [(3, 300)] * 8
    alone = load(here)
    row_cache = alone.new_kv_cache(32)
    for own in row_cache:
        for each in own:
            each.fill_(0.1)
    token = torch.tensor([2])
    for position in range(10, 18):
        hidden = alone.forward(token, [SequenceStep.of(0, position, 1)], row_cache)
        logits = alone.compute_logits(hidden)
        assert torch.equal(logits[0], chosen[position - 10][1])
        token = logits.argmax(-1)
