"""OpenAI's bodies as our values: messages, options, sampling. Refuses by name what cannot be honoured.

Called by :mod:`duckllm.server.openai_chat` and :mod:`duckllm.server.openai_completions`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from duckllm.sampling_params import SamplingParams, StructuredOutputsParams
from duckllm.server.errors import ApiError, fields_named, refuse
from duckllm.server.limits import check_grammar, check_sizes
from duckllm.server.openai_types import (
    ChatCompletionBody,
    Content,
    JsonObjectFormat,
    Message,
    NamedTool,
    SamplingFields,
    StructuredOutputs,
    TextFormat,
)
from duckllm.text.chat import ChatMessage, ChatOptions, Tool, ToolCall

_SAMPLING = (
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "min_tokens", "repetition_penalty"),
    *("frequency_penalty", "presence_penalty", "stop", "stop_token_ids", "include_stop_str_in_output"),
    *("ignore_eos", "n"),
)


def check_model(model: str | None, names: Sequence[str]) -> str:
    """The name that the reply has: the one asked for, or else the one that is served.

    Raises:
        ApiError: Another model is asked for.
    """
    if not model:
        return names[0]
    if model not in names:
        message = f"model: got {model[:200]!r}, expected {' or '.join(names)}"
        raise ApiError(404, message, param="model", code="model_not_found")
    return model


def to_sampling(body: SamplingFields, defaults: SamplingParams, **changes: Any) -> SamplingParams:
    """How tokens are chosen; what is not given is the model's own.

    Raises:
        ConfigError: A value is out of range.
        ApiError: Or a token id is none.
    """
    given: dict[str, Any] = {name: getattr(body, name) for name in _SAMPLING}
    if body.seed is not None:
        given["seed"] = body.seed % 2**63  # OpenAI's seeds may be negative
    if body.logit_bias is not None:
        given["logit_bias"] = {_token_id(token): bias for token, bias in body.logit_bias.items()}
    if body.stop == []:
        given["stop"] = None
    given |= changes
    return dataclasses.replace(
        defaults, **{name: value for name, value in given.items() if value is not None}
    )


def _token_id(text: str) -> int:
    # Of "7" and "07", which are two keys of JSON, one would be lost.
    if not (text.isascii() and text.isdigit() and len(text) <= 10) or text != str(int(text)):
        raise refuse("logit_bias", text, "token ids as keys")
    return int(text)


def to_chat_sampling(body: ChatCompletionBody, defaults: SamplingParams) -> SamplingParams:
    """As :func:`to_sampling`, with the names that the chat API has."""
    most, old = body.max_completion_tokens, body.max_tokens
    if most is not None and old is not None and most != old:
        raise refuse("max_tokens", old, f"none beside max_completion_tokens, or {most} as that says")
    if body.top_logprobs is not None and not body.logprobs:
        raise refuse("top_logprobs", body.top_logprobs, "none without logprobs: true")
    logprobs = None
    if body.logprobs:
        logprobs = body.top_logprobs or 0
        if not 0 <= logprobs <= 20:
            raise refuse("top_logprobs", logprobs, "an integer from 0 to 20")
    if most is None:
        return to_sampling(body, defaults, max_tokens=old, logprobs=logprobs)
    with fields_named({"max_tokens": "max_completion_tokens"}):
        return to_sampling(body, defaults, max_tokens=most, logprobs=logprobs)


def to_messages(messages: Sequence[Message]) -> list[ChatMessage]:
    """A conversation as chat formats read it.

    Raises:
        ApiError: A message is not whole, or has what no model reads.
    """
    if not messages:
        raise refuse("messages", [], "at least one message")
    return [_to_message(f"messages[{number}]", message) for number, message in enumerate(messages)]


def _to_message(where: str, message: Message) -> ChatMessage:
    role = message.role
    if role != "assistant":
        for field in ("reasoning_content", "tool_calls"):
            if getattr(message, field):
                raise refuse(
                    f"{where}.{field}", getattr(message, field), "none but in an assistant's message"
                )
        if message.content is None:
            raise refuse(f"{where}.content", None, "text, or a list of parts of text")
    if role == "tool" and message.tool_call_id is None:
        raise refuse(f"{where}.tool_call_id", None, "the id of the call that this is the result of")
    if role != "tool" and message.tool_call_id is not None:
        raise refuse(f"{where}.tool_call_id", message.tool_call_id, "none but in a tool's message")
    # The call says which function a result is of. Other names are for the model, and no template has a place.
    if message.name is not None and role != "tool":
        raise refuse(f"{where}.name", message.name, "none: models here are not told names of who speaks")
    calls = [
        ToolCall(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ()
    ]
    return ChatMessage(
        "system" if role == "developer" else role,
        _to_text(message.content),
        message.reasoning_content,
        tuple(calls),
        message.tool_call_id,
    )


def _to_text(content: Content | None) -> str:
    if content is None:
        return ""
    return content if isinstance(content, str) else "".join(part.text for part in content)


def to_options(body: ChatCompletionBody) -> ChatOptions:
    """How the conversation goes on.

    Raises:
        ApiError: Fields that do not go together.
        ConfigError: Structured outputs that are none.
    """
    tools = tuple(
        Tool(
            each.function.name,
            each.function.description or "",
            each.function.parameters or {"type": "object", "properties": {}},
            bool(each.function.strict),
        )
        for each in body.tools or ()
    )
    for number, tool in enumerate(tools):
        if tool.name in {other.name for other in tools[:number]}:
            raise refuse(f"tools[{number}].function.name", tool.name, "a name that no other tool has")
        check_sizes(f"tools[{number}].function.parameters", tool.parameters)
    choice, named = _to_choice(body, [tool.name for tool in tools])
    kwargs = dict(body.chat_template_kwargs or {})
    thinks = kwargs.pop("enable_thinking", None)
    if not isinstance(thinks, bool | None):
        raise refuse("chat_template_kwargs.enable_thinking", thinks, "true or false")
    effort = body.reasoning_effort
    if effort == "none":
        if thinks:
            raise refuse("reasoning_effort", effort, "another one with chat_template_kwargs.enable_thinking")
        thinks, effort = False, None
    check_sizes("chat_template_kwargs", kwargs)
    parallel = body.parallel_tool_calls
    return ChatOptions(
        tools=tools,
        tool_choice=choice,
        named_tool=named,
        parallel_tool_calls=parallel is None or parallel,
        response_format=_to_structure(body),
        enable_thinking=thinks,
        reasoning_effort=effort,
        template_kwargs=kwargs,
    )


def _to_choice(body: ChatCompletionBody, names: Sequence[str]) -> tuple[Any, str | None]:
    """The choice of tools and the one that it names."""
    choice = body.tool_choice
    if isinstance(choice, NamedTool):
        if choice.function.name not in names:
            raise refuse("tool_choice.function.name", choice.function.name, "the name of one of tools")
        return "required", choice.function.name
    if choice == "required" and not names:
        raise refuse("tool_choice", choice, "auto or none where there are no tools")
    return choice or "auto", None


def to_structured_outputs(asked: StructuredOutputs | None) -> StructuredOutputsParams | None:
    """What a text must be, in vLLM's form.

    Raises:
        ConfigError: It is none.
        ApiError: It is too large.
    """
    if asked is None:
        return None
    check_grammar("structured_outputs", asked.model_dump(by_alias=True))
    return StructuredOutputsParams(
        asked.json_, asked.regex, asked.choice, asked.grammar, asked.json_object or None
    )


def _to_structure(body: ChatCompletionBody) -> StructuredOutputsParams | None:
    """What the content must be."""
    structure, form = to_structured_outputs(body.structured_outputs), body.response_format
    if form is None or isinstance(form, TextFormat):
        return structure
    if structure is not None:
        raise refuse("structured_outputs", structure.kind, f"none beside response_format {form.type}")
    if isinstance(form, JsonObjectFormat):
        return StructuredOutputsParams(json_object=True)
    if form.json_schema is None:
        raise refuse("response_format.json_schema", None, "an object with name and schema")
    schema = form.json_schema.schema_
    if schema is None:
        return StructuredOutputsParams(json_object=True)
    check_sizes("response_format.json_schema.schema", schema)
    return StructuredOutputsParams(json=schema, label="response_format.json_schema.schema")
