"""Who is computed when: order, room, preemption."""

from __future__ import annotations

import sys
from types import FrameType

import pytest
import torch

from duckllm.engine.kv_cache import PAGE_TOKENS, KvCache
from duckllm.engine.request import Request
from duckllm.engine.scheduler import Scheduled, Scheduler
from duckllm.outputs import CachedTokens
from duckllm.sampling_params import SamplingParams


def new_tensors(max_tokens: int) -> list[tuple[torch.Tensor, ...]]:
    return [(torch.zeros(max_tokens, 1),)]


def make_scheduler(pages: int = 100, step: int = 8, seqs: int = 64) -> Scheduler:
    return Scheduler(KvCache(new_tensors, pages * PAGE_TOKENS), step, seqs)


def make_request(name: str, num_tokens: int, first: int = 0) -> Request:
    params = SamplingParams(max_tokens=1000)
    prompt = range(first, first + num_tokens)
    return Request(name, prompt, params, vocab_size=10**6, max_model_len=10**6, eos_token_ids=frozenset())


def compute(scheduler: Scheduler) -> list[tuple[str, int, int]]:
    """One step as the engine does it: who, from where to where."""
    step = scheduler.schedule()
    for each in step:
        finish(scheduler, each)
    return [(each.request.request_id, each.start, each.stop) for each in step]


def finish(scheduler: Scheduler, each: Scheduled) -> None:
    each.request.num_computed_tokens = each.stop
    scheduler.kv_cache.seal(each.table, each.request.token_ids, each.stop)
    if each.ends:
        each.request.append(7)


def test_a_long_prompt_leaves_room_for_those_who_answer() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 3))
    assert compute(scheduler) == [("a", 0, 3)]
    scheduler.add(make_request("long", 20, first=100))
    scheduler.add(make_request("c", 2, first=500))
    assert compute(scheduler) == [("a", 3, 4), ("long", 0, 7)]
    assert compute(scheduler) == [("a", 4, 5), ("long", 7, 14)]
    # What the long prompt leaves of a step goes to the next one.
    assert compute(scheduler) == [("a", 5, 6), ("long", 14, 20), ("c", 0, 1)]
    assert compute(scheduler) == [("a", 6, 7), ("long", 20, 21), ("c", 1, 2)]
    assert compute(scheduler) == [("a", 7, 8), ("long", 21, 22), ("c", 2, 3)]


def test_no_more_requests_than_allowed_and_the_first_come_first() -> None:
    scheduler = make_scheduler(seqs=2)
    requests = [make_request(name, 2, first=100 * number) for number, name in enumerate("abc")]
    for request in requests:
        scheduler.add(request)
    assert [name for name, *_ in compute(scheduler)] == ["a", "b"]
    assert [name for name, *_ in compute(scheduler)] == ["a", "b"]
    scheduler.remove(requests[0])
    assert [name for name, *_ in compute(scheduler)] == ["b", "c"]


def test_guesses_share_what_those_who_answer_leave_of_a_step() -> None:
    """With a step's worth of guesses of the first ones, the last one would wait until these have ended."""
    scheduler = make_scheduler(step=9)
    requests = [make_request(name, 2, first=100 * number) for number, name in enumerate("abcd")]
    for request in requests:
        scheduler.add(request)
    assert len(compute(scheduler)) == 4
    for request in requests:
        request.draft_token_ids = [1, 2, 3, 4]
    step = scheduler.schedule()
    assert [len(each.drafts) for each in step] == [2, 1, 1, 1]
    requests[0].draft_token_ids, requests[2].draft_token_ids = [], [1]
    assert [len(each.drafts) for each in scheduler.schedule()] == [0, 2, 1, 2]
    scheduler.max_step_tokens = 5
    requests[0].draft_token_ids = [1, 2]
    assert [len(each.drafts) for each in scheduler.schedule()] == [1, 0, 0, 0]
    scheduler.max_step_tokens = 3
    assert [(each.request.request_id, len(each.drafts)) for each in scheduler.schedule()] == [
        ("a", 0), ("b", 0), ("c", 0),
    ]  # fmt: skip
    # A prompt has half of what is left, else it would wait for the others' ends as well.
    scheduler.max_step_tokens = 12
    scheduler.add(make_request("long", 30, first=500))
    for _ in range(2):
        step = scheduler.schedule()
        assert [len(each.token_ids) for each in step] == [2, 2, 2, 2, 4]


def test_a_step_that_was_not_computed_is_scheduled_again() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 5))
    first = scheduler.schedule()
    assert scheduler.schedule() == first
    # Interrupted between the model and the sampler: the last token is computed once more.
    first[0].request.num_computed_tokens = 5
    assert compute(scheduler) == [("a", 4, 5)]


def test_who_came_last_makes_room_and_comes_back_with_all_its_tokens() -> None:
    scheduler = make_scheduler(pages=4, step=100)
    one, two = make_request("one", 2 * PAGE_TOKENS - 1), make_request("two", 2 * PAGE_TOKENS - 1, first=500)
    scheduler.add(one)
    scheduler.add(two)
    assert [name for name, *_ in compute(scheduler)] == ["one", "two"]
    assert [name for name, *_ in compute(scheduler)] == ["one", "two"]
    # Both need a third page, and there is none: the older one takes it from the other.
    assert compute(scheduler) == [("one", 2 * PAGE_TOKENS, 2 * PAGE_TOKENS + 1)]
    assert two.num_computed_tokens == 0
    assert len(two.token_ids) == 2 * PAGE_TOKENS + 1
    scheduler.remove(one)
    # A part of its pages may be there still; nothing of it is lost.
    [(name, start, stop)] = compute(scheduler)
    assert (name, stop) == ("two", 2 * PAGE_TOKENS + 1)
    assert start in (0, PAGE_TOKENS, 2 * PAGE_TOKENS)
    scheduler.remove(two)
    assert scheduler.kv_cache.num_available_pages == 4


def test_a_removed_request_leaves_its_pages_behind() -> None:
    scheduler = make_scheduler(step=100)
    request = make_request("a", 2 * PAGE_TOKENS + 3)
    scheduler.add(request)
    scheduler.add(request)  # twice is once
    assert compute(scheduler) == [("a", 0, 2 * PAGE_TOKENS + 3)]
    scheduler.remove(request)
    scheduler.remove(request)
    assert request not in scheduler
    assert scheduler.schedule() == []
    assert scheduler.kv_cache.num_available_pages == 100
    scheduler.add(request)
    assert compute(scheduler) == [("a", 2 * PAGE_TOKENS, 2 * PAGE_TOKENS + 4)]


@pytest.mark.parametrize("method", ["open", "reserve", "seal", "close"])
@pytest.mark.parametrize("line", range(1, 12))
def test_an_interruption_of_the_bookkeeping_costs_only_time(method: str, line: int) -> None:
    """Interrupted at any line of the cache's own code, everything is scheduled anew and nothing leaks."""
    scheduler = make_scheduler(pages=6, step=100)
    requests = [make_request(name, 2 * PAGE_TOKENS + 1, first=500 * n) for n, name in enumerate("abc")]
    for request in requests:
        scheduler.add(request)
    code = getattr(KvCache, method).__code__
    left = line

    def trace(frame: FrameType, event: str, _argument: object) -> object:
        nonlocal left
        if event == "line" and frame.f_code is code:
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for _ in range(4):
            compute(scheduler)
        scheduler.remove(requests[0])
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    for request in requests:  # as whoever runs a request does before each step
        scheduler.add(request)
    for request in requests:
        while len(request.token_ids) < 2 * PAGE_TOKENS + 8:
            compute(scheduler)
        scheduler.remove(request)
    assert scheduler.kv_cache.num_available_pages == 6


def test_a_common_beginning_is_computed_once() -> None:
    """By the first; whoever begins alike waits for it, and others do not wait for either."""
    scheduler = make_scheduler(step=12)
    common = 2 * PAGE_TOKENS
    first, second = make_request("first", common + 5), make_request("second", common + 9)
    other = make_request("other", 3, first=500)
    for request in (first, second, other):
        scheduler.add(request)
    assert compute(scheduler) == [("first", 0, 12)]
    assert compute(scheduler) == [("first", 12, 24)]
    assert compute(scheduler) == [("first", 24, 36)]
    # Both pages are there now, and the step has room for what is left of all.
    assert compute(scheduler) == [("first", 36, 37), ("second", 32, 41), ("other", 0, 2)]
    assert second.cached_tokens == CachedTokens(device=common)
    for request in (first, second, other):
        scheduler.remove(request)
    assert scheduler.kv_cache.num_available_pages == 100


@pytest.mark.parametrize("is_removed", [True, False])
def test_who_waits_for_a_beginning_goes_on_alone_when_the_other_leaves(is_removed: bool) -> None:
    scheduler = make_scheduler(step=20)
    first, second = make_request("first", 50), make_request("second", 50)
    scheduler.add(first)
    scheduler.add(second)
    assert compute(scheduler) == [("first", 0, 20)]
    scheduler.remove(first if is_removed else second)
    if not is_removed:
        assert compute(scheduler) == [("first", 20, 40)]
        scheduler.add(second)
        assert compute(scheduler) == [("first", 40, 50)]
        assert compute(scheduler) == [("first", 50, 51), ("second", 48, 50)]
    else:
        assert compute(scheduler) == [("second", PAGE_TOKENS, PAGE_TOKENS + 20)]


def test_who_shares_no_whole_page_does_not_wait() -> None:
    scheduler = make_scheduler(step=100)
    for name in ("first", "second"):
        scheduler.add(make_request(name, PAGE_TOKENS))  # its last token is computed in any case
    assert compute(scheduler) == [("first", 0, PAGE_TOKENS), ("second", 0, PAGE_TOKENS)]


@pytest.mark.parametrize("step", [1, 3])
def test_more_requests_than_a_step_has_tokens_take_turns(step: int) -> None:
    scheduler = make_scheduler(step=step)
    requests = [make_request(name, 1, first=100 * number) for number, name in enumerate("abcde")]
    for request in requests:
        scheduler.add(request)
    for _ in range(30):
        assert sum(stop - start for _, start, stop in compute(scheduler)) == step
    before = [request.num_output_tokens for request in requests]
    for _ in range(20):
        compute(scheduler)
    gained = [request.num_output_tokens - count for request, count in zip(requests, before, strict=True)]
    assert sum(gained) == 20 * step
    assert max(gained) - min(gained) <= 1
    for request in requests:
        scheduler.remove(request)
    assert scheduler._last_turn == {}


def test_a_long_prompt_comes_forward_however_many_answer() -> None:
    """And those who answer wait for no more than their share of it."""
    scheduler = make_scheduler(step=16)
    for number in range(16):
        scheduler.add(make_request(f"{number}", 1, first=100 * number))
    compute(scheduler)
    compute(scheduler)
    long = make_request("long", 40, first=5000)
    scheduler.add(long)
    steps = [compute(scheduler) for _ in range(20)]
    assert long.num_computed_tokens == 40
    assert all(sum(name != "long" for name, *_ in step) == 14 for step in steps)
