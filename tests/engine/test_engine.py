"""The step loop on a tiny random model, with experts in plain torch."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from duckllm.config import total_memory_bytes
from duckllm.engine.engine import Engine
from duckllm.errors import ConfigError, PromptTooLongError, RequestError
from duckllm.models.causal_lm import CausalLM
from duckllm.models.registry import load_config, load_model
from duckllm.sampling_params import SamplingParams
from support.experts import DictTensors, TorchExperts
from support.families import deepseek_v32, write_model
from support.models import greedy, step_sizes
from support.reference import read_checkpoint

CONTEXT = 40
PROMPT = [5, 9, 200, 31, 77, 12, 8]


class FailingExperts(TorchExperts):
    """Raises at the step whose number is ``fail_at``, where and what the test says."""

    fail_at: int | None = None
    fail_in_wait = False
    error: BaseException = KeyboardInterrupt()
    num_steps = 0

    def submit(self, *step: object) -> object:
        self.num_steps += 1
        if self.num_steps == self.fail_at:
            if not self.fail_in_wait:
                raise self.error
            return self
        return super().submit(*step)

    def wait(self, shared: torch.Tensor | None = None) -> torch.Tensor:
        raise self.error


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    small = {"num_hidden_layers": 2, "index_topk": 8, "max_position_embeddings": 64}
    write_model(folder, deepseek_v32("small", **small), seed=1)
    return folder


@pytest.fixture
def experts(folder: Path) -> FailingExperts:
    return FailingExperts(read_checkpoint(folder))


@pytest.fixture
def model(folder: Path, experts: FailingExperts) -> CausalLM:
    return load_model(load_config(folder), DictTensors(read_checkpoint(folder)), experts, max_tokens=64)


def make_engine(model: CausalLM, step: int = 256, eos: frozenset[int] = frozenset()) -> Engine:
    return Engine(
        model, max_model_len=CONTEXT, max_step_tokens=step, cache_tokens=20 * CONTEXT, eos_token_ids=eos
    )


def test_every_chunking_of_the_prompt_gives_the_same_tokens(model: CausalLM) -> None:
    expected = greedy(make_engine(model), PROMPT, 20)
    assert len(set(expected)) > 5
    for step in (1, 3, len(PROMPT)):
        assert greedy(make_engine(model, step), PROMPT, 20) == expected


def test_a_step_computes_no_more_than_its_limit(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = step_sizes(model, monkeypatch)
    greedy(make_engine(model, 3), PROMPT, 4)
    assert sizes == [3, 3, 1, 1, 1, 1]


def test_an_end_token_ends_the_reply_and_is_part_of_it(model: CausalLM) -> None:
    tokens = greedy(make_engine(model), PROMPT, 20)
    end = tokens[7]
    first = tokens.index(end)
    engine = make_engine(model, eos=frozenset({end, 319}))
    request = engine.new_request(PROMPT, SamplingParams(temperature=0, max_tokens=20))
    assert list(engine.run(request)) == tokens[: first + 1]
    assert request.finish_reason == "stop"
    assert greedy(engine, PROMPT, 20, ignore_eos=True) == tokens


def test_max_tokens_ends_the_reply(model: CausalLM) -> None:
    engine = make_engine(model)
    request = engine.new_request(PROMPT, SamplingParams(temperature=0, max_tokens=1))
    assert len(list(engine.run(request))) == 1
    assert request.finish_reason == "length"


def test_the_end_of_the_context_ends_the_reply(model: CausalLM) -> None:
    engine = make_engine(model)
    request = engine.new_request(PROMPT, SamplingParams(temperature=0))
    assert len(list(engine.run(request))) == CONTEXT - len(PROMPT)
    assert request.finish_reason == "length"


def test_a_prompt_may_fill_the_context_but_for_one_token(model: CausalLM) -> None:
    engine = make_engine(model)
    request = engine.new_request([3] * (CONTEXT - 1), SamplingParams(temperature=0))
    assert len(list(engine.run(request))) == 1
    with pytest.raises(PromptTooLongError, match="prompt: got 40 tokens, expected at most 39"):
        engine.new_request([3] * CONTEXT, SamplingParams())


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt: got no tokens, expected at least 1"),
        ([5, 320], "prompt: got token 320, expected 0 to 319"),
        ([-1], "prompt: got token -1, expected 0 to 319"),
    ],
)
def test_a_bad_prompt_is_an_error(model: CausalLM, prompt: list[int], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        make_engine(model).new_request(prompt, SamplingParams())
    assert str(caught.value) == message


def test_requests_that_take_turns_do_not_disturb_each_other(model: CausalLM) -> None:
    engine = make_engine(model, 3)
    params = SamplingParams(temperature=0, max_tokens=12)
    prompts = [PROMPT, [40, 2, 2, 90, 300], [7] * 15]
    expected = [list(engine.run(engine.new_request(prompt, params))) for prompt in prompts]
    assert len({tuple(reply) for reply in expected}) == 3
    running = [engine.run(engine.new_request(prompt, params)) for prompt in prompts]
    assert [list(reply) for reply in zip(*running, strict=True)] == [
        list(tokens) for tokens in zip(*expected, strict=True)
    ]


@pytest.mark.parametrize("fail_in_wait", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("worker lost")])
@pytest.mark.parametrize("fail_at", [1, 2, 9])
def test_an_interrupted_request_goes_on_with_the_same_tokens(
    model: CausalLM,
    experts: FailingExperts,
    fail_at: int,
    error: BaseException,
    fail_in_wait: bool,
) -> None:
    engine = make_engine(model, 3)
    expected = greedy(engine, PROMPT, 12)
    request = engine.new_request(PROMPT, SamplingParams(temperature=0, max_tokens=12))
    experts.num_steps, experts.fail_at = 0, fail_at
    experts.error, experts.fail_in_wait = error, fail_in_wait
    with pytest.raises(type(error)):
        list(engine.run(request))
    assert request.finish_reason is None
    list(engine.run(request))
    assert list(request.output_token_ids) == expected
    assert greedy(engine, PROMPT, 12) == expected


def test_an_interruption_between_model_and_sampler_is_made_good(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(model)
    expected = greedy(engine, PROMPT, 6)
    request = engine.new_request(PROMPT, SamplingParams(temperature=0, max_tokens=6))
    with monkeypatch.context() as patch:
        patch.setattr(model, "compute_logits", lambda *rows: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            list(engine.run(request))
    assert list(engine.run(request)) == expected


def test_a_seeded_reply_repeats_and_another_seed_differs(model: CausalLM) -> None:
    engine = make_engine(model)

    def reply(seed: int) -> list[int]:
        return list(engine.run(engine.new_request(PROMPT, SamplingParams(seed=seed, max_tokens=15))))

    assert reply(1) == reply(1)
    assert reply(1) != reply(2)


def test_metrics_count_and_time(model: CausalLM) -> None:
    engine = make_engine(model)
    request = engine.new_request(PROMPT, SamplingParams(temperature=0, max_tokens=3))
    assert request.metrics().time_to_first_token_s is None
    request.start_clock()
    steps = engine.run(request)
    next(steps)
    metrics = request.metrics()
    assert (metrics.num_prompt_tokens, metrics.num_generated_tokens) == (7, 1)
    assert metrics.time_to_first_token_s is not None
    assert 0 < metrics.time_to_first_token_s < 60
    assert metrics.decode_tokens_per_s is None
    assert len(list(steps)) == 2
    rate = request.metrics().decode_tokens_per_s
    assert rate is not None
    assert rate > 0


def test_request_ids_are_unique(model: CausalLM) -> None:
    engine = make_engine(model)
    ids = [engine.new_request(PROMPT, SamplingParams()).request_id for _ in range(3)]
    assert len(set(ids)) == 3


def test_sampling_params_are_checked_where_they_are_made() -> None:
    for max_tokens in (0, 2**31):
        with pytest.raises(
            ConfigError, match=f"max_tokens: got {max_tokens}, expected an integer from 1 to 2147"
        ):
            SamplingParams(max_tokens=max_tokens)
    assert SamplingParams(max_tokens=2**31 - 1, top_k=2**31 - 1).top_k == 2**31 - 1


def test_this_machine_has_some_memory() -> None:
    assert 1 << 24 < total_memory_bytes() == psutil.virtual_memory().total
