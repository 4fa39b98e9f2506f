"""``/v1/responses``: the Responses API without anything kept, enough for its packages and for Codex.

Mounted by :mod:`duckllm.server.app`; calls the chat service.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from duckllm.sampling_params import SamplingParams
from duckllm.server.chat_service import ChatOutput, ChatRequest, ChatService, ChatStream
from duckllm.server.errors import ApiError, fields_named, refuse
from duckllm.server.openai_models import ServedModel
from duckllm.server.openai_replies import chat_logprobs, new_id
from duckllm.server.openai_requests import check_model
from duckllm.server.responses_events import Event, ResponseEvents
from duckllm.server.responses_request import (
    ENCRYPTED_REASONING,
    chat_messages,
    chat_options,
    namespaces,
    sampling_params,
)
from duckllm.server.responses_types import ResponsesBody
from duckllm.server.routing import new_router
from duckllm.server.streaming import EventStream, named_event, unless_gone

# What our values call fields of a body, and what it calls them.
_FIELDS = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    ".function": "",
}


def router(service: ChatService, model: ServedModel) -> APIRouter:
    """The path of the Responses API."""
    routes = new_router("OpenAI")

    @routes.post("/v1/responses")
    async def create_response(body: ResponsesBody, request: Request) -> Response:
        """The assistant's next items."""
        name = check_model(body.model, model.names)
        if body.stream_options is not None and not body.stream:
            raise refuse("stream_options", body.stream_options.model_dump(), "none without stream: true")
        with fields_named(_FIELDS):
            params = sampling_params(body, service.llm.default_sampling_params)
        asked = ChatRequest(chat_messages(body), chat_options(body), params)
        reply = _Reply(
            service,
            body,
            ResponseEvents(
                _described(body, name, params),
                new_id,
                namespaces=namespaces(body),
                shows_summary=body.reasoning is not None and body.reasoning.summary is not None,
                keeps_reasoning=ENCRYPTED_REASONING in (body.include or ()),
            ),
        )
        if body.stream:
            with fields_named(_FIELDS):
                stream = await unless_gone(request, service.begin(asked))
            return EventStream(reply.written(stream), stream.cancel, reply.fail)
        with fields_named(_FIELDS):
            return await unless_gone(request, reply.whole(asked))

    return routes


class _Reply:
    """A reply in the API's form.

    Args:
        service: Computes it.
        body: What was asked.
        events: Takes it apart.
    """

    def __init__(self, service: ChatService, body: ResponsesBody, events: ResponseEvents) -> None:
        self._service, self._body, self._events = service, body, events

    async def whole(self, asked: ChatRequest) -> Response:
        """All of it at its end."""
        stream = await self._service.begin(asked)
        try:
            last = [event async for event in self._all(stream)][-1]
        finally:
            stream.cancel()
        return JSONResponse(last["response"])

    async def written(self, stream: ChatStream) -> AsyncIterator[bytes]:
        """Its events as they are sent."""
        async for event in self._all(stream):
            yield named_event(event)

    def fail(self, error: ApiError) -> list[bytes]:
        """How it ends with an error."""
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        return [named_event(event) for event in self._events.fail(code, error.message)]

    async def _all(self, stream: ChatStream) -> AsyncIterator[Event]:
        for event in self._events.begin():
            yield event
        async for output in stream:
            if output.finish_reason == "error":
                raise ApiError(400, f"text.format: {output.stop_reason}", param="text.format")
            for event in self._events.push(output, self._logprobs(output)):
                yield event

    def _logprobs(self, output: ChatOutput) -> list[Event]:
        """Of the tokens behind the thinking; none where they were not asked for."""
        if output.logprobs is None:
            return []
        first = output.metrics.num_generated_tokens - len(output.token_ids) + 1
        skipped = min(len(output.token_ids), max(0, output.num_reasoning_tokens - first + 1))
        num_top = self._body.top_logprobs or 0
        return chat_logprobs(
            output.token_ids[skipped:], output.logprobs[skipped:], num_top, self._service.tokenizer
        )


def _described(body: ResponsesBody, name: str, params: SamplingParams) -> Event:
    """The response without what the reply adds: what was asked, and what applies where it was left open."""
    form: dict[str, Any] = {"type": "text"}
    if body.text.format is not None:
        form = body.text.format.model_dump(by_alias=True, exclude_none=True)
    reasoning = body.reasoning
    choice = body.tool_choice
    return {
        "id": new_id("resp_"),
        "object": "response",
        "created_at": int(time.time()),
        "model": name,
        "instructions": body.instructions,
        "tools": [tool.model_dump() for tool in body.tools],
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "text": {"format": form, "verbosity": "medium"},
        "reasoning": {
            "effort": reasoning.effort if reasoning else None,
            "summary": reasoning.summary if reasoning else None,
        },
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_logprobs": body.top_logprobs or 0,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "truncation": "disabled",
        "background": False,
        "store": False,
        "previous_response_id": None,
        "service_tier": "default",
        "metadata": body.metadata or {},
        "user": body.user,
        "safety_identifier": body.safety_identifier,
        "prompt_cache_key": body.prompt_cache_key,
    }
