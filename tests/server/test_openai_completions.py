"""The completions API through the official client, against a running server."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from server_harness import ServerProcess

from duckllm.demo.suite import load_choices

PROMPT = "A duck is"


def complete(server: ServerProcess, prompt: Any = PROMPT, **options: Any) -> Any:
    options = {"model": "demo", "max_tokens": 6, "temperature": 0, **options}
    return server.openai().completions.create(prompt=prompt, **options)


def test_a_reply_has_openais_form(server: ServerProcess) -> None:
    reply = complete(server)
    assert (reply.object, reply.id[:5], reply.model) == ("text_completion", "cmpl-", "demo")
    [choice] = reply.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert choice.text
    assert reply.usage.completion_tokens == 6


def test_sixteen_tokens_where_nothing_is_said(server: ServerProcess) -> None:
    reply = server.openai().completions.create(model="demo", prompt=PROMPT, extra_body={"ignore_eos": True})
    assert reply.usage.completion_tokens == 16


def test_prompts_as_texts_and_as_tokens(server: ServerProcess) -> None:
    """Each of a list is as it is alone, in their order, n of each."""
    tokens = [[5, 6, 7], [8, 9]]
    alone = [complete(server, each).choices[0].text for each in ("Is 7 prime?", PROMPT)]
    assert [choice.text for choice in complete(server, ["Is 7 prime?", PROMPT]).choices] == alone
    by_tokens = complete(server, tokens)
    assert by_tokens.usage.prompt_tokens == 5
    assert [c.text for c in by_tokens.choices] == [complete(server, each).choices[0].text for each in tokens]
    both = complete(server, ["Is 7 prime?", PROMPT], n=2, temperature=1, seed=3)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    second = complete(server, PROMPT, n=2, temperature=1, seed=3)
    assert [choice.text for choice in both.choices[2:]] == [choice.text for choice in second.choices]


def test_echo_begins_with_the_prompt(server: ServerProcess) -> None:
    text = complete(server).choices[0].text
    assert complete(server, echo=True).choices[0].text == PROMPT + text
    chunks = list(complete(server, echo=True, stream=True))
    assert chunks[0].choices[0].text == PROMPT
    assert "".join(chunk.choices[0].text for chunk in chunks) == PROMPT + text


def test_an_echo_has_log_probabilities(server: ServerProcess) -> None:
    """Those of a reply that is sent back as a prompt are those that it had: no token lost, none moved."""
    prompt = "<|bos|><|user|>What is a duck?<|assistant|>"
    alone = complete(server, prompt, logprobs=2, max_tokens=5).choices[0]
    given = complete(server, prompt + alone.text, logprobs=2, max_tokens=2, echo=True).choices[0]
    found, of_reply = given.logprobs, alone.logprobs
    assert given.text.startswith(prompt + alone.text)
    assert [len(values) for values in found.model_dump().values()] == [len(found.tokens)] * 4
    assert (found.token_logprobs[0], found.top_logprobs[0]) == (None, None)
    assert found.tokens[:2] == ["<|bos|>", "<|user|>"]
    assert found.tokens[-7:-2] == of_reply.tokens
    assert found.token_logprobs[-7:-2] == of_reply.token_logprobs
    assert found.top_logprobs[-7:-2] == of_reply.top_logprobs
    assert found.text_offset[:3] == [0, len("<|bos|>"), len("<|bos|><|user|>")]
    assert found.text_offset[-7:-2] == [len(prompt) + offset for offset in of_reply.text_offset]
    assert given.text[found.text_offset[-1] :] == found.tokens[-1]


def test_offsets_of_an_echo_are_places_in_its_text(server: ServerProcess) -> None:
    """A BOS that the server puts in front is a token and no text; bytes are where their character begins."""
    choice = complete(server, "a düßck is", logprobs=0, echo=True, max_tokens=0).choices[0]
    assert choice.text == "a düßck is"
    assert choice.logprobs.tokens[:3] == ["<|bos|>", "a", " d"]
    assert choice.logprobs.tokens[-2:] == ["ck", " is"]
    assert choice.logprobs.text_offset == [0, 0, 1, 3, 3, 4, 4, 5, 7]
    tokens = server.http.post("/tokenize", json={"prompt": "<|user|>a ü"}).json()["tokens"]
    choice = complete(server, tokens, logprobs=0, echo=True, max_tokens=0).choices[0]
    assert choice.text == "a ü"  # as echoed without logprobs: control tokens are no text
    assert choice.logprobs.text_offset == [0, 0, 0, 1, 2, 2]


def test_offsets_of_a_reply_are_places_in_its_text(server: ServerProcess) -> None:
    """A control token in a reply is a token and no text; what follows it is where the text has it."""
    for echo in (False, True):
        choice = complete(server, "What is a duck?", logprobs=0, echo=echo, max_tokens=5).choices[0]
        tokens, offsets = choice.logprobs.tokens[-5:], choice.logprobs.text_offset[-5:]
        assert tokens[0] == "<|assistant|>"
        begin = len("What is a duck?") if echo else 0
        assert offsets[:2] == [begin, begin]
        pairs = zip(tokens[1:], offsets[1:], strict=True)
        assert all(choice.text.startswith(token, at) for token, at in pairs)


def test_an_end_token_is_told_behind_an_echo(server: ServerProcess) -> None:
    """Clients that count from behind, as lm-evaluation-harness, expect each token that was computed."""
    prompt = "<|bos|><|user|>What is a duck?<|assistant|>"
    reply = complete(server, prompt, max_tokens=100).choices[0].text
    choice = complete(server, prompt + reply, echo=True, logprobs=1, max_tokens=1).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.text == prompt + reply
    assert choice.logprobs.tokens[-1] == "<|eos|>"
    assert choice.logprobs.text_offset[-1] == len(choice.text)


def test_a_choice_is_scored_as_lm_evaluation_harness_does(server: ServerProcess) -> None:
    """Its requests (0.4.13: tokens, ``echo``, one token behind them) and what it makes of the replies."""

    def tokens(text: str) -> list[int]:
        body = {"prompt": text, "add_special_tokens": False}
        found: list[int] = server.http.post("/tokenize", json=body).json()["tokens"]
        return found

    choices = load_choices()[::25]
    for choice in choices:
        context = tokens(f"<|bos|><|user|>{choice.question}<|assistant|>")
        answers = [tokens(answer) for answer in choice.choices]
        body = {
            "model": "demo", "prompt": [context + answer for answer in answers], "temperature": 0,
            "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True,
        }  # fmt: skip
        scores, are_greedy = [], []
        given_choices = server.http.post("/v1/completions", json=body).json()["choices"]
        for given, answer in zip(given_choices, answers, strict=True):
            found = given["logprobs"]
            own = found["token_logprobs"][len(context) : -1]
            best = [max(top.values()) for top in found["top_logprobs"][len(context) : -1]]
            assert len(own) == len(answer)
            scores.append(sum(own))
            are_greedy.append(own == best)
        assert scores.index(max(scores)) == choice.right
        assert max(scores) > -1
        assert are_greedy == [number == choice.right for number in range(4)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_alone(server: ServerProcess, stream: bool) -> None:
    """``max_tokens`` of 0 with ``echo``: no token of a reply is shown or counted."""
    options = {"echo": True, "logprobs": 1, "max_tokens": 0}
    if stream:
        *chunks, last = complete(server, stream=True, stream_options={"include_usage": True}, **options)
        [first, end] = [chunk.choices[0] for chunk in chunks]
        assert (end.text, end.logprobs.tokens, end.finish_reason) == ("", [], "length")
        text, logprobs, usage = first.text, first.logprobs, last.usage
    else:
        reply = complete(server, **options)
        [choice], usage = reply.choices, reply.usage
        assert choice.finish_reason == "length"
        text, logprobs = choice.text, choice.logprobs
    assert text == PROMPT
    assert "".join(logprobs.tokens) == "<|bos|>" + PROMPT
    assert (usage.completion_tokens, usage.prompt_tokens) == (0, len(logprobs.tokens))
    assert complete(server, echo=True, max_tokens=0).choices[0].logprobs is None


def test_each_of_several_replies_has_the_prompt(server: ServerProcess) -> None:
    options = {"echo": True, "logprobs": 1, "temperature": 1, "seed": 4}
    alone = [complete(server, each, **options).choices[0] for each in (PROMPT, "Is 7 prime?")]
    for more in ({"n": 2}, {"n": 2, "best_of": 3}):
        found = complete(server, [PROMPT, "Is 7 prime?"], **options, **more).choices
        assert [choice.index for choice in found] == [0, 1, 2, 3]
        for choice, expected in zip(found, (alone[0], alone[0], alone[1], alone[1]), strict=True):
            own = len(expected.logprobs.tokens) - 6
            assert choice.logprobs.token_logprobs[:own] == expected.logprobs.token_logprobs[:own]
            assert choice.logprobs.text_offset[:own] == expected.logprobs.text_offset[:own]
            assert len(choice.logprobs.tokens) > own


def test_logprobs_have_the_old_form(server: ServerProcess) -> None:
    logprobs = complete(server, logprobs=2, max_tokens=4).choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 4
    assert "".join(logprobs.tokens) == complete(server, max_tokens=4).choices[0].text
    assert logprobs.text_offset == [len("".join(logprobs.tokens[:number])) for number in range(4)]
    for token, logprob, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert len(top) == 2
        assert top[token] == max(top.values()) == logprob


def test_best_of_chooses_the_likeliest(server: ServerProcess) -> None:
    options = {"temperature": 5, "seed": 5, "logprobs": 0}
    reply = complete(server, n=2, best_of=5, **options)
    assert reply.usage.completion_tokens <= 5 * 6

    def rating(choice: Any) -> float:
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    assert len({rating(choice) for choice in complete(server, n=5, **options).choices}) == 5
    all_five = sorted(complete(server, n=5, **options).choices, key=rating, reverse=True)
    assert [choice.text for choice in reply.choices] == [choice.text for choice in all_five[:2]]
    assert [choice.index for choice in reply.choices] == [0, 1]


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("prompt", [PROMPT, [PROMPT, "Is 7 prime?"]])
def test_a_stream_is_its_whole_reply(server: ServerProcess, prompt: Any, echo: bool) -> None:
    options = {"n": 2, "temperature": 1, "seed": 2, "logprobs": 1, "max_tokens": 12, "echo": echo}
    whole = complete(server, prompt, **options)
    texts = [""] * len(whole.choices)
    tokens: list[list[str]] = [[] for _ in texts]
    offsets: list[list[int]] = [[] for _ in texts]
    reasons: list[str | None] = [None] * len(texts)
    usage = None
    for chunk in complete(server, prompt, stream=True, stream_options={"include_usage": True}, **options):
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            tokens[choice.index] += choice.logprobs.tokens
            offsets[choice.index] += choice.logprobs.text_offset
            reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert tokens == [choice.logprobs.tokens for choice in whole.choices]
    assert offsets == [choice.logprobs.text_offset for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        ({"suffix": "x"}, "suffix", "suffix: got 'x', expected None"),
        ({"echo": True, "logprobs": 21}, "logprobs", "logprobs: got 21, expected"),
        (
            {"echo": True, "logprobs": 20, "prompt": [[5] * 2100] * 12},
            "logprobs",
            "logprobs: got 21 for each token of the prompts, 529200 in all, expected at most 524288",
        ),
        ({"n": 2, "best_of": 1}, "best_of", "best_of: got 1, expected at least n=2"),
        ({"best_of": 2, "stream": True}, "best_of", "best_of: got 2, expected n=1 in a stream"),
        ({"best_of": 3, "temperature": 0}, "best_of", "best_of: got 3, expected 1 with temperature=0"),
        ({"prompt": "duck " * 5000}, "prompt", "the request has 5003 tokens, expected at most 4095"),
        ({"prompt": "duck " * 400_000}, "prompt", "the request has at least 100"),
        ({"prompt": []}, "prompt", "prompt: got [], expected"),
        ({"prompt": [[]]}, "prompt", "prompt: got no tokens, expected at least 1"),
        ({"prompt": [99999]}, "prompt", "prompt: got token 99999, expected 0 to"),
        ({"prompt": 7}, "prompt", "prompt: got 7, expected a valid string"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "logit_bias: got 'x', expected token ids as keys"),
        ({"logit_bias": {"7": 1, "07": 2}}, "logit_bias", "logit_bias: got '07', expected token ids as keys"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "logit_bias: got 99999, expected token ids from 0 to"),
        ({"max_tokens": -1, "echo": True}, "max_tokens", "max_tokens: got -1, expected an integer from 1"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens: got 0, expected an integer from 1"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    server: ServerProcess, options: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(server, **options)
    assert caught.value.param == param
    assert caught.value.body["message"].startswith(message)  # type: ignore[index]
