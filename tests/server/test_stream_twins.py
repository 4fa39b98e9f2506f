"""Every stream says what its whole twin says: 200 random requests to four APIs, each asked both ways.

Streams are put together here, event by event, and compared with the whole reply: text, thoughts, calls, log
probabilities, reasons and usage. Left out are ids, times, and how much of the prompt was found in the cache,
as the second of two twins finds what the first one has computed.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from server_harness import ServerProcess

NUM_AT_ONCE = 3
WORDS = [
    "duck",
    "What is",
    "a prime?",
    "7 x 11",
    "Élan 🦆",
    "List",
    "the",
    "verb",
    "\n",
    "noun:",
    "{",
    "Is 91",
]
STOPS = ["e", " a", "the", ":", "ou", "\n", "."]
SHORT_SCHEMA = {
    "type": "object",
    "properties": {"is": {"enum": ["duck", "goose"]}},
    "required": ["is"],
    "additionalProperties": False,
}
NAMES = ["look", "call"]
LONG_TOKENS = 80  # enough for a call or an object of that schema
Json = dict[str, Any]


def prompt(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, 8)))


def sampling(rng: random.Random) -> Json:
    """OpenAI's fields of both of its older APIs."""
    body: Json = {"max_tokens": rng.randint(1, 12), "temperature": rng.choice([0, 0.7, 1.0, 1.6])}
    if body["temperature"]:
        body |= {
            "seed": rng.randrange(2**31),
            "n": rng.choice([1, 1, 1, 2, 3]),
            "top_p": rng.choice([1, 0.9]),
        }
    if rng.random() < 0.5:
        body["stop"] = rng.choice([rng.choice(STOPS), rng.sample(STOPS, 2)])
    if rng.random() < 0.2:
        body |= {"frequency_penalty": 0.5, "logit_bias": {"11": -5}}
    return body


def chat_body(rng: random.Random) -> Json:
    body = {"messages": [{"role": "user", "content": prompt(rng)}], **sampling(rng)}
    if rng.random() < 0.4:
        body |= {"logprobs": True, "top_logprobs": rng.randint(0, 3)}
    kind = rng.choice(["text", "text", "tools", "schema"])
    if kind == "tools":
        functions = [{"name": name, "parameters": SHORT_SCHEMA, "strict": True} for name in NAMES]
        named = {"type": "function", "function": {"name": rng.choice(NAMES)}}
        body |= {
            "tools": [{"type": "function", "function": each} for each in functions],
            "tool_choice": rng.choice(["required", named, named, "auto", "none"]),
            "parallel_tool_calls": rng.random() < 0.5,
        }
    elif kind == "schema":
        schema = {"name": "answer", "schema": SHORT_SCHEMA}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if kind != "text":
        body |= {"max_tokens": rng.choice([5, LONG_TOKENS]), "stop": None}
    return body


def completion_body(rng: random.Random) -> Json:
    prompts = [prompt(rng), [prompt(rng), prompt(rng)], [rng.randrange(3, 500) for _ in range(5)]]
    body = {"prompt": rng.choice(prompts), **sampling(rng)}
    if rng.random() < 0.4:
        body["logprobs"] = rng.randint(0, 3)
    if rng.random() < 0.3:
        body["echo"] = True
    return body


def messages_body(rng: random.Random) -> Json:
    """The API has no seed, so that these are greedy."""
    message = {"role": "user", "content": prompt(rng)}
    body: Json = {"messages": [message], "temperature": 0, "max_tokens": rng.randint(1, 12), "model": "demo"}
    if rng.random() < 0.5:
        body["stop_sequences"] = rng.sample(STOPS, 2)
    elif rng.random() < 0.6:
        tools = [{"name": name, "input_schema": SHORT_SCHEMA, "strict": True} for name in NAMES]
        choices = [{"type": "any"}, {"type": "tool", "name": rng.choice(NAMES)}, {"type": "auto"}]
        body |= {"tools": tools, "tool_choice": rng.choice(choices), "max_tokens": LONG_TOKENS}
    return body


def responses_body(rng: random.Random) -> Json:
    """As of messages."""
    body: Json = {"input": prompt(rng), "temperature": 0, "max_output_tokens": rng.randint(1, 12)}
    body["model"] = "demo"
    kind = rng.choice(["text", "logprobs", "tools", "schema"])
    if kind == "logprobs":
        body |= {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    elif kind == "tools":
        tools = [
            {"type": "function", "name": name, "parameters": SHORT_SCHEMA, "strict": True} for name in NAMES
        ]
        named = {"type": "function", "name": rng.choice(NAMES)}
        body |= {"tools": tools, "tool_choice": rng.choice(["required", named, "auto"])}
        body["max_output_tokens"] = LONG_TOKENS
    elif kind == "schema":
        form = {"type": "json_schema", "name": "answer", "schema": SHORT_SCHEMA}
        body |= {"text": {"format": form}, "max_output_tokens": LONG_TOKENS}
    return body


def fold_chat(chunks: list[Json]) -> Json:
    choices: dict[int, Json] = {}
    for chunk in chunks:
        for given in chunk["choices"]:
            message = {"role": None, "content": "", "refusal": None}
            choice = choices.setdefault(
                given["index"],
                {"index": given["index"], "message": message, "logprobs": None, "finish_reason": None},
            )
            assert choice["finish_reason"] is None
            message, delta = choice["message"], given["delta"]
            message["role"] = message["role"] or delta.get("role")
            for name in ("content", "reasoning_content"):
                if delta.get(name):
                    message[name] = message.get(name, "") + delta[name]
            for call in delta.get("tool_calls", ()):
                calls = message.setdefault("tool_calls", [])
                if call["index"] == len(calls):
                    calls.append({"type": call["type"], "function": {**call["function"]}})
                else:
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            if given["logprobs"] is not None:
                empty: Json = {"content": [], "refusal": None}
                choice["logprobs"] = choice["logprobs"] or empty
                choice["logprobs"]["content"] += given["logprobs"]["content"]
            choice["finish_reason"] = given["finish_reason"]
    for choice in choices.values():
        if choice["message"].get("tool_calls"):
            choice["message"]["content"] = choice["message"]["content"] or None
    return {"choices": [choices[index] for index in sorted(choices)], "usage": chunks[-1]["usage"]}


def fold_completion(chunks: list[Json]) -> Json:
    choices: dict[int, Json] = {}
    for chunk in chunks:
        for given in chunk["choices"]:
            choice = choices.setdefault(given["index"], {**given, "text": "", "logprobs": None})
            choice["text"] += given["text"]
            choice["finish_reason"] = given["finish_reason"]
            for name, values in (given["logprobs"] or {}).items():
                choice["logprobs"] = choice["logprobs"] or defaultdict(list)
                choice["logprobs"][name] += values
    return {"choices": [choices[index] for index in sorted(choices)], "usage": chunks[-1]["usage"]}


def fold_messages(events: list[Json]) -> Json:
    message, parts = {}, defaultdict(str)
    for event in events:
        if event["type"] == "message_start":
            message = event["message"]
        elif event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], message["content"][event["index"]]
            if delta["type"] == "input_json_delta":
                parts[event["index"]] += delta["partial_json"]
            else:
                name = delta["type"].removesuffix("_delta")
                block[name] = block.get(name, "") + delta[name]
        elif event["type"] == "message_delta":
            message |= event["delta"]
            message["usage"] |= event["usage"]
    for index, text in parts.items():
        message["content"][index]["input"] = json.loads(text or "{}")
    assert events[-1]["type"] == "message_stop"
    return message


def fold_responses(events: list[Json]) -> Json:
    """The last event's response, once its items are what the events before added up to."""
    texts: defaultdict[tuple[int, str], str] = defaultdict(str)
    for event in events:
        if event["type"].endswith(".delta"):
            texts[event["output_index"], event["type"].split(".")[1]] += event["delta"]
    reply: Json = events[-1]["response"]
    assert events[-1]["type"] == f"response.{reply['status']}"
    for index, item in enumerate(reply["output"]):
        if item["type"] == "message":
            assert "".join(part["text"] for part in item["content"]) == texts[index, "output_text"]
        elif item["type"] == "function_call":
            assert item["arguments"] == texts[index, "function_call_arguments"]
    return reply


def scrubbed(value: Any) -> Any:
    """Without ids, times, and what was found in the cache."""
    if isinstance(value, list):
        return [scrubbed(each) for each in value]
    if not isinstance(value, dict):
        return value
    if value == {"content": [], "refusal": None}:
        return None  # of a reply that was over before it began no chunk has log probabilities
    left_out = {
        *("id", "call_id", "created", "created_at", "completed_at", "timings"),
        *("prompt_tokens_details", "input_tokens_details"),
    }
    if "cache_read_input_tokens" in value:
        found = value["cache_read_input_tokens"] + value["cache_creation_input_tokens"]
        value = {**value, "input_tokens": value["input_tokens"] + found}
        left_out |= {"cache_read_input_tokens", "cache_creation_input_tokens"}
    return {name: scrubbed(each) for name, each in value.items() if name not in left_out}


def chosen(value: Json, names: tuple[str, ...]) -> Any:
    return scrubbed({name: value[name] for name in names})


API = tuple[str, int, Callable[[random.Random], Json], Callable[[list[Json]], Json], tuple[str, ...]]
APIS: list[API] = [
    ("/v1/chat/completions", 80, chat_body, fold_chat, ("choices", "usage")),
    ("/v1/completions", 50, completion_body, fold_completion, ("choices", "usage")),
    (
        *("/v1/messages", 35, messages_body, fold_messages),
        ("role", "model", "content", "stop_reason", "stop_sequence", "usage"),
    ),
    (
        *("/v1/responses", 35, responses_body, fold_responses),
        ("status", "incomplete_details", "output", "usage", "model", "text", "tools", "tool_choice"),
    ),
]


async def events_of(client: httpx.AsyncClient, path: str, body: Json) -> list[Json]:
    reply = await client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


async def compare(client: httpx.AsyncClient, api: API, body: Json, has_usage_option: bool) -> Any:
    """What both twins say."""
    path, _, _, fold, names = api
    options = {"stream_options": {"include_usage": True}} if has_usage_option else {}
    events = await events_of(client, path, {**body, "stream": True, **options})
    whole = await client.post(path, json=body)
    assert whole.status_code == 200, (whole.text, body)
    expected = chosen(whole.json(), names)
    assert chosen(fold(events), names) == expected, body
    return expected


@pytest.mark.parametrize("api", APIS, ids=[api[0] for api in APIS])
def test_a_stream_equals_its_whole_twin(server: ServerProcess, api: API) -> None:
    path, number, make, _, _ = api
    rng = random.Random(path)
    bodies = [make(rng) for _ in range(number)]

    async def run() -> list[Any]:
        places = asyncio.Semaphore(NUM_AT_ONCE)

        async def one(body: Json) -> Any:
            async with places:
                return await compare(client, api, body, "completions" in path)

        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            return await asyncio.gather(*map(one, bodies))

    reasons: Counter[str] = Counter()
    for reply in asyncio.run(run()):
        for choice in reply.get("choices", ()):
            reasons[choice["finish_reason"]] += 1
            reasons["logprobs"] += choice["logprobs"] is not None
        for item in reply.get("output", ()):
            reasons[item["type"]] += 1
        if "choices" not in reply:
            reasons[reply.get("stop_reason") or reply["status"]] += 1
    expected = {
        "/v1/chat/completions": {"stop", "length", "tool_calls", "logprobs"},
        "/v1/completions": {"stop", "length", "logprobs"},
        "/v1/messages": {"end_turn", "max_tokens", "stop_sequence", "tool_use"},
        "/v1/responses": {"completed", "incomplete", "message", "function_call"},
    }
    assert expected[path] <= {reason for reason, times in reasons.items() if times > 1}
