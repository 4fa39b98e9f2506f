"""The grammar of a reply: thinking, then content of a form, or calls of tools.

Called by :mod:`duckllm.text.chat_format`. Whatever such a grammar lets a model write, the parser of replies
(:mod:`duckllm.text.formats.reply_parser`) takes apart into calls of the given tools with the arguments that
were written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from duckllm.sampling_params import StructuredOutputsParams
from duckllm.text.chat import ChatOptions, Tool
from duckllm.text.formats.argument_grammar import ArgumentGrammar
from duckllm.text.formats.lark import LarkWriter
from duckllm.text.formats.markup import ReasoningMarkup, ToolMarkup
from duckllm.text.formats.reply_parser import call_marks


def reply_grammar(
    control_parts: Callable[[str], list[int | str]],
    reasoning: ReasoningMarkup | None,
    markup: ToolMarkup | None,
    options: ChatOptions,
    content: StructuredOutputsParams | None,
    *,
    begins_in_reasoning: bool,
) -> StructuredOutputsParams | None:
    """What a reply must keep to; None for nothing.

    Thinking before the rest is free text. Calls end a reply. With ``tool_choice="auto"`` replies are free
    until a call begins, and altogether so where no tool is strict, there may be several calls, and the
    content has no form.

    Args:
        control_parts: Cuts a text at the control tokens that it spells, as the model's tokenizer does.
        reasoning: How thinking is marked; None where a reply has none.
        markup: How calls are written; None where a reply has none.
        options: The tools, which of them must be called, whether several may be.
        content: The form of the content where there is no call; None for any.
        begins_in_reasoning: Whether the reply begins within the thinking.

    Raises:
        ConfigError: A tool's schema is none of an object, or a strict tool's cannot be kept to in this
            markup. What the library cannot keep to is said when the grammar is compiled.
    """
    tools = [] if markup is None or options.tool_choice == "none" else list(enumerate(options.tools))
    if options.tool_choice == "required" and options.named_tool is not None:
        tools = [(number, tool) for number, tool in tools if tool.name == options.named_tool]
    is_free = options.tool_choice != "required" and content is None
    if is_free and not (tools and (_any_strict(tools) or not options.parallel_tool_calls)):
        return None
    if content is not None and not content.label:
        content = replace(content, label=f"structured_outputs.{content.kind}")
    if not tools and reasoning is None:
        return content
    writer = LarkWriter(control_parts)
    opening = _thinking(writer, reasoning, markup if tools else None, options, begins_in_reasoning)
    if not tools or markup is None:
        assert content is not None
        return writer.params(f"{opening} {writer.part(content)}")
    calls = _Calls(writer, markup, tools, options.parallel_tool_calls)
    if options.tool_choice == "required":
        return writer.params(f"{opening} {calls.after_space()}")
    if content is not None:
        return writer.params(f"{opening} ({writer.part(content)} | {calls.after_space()})")
    return writer.params(f"{opening} ({writer.text(without=_marks(markup))} | {calls.after_text()})")


def _any_strict(tools: Sequence[tuple[int, Tool]]) -> bool:
    return any(tool.strict for _, tool in tools)


def _thinking(
    writer: LarkWriter,
    reasoning: ReasoningMarkup | None,
    calls: ToolMarkup | None,
    options: ChatOptions,
    begins_in_reasoning: bool,
) -> str:
    """What stands before the content; nothing where a reply does not think."""
    if reasoning is None:
        return ""
    ends = [reasoning.end, *(_marks(calls) if calls is not None and calls.ends_thinking else ())]
    thought = writer.text_up_to(reasoning.end, without=ends)
    space = writer.some_of(reasoning.after_end)
    if begins_in_reasoning:
        return f"{thought} {space}"
    if options.enable_thinking is False:
        return space
    return f"({writer.exact(reasoning.begin)} {thought})? {space}"


def _marks(markup: ToolMarkup) -> Sequence[str]:
    """What begins a call for whoever reads the reply, without white space around it."""
    return tuple(dict.fromkeys(mark.strip() for mark in call_marks(markup)))


class _Calls:
    """One call or several.

    Args:
        writer: Takes the rules.
        markup: How calls are written.
        tools: Those that may be called, each with its number.
        are_several: Whether there may be more than one.
    """

    def __init__(
        self, writer: LarkWriter, markup: ToolMarkup, tools: Sequence[tuple[int, Tool]], are_several: bool
    ) -> None:
        self._writer, self._markup = writer, markup
        names = [self._call(number, tool) for number, tool in tools]
        call = writer.rule("call", " | ".join(names))
        more = writer.exact(markup.between + markup.call + markup.name_prefix)
        end = writer.exact(markup.end)
        self._rest = writer.rule("calls", " ".join([call, f"({more} {call})*" if are_several else "", end]))
        self._begin = markup.begin + markup.call + markup.name_prefix

    def after_space(self) -> str:
        """Calls alone, behind what may separate them from the content."""
        space = f"({self._writer.exact(self._markup.before)})?" if self._markup.before else ""
        return " ".join([space, self._writer.exact(self._begin), self._rest])

    def after_text(self) -> str:
        """Free text and then calls."""
        text = self._writer.text_up_to(self._begin, without=_marks(self._markup))
        return f"{text} {self._rest}"

    def _call(self, number: int, tool: Tool) -> str:
        """A call from its tool's name on."""
        from llguidance import regex_to_lark

        writer, markup = self._writer, self._markup
        arguments = ArgumentGrammar(writer, tool, number)
        parameter = markup.parameter
        body = arguments.as_object() if parameter is None else arguments.one_by_one(parameter)
        suffix = f"/{regex_to_lark(markup.name_suffix, 'd')}/" if markup.name_suffix else ""
        parts = [writer.spelled(tool.name), suffix, writer.exact(markup.name_end), body]
        return writer.rule(f"call_{number}", " ".join([*parts, writer.exact(markup.call_end)]))
