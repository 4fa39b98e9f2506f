"""Ceilings: what is measured on what memory, in which order, and that a loop which does nothing is found."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from duckllm import _native
from duckllm.bench import ceilings as module
from duckllm.bench.ceilings import (
    Ceiling,
    MemoryCeilings,
    Spread,
    default_size_bytes,
    fma_ceilings,
    hot_footprints,
    memory_ceilings,
    read_ceiling,
)
from duckllm.bench.expert_step import ExpertStep, RandomExperts, SliceShape
from duckllm.bench.machine import Caches
from duckllm.bench.points import Placed, Point, expert_points, placed_step

SIZE = 2 << 20
SMALL_CACHES = Caches(l2_bytes=64 << 10, llc_bytes=1 << 20)


def test_a_spread_has_the_rates_of_its_times() -> None:
    assert Spread.of(6e9, [2.0, 1.0, 3.0]) == Spread(median=3.0, least=2.0, most=6.0)


def test_the_best_variant_has_the_highest_median() -> None:
    variants = {"a": Spread(2, 1, 9), "b": Spread(3, 0.5, 4), "c": Spread(1, 1, 1)}
    ceiling = Ceiling("read", "cold", 1, "avx2", "GB/s", variants)
    assert ceiling.best == "b"
    assert ceiling.rate == variants["b"]


def test_cold_memory_is_several_times_the_last_level_cache_where_memory_allows() -> None:
    caches = Caches(1 << 20, 100 << 20)
    assert default_size_bytes(caches, 1 << 40) == 800 << 20
    assert default_size_bytes(Caches(1 << 20, 1 << 20), 1 << 40) == 256 << 20
    assert default_size_bytes(caches, 1 << 30) == 256 << 20


def test_a_hot_footprint_is_half_of_its_cache() -> None:
    assert hot_footprints(Caches(1 << 20, 32 << 20), threads=4) == {"l2": 2 << 20, "llc": 16 << 20}


def test_all_operations_are_measured_in_every_cache() -> None:
    measured = list(memory_ceilings(2, SIZE, "scalar", False, 9, SMALL_CACHES))
    assert [(each.state, each.operation) for each in measured] == [
        (state, operation) for state in ("cold", "llc", "l2") for operation in ("read", "memset", "memcpy")
    ]
    for each in measured:
        assert (each.threads, each.isa, each.unit, each.huge_pages) == (2, "scalar", "GB/s", False)
        assert each.huge_page_share == 0
        names = _native.CeilingLoops.variants("read" if each.operation == "read" else "copy")
        assert list(each.variants) == names
        assert all(0 < rate.least <= rate.median <= rate.most for rate in each.variants.values())
    footprints = {"cold": SIZE, "llc": 512 << 10, "l2": 64 << 10}
    assert [each.footprint_bytes for each in measured] == [footprints[each.state] for each in measured]


def test_a_cache_that_the_memory_does_not_fill_is_left_out() -> None:
    measured = list(memory_ceilings(1, 256 << 10, "scalar", False, 9, SMALL_CACHES))
    assert {each.state for each in measured} == {"cold", "l2"}
    measured = list(memory_ceilings(1, SIZE, "scalar", False, 9, Caches(1 << 20, 1 << 20)))
    assert {each.state for each in measured} == {"cold", "l2"}


def test_multiply_adds_are_measured_on_every_isa() -> None:
    isas = _native.available_isas()
    measured = list(fma_ceilings(2, isas, 9, steps=1000))
    assert [each.isa for each in measured] == isas
    for each in measured:
        assert (each.operation, each.state, each.threads, each.unit) == ("fma", "registers", 2, "GFLOP/s")
        assert each.huge_pages is None
        assert 0 < each.rate.least <= each.rate.median <= each.rate.most


class FakeLoops:
    """Native loops with a clock that says 1 GB/s, a diary, and one loop that leaves something out.

    The clock says twice the time for the sample before the first one of a hot measurement.
    """

    variants = staticmethod(_native.CeilingLoops.variants)

    def __init__(self, threads: int, isa: str = "auto", idle: str = "") -> None:
        self._loops, self._idle = _native.CeilingLoops(threads, isa), idle
        self.reads: list[tuple[str, int]] = []
        self.passes: dict[str, list[tuple[int, int]]] = {}

    def __getattr__(self, name: str) -> object:
        return getattr(self._loops, name)

    def _clock(self, loop: str, num_bytes: int, passes: int = 1, warm: int = 0) -> float:
        calls = self.passes.setdefault(loop, [])
        calls.append((passes, warm))
        first_hot = warm > 0 and len([1 for _, before in calls if before]) == 1
        return num_bytes * passes / 1e9 * (2 if first_hot else 1)

    def read(self, variant: str, data: np.ndarray, *passes: int) -> tuple[float, int]:
        self.reads.append((variant, data.ctypes.data))
        _, checksum = self._loops.read(variant, data, *passes)
        seconds = self._clock(f"read/{variant}", data.nbytes, *passes)
        return seconds, checksum ^ (self._idle == f"read/{variant}")

    def fill(self, variant: str, data: np.ndarray, value: int, *passes: int) -> float:
        part = data[: -self.granule_bytes] if self._idle == f"fill/{variant}" else data
        self._loops.fill(variant, part, value, *passes)
        return self._clock(f"fill/{variant}", data.nbytes, *passes)

    def copy(self, variant: str, to: np.ndarray, source: np.ndarray, *passes: int) -> float:
        skipped = self.granule_bytes if self._idle == f"copy/{variant}" else 0
        self._loops.copy(variant, to[skipped:], source[skipped:], *passes)
        return self._clock(f"copy/{variant}", to.nbytes, *passes)

    def fma(self, steps: int) -> tuple[float, float]:
        seconds, total = self._loops.fma(steps)
        return seconds, total - (self._idle == "fma/scalar")


@pytest.fixture
def fake_loops(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[FakeLoops]]:
    """Puts fake loops, of which the named one is idle, in place of the native ones; those that were made."""

    def install(idle: str = "") -> list[FakeLoops]:
        made: list[FakeLoops] = []

        def make(threads: int, isa: str) -> FakeLoops:
            made.append(FakeLoops(threads, isa, idle))
            return made[-1]

        make.variants = FakeLoops.variants  # type: ignore[attr-defined]
        monkeypatch.setattr(module, "_native", SimpleNamespace(CeilingLoops=make))
        return made

    return install


LOOPS = [f"{op}/{name}" for op in ("read", "fill", "copy") for name in _native.CeilingLoops.variants(op)]


def test_rates_are_bytes_over_time(fake_loops: Callable[[], list[FakeLoops]]) -> None:
    made = fake_loops()
    measured = list(memory_ceilings(1, SIZE, "scalar", False, 9, Caches(64 << 10, 1)))
    [loops] = made
    for each in measured:
        expected = 2.0 if each.operation == "memcpy" else 1.0  # bytes read and bytes written
        for rate in each.variants.values():
            assert (rate.least, rate.median, rate.most) == pytest.approx((expected,) * 3)
    for loop in LOOPS:
        hot = [passes for passes in loops.passes[loop] if passes[1]]
        part = (16 << 10) if loop.startswith("copy") else (32 << 10)
        assert hot == [(1, 1)] + [(round(1e-3 / (2 * part / 1e9)), 1)] * 9  # a millisecond, by the first


@pytest.mark.parametrize("idle", LOOPS)
def test_a_loop_that_leaves_something_out_is_found_before_it_is_timed(
    fake_loops: Callable[[str], list[FakeLoops]], idle: str
) -> None:
    made = fake_loops(idle)
    with pytest.raises(RuntimeError, match=f"the loop of {idle} did not do its work: nothing measured"):
        next(memory_ceilings(1, SIZE, "scalar", False, 9, SMALL_CACHES))
    assert all(len(calls) <= 2 * len(LOOPS) for calls in made[0].passes.values())
    with pytest.raises(RuntimeError, match=idle):
        read_ceiling(1, size_bytes=SIZE, between=lambda: pytest.fail("something was measured"))


@pytest.mark.parametrize("idle", LOOPS)
def test_a_loop_that_leaves_something_out_later_is_found(
    fake_loops: Callable[[str], list[FakeLoops]], idle: str
) -> None:
    fake_loops(idle)
    operation = idle.split("/")[0]
    ceilings = MemoryCeilings(1, SIZE, "scalar", False)
    with pytest.raises(RuntimeError, match=idle):
        ceilings.hot(operation, "l2", 64 << 10, 9)
    if operation != "copy":
        with pytest.raises(RuntimeError, match=idle):
            MemoryCeilings(1, SIZE, "scalar", False).cold(operation, 9)


def test_a_wrong_sum_of_multiply_adds_is_found(fake_loops: Callable[[str], list[FakeLoops]]) -> None:
    fake_loops("fma/scalar")
    with pytest.raises(RuntimeError, match="fma/scalar"):
        list(fma_ceilings(1, ["scalar"], 9, steps=10))


def test_the_read_ceiling_takes_turns_with_what_is_measured(
    fake_loops: Callable[[], list[FakeLoops]],
) -> None:
    made = fake_loops()
    diary: list[int] = []
    ceiling = read_ceiling(
        1,
        size_bytes=SIZE,
        isa="scalar",
        huge_pages=False,
        repeats=10,
        between=lambda: diary.append(len(made[0].reads)),
    )
    names = _native.CeilingLoops.variants("read")
    assert diary == [len(names) * (round_ + 2) for round_ in range(10)]  # the first four verify
    timed = made[0].reads[len(names) :]
    assert [name for name, _ in timed] == names * 10
    places = [place for _, place in timed]
    assert all(len(set(places[i : i + 16])) == 16 for i in range(len(places) - 15))  # no window comes early
    assert (ceiling.operation, ceiling.state, ceiling.threads) == ("read", "cold", 1)
    assert ceiling.rate.median == pytest.approx(1.0)


SHAPE = SliceShape("tiny", hidden_size=256, num_stripes=2, top_k=3)


def test_points_have_the_arithmetic_of_the_step() -> None:
    points = expert_points(
        1, size_bytes=256 << 10, isa="scalar", huge_pages=False, repeats=9, num_tokens=(1, 4), shape=SHAPE
    )
    unit_bytes = 64 + 3 * 8 * 576  # docs/weight-format.md: scales, then three matrices of 8 records
    for placed, tokens in zip(points, (1, 4), strict=True):
        for point in (placed.point, placed.fastest):
            assert point.flop_per_byte == pytest.approx(3 * 2 * 256 * 32 * tokens / (2 * unit_bytes))
        assert 0 < placed.point.gflop_per_s <= placed.fastest.gflop_per_s
        assert 0 < placed.read.median <= placed.read.most
    assert [placed.point.name for placed in points] == [
        "expert step, tiny, 1 row, scalar",
        "expert step, tiny, 4 rows, scalar",
    ]


def test_a_point_knows_its_bytes() -> None:
    point = Point("kernel", flop_per_byte=4.0, gflop_per_s=100.0)
    assert point.gb_per_s == 25.0
    placed = Placed(
        point, fastest=Point("kernel", 4.0, 160.0), read=Spread(median=50.0, least=1.0, most=64.0)
    )
    assert placed.of_ceiling == 0.5
    assert placed.fastest_of_ceiling == 0.625


def test_a_step_is_placed_by_its_median_and_its_fastest_sample() -> None:
    random = RandomExperts(SHAPE)
    units = random.fill(3, "fp9", huge_pages=False)
    step = ExpertStep(random, units, num_tokens=2, top_k=3, threads=1, isa="scalar")
    step.seconds += [2e-6, 1e-6, 4e-6]
    read = Spread(50.0, 1.0, 64.0)
    placed = placed_step(step, SHAPE, Ceiling("read", "cold", 1, "scalar", "GB/s", {"plain": read}))
    flop = 6 * 256 * 32 * 3 * 2
    assert placed.point.gflop_per_s == pytest.approx(flop / 2e-6 / 1e9)
    assert placed.fastest.gflop_per_s == pytest.approx(flop / 1e-6 / 1e9)
    assert placed.read == read


def test_units_are_copies_of_a_few_experts() -> None:
    units = RandomExperts(SHAPE).fill(20, "fp9", huge_pages=False)
    assert units.shape == (20, 2, 64 + 3 * 8 * 576)
    assert np.array_equal(units[0], units[8])
    assert not np.array_equal(units[0], units[1])


def test_steps_go_through_all_experts() -> None:
    random = RandomExperts(SHAPE)
    units = random.fill(4, "fp9", huge_pages=False)
    step = ExpertStep(random, units, num_tokens=2, top_k=3, threads=1, isa="scalar")
    assert step._choose(3)[:, 1].tolist() == [[0, 1, 2], [3, 0, 1], [2, 3, 0]]


def test_kernels_are_verified_before_they_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    diary: list[str] = []
    verify, sample = ExpertStep.verify, ExpertStep.sample
    monkeypatch.setattr(ExpertStep, "verify", lambda self: (diary.append("verify"), verify(self)))
    monkeypatch.setattr(ExpertStep, "sample", lambda self: (diary.append("sample"), sample(self)))
    expert_points(
        1, size_bytes=256 << 10, isa="scalar", huge_pages=False, repeats=9, num_tokens=(1, 2), shape=SHAPE
    )
    assert diary == (["verify"] + ["sample"] * 9) * 2
