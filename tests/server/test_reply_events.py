"""Replies as the events of the Anthropic and the Responses API."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import anthropic.types
import openai.types.responses
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from duckllm.outputs import CachedTokens, RequestMetrics
from duckllm.server.anthropic_events import MessageEvents, fold
from duckllm.server.chat_service import ChatOutput
from duckllm.server.opaque import from_opaque
from duckllm.server.responses_events import ResponseEvents
from duckllm.text.chat import ContentDelta, ReasoningDelta, ReplyDelta, ToolCallDelta

MESSAGE_EVENT: TypeAdapter[Any] = TypeAdapter(anthropic.types.RawMessageStreamEvent)
RESPONSE_EVENT: TypeAdapter[Any] = TypeAdapter(openai.types.responses.ResponseStreamEvent)

REPLY = [
    ReasoningDelta("hm "),
    ReasoningDelta("so"),
    ContentDelta("I "),
    ContentDelta("read"),
    ToolCallDelta(0, "read", ""),
    ToolCallDelta(0, None, '{"path"'),
    ToolCallDelta(0, None, ': "a"}'),
    ToolCallDelta(1, "list", "{}"),
]


def outputs(deltas: Sequence[ReplyDelta], finish_reason: str = "stop", **fields: Any) -> list[ChatOutput]:
    """One output a delta, of one token each, and one that ends the reply."""
    found = []
    for number, each in enumerate([*((delta,) for delta in deltas), ()], start=1):
        metrics = RequestMetrics(20, number, 0.1, None, cached_tokens=CachedTokens(16))
        found.append(ChatOutput(0, each, (number,), None, None, None, metrics, min(number, 2)))
    last = found[-1]
    values = {"finish_reason": finish_reason, "stop_reason": None, **fields}
    return [*found[:-1], ChatOutput(0, last.deltas, last.token_ids, None, metrics=last.metrics, **values)]


def message_events(replies: Sequence[ChatOutput], **options: Any) -> list[dict[str, Any]]:
    ids = (f"toolu_{number}" for number in itertools.count())
    options = {"hide_thinking": False, "answers_diagnostics": False, "max_tokens": 100, **options}
    events = MessageEvents("msg_1", "m", 20, new_tool_id=lambda: next(ids), **options)
    return [*events.begin(), *(event for output in replies for event in events.push(output))]


def response_events(replies: Sequence[ChatOutput], **options: Any) -> list[dict[str, Any]]:
    ids = itertools.count()
    options = {"namespaces": {}, "shows_summary": False, "keeps_reasoning": False, **options}
    asked = {
        "id": "resp_1", "object": "response", "created_at": 1, "model": "m", "tools": [],
        "tool_choice": "auto", "parallel_tool_calls": True,
    }  # fmt: skip
    events = ResponseEvents(asked, lambda prefix: f"{prefix}{next(ids)}", **options)
    return [*events.begin(), *(event for output in replies for event in events.push(output, []))]


def shown(events: Sequence[dict[str, Any]]) -> list[Any]:
    """Each event of a message in short."""
    short = []
    for event in events:
        rest = event.get("content_block") or event.get("delta") or {}
        what = [value for name, value in rest.items() if name in ("thinking", "text", "partial_json", "name")]
        short.append((event["type"], event.get("index"), rest.get("type"), *what))
    return short


def test_a_message_has_the_events_of_the_official_api_in_their_order() -> None:
    assert shown(message_events(outputs(REPLY, "tool_calls"))) == [
        ("message_start", None, None),
        ("ping", None, None),
        ("content_block_start", 0, "thinking", ""),
        ("content_block_delta", 0, "thinking_delta", "hm "),
        ("content_block_delta", 0, "thinking_delta", "so"),
        ("content_block_delta", 0, "signature_delta"),
        ("content_block_stop", 0, None),
        ("content_block_start", 1, "text", ""),
        ("content_block_delta", 1, "text_delta", "I "),
        ("content_block_delta", 1, "text_delta", "read"),
        ("content_block_stop", 1, None),
        ("content_block_start", 2, "tool_use", "read"),
        ("content_block_delta", 2, "input_json_delta", '{"path"'),
        ("content_block_delta", 2, "input_json_delta", ': "a"}'),
        ("content_block_stop", 2, None),
        ("content_block_start", 3, "tool_use", "list"),
        ("content_block_delta", 3, "input_json_delta", "{}"),
        ("content_block_stop", 3, None),
        ("message_delta", None, None),
        ("message_stop", None, None),
    ]


def test_a_message_counts_what_was_cached_apart() -> None:
    events = message_events(outputs([ContentDelta("a")], num_reasoning_tokens=1))
    assert events[0]["message"]["usage"]["input_tokens"] == 20
    message = fold(events)
    assert message["usage"] == {
        "input_tokens": 4,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 16,
        "output_tokens": 2,
        "output_tokens_details": {"thinking_tokens": 1},
    }


@pytest.mark.parametrize(
    ("finish_reason", "stop_reason", "max_tokens", "expected"),
    [
        ("stop", None, 9, ("end_turn", None)),
        ("stop", "END", 9, ("stop_sequence", "END")),
        ("tool_calls", None, 9, ("tool_use", None)),
        ("length", None, 2, ("max_tokens", None)),
        ("length", None, 3, ("model_context_window_exceeded", None)),
    ],
)
def test_why_a_message_ended(finish_reason: str, stop_reason: Any, max_tokens: int, expected: Any) -> None:
    replies = outputs([ContentDelta("a")], finish_reason, stop_reason=stop_reason)
    message = fold(message_events(replies, max_tokens=max_tokens))
    assert (message["stop_reason"], message["stop_sequence"]) == expected


def test_thinking_that_is_hidden_is_in_the_signature_alone() -> None:
    events = message_events(outputs(REPLY), hide_thinking=True)
    [block] = [block for block in fold(events)["content"] if block["type"] == "thinking"]
    assert block["thinking"] == ""
    assert from_opaque(block["signature"]) == "hm so"
    assert "thinking_delta" not in [event[2] for event in shown(events)]


def test_a_call_that_was_cut_has_the_arguments_that_are_there() -> None:
    cut = [ToolCallDelta(0, "read", '{"path": "a", "mode": "r'), ToolCallDelta(1, "list", "")]
    blocks = fold(message_events(outputs(cut, "length")))["content"]
    assert [block["input"] for block in blocks] == [{"path": "a"}, {}]


deltas = st.lists(
    st.one_of(
        st.builds(ReasoningDelta, st.text(max_size=3)),
        st.builds(ContentDelta, st.text(max_size=3)),
    ),
    max_size=8,
)


def test_a_message_answers_diagnostics_where_they_are_asked_for() -> None:
    message = fold(message_events(outputs([]), answers_diagnostics=True))
    assert message["diagnostics"] == {"cache_miss_reason": {"type": "unavailable"}}
    assert "diagnostics" not in fold(message_events(outputs([])))


@settings(deadline=None, max_examples=50)
@given(deltas, st.booleans(), st.booleans())
def test_events_are_the_official_packages_and_make_the_same_reply(
    texts: list[ReplyDelta], is_first: bool, with_call: bool
) -> None:
    calls = REPLY[4:] if with_call else []
    reply = [*calls, *texts] if is_first else [*texts, *calls]
    events = message_events(outputs(reply))
    snapshot, buffers = None, dict[int, bytes]()
    for event in events:
        if event["type"] != "ping":
            known = MESSAGE_EVENT.validate_python(event)
            snapshot = accumulate_event(event=known, json_bufs=buffers, current_snapshot=snapshot)
    assert snapshot is not None
    official, own = snapshot.model_dump(exclude_none=True), anthropic.types.Message(**fold(events))
    assert official == own.model_dump(exclude_none=True)
    thought = "".join(block.thinking for block in own.content if block.type == "thinking")
    assert thought == "".join(delta.text for delta in texts if isinstance(delta, ReasoningDelta))


def kinds(events: Sequence[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


TEXT = ["output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done"]  # fmt: skip
CALL = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
        "output_item.done"]  # fmt: skip


@pytest.mark.parametrize(
    ("shows_summary", "part", "text"),
    [
        (False, "content_part", "reasoning_text"),
        (True, "reasoning_summary_part", "reasoning_summary_text"),
    ],
)
def test_a_response_has_the_events_of_the_official_api_in_their_order(
    shows_summary: bool, part: str, text: str
) -> None:
    events = response_events(outputs(REPLY), shows_summary=shows_summary, keeps_reasoning=True)
    reasoning = [f"{part}.added", f"{text}.delta", f"{text}.delta", f"{text}.done", f"{part}.done"]
    thinking = ["output_item.added", *reasoning, "output_item.done"]
    two_deltas = [CALL[0], CALL[1], *CALL[1:]]
    assert kinds(events) == ["created", "in_progress", *thinking, *TEXT, *two_deltas, *CALL, "completed"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        RESPONSE_EVENT.validate_python(event)
    whole = events[-1]["response"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert whole["output"] == done
    first, second, third, fourth = whole["output"]
    assert first["summary" if shows_summary else "content"][0]["text"] == "hm so"
    assert from_opaque(first["encrypted_content"]) == "hm so"
    assert second["content"][0]["text"] == "I read"
    assert (third["name"], third["arguments"]) == ("read", '{"path": "a"}')
    assert (fourth["name"], fourth["arguments"]) == ("list", "{}")
    assert {item["status"] for item in done} == {"completed"}
    assert whole["usage"] == {
        "input_tokens": 20,
        "input_tokens_details": {"cached_tokens": 16, "cache_write_tokens": 0},
        "output_tokens": 9,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 29,
    }


def test_a_response_that_was_cut_says_so() -> None:
    events = response_events(outputs([ContentDelta("a")], "length"))
    whole = events[-1]["response"]
    assert events[-1]["type"] == "response.incomplete"
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert whole["output"][0]["status"] == "incomplete"


def test_a_response_that_failed_keeps_what_was_said() -> None:
    events = ResponseEvents({}, str, namespaces={}, shows_summary=False, keeps_reasoning=False)
    events.push(outputs([ContentDelta("a")])[0], [])
    last = events.fail("server_error", "why")[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "why"}
    assert last["response"]["output"][0]["content"][0]["text"] == "a"


def test_functions_of_a_namespace_are_called_by_it() -> None:
    names = {"mcp__files__list": ("mcp__files", "list")}
    events = response_events(outputs([ToolCallDelta(0, "mcp__files__list", "{}")]), namespaces=names)
    [call] = events[-1]["response"]["output"]
    assert (call["namespace"], call["name"]) == ("mcp__files", "list")


def test_log_probabilities_go_with_the_text_of_their_tokens() -> None:
    events = ResponseEvents({}, str, namespaces={}, shows_summary=False, keeps_reasoning=False)
    first, second, end = outputs([ContentDelta("a"), ContentDelta("b")])
    part, *others = [{"token": name} for name in ("part", "a", "b", "end")]
    told = events.push(ChatOutput(0, (), (7,), None, None, None, first.metrics), [part])
    assert told == []
    told += events.push(first, others[:1]) + events.push(second, others[1:2]) + events.push(end, others[2:])
    added = [event["logprobs"] for event in told if event["type"] == "response.output_text.delta"]
    assert added == [[part, others[0]], [others[1]]]
    [whole] = [event["logprobs"] for event in told if event["type"] == "response.output_text.done"]
    assert whole == [part, *others[:2]]
