"""Many streaming clients for a minute, of whom some leave at random: no error, nothing left, memory flat.

    python benchmarks/online/soak.py [--model FOLDER] [--clients 100] [--seconds 60] [--leaving 0.3]

Each client asks again and again, with random sampling and lengths, reads its stream and checks that it comes
to its end, or closes its connection in the middle of it. The program

1. starts a server with two workers, and stops with a message where a stream is not whole or a status not 200,
2. takes the server's memory (VmRSS) every two seconds; the first quarter of the time is for caches to fill,
3. verifies that no reply is running or waiting when all have left, that the server has as many descriptors
   and threads as before, and that it stops in order,
4. prints one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from duckllm.bench.machine import commit, cpu_name
from duckllm.config import available_cores

QUESTIONS = ("What is a duck?", "Is 1001 prime?", "List all prime numbers below 400.", "What is a swan?")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="model folder; the demo model if left out")
    parser.add_argument("--clients", type=int, default=100, help="connections at a time")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long they go on asking")
    parser.add_argument("--leaving", type=float, default=0.3, help="share of streams that are left")
    return parser.parse_args()


@dataclass
class Counts:
    """What all clients together have done."""

    num_whole: int = 0
    num_left: int = 0
    num_tokens: int = 0
    first_s: list[float] = field(default_factory=list)


async def ask(port: int, counts: Counts, chance: random.Random, leaving: float) -> None:
    """One stream, read to its end or left."""
    body = {
        "messages": [{"role": "user", "content": chance.choice(QUESTIONS)}],
        "max_tokens": chance.randint(1, 120),
        "temperature": chance.choice([0, 0.7, 1.5]),
        "seed": chance.randrange(2**31),
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    leaves_at = chance.randint(0, 60) if chance.random() < leaving else None
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        content = json.dumps(body).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        start = time.perf_counter()
        writer.write(f"{head}connection: close\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content)
        text, num_chunks = b"", 0
        while leaves_at is None or num_chunks < leaves_at:
            piece = await reader.read(1 << 16)
            if not piece:
                break
            if b"data: " in piece and b"data: " not in text:
                counts.first_s.append(time.perf_counter() - start)
            text += piece
            num_chunks += piece.count(b"data: ")
    finally:
        writer.close()
    if leaves_at is not None:
        counts.num_left += 1
        return
    usage = re.search(rb'"completion_tokens":(\d+)', text)
    is_whole = text.startswith(b"HTTP/1.1 200") and b"data: [DONE]" in text and b'"error"' not in text
    if not is_whole or usage is None or int(usage[1]) != body["max_tokens"]:
        raise SystemExit(f"a stream is not whole: {text[:200]!r} ... {text[-300:]!r}")
    counts.num_whole += 1
    counts.num_tokens += int(usage[1])


async def run_clients(port: int, arguments: argparse.Namespace, memory: list[int], pid: int) -> Counts:
    counts, end = Counts(), time.monotonic() + arguments.seconds

    async def client(number: int) -> None:
        chance = random.Random(number)
        while time.monotonic() < end:
            await ask(port, counts, chance, arguments.leaving)

    async def watch() -> None:
        while True:
            memory.append(resident_bytes(pid))
            await asyncio.sleep(2)

    watching = asyncio.ensure_future(watch())
    await asyncio.gather(*map(client, range(arguments.clients)))
    watching.cancel()
    return counts


def resident_bytes(pid: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return 1024 * int(found[1]) if found else 0


async def under_way(port: int) -> float:
    """Replies that run or wait, as the server's metrics say."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    found = re.findall(r"^duckllm_num_requests_\w+ ([\d.]+)$", text, re.MULTILINE)
    return sum(map(float, found))


def descriptors_and_threads(pid: int) -> tuple[int, int]:
    folder = Path(f"/proc/{pid}")
    return len(list((folder / "fd").iterdir())), len(list((folder / "task").iterdir()))


def main() -> None:
    arguments = parse_arguments()
    command = [sys.executable, "-m", "duckllm", "serve", *([arguments.model] if arguments.model else [])]
    command += ["--port", "0", "--kv-cache-bytes", "64MiB", "--max-waiting", str(arguments.clients)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    memory: list[int] = []
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline().split(" at ")[1].split(",")[0].rpartition(":")[2])
        asyncio.run(ask(port, Counts(), random.Random(0), 0.0))  # what a first request makes is made
        time.sleep(1)
        start, start_bytes = descriptors_and_threads(server.pid), resident_bytes(server.pid)
        counts = asyncio.run(run_clients(port, arguments, memory, server.pid))
        time.sleep(1)
        if left := asyncio.run(under_way(port)):
            raise SystemExit(f"{left:.0f} replies are under way after all clients have left")
        time.sleep(1)
        if (end := descriptors_and_threads(server.pid)) != start:
            raise SystemExit(f"descriptors and threads: {start} before all clients, {end} after them")
        end_bytes = resident_bytes(server.pid)
    finally:
        server.terminate()
        code = server.wait()
    if code != 0:
        raise SystemExit(f"the server's exit code is {code}")
    settled = memory[len(memory) // 4 :]
    half = len(settled) // 2
    early, late = statistics.median(settled[:half]), statistics.median(settled[half:])
    print(f"{cpu_name()}, {available_cores()} cores; {arguments.clients} clients, {arguments.seconds:.0f} s")
    print(f"{counts.num_whole} streams read to their end, {counts.num_left} left; none failed, none remained")
    print(f"{counts.num_tokens / arguments.seconds:.0f} tok/s of those that were read to their end")
    sizes = (start_bytes, early, late, end_bytes, max(memory))
    first, then, later, last, most = (f"{size / 1e6:.1f} MB" for size in sizes)
    print(f"memory {first} before all clients, {then}, later {later}, {last} after them; most {most}")
    print(f"{start[0]} descriptors and {start[1]} threads before all clients, and after them")
    summary = {
        "benchmark": "online/soak",
        "commit": commit(),
        "machine": f"{cpu_name()}, {available_cores()} cores",
        "model": arguments.model or "demo",
        "clients": arguments.clients,
        "seconds": arguments.seconds,
        "streams_whole": counts.num_whole,
        "streams_left": counts.num_left,
        "tokens_per_s": round(counts.num_tokens / arguments.seconds, 1),
        "time_to_first_token_p50_s": round(statistics.median(counts.first_s), 4),
        "descriptors": start[0],
        "threads": start[1],
        "start_bytes": start_bytes,
        "early_bytes": int(early),
        "late_bytes": int(late),
        "end_bytes": end_bytes,
        "peak_bytes": max(memory),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
