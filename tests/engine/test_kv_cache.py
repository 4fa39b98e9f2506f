"""Pages: shared prefixes, reference counts, what goes first when room is needed."""

from __future__ import annotations

import random

import pytest
import torch

from duckllm.engine.kv_cache import PAGE_TOKENS, KvCache, PageTable, num_pages
from support.attention import slots_of


def new_tensors(max_tokens: int) -> list[tuple[torch.Tensor, ...]]:
    return [(torch.zeros(max_tokens, 1),)]


def make_cache(pages: int) -> KvCache:
    return KvCache(new_tensors, pages * PAGE_TOKENS)


def fill(cache: KvCache, token_ids: list[int]) -> tuple[PageTable, int]:
    """Computes a context as the engine does; each token's row becomes its number."""
    table, cached = cache.open(token_ids)
    assert cache.reserve(table, len(token_ids))
    sequence = cache.sequence(table, 0, cached, len(token_ids) - cached)
    slots = slots_of(sequence)
    cache.tensors[0][0][slots[cached:], 0] = torch.tensor(token_ids[cached:], dtype=torch.float32)
    assert cache.tensors[0][0][slots, 0].tolist() == token_ids
    cache.seal(table, token_ids, len(token_ids))
    return table, cached


def tokens(seed: int, count: int) -> list[int]:
    return [random.Random(seed).randrange(1000) for _ in range(count)]


def test_a_prefix_that_is_there_is_shared_and_one_token_is_left() -> None:
    cache = make_cache(20)
    prompt = tokens(1, 3 * PAGE_TOKENS)
    first, cached = fill(cache, prompt)
    assert cached == 0
    # The last page is full and known, but the last token's logits are wanted.
    second, cached = fill(cache, prompt)
    assert cached == 2 * PAGE_TOKENS
    assert second.pages[:2] == first.pages[:2]
    assert second.pages[2] != first.pages[2]
    longer, cached = fill(cache, [*prompt, 7])
    assert cached == 3 * PAGE_TOKENS
    assert cache.num_available_pages == 20 - 3 - 1 - 1
    for table in (first, second, longer):
        cache.close(table)
    assert cache.num_available_pages == 20


@pytest.mark.parametrize("differs_at", [0, PAGE_TOKENS - 1, PAGE_TOKENS, 2 * PAGE_TOKENS - 1])
def test_only_what_is_before_a_difference_is_shared(differs_at: int) -> None:
    cache = make_cache(20)
    prompt = tokens(1, 2 * PAGE_TOKENS + 1)
    fill(cache, prompt)
    other = list(prompt)
    other[differs_at] += 1
    assert fill(cache, other)[1] == differs_at // PAGE_TOKENS * PAGE_TOKENS


def test_the_same_page_behind_another_beginning_is_another_page() -> None:
    cache = make_cache(20)
    same = tokens(1, PAGE_TOKENS)
    fill(cache, [*tokens(2, PAGE_TOKENS), *same, 1])
    assert fill(cache, [*tokens(3, PAGE_TOKENS), *same, 1])[1] == 0


def test_pages_in_use_are_never_given_away() -> None:
    cache = make_cache(4)
    table, _ = fill(cache, tokens(1, 3 * PAGE_TOKENS))
    other, _ = cache.open(tokens(2, 2 * PAGE_TOKENS))
    assert not cache.reserve(other, 2 * PAGE_TOKENS)
    assert other.pages == []
    assert cache.num_available_pages == 1
    cache.close(table)
    assert cache.reserve(other, 2 * PAGE_TOKENS)


def test_what_was_left_longest_goes_first_and_ends_before_beginnings() -> None:
    cache = make_cache(6)
    old, new = tokens(1, 3 * PAGE_TOKENS + 1), tokens(2, 2 * PAGE_TOKENS)
    for prompt in (old, new):  # 4 pages, of which 3 are known, and 2
        cache.close(fill(cache, prompt)[0])
    table, _ = cache.open(tokens(3, 2 * PAGE_TOKENS))
    assert cache.reserve(table, 2 * PAGE_TOKENS)  # the free page, and the last known one of the old context
    assert cache.open(old)[1] == 2 * PAGE_TOKENS
    assert cache.open([*new, 0])[1] == 2 * PAGE_TOKENS


def test_use_makes_a_page_young_again() -> None:
    cache = make_cache(2)
    one, two = tokens(1, PAGE_TOKENS), tokens(2, PAGE_TOKENS)
    for prompt in (one, two):
        cache.close(fill(cache, prompt)[0])
    used, cached = cache.open([*one, 5])
    assert cached == PAGE_TOKENS
    cache.close(used)
    table = PageTable()
    assert cache.reserve(table, 1)
    assert cache.open([*one, 5])[1] == PAGE_TOKENS
    assert cache.open([*two, 5])[1] == 0


def test_a_context_lies_in_consecutive_pages_where_there_is_room() -> None:
    cache = make_cache(64)
    tables = [PageTable() for _ in range(3)]
    for length in range(1, 10 * PAGE_TOKENS):
        for table in tables:
            assert cache.reserve(table, length)
    for table in tables:
        assert table.pages == list(range(table.pages[0], table.pages[0] + 10))


def test_random_histories_leak_nothing_and_mix_nothing_up() -> None:
    cache, rng = make_cache(24), random.Random(5)
    beginnings = [tokens(seed, 3 * PAGE_TOKENS) for seed in range(3)]
    tables: list[PageTable] = []
    hits = 0
    for _ in range(400):
        prompt = [*rng.choice(beginnings)[: rng.randrange(1, 3 * PAGE_TOKENS)], *tokens(rng.random(), 9)]
        table, cached = cache.open(prompt)
        if not cache.reserve(table, len(prompt)):
            cache.close(table)
            cache.close(tables.pop(rng.randrange(len(tables))))
            continue
        cache.close(table)
        table, cached = fill(cache, prompt)
        hits += cached > 0
        tables.append(table)
        used = {page for each in tables for page in each.pages}
        assert cache.num_available_pages == 24 - len(used)
    assert hits > 50
    for table in tables:
        cache.close(table)
    assert cache.num_available_pages == 24
    assert num_pages(1) == num_pages(PAGE_TOKENS) == 1
