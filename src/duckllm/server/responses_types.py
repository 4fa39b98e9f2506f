"""What clients of the Responses API send: every field is known here, or refused by its name.

The server keeps nothing between requests, so ``store`` is false where it is not given, and what asks for
something kept (``previous_response_id``, ``conversation``, ``prompt``, ``background``) is refused.

Accepted and without effect, because nothing that a client could see depends on them: ``user``,
``safety_identifier``, ``prompt_cache_key``, ``prompt_cache_retention`` and ``client_metadata`` (every prefix
is cached, for everybody), ``max_tool_calls`` (it counts calls of tools that run in the server, of which there
are none), ids and status of items; ``service_tier``, ``truncation`` and ``text.verbosity`` at what they are
without being given.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from duckllm.server.limits import MAX_MESSAGES, MAX_TOOLS
from duckllm.server.openai_types import Body, ByType, kind_of_choice

Status = Literal["in_progress", "completed", "incomplete"]
Phase = Literal["commentary", "final_answer"]


class InputText(Body):
    """Text that the model reads."""

    type: Literal["input_text"]
    text: str


class OutputText(Body):
    """Text of an earlier reply."""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)] = Field(default_factory=list)
    logprobs: list[Any] | None = None


class Refusal(Body):
    """An earlier reply that said no."""

    type: Literal["refusal"]
    refusal: str


ContentPart = Annotated[InputText | OutputText | Refusal, ByType()]


def _as_input_text(value: Any) -> Any:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


class Message(Body):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[
        list[ContentPart], BeforeValidator(_as_input_text, json_schema_input_type=str | list[ContentPart])
    ]
    id: str | None = None
    status: Status | None = None
    phase: Phase | None = None


class FunctionCall(Body):
    """A call that an earlier reply asked for."""

    type: Literal["function_call"]
    call_id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1)]
    arguments: str
    namespace: str | None = None
    id: str | None = None
    status: Status | None = None


class FunctionCallOutput(Body):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: Annotated[str, Field(min_length=1)]
    output: Annotated[
        list[InputText], BeforeValidator(_as_input_text, json_schema_input_type=str | list[InputText])
    ]
    id: str | None = None
    name: str | None = None
    namespace: str | None = None
    status: Status | None = None


class SummaryText(Body):
    """A part of a summary."""

    type: Literal["summary_text"]
    text: str


class ReasoningText(Body):
    """A part of what was thought."""

    type: Literal["reasoning_text"]
    text: str


class Reasoning(Body):
    """What was thought before an earlier reply."""

    type: Literal["reasoning"]
    summary: list[SummaryText] = Field(default_factory=list)
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None
    id: str | None = None
    status: Status | None = None


Item = Annotated[Message | FunctionCall | FunctionCallOutput | Reasoning, ByType(default="message")]


class FunctionTool(Body):
    """A function that the client runs."""

    type: Literal["function"]
    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamespaceTool(Body):
    """Functions of one origin, as Codex sends those of MCP servers."""

    type: Literal["namespace"]
    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str = ""
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)]


Tool = Annotated[FunctionTool | NamespaceTool, ByType()]


class FunctionChoice(Body):
    """A call of one function."""

    type: Literal["function"]
    name: str


ToolChoice = Annotated[
    Annotated[Literal["auto", "none", "required"], Tag("<mode>")] | Annotated[FunctionChoice, Tag("<tool>")],
    Discriminator(kind_of_choice),
]


class ReasoningOptions(Body):
    """How much to think, and how it is shown."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "detailed"] | None = None


class PlainFormat(Body):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(Body):
    """JSON that keeps to a schema, whether ``strict`` says so or not."""

    type: Literal["json_schema"]
    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextOptions(Body):
    """The form of the text."""

    format: Annotated[PlainFormat | JsonObjectFormat | JsonSchemaFormat, ByType()] | None = None
    verbosity: Literal["medium"] | None = None


class StreamOptions(Body):
    """How the stream is written."""

    include_obfuscation: Literal[False] = False


class ResponsesBody(Body):
    """Body of ``POST /v1/responses``."""

    model: str | None = None
    input: Annotated[
        list[Item],
        BeforeValidator(
            lambda value: [{"role": "user", "content": value}] if isinstance(value, str) else value,
            json_schema_input_type=str | list[Item],
        ),
        Field(min_length=1, max_length=MAX_MESSAGES),
    ]
    instructions: str | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool | None = None
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: Literal[False] | None = None
    background: Literal[False] | None = None
    previous_response_id: None = None
    conversation: None = None
    prompt: None = None
    truncation: Literal["disabled"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    metadata: dict[str, str] | None = None
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    client_metadata: dict[str, str] | None = None
