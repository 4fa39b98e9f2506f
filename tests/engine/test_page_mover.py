"""Pages as bytes: every row of every tensor, each in its place, and nothing else touched."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from duckllm.engine.cache_size import PAGE_TOKENS
from duckllm.engine.kv_cache import KvCache, page_format
from duckllm.engine.page_mover import PageMover
from duckllm.engine.tiers import TierSettings

LAYERS = [(576, 128), (576,), (8, 8), (1,)]  # widths of each layer's tensors
PAGES = 5
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def new_tensors(max_tokens: int, dtype: torch.dtype, device: str) -> list[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(max_tokens)

    def new(width: int) -> torch.Tensor:
        return torch.randn(max_tokens, width, generator=generator).to(device, dtype)

    return [tuple(new(width) for width in widths) for widths in LAYERS]


def flat(layers: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
    return [tensor for layer in layers for tensor in layer]


def expected_bytes(tensors: list[torch.Tensor], page: int) -> bytes:
    """docs/kv-cache.md: for each layer in order and each of its tensors in order, the rows of the page."""
    rows = slice(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS)
    return b"".join(each[rows].cpu().view(torch.uint8).numpy().tobytes() for each in tensors)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_page_is_its_rows_layer_by_layer(dtype: torch.dtype, device: str) -> None:
    layers = new_tensors(PAGES * PAGE_TOKENS, dtype, device)
    mover = PageMover(flat(layers), PAGE_TOKENS)
    assert mover.page_bytes == page_format(layers, TierSettings()).page_bytes
    for page in range(PAGES):
        content = mover.read(page)
        assert content.dtype == np.uint8
        assert content.tobytes() == expected_bytes(flat(layers), page)
    assert len({mover.read(page).tobytes() for page in range(PAGES)}) == PAGES


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_page_comes_back_as_it_was_and_alone(dtype: torch.dtype, device: str) -> None:
    tensors = flat(new_tensors(PAGES * PAGE_TOKENS, dtype, device))
    mover = PageMover(tensors, PAGE_TOKENS)
    before = [each.clone() for each in tensors]
    bits = np.random.default_rng(0).integers(0, 256, mover.page_bytes, np.uint8)  # NaN and all
    mover.write(3, bits)
    assert mover.read(3).tobytes() == bits.tobytes() == expected_bytes(tensors, 3)
    for tensor, old in zip(tensors, before, strict=True):
        others = [page for page in range(PAGES) if page != 3]
        pages = tensor.view(PAGES, -1)[others]
        assert torch.equal(pages, old.view(PAGES, -1)[others])
    mover.write(0, mover.read(4))
    assert expected_bytes(tensors, 0) == expected_bytes(before, 4)


@pytest.mark.parametrize("device", DEVICES)
def test_what_was_read_is_the_readers_own(device: str) -> None:
    tensors = flat(new_tensors(PAGES * PAGE_TOKENS, torch.bfloat16, device))
    mover = PageMover(tensors, PAGE_TOKENS)
    first, second = mover.read(0), mover.read(1)
    kept = first.tobytes()
    mover.write(0, second)
    assert first.tobytes() == kept != second.tobytes()
    assert mover.read(0).tobytes() == second.tobytes()


@pytest.mark.parametrize("device", DEVICES)
def test_threads_may_copy_at_the_same_time(device: str) -> None:
    tensors = flat(new_tensors(16 * PAGE_TOKENS, torch.bfloat16, device))
    mover = PageMover(tensors, PAGE_TOKENS)
    whole = [expected_bytes(tensors, page) for page in range(16)]
    wrong: list[int] = []

    def read(first: int) -> None:
        for number in range(100):
            page = (first + number) % 8
            if mover.read(page).tobytes() != whole[page]:
                wrong.append(page)

    threads = [threading.Thread(target=read, args=(first,)) for first in (0, 3, 5)]
    for thread in threads:
        thread.start()
    for number in range(100):
        page = 8 + number % 8
        mover.write(page, mover.read(page))
    for thread in threads:
        thread.join()
    assert not wrong
    assert [expected_bytes(tensors, page) for page in range(16)] == whole


@pytest.fixture(params=DEVICES)
def cache(request: pytest.FixtureRequest) -> Iterator[KvCache]:
    def new(max_tokens: int) -> list[tuple[torch.Tensor, ...]]:
        return new_tensors(max_tokens, torch.bfloat16, request.param)

    made = KvCache(new, 2 * PAGE_TOKENS, TierSettings(memory_bytes=1 << 20))
    yield made
    made.shut()


def test_a_page_of_bf16_goes_to_the_memory_tier_and_comes_back(cache: KvCache) -> None:
    """With its bits; the format says that they are bf16, so that no page of f32 is ever taken for one."""
    prompts = [[seed * 100 + token for token in range(PAGE_TOKENS)] for seed in range(3)]
    tensors = flat(cache.tensors)
    contents = []
    for prompt in prompts:
        table, cached = cache.open([*prompt, 1])
        assert cached == 0
        assert cache.reserve(table, PAGE_TOKENS)
        for tensor in tensors:
            rows = slice(table.pages[0] * PAGE_TOKENS, (table.pages[0] + 1) * PAGE_TOKENS)
            tensor[rows] = torch.randn(PAGE_TOKENS, tensor.shape[1]).to(tensor)
        contents.append(expected_bytes(tensors, table.pages[0]))
        cache.seal(table, prompt, PAGE_TOKENS)
        cache.close(table)
    table, cached = cache.open([*prompts[0], 1])
    assert (cached, len(table.coming)) == (0, 1)
    assert cache.fetch(table)
    assert table.found == {"memory": 1}
    assert expected_bytes(tensors, table.pages[0]) == contents[0]
    assert cache.format.dtype == "bfloat16"
    assert cache.format.page_bytes == 2 * PAGE_TOKENS * sum(sum(widths) for widths in LAYERS)


@pytest.mark.gpu
def test_a_page_is_read_behind_the_steps_that_were_launched() -> None:
    """Though they have not ended, and copies have a stream of their own."""
    tensors = flat(new_tensors(PAGES * PAGE_TOKENS, torch.bfloat16, "cuda"))
    mover = PageMover(tensors, PAGE_TOKENS)
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)  # cycles: a step that takes its time
    for tensor in tensors:
        tensor.fill_(3.0)
    content = mover.read(2)
    assert (torch.from_numpy(content).view(torch.bfloat16) == 3.0).all()
    torch.cuda._sleep(100_000_000)
    copies = [each.clone() for each in tensors]  # read by a step that has not ended
    mover.write(2, np.zeros(mover.page_bytes, np.uint8))
    assert all((each == 3.0).all() for each in copies)
    assert not any(each.view(PAGES, -1)[2].any() for each in tensors)
