"""Which format a slice is computed in."""

from __future__ import annotations

import numpy as np
import pytest

from duckllm import config
from duckllm.errors import WeightFormatError
from duckllm.weights import choice, formats
from duckllm.weights.choice import MIN_MEASURED_BYTES, ExpertSlice, choose_format, load_units, measure_formats
from duckllm.weights.recode import recode_units
from worker_harness import _random_units

SMALL = ExpertSlice(72, 104, 6, 3, 0, 7, num_layers=2, num_threads=2)
LARGE = ExpertSlice(7168, 2048, 256, 8, 0, 4, num_layers=58, num_threads=2)


def never(other: str) -> dict[str, float]:
    raise AssertionError(other)


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that a copy may take; empty for any number."""
    limits: list[int] = []
    monkeypatch.setattr(choice, "copy_fits", lambda num_bytes: not limits or num_bytes <= limits[0])
    return limits


def test_the_names_of_the_formats_are_the_same_everywhere() -> None:
    assert tuple(formats.FORMATS) == config.WEIGHT_FORMATS
    assert tuple(row.name for row in formats.FORMATS.values()) == config.WEIGHT_FORMATS
    assert ("auto", *config.WEIGHT_FORMATS) == config.FORMAT_CHOICES


def test_the_sizes_of_a_slice() -> None:
    assert LARGE.num_bytes("fp9") == 58 * 256 * 4 * 387_776
    assert LARGE.num_bytes("fp8") == 58 * 256 * 4 * 344_768
    assert SMALL.layer_bytes("fp8") == 6 * 7 * 4672


@pytest.mark.parametrize("stored", ["fp9", "fp8"])
def test_a_small_slice_is_used_as_stored(stored: str, room: list[int]) -> None:
    chosen = choose_format(SMALL, stored, "auto", never)
    assert chosen.format == stored
    assert chosen.reason == f"{stored} as stored, too small to measure others"


def test_the_smallest_slice_that_is_measured(room: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    assert MIN_MEASURED_BYTES == 256 << 20
    monkeypatch.setattr(choice, "MIN_MEASURED_BYTES", SMALL.num_bytes("fp9"))
    assert choose_format(SMALL, "fp9", "auto", lambda other: {"fp9": 1.0, other: 2.0}).format == "fp8"
    monkeypatch.setattr(choice, "MIN_MEASURED_BYTES", SMALL.num_bytes("fp9") + 1)
    assert choose_format(SMALL, "fp9", "auto", never).format == "fp9"


@pytest.mark.parametrize(("stored", "other"), [("fp9", "fp8"), ("fp8", "fp9")])
def test_the_other_format_must_be_five_per_cent_faster(stored: str, other: str, room: list[int]) -> None:
    stays = choose_format(LARGE, stored, "auto", lambda name: {stored: 40.0, name: 41.9})
    assert stays.format == stored
    assert stays.reason == f"{stored} as stored ({stored} 40.00 Gparam/s, {other} 41.90 Gparam/s)"
    goes = choose_format(LARGE, stored, "auto", lambda name: {stored: 40.0, name: 42.0})
    assert goes.format == other
    assert goes.reason == f"{stored} as a copy in {other} ({stored} 40.00 Gparam/s, {other} 42.00 Gparam/s)"


def test_without_room_nothing_is_measured(room: list[int]) -> None:
    room.append(LARGE.num_bytes("fp8") - 1)
    chosen = choose_format(LARGE, "fp9", "auto", never)
    assert (chosen.format, chosen.reason) == ("fp9", "fp9 as stored, no room for a copy of 20.5 GB in fp8")
    with pytest.raises(WeightFormatError, match=r"got fp9, expected fp8, of which a copy takes 20,47\d,"):
        choose_format(LARGE, "fp9", "fp8", never)
    room[0] += 1
    assert choose_format(LARGE, "fp9", "fp8", never).format == "fp8"


@pytest.mark.parametrize("stored", ["fp9", "fp8"])
@pytest.mark.parametrize("requested", ["fp9", "fp8"])
def test_what_was_asked_for_is_not_measured(stored: str, requested: str, room: list[int]) -> None:
    chosen = choose_format(SMALL, stored, requested, never)
    assert chosen.format == requested
    same = stored == requested
    assert chosen.reason == f"{stored} as stored" if same else f"{stored} as a copy in {requested}"


def some_layers(weight_format: str = "fp9") -> dict[int, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        layer: np.stack([_random_units(rng, 72, 104, weight_format) for _ in range(6)]) for layer in (1, 3)
    }


def test_units_as_stored_are_no_copies(room: list[int]) -> None:
    layers = some_layers()
    chosen, units = load_units(SMALL, layers, "fp9", "auto")
    assert chosen.format == "fp9"
    assert units.keys() == layers.keys()
    assert all(units[layer] is layers[layer] for layer in layers)


def test_units_in_the_other_format(room: list[int]) -> None:
    layers, stops = some_layers(), []
    chosen, units = load_units(SMALL, layers, "fp9", "fp8", lambda: stops.append(None))
    assert chosen.format == "fp8"
    assert len(stops) == 2
    for layer, stored in layers.items():
        np.testing.assert_array_equal(units[layer], recode_units(stored, 72, "fp9", "fp8", 1))


def test_memory_that_ends_during_the_copy(room: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "MIN_MEASURED_BYTES", 0)
    monkeypatch.setattr(choice, "measure_formats", lambda part, units, stored, other: {stored: 1, other: 2})
    layers, copied = some_layers(), []

    def others_come() -> None:
        copied.append(None)
        if len(copied) == 2:
            room.append(SMALL.layer_bytes("fp8") - 1)

    chosen, units = load_units(SMALL, layers, "fp9", "auto", others_come)
    assert (chosen.format, chosen.reason) == (
        "fp9",
        "fp9 as stored, as others took the memory of a copy in fp8",
    )
    assert all(units[layer] is layers[layer] for layer in layers)
    room.clear()
    copied.clear()
    with pytest.raises(WeightFormatError, match="ended after 1 of 2 layers of the copy in fp8"):
        load_units(SMALL, layers, "fp9", "fp8", others_come)


@pytest.mark.parametrize(("stored", "other"), [("fp9", "fp8"), ("fp8", "fp9")])
def test_both_formats_are_measured_in_turns(stored: str, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that makes each step of fp9 take 2 ms and each of fp8 1 ms; each finds its weights flushed."""
    steps: list[str] = []
    flushed: list[tuple[int, tuple[int, ...]]] = []
    real_experts, now_s = choice._native.Experts, 0.0

    class Watched:
        def __init__(self, *, format: str, **shape: int) -> None:
            self._format = format
            self._experts = real_experts(format=format, **shape)

        def run(self, *args: object, **options: object) -> None:
            nonlocal now_s
            steps.append(self._format)
            units = args[0]
            assert isinstance(units, np.ndarray)
            assert flushed.pop() == (units.ctypes.data, units.shape)
            now_s += 0.002 if self._format == "fp9" else 0.001
            assert np.isfinite(self._experts.run(*args, **options)).all()

    monkeypatch.setattr("duckllm.weights.choice._native.Experts", Watched)
    monkeypatch.setattr(
        "duckllm.weights.choice._native.flush_from_caches",
        lambda units: flushed.append((units.ctypes.data, units.shape)),
    )
    monkeypatch.setattr("duckllm.weights.choice.time.perf_counter", lambda: now_s)
    speeds = measure_formats(SMALL, some_layers(stored)[1], stored, other)
    params = 3 * 72 * 16 * 7 * 3
    assert speeds["fp9"] == pytest.approx(params / 0.002 / 1e9)
    assert speeds["fp8"] == pytest.approx(params / 0.001 / 1e9)
    assert steps[::2] == [stored] * 50
    assert steps[1::2] == [other] * 50


def test_a_slice_in_the_middle_is_measured(room: list[int]) -> None:
    part = ExpertSlice(72, 104, 6, 3, 2, 4, num_layers=2, num_threads=2)
    speeds = measure_formats(part, some_layers()[1][:, 2:6], "fp9", "fp8")
    assert speeds.keys() == {"fp9", "fp8"}
    assert all(0 < speed < 1e6 for speed in speeds.values())


def test_what_is_used_as_stored_is_copied_on_request(room: list[int]) -> None:
    layers = some_layers()
    chosen, units = load_units(SMALL, layers, "fp9", "auto", copy=True)
    assert chosen.format == "fp9"
    assert chosen.reason == "fp9 as stored, too small to measure others, in a copy"
    for layer, stored in layers.items():
        assert not np.shares_memory(units[layer], stored)
        np.testing.assert_array_equal(units[layer], stored)
    room.append(SMALL.num_bytes("fp9") - 1)
    with pytest.raises(WeightFormatError, match=r"copy: got a slice of .* bytes, expected at most nine"):
        load_units(SMALL, layers, "fp9", "auto", copy=True)
