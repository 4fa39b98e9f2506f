"""Forty clients that stream at a time, of whom some leave: each has its reply, and nothing of them stays."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil
from app_harness import Call, InProcess
from prometheus_client.parser import text_string_to_metric_families
from server_harness import running_server

CHAT = "/v1/chat/completions"
NUM_CLIENTS = 40
TIMEOUT_S = 60.0
QUESTIONS = [
    "What is a duck?",
    "Is 1001 prime?",
    "List all prime numbers below 400.",
    "What is a swan? " * 20,
]


def body(chance: random.Random) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": chance.choice(QUESTIONS)}],
        "max_tokens": chance.randint(1, 12),
        "temperature": chance.choice([0, 1.0]),
        "seed": chance.randrange(2**31),
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def check_whole(text: str, asked: dict[str, Any]) -> None:
    *chunks, done = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert done == "[DONE]"
    assert json.loads(chunks[-1])["usage"]["completion_tokens"] == asked["max_tokens"]
    assert json.loads(chunks[-2])["choices"][0]["finish_reason"] == "length"


def test_on_one_event_loop_no_task_and_no_page_stays(here: InProcess) -> None:
    """Leaving takes place in the queue, in the prompt and in the reply."""
    here.settle()
    outcomes: Counter[str] = Counter()

    async def client(number: int) -> None:
        chance = random.Random(number)
        for _ in range(2):
            asked = body(chance)
            call = await Call(here.app, CHAT, asked).begin()
            if chance.random() < 0.4:
                await asyncio.sleep(chance.uniform(0, 0.3))
                await call.leave()
                outcomes["left"] += 1
            else:
                await call.end()
                assert call.status == 200
                check_whole(call.content.decode(), asked)
                outcomes["whole"] += 1

    async def run() -> tuple[int, int]:
        before = len(asyncio.all_tasks())
        await asyncio.gather(*map(client, range(NUM_CLIENTS)))
        while here.service.engine.num_open:
            await asyncio.sleep(0.001)
        return before, len(asyncio.all_tasks())

    num_threads = threading.active_count()
    pages = here.llm.state().cache
    before, after = here.run(run())
    assert before == after
    assert outcomes["left"] + outcomes["whole"] == 2 * NUM_CLIENTS
    assert min(outcomes.values()) > 10
    here.settle()
    state = here.llm.state()
    assert (state.num_running, state.num_waiting, state.cache.used) == (0, 0, 0)
    assert state.cache.reusable + state.cache.free == pages.used + pages.reusable + pages.free
    assert here.service._num_beginning == 0
    assert threading.active_count() <= num_threads + 1  # the one that compiles grammars, at its first use


def metrics_of(text: str) -> dict[str, float]:
    families = text_string_to_metric_families(text)
    return {
        sample.name: sample.value for family in families for sample in family.samples if not sample.labels
    }


def test_on_sockets_no_descriptor_and_no_thread_stays(demo_folder: Path, tmp_path: Path) -> None:
    options = ("--workers", "2", "--max-num-seqs", "8", "--max-waiting", str(NUM_CLIENTS))
    with running_server(tmp_path / "stderr", *options) as server:

        async def client(number: int) -> None:
            chance, asked = random.Random(number), body(random.Random(number))
            async with (
                httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as http,
                http.stream("POST", CHAT, json=asked) as reply,
            ):
                assert reply.status_code == 200
                if chance.random() < 0.4:
                    async for _ in reply.aiter_lines():
                        return
                check_whole((await reply.aread()).decode(), asked)

        async def all_clients() -> None:
            await asyncio.gather(*map(client, range(NUM_CLIENTS)))

        def settle() -> tuple[int, int, int]:
            """Descriptors, threads and tasks' worth of replies, once all connections have ended."""
            deadline = time.monotonic() + TIMEOUT_S
            while True:
                connections = process.net_connections("tcp")
                now = metrics_of(server.http.get("/metrics").text)
                open_replies = now["duckllm_num_requests_running"] + now["duckllm_num_requests_waiting"]
                clients = [
                    each for each in connections if each.status == "ESTABLISHED" and each.laddr.port == port
                ]
                if not open_replies and len(clients) == 1:
                    return process.num_fds(), process.num_threads(), int(now["duckllm_num_requests_running"])
                assert time.monotonic() < deadline
                time.sleep(0.02)

        process = psutil.Process(server.process.pid)
        port = int(server.url.rpartition(":")[2])
        asyncio.run(all_clients())
        first = settle()
        for _ in range(2):
            asyncio.run(all_clients())
        assert settle() == first
        assert server.stop() == 0
