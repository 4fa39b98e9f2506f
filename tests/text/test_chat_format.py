"""Conversations with tools and thinking as models read them, and the options that they go on with."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from duckllm.engine.request import Request
from duckllm.errors import CheckpointError, ConfigError, RequestError
from duckllm.sampling_params import SamplingParams, StructuredOutputsParams
from duckllm.text import Tokenizer
from duckllm.text.chat import ChatMessage, ChatOptions, Tool, ToolCall
from duckllm.text.chat_format import ChatFormat, chat_format
from duckllm.text.formats.known import DEEPSEEK_V3_2, HERMES
from duckllm.text.grammar import GrammarTable
from duckllm.text.messages import as_messages
from support.grammars import random_logits, run
from support.replies import Part, parse
from support.tokenizers import kimi_config, token_entry, trained_tokens, write_kimi

DATA = Path(__file__).parent / "formats"
HI = [ChatMessage("user", "hi")]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = Tool("get_weather", "The weather of a city.", SCHEMA)
SIGNATURE = {"name": "get_weather", "description": "The weather of a city.", "parameters": SCHEMA}
CALL = ToolCall("call_1", "get_weather", '{"city":"Köln"}')
CALLS = (CALL, ToolCall("call_2", "get_weather", '{"city": "Bonn"}'))
CONVERSATION = [
    ChatMessage("system", "Be brief."),
    ChatMessage("user", "Weather?"),
    ChatMessage("assistant", "I look.", reasoning_content="Hm.", tool_calls=CALLS),
    ChatMessage("tool", "dry", tool_call_id="call_2"),
    ChatMessage("tool", "rain", tool_call_id="call_1"),
]
CONTROLS = {
    "qwen3": (
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        ("<think>", "</think>", "<tool_call>", "</tool_call>"),
    ),
    "deepseek-v3.1": (
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
        (
            *("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),
            *(f"<｜tool▁{what}｜>" for what in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")),
        ),
    ),
    "deepseek-v3.2": (
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
        ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜"),
    ),
    "kimi-k2": (
        (
            *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
            *("<|tool_call_end|>", "<|tool_calls_section_end|>"),
        ),
        ("</think>",),
    ),
}
MakeFormat = Callable[[str], ChatFormat]


@pytest.fixture(scope="module")
def make_format(tmp_path_factory: pytest.TempPathFactory) -> MakeFormat:
    """Makes the format of a model with a template of the tests and that family's control tokens."""
    made: dict[str, ChatFormat] = {}

    def make(name: str) -> ChatFormat:
        if name not in made:
            special, plain = CONTROLS.get(name, ((), ()))
            tokens = trained_tokens()
            added = {
                token_id: entry
                for token_id, entry in kimi_config(len(tokens))["added_tokens_decoder"].items()
                if entry["content"] not in (*special, *plain)
            }
            for number, text in enumerate([*special, *plain], start=len(tokens) + 100):
                added[str(number)] = token_entry(text) | {"special": text in special}
            path = DATA / "templates" / f"{name}.jinja"
            template = path.read_text() if path.is_file() else None
            bos = {"bos_token": special[0]} if name.startswith("deepseek") else {}
            folder = tmp_path_factory.mktemp("format")
            write_kimi(folder, tokens, chat_template=template, added_tokens_decoder=added, **bos)
            config = {"model_type": "deepseek_v32" if name == "deepseek-v3.2" else "kimi_k2"}
            (folder / "config.json").write_text(json.dumps(config))
            made[name] = chat_format(Tokenizer(folder))
        return made[name]

    return make


@pytest.fixture(scope="module")
def demo(demo_checkpoint: Path) -> ChatFormat:
    return chat_format(Tokenizer(demo_checkpoint))


def decoded(format: ChatFormat, token_ids: tuple[int, ...]) -> str:
    return format._tokenizer.decode(token_ids, skip_special_tokens=False)


def text_of(format: ChatFormat, messages: list[ChatMessage], **options: Any) -> str:
    return decoded(format, format.prompt(messages, ChatOptions(**options)).token_ids)


def test_qwen3_with_tools(make_format: MakeFormat) -> None:
    text = text_of(make_format("qwen3"), CONVERSATION, tools=[WEATHER])
    tool = json.dumps({"type": "function", "function": SIGNATURE})
    assert text == (
        "<|im_start|>system\nBe brief.\n\n"
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n"
        f"<tools>\n{tool}\n</tools>\n\n"
        "For each function call, return a json object with function name and arguments within "
        "<tool_call></tool_call> XML tags:\n"
        '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\nWeather?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nHm.\n</think>\n\nI look.\n"
        # A call is what the model wrote, to the space.
        '<tool_call>\n{"name": "get_weather", "arguments": {"city":"Köln"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bonn"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nrain\n</tool_response>\n<tool_response>\ndry\n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\n"
    )


def test_deepseek_v32_writes_its_published_example(make_format: MakeFormat) -> None:
    example = json.loads((DATA / "deepseek_v32.json").read_text())
    tools = [Tool(**tool) for tool in example["tools"]]
    messages = as_messages(example["messages"])
    text = text_of(make_format("deepseek-v3.2"), messages, tools=tools, enable_thinking=True)
    expected = (DATA / "deepseek_v32.txt").read_text().removesuffix("\n")
    # Behind the example, which ends with a reply, another one begins.
    assert text == expected + "<｜Assistant｜><think>"


def test_deepseek_v32_in_little(make_format: MakeFormat) -> None:
    format = make_format("deepseek-v3.2")
    begin = "<｜begin▁of▁sentence｜>"
    assert text_of(format, HI) == begin + "<｜User｜>hi<｜Assistant｜></think>"
    turns = [*HI, ChatMessage("assistant", "Yes.", reasoning_content="Hm."), ChatMessage("user", "So?")]
    for options, last in (({}, "</think>"), ({"enable_thinking": True}, "<think>")):
        assert text_of(format, turns, **options) == (
            f"{begin}<｜User｜>hi<｜Assistant｜></think>Yes.<｜end▁of▁sentence｜><｜User｜>So?<｜Assistant｜>{last}"
        )
    system = [ChatMessage("system", "Be brief.")]
    assert text_of(format, system) == f"{begin}Be brief.<｜Assistant｜></think>"
    wanted = StructuredOutputsParams(json={"type": "object"})
    asked = "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
    asked += '{"type": "object"}'
    assert text_of(format, system + HI, response_format=wanted).startswith(
        f"{begin}Be brief.{asked}<｜User｜>"
    )
    with_tools = text_of(format, HI, tools=[WEATHER], response_format=wanted)
    assert with_tools.startswith(f"{begin}\n\n## Tools\n\n")
    assert f"\n<functions>\n{json.dumps(SIGNATURE)}\n</functions>\n{asked}<｜User｜>hi" in with_tools


def test_a_conversation_with_deepseek_v32_goes_on_behind_its_tokens(make_format: MakeFormat) -> None:
    tokenizer = make_format("deepseek-v3.2")._tokenizer
    turns = [("user", "hi"), ("assistant", "Yes."), ("user", "So?")]
    more = tokenizer.continue_chat_template([{"role": role, "content": text} for role, text in turns])
    assert more is not None
    text = tokenizer.decode(more, skip_special_tokens=False)
    assert text == "<｜end▁of▁sentence｜><｜User｜>So?<｜Assistant｜></think>"


def test_kimi_k2_shows_ids_as_the_model_writes_them(make_format: MakeFormat) -> None:
    later = [
        ChatMessage("assistant", "", tool_calls=(CALL,)),
        ChatMessage("tool", "snow", tool_call_id="call_1"),
    ]
    text = text_of(make_format("kimi-k2"), [*CONVERSATION, *later], tools=[WEATHER])
    begin, argument, end = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    assert text.endswith(
        "<|im_assistant|>assistant<|im_middle|><think>Hm.</think>I look.<|tool_calls_section_begin|>"
        f'{begin}functions.get_weather:0{argument}{{"city":"Köln"}}{end}'
        f'{begin}functions.get_weather:1{argument}{{"city": "Bonn"}}{end}<|tool_calls_section_end|><|im_end|>'
        "<|im_system|>get_weather<|im_middle|>## Return of functions.get_weather:0\nrain<|im_end|>"
        "<|im_system|>get_weather<|im_middle|>## Return of functions.get_weather:1\ndry<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think></think><|tool_calls_section_begin|>"
        f'{begin}functions.get_weather:2{argument}{{"city":"Köln"}}{end}<|tool_calls_section_end|><|im_end|>'
        "<|im_system|>get_weather<|im_middle|>## Return of functions.get_weather:2\nsnow<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|>"
    )


def test_mistral_has_ids_of_nine_letters(make_format: MakeFormat) -> None:
    text = text_of(make_format("mistral"), CONVERSATION[1:], tools=[WEATHER])
    calls = json.loads(text.partition("[TOOL_CALLS] ")[2].partition("[EOS]")[0])
    assert [call["arguments"] for call in calls] == [{"city": "Köln"}, {"city": "Bonn"}]
    results = [json.loads(part.partition("[/")[0]) for part in text.split("[TOOL_RESULTS] ")[1:]]
    assert [result["content"] for result in results] == ["rain", "dry"]
    assert [result["call_id"] for result in results] == [call["id"] for call in calls]
    assert len({call["id"] for call in calls}) == 2


def test_deepseek_v31_is_told_of_tools_as_its_model_card_says(make_format: MakeFormat) -> None:
    format = make_format("deepseek-v3.1")
    spelled = Tool("get_weather", "<｜tool▁sep｜>", SCHEMA)
    prompt = format.prompt(CONVERSATION[:2], ChatOptions(tools=[spelled]))
    assert decoded(format, prompt.token_ids) == (
        "<｜begin▁of▁sentence｜>Be brief.\n\n## Tools\nYou have access to the following tools:\n\n"
        f"### get_weather\nDescription: <｜tool▁sep｜>\n\nParameters: {json.dumps(SCHEMA)}\n\n"
        "IMPORTANT: ALWAYS adhere to this exact format for tool use:\n"
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>tool_call_name<｜tool▁sep｜>tool_call_arguments"
        "<｜tool▁call▁end｜>{additional_tool_calls}<｜tool▁calls▁end｜>\n\nWhere:\n"
        "- `tool_call_name` must be an exact match to one of the available tools\n"
        "- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema\n"
        "- For multiple tool calls, chain them directly without separators or spaces"
        "<｜User｜>Weather?<｜Assistant｜></think>"
    )
    # Our own words have control tokens; the description that spells one has none.
    [separator] = format._tokenizer.encode("<｜tool▁sep｜>")[1:]
    assert prompt.token_ids.count(separator) == 1


def test_a_model_whose_template_knows_no_tools_is_told_of_them(demo: ChatFormat) -> None:
    text = text_of(demo, [*CONVERSATION, ChatMessage("user", "Thanks!")], tools=[WEATHER])
    assert text == (
        "<|bos|><|system|>Be brief.\n\n"
        "# Tools\n\nYou may call these functions, each described by a JSON object:\n<tools>\n"
        f"{json.dumps(SIGNATURE)}\n</tools>\n\n"
        "To call a function, write this, with its name and its arguments as a JSON object, and nothing "
        "behind it; the result is then given to you:\n"
        '<tool_call>\n{"name": "NAME", "arguments": {"ARGUMENT": VALUE}}\n</tool_call>'
        "<|user|>Weather?<|assistant|>I look.\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city":"Köln"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bonn"}}\n</tool_call><|eos|>'
        "<|user|><tool_response>\nrain\n</tool_response>\n<tool_response>\ndry\n</tool_response>\n\nThanks!"
        "<|assistant|>"
    )


def test_turns_alternate_where_a_template_wants_that(make_format: MakeFormat) -> None:
    messages = [*CONVERSATION[1:], ChatMessage("user", "Thanks!")]
    text = text_of(make_format("mixtral"), messages, tools=[WEATHER])
    assert text.startswith("[BOS][INST] # Tools\n")
    assert "\n</tool_call>\n\nWeather? [/INST] I look.\n<tool_call>" in text
    assert text.endswith("[EOS][INST] <tool_response>\nrain\n</tool_response>\n"
                         "<tool_response>\ndry\n</tool_response>\n\nThanks! [/INST]")  # fmt: skip


@pytest.mark.parametrize("name", ["qwen3", "deepseek-v3.2", "kimi-k2", "demo"])
def test_a_turn_begins_with_the_prompt_and_the_reply_before_it(
    name: str, make_format: MakeFormat, demo: ChatFormat
) -> None:
    """So the KV cache has it: thinking, content and calls are written as the model wrote them."""
    format = demo if name == "demo" else make_format(name)
    thinks = format.reasoning is not None
    options = ChatOptions(tools=[WEATHER], enable_thinking=True if thinks else None)
    prompt = format.prompt(CONVERSATION[:2], options)
    reply = "I look." + format.markup.before
    reply += format.markup.write_all(
        [format.markup.write(c.name, c.arguments, n) for n, c in enumerate(CALLS)]
    )
    if format.reasoning is not None:
        marks = format.reasoning
        thought = f"{marks.after_begin}Hm.\n\nSo.{marks.before_end}{marks.end}{marks.after_end}"
        reply = ("" if prompt.begins_in_reasoning else marks.begin) + thought + reply
    parts = parse(format.parser(options, prompt.begins_in_reasoning), reply)
    said = {kind: text for kind, text, *_ in parts}
    calls = [ToolCall(f"call_{n}", *part[1:]) for n, part in enumerate(p for p in parts if p[0] == "call")]
    answer = ChatMessage(
        "assistant", said["content"], reasoning_content=said.get("reasoning"), tool_calls=tuple(calls)
    )
    result = ChatMessage("tool", "rain", tool_call_id="call_0")
    following = text_of(
        format, [*CONVERSATION[:2], answer, result], tools=[WEATHER], enable_thinking=options.enable_thinking
    )
    assert following.startswith(decoded(format, prompt.token_ids) + reply)


@pytest.mark.parametrize("name", ["qwen3", "deepseek-v3.2", "kimi-k2"])
def test_control_tokens_come_from_the_template_alone(name: str, make_format: MakeFormat) -> None:
    format = make_format(name)
    spelled = "".join(text for texts in CONTROLS[name] for text in texts)

    def prompt(text: str) -> tuple[int, ...]:
        tool = Tool(
            "get_weather", f"d{text}", {"type": "object", "properties": {f"p{text}": {"enum": [text]}}}
        )
        call = ToolCall("call_1", "get_weather", json.dumps({f"k{text}": [f"v{text}"], "city": text}))
        messages = [
            ChatMessage("system", f"a{text}"),
            ChatMessage("user", f"b{text}"),
            ChatMessage("assistant", "c", reasoning_content=f"r{text}", tool_calls=(call,)),
            ChatMessage("tool", f"t{text}", tool_call_id="call_1"),
        ]
        return format.prompt(messages, ChatOptions(tools=[tool], enable_thinking=True)).token_ids

    controls = format._tokenizer.control_token_ids
    ids = prompt(spelled)
    assert [each for each in ids if each in controls] == [each for each in prompt("zqz") if each in controls]
    assert decoded(format, ids) == decoded(format, prompt("zqz")).replace("zqz", spelled)


def test_a_spelled_control_token_in_an_option_is_text(tmp_path: Path) -> None:
    template = "{{ bos_token }}{{ note }}{% for m in messages %}<|im_user|>{{ m.content }}{% endfor %}"
    format = chat_format(Tokenizer(write_kimi(tmp_path, trained_tokens(), chat_template=template)))
    tokenizer = format._tokenizer
    ids = format.prompt(HI, ChatOptions(template_kwargs={"note": "a<|im_user|>[EOS]"})).token_ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == "[BOS]a<|im_user|>[EOS]<|im_user|>hi"
    assert [each for each in ids if each in tokenizer.control_token_ids] == tokenizer.encode(
        "[BOS]<|im_user|>"
    )


def test_what_a_reply_begins_with(make_format: MakeFormat) -> None:
    qwen, v32 = make_format("qwen3"), make_format("deepseek-v3.2")
    assert not qwen.prompt(HI).begins_in_reasoning
    assert text_of(qwen, HI, enable_thinking=False).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not v32.prompt(HI).begins_in_reasoning
    assert v32.prompt(HI, ChatOptions(enable_thinking=True)).begins_in_reasoning
    # A message that ends so is no thinking.
    spelled = [ChatMessage("user", "hi"), ChatMessage("system", "<think>")]
    assert not v32.prompt(spelled).begins_in_reasoning


def test_tool_choice_none_tells_of_no_tools_and_reads_no_calls(demo: ChatFormat) -> None:
    assert text_of(demo, HI, tools=[WEATHER], tool_choice="none") == text_of(demo, HI)
    text = HERMES.write(WEATHER.name, {})
    assert parse(demo.parser(ChatOptions(tools=[WEATHER], tool_choice="none")), [text]) == [("content", text)]
    assert parse(demo.parser(ChatOptions()), [text]) == [("content", text)]
    assert parse(demo.parser(ChatOptions(tools=[WEATHER])), [text]) == [("call", "get_weather", "{}")]


# Field, model, options: what is refused, and what the message says is expected.
REFUSED = {
    "enable_thinking": ("demo", {"enable_thinking": True}, "nothing else: this model never thinks"),
    "enable_thinking ": ("kimi-k2", {"enable_thinking": False}, "nothing else: this model always thinks"),
    "reasoning_effort": ("demo", {"reasoning_effort": "high"}, "'none' or 'medium'"),
    "reasoning_effort ": ("kimi-k2", {"reasoning_effort": "none"}, "nothing else: this model always thinks"),
    "chat_template_kwargs.depth": ("qwen3", {"template_kwargs": {"depth": 3}}, "template: enable_thinking"),
    "chat_template_kwargs.messages": ("demo", {"template_kwargs": {"messages": []}}, "template: none"),
    "chat_template_kwargs.response_format": (
        "deepseek-v3.2",
        {"template_kwargs": {"response_format": {}}},
        "",
    ),
    "chat_template_kwargs.thinking": ("demo", {"template_kwargs": {"thinking": True}}, "never thinks"),
    "chat_template_kwargs.enable_thinking": (
        "qwen3",
        {"template_kwargs": {"enable_thinking": "no"}},
        "true or",
    ),
    "chat_template_kwargs.enable_thinking ": (
        "qwen3",
        {"template_kwargs": {"enable_thinking": False}, "enable_thinking": True},
        "the same as enable_thinking",
    ),
    "reasoning_effort  ": (
        "qwen3",
        {"reasoning_effort": "none", "enable_thinking": True},
        "the same as enable",
    ),
}


@pytest.mark.parametrize("field", REFUSED)
def test_an_option_that_the_template_does_not_know_is_refused(
    field: str, make_format: MakeFormat, demo: ChatFormat
) -> None:
    name, options, expected = REFUSED[field]
    format = demo if name == "demo" else make_format(name)
    with pytest.raises(ConfigError, match=rf"^{field.strip()}: got .*{expected}"):
        format.prompt(HI, ChatOptions(**options))


def test_options_that_say_what_is_so_anyway_change_nothing(make_format: MakeFormat, demo: ChatFormat) -> None:
    for options in ({"enable_thinking": False}, {"reasoning_effort": "none"}, {"reasoning_effort": "medium"}):
        assert text_of(demo, HI, **options) == text_of(demo, HI)
    kimi = make_format("kimi-k2")
    assert text_of(kimi, HI, enable_thinking=True) == text_of(kimi, HI)


def test_every_name_of_the_switch_turns_thinking_off_and_on(make_format: MakeFormat) -> None:
    qwen, v31 = make_format("qwen3"), make_format("deepseek-v3.1")
    off = text_of(qwen, HI, enable_thinking=False)
    assert off == text_of(qwen, HI, reasoning_effort="none")
    assert off == text_of(qwen, HI, template_kwargs={"enable_thinking": False})
    assert off == text_of(qwen, HI, template_kwargs={"thinking": False})
    on = text_of(v31, HI, enable_thinking=True)
    assert on.endswith("<think>")
    assert on == text_of(v31, HI, template_kwargs={"thinking": True})


def test_a_template_that_knows_efforts_is_given_them(tmp_path: Path) -> None:
    template = "{{ reasoning_effort | default('-') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    format = chat_format(Tokenizer(write_kimi(tmp_path, trained_tokens(), chat_template=template)))
    assert [text_of(format, HI, reasoning_effort=each) for each in (None, "none", "high")] == [
        "-hi",
        "nonehi",
        "highhi",
    ]
    assert text_of(format, HI, template_kwargs={"reasoning_effort": "low"}) == "lowhi"
    with pytest.raises(ConfigError, match="reasoning_effort: got 'high', expected the same as in chat_"):
        text_of(format, HI, template_kwargs={"reasoning_effort": "low"}, reasoning_effort="high")


def test_marks_that_are_special_tokens_stay_in_the_text(make_format: MakeFormat, demo: ChatFormat) -> None:
    params = SamplingParams(temperature=0.5)
    tools = ChatOptions(tools=[WEATHER])
    assert demo.sampling(params, tools) == params
    assert make_format("qwen3").sampling(params, tools) == params
    kimi = make_format("kimi-k2")
    assert kimi.sampling(params, ChatOptions()) == params
    assert kimi.sampling(params, tools) == SamplingParams(temperature=0.5, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages: got none"),
        (
            [ChatMessage("tool", "x", tool_call_id="a")],
            r"messages\[0\].tool_call_id: got 'a', expected no result",
        ),
        (
            [*CONVERSATION, ChatMessage("tool", "x", tool_call_id="call_1")],
            r"messages\[5\].tool_call_id: got 'call_1'",
        ),
        (
            [*CONVERSATION[:3], ChatMessage("tool", "x", tool_call_id="a")],
            r"messages\[3\].tool_call_id: got 'a', expected 'call_1', 'call_2'",
        ),
        (
            [*CONVERSATION[:3], ChatMessage("user", "x"), *CONVERSATION[3:]],
            r"messages\[4\].tool_call_id: got 'call_2', expected no result",
        ),
    ],
)
def test_a_result_answers_a_call(messages: list[ChatMessage], message: str, demo: ChatFormat) -> None:
    with pytest.raises(RequestError, match=message):
        demo.prompt(messages)


def test_results_without_ids_are_those_of_the_calls_in_order(make_format: MakeFormat) -> None:
    messages = [*CONVERSATION[:3], ChatMessage("tool", "rain"), ChatMessage("tool", "dry")]
    assert text_of(make_format("qwen3"), messages) == text_of(make_format("qwen3"), CONVERSATION)


@pytest.mark.parametrize("arguments", ["{", "[]", "1", '{"a": 1} x'])
def test_arguments_that_a_template_must_take_apart_are_an_object(
    arguments: str, make_format: MakeFormat
) -> None:
    messages = [*HI, ChatMessage("assistant", tool_calls=(ToolCall("1", "look", arguments),))]
    with pytest.raises(RequestError, match="expected the text of a JSON object"):
        make_format("mistral").prompt(messages)
    with pytest.raises(RequestError, match="expected the text of a JSON object"):
        make_format("deepseek-v3.2").prompt(messages)
    # Others are given to the model again as it wrote them.
    assert arguments in text_of(make_format("qwen3"), messages)


def test_no_arguments_are_an_empty_object(make_format: MakeFormat) -> None:
    messages = [*HI, ChatMessage("assistant", tool_calls=(ToolCall("1", "look", ""),))]
    assert '{"name": "look", "arguments": {}}' in text_of(make_format("qwen3"), messages)


LOOPS = {
    "steps": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "calls": "{% for i in range(3) %}{{ range(100000) | map('string') | join | length }}{% endfor %}",
}


@pytest.mark.parametrize("loop", LOOPS)
def test_a_template_that_does_not_end_is_refused(
    tmp_path: Path, loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("duckllm.text.chat_template._MAX_STEPS", 20_000)
    format = chat_format(Tokenizer(write_kimi(tmp_path, trained_tokens(), chat_template=LOOPS[loop])))
    with pytest.raises(CheckpointError, match=r"one that takes more than 40000 steps .* comes to an end"):
        format.prompt(HI)


def test_a_template_that_takes_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("duckllm.text.chat_template._MAX_S", -1.0)
    write_kimi(tmp_path, trained_tokens())
    with pytest.raises(CheckpointError, match="expected one that comes to an end"):
        chat_format(Tokenizer(tmp_path)).prompt(HI)


def test_long_conversations_are_within_the_limit(make_format: MakeFormat) -> None:
    turns = [ChatMessage("user", "a"), ChatMessage("assistant", "b")] * 300
    assert text_of(make_format("qwen3"), [*turns, *HI]).count("<|im_end|>") == 601


GOOD = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"function": {"name": "look", "arguments": {"a": 1}}}],
}


def test_messages_as_dictionaries() -> None:
    call = {"id": "x", "type": "function", "function": {"name": "look", "arguments": '{"a":1}'}}
    made = as_messages(
        [
            {"role": "user", "content": "hi", "name": "Ada"},
            GOOD,
            {"role": "tool", "content": "r", "tool_call_id": "call_1_0"},
            {"role": "assistant", "content": "c", "reasoning_content": "t", "tool_calls": [call]},
        ]
    )
    assert made == [
        ChatMessage("user", "hi", name="Ada"),
        ChatMessage("assistant", tool_calls=(ToolCall("call_1_0", "look", '{"a": 1}'),)),
        ChatMessage("tool", "r", tool_call_id="call_1_0"),
        ChatMessage("assistant", "c", reasoning_content="t", tool_calls=(ToolCall("x", "look", '{"a":1}'),)),
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"role": "robot"},
            r"messages\[0\].role: got 'robot', expected one of system, user, assistant, tool",
        ),
        ({"content": 1}, r"messages\[0\].content: got int, expected text"),
        ({"reasoning_content": []}, r"messages\[0\].reasoning_content: got list, expected text"),
        ({"tool_calls": "look"}, r"messages\[0\].tool_calls: got str, expected a list of calls"),
        ({"tool_calls": [{}]}, r"messages\[0\].tool_calls\[0\].function: got nothing"),
        (
            {"tool_calls": [{"function": {"name": 1}}]},
            r"messages\[0\].tool_calls\[0\].function.name: got int",
        ),
        (
            {"tool_calls": [{"function": {"name": "look", "arguments": 1}}]},
            r"messages\[0\].tool_calls\[0\].function.arguments: got 1, expected the text of a JSON object",
        ),
        ({"audio": {}}, r"messages\[0\]: got 'audio', expected role, content"),
    ],
)
def test_malformed_messages_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        as_messages([GOOD | change])


def test_deepseek_v32_markup_is_what_its_prompts_have(make_format: MakeFormat) -> None:
    assert make_format("deepseek-v3.2").markup is DEEPSEEK_V3_2


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


def test_calls_that_must_be_and_content_of_a_form(make_format: MakeFormat, demo: ChatFormat) -> None:
    v32 = make_format("deepseek-v3.2")
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


def test_plain_replies_are_sampled_as_ever(make_format: MakeFormat, demo: ChatFormat) -> None:
    for format in (make_format("deepseek-v3.2"), demo):
        for options in (ChatOptions(), ChatOptions([WEATHER]), ChatOptions([COLOR], "none")):
            assert format.sampling(SamplingParams(seed=3), options) == SamplingParams(seed=3)
