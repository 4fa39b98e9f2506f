"""The bodies that OpenAI's APIs take: every field is here and honoured, or refused by name.

Read by :mod:`duckllm.server.openai_chat` and :mod:`duckllm.server.openai_completions`. Fields that make no
difference to what the client sees are listed as such, and accepted.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    Tag,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from duckllm.server.errors import type_tag
from duckllm.server.limits import (
    MAX_FIELDS,
    MAX_MESSAGES,
    MAX_N,
    MAX_PROMPTS,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    MAX_TOOLS,
)


class Body(BaseModel):
    """Refuses fields that it does not know, and values of another kind; null is as if a field were absent."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _as_meant(cls, value: Any) -> Any:
        if isinstance(value, dict):
            if len(value) > MAX_FIELDS:  # most of them are unknown, and each would be an error of its own
                raise PydanticCustomError("too_many_fields", "at most {most} fields", {"most": MAX_FIELDS})
            return {name: _whole(each) for name, each in value.items() if each is not None}
        return value


def _whole(value: Any) -> Any:
    """Whole numbers are integers, however they are written: 4.0 is 4 in JSON, and in lists of numbers."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list) and any(isinstance(each, float) for each in value):
        return [_whole(each) if isinstance(each, float) else each for each in value]
    return value


class ByType:
    """For a union of bodies of which each has a ``type`` of its own: that says which one a value must be.

    As pydantic's own, but errors show the type apart from the fields on the way to them.

    Args:
        default: The type of what has none.
    """

    def __init__(self, default: str | None = None) -> None:
        self._default = default

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        choices = {}
        for body in get_args(source):
            (name,) = get_args(body.model_fields["type"].annotation)
            choices[type_tag(name)] = handler.generate_schema(body)
        return core_schema.tagged_union_schema(choices, self._tag)

    def _tag(self, value: Any) -> str:
        found = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        return type_tag(self._default if found is None else found)


class TextPart(Body):
    """A piece of a message's text."""

    type: Literal["text"]
    text: str


class FunctionCall(Body):
    """The function that a call names, and its arguments as JSON text."""

    name: str
    arguments: str


class MessageToolCall(Body):
    """A call that an assistant's message asked for."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None  # as clients keep it that add up a stream's deltas


def _kind_of_content(value: object) -> str:
    return "<parts>" if isinstance(value, list) else "<text>"


Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[TextPart], Tag("<parts>")], Discriminator(_kind_of_content)
]


class Message(Body):
    """A message of a conversation.

    ``refusal``, ``annotations``, ``audio`` and ``function_call`` are accepted where they are empty, as in
    replies of ours that a client sends back.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    reasoning_content: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    refusal: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None


class Function(Body):
    """A function that replies may ask to be called."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(Body):
    """A tool, of the one kind that there is."""

    type: Literal["function"]
    function: Function


class FunctionName(Body):
    """A function by its name."""

    name: str


class NamedTool(Body):
    """The one function that a reply must call."""

    type: Literal["function"]
    function: FunctionName


class JsonSchema(Body):
    """The schema that a reply keeps to; always, whatever ``strict`` says."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextFormat(Body):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(Body):
    """JSON that keeps to a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema | None = None


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, ByType()]


class StreamOptions(Body):
    """What a stream has beside the reply. ``include_obfuscation`` may be false: there is none."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class StructuredOutputs(Body):
    """vLLM's field of that name: what a reply's text must be, exactly one of these."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


StopString = Annotated[str, Field(max_length=MAX_STOP_CHARACTERS)]


def _kind_of_stop(value: object) -> str:
    return "<list>" if isinstance(value, list) else "<text>"


Stop = Annotated[
    Annotated[StopString, Tag("<text>")]
    | Annotated[list[StopString], Field(max_length=MAX_STOPS), Tag("<list>")],
    Discriminator(_kind_of_stop),
]


class SamplingFields(Body):
    """How tokens are chosen, in both of OpenAI's APIs and with vLLM's further names."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: Stop | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None


def _kind_of_prompt(value: object) -> str:
    if not isinstance(value, list) or not value:
        return "<text>" if not isinstance(value, list) else "<texts>"
    if isinstance(value[0], list):
        return "<lists>"
    return "<texts>" if isinstance(value[0], str) else "<tokens>"


Prompt = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS), Tag("<texts>")]
    | Annotated[list[int], Tag("<tokens>")]
    | Annotated[list[list[int]], Field(max_length=MAX_PROMPTS), Tag("<lists>")],
    Discriminator(_kind_of_prompt),
]


class CompletionBody(SamplingFields):
    """What ``/v1/completions`` takes; ``user`` is accepted and makes no difference.

    ``suffix`` must be absent: no model here writes what stands between two texts.
    """

    prompt: Prompt
    suffix: None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    structured_outputs: StructuredOutputs | None = None


def kind_of_choice(value: object) -> str:
    """Whether a choice of tools names one."""
    return "<tool>" if isinstance(value, dict | BaseModel) else "<mode>"


ToolChoice = Annotated[
    Annotated[Literal["auto", "none", "required"], Tag("<mode>")] | Annotated[NamedTool, Tag("<tool>")],
    Discriminator(kind_of_choice),
]


class ChatCompletionBody(SamplingFields):
    """What ``/v1/chat/completions`` takes.

    Accepted without a difference to anything that the client could see: ``user``, ``safety_identifier``,
    ``metadata``, ``prompt_cache_key``, ``prompt_cache_retention``, ``service_tier`` and ``store: false``; and
    ``modalities`` of text and ``verbosity`` of medium, which is what there is.
    """

    messages: Annotated[list[Message], Field(max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    safety_identifier: str | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    store: Literal[False] | None = None
    modalities: list[Literal["text"]] | None = None
    verbosity: Literal["medium"] | None = None
