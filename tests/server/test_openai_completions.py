"""The completions API through the official client, against a running server."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from server_harness import ServerProcess

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


@pytest.mark.parametrize("prompt", [PROMPT, [PROMPT, "Is 7 prime?"]])
def test_a_stream_is_its_whole_reply(server: ServerProcess, prompt: Any) -> None:
    options = {"n": 2, "temperature": 1, "seed": 2, "logprobs": 1, "max_tokens": 12}
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
        ({"echo": True, "logprobs": 1}, "echo", "echo: got True, expected false with logprobs"),
        ({"n": 2, "best_of": 1}, "best_of", "best_of: got 1, expected at least n=2"),
        ({"best_of": 2, "stream": True}, "best_of", "best_of: got 2, expected n=1 in a stream"),
        ({"prompt": []}, "prompt", "prompt: got [], expected"),
        ({"prompt": [[]]}, "prompt", "prompt: got no tokens, expected at least 1"),
        ({"prompt": [99999]}, "prompt", "prompt: got token 99999, expected 0 to"),
        ({"prompt": 7}, "prompt", "prompt: got 7, expected a valid string"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "logit_bias: got 'x', expected token ids as keys"),
        ({"logit_bias": {"7": 1, "07": 2}}, "logit_bias", "logit_bias: got '07', expected token ids as keys"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "logit_bias: got 99999, expected token ids from 0 to"),
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
