"""``/tokenize``, ``/detokenize`` and ``/tokenizer_info``: text and conversations as tokens, and back.

One form that serves clients of vLLM (``prompt``, ``messages``, ``add_special_tokens``, ``return_token_strs``)
and of llama-server (``content``, ``add_special``, ``parse_special``, ``with_pieces``). Mounted by
:mod:`duckllm.server.app`; calls the chat service.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field

from duckllm.errors import InWords
from duckllm.server.chat_service import ChatService, texts_of
from duckllm.server.errors import prompt_named, refuse
from duckllm.server.limits import MAX_MESSAGES, MAX_TOOLS
from duckllm.server.openai_models import ServedModel
from duckllm.server.openai_requests import check_model, to_messages, to_options
from duckllm.server.openai_types import Body, ChatCompletionBody, FunctionTool, Message
from duckllm.server.routing import new_router
from duckllm.server.streaming import unless_gone


class TokenizeBody(Body):
    """What ``/tokenize`` takes: exactly one of ``prompt``, ``content`` and ``messages``.

    Of text, BOS is added by ``add_special_tokens`` (vLLM's, on with ``prompt``) or ``add_special``
    (llama-server's, off with ``content``). Control tokens that a text spells become those tokens; of
    conversations they come from the chat template alone, BOS included, and the reply's beginning is a part.
    """

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: Annotated[list[Message], Field(max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    parse_special: Literal[True] = True
    return_token_strs: bool | None = None
    with_pieces: bool = False
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: Literal[True] = True
    continue_final_message: Literal[False] = False


class DetokenizeBody(Body):
    """What ``/detokenize`` takes."""

    tokens: list[int]
    model: str | None = None


def router(service: ChatService, model: ServedModel) -> APIRouter:
    """The paths about tokens."""
    routes = new_router("tokens")

    @routes.post("/tokenize")
    async def tokenize(body: TokenizeBody, request: Request) -> dict[str, Any]:
        """The tokens of a text or of a conversation."""
        check_model(body.model, model.names)
        with prompt_named(_check_fields(body)):
            make = _work(body, service)
            return await unless_gone(request, service.prepare(lambda: _reply(body, make(), service)))

    @routes.post("/detokenize")
    async def detokenize(body: DetokenizeBody, request: Request) -> dict[str, str]:
        """The text of tokens, control tokens included, under the names of vLLM and of llama-server."""
        check_model(body.model, model.names)
        tokenizer = service.tokenizer
        for number, token_id in enumerate(body.tokens):
            if not 0 <= token_id <= tokenizer.max_token_id:
                raise refuse(f"tokens[{number}]", token_id, f"a token id from 0 to {tokenizer.max_token_id}")
        work = service.prepare(lambda: tokenizer.decode(body.tokens, skip_special_tokens=False))
        text = await unless_gone(request, work)
        return {"prompt": text, "content": text}

    @routes.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, str | None]:
        """The tokenizer's class, special tokens and chat template, as vLLM's server tells them.

        lm-evaluation-harness asks for it, and then has its prompts tokenized here.
        """
        return service.tokenizer.info()

    return routes


def _work(body: TokenizeBody, service: ChatService) -> Callable[[], Sequence[int]]:
    """What makes the tokens; everything about the body is checked before."""
    if body.messages is None:
        return lambda: _encode(body, service)
    chat = ChatCompletionBody(
        messages=body.messages, tools=body.tools, chat_template_kwargs=body.chat_template_kwargs
    )
    messages, options = to_messages(chat.messages), to_options(chat)

    def make() -> Sequence[int]:
        service.check_length(texts_of(messages, options))
        return service.format.prompt(messages, options).token_ids

    return make


def _reply(body: TokenizeBody, token_ids: Sequence[int], service: ChatService) -> dict[str, Any]:
    tokens: list[Any] = list(token_ids)
    strings = None
    if body.with_pieces:
        tokens = [{"id": each, "piece": _piece(service.tokenizer.token_bytes(each))} for each in token_ids]
    if body.return_token_strs:
        strings = [service.tokenizer.token_bytes(each).decode(errors="replace") for each in token_ids]
    length = service.llm.max_model_len
    return {"tokens": tokens, "count": len(tokens), "max_model_len": length, "token_strs": strings}


def _check_fields(body: TokenizeBody) -> str:
    """The field that has what is to be tokenized; refuses fields that do not go together."""
    given = [name for name in ("prompt", "content", "messages") if getattr(body, name) is not None]
    if len(given) != 1:
        got = InWords(" and ".join(given) or "none of them")
        raise refuse("prompt, content, messages", got, "exactly one of them")
    belonging = {
        "add_special_tokens": "prompt",
        "add_special": "content",
        "tools": "messages",
        "chat_template_kwargs": "messages",
    }
    for name, owner in belonging.items():
        if getattr(body, name) is not None and given != [owner]:
            raise refuse(name, getattr(body, name), f"none without {owner}")
    return given[0]


def _encode(body: TokenizeBody, service: ChatService) -> list[int]:
    """Tokens of ``prompt`` or ``content``, with BOS where it is asked for or spelled in the text."""
    if body.prompt is not None:
        text, with_bos = body.prompt, body.add_special_tokens is not False
    else:
        text, with_bos = body.content or "", body.add_special is True
    service.check_length([text])
    tokenizer = service.tokenizer
    token_ids = tokenizer.encode(text)
    bos = tokenizer.bos_token_id
    if with_bos or bos is None or token_ids[:1] != [bos]:
        return token_ids
    return token_ids if text.startswith(tokenizer.decode([bos], skip_special_tokens=False)) else token_ids[1:]


def _piece(data: bytes) -> str | list[int]:
    """A token's text, or its bytes where these are no whole characters, as llama-server has it."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)
