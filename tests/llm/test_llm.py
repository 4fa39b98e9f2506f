"""The Python API, on the demo model with experts in this process."""

from __future__ import annotations

import dataclasses
import gc
import math
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import duckllm
from duckllm import LLM, SamplingParams
from duckllm.config import ClusterConfig
from duckllm.errors import ConfigError, ModelNotFoundError, PromptTooLongError, RequestError

DUCK = [{"role": "user", "content": "What is a duck?"}]
PRIME = [{"role": "user", "content": "Is 1001 prime?"}]
PRIME_ANSWER = "No, 1001 is not prime: 1001 = 7 x 11 x 13."
GREEDY = SamplingParams(temperature=0)


@pytest.fixture(scope="module")
def llm(demo_folder: Path) -> Iterator[LLM]:
    with LLM(demo_folder, workers=0, max_model_len=200) as llm:
        yield llm


def test_chat_answers_one_conversation(llm: LLM) -> None:
    [output] = llm.chat(PRIME, GREEDY)
    [completion] = output.outputs
    assert completion.text == PRIME_ANSWER
    assert (completion.index, completion.finish_reason) == (0, "stop")
    assert completion.token_ids[-1] in llm.tokenizer.eos_token_ids
    assert llm.tokenizer.decode(completion.token_ids) == PRIME_ANSWER
    assert output.prompt is None
    assert list(output.prompt_token_ids) == llm.tokenizer.apply_chat_template(PRIME)
    assert output.finished
    metrics = output.metrics
    assert metrics.num_prompt_tokens == len(output.prompt_token_ids)
    assert metrics.num_generated_tokens == len(completion.token_ids)
    assert metrics.time_to_first_token_s is not None
    assert metrics.decode_tokens_per_s is not None
    assert metrics.time_to_first_token_s > 0
    assert metrics.decode_tokens_per_s > 0


def test_chat_answers_several_conversations_in_order(llm: LLM) -> None:
    duck, prime = llm.chat([DUCK, PRIME], [SamplingParams(temperature=0, max_tokens=5), GREEDY])
    assert prime.outputs[0].text == PRIME_ANSWER
    assert len(duck.outputs[0].token_ids) == 5
    assert duck.outputs[0].finish_reason == "length"
    assert duck.outputs[0].text == "verb: to move ("
    assert duck.request_id != prime.request_id


def test_the_models_own_defaults_are_greedy(llm: LLM) -> None:
    assert llm.default_sampling_params == GREEDY
    assert llm.chat(PRIME)[0].outputs[0].text == PRIME_ANSWER


def test_generate_takes_text_tokens_and_lists_of_both(llm: LLM) -> None:
    text = "<|user|>Is 1001 prime?<|assistant|>"
    ids = llm.tokenizer.encode(text)
    for prompts, count in ((text, 1), (ids, 1), ([text], 1), ([ids], 1), ([text, ids], 2), ([], 0)):
        outputs = llm.generate(prompts, GREEDY)
        assert [output.outputs[0].text for output in outputs] == [PRIME_ANSWER] * count
    assert [output.prompt for output in llm.generate([text, ids], GREEDY)] == [text, None]


def test_stream_adds_up_to_the_reply(llm: LLM) -> None:
    [whole] = llm.chat(DUCK, GREEDY)
    outputs = list(llm.stream(DUCK, GREEDY))
    assert "".join(output.text for output in outputs) == whole.outputs[0].text
    assert tuple(token for output in outputs for token in output.token_ids) == whole.outputs[0].token_ids
    assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
    assert outputs[-1].finish_reason == "stop"
    assert [output.metrics.num_generated_tokens for output in outputs] == list(range(1, len(outputs) + 1))
    text = llm.tokenizer.decode(llm.tokenizer.apply_chat_template(PRIME))
    assert text == "Is 1001 prime?"


def test_a_reply_cut_inside_a_character_shows_that(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = llm.tokenizer
    first, *rest = tokenizer.encode("\N{DUCK}")[1:]
    assert rest, "the tokenizer splits this character"
    model = llm._engine.model

    def always_the_first_part(hidden: torch.Tensor, rows: list[int]) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor([first]), model.config.vocab_size).float()

    monkeypatch.setattr(model, "compute_logits", always_the_first_part)
    [output] = llm.stream(DUCK, SamplingParams(temperature=0, max_tokens=1))
    assert output.token_ids == (first,)
    assert output.text == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("prompt", ["Is 1001", "<|bos|>Is 1001", "<|bos|><|bos|>Is 1001"])
def test_a_raw_prompt_begins_with_bos_once(llm: LLM, prompt: str) -> None:
    [output] = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1))
    bos = llm.tokenizer.bos_token_id
    assert output.prompt_token_ids[0] == bos
    assert list(output.prompt_token_ids).count(bos) == 1
    assert llm.tokenizer.decode(output.prompt_token_ids) == "Is 1001"


def test_an_id_that_no_token_has_gives_no_text(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    token = llm.tokenizer._token
    monkeypatch.setattr(
        llm.tokenizer, "_token", lambda token_id: None if token_id == 300 else token(token_id)
    )
    params = SamplingParams(temperature=0, max_tokens=3, logit_bias={300: 100})
    [output] = llm.chat(DUCK, params)
    assert output.outputs[0].token_ids == (300, 300, 300)
    assert output.outputs[0].text == ""


def test_streams_may_take_turns_and_be_left(llm: LLM) -> None:
    duck, prime = llm.stream(DUCK, GREEDY), llm.stream(PRIME, GREEDY)
    pairs = [(next(duck).text, next(prime).text) for _ in range(10)]
    duck.close()
    prime_text = "".join(text for _, text in pairs) + "".join(output.text for output in prime)
    assert prime_text == PRIME_ANSWER
    assert "".join(text for text, _ in pairs) == "verb: to move (the head or body)"
    assert llm.chat(PRIME)[0].outputs[0].text == PRIME_ANSWER


def test_a_sampled_reply_repeats_with_its_seed(llm: LLM) -> None:
    def reply(seed: int) -> tuple[int, ...]:
        params = SamplingParams(temperature=3.0, top_p=0.95, seed=seed, max_tokens=20)
        return llm.chat(DUCK, params)[0].outputs[0].token_ids

    assert reply(1) == reply(1)
    assert reply(1) != reply(2)


def test_several_replies_differ_and_repeat_with_their_seed(llm: LLM) -> None:
    params = SamplingParams(temperature=3.0, top_p=0.95, seed=1, max_tokens=20, n=3)
    [output] = llm.chat(DUCK, params)
    assert [reply.index for reply in output.outputs] == [0, 1, 2]
    replies = [reply.token_ids for reply in output.outputs]
    assert len(set(replies)) == 3
    assert [reply.token_ids for reply in llm.chat(DUCK, params)[0].outputs] == replies
    alone = dataclasses.replace(params, seed=2, n=1)
    assert llm.chat(DUCK, alone)[0].outputs[0].token_ids == replies[1]
    metrics = output.metrics
    assert metrics.num_generated_tokens == sum(len(reply) for reply in replies)
    assert metrics.decode_tokens_per_s is not None
    assert metrics.decode_tokens_per_s > 0


def test_several_replies_stream_in_turns(llm: LLM) -> None:
    params = SamplingParams(temperature=3.0, seed=4, max_tokens=6, n=2, logprobs=1)
    [whole, other] = llm.chat([DUCK, PRIME], params)
    assert whole.request_id != other.request_id
    streamed = list(llm.stream(DUCK, params))
    assert [output.index for output in streamed[:8]] == [0, 1] * 4
    assert len({output.request_id for output in streamed}) == 1
    for reply in whole.outputs:
        parts = [output for output in streamed if output.index == reply.index]
        assert "".join(part.text for part in parts) == reply.text
        assert tuple(token for part in parts for token in part.token_ids) == reply.token_ids
        chosen = [at[part.token_ids[0]] for part in parts for at in part.logprobs or ()]
        assert len(chosen) == len(parts)
        assert sum(each.logprob for each in chosen) == pytest.approx(reply.cumulative_logprob, abs=1e-3)
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [reply.finish_reason]


def test_a_stop_string_cuts_the_reply(llm: LLM) -> None:
    params = SamplingParams(temperature=0, stop=["zebra", " not pri"])
    [completion] = llm.chat(PRIME, params)[0].outputs
    assert (completion.text, completion.stop_reason) == ("No, 1001 is", " not pri")
    assert completion.finish_reason == "stop"
    assert llm.tokenizer.decode(completion.token_ids) == "No, 1001 is not prime"
    assert "".join(output.text for output in llm.stream(PRIME, params)) == "No, 1001 is"


def test_penalties_and_bias_change_a_greedy_reply(llm: LLM) -> None:
    [first, *_] = llm.chat(PRIME, GREEDY)[0].outputs[0].token_ids
    banned = SamplingParams(temperature=0, max_tokens=5, logit_bias={first: -100})
    assert first not in llm.chat(PRIME, banned)[0].outputs[0].token_ids
    [plain] = llm.chat(DUCK, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))[0].outputs
    penalised = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, repetition_penalty=1e6)
    [reply] = llm.chat(DUCK, penalised)[0].outputs
    assert len(set(plain.token_ids)) < 60
    assert len(set(reply.token_ids)) == 60


def test_logprobs_of_a_greedy_reply(llm: LLM) -> None:
    [completion] = llm.chat(PRIME, SamplingParams(temperature=0, logprobs=3))[0].outputs
    assert completion.text == PRIME_ANSWER
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids)
    for token_id, at in zip(completion.token_ids, completion.logprobs, strict=True):
        assert next(iter(at)) == token_id
        assert [each.rank for each in at.values()] == [1, 2, 3]
        assert at[token_id].decoded_token == llm.tokenizer.decode([token_id], skip_special_tokens=False)
        assert sum(math.exp(each.logprob) for each in at.values()) < 1 + 1e-6
    total = sum(
        at[token].logprob for token, at in zip(completion.token_ids, completion.logprobs, strict=True)
    )
    assert completion.cumulative_logprob == pytest.approx(total)
    assert -5 < total < 0


def test_min_tokens_keep_a_reply_going(llm: LLM) -> None:
    [completion] = llm.chat(PRIME, SamplingParams(temperature=0, min_tokens=40, max_tokens=60))[0].outputs
    assert completion.text.startswith(PRIME_ANSWER)
    assert len(completion.token_ids) > 40
    assert not set(completion.token_ids[:40]) & set(llm.tokenizer.eos_token_ids)


def test_a_token_that_the_model_does_not_have_is_named_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="logit_bias: got 8192, expected token ids from 0 to 8191"):
        llm.stream(DUCK, SamplingParams(logit_bias={8192: 1}))
    with pytest.raises(ConfigError, match="stop_token_ids: got 9000, expected token ids from 0 to 8191"):
        llm.chat([DUCK, PRIME], [GREEDY, SamplingParams(stop_token_ids=[9000])])


def test_ignore_eos_goes_on_to_the_context_end(llm: LLM) -> None:
    params = SamplingParams(temperature=0, ignore_eos=True)
    [output] = llm.chat(PRIME, params)
    assert output.outputs[0].finish_reason == "length"
    assert output.metrics.num_prompt_tokens + output.metrics.num_generated_tokens == 200
    assert output.outputs[0].text.startswith(PRIME_ANSWER)


def test_a_long_prompt_is_an_error_and_leaves_the_llm_usable(llm: LLM) -> None:
    with pytest.raises(PromptTooLongError, match="prompt: got 300 tokens, expected at most 199"):
        llm.generate([[7] * 300])
    with pytest.raises(PromptTooLongError):
        llm.stream([{"role": "user", "content": "duck " * 300}])
    assert llm.chat(PRIME)[0].outputs[0].text == PRIME_ANSWER


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[]], "prompt: got no tokens, expected at least 1"),
        (5, "prompts: got int, expected text, token ids, or a list of these"),
        ([1.5], "prompt: got float, expected text or a list of token ids"),
        ([[99999]], "prompt: got token 99999, expected 0 to 8191"),
        ([None], "prompt: got NoneType, expected text or a list of token ids"),
    ],
)
def test_a_bad_prompt_is_an_error_in_one_sentence(llm: LLM, prompts: object, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate(prompts)
    assert str(caught.value) == message


@pytest.mark.parametrize("messages", ["text", 5, [{"role": "user"}], [["text"]], [], None])
def test_a_bad_conversation_is_an_error(llm: LLM, messages: object) -> None:
    with pytest.raises(RequestError):
        llm.chat(messages)


def test_sampling_params_must_be_that_and_as_many_as_prompts(llm: LLM) -> None:
    with pytest.raises(
        ConfigError, match="sampling_params: got 1 of them, expected one for each of 2 prompts"
    ):
        llm.chat([DUCK, PRIME], [GREEDY])
    with pytest.raises(
        ConfigError, match=r"sampling_params: got \{'temperature': 0\}, expected SamplingParams"
    ):
        llm.chat(DUCK, {"temperature": 0})
    with pytest.raises(ConfigError, match="sampling_params: got 3"):
        llm.generate("a", [3])


def test_a_closed_llm_says_so(demo_folder: Path) -> None:
    llm = LLM(demo_folder, workers=0, max_model_len=64)
    stream = llm.stream(PRIME)
    next(stream)
    llm.close()
    llm.close()
    for call in (
        lambda: llm.chat(PRIME),
        lambda: llm.generate("a"),
        lambda: llm.stream("a"),
        lambda: next(stream),
    ):
        with pytest.raises(RequestError, match="this LLM is closed"):
            call()


def test_an_llm_is_collected(demo_folder: Path) -> None:
    llm = LLM(demo_folder, workers=0, max_model_len=64)
    gone = weakref.ref(llm)
    del llm
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"workers": -1}, "workers: got -1, expected "),
        ({"workers": 1.5}, "workers: got 1.5, expected "),
        ({"workers": ""}, "workers: got "),
        ({"workers": []}, "workers: got "),
        ({"workers": 9}, "workers: got 9, expected 1 to 8"),
        ({"workers": "nonsense"}, "got 'nonsense'"),
        ({"max_model_len": 1}, "max_model_len: got 1, expected "),
        ({"max_model_len": 5000}, "max_model_len: got 5000, expected at most 4096"),
        ({"host_threads": -1}, "host_threads: got -1, expected "),
        ({"wire_dtype": "f16"}, "wire_dtype: got 'f16', expected one of f32, bf16"),
        ({"max_step_tokens": 0}, "max_step_tokens: got 0, expected a whole number from 1 to 65536"),
        ({"threads_per_worker": 1.5}, "threads_per_worker: got 1.5, expected a whole number from 0 to 1024"),
        ({"spin_us": -2}, "spin_us: got -2, expected a whole number from -1 to 1000000"),
        ({"step_timeout_s": "soon"}, "step_timeout_s: got 'soon', expected a number above 0"),
        ({"step_timeout_s": float("inf")}, "step_timeout_s: got inf, expected a number above 0"),
        ({"connect_timeout_s": 0}, "connect_timeout_s: got 0, expected a number above 0"),
        ({"workers": 1025}, "workers: got 1025, expected an integer from 0 to 1024"),
        ({"host_threads": 1025}, "host_threads: got 1025, expected an integer from 0 to 1024"),
        ({"threads_per_worker": 1025}, "threads_per_worker: got 1025, expected "),
        ({"threads_per_worker": True}, "threads_per_worker: got True, expected "),
        ({"max_step_tokens": 65537}, "max_step_tokens: got 65537, expected "),
        ({"spin_us": 1_000_001}, "spin_us: got 1000001, expected "),
        ({"wire_dtype": ["f32"]}, "wire_dtype: got ['f32'], expected "),
        ({"prepare_timeout_s": 1_000_001}, "prepare_timeout_s: got 1000001, expected "),
        ({"step_timeout_s": float("nan")}, "step_timeout_s: got nan, expected "),
        ({"cluster_token": "\udcff"}, "cluster_token: got text that UTF-8 cannot hold, expected "),
        ({"spares": -1}, "spares: got -1, expected a whole number from 0 to 1024"),
        ({"workers": "a:1,b:2", "spares": 2}, "spares: got 2, expected fewer than the 2 addresses"),
        ({"workers": 0, "spares": 1}, "spares: got 1, expected 0 where there are no workers"),
        ({"worker_timeout_s": 0}, "worker_timeout_s: got 0, expected a number above 0"),
        ({"worker_silence_s": "soon"}, "worker_silence_s: got 'soon', expected a number above 0"),
        ({"cluster_token": 5}, "cluster_token: got 'int', expected text, or None"),
    ],
)
def test_a_wrong_value_is_an_error_with_field_and_value(
    demo_folder: Path, arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(demo_folder, **arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize("model", [5, [], b"x", True])
def test_a_model_that_is_no_name_is_an_error(model: object) -> None:
    with pytest.raises(ConfigError, match=r"^model: got .*, expected a folder's name"):
        LLM(model)


@pytest.mark.parametrize("addresses", [["a:1"], "a:1", (1,), ("",)])
def test_addresses_are_a_tuple_of_text(addresses: object) -> None:
    with pytest.raises(ConfigError, match=r"^addresses: got "):
        ClusterConfig(addresses=addresses)


def test_an_unknown_argument_is_named(demo_folder: Path) -> None:
    with pytest.raises(
        TypeError,
        match=r"unexpected keyword arguments: wrkers; known: model, workers, .*step_timeout_s",
    ):
        LLM(demo_folder, wrkers=3)


def test_a_missing_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        LLM(tmp_path / "none", workers=0)


def test_importing_the_package_loads_no_torch_and_exports_what_it_lists() -> None:
    code = (
        "import sys, duckllm; assert 'torch' not in sys.modules; assert 'numpy' not in sys.modules\n"
        "from duckllm import SamplingParams; assert 'torch' not in sys.modules\n"
        "assert all(hasattr(duckllm, name) for name in duckllm.__all__); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert set(duckllm.__all__) <= set(dir(duckllm))
    with pytest.raises(AttributeError, match="no attribute 'Goose'"):
        _ = duckllm.Goose


def test_chat_takes_calls_of_tools_and_their_results(llm: LLM) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "ducks"}'}}
    messages = [
        *DUCK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "two"},
    ]
    [output] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=1))
    assert llm.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False) == (
        "<|bos|><|user|>What is a duck?<|assistant|>"
        '<tool_call>\n{"name": "look", "arguments": {"at": "ducks"}}\n</tool_call><|eos|>'
        "<|user|><tool_response>\ntwo\n</tool_response><|assistant|>"
    )
