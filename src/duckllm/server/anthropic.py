"""``/v1/messages``: the Anthropic API, enough for its packages and for Claude Code.

Mounted by :mod:`duckllm.server.app`; calls the chat service. Headers such as ``anthropic-version`` and
``anthropic-beta`` and queries such as ``?beta=true`` change nothing: what a body may hold does not depend on
them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from duckllm.errors import PromptTooLongError
from duckllm.server.anthropic_events import Event, MessageEvents, fold
from duckllm.server.anthropic_request import chat_messages, chat_options, hides_thinking, sampling_params
from duckllm.server.anthropic_types import CountTokensBody, MessagesBody
from duckllm.server.chat_service import ChatRequest, ChatService, ChatStream
from duckllm.server.errors import ApiError, as_api_error, fields_named
from duckllm.server.openai_models import ServedModel
from duckllm.server.openai_replies import new_id
from duckllm.server.openai_requests import check_model
from duckllm.server.routing import new_router
from duckllm.server.streaming import EventStream, named_event, unless_gone
from duckllm.text.chat import ChatOptions

# What our values call fields of a body, and what it calls them.
_FIELDS = {
    "enable_thinking": "thinking.type",
    ".function.parameters": ".input_schema",
}


def router(service: ChatService, model: ServedModel) -> APIRouter:
    """The paths of the Anthropic API."""
    routes = new_router("Anthropic")

    @routes.post("/v1/messages")
    async def create_message(body: MessagesBody, request: Request) -> Response:
        """The assistant's next message."""
        name = check_model(body.model, model.names)
        with fields_named(_FIELDS):
            params = sampling_params(body, service.llm.default_sampling_params)
        asked = ChatRequest(chat_messages(body), _options(body, service), params)
        if body.stream:
            stream = await unless_gone(request, _begin(service, asked))
            return EventStream(_written(_events(stream, name, body)), stream.cancel, _fail)
        return await unless_gone(request, _whole(service, asked, name, body))

    @routes.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountTokensBody, request: Request) -> dict[str, int]:
        """How many tokens a conversation has."""
        check_model(body.model, model.names)
        counting = service.count_tokens(chat_messages(body), _options(body, service))
        with fields_named(_FIELDS):
            return {"input_tokens": await unless_gone(request, counting)}

    return routes


def _options(body: CountTokensBody, service: ChatService) -> ChatOptions:
    form = service.format
    return chat_options(body, can_think=form.reasoning is not None, knows_effort=form.knows_effort)


async def _begin(service: ChatService, asked: ChatRequest) -> ChatStream:
    try:
        with fields_named(_FIELDS):
            return await service.begin(asked)
    except PromptTooLongError as error:
        known = as_api_error(error)
        # By these words Claude Code knows that it has to make the conversation shorter.
        message = f"prompt is too long: {error.got_tokens} tokens > {error.limit_tokens} maximum"
        raise ApiError(400, message, known.kind, code=known.code, facts=known.facts) from error


async def _whole(service: ChatService, asked: ChatRequest, name: str, body: MessagesBody) -> Response:
    stream = await _begin(service, asked)
    try:
        return JSONResponse(fold([event async for event in _events(stream, name, body)]))
    finally:
        stream.cancel()


async def _events(stream: ChatStream, name: str, body: MessagesBody) -> AsyncIterator[Event]:
    """The reply's events.

    Raises:
        DuckError: As the stream does.
        ApiError: The reply's form could not be gone on with.
    """
    events = MessageEvents(
        new_id("msg_"),
        name,
        len(stream.prompt_token_ids),
        body.max_tokens,
        hide_thinking=hides_thinking(body),
        answers_diagnostics=body.diagnostics is not None,
        new_tool_id=lambda: new_id("toolu_"),
    )
    for event in events.begin():
        yield event
    async for output in stream:
        if output.finish_reason == "error":
            raise ApiError(400, f"output_config.format: {output.stop_reason}")
        for event in events.push(output):
            yield event


async def _written(events: AsyncIterator[Event]) -> AsyncIterator[bytes]:
    """The events as they are sent."""
    async for event in events:
        yield named_event(event)


def _fail(error: ApiError) -> list[bytes]:
    """How a stream ends with an error."""
    return [named_event(error.anthropic())]
