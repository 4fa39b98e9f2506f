"""What the server costs: streams through ``duckllm serve`` beside the same replies from the Python interface.

    python benchmarks/online/serve.py [--model FOLDER] [--workers 2] [--streams 1 8 64] [--rounds 5]

The program

1. starts a server and, in this process, an LLM, each with workers of its own, and verifies that a stream of
   the server has the text that the LLM gives,
2. measures in turns, for each number of streams: all replies side by side from the LLM, step by step, which
   is the ceiling; then the same through the server, one connection each. Medians over the rounds,
3. prints for both how many tokens came a second, from the first request to the last token, and for the server
   its share of the ceiling, the time to the first token and the times between two chunks of a stream. The
   client's own work is on the same cores, and counted as the server's,
4. measures what the idle server uses of a core, and prints one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import psutil

from duckllm import LLM, SamplingParams
from duckllm.bench.machine import commit, cpu_name
from duckllm.config import available_cores
from duckllm.outputs import percentile

IDLE_S = 3.0
KV_CACHE = "256MiB"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="model folder; the demo model if left out")
    parser.add_argument("--workers", type=int, default=2, help="workers of the server, and of the LLM")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64], help="numbers of streams")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a reply")
    parser.add_argument("--rounds", type=int, default=5, help="times that each is measured")
    return parser.parse_args()


def questions(number: int) -> list[str]:
    return [f"List all prime numbers below {400 + 7 * each}." for each in range(number)]


@dataclass
class Stream:
    """What came of one reply: its text, the time of its first chunk and those between chunks, seconds."""

    text: str
    first_s: float
    gaps_s: list[float]


async def read_stream(port: int, question: str, tokens: int) -> Stream:
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": question}],
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    start = last = time.perf_counter()
    times, pieces = [], []
    while piece := await reader.read(1 << 16):
        if b"data: " in piece:
            last, before = time.perf_counter(), last
            times.append(last - before)
        pieces.append(piece)
    writer.close()
    text = ""
    for line in b"".join(pieces).split(b"\r\n"):
        if line.startswith(b"data: {"):
            chunk = json.loads(line.partition(b"\n")[0][6:])
            text += "".join(choice["delta"].get("content", "") for choice in chunk["choices"])
    return Stream(text, times[0] if times else time.perf_counter() - start, times[1:])


async def read_all(port: int, number: int, tokens: int) -> tuple[float, list[Stream]]:
    start = time.perf_counter()
    streams = await asyncio.gather(*(read_stream(port, each, tokens) for each in questions(number)))
    return time.perf_counter() - start, streams


def compute_all(llm: LLM, number: int, tokens: int) -> tuple[float, list[str]]:
    """The same replies step by step, as the server's thread computes them."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    start = time.perf_counter()
    pool, texts = llm.new_pool(), {}
    for question in questions(number):
        prompt = llm.tokenizer.apply_chat_template([{"role": "user", "content": question}])
        requests = llm.new_requests(prompt, params)
        texts[requests[0]] = ""
        pool.add(requests)
    while pool:
        for request, output in pool.step():
            texts[request] += output.text
    return time.perf_counter() - start, list(texts.values())


def measure(llm: LLM, port: int, number: int, arguments: argparse.Namespace) -> dict[str, Any]:
    tokens = number * arguments.tokens
    ceilings, speeds, firsts, gaps = [], [], [], []
    for _ in range(arguments.rounds):
        seconds, expected = compute_all(llm, number, arguments.tokens)
        ceilings.append(tokens / seconds)
        seconds, streams = asyncio.run(read_all(port, number, arguments.tokens))
        if [stream.text for stream in streams] != expected:
            raise SystemExit(f"{number} streams: the server gives other texts than the LLM")
        speeds.append(tokens / seconds)
        firsts += [stream.first_s for stream in streams]
        gaps += [gap for stream in streams for gap in stream.gaps_s]
    return {
        "streams": number,
        "llm_tokens_per_s": round(statistics.median(ceilings), 1),
        "tokens_per_s": round(statistics.median(speeds), 1),
        "of_llm": round(statistics.median(speeds) / statistics.median(ceilings), 3),
        "time_to_first_token_p50_s": round(percentile(firsts, 50) or 0.0, 4),
        "time_to_first_token_p99_s": round(percentile(firsts, 99) or 0.0, 4),
        "inter_chunk_p50_s": round(percentile(gaps, 50) or 0.0, 5),
        "inter_chunk_p99_s": round(percentile(gaps, 99) or 0.0, 5),
    }


def idle_share(process: psutil.Process) -> float:
    """Share of a core that the idle server uses, without its workers."""
    time.sleep(0.5)
    before = process.cpu_times()
    time.sleep(IDLE_S)
    after = process.cpu_times()
    return (after.user + after.system - before.user - before.system) / IDLE_S


def main() -> None:
    arguments = parse_arguments()
    options = ["--workers", str(arguments.workers), "--port", "0", "--kv-cache-bytes", KV_CACHE]
    command = [sys.executable, "-m", "duckllm", "serve", *([arguments.model] if arguments.model else [])]
    server = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        port = int(line.split(" at ")[1].split(",")[0].rpartition(":")[2])
        with LLM(arguments.model, workers=arguments.workers, kv_cache_bytes=KV_CACHE) as llm:
            isa = llm.cluster_info().isas[0]
            for number in arguments.streams:  # what is built at a first use is built; verified too
                asyncio.run(read_all(port, number, 8))
                compute_all(llm, number, 8)
            runs = [measure(llm, port, number, arguments) for number in arguments.streams]
        idle = idle_share(psutil.Process(server.pid))
    finally:
        server.terminate()
        server.wait()
    print(f"{cpu_name()}, {available_cores()} cores, {isa}; {arguments.tokens} tokens a reply, verified")
    print("streams   LLM tok/s   server tok/s   of LLM   first token p50, p99 ms   between p50, p99 ms")
    for run in runs:
        names = ("time_to_first_token_p50_s", "time_to_first_token_p99_s", "inter_chunk_p50_s")
        times = [1e3 * run[name] for name in (*names, "inter_chunk_p99_s")]
        print(
            f"{run['streams']:7d} {run['llm_tokens_per_s']:11.1f} {run['tokens_per_s']:14.1f}"
            f" {run['of_llm']:8.1%} {times[0]:16.1f} {times[1]:6.1f} {times[2]:15.2f} {times[3]:5.2f}"
        )
    print(f"idle, the server uses {idle:.2%} of a core")
    summary = {
        "benchmark": "online/serve",
        "commit": commit(),
        "machine": f"{cpu_name()}, {available_cores()} cores",
        "isa": isa,
        "model": arguments.model or "demo",
        "workers": arguments.workers,
        "tokens": arguments.tokens,
        "rounds": arguments.rounds,
        "idle_cores": round(idle, 4),
        "runs": runs,
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
