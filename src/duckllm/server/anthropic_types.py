"""What clients of the Anthropic API send: every field is known here, or refused by its name.

Accepted and without effect, because nothing that a client could see depends on them: ``cache_control`` (every
prefix is cached), ``metadata``, ``service_tier``, ``speed`` and ``inference_geo`` at what they are without
being given, ``eager_input_streaming`` (calls are always streamed as they come), and signatures of thinking
that is sent along.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from duckllm.server.limits import MAX_MESSAGES, MAX_STOP_CHARACTERS, MAX_STOPS, MAX_TOOLS
from duckllm.server.openai_types import Body, ByType


class CacheControl(Body):
    """Where a prefix to be cached ends; ``scope`` is what Claude Code adds."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    scope: str | None = None


class TextBlock(Body):
    """Text."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: Annotated[list[Any], Field(max_length=0)] | None = None


class ThinkingBlock(Body):
    """What the model thought, of an earlier reply of its own."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class DirectCaller(Body):
    """Says that the model itself called the tool."""

    type: Literal["direct"]


class ToolUseBlock(Body):
    """A call that an earlier reply asked for."""

    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1)]
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: DirectCaller | None = None


class ToolReferenceBlock(Body):
    """Names a tool with ``defer_loading`` that is there from now on."""

    type: Literal["tool_reference"]
    tool_name: str
    cache_control: CacheControl | None = None


def _as_text_blocks(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


ResultBlock = Annotated[TextBlock | ToolReferenceBlock, ByType()]


class ToolResultBlock(Body):
    """What a call gave."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[
        list[ResultBlock], BeforeValidator(_as_text_blocks, json_schema_input_type=str | list[ResultBlock])
    ] = Field(default_factory=list)
    is_error: bool = False
    cache_control: CacheControl | None = None


ContentBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, ByType()]


class Message(Body):
    """One message; ``system`` is for what the system says later than at the beginning."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        list[ContentBlock], BeforeValidator(_as_text_blocks, json_schema_input_type=str | list[ContentBlock])
    ]


class Tool(Body):
    """A function that the client runs; tools that run in a server have other types, and are refused."""

    type: Literal["custom"] | None = None  # first, so that a tool of another type is refused for that
    name: Annotated[str, Field(min_length=1, max_length=128)]
    input_schema: dict[str, Any]
    description: str = ""
    strict: bool | None = None
    defer_loading: bool = False
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None
    allowed_callers: list[Literal["direct"]] | None = None


class AutoToolChoice(Body):
    """The model decides."""

    type: Literal["auto"]
    disable_parallel_tool_use: bool = False


class AnyToolChoice(Body):
    """One call at least."""

    type: Literal["any"]
    disable_parallel_tool_use: bool = False


class NamedToolChoice(Body):
    """A call of one tool."""

    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool = False


class NoToolChoice(Body):
    """No call."""

    type: Literal["none"]


ToolChoice = Annotated[AutoToolChoice | AnyToolChoice | NamedToolChoice | NoToolChoice, ByType()]


class EnabledThinking(Body):
    """Think, within a number of tokens."""

    type: Literal["enabled"]
    budget_tokens: Annotated[int, Field(ge=1)]
    display: Literal["summarized", "omitted"] | None = None


class AdaptiveThinking(Body):
    """Think as much as the model sees fit."""

    type: Literal["adaptive"]
    display: Literal["summarized", "omitted"] | None = None


class DisabledThinking(Body):
    """Do not think."""

    type: Literal["disabled"]


Thinking = Annotated[EnabledThinking | AdaptiveThinking | DisabledThinking, ByType()]


class JsonFormat(Body):
    """JSON that keeps to a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """How much to put into a reply, and in which form it comes."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class ThinkingTurns(Body):
    """So many of the last replies that thought."""

    type: Literal["thinking_turns"]
    value: Annotated[int, Field(ge=1)]


class AllThinkingTurns(Body):
    """All of them."""

    type: Literal["all"]


def _as_turns(value: Any) -> Any:
    return {"type": value} if isinstance(value, str) else value


Turns = Annotated[ThinkingTurns | AllThinkingTurns, ByType()]


class ClearThinking(Body):
    """Leave out what was thought in all but the last replies."""

    type: Literal["clear_thinking_20251015"]
    keep: Annotated[Turns, BeforeValidator(_as_turns, json_schema_input_type=Literal["all"] | Turns)] = (
        ThinkingTurns(type="thinking_turns", value=1)
    )


class ContextManagement(Body):
    """What is left out of a conversation before the model reads it."""

    edits: list[ClearThinking] = Field(default_factory=list)


class Metadata(Body):
    """Who asks."""

    user_id: str | None = None


class Diagnostics(Body):
    """Asks why a prefix was not cached, which is answered with that nobody knows."""

    previous_message_id: str | None = None


class CountTokensBody(Body):
    """Body of ``POST /v1/messages/count_tokens``."""

    model: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: Annotated[
        list[TextBlock], BeforeValidator(_as_text_blocks, json_schema_input_type=str | list[TextBlock])
    ] = Field(default_factory=list)
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    cache_control: CacheControl | None = None
    speed: Literal["standard"] | None = None


StopSequence = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]


class MessagesBody(CountTokensBody):
    """Body of ``POST /v1/messages``."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Annotated[list[StopSequence], Field(max_length=MAX_STOPS)] = Field(default_factory=list)
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    inference_geo: None = None
    diagnostics: Diagnostics | None = None
