"""A request of the Responses API as a conversation, its options and its sampling.

Called by :mod:`duckllm.server.responses`; knows no HTTP and no engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from duckllm.errors import InWords
from duckllm.sampling_params import SamplingParams, StructuredOutputsParams
from duckllm.server.errors import refuse
from duckllm.server.limits import check_sizes
from duckllm.server.opaque import from_opaque
from duckllm.server.responses_types import (
    FunctionCall,
    FunctionCallOutput,
    FunctionChoice,
    FunctionTool,
    JsonObjectFormat,
    JsonSchemaFormat,
    Message,
    NamespaceTool,
    Reasoning,
    Refusal,
    ResponsesBody,
)
from duckllm.text.chat import ChatMessage, ChatOptions, Tool, ToolCall

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"


@dataclass
class _Reply:
    """A reply of which items are still coming."""

    reasoning: str | None = None
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return self.reasoning is None and not self.content and not self.calls

    def message(self) -> ChatMessage:
        return ChatMessage("assistant", self.content, self.reasoning, tuple(self.calls))


def chat_messages(body: ResponsesBody) -> list[ChatMessage]:
    """The conversation, ``instructions`` first; items of one reply make one message.

    Raises:
        ApiError: An output belongs to no call, reasoning is not this server's, or the last message is the
            assistant's: a reply that the client has begun cannot be gone on with.
    """
    messages = [] if body.instructions is None else [ChatMessage("system", body.instructions)]
    reply = _Reply()
    waiting: list[str] = []  # call_ids that have no output yet
    for number, item in enumerate(body.input):
        of_reply = not isinstance(item, FunctionCallOutput) and not (
            isinstance(item, Message) and item.role != "assistant"
        )
        # Thinking begins a reply: behind text or calls it belongs to the next one.
        if not reply.is_empty and (not of_reply or isinstance(item, Reasoning)):
            messages.append(reply.message())
            reply = _Reply()
        if reply.is_empty and not isinstance(item, FunctionCallOutput):
            waiting.clear()  # what follows goes on without them
        if isinstance(item, Reasoning):
            reply.reasoning = _reasoning_text(number, item)
        elif isinstance(item, FunctionCall):
            waiting.append(item.call_id)
            reply.calls.append(ToolCall(item.call_id, flat_name(item.namespace, item.name), item.arguments))
        elif isinstance(item, FunctionCallOutput):
            if item.call_id not in waiting:
                expected = "the call_id of a function_call before it, in the last reply and without an output"
                raise refuse(f"input[{number}].call_id", item.call_id, expected)
            waiting.remove(item.call_id)
            text = "".join(part.text for part in item.output)
            messages.append(ChatMessage("tool", text, tool_call_id=item.call_id))
        elif item.role == "assistant":
            reply.content += _text(item)
        else:
            messages.append(ChatMessage("user" if item.role == "user" else "system", _text(item)))
    if not reply.is_empty:
        raise refuse(
            f"input[{len(body.input) - 1}]",
            InWords("an item of a reply as the last one"),
            "a user's message or a function's output: a reply that the client begins cannot be gone on with",
        )
    return messages


def chat_options(body: ResponsesBody) -> ChatOptions:
    """The options of the reply.

    Raises:
        ApiError: A function is given twice or too large, or ``tool_choice`` asks for one that is not given.
    """
    tools: dict[str, Tool] = {}
    for where, namespace, tool in _functions(body):
        name = flat_name(namespace, tool.name)
        if name in tools:
            raise refuse(f"{where}.name", tool.name, "a name that no other function has")
        check_sizes(f"{where}.parameters", tool.parameters)
        parameters = tool.parameters or {"type": "object", "properties": {}}
        tools[name] = Tool(name, tool.description or "", parameters, bool(tool.strict))
    choice = body.tool_choice
    named = choice.name if isinstance(choice, FunctionChoice) else None
    mode = "required" if isinstance(choice, FunctionChoice) else choice
    if named is not None and named not in tools:
        raise refuse("tool_choice.name", named, "the name of one of tools")
    if mode == "required" and not tools:
        raise refuse("tool_choice", mode, "auto or none where there are no tools")
    return ChatOptions(
        tools=list(tools.values()),
        tool_choice=mode,
        named_tool=named,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        response_format=_response_format(body),
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
    )


def sampling_params(body: ResponsesBody, defaults: SamplingParams) -> SamplingParams:
    """The sampling of the reply: what the body says, and ``defaults`` for what it leaves open.

    Raises:
        ApiError: ``top_logprobs`` without asking to include log probabilities.
        ConfigError: A value is out of range.
    """
    given: dict[str, Any] = {
        name: getattr(body, name) for name in ("temperature", "top_p") if getattr(body, name) is not None
    }
    if LOGPROBS in (body.include or ()):
        given["logprobs"] = body.top_logprobs or 0
    elif body.top_logprobs:
        raise refuse("top_logprobs", body.top_logprobs, f"none without {LOGPROBS} in include")
    return replace(defaults, max_tokens=body.max_output_tokens, **given)


def flat_name(namespace: str | None, name: str) -> str:
    """A function's name as the model reads it, its namespace in front."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def namespaces(body: ResponsesBody) -> dict[str, tuple[str, str]]:
    """The namespace and the name of each function that is in one, by the name that the model knows."""
    return {
        flat_name(namespace, tool.name): (namespace, tool.name)
        for _, namespace, tool in _functions(body)
        if namespace is not None
    }


def _functions(body: ResponsesBody) -> Iterator[tuple[str, str | None, FunctionTool]]:
    """Each function's place in the body and its namespace."""
    for number, tool in enumerate(body.tools):
        if isinstance(tool, NamespaceTool):
            for place, function in enumerate(tool.tools):
                if place == 0:  # what is said of all of them is told once
                    said = [text for text in (tool.description, function.description) if text]
                    function = function.model_copy(update={"description": "\n\n".join(said)})
                yield f"tools[{number}].tools[{place}]", tool.name, function
        else:
            yield f"tools[{number}]", None, tool


def _response_format(body: ResponsesBody) -> StructuredOutputsParams | None:
    form = body.text.format
    if isinstance(form, JsonSchemaFormat):
        label = "text.format.schema"
        check_sizes(label, form.schema_)
        return StructuredOutputsParams(json=form.schema_, label=label)
    return StructuredOutputsParams(json_object=True) if isinstance(form, JsonObjectFormat) else None


def _text(message: Message) -> str:
    return "".join(part.refusal if isinstance(part, Refusal) else part.text for part in message.content)


def _reasoning_text(number: int, item: Reasoning) -> str:
    """What was thought: as it is, or as the client kept it unread, or as the summary that it was shown in."""
    if item.content:
        return "".join(part.text for part in item.content)
    if item.encrypted_content is not None:
        text = from_opaque(item.encrypted_content)
        if text is None:
            where, got = f"input[{number}].encrypted_content", InWords("another server's")
            raise refuse(where, got, "what this server has sent")
        return text
    return "".join(part.text for part in item.summary)
