"""What attackers send: each is refused in order, at a bounded cost, while others go on."""

from __future__ import annotations

import asyncio
import hmac
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from app_harness import Call, InProcess, ask
from server_harness import ServerProcess
from test_slow_clients import listening

from duckllm.server import limits
from duckllm.server.app import ServerConfig, make_app
from duckllm.server.limits import MAX_BODY_BYTES

CHAT = "/v1/chat/completions"
TIMEOUT_S = 30.0
HOST = b"host: 127.0.0.1\r\n"
GET = b"GET /v1/models HTTP/1.1\r\n"
POST = b"POST /v1/chat/completions HTTP/1.1\r\n" + HOST + b"content-type: application/json\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
CLOSE = b"connection: close\r\n\r\n"
MIB = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"


def body(**options: Any) -> dict[str, Any]:
    message = {"role": "user", "content": "What is a duck?"}
    return {"messages": [message], "temperature": 0, "max_tokens": 4, **options}


def send_raw(port: int, data: bytes) -> bytes:
    """All that is answered until the connection is closed; a reset of it ends that too."""
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as connection:
        answer = b""
        try:
            connection.sendall(data)
            while piece := connection.recv(1 << 16):
                answer += piece
        except ConnectionError:
            pass
        return answer


@contextmanager
def another_client(server: ServerProcess) -> Iterator[None]:
    """A stream that goes on meanwhile, and has the same text as alone."""
    asked = body(max_tokens=150)
    alone = server.http.post(CHAT, json={**asked, "ignore_eos": True}).json()["choices"][0]["message"][
        "content"
    ]
    texts: list[str] = []

    def stream() -> None:
        chunks = server.openai().chat.completions.create(
            model="demo", stream=True, extra_body={"ignore_eos": True}, **asked
        )
        texts.append("".join(chunk.choices[0].delta.content or "" for chunk in chunks))

    thread = threading.Thread(target=stream)
    thread.start()
    yield
    thread.join()
    assert texts == [alone]


RAW: dict[str, tuple[bytes, int]] = {
    "no HTTP": (b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\r\n\r\n", 400),
    "HTTP/0.9": (b"GET /\r\n\r\n", 400),
    "no host": (GET + b"\r\n", 400),
    "two hosts": (GET + HOST + b"host: evil.example\r\n\r\n", 400),
    "another host": (GET + b"host: evil.example\r\n" + CLOSE, 403),
    "an address of somebody else": (b"GET http://evil.example/v1/models HTTP/1.1\r\n" + HOST + CLOSE, 404),
    "a space before the colon": (GET + b"host : 127.0.0.1\r\n\r\n", 400),
    "a header that is too long": (GET + HOST + b"a: " + b"x" * 200_000 + b"\r\n\r\n", 400),
    "a path that is too long": (b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "headers that are too many": (GET + HOST + b"a: b\r\n" * 100_000 + b"\r\n", 400),
    "two lengths": (POST + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}", 400),
    "a negative length": (POST + b"content-length: -2\r\n\r\n{}", 400),
    "a length and chunks": (
        POST + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + GET + HOST + CLOSE,
        400,
    ),
    "a broken chunk": (CHUNKED + b"zz\r\n", 400),
    "an endless length": (POST + b"content-length: 99999999999999999999\r\n\r\n", 413),
    "a length that asks first": (POST + b"expect: 100-continue\r\ncontent-length: 17000000\r\n\r\n", 413),
    "a body that is too large": (
        POST + b"content-length: 16777217\r\n\r\n" + b" " * (MAX_BODY_BYTES + 1),
        413,
    ),
    "chunks without end": (CHUNKED + MIB * 17 + b"0\r\n\r\n", 413),
    "lines in a path": (b"GET /v1/models%0d%0aset-cookie:a=b HTTP/1.1\r\n" + HOST + CLOSE, 404),
    "a method that is none": (b"FROB /v1/models HTTP/1.1\r\n" + HOST + CLOSE, 405),
    "a tunnel": (b"CONNECT evil.example:443 HTTP/1.1\r\n" + HOST + CLOSE, 404),
}


def test_bytes_that_are_no_proper_request(server: ServerProcess) -> None:
    port = int(server.url.rpartition(":")[2])
    with another_client(server):
        for name, (data, status) in RAW.items():
            answer = send_raw(port, data)
            assert answer.startswith(b"HTTP/1.1 %d " % status), (name, answer[:200])
            assert answer.count(b"HTTP/1.1 ") == 1, name
            assert b"set-cookie" not in answer.partition(b"\r\n\r\n")[0], name


def test_many_requests_in_one_packet(server: ServerProcess) -> None:
    port = int(server.url.rpartition(":")[2])
    one = b"GET /health HTTP/1.1\r\n" + HOST
    assert send_raw(port, (one + b"\r\n") * 50 + one + CLOSE).count(b'{"status":"ok"}') == 51


def test_very_many_small_chunks(server: ServerProcess) -> None:
    port = int(server.url.rpartition(":")[2])
    assert b"too many small chunks" in send_raw(port, CHUNKED + b"1\r\n \r\n" * 40_000 + b"0\r\n\r\n")
    whole = json.dumps(body()).encode()
    few = b"".join(b"1\r\n%c\r\n" % each for each in whole)
    answer = send_raw(port, CHUNKED.replace(b"\r\n\r\n", b"\r\n" + CLOSE) + few + b"0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")


def deep(levels: int) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for _ in range(levels):
        made = {"items": made}
    return made


def of_schema(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}


def of_regex(regex: str) -> dict[str, Any]:
    return {"structured_outputs": {"regex": regex}}


MANY = {f"name{number}": 1 for number in range(60_000)}
COSTLY: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "unknown fields": (lambda: dict.fromkeys(map(str, range(101)), 1), "body: got "),
    "unknown fields inside": (
        lambda: {"messages": [dict.fromkeys(map(str, range(101)), 1)]},
        "messages[0]: ",
    ),
    "names": (lambda: {"metadata": MANY}, "body: got more than 100000 names and values"),
    "names of a schema": (lambda: of_schema({"properties": MANY}), "body: got more than 100000 names"),
    "values": (lambda: {"logit_bias": {}, "stop": [None] * 100_001}, "body: got more than 100000 names"),
    "numbers elsewhere": (lambda: {"messages": [1] * 100_001}, "body: got more than 100000 names"),
    "a long text": (
        lambda: {"messages": [{"role": "user", "content": "a " * 4_000_000}]},
        "the request has at",
    ),
    "a long word": (
        lambda: {"messages": [{"role": "user", "content": "a" * 8_000_000}]},
        "the request has at",
    ),
    "a deep schema": (lambda: of_schema(deep(65)), "response_format.json_schema.schema: got 'more than 64"),
    "a loop": (lambda: of_schema({"$ref": "#"}), "response_format.json_schema.schema: got"),
    "an address": (
        lambda: of_schema({"$ref": "http://127.0.0.1:1/"}),
        "response_format.json_schema.schema: ",
    ),
    "a file": (lambda: of_schema({"$ref": "file:///etc/passwd"}), "response_format.json_schema.schema: "),
    "repetitions": (lambda: of_regex("(?:a?){5000}a{5000}"), "structured_outputs.regex: got '(?:a?){5000}"),
    "parentheses": (lambda: of_regex("(" * 5000 + ")" * 5000), "structured_outputs.regex: got '(((((("),
    "looking behind": (lambda: of_regex("(?<=a)b"), "structured_outputs.regex: got '(?<=a)b'"),
    "a template": (
        lambda: {"chat_template_kwargs": {"chat_template": "{{ x }}"}},
        "chat_template_kwargs.chat_te",
    ),
    "messages twice": (
        lambda: {"chat_template_kwargs": {"messages": []}},
        "chat_template_kwargs.messages: got",
    ),
}


def test_bodies_that_cost_more_than_they_should(server: ServerProcess) -> None:
    with another_client(server):
        for name, (make, message) in COSTLY.items():
            done = server.http.post(CHAT, json={**body(), **make()})
            assert done.status_code == 400, (name, done.text[:200])
            assert done.json()["error"]["message"].startswith(message), name


@pytest.mark.parametrize("regex", ["(a*)*b", "((a|a)*)*c", "(a|b)*a(a|b){25}", "x{1,100000}", "(.*a){30}"])
def test_expressions_that_are_only_evil_where_one_goes_back(server: ServerProcess, regex: str) -> None:
    done = server.http.post(CHAT, json=body(**of_regex(regex)))
    assert done.status_code == 200
    assert 1 <= done.json()["usage"]["completion_tokens"] <= 4


@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages/count_tokens", "/v1/completions"])
def test_counting_a_text_has_an_end(server: ServerProcess, path: str) -> None:
    """The demo model's context has 4096 tokens; twice as many are counted, a hundred times are not."""
    for characters, is_counted in ((8192, True), (2_000_000, False)):
        text = "1 " * (characters // 2)
        asked: dict[str, Any] = {"prompt": text}
        if "count" in path:
            asked = {"model": "demo", "messages": [{"role": "user", "content": text}]}
        done = server.http.post(path, json=asked)
        if is_counted and "v1/completions" not in path:
            assert done.status_code == 200
        else:
            message = done.json()["error"]["message"]
            assert done.status_code == 400
            assert ("at least" in message) is not is_counted


def test_a_grammar_that_takes_long_holds_up_no_prompt(
    here: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, may_go_on, has_begun = here.llm.new_requests, threading.Event(), threading.Event()

    def slow(token_ids: Any, params: Any) -> Any:
        if params.structured_outputs is not None:
            has_begun.set()
            assert may_go_on.wait(TIMEOUT_S)
        return make(token_ids, params)

    monkeypatch.setattr(here.llm, "new_requests", slow)
    held = here.run(Call(here.app, CHAT, body(**of_regex("[a-z]+"))).begin())
    assert has_begun.wait(TIMEOUT_S)
    assert ask(here, CHAT, body()).status == 200
    assert ask(here, "/v1/completions", {"prompt": "a", "max_tokens": 2}).status == 200
    assert held.status == 0
    may_go_on.set()
    assert here.run(held.end()).status == 200


@pytest.mark.parametrize(
    "path",
    [
        *("//v1/models", "/v1//models", "/v1/models/", "/./v1/models", "/v1/./models", "/v1/models\x00"),
        *(
            "/health/../v1/models",
            "/health;/v1/models",
            "/HEALTH",
            "/health/x",
            "/page",
            "/pages/../v1/models",
        ),
        *("/metrics", "/cluster/", "/openapi.json", "/docs", "/.git/config"),
    ],
)
def test_no_path_leads_around_the_key(here: InProcess, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(here, "app", make_app(here.service, ServerConfig(api_keys=("key",))))
    assert ask(here, path).status == 401


@pytest.mark.parametrize(
    "name",
    ["../v1/models", "../../v1/models", "..", "//../cluster", "../app.py", "/etc/passwd", "index.html"],
)
def test_below_the_pages_folder_there_are_its_files_alone(
    here: InProcess, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """They need no key."""
    monkeypatch.setattr(here, "app", make_app(here.service, ServerConfig(api_keys=("key",))))
    assert ask(here, "/page/main.js").status == 200
    assert ask(here, f"/page/{name}").status == 404


@pytest.mark.parametrize("given", ["k", "first-keY", "first-key-and-more", "", "second-key"])
def test_every_key_is_compared_whatever_is_given(
    here: InProcess, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    compared: list[tuple[bytes, bytes]] = []
    compare = hmac.compare_digest

    def watched(left: bytes, right: bytes) -> bool:
        compared.append((left, right))
        return compare(left, right)

    monkeypatch.setattr(hmac, "compare_digest", watched)
    config = ServerConfig(api_keys=("first-key", "second-key"))
    monkeypatch.setattr(here, "app", make_app(here.service, config))
    done = ask(here, "/v1/models", headers=[("x-api-key", given)])
    assert done.status == (200 if given == "second-key" else 401)
    assert compared == [(given.encode(), b"first-key"), (given.encode(), b"second-key")]


def test_the_rest_of_what_was_refused_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """However steadily it comes."""
    monkeypatch.setattr(limits, "HEADERS_TIMEOUT_S", 0.1)

    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async def run() -> None:
        async with listening(refuse) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(CHUNKED)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 401")
            reading = asyncio.ensure_future(reader.read())
            while not reading.done():
                writer.write(b"1\r\na\r\n")
                await asyncio.sleep(0.01)
            writer.close()
            assert isinstance(reading.exception(), ConnectionError) or reading.result() == b""

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))


def test_what_is_counted_to_the_end(here: InProcess) -> None:
    """Texts in pieces have no fewer tokens than they are said to have at least."""
    tokenizer = here.llm.tokenizer
    for text in ("a" * 100_000, " " * 100_000, "Is 1001 prime? " * 8000, "🦆" * 20_000):
        num_tokens = len(tokenizer.encode(text))
        assert tokenizer.count_beyond([text], num_tokens) is None
        most = min(num_tokens, len(text)) // 2
        least = tokenizer.count_beyond([text], most)
        assert least is not None
        assert most < least <= num_tokens
    assert tokenizer.count_beyond(["a"] * 10, 20) is None


def test_json_that_is_large_and_honest(here: InProcess) -> None:
    """A prompt as tokens, and many messages, are not taken for an attack."""
    done = ask(here, "/v1/completions", {"prompt": [5] * 200_000, "max_tokens": 2})
    assert json.loads(done.content)["error"]["n_prompt_tokens"] == 200_000
    done = ask(here, CHAT, body(messages=body()["messages"] * 9000))
    assert json.loads(done.content)["error"]["n_prompt_tokens"] > 9000
