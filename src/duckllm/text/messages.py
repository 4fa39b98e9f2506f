"""Conversations as lists of dictionaries, in the form of OpenAI's API: checked, and as values.

Called by :mod:`duckllm.text.tokenizer`, :mod:`duckllm.text.chat_format` and :mod:`duckllm.conversation`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from duckllm.errors import RequestError, show_value
from duckllm.text.chat import ChatMessage, ToolCall
from duckllm.text.formats.markup import to_json

ROLES = ("system", "user", "assistant", "tool")
_TEXT_FIELDS = ("reasoning_content", "tool_call_id", "name")
_FIELDS = ("role", "content", "tool_calls", *_TEXT_FIELDS)


def check_messages(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """``messages`` unchanged, once every one of them is known to be well formed.

    A message with ``tool_calls`` needs no content. What else a message has is not looked at.

    Raises:
        RequestError: Names the message and the field, what was got and what is expected.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError(f"messages: got {type(messages).__name__}, expected a list of messages")
    if not messages:
        raise RequestError("messages: got none, expected at least one")
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if not isinstance(message, Mapping):
            raise RequestError(
                f"{where}: got {type(message).__name__}, expected an object with role and content"
            )
        has_calls = message.get("tool_calls") is not None
        for field in ("role", "content"):
            if field not in message and not (has_calls and field == "content"):
                raise RequestError(f"{where}.{field}: got nothing, expected a value")
        if message["role"] not in ROLES:
            raise RequestError(f"{where}.role: got {message['role']!r}, expected one of {', '.join(ROLES)}")
        if not (has_calls and message.get("content") is None):
            _check_text(f"{where}.content", message["content"])
        for field in _TEXT_FIELDS:
            if message.get(field) is not None:
                _check_text(f"{where}.{field}", message[field])
        if has_calls:
            _check_calls(f"{where}.tool_calls", message["tool_calls"])
    return messages


def as_messages(messages: Sequence[Mapping[str, Any]]) -> list[ChatMessage]:
    """The same as values.

    Raises:
        RequestError: As :func:`check_messages`; and a message has what is not known.
    """
    made = []
    for number, message in enumerate(check_messages(messages)):
        for field in message:
            if field not in _FIELDS:
                known = ", ".join(_FIELDS)
                raise RequestError(f"messages[{number}]: got {show_value(field)}, expected {known}")
        calls = tuple(
            _as_call(call, f"call_{number}_{place}")
            for place, call in enumerate(message.get("tool_calls") or ())
        )
        known_texts = {field: message.get(field) for field in _TEXT_FIELDS}
        content = message.get("content") or ""
        made.append(ChatMessage(message["role"], content, tool_calls=calls, **known_texts))
    return made


def _as_call(call: Mapping[str, Any], default_id: str) -> ToolCall:
    arguments = call["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else to_json(arguments)
    return ToolCall(str(call.get("id") or default_id), call["function"]["name"], text)


def _check_calls(where: str, calls: Any) -> None:
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
        raise RequestError(f"{where}: got {type(calls).__name__}, expected a list of calls")
    for number, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise RequestError(f"{where}[{number}].function: got nothing, expected name and arguments")
        _check_text(f"{where}[{number}].function.name", function.get("name"))
        if not isinstance(function.get("arguments"), str | Mapping):
            got = show_value(function.get("arguments"))
            raise RequestError(
                f"{where}[{number}].function.arguments: got {got}, expected the text of a JSON object"
            )


def _check_text(where: str, value: Any) -> None:
    if not isinstance(value, str):
        raise RequestError(f"{where}: got {type(value).__name__}, expected text")
