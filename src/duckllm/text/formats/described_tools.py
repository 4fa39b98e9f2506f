"""Tools for templates that do not know them: described in a message, called in the text of replies.

Called by :mod:`duckllm.text.chat_format`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from duckllm.text.formats.known import DEEPSEEK_V3_1
from duckllm.text.formats.markup import ToolMarkup, to_json

RESULT_BEGIN, RESULT_END = "<tool_response>\n", "\n</tool_response>"


def describe(tools: Sequence[dict[str, Any]], markup: ToolMarkup) -> tuple[str, str, str]:
    """What a model is told of tools: our own words, what callers say of the tools, our own words again.

    Args:
        tools: In OpenAI's form.
        markup: How calls are to be written.
    """
    functions = [tool["function"] for tool in tools]
    if markup is DEEPSEEK_V3_1:
        return _describe_deepseek_v31(functions)
    example = markup.write_all([markup.write("NAME", '{"ARGUMENT": VALUE}')])
    return (
        "# Tools\n\nYou may call these functions, each described by a JSON object:\n<tools>\n",
        "\n".join(map(to_json, functions)),
        "\n</tools>\n\nTo call a function, write this, with its name and its arguments as a JSON object, and "
        f"nothing behind it; the result is then given to you:\n{example}",
    )


def _describe_deepseek_v31(functions: Sequence[dict[str, Any]]) -> tuple[str, str, str]:
    """As the model card of DeepSeek-V3.1 has it (MIT licence, THIRD_PARTY_NOTICES.md)."""
    described = [
        f"### {function['name']}\nDescription: {function.get('description', '')}\n\n"
        f"Parameters: {to_json(function['parameters'])}"
        for function in functions
    ]
    return (
        "## Tools\nYou have access to the following tools:\n\n",
        "\n\n".join(described),
        "\n\nIMPORTANT: ALWAYS adhere to this exact format for tool use:\n"
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>tool_call_name<｜tool▁sep｜>tool_call_arguments"
        "<｜tool▁call▁end｜>{additional_tool_calls}<｜tool▁calls▁end｜>\n\n"
        "Where:\n"
        "- `tool_call_name` must be an exact match to one of the available tools\n"
        "- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema\n"
        "- For multiple tool calls, chain them directly without separators or spaces",
    )
