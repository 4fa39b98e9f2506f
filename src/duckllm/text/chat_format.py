"""How a model's conversations are written and its replies read: prompts, parsers, sampling.

Made once for a tokenizer, by the Python interface and by the server. Chooses by what the model's own template
writes (:mod:`duckllm.text.formats.traits`); docs/chat-formats.md lists what is known.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from duckllm.errors import ConfigError, InWords, RequestError
from duckllm.sampling_params import SamplingParams
from duckllm.text.chat import ChatMessage, ChatOptions, ChatPrompt, ReplyParser, Tool, ToolCall
from duckllm.text.control_text import free_mark, texts_of
from duckllm.text.formats.described_tools import RESULT_BEGIN, RESULT_END, describe
from duckllm.text.formats.known import KIMI_K2, MISTRAL
from duckllm.text.formats.markup import ReasoningMarkup, ToolMarkup
from duckllm.text.formats.reply_grammar import reply_grammar
from duckllm.text.formats.reply_parser import MarkupParser
from duckllm.text.formats.traits import traits_of
from duckllm.text.tokenizer import Tokenizer

# Mistral's templates take ids of this length alone.
_MISTRAL_ID = 9

_Dict = dict[str, Any]


def chat_format(tokenizer: Tokenizer) -> ChatFormat:
    """The format of a model's conversations, as its files say."""
    return ChatFormat(tokenizer)


class ChatFormat:
    """Conversations in and replies out, for one model.

    Args:
        tokenizer: Of the model.

    Attributes:
        markup: How calls of tools are written.
        reasoning: How thinking is marked; None where the model's template knows none.

    Threading: may be used by several threads at once.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._traits = traits_of(tokenizer.chat_template)
        self.markup: ToolMarkup = self._traits.markup
        self.reasoning: ReasoningMarkup | None = self._traits.reasoning

    @property
    def can_switch_thinking(self) -> bool:
        """Whether ``enable_thinking`` makes a difference."""
        return bool(self._traits.switches)

    @property
    def knows_effort(self) -> bool:
        """Whether the model's template can be told how much to think."""
        return "reasoning_effort" in self._traits.options

    def prompt(self, messages: Sequence[ChatMessage], options: ChatOptions = ChatOptions()) -> ChatPrompt:  # noqa: B008
        """A conversation up to where the reply begins.

        Calls and thinking of earlier replies are written as the template does; calls, as far as it lets
        them, in the very text that the model wrote. With ``tool_choice`` "none" it is told of no tools.

        Raises:
            RequestError: A message is malformed, a result answers no call, or the template refuses them.
            ConfigError: An option that the model's template does not know.
            CheckpointError: The model has no chat template, or a broken one.
        """
        tools = [] if options.tool_choice == "none" else [_tool_dict(tool) for tool in options.tools]
        names = self._template_options(options)
        if not messages:
            raise RequestError("messages: got none, expected at least one")
        dicts = self._message_dicts(_with_ids(messages))
        own: dict[str, str] = {}
        if tools and not self._traits.writes_tools:
            own = self._describe_tools(dicts, tools)
            tools = []
        pieces = self._tokenizer.render_chat(dicts, tools, names, own)
        begin = self.reasoning.begin if self.reasoning is not None else None
        ends_open = begin is not None and pieces[-1].rstrip().endswith(begin)
        return ChatPrompt(tuple(self._tokenizer.encode_pieces(pieces)), ends_open)

    def parser(self, options: ChatOptions, begins_in_reasoning: bool = False) -> ReplyParser:
        """What takes a reply apart. Without tools, or with ``tool_choice`` "none", calls are content."""
        return MarkupParser(
            self.reasoning,
            self.markup if _may_call(options) else None,
            options.tools,
            begins_in_reasoning=begins_in_reasoning,
            parallel_tool_calls=options.parallel_tool_calls,
            content_has_form=options.response_format is not None,
        )

    def sampling(
        self, params: SamplingParams, options: ChatOptions, begins_in_reasoning: bool = False
    ) -> SamplingParams:
        """``params`` for a reply that keeps to the options, and that :meth:`parser` reads.

        Its marks stay in the text. Calls that must be, calls of strict tools, one call alone where there may
        not be several, and the form of the content behind the thinking are enforced by a grammar.

        Raises:
            ConfigError: A tool's schema cannot be kept to. What the library cannot keep to is said when a
                request is made of the result.
        """
        content = options.response_format
        if content is not None and params.structured_outputs is not None:
            got = InWords("another one beside it")
            raise ConfigError("response_format", got, "one of it and structured_outputs")
        outputs = reply_grammar(
            self._tokenizer.control_parts,
            self.reasoning,
            self.markup,
            options,
            content or params.structured_outputs,
            begins_in_reasoning=begins_in_reasoning,
        )
        params = dataclasses.replace(params, structured_outputs=outputs)
        if self._has_special_marks(options):
            params = dataclasses.replace(params, skip_special_tokens=False)
        return params

    def _has_special_marks(self, options: ChatOptions) -> bool:
        marks = "" if self.reasoning is None else self.reasoning.begin + self.reasoning.end
        if _may_call(options):
            marks += self.markup.write_all([self.markup.write("", {"": ""}), self.markup.write("", {"": 0})])
        return any(text in marks for text in self._tokenizer.special_texts)

    def _template_options(self, options: ChatOptions) -> _Dict:
        """The names for the template; what it does not know is refused."""
        names = dict(options.template_kwargs)
        field = "chat_template_kwargs"
        known = self._traits.options - {"response_format"}
        for name, value in names.items():
            if name not in known and name not in ("enable_thinking", "thinking"):
                listed = ", ".join(sorted(known)) or "none"
                raise ConfigError(f"{field}.{name}", value, f"an option of the model's template: {listed}")
        wishes = {"enable_thinking": options.enable_thinking}
        wishes |= {f"{field}.{name}": names.pop(name, None) for name in ("enable_thinking", "thinking")}
        effort = options.reasoning_effort
        if effort == "none" and (self._traits.switches or "reasoning_effort" not in known):
            wishes["reasoning_effort"] = False
        elif effort is not None and "reasoning_effort" in known:
            if names.setdefault("reasoning_effort", effort) != effort:
                raise ConfigError("reasoning_effort", effort, f"the same as in {field}")
        elif effort not in (None, "medium"):
            hint = "the model's template knows no more or less of it; enable_thinking turns thinking on"
            raise ConfigError("reasoning_effort", effort, "'none' or 'medium'", hint)
        names |= self._thinking_options(wishes)
        wanted = options.response_format
        if wanted is not None and wanted.kind == "json" and "response_format" in self._traits.options:
            names["response_format"] = json.loads(wanted.schema)
        return names

    def _thinking_options(self, wishes: Mapping[str, Any]) -> _Dict:
        """What turns thinking on or off as is asked for; refused where the template cannot."""
        asked = {name: value for name, value in wishes.items() if value is not None}
        if not asked:
            return {}
        field, value = next(iter(asked.items()))
        for name, other in asked.items():
            shown = "none" if name == "reasoning_effort" else other
            if not isinstance(other, bool):
                raise ConfigError(name, other, "true or false")
            if other != value:
                raise ConfigError(name, shown, f"the same as {field}")
        if self._traits.switches:
            return dict.fromkeys(self._traits.switches, value)
        # Without a switch, what is so anyway may be asked for.
        if value != (self.reasoning is not None):
            shown = "none" if field == "reasoning_effort" else value
            does = "always thinks" if self.reasoning is not None else "never thinks"
            raise ConfigError(field, shown, f"nothing else: this model {does}")
        return {}

    def _message_dicts(self, messages: Sequence[ChatMessage]) -> list[_Dict]:
        """The messages as the template takes them."""
        if not self._traits.writes_calls:
            return _with_calls_as_text(messages, self.markup)
        renamed: dict[str, tuple[str, str]] = {}
        dicts: list[_Dict] = []
        num_calls = 0
        for number, message in enumerate(messages):
            made: _Dict = {"role": message.role, "content": message.content}
            if message.name is not None:
                made["name"] = message.name
            if message.reasoning_content is not None:
                made["reasoning_content"] = message.reasoning_content
            if message.role == "tool":
                name, call_id = renamed[message.tool_call_id or ""]
                made["tool_call_id"] = call_id
                if self.markup is KIMI_K2:
                    made["name"] = name
            if message.tool_calls:
                renamed = {}
                made["tool_calls"] = []
                for call in message.tool_calls:
                    renamed[call.id] = (call.name, self._id_of(call, num_calls))
                    num_calls += 1
                    arguments = self._arguments_of(call, f"messages[{number}].tool_calls")
                    function = {"name": call.name, "arguments": arguments}
                    made["tool_calls"].append(
                        {"id": renamed[call.id][1], "type": "function", "function": function}
                    )
            dicts.append(made)
        return dicts

    def _id_of(self, call: ToolCall, number: int) -> str:
        """A call's id as the template takes it; as the model writes it, where it is shown to the model."""
        if self.markup is KIMI_K2:
            return f"{self.markup.name_prefix}{call.name}{self.markup.number.format(number)}"
        if self.markup is MISTRAL:
            return hashlib.sha256(call.id.encode()).hexdigest()[:_MISTRAL_ID]
        return call.id

    def _arguments_of(self, call: ToolCall, where: str) -> str | _Dict:
        text = call.arguments or "{}"
        return text if self._traits.takes_text else _object_of(text, where)

    def _describe_tools(self, dicts: list[_Dict], tools: Sequence[_Dict]) -> dict[str, str]:
        """Puts the tools into the first message; returns our own words for their stand-ins in it."""
        before, described, behind = describe(tools, self.markup)
        texts = [text for each in (*dicts, *tools) for text in texts_of(each)]
        first, second = free_mark(texts, "\ue001"), free_mark(texts, "\ue002")
        text = first + described + second
        if dicts[0]["role"] == "system":
            separator = "\n\n" if dicts[0]["content"] else ""
            dicts[0]["content"] += separator + text
        elif self._traits.takes_system:
            dicts.insert(0, {"role": "system", "content": text})
        else:
            dicts[0]["content"] = f"{text}\n\n{dicts[0]['content']}"
        return {first: before, second: behind}


def _may_call(options: ChatOptions) -> bool:
    return bool(options.tools) and options.tool_choice != "none"


def _tool_dict(tool: Tool) -> _Dict:
    function: _Dict = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    function["parameters"] = tool.parameters
    return {"type": "function", "function": function}


def _object_of(text: str, where: str) -> _Dict:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise RequestError(f"{where}: got arguments {text[:200]!r}, expected the text of a JSON object")
    return value


def _with_ids(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """The messages, each result with the id of its call, in the order of the calls.

    Raises:
        RequestError: A result answers no call.
    """
    checked: list[ChatMessage] = []
    waiting: list[ToolCall] = []  # calls that have no result yet
    order: dict[str, int] = {}
    for number, message in enumerate(messages):
        if message.role != "tool":
            checked.append(message)
            waiting = list(message.tool_calls)
            order = {call.id: place for place, call in enumerate(waiting)}
            first = len(checked)
            continue
        found = next((c for c in waiting if message.tool_call_id in (None, c.id)), None)
        if found is None:
            ids = ", ".join(repr(call.id) for call in waiting) or "no result, as no call is without one"
            got = message.tool_call_id
            raise RequestError(f"messages[{number}].tool_call_id: got {got!r}, expected {ids}")
        waiting.remove(found)
        checked.append(dataclasses.replace(message, tool_call_id=found.id))
        checked[first:] = sorted(checked[first:], key=lambda each: order[each.tool_call_id or ""])
    return checked


def _with_calls_as_text(messages: Sequence[ChatMessage], markup: ToolMarkup) -> list[_Dict]:
    """Messages for a template that knows no calls: they are content, and results are what users say."""
    dicts: list[_Dict] = []
    result_before = False
    for message in messages:
        role, content = message.role, message.content
        if message.tool_calls:
            calls = [markup.write(call.name, call.arguments or "{}") for call in message.tool_calls]
            content += (markup.before if content else "") + markup.write_all(calls)
        if role == "tool":
            role, content = "user", RESULT_BEGIN + content + RESULT_END
        if result_before and role == "user":
            # Many templates want turns to alternate.
            dicts[-1]["content"] += ("\n" if message.role == "tool" else "\n\n") + content
        else:
            made: _Dict = {"role": role, "content": content}
            if message.name is not None:
                made["name"] = message.name
            if message.reasoning_content is not None:
                made["reasoning_content"] = message.reasoning_content
            dicts.append(made)
        result_before = message.role == "tool"
    return dicts
