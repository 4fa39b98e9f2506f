"""A server under load: what is sent and when, what is counted, and what a stalling server cannot hide."""

from __future__ import annotations

import asyncio
import io
import json
import math
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from duckllm.bench.load import Load, PromptWriter, Wanted, arrivals, random_lengths, read_trace
from duckllm.bench.serving import LoadResult, ServingRun, measure_serving, send_load
from duckllm.bench.serving_report import error_words, print_serving, serving_html
from duckllm.bench.stream_client import Outcome, StreamClient
from duckllm.cli.bench_serve import check_base_url, parse_loads
from duckllm.cli.main import app
from duckllm.errors import ConfigError, without_credentials

Handler = Callable[[httpx.Request], Awaitable[httpx.Response]]


def test_random_lengths_lie_around_those_asked_for() -> None:
    wanted = random_lengths(500, 100, 10, 0.5, seed=1)
    assert {each.input_len for each in wanted} == set(range(50, 151))
    assert {each.output_len for each in wanted} == set(range(5, 16))
    assert wanted == random_lengths(500, 100, 10, 0.5, seed=1)
    assert wanted != random_lengths(500, 100, 10, 0.5, seed=2)
    assert random_lengths(2, 7, 3, 0.0, seed=1) == [Wanted(7, 3)] * 2
    for wrong in (
        (0, 7, 3, 0.0, 1),
        (2, 0, 3, 0.0, 1),
        (2, 7, 0, 0.0, 1),
        (2, 7, 3, 1.0, 1),
        (2, 7, 3, 0.0, -1),
    ):
        with pytest.raises(ConfigError):
            random_lengths(*wrong)


def test_arrivals_have_the_rate_and_the_burstiness_asked_for() -> None:
    wanted = [Wanted(1, 1)] * 4000
    for burstiness in (0.25, 1.0, 4.0):
        gaps = np.diff(arrivals(Load(20.0, burstiness), wanted, seed=2))
        assert (gaps >= 0).all()
        assert gaps.mean() == pytest.approx(1 / 20, rel=0.1)
        assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.1)
    assert arrivals(Load(math.inf), wanted[:3], 0) == [0.0] * 3
    assert arrivals(Load(None), [Wanted(1, 1, 0.5), Wanted(1, 1, 2.0)], 0) == [0.5, 2.0]
    with pytest.raises(ConfigError, match="request_rate"):
        arrivals(Load(None), wanted[:1], 0)


def test_a_trace_is_read_in_the_order_of_arrival(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines: list[dict[str, Any]] = [
        {"arrival_s": 4, "input_len": 5, "output_len": 6},
        {"timestamp": 1500, "input_length": 7, "output_length": 8, "hash_ids": [1]},
        {"arrival_s": 2.0, "prompt": "Who?", "output_len": 9},
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    assert read_trace(path) == [Wanted(7, 8, 0.0), Wanted(0, 9, 0.5, "Who?"), Wanted(5, 6, 2.5)]
    assert read_trace(path, 2) == read_trace(path)[:2]
    path.write_text('{"input_len": 5, "output_len": 6}\n')
    assert read_trace(path) == [Wanted(5, 6)]
    for wrong, place in (
        ('{"input_len": 5, "output_len": 6}\n{"input_len": 0, "output_len": 6}', ":2"),
        ('{"input_len": true, "output_len": 6}', ":1"),
        ('{"input_len": 5}', ":1"),
        ('{"input_len": 5, "output_len": 6, "arrival_s": NaN}', ":1"),
        ('{"prompt": 5, "output_len": 6}', ":1"),
        ('{"prompt": "\\ud800", "output_len": 6}', ":1"),
        ('{"input_len": 5, "output_len": 6, "arrival_s": 1' + "0" * 400 + "}", ":1"),
        ("[]", ":1"),
        ("{", ":1"),
        ("", ""),
        ('{"input_len": 5, "output_len": 6}\n{"input_len": 5, "output_len": 6, "arrival_s": 1}', ""),
    ):
        path.write_text(wrong)
        with pytest.raises(ConfigError, match=rf"^dataset_path: got '.*trace\.jsonl{place}'"):
            read_trace(path)
    with pytest.raises(ConfigError, match="can be read"):
        read_trace(tmp_path / "none")


def test_a_prompt_may_hold_what_some_take_for_a_line_end(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"prompt": "one\u2028two\x85", "output_len": 6}\r\n', encoding="utf-8")
    assert read_trace(path) == [Wanted(0, 6, None, "one\u2028two\x85")]


def test_a_load_that_no_one_sees_the_end_of_is_refused() -> None:
    wanted = [Wanted(1, 1, 0.0), Wanted(1, 1, 1e9)]
    for load in (Load(None), Load(1e-9), Load(1e-300), Load(1e-320)):
        with pytest.raises(ConfigError, match="within 30 days"):
            arrivals(load, wanted * 20, 0)
    assert max(arrivals(Load(2.0, 1e300), wanted, 0)) == pytest.approx(1.0)
    assert max(arrivals(Load(1e-200, 1e-200), wanted, 0)) == 0.0  # one burst


def test_what_cannot_be_sent_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"input_len": 5, "output_len": 6}')
    for field, *options in (
        ("base_url", "--base-url", "http://["),
        ("base_url", "--base-url", "http://a:99999"),
        ("model", "--model", "\udcff"),
        ("extra_body", "--extra-body", '{"temperature": NaN}'),
        ("extra_body", "--extra-body", '{"temperature": 1e999}'),
        ("extra_body", "--extra-body", '{"stop": "\\ud800"}'),
        ("seed", "--seed", "-1", "--dataset-path", str(trace)),
    ):
        result = CliRunner().invoke(app, ["bench", "serve", *options])
        assert isinstance(result.exception, ConfigError), options
        assert result.exception.field == field


def test_a_count_that_is_none_is_a_reply_of_another_form() -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 1}
    for wrong in (
        {"prompt_tokens": "5"},
        {"completion_tokens": -1},
        {"completion_tokens": 1.5},
        {"prompt_tokens": 10**30},
        {"prompt_tokens_details": {"cached_tokens": "x"}},
    ):
        content = events(piece("a", "stop"), {"choices": [], "usage": usage | wrong}, "[DONE]")
        assert ask(answer(content)).error == "a reply of another form"


def test_a_reply_nested_without_end_is_one_of_another_form() -> None:
    deep = b"[" * 100_000
    assert ask(answer(b"data: " + deep + b"\n\n")).error == "a reply of another form"
    assert ask(answer(deep, 500)).error.startswith("HTTP 500: [[[")


def test_of_errors_that_are_all_different_the_first_are_named() -> None:
    outcomes = tuple(Outcome(0.0, 1, 1, end=1.0, error="way " + "x" * number) for number in range(100))
    run = ServingRun("http://x", "openai", "m", 0, 0.0, [LoadResult(Load(math.inf), outcomes, 0.0)])
    words = error_words(run)
    assert len(words) == 9
    assert words[-1] == "all at once: 92 of 100 failed in 92 other ways"


def test_loads_of_the_options() -> None:
    assert parse_loads("", 1.0, "", has_trace=False) == [Load(math.inf)]
    assert parse_loads("", 1.0, "", has_trace=True) == [Load(None)]
    assert parse_loads("2,inf", 0.5, "4", has_trace=True) == [Load(2.0, 0.5, 4), Load(math.inf, 0.5, 4)]
    assert [load.is_closed for load in parse_loads("2,inf", 1.0, "4", has_trace=False)] == [False, True]
    assert [str(load) for load in parse_loads("2,inf", 1.0, "4", has_trace=False)] == [
        "2 req/s, at most 4", "4 at a time",
    ]  # fmt: skip
    assert str(Load(None)) == "arrivals of the trace"
    for rate, burstiness, concurrency in (
        ("0", 1.0, ""), ("x", 1.0, ""), ("nan", 1.0, ""), ("-1", 1.0, ""), ("1", 0.0, ""), ("1", 1.0, "0"),
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            parse_loads(rate, burstiness, concurrency, has_trace=False)


def test_texts_have_about_the_tokens_asked_for_once_words_are_counted() -> None:
    writer = PromptWriter(1)
    assert len(writer.text(10).split()) == 10
    writer.calibrate([(16, 16 * 3 + 20), (144, 144 * 3 + 20)])
    assert len(writer.text(320).split()) == 100
    assert len(writer.text(1).split()) == 1
    assert writer.text(320) != writer.text(320)


def events(*chunks: dict[str, Any] | str) -> bytes:
    texts = [chunk if isinstance(chunk, str) else json.dumps(chunk, ensure_ascii=False) for chunk in chunks]
    return "".join(f"data: {text}\r\n\r\n" for text in texts).encode()


def piece(text: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"text": text, "finish_reason": finish_reason}]}


USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}},
}


def ask(handler: Handler, backend: str = "openai", **options: Any) -> Outcome:
    async def run() -> Outcome:
        transport = httpx.MockTransport(handler)
        async with StreamClient("http://s/v1/", backend, "m", transport=transport, **options) as client:
            return await client.stream(Outcome(0.0, 9, 4), "Why?")

    return asyncio.run(run())


def answer(content: bytes, status: int = 200) -> Handler:
    async def handler(request: httpx.Request) -> httpx.Response:
        return httpx.Response(status, content=content)

    return handler


def test_pieces_and_tokens_of_a_stream_are_counted() -> None:
    asked: list[httpx.Request] = []
    # A separator of lines in a text, and a character, lie across what is read at a time.
    content = events(piece("a\u2028"), piece(""), ": ping", piece("ü"), piece("c", "length"), USAGE, "[DONE]")

    async def parts() -> AsyncIterator[bytes]:
        for place in range(len(content)):
            yield content[place : place + 1]

    async def handler(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200, content=parts())

    outcome = ask(handler, api_key="k", extra_body={"temperature": 0.5})
    # ": ping" stands in data here, and is of no form that is known.
    assert outcome.error == "a reply of another form"
    content = content.replace(b"data: : ping", b": ping")
    outcome = ask(handler, api_key="k", extra_body={"temperature": 0.5})
    assert outcome.error == ""
    assert len(outcome.pieces) == 3
    assert (outcome.prompt_tokens, outcome.completion_tokens, outcome.cached_tokens) == (9, 4, 2)
    assert outcome.sent <= outcome.pieces[0] <= outcome.pieces[2] <= outcome.end
    assert outcome.per_token_s == pytest.approx((outcome.pieces[2] - outcome.pieces[0]) / 3)
    assert str(asked[0].url) == "http://s/v1/completions"
    assert asked[0].headers["authorization"] == "Bearer k"
    assert json.loads(asked[0].content) == {
        "model": "m", "prompt": "Why?", "stream": True, "stream_options": {"include_usage": True},
        "max_tokens": 4, "temperature": 0.5, "ignore_eos": True,
    }  # fmt: skip


def test_a_chats_thinking_and_calls_are_pieces_too() -> None:
    deltas = [{"role": "assistant", "content": ""}, {"reasoning_content": "h"}, {"content": "x"}]
    deltas += [{"tool_calls": [{"index": 0}]}, {}]
    chunks = [{"choices": [{"delta": delta}]} for delta in deltas]
    chunks[-1]["choices"][0]["finish_reason"] = "stop"  # type: ignore[index]
    asked: list[dict[str, Any]] = []

    async def handler(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content))
        assert request.url.path == "/v1/chat/completions"
        return httpx.Response(200, content=events(*chunks))

    outcome = ask(handler, "openai-chat", ignore_eos=False)
    assert (outcome.error, len(outcome.pieces), outcome.num_tokens) == ("", 3, 3)
    assert asked[0]["messages"] == [{"role": "user", "content": "Why?"}]
    assert "ignore_eos" not in asked[0]


@pytest.mark.parametrize(
    ("content", "status", "error"),
    [
        (b'{"error": {"message": "too\\nmany"}}', 429, "HTTP 429: too many"),
        (b"<html>" + b"x" * 500, 502, "HTTP 502: <html>" + "x" * 114 + "..."),
        (events(piece("a")), 200, "a stream that broke off"),
        (events(piece("a"), {"error": {"message": "worker lost"}}), 200, "error in the stream: worker lost"),
        (events(piece("a"), "{"), 200, "a reply of another form"),
        (events({"choices": [3]}), 200, "a reply of another form"),
        (events(piece("", "stop"), "[DONE]"), 200, "an empty reply"),
    ],
)
def test_what_goes_wrong_is_said(content: bytes, status: int, error: str) -> None:
    outcome = ask(answer(content, status))
    assert outcome.error == error
    assert outcome.end >= outcome.sent


def test_a_request_that_takes_too_long_or_cannot_be_sent_has_failed() -> None:
    async def never(request: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    assert ask(never, timeout_s=0.02).error == "time-out"
    assert ask(refuse).error == "ConnectError: refused"


class OneAtATime:
    """A server that answers a request only when the one before has ended."""

    def __init__(self, fails: int | None = None) -> None:
        self._lock = asyncio.Lock()
        self._fails = fails
        self.under_way = self.most = self.asked = 0

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        number = self.asked
        self.asked += 1
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        async with self._lock:
            await asyncio.sleep(0.005)
        self.under_way -= 1
        if number == self._fails:
            return httpx.Response(429, content=b'{"error": {"message": "busy"}}')
        return httpx.Response(200, content=events(piece("a"), piece("b", "length"), USAGE))


def load_server(server: OneAtATime, load: Load, count: int, due: list[float] | None = None) -> LoadResult:
    async def run() -> LoadResult:
        async with StreamClient("http://s", "openai", "m", transport=httpx.MockTransport(server)) as client:
            wanted = [Wanted(9, 4)] * count
            return await send_load(client, load, wanted, due or [0.0] * count, ["Why?"] * count)

    return asyncio.run(run())


def test_what_waits_in_an_open_loop_counts_from_when_it_was_due() -> None:
    due = [0.001 * place for place in range(6)]
    server = OneAtATime()
    result = load_server(server, Load(1000.0, max_concurrency=1), 6, due)
    assert server.most == 1
    own = result.outcomes
    assert [outcome.intended for outcome in own] == [result.start + time for time in due]
    for before, after in pairwise(own):
        assert after.sent >= before.end
        assert after.first_s == after.pieces[0] - after.intended >= before.end - after.intended
    # By the moment of sending the same server looks as fast as if nobody had waited.
    from_due, from_sending = result.times_s("first"), result.times_s("first_after_sending")
    assert [a - b for a, b in zip(from_due, from_sending, strict=True)] == pytest.approx(result.sent_late_s)
    assert from_due[-1] > from_sending[-1]
    without = OneAtATime()
    unbounded = load_server(without, Load(1000.0), 6, due)
    assert without.most > 1
    assert unbounded.offered_per_s == pytest.approx(6 / 0.005)


def test_a_closed_loop_sends_another_when_one_has_ended() -> None:
    server = OneAtATime()
    result = load_server(server, Load(math.inf, max_concurrency=3), 8)
    assert (server.most, server.asked, result.most_under_way) == (3, 8, 3)
    assert result.offered_per_s is None
    ends = sorted(outcome.end for outcome in result.outcomes)
    for place, outcome in enumerate(sorted(result.outcomes, key=lambda each: each.intended)[3:]):
        assert outcome.intended >= ends[place]
        assert outcome.sent >= outcome.intended


def test_what_failed_is_counted_and_in_no_latency() -> None:
    result = load_server(OneAtATime(fails=2), Load(math.inf), 5)
    assert result.errors == {"HTTP 429: busy": 1}
    assert [len(result.times_s(name)) for name in ("first", "between", "per_token", "whole")] == [4, 4, 4, 4]
    assert len(result.sent_late_s) == 5
    found = json.loads(json.dumps(result.to_json()))
    assert (found["num_prompts"], found["completed"], found["errors"]) == (5, 4, {"HTTP 429: busy": 1})
    assert found["output_tokens_per_s"] == pytest.approx(16 / result.seconds, rel=1e-3)
    assert found["total_tokens_per_s"] == pytest.approx((16 + 36) / result.seconds, rel=1e-3)
    assert (found["prompt_tokens"], found["cached_prompt_tokens"], found["pieces_per_reply"]) == (9, 2, 2)
    assert found["short_replies"] == 0
    alike = [
        Outcome(0.0, 9, 4, end=2.0, error=error)
        for error in ("HTTP 400: 54 tokens", "HTTP 400: 7 tokens", "HTTP 500: 54 tokens")
    ]
    counted = LoadResult(Load(math.inf), tuple(alike), 0.0).errors
    assert counted == {"HTTP 400: 54 tokens": 2, "HTTP 500: 54 tokens": 1}
    broken = Outcome(0.0, 9, 4, pieces=[1.0], end=2.0, error="a stream that broke off")
    assert LoadResult(Load(math.inf), (broken,), 0.0).answered == []


def test_a_run_finds_the_model_counts_words_and_warms_up(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: list[str] = []
    url = "http://drake:pa55w0rd@s/v1"
    monkeypatch.setattr(sys, "argv", ["duckllm", "bench", "serve", f"--base-url={url}", "--base-url", url])

    async def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "found"}]})
        assert request.headers["authorization"] == "Basic ZHJha2U6cGE1NXcwcmQ="
        body = json.loads(request.content)
        assert body["model"] == "found"
        prompts.append(body["prompt"])
        usage = {
            "prompt_tokens": 2 * len(body["prompt"].split()) + 10,
            "completion_tokens": body["max_tokens"],
        }
        # A first token may have no text.
        last = piece("" if body["max_tokens"] == 1 else "a", "length")
        return httpx.Response(200, content=events(last, {"choices": [], "usage": usage}))

    async def run() -> ServingRun:
        async with StreamClient(url, "openai", transport=httpx.MockTransport(handler)) as client:
            wanted = [Wanted(110, 3), Wanted(0, 3, None, "given")]
            loads = [Load(math.inf), Load(math.inf, max_concurrency=1)]
            return await measure_serving(
                client, url, "openai", loads, wanted,
                seed=0, num_warmups=1, progress=lambda *_: None,
            )  # fmt: skip

    found = asyncio.run(run())
    assert found.model == "found"
    assert [len(prompt.split()) for prompt in prompts] == [16, 144, 50, 50, 1, 50, 50, 1]
    assert len(set(prompts)) == 7
    assert [result.to_json()["prompt_tokens"] for result in found.results] == [61.0, 61.0]
    console = Console(width=120, record=True, file=io.StringIO())
    print_serving(found, console)
    text = console.export_text()
    assert "all at once" in text
    assert "1 at a time" in text
    page = serving_html(found)
    assert "duckllm bench serve --base-url=http://s/v1 --base-url http://s/v1" in page
    assert page.count("<svg") == 4
    assert "#010203" not in page
    assert found.to_json()["base_url"] == "http://s/v1"
    for report in (json.dumps(found.to_json()), text, page):
        assert not any(secret in report for secret in ("drake", "pa55w0rd"))
        assert "http://s/v1" in report


def test_addresses_are_shown_without_what_is_secret() -> None:
    for text, shown in (
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("https://a:b@host:1/v1", "https://host:1/v1"),
        ("at https://a:b@c@host/x?sig=1&k=2#f (it failed)", "at https://host/x (it failed)"),
        ("https://host/@home a@b?", "https://host/@home a@b?"),
    ):
        assert without_credentials(text) == shown


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("", ""),
        ("h/?api_key=sesame", "h/?api_key=***"),
        ("drake:sesame@h:80", "***@h:80"),
        ("ftp://h", "ftp://h"),
        ("http://", "http://"),
        ("http://:80", "http://:80"),
        ("http://h:0", "http://h:0"),
        ("http://h:65536", "http://h:65536"),
        ("http://h:-1", "http://h:-1"),
        ("http://h:+80", "http://h:+80"),
        ("http://h:\uff18\uff10", "http://h:\uff18\uff10"),
        ("http://drake:sesame@h:65536/v1", "http://***@h:65536/v1"),
        ("http://drake:ses/ame@h", "http://***@h"),
        ("http://[::1", "http://[::1"),
        ("http://[::1]x", "http://[::1]x"),
        ("http://h h", "http://h h"),
        ("http://a..b", "http://a..b"),
        ("http://999.1.1.1", "http://999.1.1.1"),
        ("http://h/?api_key=sesame", "http://h/?***"),
        ("http://h/v1#sesame", "http://h/v1?***"),
    ],
)
def test_what_is_no_servers_address_is_refused_and_shown_without_what_is_secret(
    address: str, shown: str
) -> None:
    found = CliRunner().invoke(app, ["bench", "serve", "--base-url", address])
    assert isinstance(found.exception, ConfigError)
    assert str(found.exception).startswith(
        f"base_url: got {shown!r}, expected the address of a server, like http://127.0.0.1:8000"
    )


def test_addresses_that_a_server_may_have() -> None:
    for text in ("http://127.0.0.1:8000", "https://a.b/v1/", "http://[::1]:8000", "HTTP://u:p@h:65535/x@y"):
        check_base_url(text)


def test_where_no_server_is() -> None:
    async def run(handler: Handler) -> None:
        async with StreamClient(
            "http://drake:pa55w0rd@s", "openai", transport=httpx.MockTransport(handler)
        ) as client:
            await client.find_model()

    for content in (b"{}", b"<html>", b'{"data": []}'):
        with pytest.raises(ConfigError, match=r"^base_url: got 'http://s"):
            asyncio.run(run(answer(content)))
