"""A session as Claude Code holds it: its headers, its blocks, many tools, results, side requests."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from server_harness import ServerProcess

HEADERS = {
    "authorization": "Bearer none",
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
    "x-app": "cli",
    "user-agent": "claude-cli/2.1.200 (external, cli)",
}
CACHED = {"type": "ephemeral"}
SYSTEM = [
    {"type": "text", "text": "You are a coding agent on the command line.", "cache_control": CACHED},
    {
        "type": "text",
        "text": "\n".join(
            f"Rule {number}: answer as briefly as the question allows." for number in range(40)
        ),
        "cache_control": {**CACHED, "ttl": "1h", "scope": "global"},
    },
]
PATHS = ["/duck.txt", "/swan.txt"]
DRAFT = "http://json-schema.org/draft-07/schema#"


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": sorted(properties)}
    return {
        "name": name,
        "description": f"{name} does what its name says.",
        "input_schema": {
            **schema,
            "additionalProperties": False,
            "$schema": "http://json-schema.org/draft-07/schema#",
        },
        "eager_input_streaming": True,
    }


TOOLS = [
    tool("Read", file_path={"enum": PATHS}),
    *(
        tool(name, text={"type": "string"})
        for name in ("Bash", "Glob", "Grep", "Edit", "Write", "Task", "TodoWrite", "WebFetch")
    ),
    {**tool("NotebookEdit", cell={"type": "integer"}), "cache_control": CACHED},
]
SESSION = {
    "model": "demo",
    "max_tokens": 32000,
    "system": SYSTEM,
    "tools": TOOLS,
    "metadata": {"user_id": "user_0_account__session_0"},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "stream": True,
}
QUESTION = {
    "role": "user",
    "content": [
        {"type": "text", "text": "<system-reminder>Be kind.</system-reminder>"},
        {"type": "text", "text": "What is in the file about ducks?", "cache_control": CACHED},
    ],
}


def text_of(**limits: int) -> dict[str, Any]:
    """Fields that make the model, which knows no such prompts, say something."""
    schema = {"type": "object", "properties": {"text": {"type": "string", **limits}}, "required": ["text"]}
    form = {"type": "json_schema", "schema": {**schema, "additionalProperties": False}}
    return {"output_config": {"effort": "high", "format": form}, "tool_choice": {"type": "none"}}


def post(server: ServerProcess, path: str = "/v1/messages", **body: Any) -> httpx.Response:
    return server.http.post(path, params={"beta": "true"}, headers=HEADERS, json=body)


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, each named by its type."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in response.text.strip().split("\n\n"):
        if block.startswith(":"):
            continue  # a ping while nothing came
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the events make; fails where one stands where a client does not expect it."""
    first, *rest, delta, stop = [event for event in events if event["type"] != "ping"]
    assert [first["type"], delta["type"], stop["type"]] == ["message_start", "message_delta", "message_stop"]
    assert first["message"]["usage"]["input_tokens"] > 0
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in rest:
        assert event["index"] == len(blocks) - is_open
        if event["type"] == "content_block_start":
            assert not is_open
            blocks.append({**event["content_block"], "json": ""})
            is_open = True
        elif event["type"] == "content_block_stop":
            is_open = False
        else:
            changed, block = event["delta"], blocks[-1]
            kind, name = {
                "text_delta": ("text", "text"),
                "thinking_delta": ("thinking", "thinking"),
                "signature_delta": ("thinking", "signature"),
                "input_json_delta": ("tool_use", "json"),
            }[changed["type"]]
            assert block["type"] == kind
            block[name] += changed["partial_json" if name == "json" else name]
    assert not is_open
    for block in blocks:
        arguments = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(arguments)
    return {"content": blocks, **delta["delta"], "usage": delta["usage"]}


def read(usage: dict[str, int]) -> int:
    return usage["input_tokens"] + usage["cache_read_input_tokens"]


def test_a_session_with_a_call_and_its_result(server: ServerProcess) -> None:
    counted = {name: SESSION[name] for name in ("model", "system", "tools", "thinking")}
    answer = post(server, "/v1/messages/count_tokens", **counted, messages=[QUESTION])
    assert answer.status_code == 200, answer.text
    num_tokens = answer.json()["input_tokens"]
    assert num_tokens > 1500

    turns: list[Any] = [QUESTION]
    for number in range(2):
        # The demo model knows no tools; where Claude Code leaves it to the model, this one is told.
        asked = {**SESSION, "messages": turns, "tool_choice": {"type": "tool", "name": "Read"}}
        called = message_of(events_of(post(server, **asked)))
        assert called["stop_reason"] == "tool_use"
        [call] = called["content"]
        assert (call["type"], call["name"]) == ("tool_use", "Read")
        assert call["id"].startswith("toolu_")
        assert call["input"]["file_path"] in PATHS
        if number == 0:
            assert read(called["usage"]) == num_tokens
        else:
            # All that was said before is in the cache, but for what is left of its last page of 16 tokens.
            assert called["usage"]["cache_read_input_tokens"] > num_tokens - 32
            assert read(called["usage"]) > num_tokens
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "A duck is a bird."}
        reminder = {"type": "text", "text": "<system-reminder>So far.</system-reminder>"}
        turns += [
            {"role": "assistant", "content": called["content"]},
            {"role": "user", "content": [result, {**reminder, "cache_control": CACHED}]},
            {"role": "system", "content": "The user has opened a file."},
        ]

    asked = {**SESSION, **text_of(minLength=20, maxLength=40), "messages": turns}
    replied = message_of(events_of(post(server, **asked)))
    assert replied["stop_reason"] == "end_turn"
    [block] = replied["content"]
    assert block["type"] == "text"
    assert 20 <= len(json.loads(block["text"])["text"]) <= 40
    whole = post(server, **{**asked, "stream": False}).json()
    assert whole["content"] == replied["content"]
    assert whole["stop_reason"] == replied["stop_reason"]


def test_side_requests(server: ServerProcess) -> None:
    probe = post(server, model="demo", max_tokens=1, messages=[{"role": "user", "content": "quota"}])
    assert probe.json()["usage"]["output_tokens"] == 1
    title = {"type": "object", "properties": {"title": {"enum": ["Ducks", "Swans"]}}, "required": ["title"]}
    answer = post(
        server,
        model="demo",
        max_tokens=512,
        system=SYSTEM[:1],
        messages=[{"role": "user", "content": "Name this conversation."}],
        thinking={"type": "disabled"},
        output_config={"format": {"type": "json_schema", "schema": {**title, "additionalProperties": False}}},
        tools=[],
    ).json()
    assert answer["stop_reason"] == "end_turn"
    assert json.loads(answer["content"][0]["text"])["title"] in ("Ducks", "Swans")


@pytest.mark.parametrize("where", ["text", "call"])
def test_an_interrupted_reply_leaves_the_session_as_it_was(server: ServerProcess, where: str) -> None:
    choice = {"tool_choice": {"type": "tool", "name": "Bash"}} if where == "call" else text_of(minLength=400)
    asked = {**SESSION, "messages": [QUESTION], **choice}
    with server.http.stream("POST", "/v1/messages", headers=HEADERS, json=asked) as response:
        for line in response.iter_lines():
            if "content_block_delta" in line:
                break
    again = message_of(events_of(post(server, **{**asked, "max_tokens": 2})))
    assert again["usage"]["output_tokens"] == 2


def test_errors_that_claude_code_acts_on(server: ServerProcess) -> None:
    long = {"role": "user", "content": "duck " * 4000}
    refused = post(server, **{**SESSION, "messages": [long]})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("prompt is too long: ")
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    refused = post(server, **{**SESSION, "messages": [QUESTION], "tools": [search]})
    assert refused.status_code == 400
    assert refused.json()["error"]["type"] == "invalid_request_error"
    assert "tools[0].type: got 'web_search_20250305'" in refused.json()["error"]["message"]
    other = post(server, **{**SESSION, "model": "claude-haiku-4-5", "messages": [QUESTION]})
    assert (other.status_code, other.json()["error"]["type"]) == (404, "not_found_error")
