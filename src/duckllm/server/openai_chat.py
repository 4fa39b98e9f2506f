"""``/v1/chat/completions``: a conversation in, its next messages out, whole or as they come.

Mounted by :mod:`duckllm.server.app`; calls the chat service.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from duckllm.errors import InWords
from duckllm.server.chat_service import ChatOutput, ChatRequest, ChatService, ChatStream
from duckllm.server.errors import ApiError, refuse
from duckllm.server.openai_models import ServedModel
from duckllm.server.openai_replies import Tally, chat_logprobs, new_id, without_end
from duckllm.server.openai_requests import check_model, to_chat_sampling, to_messages, to_options
from duckllm.server.openai_types import ChatCompletionBody
from duckllm.server.routing import new_router
from duckllm.server.streaming import DONE, EventStream, data_event, openai_error, unless_gone
from duckllm.text.chat import ContentDelta, ReasoningDelta, ReplyDelta, ToolCallDelta


def router(service: ChatService, model: ServedModel) -> APIRouter:
    """The path of the chat API."""
    routes = new_router("OpenAI")

    @routes.post("/v1/chat/completions")
    async def create_chat_completion(body: ChatCompletionBody, request: Request) -> Response:
        """The assistant's next message."""
        name = check_model(body.model, model.names)
        if body.stream_options is not None and not body.stream:
            raise refuse("stream_options", InWords("some"), "none without stream: true")
        params = to_chat_sampling(body, service.llm.default_sampling_params)
        asked = ChatRequest(to_messages(body.messages), to_options(body), params)
        reply = _Reply(service, name, model.fingerprint(), body)
        if body.stream:
            stream = await unless_gone(request, service.begin(asked))
            return EventStream(reply.events(stream), stream.cancel, openai_error)
        return await unless_gone(request, reply.whole(asked))

    return routes


class _Reply:
    """A reply in OpenAI's form.

    Args:
        service: Computes it.
        model: The name that it has.
        fingerprint: Of what computes it.
        body: What was asked.
    """

    def __init__(self, service: ChatService, model: str, fingerprint: str, body: ChatCompletionBody) -> None:
        self._service, self._body = service, body
        self._common = {
            "id": new_id("chatcmpl-"),
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._call_ids: dict[tuple[int, int], str] = {}

    async def whole(self, asked: ChatRequest) -> Response:
        """All of it at its end."""
        stream = await self._service.begin(asked)
        choices = [_Choice(index) for index in range(asked.params.n)]
        tally = Tally(len(stream.prompt_token_ids))
        try:
            async for output in stream:
                _check(output)
                choice = choices[output.index]
                for delta in self._deltas(output):
                    choice.add(delta)
                choice.logprobs += self._logprobs(output) or []
                choice.finish_reason = output.finish_reason
                tally.add(output.index, output.metrics, output.num_reasoning_tokens)
        finally:
            stream.cancel()
        return JSONResponse(
            {
                **self._common,
                "object": "chat.completion",
                "choices": [choice.value(with_logprobs=bool(self._body.logprobs)) for choice in choices],
                "usage": tally.usage(),
                "timings": tally.timings(),
            }
        )

    async def events(self, stream: ChatStream) -> AsyncIterator[bytes]:
        """Its chunks: the role, what was added, the end of each; then the usage, where it is asked for."""
        options = self._body.stream_options
        with_usage = options is not None and bool(options.include_usage)
        tally = Tally(len(stream.prompt_token_ids))
        num_open, has_begun = self._body.n or 1, set()
        async for output in stream:
            _check(output)
            index = output.index
            tally.add(index, output.metrics, output.num_reasoning_tokens)
            if index not in has_begun:
                has_begun.add(index)
                yield self._chunk(index, {"role": "assistant", "content": ""}, with_usage)
            logprobs = self._logprobs(output)
            for delta in self._deltas(output) or ([{}] if logprobs else []):
                yield self._chunk(index, delta, with_usage, logprobs=logprobs)
                logprobs = None
            if output.finish_reason is not None:
                num_open -= 1
                more = {} if num_open else {"timings": tally.timings()}
                yield self._chunk(index, {}, with_usage, finish_reason=output.finish_reason, more=more)
        if with_usage:
            chunk = {"object": "chat.completion.chunk", "choices": [], "usage": tally.usage()}
            yield data_event({**self._common, **chunk})
        yield DONE

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        with_usage: bool,
        *,
        logprobs: list[dict[str, Any]] | None = None,
        finish_reason: str | None = None,
        more: dict[str, Any] | None = None,
    ) -> bytes:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": None if logprobs is None else {"content": logprobs, "refusal": None},
            "finish_reason": finish_reason,
        }
        chunk = {**self._common, "object": "chat.completion.chunk", "choices": [choice], **(more or {})}
        return data_event({**chunk, "usage": None} if with_usage else chunk)

    def _deltas(self, output: ChatOutput) -> list[dict[str, Any]]:
        """What was added, in OpenAI's form."""
        return [self._delta(output.index, delta) for delta in output.deltas]

    def _delta(self, index: int, delta: ReplyDelta) -> dict[str, Any]:
        if isinstance(delta, ContentDelta):
            return {"content": delta.text}
        if isinstance(delta, ReasoningDelta):
            return {"reasoning_content": delta.text}
        call: dict[str, Any] = {"index": delta.index}
        function = {"arguments": delta.arguments}
        if delta.name is not None:
            call |= {"id": self._call_id(index, delta), "type": "function"}
            function = {"name": delta.name, **function}
        return {"tool_calls": [{**call, "function": function}]}

    def _call_id(self, index: int, delta: ToolCallDelta) -> str:
        return self._call_ids.setdefault((index, delta.index), new_id("call_"))

    def _logprobs(self, output: ChatOutput) -> list[dict[str, Any]] | None:
        if output.logprobs is None:
            return None
        tokenizer = self._service.tokenizer
        shown = without_end(output.token_ids, output.logprobs, tokenizer)
        return chat_logprobs(*shown, self._body.top_logprobs or 0, tokenizer)


def _check(output: ChatOutput) -> None:
    """Refuses a reply that its grammar could not go on with."""
    if output.finish_reason == "error":
        raise ApiError(400, f"response_format: {output.stop_reason}", param="response_format")


class _Choice:
    """One reply that is put together of its deltas."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._content = self._reasoning = ""
        self._calls: list[dict[str, Any]] = []
        self.logprobs: list[dict[str, Any]] = []
        self.finish_reason: str | None = None

    def add(self, delta: dict[str, Any]) -> None:
        """Adds what a chunk of a stream would say."""
        self._content += delta.get("content", "")
        self._reasoning += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                self._calls.append({**call, "function": dict(call["function"])})
            else:
                self._calls[-1]["function"]["arguments"] += call["function"]["arguments"]

    def value(self, *, with_logprobs: bool) -> dict[str, Any]:
        """The choice in OpenAI's form."""
        message: dict[str, Any] = {"role": "assistant", "content": self._content, "refusal": None}
        if self._reasoning:
            message["reasoning_content"] = self._reasoning
        if self._calls:
            message["content"] = self._content or None
            message["tool_calls"] = [_without_index(call) for call in self._calls]
        logprobs = {"content": self.logprobs, "refusal": None} if with_logprobs else None
        return {
            "index": self._index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": self.finish_reason,
        }


def _without_index(call: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in call.items() if name != "index"}
