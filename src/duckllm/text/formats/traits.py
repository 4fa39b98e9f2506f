"""What a model's chat template can do, found by rendering small conversations with it.

Called by :mod:`duckllm.text.chat_format`. Templates say nowhere what they need: whether they know tools, how
they mark calls, whether they take arguments as text. What they write tells.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from duckllm.errors import CheckpointError, RequestError
from duckllm.text.chat_template import ChatTemplate
from duckllm.text.formats.known import HERMES, KNOWN
from duckllm.text.formats.markup import ReasoningMarkup, ToolMarkup, to_json

_USER: Mapping[str, Any] = {"role": "user", "content": "userprobe"}
_REPLY = {"role": "assistant", "content": "contentprobe", "reasoning_content": "reasonprobe"}
_THINKING = {"enable_thinking": True, "thinking": True}
_ARGUMENTS = {"keyprobe": "valueprobe"}
_TOOL = {
    "type": "function",
    "function": {
        "name": "toolprobe",
        "description": "descriptionprobe",
        "parameters": {"type": "object", "properties": {"keyprobe": {"type": "string"}}},
    },
}
# Kimi's templates write the id of a call and not its name; Mistral's want nine letters.
_IDS = ("functions.nameprobe:0", "callprobe")


@dataclass(frozen=True)
class TemplateTraits:
    """What a template does with a conversation.

    Args:
        markup: How it marks calls, and how the model is to; Hermes's where it does not.
        reasoning: How it marks thinking; None where it knows none.
        writes_tools: Whether it tells the model which tools there are.
        writes_calls: Whether it writes earlier calls and their results.
        takes_text: Whether it takes a call's arguments as text, which it then leaves as it is.
        takes_system: Whether it takes a system message.
        switches: The names of the options that turn thinking on and off.
        options: The names of all its options.
    """

    markup: ToolMarkup = HERMES
    reasoning: ReasoningMarkup | None = None
    writes_tools: bool = False
    writes_calls: bool = False
    takes_text: bool = True
    takes_system: bool = True
    switches: tuple[str, ...] = ()
    options: frozenset[str] = frozenset()


def traits_of(template: ChatTemplate | None) -> TemplateTraits:
    """What a template does; what a broken one, or none, does is said when it is used."""
    if template is None or not _render(template, [_USER]):
        return TemplateTraits()
    switches = tuple(name for name in ("enable_thinking", "thinking") if name in template.variables)
    system = _render(template, [{"role": "system", "content": "systemprobe"}, _USER])
    found = _find_calls(template)
    markup, takes_text, text = found or (HERMES, True, "")
    tools = _render(template, [_USER], [_TOOL])
    return TemplateTraits(
        markup=markup,
        reasoning=_find_reasoning(template, text),
        writes_tools=found is not None and "toolprobe" in tools,
        writes_calls=found is not None,
        takes_text=takes_text,
        takes_system="systemprobe" in system,
        switches=switches,
        options=template.variables,
    )


def _render(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    options: Mapping[str, Any] | None = None,
) -> str:
    try:
        return template.render(messages, tools, options)
    except (CheckpointError, RequestError):
        return ""


def _find_calls(template: ChatTemplate) -> tuple[ToolMarkup, bool, str] | None:
    """The markup of calls, whether arguments may be text, and what was written; None for no known markup."""
    for takes_text in (True, False):
        for call_id in _IDS:
            arguments = to_json(_ARGUMENTS) if takes_text else _ARGUMENTS
            function = {"name": "nameprobe", "arguments": arguments}
            call = {"id": call_id, "type": "function", "function": function}
            result = {"role": "tool", "content": "resultprobe", "tool_call_id": call_id}
            text = _render(template, [_USER, {**_REPLY, "tool_calls": [call]}, result], [_TOOL], _THINKING)
            if "resultprobe" not in text:
                continue
            for markup in KNOWN:
                # An id may stand before the end.
                written = (markup.begin + markup.write("nameprobe", _ARGUMENTS)).removesuffix(markup.call_end)
                if written in text:
                    return markup, takes_text, text
    return None


def _find_reasoning(template: ChatTemplate, text: str) -> ReasoningMarkup | None:
    """How thinking is marked: of a reply with calls, as ``text`` has it, or of one without."""
    plain = ReasoningMarkup()
    if plain.end not in template.source:
        return None
    pattern = re.compile(rf"{plain.begin}(\s*)reasonprobe(\s*){plain.end}(\s*)contentprobe")
    found = pattern.search(text) or pattern.search(_render(template, [_USER, _REPLY], (), _THINKING))
    if found is None:
        return plain
    return ReasoningMarkup(after_begin=found[1], before_end=found[2], after_end=found[3])
