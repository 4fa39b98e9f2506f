"""The native loops behind the ceilings: what they read, wrote and computed, on every ISA."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest

from duckllm import _native

THREADS = (1, 3)


def aligned(num_bytes: int, offset: int = 0) -> np.ndarray:
    """Zeros that begin ``offset`` bytes after a multiple of 64."""
    memory = np.zeros(num_bytes + 128, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    return memory[start : start + num_bytes]


@pytest.fixture(params=_native.available_isas())
def isa(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=THREADS)
def loops(isa: str, request: pytest.FixtureRequest) -> _native.CeilingLoops:
    return _native.CeilingLoops(request.param, isa)


def random_data(loops: _native.CeilingLoops, granules: int = 3, seed: int = 1) -> np.ndarray:
    data = aligned(granules * loops.granule_bytes)
    loops.randomise(data, seed)
    return data


def exclusive_or(data: np.ndarray) -> int:
    return int(np.bitwise_xor.reduce(data.view(np.uint64)))


def test_random_data_is_varied_and_depends_on_the_seed(loops: _native.CeilingLoops) -> None:
    words = random_data(loops).view(np.uint64)
    assert len(np.unique(words)) == words.size
    bits = np.unpackbits(words.view(np.uint8)).mean()
    assert abs(bits - 0.5) < 0.02
    assert not np.array_equal(words, random_data(loops, seed=2).view(np.uint64))


def test_random_data_does_not_depend_on_the_threads() -> None:
    one, three = _native.CeilingLoops(1), _native.CeilingLoops(3)
    data, same = aligned(3 * 4096), aligned(3 * 4096)
    one.randomise(data, 5)
    three.randomise(same, 5)
    assert np.array_equal(data, same)


@pytest.mark.parametrize("variant", _native.CeilingLoops.variants("read"))
@pytest.mark.parametrize(("passes", "warm_passes"), [(1, 0), (2, 0), (3, 2)])
def test_read_sees_every_word(
    loops: _native.CeilingLoops, variant: str, passes: int, warm_passes: int
) -> None:
    data = random_data(loops)
    seconds, checksum = loops.read(variant, data, passes, warm_passes)
    assert seconds > 0
    assert checksum == exclusive_or(data)


@pytest.mark.parametrize("variant", _native.CeilingLoops.variants("read"))
def test_a_changed_byte_anywhere_changes_the_checksum(isa: str, variant: str) -> None:
    loops = _native.CeilingLoops(1, isa)
    data = random_data(loops, granules=1)
    _, before = loops.read(variant, data)
    for position in range(0, data.size, 61):
        data[position] ^= 1
        assert loops.read(variant, data)[1] != before
        data[position] ^= 1
    assert loops.read(variant, data)[1] == before


@pytest.mark.parametrize("variant", _native.CeilingLoops.variants("fill"))
def test_fill_writes_every_byte_and_no_other(loops: _native.CeilingLoops, variant: str) -> None:
    around = aligned(3 * loops.granule_bytes + 128)
    data = around[64:-64]
    assert loops.fill(variant, data, 0xA5) > 0
    assert (data == 0xA5).all()
    assert not around[:64].any()
    assert not around[-64:].any()


@pytest.mark.parametrize("variant", _native.CeilingLoops.variants("copy"))
def test_copy_copies_and_leaves_the_source(loops: _native.CeilingLoops, variant: str) -> None:
    source, kept = random_data(loops), random_data(loops)
    around = aligned(source.size + 128)
    assert loops.copy(variant, around[64:-64], source) > 0
    assert np.array_equal(around[64:-64], kept)
    assert np.array_equal(source, kept)
    assert not around[:64].any()
    assert not around[-64:].any()


@pytest.mark.parametrize("steps", [1, 2, 1000, 2**18])
def test_fma_follows_its_closed_form(loops: _native.CeilingLoops, steps: int) -> None:
    lanes = loops.fma_lanes
    seconds, total = loops.fma(steps)
    assert seconds > 0
    assert total == lanes * (lanes - 1) / 2 + lanes * steps


def test_the_arithmetic_of_a_step(isa: str) -> None:
    lanes = {"scalar": 4, "avx2": 8, "avx512": 16}[isa]
    loops = _native.CeilingLoops(2, isa)
    assert loops.isa == isa
    assert loops.num_threads == 2
    assert loops.fma_lanes == 12 * lanes
    assert loops.flop_per_step == 2 * 2 * 12 * lanes * 2  # two FMAs of two operations, chains, lanes, threads


def test_the_default_isa_is_the_kernels() -> None:
    assert _native.CeilingLoops(1).isa == _native.select_isa()


Call = Callable[[_native.CeilingLoops, np.ndarray], object]
REFUSED: dict[str, tuple[Call, str]] = {
    "variant of read": (
        lambda c, d: c.read("quick", d),
        "variant: got 'quick', expected one of plain, prefetch, streams, streams_prefetch",
    ),
    "variant of fill": (
        lambda c, d: c.fill("prefetch", d, 0),
        "variant: got 'prefetch', expected one of plain, nontemporal, libc",
    ),
    "length": (
        lambda c, d: c.read("plain", d[:-64]),
        "data: got 16320 bytes, expected a multiple of 8192, not 0",
    ),
    "nothing": (lambda c, d: c.read("plain", d[:0]), "data: got 0 bytes, expected a multiple of 8192, not 0"),
    "alignment": (
        lambda c, d: c.read("plain", aligned(8192, offset=8)),
        "data: got unaligned memory, expected alignment to 64 bytes",
    ),
    "no pass": (lambda c, d: c.read("plain", d, 0), "passes: got 0, expected 1 or more"),
    "negative passes": (lambda c, d: c.read("plain", d, -1), "passes: got -1, expected 0 to 2147483647"),
    "value": (lambda c, d: c.fill("plain", d, 256), "value: got 256, expected 0 to 255"),
    "overlap": (
        lambda c, d: c.copy("plain", d[4096:12288], d[:8192]),
        "to: got memory that overlaps `from`, expected memory of its own",
    ),
    "sizes": (
        lambda c, d: c.copy("plain", aligned(8192), d),
        "to: got 8192 bytes, expected 16384, as many as from_ has",
    ),
    "steps": (lambda c, d: c.fma(0), "steps: got 0, expected 1 to 4194304"),
    "too many steps": (lambda c, d: c.fma(2**22 + 1), "steps: got 4194305, expected 1 to 4194304"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_loops_refuse(case: str) -> None:
    call, message = REFUSED[case]
    loops, data = _native.CeilingLoops(2, "scalar"), aligned(16384)
    with pytest.raises(ValueError) as caught:
        call(loops, data)
    assert str(caught.value) == message
    assert not data.any()


def test_memory_that_cannot_be_written_is_refused() -> None:
    data = aligned(4096)
    data.flags.writeable = False
    with pytest.raises(TypeError):
        _native.CeilingLoops(1).fill("plain", data, 1)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"isa: got 'neon', expected one of scalar"):
        _native.CeilingLoops(1, "neon")
    with pytest.raises(ValueError, match=r"op: got 'seek', expected one of read, fill, copy"):
        _native.CeilingLoops.variants("seek")
    with pytest.raises(ValueError, match=r"num_threads: got 0, expected 1 to 1024"):
        _native.CeilingLoops(0)


def test_the_caller_may_use_the_same_cores_afterwards() -> None:
    before = os.sched_getaffinity(0)
    loops, data = _native.CeilingLoops(3), aligned(3 * 4096)
    loops.read("plain", data)
    loops.fma(10)
    assert os.sched_getaffinity(0) == before
