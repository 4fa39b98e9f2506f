"""A request of the Anthropic API as a conversation, its options and its sampling.

Called by :mod:`duckllm.server.anthropic`; knows no HTTP and no engine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

from duckllm.sampling_params import SamplingParams, StructuredOutputsParams
from duckllm.server.anthropic_types import (
    AnyToolChoice,
    ClearThinking,
    CountTokensBody,
    DisabledThinking,
    EnabledThinking,
    Message,
    MessagesBody,
    NamedToolChoice,
    NoToolChoice,
    TextBlock,
    ThinkingBlock,
    ThinkingTurns,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from duckllm.server.errors import refuse
from duckllm.server.limits import check_sizes
from duckllm.server.opaque import from_opaque
from duckllm.text.chat import ChatMessage, ChatOptions, ToolCall
from duckllm.text.chat import Tool as ChatTool

# Blocks of a person's or the system's text are paragraphs; those of a reply are its text as it was cut.
_BETWEEN_BLOCKS = "\n\n"

_ALLOWED = {
    "system": (TextBlock,),
    "user": (TextBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, ToolUseBlock),
}


def chat_messages(body: CountTokensBody) -> list[ChatMessage]:
    """The conversation, the system's text first.

    Raises:
        ApiError: A block stands where its kind may not, a result belongs to no call, or the last message
            is the assistant's: a reply that the client has begun cannot be gone on with.
    """
    messages = [ChatMessage("system", _joined(body.system))] if body.system else []
    waiting: list[str] = []  # ids of calls that have no result yet
    for number, message in enumerate(body.messages):
        _check_blocks(number, message, waiting)
        messages += _assistant(message) if message.role == "assistant" else _others(message)
    if body.messages[-1].role == "assistant":
        raise refuse(
            f"messages[{len(body.messages) - 1}].role",
            "assistant",
            "'user' as the last one: a reply that the client begins cannot be gone on with",
        )
    for edit in body.context_management.edits if body.context_management else ():
        messages = _clear_thinking(messages, edit)
    return messages


def chat_options(body: CountTokensBody, *, can_think: bool, knows_effort: bool) -> ChatOptions:
    """The options of the reply.

    Thinking that is allowed happens where the model can think. ``effort`` is a wish, told to models that know
    it.

    Args:
        body: What was asked.
        can_think: Whether the model does.
        knows_effort: Whether it can be told how much to.

    Raises:
        ApiError: A tool is given twice or too large, or ``tool_choice`` asks for one that is not given.
    """
    tools = _tools(body)
    choice = body.tool_choice
    named = choice.name if isinstance(choice, NamedToolChoice) else None
    if named is not None and named not in {tool.name for tool in tools}:
        raise refuse("tool_choice.name", named, "the name of one of tools")
    if isinstance(choice, AnyToolChoice) and not tools:
        raise refuse("tool_choice.type", choice.type, "auto or none where there are no tools")
    config = body.output_config
    form = None
    if config and config.format:
        label = "output_config.format.schema"
        check_sizes(label, config.format.schema_)
        form = StructuredOutputsParams(json=config.format.schema_, label=label)
    return ChatOptions(
        tools=tools,
        tool_choice=(
            "none"
            if isinstance(choice, NoToolChoice)
            else "required"
            if isinstance(choice, AnyToolChoice | NamedToolChoice)
            else "auto"
        ),
        named_tool=named,
        parallel_tool_calls=not getattr(choice, "disable_parallel_tool_use", False),
        response_format=form,
        enable_thinking=_thinks(body, can_think),
        reasoning_effort=config.effort if config and knows_effort else None,
    )


def sampling_params(body: MessagesBody, defaults: SamplingParams) -> SamplingParams:
    """The sampling of the reply: what the body says, and ``defaults`` for what it leaves open.

    Raises:
        ConfigError: A value is out of range.
    """
    given: dict[str, Any] = {
        name: getattr(body, name)
        for name in ("temperature", "top_p", "top_k")
        if getattr(body, name) is not None
    }
    return replace(defaults, max_tokens=body.max_tokens, stop=body.stop_sequences or None, **given)


def _thinks(body: CountTokensBody, can_think: bool) -> bool | None:
    """Whether the reply begins with thinking; None for what the model's template does.

    Nothing ends the thinking within a reply, so that a budget is honoured where the reply's end keeps to it.
    """
    thinking = body.thinking
    if thinking is None or isinstance(thinking, DisabledThinking):
        return None if thinking is None else False
    if isinstance(thinking, EnabledThinking) and isinstance(body, MessagesBody) and can_think:
        least = body.max_tokens - 1
        if thinking.budget_tokens < least:
            expected = (
                f"at least max_tokens - 1, {least}: only a reply as a whole is limited; or type 'adaptive'"
            )
            raise refuse("thinking.budget_tokens", thinking.budget_tokens, expected)
    return True if can_think else None


def hides_thinking(body: MessagesBody) -> bool:
    """Whether the client asks for thinking blocks without their text."""
    return getattr(body.thinking, "display", None) == "omitted"


def _tools(body: CountTokensBody) -> list[ChatTool]:
    """The tools that are there: those with ``defer_loading`` once a result refers to them."""
    referred = {
        part.tool_name
        for message in body.messages
        for block in message.content
        if isinstance(block, ToolResultBlock)
        for part in block.content
        if isinstance(part, ToolReferenceBlock)
    }
    tools: dict[str, ChatTool] = {}
    for number, tool in enumerate(body.tools):
        if tool.name in tools:
            raise refuse(f"tools[{number}].name", tool.name, "a name that no other tool has")
        check_sizes(f"tools[{number}].input_schema", tool.input_schema)
        if not tool.defer_loading or tool.name in referred:
            tools[tool.name] = ChatTool(tool.name, tool.description, tool.input_schema, bool(tool.strict))
    return list(tools.values())


def _check_blocks(number: int, message: Message, waiting: list[str]) -> None:
    """Refuses blocks where they may not be; calls come into ``waiting`` until they have a result."""
    if message.role == "assistant":
        waiting.clear()
    for place, block in enumerate(message.content):
        where = f"messages[{number}].content[{place}]"
        if not isinstance(block, _ALLOWED[message.role]):
            allowed = " or ".join(_type_name(kind) for kind in _ALLOWED[message.role])
            raise refuse(f"{where}.type", block.type, f"{allowed} in a message of the role {message.role}")
        if isinstance(block, ToolUseBlock):
            waiting.append(block.id)
        elif isinstance(block, ToolResultBlock):
            if block.tool_use_id not in waiting:
                expected = "the id of a tool_use block before it, in the last reply and without a result"
                raise refuse(f"{where}.tool_use_id", block.tool_use_id, expected)
            waiting.remove(block.tool_use_id)
    if any(isinstance(block, TextBlock) for block in message.content) and message.role != "assistant":
        waiting.clear()  # who speaks goes on without them


def _type_name(kind: type[Any]) -> str:
    (name,) = kind.model_fields["type"].annotation.__args__
    return str(name)


def _assistant(message: Message) -> list[ChatMessage]:
    """A reply as it was: thinking, text and calls."""
    thinking = [_thinking_text(block) for block in message.content if isinstance(block, ThinkingBlock)]
    return [
        ChatMessage(
            "assistant",
            "".join(block.text for block in message.content if isinstance(block, TextBlock)),
            reasoning_content="".join(thinking) if thinking else None,
            tool_calls=tuple(
                ToolCall(block.id, block.name, json.dumps(block.input, ensure_ascii=False))
                for block in message.content
                if isinstance(block, ToolUseBlock)
            ),
        )
    ]


def _thinking_text(block: ThinkingBlock) -> str:
    """The text, out of the signature where the client asked not to see it."""
    return block.thinking or from_opaque(block.signature) or ""


def _others(message: Message) -> list[ChatMessage]:
    """A user's or the system's message: results of tools first, as they follow the calls, then its text."""
    role: Literal["system", "user"] = "system" if message.role == "system" else "user"
    found = [
        ChatMessage("tool", _result_text(block), tool_call_id=block.tool_use_id)
        for block in message.content
        if isinstance(block, ToolResultBlock)
    ]
    texts = [block for block in message.content if isinstance(block, TextBlock)]
    return found if found and not texts else [*found, ChatMessage(role, _joined(texts))]


def _joined(blocks: Iterable[TextBlock]) -> str:
    return _BETWEEN_BLOCKS.join(block.text for block in blocks)


def _result_text(block: ToolResultBlock) -> str:
    text = _BETWEEN_BLOCKS.join(
        part.text if isinstance(part, TextBlock) else f"The tool {part.tool_name} is available now."
        for part in block.content
    )
    return f"Error: {text}" if block.is_error else text


def _clear_thinking(messages: Sequence[ChatMessage], edit: ClearThinking) -> list[ChatMessage]:
    """The conversation without what was thought in all but the last ``keep`` replies that thought."""
    left = edit.keep.value if isinstance(edit.keep, ThinkingTurns) else len(messages)
    kept = []
    for message in reversed(messages):
        if message.reasoning_content is not None:
            left -= 1
            message = message if left >= 0 else replace(message, reasoning_content=None)
        kept.append(message)
    return kept[::-1]
