"""Two lanes: the same bits, and one lane's attention while the other's experts are computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from duckllm.engine.engine import Drafting, Engine
from duckllm.models.causal_lm import CausalLM, MoEBlock
from duckllm.models.mtp import MTPLayer
from duckllm.moe.executor import ExpertExecutor, PendingStep
from duckllm.sampling_params import SamplingParams
from support.drafting import GROUPED, SPARSE, make_engine, make_model
from support.models import greedy

PROMPT = [5, 9, 20, 31, 7, 12, 8, 40, 41, 3]


class Recording:
    """Passes steps on to experts, and notes what is begun and what is waited for."""

    def __init__(self, experts: ExpertExecutor) -> None:
        self.experts = experts
        self.events: list[tuple[str, int, int, int]] = []

    def submit(
        self, layer: int, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, lane: int = 0
    ) -> PendingStep:
        self.events.append(("submit", layer, lane, len(x)))
        pending = self.experts.submit(layer, x, topk_ids, topk_weights, lane)
        recording = self

        class Pending:
            def wait(self) -> torch.Tensor:
                recording.events.append(("wait", layer, lane, len(x)))
                return pending.wait()

        return Pending()


@pytest.fixture(scope="module", params=[SPARSE, GROUPED], ids=["sparse", "grouped"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[CausalLM, MTPLayer]:
    folder: Path = tmp_path_factory.mktemp("model")
    return make_model(folder, request.param, max_tokens=64)


def record(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> Recording:
    blocks = [layer.mlp for layer in model.layers if isinstance(layer.mlp, MoEBlock)]
    recording = Recording(blocks[0].experts)
    for block in blocks:
        monkeypatch.setattr(block, "experts", recording)
    return recording


def test_the_second_lane_is_sent_before_the_first_is_waited_for(
    pair: tuple[CausalLM, MTPLayer], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = pair
    recording = record(model, monkeypatch)
    engine = make_engine(model, lanes="on")
    for first in (1, 2):
        engine.add(engine.new_request([first, *PROMPT], SamplingParams(temperature=0, max_tokens=4)))
    engine.step()
    recording.events.clear()
    engine.step()
    [layer] = {layer for _, layer, _, _ in recording.events}  # the first one is dense
    assert recording.events == [
        ("submit", layer, 0, 1),
        ("submit", layer, 1, 1),
        ("wait", layer, 0, 1),
        ("wait", layer, 1, 1),
    ]


def test_one_long_prompt_is_cut_in_two_halves(
    pair: tuple[CausalLM, MTPLayer], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = pair
    recording = record(model, monkeypatch)
    engine = make_engine(model, lanes="on")
    engine.add(engine.new_request([*PROMPT, 1], SamplingParams(temperature=0, max_tokens=3)))
    engine.step()
    engine.step()
    assert [(lane, rows) for event, _, lane, rows in recording.events if event == "submit"] == [
        (0, 5),
        (1, 6),
        (0, 1),  # one row has no halves
    ]


def hidden_states(engine: Engine, model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Grows by what each step computes."""
    states: list[torch.Tensor] = []
    forward = model.forward_lanes

    def recording(*arguments: object) -> torch.Tensor:
        states.append(forward(*arguments))
        return states[-1]

    monkeypatch.setattr(model, "forward_lanes", recording)
    return states


def test_lanes_change_no_bit(pair: tuple[CausalLM, MTPLayer], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any row's hidden state, with prompts, replies and guesses in a step and cuts inside of contexts."""
    model, mtp = pair
    results = []
    for lanes in ("off", "on"):
        engine = make_engine(model, Drafting(mtp, 2, "on"), step=23, lanes=lanes)
        with monkeypatch.context() as patch:
            states = hidden_states(engine, model, patch)
            for first, length in ((1, 4), (2, 10), (3, 1)):
                prompt = [first, *(PROMPT * 3)[: 3 * length]]
                engine.add(engine.new_request(prompt, SamplingParams(temperature=0, max_tokens=9)))
            for _ in range(8):
                engine.step()
        results.append(states)
    without, with_lanes = results
    assert len(without) == len(with_lanes) == 8
    for one, other in zip(without, with_lanes, strict=True):
        assert torch.equal(one, other)


def test_a_worker_lost_in_one_lane_leaves_the_step_to_be_repeated(
    pair: tuple[CausalLM, MTPLayer], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = pair
    expected = greedy(make_engine(model), PROMPT, 8)
    recording = record(model, monkeypatch)
    submit = recording.submit

    def failing(*step: object) -> PendingStep:
        if len(recording.events) == 9:
            recording.events.append(("failed", 0, 0, 0))
            raise KeyboardInterrupt
        return submit(*step)  # type: ignore[arg-type]

    monkeypatch.setattr(recording, "submit", failing)
    engine = make_engine(model, lanes="on", step=4)
    request = engine.new_request(PROMPT, SamplingParams(temperature=0, max_tokens=8))
    with pytest.raises(KeyboardInterrupt):
        list(engine.run(request))
    list(engine.run(request))
    assert list(request.output_token_ids) == expected
