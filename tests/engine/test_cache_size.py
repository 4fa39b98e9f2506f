"""How much KV cache there is: by what weights leave free, by what was asked for, or not at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from duckllm import LLM
from duckllm.device import Device
from duckllm.engine.cache_size import (
    GPU_PROCESS_BYTES,
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
    for of, hint in (
        (replace(big, available_bytes=8 * gib), "workers on other machines need less here"),
        (replace(big, available_bytes=6 * gib), "the host needs a larger memory, or a GPU"),
        (replace(big, expert_bytes=0, available_bytes=7 * gib), "a smaller max_model_len needs less here"),
        (replace(big, expert_bytes=0, available_bytes=6 * gib), "the host needs a larger memory, or a GPU"),
    ):
        with pytest.raises(ConfigError) as caught:
            size(of, 17 + 16 * 4)
        assert f"({hint}" in str(caught.value)
    assert size(needs(0, weight_bytes=0), 64).cache_bytes == 4 * PAGE
    with pytest.raises(ConfigError, match=r"memory: got 39\.06 KiB available"):
        size(needs(0))


def test_it_is_told_in_a_sentence() -> None:
    gib = 1 << 30
    assert str(HostMemory(2 * gib, gib, 0, gib // 2, 12345, 100)) == (
        "host on CPU: 2.00 GiB of weights and 1.00 GiB of experts, 512.00 MiB of KV cache, which holds "
        "12,345 tokens"
    )
    assert str(HostMemory(gib, 0, 0, 100 << 10, 32, 32, 3 << 19, "context cut")) == (
        "host on CPU: 1.00 GiB of weights, 100.00 KiB of KV cache, which holds 32 tokens, 1.50 MiB for what "
        "leaves it; context cut"
    )
    card = Device("cuda:1", "NVIDIA H200", 4 * gib, 8 * gib)
    made = HostMemory(2 * gib, gib, 0, gib // 2, 12345, 100, gib, "context cut", card, gib // 4, 3 * gib)
    assert str(made) == (
        "host on NVIDIA H200: 2.00 GiB of weights, 3.00 GiB for graphs and workspaces, 512.00 MiB of KV "
        "cache, which holds 12,345 tokens; in CPU memory 256.00 MiB of weights and 1.00 GiB of experts, "
        "1.00 GiB for what leaves it; context cut"
    )


def test_a_context_that_was_cut_is_told() -> None:
    assert size(needs(1000 * PAGE)).cut == size(needs(1000 * PAGE), 40, 3 * PAGE).cut == ""
    cut = size(needs(1000 * PAGE), None, 3 * PAGE)
    assert cut.cut == "context cut from 64 to 48 tokens by kv_cache_bytes"
    assert size(needs(3 * PAGE)).cut == "context cut from 64 to 48 tokens by the memory there is"
    assert size(needs(1000 * PAGE, tier_bytes=PAGE)).need_bytes == FIXED + PAGE + 3 * 4 * PAGE


def on_card(rest: int, longest: int = 64, **changes: Any) -> HostNeeds:
    """A host with a card that has ``rest`` bytes for its KV cache, and just enough CPU memory."""
    card = Device("cuda:0", "a card", 33_000 + rest, 40_000 + rest)
    values = {"expert_bytes": 4_000, "process_bytes": 6_000, "tier_bytes": 2 * PAGE, "embedding_bytes": 500}
    values |= {"weight_bytes": 30_000, "workspace_bytes": 3_000, "device": card, "token_bytes": TOKEN}
    values |= {"available_bytes": 10_500 + 2 * PAGE, "total_bytes": 100_000, "longest": longest}
    return HostNeeds(**{**values, **changes})


def test_on_a_card_the_cache_takes_nine_tenths_of_what_weights_and_workspaces_leave() -> None:
    made = size(on_card(100 * PAGE), seqs=100)
    assert (made.cache_tokens, made.cache_bytes) == (90 * PAGE_TOKENS, 90 * PAGE)
    assert made.vram_bytes == 33_000 + 90 * PAGE
    assert made.need_bytes == 10_500 + 2 * PAGE
    assert (made.weight_bytes, made.embedding_bytes, made.workspace_bytes) == (30_000, 500, 3_000)
    assert size(on_card(100 * PAGE)).cache_tokens == 3 * 64  # no more contexts than requests
    cut = size(on_card(200 * PAGE, 100_000))
    assert cut.cut == "context cut from 100000 to 2880 tokens by the VRAM there is"
    assert size(on_card(1000 * PAGE, 100_000)).max_model_len == 900 * PAGE_TOKENS
    assert size(needs(1000 * PAGE)).vram_bytes == 0


def test_each_memory_is_counted_against_its_own_budget() -> None:
    assert size(on_card(4 * PAGE), 64).cache_tokens == 64
    with pytest.raises(ConfigError) as caught:
        size(on_card(4 * PAGE - 1), 64)
    assert str(caught.value) == (
        "VRAM: got 38.48 KiB free on a card, expected at least 38.48 KiB: 29.30 KiB of weights, 2.93 KiB for "
        "graphs and workspaces, 6.25 KiB of KV cache for one context of 64 tokens (a card with more of it, "
        "or device cpu, which needs none)"
    )
    assert caught.value.field == "VRAM"
    gib = 1 << 30
    roomy = Device("cuda:0", "a card", 8 * gib, 8 * gib)
    with pytest.raises(
        ConfigError, match=r"\(a smaller kv_cache_bytes or max_step_tokens, which need less, or"
    ):
        size(on_card(0, device=roomy, workspace_bytes=gib), cache=7 * gib + 1)
    with pytest.raises(
        ConfigError, match=r"\(a smaller max_model_len or max_step_tokens, which need less, or"
    ):
        size(on_card(0, device=roomy, workspace_bytes=8 * gib))
    with pytest.raises(ConfigError) as caught:
        size(on_card(100 * PAGE, available_bytes=10_499 + 2 * PAGE))
    assert str(caught.value) == (
        "memory: got 13.38 KiB available, expected at least 13.38 KiB: 500 bytes of weights, 3.91 KiB of "
        "experts, 5.86 KiB for the processes, 3.13 KiB of kv_memory_bytes (a smaller kv_memory_bytes, or "
        "workers on other machines, need less here)"
    )
    with pytest.raises(ConfigError, match=r"at most 410, what the 40\.06 KiB of VRAM hold at 100 bytes a"):
        size(on_card(1024, longest=1000), 411)


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


def test_what_a_host_with_a_card_needs_of_a_model(demo: Inspection) -> None:
    card = Device("cuda:0", "a card", 7, 9)
    options = {"available_bytes": 1, "total_bytes": 2, "num_workers": 1}
    plain = host_needs(demo, drafts=False, weight_format=None, **options, device=card, max_step_tokens=16)
    embedding = next(part for part in demo.parts if part.name == "embedding")
    assert plain.embedding_bytes == embedding.loaded_bytes == embedding.stored_bytes > 0
    assert embedding.gpu_bytes == 0
    assert plain.weight_bytes == sum(part.gpu_bytes for part in demo.parts)
    assert plain.token_bytes == 2 * 6 * (64 + 16 + 32)
    assert plain.process_bytes == HOST_PROCESS_BYTES + GPU_PROCESS_BYTES + WORKER_PROCESS_BYTES
    drafting = host_needs(demo, drafts=True, weight_format=None, **options, device=card, max_step_tokens=65)
    assert drafting.weight_bytes - plain.weight_bytes == demo.draft_gpu_bytes > 0
    assert drafting.token_bytes == 2 * 7 * (64 + 16 + 32)
    # Steps of up to 64 rows share the graphs' memory, a longer one has its own.
    gaps = drafting.weight_bytes // 40 - plain.weight_bytes // 40
    assert drafting.workspace_bytes - plain.workspace_bytes == 4 * demo.step_elements + gaps
    rows = 2 * 64 * demo.step_elements + 4096 * (demo.rotary_elements + 64) + 2 * 64 * demo.vocab_size
    assert plain.workspace_bytes == (1 << 29) + 4 * rows + plain.weight_bytes // 40


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
