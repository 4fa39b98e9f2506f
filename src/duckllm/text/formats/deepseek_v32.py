"""DeepSeek-V3.2's prompts, which the model's folder has a Python program for and no template.

Used by :mod:`duckllm.text.tokenizer` for models of that type without a template. The texts, and where they
stand, are those of encoding/encoding_dsv32.py in the repository deepseek-ai/DeepSeek-V3.2 (MIT licence,
THIRD_PARTY_NOTICES.md); the tests compare with its published examples. Its role "developer" is left out: it
is for DeepSeek's own search agent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from duckllm.errors import RequestError
from duckllm.text.formats.known import DEEPSEEK_V3_2
from duckllm.text.formats.markup import to_json

_BOS, _EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
_USER, _ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
_THINK, _END_THINK = "<think>", "</think>"

_TOOLS_BEGIN = """

## Tools

You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<｜DSML｜function_calls>" block like the following as part of your reply to the user:
<｜DSML｜function_calls>
<｜DSML｜invoke name="$FUNCTION_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$FUNCTION_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜function_calls>

String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for other types (numbers, booleans, arrays, objects).

If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. Here is an example:

<｜DSML｜function_calls>
...
</｜DSML｜function_calls>

<function_results>
...
</function_results>

<think>...thinking about results</think>

Here are the functions available in JSONSchema format:
<functions>
"""  # noqa: E501
_TOOLS_END = "\n</functions>\n"
_RESPONSE_FORMAT = "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
_RESULTS_BEGIN, _RESULTS_END = "\n\n<function_results>", "\n</function_results>\n\n"
_RESULT_BEGIN, _RESULT_END = "\n<result>", "</result>"


class DeepseekV32Template:
    """A :class:`duckllm.text.chat_template.ChatTemplate`.

    Its options: ``thinking`` and ``enable_thinking``, of which either makes the model think, and
    ``response_format``, a JSON Schema that the model is told of. It does not think unless asked to, as
    DeepSeek-V3.1's template has it.
    """

    source = "\n".join(
        (
            _BOS,
            _EOS,
            _USER,
            _ASSISTANT,
            _TOOLS_BEGIN,
            _TOOLS_END,
            _RESPONSE_FORMAT,
            _RESULTS_BEGIN,
            _RESULTS_END,
            _RESULT_BEGIN,
            _RESULT_END,
            "｜DSML｜",
        )
    )
    control_tokens = frozenset({_BOS, _EOS, _USER, _ASSISTANT, _THINK, _END_THINK, "｜DSML｜"})
    variables = frozenset({"thinking", "enable_thinking", "response_format"})

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation, up to where the assistant's reply begins.

        Raises:
            RequestError: A call's arguments are text.
        """
        options = options or {}
        thinks = bool(options.get("thinking", options.get("enable_thinking", False)))
        extra = _tools(tools) if tools else ""
        if options.get("response_format") is not None:
            extra += _RESPONSE_FORMAT + to_json(options["response_format"])
        last_user = max((n for n, each in enumerate(messages) if each["role"] == "user"), default=-1)
        text = _BOS
        if extra and messages[0]["role"] != "system":
            text, extra = text + extra, ""
        for number, message in enumerate(messages):
            role, content = message["role"], message.get("content") or ""
            # Only what follows the last question is thought about, or keeps its thoughts.
            begin = _THINK if thinks and number >= last_user else _END_THINK
            if role == "system":
                text += content + extra
                extra = ""
            elif role == "user":
                text += _USER + content + _ASSISTANT + begin
            elif role == "tool":
                is_first = number == 0 or messages[number - 1]["role"] != "tool"
                is_last = number + 1 == len(messages) or messages[number + 1]["role"] != "tool"
                text += _RESULTS_BEGIN * is_first + _RESULT_BEGIN + content + _RESULT_END
                text += (_RESULTS_END + begin) * is_last
            else:
                if thinks and number > last_user:
                    text += (message.get("reasoning_content") or "") + _END_THINK
                text += content + _calls(message.get("tool_calls") or ()) + _EOS
        if messages[-1]["role"] in ("system", "assistant"):
            text += _ASSISTANT + (_THINK if thinks else _END_THINK)
        return text


def _tools(tools: Sequence[Mapping[str, Any]]) -> str:
    return _TOOLS_BEGIN + "\n".join(to_json(tool["function"]) for tool in tools) + _TOOLS_END


def _calls(calls: Sequence[Mapping[str, Any]]) -> str:
    if not calls:
        return ""
    written = []
    for call in calls:
        arguments = call["function"]["arguments"]
        # Text would have to be decoded here, after control tokens were looked for in it.
        if isinstance(arguments, str):
            raise RequestError("messages: got a call's arguments as text, expected an object")
        written.append(DEEPSEEK_V3_2.write(call["function"]["name"], arguments))
    return DEEPSEEK_V3_2.before + DEEPSEEK_V3_2.write_all(written)
