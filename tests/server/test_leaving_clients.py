"""A client of the Anthropic or the Responses API that goes away takes its request with it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from duckllm.outputs import RequestMetrics
from duckllm.sampling_params import SamplingParams
from duckllm.server.app import ServerConfig, make_app
from duckllm.server.chat_service import ChatOutput
from duckllm.server.metrics import ServerMetrics
from duckllm.text.chat import ContentDelta


class EndlessReply:
    """Says something, and then nothing until it is cancelled."""

    prompt_token_ids = (1, 2, 3)

    def __init__(self) -> None:
        self.cancelled = asyncio.Event()

    def cancel(self) -> None:
        self.cancelled.set()

    async def __aiter__(self) -> AsyncIterator[ChatOutput]:
        metrics = RequestMetrics(3, 1, 0.1, None)
        yield ChatOutput(0, (ContentDelta("a"),), (7,), None, None, None, metrics)
        await asyncio.Event().wait()


class OneReply:
    """A chat service with one reply."""

    def __init__(self, reply: EndlessReply) -> None:
        self._reply = reply
        self.llm = SimpleNamespace(default_sampling_params=SamplingParams(), model_hash="0" * 64)
        self.engine = SimpleNamespace(llm=self.llm, metrics=ServerMetrics())
        self.format = SimpleNamespace(reasoning=None, knows_effort=False)

    async def begin(self, request: object) -> EndlessReply:
        return self._reply


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
    ],
)
def test_a_client_that_leaves_ends_its_reply(path: str, body: dict[str, Any], stream: bool) -> None:
    async def leave() -> list[bytes]:
        reply = EndlessReply()
        app = make_app(OneReply(reply), ServerConfig(is_insecure=True))  # type: ignore[arg-type]
        sent: list[bytes] = []
        has_begun = asyncio.Event()
        request = json.dumps({"model": "demo", "stream": stream, **body}).encode()
        messages = [{"type": "http.request", "body": request, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            if stream:
                await has_begun.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message.get("body", b""))
            if b'"a"' in sent[-1]:
                has_begun.set()

        headers = [(b"content-type", b"application/json")]
        scope = {
            "type": "http", "http_version": "1.1", "method": "POST", "path": path, "raw_path": path.encode(),
            "query_string": b"beta=true", "headers": headers, "server": ("127.0.0.1", 80), "scheme": "http",
        }  # fmt: skip
        await asyncio.wait_for(app(scope, receive, send), 20)
        assert reply.cancelled.is_set()
        return sent

    sent = asyncio.run(leave())
    assert any(b'"a"' in piece for piece in sent) == stream
