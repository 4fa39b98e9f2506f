"""Requests driven by hand: logits say which token comes next, the demo model's tokenizer gives it text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from duckllm.engine.request import Request
from duckllm.errors import ConfigError
from duckllm.outputs import StreamOutput
from duckllm.sampling_params import SamplingParams
from duckllm.text import Tokenizer

VOCAB = 8192
EOS, USER = 1, 2
PROMPT = [0, 2, 300]


@pytest.fixture(scope="module")
def tokenizer(demo_checkpoint: Path) -> Tokenizer:
    return Tokenizer(demo_checkpoint)


def new_request(tokenizer: Tokenizer | None, eos: tuple[int, ...] = (EOS,), **params: Any) -> Request:
    return Request(
        "7",
        PROMPT,
        SamplingParams(**{"temperature": 0, **params}),
        vocab_size=VOCAB,
        max_model_len=100,
        eos_token_ids=frozenset(eos),
        tokenizer=tokenizer,
    )


def wanting(*token_ids: int) -> torch.Tensor:
    """Logits that prefer these tokens, the first one most."""
    logits = torch.zeros(VOCAB)
    for number, token_id in enumerate(token_ids):
        logits[token_id] = 20.0 - number
    return logits


def give(request: Request) -> StreamOutput:
    request.num_given_tokens += 1
    return request.given_output()


def run(request: Request, token_ids: list[int]) -> list[StreamOutput]:
    """What is streamed while these tokens come, as long as the reply goes on."""
    outputs = []
    for token_id in token_ids:
        assert request.advance(wanting(token_id)) == token_id
        outputs.append(give(request))
        if request.finish_reason is not None:
            break
    return outputs


def words(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text)[1:]


def test_a_stop_string_over_several_tokens_is_never_shown(tokenizer: Tokenizer) -> None:
    ids = words(tokenizer, "noun: small wild duck")
    assert [tokenizer.decode([token_id]) for token_id in ids] == ["noun", ":", " small", " wild", " duck"]
    request = new_request(tokenizer, stop=["never", ": small wil"])
    outputs = run(request, ids)
    # The "n" at the end of "noun" might begin "never".
    assert [output.text for output in outputs] == ["nou", "n", "", ""]
    assert [output.finish_reason for output in outputs] == [None, None, None, "stop"]
    assert [output.stop_reason for output in outputs] == [None, None, None, ": small wil"]
    done = request.completion()
    assert (done.text, done.token_ids) == ("noun", tuple(ids[:4]))
    assert (done.finish_reason, done.stop_reason) == ("stop", ": small wil")


def test_a_stop_string_may_be_kept(tokenizer: Tokenizer) -> None:
    request = new_request(tokenizer, stop=[": small wil"], include_stop_str_in_output=True)
    outputs = run(request, words(tokenizer, "noun: small wild duck"))
    assert [output.text for output in outputs] == ["noun", ":", " small", " wil"]
    assert request.completion().text == "noun: small wil"


def test_what_is_held_back_is_shown_when_the_reply_ends_otherwise(tokenizer: Tokenizer) -> None:
    ids = words(tokenizer, "noun: small")
    request = new_request(tokenizer, stop=": small wild")
    assert [output.text for output in run(request, [*ids, EOS])] == ["noun", "", "", ": small"]
    assert request.completion().finish_reason == "stop"
    assert request.completion().stop_reason is None
    request = new_request(tokenizer, stop=": small wild", max_tokens=3)
    assert [output.text for output in run(request, ids)] == ["noun", "", ": small"]
    assert request.completion().finish_reason == "length"


def test_the_last_token_may_complete_a_stop_string(tokenizer: Tokenizer) -> None:
    request = new_request(tokenizer, stop="small", max_tokens=3)
    run(request, words(tokenizer, "noun: small"))
    assert request.completion().finish_reason == "stop"
    assert (request.completion().text, request.completion().stop_reason) == ("noun: ", "small")


def test_a_stop_string_may_begin_inside_a_token_and_be_of_bytes(tokenizer: Tokenizer) -> None:
    ids = words(tokenizer, "wild 🦆 duck")
    request = new_request(tokenizer, stop="d 🦆")
    outputs = run(request, ids)
    assert "".join(output.text for output in outputs) == "wil"
    assert len(outputs) == len(ids) - 1
    assert not any(output.text for output in outputs[-5:])


def test_special_tokens_have_no_text_to_stop_at_unless_it_is_shown(tokenizer: Tokenizer) -> None:
    ids = [*words(tokenizer, "noun"), USER, *words(tokenizer, "verb")]
    request = new_request(tokenizer, stop=["<|user|>", "|"], max_tokens=len(ids))
    run(request, ids)
    assert (request.completion().text, request.completion().finish_reason) == ("nounverb", "length")
    request = new_request(tokenizer, stop=["user|>"], skip_special_tokens=False)
    assert [output.text for output in run(request, ids)] == ["noun", "<|"]
    request = new_request(tokenizer, skip_special_tokens=False, max_tokens=len(ids))
    run(request, ids)
    assert request.completion().text == "noun<|user|>verb"


def test_a_stop_token_ends_the_reply_and_is_its_reason(tokenizer: Tokenizer) -> None:
    ids = words(tokenizer, "noun: small wild")
    for include, text in ((False, "noun:"), (True, "noun: small")):
        request = new_request(tokenizer, stop_token_ids=[ids[2], 5], include_stop_str_in_output=include)
        outputs = run(request, ids)
        done = request.completion()
        assert (done.text, done.token_ids) == (text, tuple(ids[:3]))
        assert (done.finish_reason, done.stop_reason) == ("stop", ids[2])
        assert outputs[-1].stop_reason == ids[2]


def test_an_end_token_gives_no_reason_unless_it_is_ignored_and_asked_for(tokenizer: Tokenizer) -> None:
    reasons = {}
    for ignore_eos in (False, True):
        request = new_request(tokenizer, eos=(EOS, USER), stop_token_ids=[USER], ignore_eos=ignore_eos)
        run(request, [300, EOS, USER])
        reasons[ignore_eos] = (request.num_output_tokens, request.finish_reason, request.stop_reason)
    assert reasons == {False: (2, "stop", None), True: (3, "stop", USER)}


def test_before_min_tokens_nothing_ends_the_reply(tokenizer: Tokenizer) -> None:
    duck, small = words(tokenizer, " duck small")
    request = new_request(tokenizer, min_tokens=3, stop="duck", stop_token_ids=[USER])
    # The first three are the best of what is left; then the stop token is free.
    chosen = [request.advance(wanting(EOS, USER, token)) for token in (duck, small, duck, small)]
    assert chosen == [duck, small, duck, EOS]
    assert request.completion().text == " duck small duck"


def test_a_stop_string_completed_after_min_tokens_counts_whole(tokenizer: Tokenizer) -> None:
    ids = words(tokenizer, "noun: small wild duck")
    request = new_request(tokenizer, min_tokens=2, stop=["noun", ": small"])
    assert [output.text for output in run(request, ids)] == ["nou", "n", ""]
    assert request.completion().stop_reason == ": small"


def test_logprobs_are_the_models_own_with_text(tokenizer: Tokenizer) -> None:
    duck, small = words(tokenizer, " duck small")
    request = new_request(tokenizer, logprobs=2, logit_bias={small: 50.0}, min_tokens=1, max_tokens=2)
    logits = torch.full((VOCAB,), -1e9)
    logits[[EOS, duck, small]] = torch.log(torch.tensor([0.5, 0.3, 0.2]))
    assert request.advance(logits) == small
    [at] = give(request).logprobs or ()
    assert list(at) == [small, EOS, duck]
    assert [at[token].rank for token in at] == [3, 1, 2]
    assert [at[token].decoded_token for token in at] == [" small", "<|eos|>", " duck"]
    expected = [torch.tensor(share).log().item() for share in (0.2, 0.5, 0.3)]
    assert [at[token].logprob for token in at] == pytest.approx(expected, abs=1e-6)
    request.advance(logits)
    [second] = give(request).logprobs or ()
    done = request.completion()
    assert done.logprobs == (at, second)
    assert done.cumulative_logprob == pytest.approx(2 * expected[0])


def test_without_logprobs_there_are_none(tokenizer: Tokenizer) -> None:
    request = new_request(tokenizer, max_tokens=1)
    [output] = run(request, [300])
    assert output.logprobs is None
    assert (request.completion().logprobs, request.completion().cumulative_logprob) == (None, None)
    request = new_request(None, logprobs=0, max_tokens=1)
    [output] = run(request, [300])
    [at] = output.logprobs or ()
    assert list(at) == [300]
    assert at[300].decoded_token is None


def test_a_reply_may_be_read_later_than_it_grows(tokenizer: Tokenizer) -> None:
    ids = words(tokenizer, "noun: small wild")
    request = new_request(tokenizer, logprobs=1, stop_token_ids=[ids[3]])
    for token_id in ids:
        request.advance(wanting(token_id))
    outputs = [give(request) for _ in ids]
    assert [output.text for output in outputs] == ["noun", ":", " small", ""]
    assert [output.token_ids for output in outputs] == [(token_id,) for token_id in ids]
    assert [list((output.logprobs or ())[0]) for output in outputs] == [[token_id] for token_id in ids]
    assert [output.finish_reason for output in outputs] == [None, None, None, "stop"]
    assert [output.stop_reason for output in outputs] == [None, None, None, ids[3]]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"stop_token_ids": [8191, 8192]}, "stop_token_ids: got 8192, expected token ids from 0 to 8191"),
        ({"logit_bias": {9000: 1.0}}, "logit_bias: got 9000, expected token ids from 0 to 8191"),
        (
            {"stop_token_ids": list(range(VOCAB)), "min_tokens": 1},
            "min_tokens: got 1, expected 0 where every token ends a reply",
        ),
    ],
)
def test_tokens_outside_the_vocabulary_are_named(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        new_request(None, **params)
    assert str(caught.value) == message


def test_an_end_token_without_logits_is_no_trouble() -> None:
    request = new_request(None, eos=(EOS, VOCAB + 5), min_tokens=2)
    assert request.advance(wanting(EOS, 9)) == 9
