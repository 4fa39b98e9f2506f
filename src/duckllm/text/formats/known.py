"""The markup of calls that is known, one description a family.

Called by :mod:`duckllm.text.chat_format`, which takes the one that the model's own template writes. Sources:
the templates that the models are published with; docs/chat-formats.md names them.
"""

from __future__ import annotations

from dataclasses import replace

from duckllm.text.formats.markup import ParameterMarkup, ToolMarkup

HERMES = ToolMarkup(
    "hermes",
    call='<tool_call>\n{"name": "',
    name_end='", "arguments": ',
    call_end="}\n</tool_call>",
    before="\n",
    between="\n",
)

QWEN3_CODER = ToolMarkup(
    "qwen3-coder",
    call="<tool_call>\n<function=",
    name_end=">\n",
    call_end="\n</function>\n</tool_call>",
    parameter=ParameterMarkup("<parameter=", ">\n", ">\n", "\n</parameter>"),
    before="\n",
    between="\n",
)

GLM_4_5 = ToolMarkup(
    "glm-4.5",
    call="<tool_call>",
    name_end="\n",
    call_end="\n</tool_call>",
    parameter=ParameterMarkup(
        "<arg_key>", "</arg_key>\n<arg_value>", "</arg_key>\n<arg_value>", "</arg_value>"
    ),
    before="\n",
    between="\n",
)

GLM_4_7 = GLM_4_5.without_line_feeds("glm-4.7")

DEEPSEEK_V3 = ToolMarkup(
    "deepseek-v3",
    call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    name_end="\n```json\n",
    call_end="\n```<｜tool▁call▁end｜>",
    begin="<｜tool▁calls▁begin｜>",
    between="\n",
    end="<｜tool▁calls▁end｜>",
    ends_thinking=True,
)

DEEPSEEK_V3_1 = replace(
    DEEPSEEK_V3,
    name="deepseek-v3.1",
    call="<｜tool▁call▁begin｜>",
    name_end="<｜tool▁sep｜>",
    call_end="<｜tool▁call▁end｜>",
    between="",
)

DEEPSEEK_V3_2 = ToolMarkup(
    "deepseek-v3.2",
    call='<｜DSML｜invoke name="',
    name_end='">\n',
    call_end="\n</｜DSML｜invoke>",
    parameter=ParameterMarkup(
        '<｜DSML｜parameter name="', '" string="true">', '" string="false">', "</｜DSML｜parameter>"
    ),
    before="\n\n",
    begin="<｜DSML｜function_calls>\n",
    between="\n",
    end="\n</｜DSML｜function_calls>",
    ends_thinking=True,
)

KIMI_K2 = ToolMarkup(
    "kimi-k2",
    call="<|tool_call_begin|>",
    name_end="<|tool_call_argument_begin|>",
    call_end="<|tool_call_end|>",
    begin="<|tool_calls_section_begin|>",
    end="<|tool_calls_section_end|>",
    name_prefix="functions.",
    name_suffix=r":\d+",
    number=":{}",
    ends_thinking=True,
)

MISTRAL = ToolMarkup(
    "mistral",
    call='{"name": "',
    name_end='", "arguments": ',
    call_end="}",
    begin="[TOOL_CALLS] [",
    between=", ",
    end="]",
    ends_thinking=True,
)

MISTRAL_ARGS = ToolMarkup(
    "mistral-args", call="[TOOL_CALLS]", name_end="[ARGS]", call_end="", ends_thinking=True
)

# Where a template writes what several of these could have written, the first one is meant.
KNOWN = (
    HERMES,
    QWEN3_CODER,
    GLM_4_5,
    GLM_4_7,
    DEEPSEEK_V3,
    DEEPSEEK_V3_1,
    DEEPSEEK_V3_2,
    KIMI_K2,
    MISTRAL,
    MISTRAL_ARGS,
)
