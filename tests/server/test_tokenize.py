"""Texts and conversations as tokens, as clients of vLLM and of llama-server ask for them."""

from __future__ import annotations

from typing import Any

import pytest
from server_harness import ServerProcess

BOS, USER, ASSISTANT = 0, 2, 3


def post(server: ServerProcess, path: str, **body: Any) -> dict[str, Any]:
    response = server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def test_a_prompt_as_vllms_clients_send_it(server: ServerProcess) -> None:
    found = post(server, "/tokenize", model="demo", prompt="a duck", return_token_strs=True)
    assert found["token_strs"][1:] == ["a", " duck"]
    assert found["tokens"][0] == BOS
    assert (found["count"], found["max_model_len"]) == (3, 4096)
    without = post(server, "/tokenize", prompt="a duck", add_special_tokens=False)
    assert without["tokens"] == found["tokens"][1:]
    assert without["token_strs"] is None


def test_a_text_as_llama_servers_clients_send_it(server: ServerProcess) -> None:
    found = post(server, "/tokenize", content="a ü", with_pieces=True)["tokens"]
    assert [each["piece"] for each in found] == ["a", " ", [0xC3], [0xBC]]
    ids = [each["id"] for each in found]
    assert post(server, "/tokenize", content="a ü")["tokens"] == ids
    assert post(server, "/tokenize", content="a ü", add_special=True)["tokens"] == [BOS, *ids]
    assert post(server, "/tokenize", content="<|bos|>a ü")["tokens"] == [BOS, *ids]


def test_a_conversation_is_what_a_chat_would_read(server: ServerProcess) -> None:
    messages = [{"role": "user", "content": "a duck"}]
    text = post(server, "/tokenize", content="a duck")["tokens"]
    found = post(server, "/tokenize", messages=messages, add_generation_prompt=True)
    assert found["tokens"] == [BOS, USER, *text, ASSISTANT]
    reply = server.openai().chat.completions.create(model="demo", messages=messages, max_tokens=1)  # type: ignore[arg-type]
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == found["count"]


def test_tokens_become_their_text_again(server: ServerProcess) -> None:
    text = "<|user|>a ü, \N{DUCK}!"
    tokens = post(server, "/tokenize", content=text)["tokens"]
    assert post(server, "/detokenize", tokens=tokens) == {"prompt": text, "content": text}
    assert post(server, "/detokenize", model="demo", tokens=[])["prompt"] == ""


def test_what_the_tokenizer_is(server: ServerProcess) -> None:
    found = server.http.get("/tokenizer_info").json()
    assert (found["bos_token"], found["eos_token"], found["unk_token"]) == ("<|bos|>", "<|eos|>", None)
    assert found["chat_template"].startswith("{{ bos_token }}{% for m in messages %}")
    assert post(server, "/tokenize", prompt=found["bos_token"], add_special_tokens=False)["tokens"] == [BOS]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/tokenize", {}, "prompt, content, messages: got none of them, expected exactly one of them"),
        ("/tokenize", {"prompt": "a", "content": "b"}, "prompt, content, messages: got prompt and content"),
        ("/tokenize", {"content": "a", "tools": []}, "tools: got [], expected none without messages"),
        ("/tokenize", {"prompt": "a", "parse_special": False}, "parse_special: got False, expected True"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model: got 'other', expected demo"),
        ("/tokenize", {"messages": []}, "messages: got [], expected at least one message"),
        ("/detokenize", {"tokens": [1, 99999]}, "tokens[1]: got 99999, expected a token id from 0 to"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]: got -1, expected a token id from 0 to"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]: got 'a', expected a valid integer"),
    ],
)
def test_what_is_no_request_is_refused(
    server: ServerProcess, path: str, body: dict[str, Any], message: str
) -> None:
    response = server.http.post(path, json=body)
    assert 400 <= response.status_code < 500
    assert response.json()["error"]["message"].startswith(message)


def test_what_is_too_long_is_named_as_the_client_has_it(server: ServerProcess) -> None:
    long = "duck " * 400_000
    messages = [{"role": "user", "content": long}]
    for name, value in (("prompt", long), ("content", long), ("messages", messages)):
        error = server.http.post("/tokenize", json={name: value}).json()["error"]
        assert (error["code"], error["param"]) == ("exceed_context_size_error", name)
