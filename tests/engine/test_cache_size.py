"""How much KV cache there is: by what weights leave free, by what was asked for, or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from duckllm import LLM
from duckllm.engine.cache_size import (
    HOST_PROCESS_BYTES,
    PAGE_TOKENS,
    WORKER_PROCESS_BYTES,
    HostMemory,
    HostNeeds,
    host_needs,
    plan_host,
)
from duckllm.errors import ConfigError
from duckllm.models.inspection import Inspection, inspect_model

TOKEN = 100
PAGE = PAGE_TOKENS * TOKEN
FIXED = 40_000


def needs(rest: int, longest: int = 64, total: int = 10**9, **changes: Any) -> HostNeeds:
    """A host that keeps ``rest`` bytes free."""
    values = {"weight_bytes": FIXED - 10_000, "expert_bytes": 4_000, "process_bytes": 6_000}
    have = {"available_bytes": FIXED + rest, "total_bytes": total}
    return HostNeeds(**{**values, **changes}, token_bytes=TOKEN, longest=longest, **have)


def size(of: HostNeeds, length: int | None = None, cache: int | None = None, seqs: int = 3) -> HostMemory:
    return plan_host(of, max_model_len=length, cache_bytes=cache, max_num_seqs=seqs)


def test_the_cache_takes_a_quarter_of_the_rest() -> None:
    made = size(needs(4 * 7 * PAGE + 4 * PAGE - 1))
    assert made == HostMemory(FIXED - 10_000, 4_000, 6_000, 7 * PAGE, 7 * PAGE_TOKENS, 64)
    assert made.need_bytes == FIXED + 7 * PAGE


def test_it_holds_no_more_contexts_than_requests_and_one_at_least() -> None:
    assert size(needs(1000 * PAGE)).cache_tokens == 3 * 64
    assert size(needs(1000 * PAGE), seqs=5).cache_tokens == 5 * 64
    assert size(needs(1000 * PAGE), 20, seqs=2).cache_tokens == 2 * 32  # whole pages
    assert size(needs(5 * PAGE), 64).cache_tokens == 64


def test_a_context_is_as_long_as_fits() -> None:
    longest = 100_000
    assert size(needs(4 * 5000 * PAGE, longest)).max_model_len == 5000 * PAGE_TOKENS
    # A quarter were less than a conversation: it may take all of the rest.
    made = size(needs(4 * 50 * PAGE, longest))
    assert (made.max_model_len, made.cache_tokens) == (2048, 2048)
    made = size(needs(9 * PAGE + 1, longest))
    assert (made.max_model_len, made.cache_tokens) == (9 * PAGE_TOKENS, 9 * PAGE_TOKENS)
    assert size(needs(1000 * PAGE, longest), cache=30 * PAGE + 5).max_model_len == 30 * PAGE_TOKENS


def test_what_was_asked_for_goes_before() -> None:
    made = size(needs(1000 * PAGE), 40, 50 * PAGE + 1)
    assert (made.max_model_len, made.cache_tokens, made.cache_bytes) == (40, 50 * PAGE_TOKENS, 50 * PAGE)


@pytest.mark.parametrize(
    ("of", "arguments", "message"),
    [
        (needs(10**6), (65,), "max_model_len: got 65, expected at most 64, the model's longest context"),
        (
            needs(10**6, total=6000),
            (61,),
            "max_model_len: got 61, expected at most 60, what the 5.86 KiB of this machine's memory hold "
            "at 100 bytes a token",
        ),
        (needs(10**6), (40, 3 * PAGE - 1), "kv_cache_bytes: got 4.69 KiB, expected at least 4.69 KiB, for"),
        (
            needs(1 << 20),
            (40, (1 << 20) + 1),
            "memory: got 1.04 MiB available, expected at least 1.04 MiB: 29.30 KiB of weights, 3.91 KiB of "
            "experts, 5.86 KiB for the processes, 1.00 MiB of kv_cache_bytes (a smaller kv_cache_bytes, or",
        ),
        (
            needs(10 * PAGE, tier_bytes=7 * PAGE),
            (40, 4 * PAGE),
            "memory: got 54.69 KiB available, expected at least 56.25 KiB: 29.30 KiB of weights, 3.91 KiB of "
            "experts, 5.86 KiB for the processes, 10.94 KiB of kv_memory_bytes, 6.25 KiB of kv_cache_bytes (",
        ),
        (needs(10**6, tier_bytes=PAGE - 1), (40,), "kv_memory_bytes: got 1.56 KiB, expected 0, or at least"),
    ],
)
def test_what_cannot_be_is_refused(of: HostNeeds, arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        size(of, *arguments)
    assert str(caught.value).startswith(message)


def test_weights_and_a_context_that_do_not_fit_are_refused_with_what_they_need() -> None:
    gib = 1 << 30
    big = HostNeeds(6 * gib, 3 * gib, gib // 2, gib // 64, 100, 10 * gib, 16 * gib, tier_bytes=gib // 4)
    assert size(big, 16).cache_tokens == 16
    with pytest.raises(ConfigError) as caught:
        size(big, 17)
    assert str(caught.value) == (
        "memory: got 10.00 GiB available, expected at least 10.25 GiB: 6.00 GiB of weights, 3.00 GiB of "
        "experts, 512.00 MiB for the processes, 256.00 MiB of kv_memory_bytes, 512.00 MiB of KV cache for "
        "one context of 17 tokens (a smaller max_model_len, or workers on other machines, need less here)"
    )
    with pytest.raises(ConfigError, match=r"memory: got 39\.06 KiB available"):
        size(needs(0))


def test_it_is_told_in_a_sentence() -> None:
    gib = 1 << 30
    assert str(HostMemory(2 * gib, gib, 0, gib // 2, 12345, 100)) == (
        "2.00 GiB of weights and 1.00 GiB of experts, 512.00 MiB of KV cache, which holds 12,345 tokens"
    )
    assert str(HostMemory(gib, 0, 0, 100 << 10, 32, 32, 3 << 19, "context cut")) == (
        "1.00 GiB of weights, 100.00 KiB of KV cache, which holds 32 tokens, 1.50 MiB for what leaves it; "
        "context cut"
    )


def test_a_context_that_was_cut_is_told() -> None:
    assert size(needs(1000 * PAGE)).cut == size(needs(1000 * PAGE), 40, 3 * PAGE).cut == ""
    cut = size(needs(1000 * PAGE), None, 3 * PAGE)
    assert cut.cut == "context cut from 64 to 48 tokens by kv_cache_bytes"
    assert size(needs(3 * PAGE)).cut == "context cut from 64 to 48 tokens by the memory there is"
    assert size(needs(1000 * PAGE, tier_bytes=PAGE)).need_bytes == FIXED + PAGE + 3 * 4 * PAGE


@pytest.fixture(scope="module")
def demo(demo_folder: Path) -> Inspection:
    return inspect_model(demo_folder)


def test_what_a_host_needs_of_a_model(demo: Inspection) -> None:
    options = {"available_bytes": 1, "total_bytes": 2}
    plain = host_needs(demo, drafts=False, weight_format=None, num_workers=0, **options)
    assert plain.weight_bytes == sum(part.loaded_bytes for part in demo.parts)
    assert (plain.expert_bytes, plain.process_bytes) == (0, HOST_PROCESS_BYTES)
    assert plain.token_bytes == 4 * 6 * (64 + 16 + 32)
    here = host_needs(demo, drafts=True, weight_format="fp9", num_workers=2, **options)
    assert here.weight_bytes == plain.weight_bytes + demo.draft_bytes
    assert here.expert_bytes * 5 == demo.expert_bytes("fp9") * 6
    assert here.process_bytes == HOST_PROCESS_BYTES + 2 * WORKER_PROCESS_BYTES
    assert here.token_bytes == 4 * 7 * (64 + 16 + 32)


@pytest.mark.parametrize("draft", ["off", "on"])
def test_the_cache_is_as_large_as_it_was_planned(
    demo_folder: Path, monkeypatch: pytest.MonkeyPatch, draft: str
) -> None:
    import duckllm.llm

    monkeypatch.setattr(duckllm.llm, "available_memory_bytes", lambda: 1 << 30)
    with LLM(demo_folder, workers=0, draft=draft, max_num_seqs=4) as llm:
        memory = llm.memory()
        cache = llm._engine.kv_cache
        assert memory.max_model_len == llm.max_model_len == 4096
        assert memory.cache_tokens == 4 * 4096 == cache.num_pages * PAGE_TOKENS
        assert memory.cache_bytes == sum(tensor.nbytes for layer in cache.tensors for tensor in layer)
    monkeypatch.setattr(duckllm.llm, "available_memory_bytes", lambda: 400 << 20)
    with pytest.raises(ConfigError, match=r"memory: got 400\.00 MiB available, expected at least 4\d\d\."):
        LLM(demo_folder, workers=0, draft=draft)
