"""A conversation as every chat API has it, and the parts of a reply: values alone.

Made by the server's APIs of what clients send; read by chat formats, which write conversations as a model
was trained to read them and take its replies apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from duckllm.sampling_params import StructuredOutputsParams


@dataclass(frozen=True)
class ToolCall:
    """A call of a function that a reply asks for.

    Args:
        id: What the client calls it by; its result names it again.
        name: The function.
        arguments: A JSON object, as text.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ChatMessage:
    """One message of a conversation.

    Args:
        role: Who speaks; ``"tool"`` gives the result of a call.
        content: The text; of parts, one behind the other.
        reasoning_content: What an assistant thought before its content; None for nothing or not known.
        tool_calls: What an assistant asked for.
        tool_call_id: The call that a tool's content is the result of; None for the first that has none.
        name: Who of several it is, for templates that know names.
    """

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class Tool:
    """A function that replies may ask to be called.

    Args:
        name: Its name.
        description: What it is for; empty where nothing was said.
        parameters: JSON Schema of its arguments, an object's.
        strict: Whether the arguments of every call must keep to the schema.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool = False


@dataclass(frozen=True)
class ChatOptions:
    """How a conversation goes on.

    Args:
        tools: Functions that the reply may ask to be called.
        tool_choice: ``"auto"`` leaves it to the model, ``"none"`` allows no call, ``"required"`` makes the
            reply ask for one at least.
        named_tool: With ``"required"``: the one function that it must be; None for any of them.
        parallel_tool_calls: Whether a reply may ask for several.
        response_format: What the content must be, where it is not a call; None for any text.
        enable_thinking: Whether the model thinks before its content; None for what its template does.
        reasoning_effort: How much, where the template knows that; None for what it does.
        template_kwargs: More names for the chat template.
    """

    tools: Sequence[Tool] = ()
    tool_choice: Literal["auto", "none", "required"] = "auto"
    named_tool: str | None = None
    parallel_tool_calls: bool = True
    response_format: StructuredOutputsParams | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation as a model reads it.

    Args:
        token_ids: Up to where the reply begins.
        begins_in_reasoning: Whether that is within its thinking.
    """

    token_ids: tuple[int, ...]
    begins_in_reasoning: bool = False


@dataclass(frozen=True)
class ReasoningDelta:
    """More of what is thought before the content."""

    text: str


@dataclass(frozen=True)
class ContentDelta:
    """More of the content."""

    text: str


@dataclass(frozen=True)
class ToolCallDelta:
    """More of a call.

    Args:
        index: Its number in the reply; calls come one behind the other.
        name: The function, with a call's first delta; None later.
        arguments: More of the JSON text of its arguments; may be empty.
    """

    index: int
    name: str | None = None
    arguments: str = ""


ReplyDelta = ReasoningDelta | ContentDelta | ToolCallDelta


class ReplyParser(Protocol):
    """Takes the text of one reply apart. How the text is cut into pieces changes nothing of the whole."""

    @property
    def num_tool_calls(self) -> int:
        """Calls so far."""

    def push(self, text: str) -> list[ReplyDelta]:
        """What ``text`` adds; what may be the beginning of markup is held back."""

    def finish(self) -> list[ReplyDelta]:
        """What was held back, as no text follows; markup that is not whole is content, once."""
