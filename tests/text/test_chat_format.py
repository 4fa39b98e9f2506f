"""Conversations with tools and thinking as models read them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from duckllm import SamplingParams, StructuredOutputsParams
from duckllm.engine.request import Request
from duckllm.errors import ConfigError
from duckllm.text import Tokenizer
from duckllm.text.chat import ChatMessage, ChatOptions, Tool, ToolCall
from duckllm.text.chat_format import ChatFormat, chat_format
from duckllm.text.formats.known import HERMES
from duckllm.text.grammar import GrammarTable
from duckllm.text.messages import as_messages
from support.grammars import random_logits, run
from support.replies import Part, parse
from support.tokenizers import kimi_config, token_entry, trained_tokens, write_kimi

DATA = Path(__file__).parent / "formats"
HI = [ChatMessage("user", "hi")]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = Tool("get_weather", "The weather of a city.", SCHEMA)
CALL = ToolCall("call_1", "get_weather", '{"city": "Köln"}')


def format_of(
    folder: Path,
    template: str | None,
    special: tuple[str, ...] = (),
    plain: tuple[str, ...] = (),
    **config: str,
) -> ChatFormat:
    """The format of a made-up model with this template and these control tokens, special or not."""
    tokens = trained_tokens()
    added = {
        token_id: entry
        for token_id, entry in kimi_config(len(tokens))["added_tokens_decoder"].items()
        if entry["content"] not in plain
    }
    for number, text in enumerate([*special, *plain], start=len(tokens) + 100):
        added[str(number)] = token_entry(text) | {"special": text in special}
    bos = {"bos_token": special[0]} if special else {}
    write_kimi(folder, tokens, chat_template=template, added_tokens_decoder=added, **bos)
    (folder / "config.json").write_text(json.dumps({"model_type": "kimi_k2"} | config))
    return chat_format(Tokenizer(folder))


def text_of(format: ChatFormat, messages: list[ChatMessage], **options: Any) -> str:
    prompt = format.prompt(messages, ChatOptions(**options))
    return format._tokenizer.decode(prompt.token_ids, skip_special_tokens=False)


@pytest.fixture(scope="module")
def demo(demo_checkpoint: Path) -> ChatFormat:
    return chat_format(Tokenizer(demo_checkpoint))


@pytest.fixture(scope="module")
def v32(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    special = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")
    plain = ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜")
    return format_of(tmp_path_factory.mktemp("v32"), None, special, plain, model_type="deepseek_v32")


def test_deepseek_v32_writes_its_published_example(v32: ChatFormat) -> None:
    given = json.loads((DATA / "deepseek_v32.json").read_text())
    tools = [Tool(**tool) for tool in given["tools"]]
    text = text_of(v32, as_messages(given["messages"]), tools=tools, enable_thinking=True)
    expected = (DATA / "deepseek_v32.txt").read_text().removesuffix("\n")
    # Behind the example, which ends with a reply, another one begins.
    assert text == expected + "<｜Assistant｜><think>"


def test_a_model_whose_template_knows_no_tools_is_told_of_them(demo: ChatFormat) -> None:
    assert demo.markup is HERMES
    messages = [
        ChatMessage("system", "Be brief."),
        ChatMessage("user", "Weather?"),
        ChatMessage("assistant", "I look.", tool_calls=(CALL,)),
        ChatMessage("tool", "rain", tool_call_id="call_1"),
        ChatMessage("user", "Thanks!"),
    ]
    text = text_of(demo, messages, tools=[WEATHER])
    signature = json.dumps({"name": WEATHER.name, "description": WEATHER.description, "parameters": SCHEMA})
    assert text == (
        "<|bos|><|system|>Be brief.\n\n"
        "# Tools\n\nYou may call these functions, each described by a JSON object:\n<tools>\n"
        f"{signature}\n</tools>\n\n"
        "To call a function, write this, with its name and its arguments as a JSON object, and nothing "
        "behind it; the result is then given to you:\n"
        '<tool_call>\n{"name": "NAME", "arguments": {"ARGUMENT": VALUE}}\n</tool_call>'
        "<|user|>Weather?"
        "<|assistant|>I look.\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call><|eos|>'
        "<|user|><tool_response>\nrain\n</tool_response>\n\nThanks!<|assistant|>"
    )
    parser = demo.parser(ChatOptions(tools=[WEATHER]))
    assert parse(parser, ["Hm ", HERMES.write(WEATHER.name, {"city": "Köln"})]) == [
        ("content", "Hm "),
        ("call", "get_weather", '{"city": "Köln"}'),
    ]


def test_tool_choice_none_tells_of_no_tools_and_reads_no_calls(demo: ChatFormat) -> None:
    assert text_of(demo, HI, tools=[WEATHER], tool_choice="none") == text_of(demo, HI)
    text = HERMES.write(WEATHER.name, {})
    assert parse(demo.parser(ChatOptions(tools=[WEATHER], tool_choice="none")), [text]) == [("content", text)]


COLOR = Tool(
    "color", "", {"type": "object", "properties": {"hue": {"enum": ["red", "blue"]}}, "required": ["hue"]}
)


def replies(format: ChatFormat, options: ChatOptions, **params: Any) -> list[list[Part]]:
    """Replies of random logits, taken apart, those that are whole."""
    tokenizer = format._tokenizer
    prompt = format.prompt(HI, options)
    bias = dict.fromkeys((*tokenizer.eos_token_ids, *tokenizer.control_token_ids), 3.0)
    given = SamplingParams(temperature=0.0, max_tokens=300, logit_bias=bias, **params)
    sampling = format.sampling(given, options, prompt.begins_in_reasoning)
    table = GrammarTable.of(tokenizer, tokenizer.max_token_id + 1, frozenset(tokenizer.eos_token_ids))
    found = []
    for seed in range(6):
        request = Request(
            "0",
            prompt.token_ids,
            sampling,
            vocab_size=table.end,
            max_model_len=4000,
            eos_token_ids=frozenset(tokenizer.eos_token_ids),
            tokenizer=tokenizer,
            grammar_table=table,
        )
        reply = run(request, random_logits(table.end, seed)).completion()
        if reply.finish_reason == "stop":
            found.append(parse(format.parser(options, prompt.begins_in_reasoning), [reply.text]))
    return found


def test_calls_that_must_be_and_content_of_a_form(v32: ChatFormat, demo: ChatFormat) -> None:
    for format, thinks in ((v32, True), (v32, False), (demo, None)):
        kinds = ["reasoning"] if thinks else []
        options = ChatOptions([COLOR], "required", parallel_tool_calls=False, enable_thinking=thinks)
        found = replies(format, options)
        assert len(found) >= 3
        for parts in found:
            assert [kind for kind, *_ in parts] == [*kinds, "call"]
            _, name, arguments = parts[-1]
            assert name == "color"
            assert json.loads(arguments)["hue"] in ("red", "blue")
        form = StructuredOutputsParams(regex="[0-9]{3}")
        for asked, given in ((form, None), (None, form)):
            options = ChatOptions(response_format=asked, enable_thinking=thinks)
            found = replies(format, options, structured_outputs=given)
            assert len(found) >= 3
            for parts in found:
                assert [kind for kind, *_ in parts] == [*kinds, "content"]
                assert re.fullmatch("[0-9]{3}", parts[-1][1])
    with pytest.raises(ConfigError, match="response_format: got another one beside it"):
        replies(demo, ChatOptions(response_format=form), structured_outputs=form)


def test_plain_replies_are_sampled_as_ever(v32: ChatFormat, demo: ChatFormat) -> None:
    for format in (v32, demo):
        for options in (ChatOptions(), ChatOptions([WEATHER]), ChatOptions([COLOR], "none")):
            assert format.sampling(SamplingParams(seed=3), options) == SamplingParams(seed=3)
