"""Tiers below the pool: the same tokens from each, budgets to the page, what goes first, broken disks."""

from __future__ import annotations

import linecache
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
import torch

from duckllm.engine import disk_tier, kv_cache, tiers
from duckllm.engine.engine import Engine
from duckllm.engine.kv_cache import PAGE_TOKENS, KvCache, PageTable
from duckllm.engine.page_files import PageFolder, PageKey
from duckllm.engine.request import Request
from duckllm.engine.scheduler import Scheduler
from duckllm.engine.tiers import TierSettings
from duckllm.errors import ConfigError
from duckllm.models.causal_lm import CausalLM
from duckllm.models.registry import load_config, load_model
from duckllm.outputs import CachedTokens
from duckllm.sampling_params import SamplingParams
from support.attention import slots_of
from support.experts import DictTensors, TorchExperts
from support.families import deepseek_v32, write_model
from support.models import greedy
from support.reference import read_checkpoint

CONTEXT = 128
PAGE = 4 * PAGE_TOKENS * 3  # bytes of a page of TwoTensors


def two_tensors(max_tokens: int) -> list[tuple[torch.Tensor, ...]]:
    return [(torch.full((max_tokens, 2), -1.0),), (torch.full((max_tokens, 1), -1.0),)]


@pytest.fixture
def caches() -> Iterator[list[KvCache]]:
    made: list[KvCache] = []
    yield made
    for cache in made:
        cache.shut()


def make_cache(caches: list[KvCache], pages: int, **settings: object) -> KvCache:
    caches.append(KvCache(two_tensors, pages * PAGE_TOKENS, TierSettings("m", **settings)))  # type: ignore[arg-type]
    return caches[-1]


def prompt_of(number: int, pages: int) -> list[int]:
    return [1000 * number + place for place in range(pages * PAGE_TOKENS + 1)]


def use(cache: KvCache, prompt: list[int]) -> dict[str, int]:
    """Takes a prompt through the cache as the engine does.

    Returns how many pages were found, by tier; they have the content that they had.
    """
    table, _ = cache.open(prompt)
    while not cache.fetch(table):
        cache.wait_for(table)
    cached = len(table.pages) * PAGE_TOKENS
    assert cache.reserve(table, len(prompt))
    slots = slots_of(cache.sequence(table, 0, cached, len(prompt) - cached))
    new = torch.tensor(prompt[cached:], dtype=torch.float32)[:, None]
    cache.tensors[0][0][slots[cached:]] = torch.cat([new, -new], dim=1)
    cache.tensors[1][0][slots[cached:]] = new + 0.5
    assert cache.tensors[0][0][slots].tolist() == [[token, -token] for token in prompt]
    assert cache.tensors[1][0][slots, 0].tolist() == [token + 0.5 for token in prompt]
    cache.seal(table, prompt, len(prompt))
    found = dict(table.found)
    cache.close(table)
    assert cache.num_available_pages == cache.num_pages
    return found


def test_a_page_goes_down_to_memory_and_comes_back(caches: list[KvCache]) -> None:
    cache = make_cache(caches, 4, memory_bytes=10 * PAGE)
    one, two = prompt_of(1, 3), prompt_of(2, 3)
    assert use(cache, one) == {}
    assert use(cache, two) == {}
    # The pool holds 4: three of the other's and one of its own went.
    assert use(cache, one) == {"memory": 3}
    assert use(cache, one) == {"device": 3}
    assert use(cache, two) == {"memory": 3}


def test_memory_holds_its_budget_and_what_was_left_longest_goes(caches: list[KvCache]) -> None:
    cache = make_cache(caches, 4, memory_bytes=5 * PAGE + PAGE - 1)
    prompts = [prompt_of(number, 3) for number in range(5)]
    for prompt in prompts:
        use(cache, prompt)
    held = cache._tiers._memory
    assert len(held) == 5
    # Of the last one and of an end all are in the pool; memory has room for less than two more.
    assert use(cache, prompts[0]) == use(cache, prompts[1]) == {}
    cache = make_cache(caches, 4, memory_bytes=5 * PAGE)
    for prompt in prompts[:4]:
        use(cache, prompt)
    assert use(cache, prompts[2]) == {"memory": 3}
    assert len(cache._tiers._memory) <= 5
    assert cache.open(prompts[1])[0].coming  # its beginning was kept longer than its end


def test_without_tiers_what_leaves_the_pool_is_gone(caches: list[KvCache]) -> None:
    cache = make_cache(caches, 4)
    use(cache, prompt_of(1, 3))
    use(cache, prompt_of(2, 3))
    assert use(cache, prompt_of(1, 3)) == {}


def test_what_was_computed_is_on_the_disk_for_the_next_process(caches: list[KvCache], tmp_path: Path) -> None:
    cache = make_cache(caches, 8, disk_dir=tmp_path)
    use(cache, prompt_of(1, 5))
    cache.shut()
    assert len(list(tmp_path.rglob("*.page"))) == 5
    cache = make_cache(caches, 8, disk_dir=tmp_path)
    assert use(cache, prompt_of(1, 5)) == {"disk": 5}
    assert use(cache, prompt_of(1, 5)) == {"device": 5}
    assert use(cache, [*prompt_of(1, 5)[: 3 * PAGE_TOKENS], *prompt_of(2, 1)]) == {"device": 3}
    # Another model's pages, or of other arithmetic, are never its own.
    other = make_cache(caches, 8, disk_dir=tmp_path, arithmetic="other")
    assert use(other, prompt_of(1, 5)) == {}


def test_memory_goes_down_to_disk_and_each_page_comes_from_where_it_is(
    caches: list[KvCache], tmp_path: Path
) -> None:
    cache = make_cache(caches, 8, memory_bytes=4 * PAGE, disk_dir=tmp_path)
    long = prompt_of(1, 7)
    use(cache, long)
    use(cache, prompt_of(2, 7))
    cache._tiers._disk.close()
    # Of the long one's seven pages the beginning left the pool last, and is in memory.
    assert use(cache, prompt_of(1, 4)) == {"memory": 4}


def test_the_disk_keeps_its_budget_and_beginnings_longest(caches: list[KvCache], tmp_path: Path) -> None:
    cache = make_cache(caches, 30, disk_dir=tmp_path)
    file_bytes = cache.format.file_bytes
    cache.shut()
    cache = make_cache(caches, 30, disk_dir=tmp_path, disk_bytes=6 * file_bytes)
    for number in (1, 2, 3):
        use(cache, prompt_of(number, 3))
    use(cache, prompt_of(2, 3))  # and is young again
    cache.shut()
    assert len(list(tmp_path.rglob("*.page"))) == 6
    cache = make_cache(caches, 30, disk_dir=tmp_path, disk_bytes=6 * file_bytes)
    use(cache, prompt_of(4, 2))
    cache.shut()
    cache = make_cache(caches, 30, disk_dir=tmp_path, disk_bytes=6 * file_bytes)
    assert use(cache, prompt_of(2, 3)) == {"disk": 3}
    assert use(cache, prompt_of(4, 2)) == {"disk": 2}
    assert use(cache, prompt_of(3, 3)) == {"disk": 1}
    assert use(cache, prompt_of(1, 3)) == {}


def test_a_conversation_longer_than_the_disk_keeps_its_beginning(
    caches: list[KvCache], tmp_path: Path
) -> None:
    cache = make_cache(caches, 30, disk_dir=tmp_path)
    budget = 4 * cache.format.file_bytes
    cache.shut()
    for pages in (2, 3, 4):
        cache = make_cache(caches, 30, disk_dir=tmp_path, disk_bytes=budget)
        assert use(cache, prompt_of(1, pages)) == ({"disk": pages - 1} if pages > 2 else {})
        cache.shut()
    cache = make_cache(caches, 30, disk_dir=tmp_path, disk_bytes=budget)
    use(cache, prompt_of(1, 6))
    cache.shut()
    cache = make_cache(caches, 30, disk_dir=tmp_path, disk_bytes=budget)
    assert use(cache, prompt_of(1, 6))["disk"] >= 2


def test_a_broken_page_ends_the_prefix_there_and_is_saved_again(
    caches: list[KvCache], tmp_path: Path
) -> None:
    cache = make_cache(caches, 30, disk_dir=tmp_path)
    prompt = prompt_of(1, 6)
    use(cache, prompt)
    cache.shut()
    third = list(cache._keys(prompt[: 6 * PAGE_TOKENS]))[2]
    path = PageFolder(tmp_path, cache.format, 1 << 20).path_of(third.hash)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    cache = make_cache(caches, 30, disk_dir=tmp_path)
    assert use(cache, prompt) == {"disk": 2}
    cache.shut()
    cache = make_cache(caches, 30, disk_dir=tmp_path)
    assert use(cache, prompt) == {"disk": 6}


def test_a_page_whose_room_is_taken_before_it_is_saved_is_saved_all_the_same(
    caches: list[KvCache], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes wait until the pool has been filled with other content twice."""
    may_write = threading.Event()
    write = PageFolder.write

    def late(folder: PageFolder, key: PageKey, content: np.ndarray) -> None:
        assert may_write.wait(60)
        write(folder, key, content)

    monkeypatch.setattr(PageFolder, "write", late)
    cache = make_cache(caches, 4, disk_dir=tmp_path)
    for number in range(3):
        use(cache, prompt_of(number, 3))
    # Meanwhile they are had from where they wait.
    assert use(cache, prompt_of(0, 3)) == {"disk": 3}
    may_write.set()
    cache.shut()
    assert len(list(tmp_path.rglob("*.page"))) == 9
    cache = make_cache(caches, 30, disk_dir=tmp_path)
    for number in range(3):
        assert use(cache, prompt_of(number, 3)) == {"disk": 3}


def test_what_waits_for_a_slow_disk_has_a_limit(
    caches: list[KvCache], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_tier, "BACKLOG_BYTES", 2 * PAGE)
    may_write = threading.Event()
    write = PageFolder.write
    monkeypatch.setattr(PageFolder, "write", lambda *arguments: may_write.wait(60) and write(*arguments))
    cache = make_cache(caches, 4, disk_dir=tmp_path)
    for number in range(4):
        use(cache, prompt_of(number, 3))
    assert len(cache._tiers._disk._copies) == 2
    may_write.set()
    cache.shut()
    # Two that waited outside the pool, three inside, and the one that was being written.
    assert len(list(tmp_path.rglob("*.page"))) in (5, 6)


def test_a_disk_that_cannot_be_written_is_said_once_and_answers_go_on(
    caches: list[KvCache], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(PageFolder, "write", full)
        cache = make_cache(caches, 8, disk_dir=tmp_path)
        for number in range(3):
            use(cache, prompt_of(number, 3))
        cache.shut()
    assert [record.message for record in caplog.records] == [
        f"{tmp_path}: pages of the KV cache cannot be kept: No space left on device"
    ]
    assert list(tmp_path.rglob("*.page")) == []


def test_an_unforeseen_error_of_the_disks_thread_costs_only_a_page(
    caches: list[KvCache], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = make_cache(caches, 8, disk_dir=tmp_path)
    use(cache, prompt_of(1, 3))
    cache.shut()
    monkeypatch.setattr(PageFolder, "read", lambda *_: (_ for _ in ()).throw(MemoryError))
    cache = make_cache(caches, 8, disk_dir=tmp_path)
    assert use(cache, prompt_of(1, 3)) == {}
    cache.shut()  # the thread says what went wrong after it has let go of who waits
    assert "MemoryError" in caplog.text


def test_one_step_brings_up_no_more_than_its_limit(
    caches: list[KvCache], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = make_cache(caches, 30, disk_dir=tmp_path)
    use(cache, prompt_of(1, 7))
    cache.shut()
    monkeypatch.setattr(kv_cache, "FETCH_BYTES", 3 * PAGE)
    monkeypatch.setattr(disk_tier, "READ_AHEAD_BYTES", 2 * PAGE)
    cache = make_cache(caches, 30, disk_dir=tmp_path)
    asked: list[int] = []
    read_ahead = cache._tiers.read_ahead
    monkeypatch.setattr(cache._tiers, "read_ahead", lambda keys: asked.append(len(keys)) or read_ahead(keys))
    table, _ = cache.open(prompt_of(1, 7))
    held, most_read = [], 0
    while not cache.fetch(table):
        held.append(len(table.pages))
        most_read = max(most_read, len(cache._tiers._disk._arrived))
        cache.wait_for(table)
    assert max(after - before for before, after in zip([0, *held], held, strict=False)) <= 3
    assert most_read <= 2
    assert max(asked) <= 3  # however much is coming, a step looks at no more of it
    assert len(table.pages) == 7
    cache.close(table)


def test_after_the_end_nothing_is_waited_for(caches: list[KvCache], tmp_path: Path) -> None:
    cache = make_cache(caches, 8, disk_dir=tmp_path)
    use(cache, prompt_of(1, 3))
    cache.shut()
    cache = make_cache(caches, 8, disk_dir=tmp_path)
    cache.shut()
    assert use(cache, prompt_of(1, 3)) == {}


def test_a_tier_that_its_own_thread_closes_ends(
    caches: list[KvCache], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the garbage collector runs in that thread, under its lock, and finds the one it serves."""
    cache = make_cache(caches, 8, disk_dir=tmp_path)
    tier, copy_page = cache._tiers._disk, cache._mover.read
    assert tier is not None
    monkeypatch.setattr(tier, "_copy_page", lambda page: cache.shut() or copy_page(page))
    use(cache, prompt_of(1, 3))
    tier._thread.join(20)
    assert not tier._thread.is_alive()
    assert use(make_cache(caches, 8, disk_dir=tmp_path), prompt_of(1, 3)) == {"disk": 3}


def test_a_budget_that_holds_no_page_is_refused(caches: list[KvCache], tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=rf"kv_memory_bytes: got {PAGE - 1} bytes, expected 0, or at least {PAGE} bytes"
    ):
        make_cache(caches, 4, memory_bytes=PAGE - 1)
    with pytest.raises(ConfigError, match="kv_disk_bytes: got 100 bytes, expected at least"):
        make_cache(caches, 4, disk_dir=tmp_path, disk_bytes=100)


def make_request(name: str, prompt: list[int]) -> Request:
    params = SamplingParams(max_tokens=1000)
    return Request(name, prompt, params, vocab_size=10**6, max_model_len=10**6, eos_token_ids=frozenset())


def compute(scheduler: Scheduler) -> list[str]:
    step = scheduler.schedule()
    for each in step:
        each.request.num_computed_tokens = each.stop
        if each.ends:
            each.request.append(7)
        scheduler.finish(each, each.stop)
    return [each.request.request_id for each in step]


def test_others_go_ahead_while_a_beginning_is_read(
    caches: list[KvCache], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = make_cache(caches, 40, disk_dir=tmp_path)
    for number in (1, 2):
        use(cache, prompt_of(number, 4))
    cache.shut()
    may_read = threading.Event()
    read = PageFolder.read
    monkeypatch.setattr(PageFolder, "read", lambda *arguments: may_read.wait(60) and read(*arguments))
    cache = make_cache(caches, 40, disk_dir=tmp_path)
    scheduler = Scheduler(cache, 200, 64)
    slow, also, new = (
        make_request(name, prompt_of(n, 4)) for n, name in ((1, "slow"), (2, "also"), (3, "new"))
    )
    for request in (slow, also, new):
        scheduler.add(request)
    for _ in range(3):
        assert compute(scheduler) == ["new"]
    scheduler.remove(new)
    may_read.set()
    assert compute(scheduler) == ["slow"]
    scheduler.remove(slow)
    assert compute(scheduler) == ["also"]
    scheduler.remove(also)
    assert slow.cached_tokens == also.cached_tokens == CachedTokens(disk=4 * PAGE_TOKENS)
    assert new.cached_tokens == CachedTokens()
    assert cache.num_available_pages == 40


def test_who_is_computed_takes_the_room_of_who_is_read(
    caches: list[KvCache], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = make_cache(caches, 40, disk_dir=tmp_path)
    use(cache, prompt_of(1, 4))
    cache.shut()
    monkeypatch.setattr(kv_cache, "FETCH_BYTES", PAGE)
    cache = make_cache(caches, 6, disk_dir=tmp_path)
    scheduler = Scheduler(cache, 200, 64)
    running, read = make_request("running", prompt_of(2, 2)), make_request("read", prompt_of(1, 4))
    scheduler.add(running)
    assert compute(scheduler) == ["running"]
    scheduler.add(read)
    while len(running.token_ids) < 6 * PAGE_TOKENS:
        assert "running" in compute(scheduler)
    scheduler.remove(running)
    assert compute(scheduler) == ["read"]
    assert read.cached_tokens is not None
    scheduler.remove(read)
    assert cache.num_available_pages == 6


def test_who_waits_before_it_takes_the_room_of_who_is_read(
    caches: list[KvCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else neither goes on: the one has no room, and the other is behind it."""
    monkeypatch.setattr(kv_cache, "FETCH_BYTES", PAGE)
    cache = make_cache(caches, 6, memory_bytes=100 * PAGE)
    for number in (1, 2, 3):
        use(cache, prompt_of(number, 5))
    scheduler = Scheduler(cache, 40, 64)
    first, read = make_request("first", prompt_of(4, 3)), make_request("read", prompt_of(1, 5))
    alike = make_request("alike", prompt_of(4, 3)[:-1] + [9] * 40)
    for request in (first, alike, read):
        scheduler.add(request)
    assert compute(scheduler) == ["first"]
    assert compute(scheduler) == ["first"]
    assert scheduler._fetching is not None
    assert scheduler._fetching[0] is read
    scheduler.remove(first)
    # Waiting in vain would never return.
    with scheduler._changing():
        [step] = scheduler._schedule()
    assert (step.request, step.start, step.stop) == (alike, 3 * PAGE_TOKENS, 3 * PAGE_TOKENS + 40)
    scheduler.remove(alike)
    assert compute(scheduler) == ["read"]
    assert read.cached_tokens is not None
    assert read.cached_tokens.total == 5 * PAGE_TOKENS
    scheduler.remove(read)
    assert cache.num_available_pages == 6


def test_a_request_that_goes_while_it_is_read_leaves_nothing(caches: list[KvCache], tmp_path: Path) -> None:
    cache = make_cache(caches, 40, disk_dir=tmp_path)
    use(cache, prompt_of(1, 4))
    cache.shut()
    cache = make_cache(caches, 40, disk_dir=tmp_path)
    scheduler = Scheduler(cache, 200, 64)
    request = make_request("a", prompt_of(1, 4))
    scheduler.add(request)
    with scheduler._changing():
        assert scheduler._schedule() == []
    scheduler.remove(request)
    assert scheduler.schedule() == []
    assert cache.num_available_pages == 40
    scheduler.add(request)
    assert compute(scheduler) == ["a"]
    assert request.cached_tokens is not None
    assert request.cached_tokens.total == 4 * PAGE_TOKENS
    scheduler.remove(request)


@pytest.mark.parametrize(
    ("where", "method"),
    [(KvCache, "fetch"), (KvCache, "_take"), (KvCache, "close"), (tiers.Tiers, "leaves_pool"),
     (tiers.Tiers, "take"), (disk_tier.DiskTier, "save"), (disk_tier.DiskTier, "take")],
)  # fmt: skip
@pytest.mark.parametrize("line", [*range(1, 12), 14, 17, 21])
def test_an_interruption_in_the_tiers_costs_only_time(
    caches: list[KvCache], tmp_path: Path, where: type, method: str, line: int
) -> None:
    """Interrupted at any line, everything is scheduled anew, nothing leaks and no content is wrong."""
    make = lambda: make_cache(caches, 6, memory_bytes=3 * PAGE, disk_dir=tmp_path)  # noqa: E731
    cache = make()
    for number in range(4):
        use(cache, prompt_of(number, 3))
    cache.shut()
    cache = make()
    scheduler = Scheduler(cache, 200, 2)
    code, left = getattr(where, method).__code__, line

    def trace(frame: FrameType, event: str, _argument: object) -> object:
        nonlocal left
        # The line of a with statement is seen again before its exit, where no signal is handled.
        is_with = "with " in linecache.getline(code.co_filename, frame.f_lineno)
        if event == "line" and frame.f_code is code and not is_with:
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    requests = [make_request(str(number), prompt_of(number, 3)) for number in range(4)]
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for request in requests:
            scheduler.add(request)
            compute(scheduler)
            scheduler.remove(request)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    for request in requests:
        scheduler.remove(request)
    with scheduler._changing():
        pass
    assert cache.num_available_pages == 6
    for number in (2, 0, 3, 1):
        assert sum(use(cache, prompt_of(number, 3)).values()) <= 3
    cache.shut()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    folder: Path = tmp_path_factory.mktemp("model")
    small = {"num_hidden_layers": 2, "index_topk": 8, "max_position_embeddings": CONTEXT}
    write_model(folder, deepseek_v32("small", **small), seed=1)
    tensors = read_checkpoint(folder)
    experts = TorchExperts(tensors)
    return load_model(load_config(folder), DictTensors(tensors), experts, max_tokens=CONTEXT)


def make_engine(model: CausalLM, pages: int, **settings: object) -> Engine:
    return Engine(
        model,
        max_model_len=CONTEXT,
        max_step_tokens=40,
        cache_tokens=pages * PAGE_TOKENS,
        tiers=TierSettings("m", **settings),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("tier", ["device", "memory", "disk"])
def test_a_reply_is_the_same_whatever_tier_its_beginning_is_from(
    model: CausalLM, tmp_path: Path, tier: str
) -> None:
    """Prompt and reply are the next turn's prefix; logits agree to the bit."""
    prompt, others = [5, 9, 200, 31, 77, 12, 8] * 7, [[n] * 60 for n in range(2, 6)]
    first = greedy(make_engine(model, 8), prompt, 20)
    turn = [*prompt, *first, 11, 12, 13]
    assert greedy(make_engine(model, 8), turn, 4) == greedy(engine_after(model, prompt), turn, 4)
    expected = logits_of(engine_after(model, prompt), turn, CachedTokens(device=64))
    settings = {"memory": {"memory_bytes": 1 << 20}, "disk": {"disk_dir": tmp_path}}.get(tier, {})
    engine = make_engine(model, 8, **settings)
    assert greedy(engine, prompt, 20) == first
    if tier == "memory":
        for other in others:
            greedy(engine, other, 2)
    if tier == "disk":
        engine.kv_cache.shut()
        engine = make_engine(model, 8, **settings)
    assert torch.equal(logits_of(engine, turn, CachedTokens(**{tier: 64})), expected)
    engine.kv_cache.shut()


def engine_after(model: CausalLM, prompt: list[int]) -> Engine:
    """An engine that keeps all of one prompt and its reply in its pool."""
    engine = make_engine(model, 8)
    greedy(engine, prompt, 20)
    return engine


def logits_of(engine: Engine, prompt: list[int], cached: CachedTokens) -> torch.Tensor:
    """The logits behind a prompt and behind the three tokens that follow it greedily."""
    request = engine.new_request(prompt, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    found = []
    compute_logits = engine.model.compute_logits
    engine.model.compute_logits = lambda *rows: found.append(compute_logits(*rows)) or found[-1]  # type: ignore
    try:
        list(engine.run(request))
    finally:
        del engine.model.compute_logits
    assert request.cached_tokens == cached
    assert request.metrics().num_cached_tokens == cached.total
    return torch.cat(found)


def test_an_empty_table_has_nothing_to_fetch(caches: list[KvCache]) -> None:
    cache = make_cache(caches, 4, memory_bytes=PAGE)
    assert cache.fetch(PageTable())
