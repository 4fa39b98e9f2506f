"""kill -9 while pages are saved: the next process goes on from whatever was whole, with the same content."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType

import pytest
import torch

from duckllm import LLM, SamplingParams
from duckllm.engine.kv_cache import PAGE_TOKENS, KvCache
from duckllm.engine.page_files import PageFolder
from duckllm.engine.tiers import TierSettings
from duckllm.outputs import CachedTokens
from support.attention import slots_of

PAGES = 4
PROMPT = list(range(100, 100 + PAGES * PAGE_TOKENS + 1))
GREEDY = SamplingParams(temperature=0, max_tokens=40)
QUESTIONS = ["What is a duck?", "What is a swan?", "Is 1001 prime?", "What is a goose?"]
CHILD = """
import sys
from duckllm import LLM, SamplingParams
with LLM(sys.argv[1], workers=0, max_model_len=900, kv_disk_dir=sys.argv[2]) as llm:
    messages = []
    for question in sys.argv[3:] * 10:
        messages.append({"role": "user", "content": question})
        [output] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=40))
        messages.append({"role": "assistant", "content": output.outputs[0].text})
"""


def open_cache(path: Path) -> KvCache:
    def new_tensors(max_tokens: int) -> list[tuple[torch.Tensor, ...]]:
        return [(torch.zeros(max_tokens, 3),)]

    return KvCache(new_tensors, 20 * PAGE_TOKENS, TierSettings("m", disk_dir=path))


def compute(cache: KvCache) -> int:
    """Takes the prompt through the cache; pages found on the disk, which are what was computed."""
    table, _ = cache.open(PROMPT)
    while not cache.fetch(table):
        cache.wait_for(table)
    found = len(table.pages)
    assert cache.reserve(table, len(PROMPT))
    first = found * PAGE_TOKENS
    slots = slots_of(cache.sequence(table, 0, first, len(PROMPT) - first))
    tokens = torch.tensor(PROMPT, dtype=torch.float32)[:, None].expand(-1, 3)
    cache.tensors[0][0][slots[first:]] = tokens[first:]
    assert torch.equal(cache.tensors[0][0][slots], tokens)
    cache.seal(table, PROMPT, len(PROMPT))
    cache.close(table)
    return found


def save_and_die(path: Path, line: int, saved: int) -> None:
    """In a child: computes, saves, and is killed at the given line of all writes together.

    Each page that was written whole is told through the pipe ``saved``.
    """
    code, left = PageFolder.write.__code__, line

    def trace(frame: FrameType, event: str, _argument: object) -> object:
        nonlocal left
        if frame.f_code is code and event == "line":
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        if frame.f_code is code and event == "return":
            os.write(saved, b"x")
        return trace

    threading.settrace(trace)
    cache = open_cache(path)
    compute(cache)
    cache.shut()
    os._exit(0)


@pytest.mark.filterwarnings("ignore:This process.*fork:DeprecationWarning")
@pytest.mark.parametrize("first_line", range(1, 5))
def test_a_save_that_is_killed_at_any_line_is_all_that_is_missing(tmp_path: Path, first_line: int) -> None:
    died = 0
    for line in range(first_line, 200, 4):
        path = tmp_path / str(line)
        told, saved = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                save_and_die(path, line, saved)
            finally:
                os._exit(1)
        os.close(saved)
        _, status = os.waitpid(pid, 0)
        whole = len(os.read(told, 100))
        os.close(told)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            assert whole == PAGES
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        died += 1
        cache = open_cache(path)
        assert list(path.rglob("*.partial")) == []
        assert whole <= compute(cache) <= whole + 1
        cache.shut()
        cache = open_cache(path)
        assert compute(cache) == PAGES
        cache.shut()
    assert died >= 8


@pytest.mark.filterwarnings("ignore:This process.*fork:DeprecationWarning")
@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_half_a_file_is_never_a_page(tmp_path: Path, share: float) -> None:
    """Killed within the write of the third file: its first part lies there under a name that is no page's."""
    pid = os.fork()
    if pid == 0:
        try:
            write, number = PageFolder.write, 0

            def torn(folder: PageFolder, *arguments: object) -> None:
                nonlocal number
                number += 1
                if number < 3:
                    write(folder, *arguments)  # type: ignore[arg-type]
                    return
                data = bytes(folder.format.file_bytes)
                path = folder.path_of(arguments[0].hash)  # type: ignore[attr-defined]
                path.parent.mkdir(exist_ok=True)
                partial = path.with_name(f".{path.stem}.{folder._own}.partial")
                partial.write_bytes(data[: int(share * len(data))])
                os.kill(os.getpid(), signal.SIGKILL)

            PageFolder.write = torn  # type: ignore[method-assign]
            cache = open_cache(tmp_path)
            compute(cache)
            cache.shut()
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    assert len(list(tmp_path.rglob(".*.partial"))) == 1
    cache = open_cache(tmp_path)
    assert list(tmp_path.rglob(".*.partial")) == []
    assert compute(cache) == 2
    cache.shut()


@pytest.mark.timeout(120)
def test_a_model_that_is_killed_goes_on_from_disk_with_the_same_tokens(
    demo_folder: Path, tmp_path: Path
) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD, demo_folder, tmp_path / "kv", *QUESTIONS])
    try:
        while child.poll() is None and len(list((tmp_path / "kv").rglob("*.page"))) < 12:
            time.sleep(0.005)
    finally:
        child.kill()
    assert child.wait() == -signal.SIGKILL
    messages: list[dict[str, str]] = []
    with (
        LLM(demo_folder, workers=0, max_model_len=900) as plain,
        LLM(demo_folder, workers=0, max_model_len=900, kv_disk_dir=tmp_path / "kv") as kept,
    ):
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            [expected] = plain.chat(messages, GREEDY)
            messages.append({"role": "assistant", "content": expected.outputs[0].text})
        [output] = kept.chat(messages[:-1], GREEDY)
    assert output.outputs == expected.outputs
    # Twelve pages were whole when it died, more than this prompt has.
    num_full = (len(output.prompt_token_ids) - 1) // PAGE_TOKENS
    assert num_full == 8
    assert output.metrics.cached_tokens == CachedTokens(disk=num_full * PAGE_TOKENS)
