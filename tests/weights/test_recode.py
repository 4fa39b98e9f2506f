"""Units made into the other format in memory: the native re-encoder against unpacking and packing."""

from __future__ import annotations

import contextlib
import gc
import mmap
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from random_checkpoint import FINITE_CODES

from duckllm import _native
from duckllm.errors import WeightFormatError
from duckllm.weights import e4m3, fp9, recode
from duckllm.weights.recode import (
    available_memory_bytes,
    copy_fits,
    huge_page_bytes,
    may_reserve,
    private_memory,
    recode_units,
)
from duckllm.weights.units import ExpertWeights, pack_expert_units

BOTH_WAYS = pytest.mark.parametrize(("stored", "wanted"), [("fp9", "fp8"), ("fp8", "fp9")])


def random_units(
    intermediate: int, hidden: int, seed: int, weight_format: str, scale_layout: str = "block"
) -> np.ndarray:
    rng = np.random.default_rng(seed)
    shapes = [(intermediate, hidden), (intermediate, hidden), (hidden, intermediate)]
    codes = [np.resize(rng.permutation(FINITE_CODES), shape).astype(np.uint8) for shape in shapes]
    by_channel = scale_layout == "channel"
    scale_shapes = [(shape[0], 1) if by_channel else e4m3.scale_shape(*shape) for shape in shapes]
    scales = [rng.uniform(0.5, 2, shape).astype(np.float32) for shape in scale_shapes]
    return pack_expert_units(ExpertWeights(*codes, *scales), weight_format, scale_layout)


def layer_of(
    intermediate: int,
    hidden: int,
    weight_format: str,
    num_experts: int = 5,
    scale_layout: str = "block",
) -> np.ndarray:
    units = (random_units(intermediate, hidden, n, weight_format, scale_layout) for n in range(num_experts))
    return np.stack(list(units))


@BOTH_WAYS
@pytest.mark.parametrize("num_threads", [1, 3, 8])
@pytest.mark.parametrize(("intermediate", "hidden"), [(1, 1), (33, 31), (40, 72), (130, 576)])
def test_the_other_formats_bytes(
    intermediate: int, hidden: int, num_threads: int, stored: str, wanted: str
) -> None:
    units = layer_of(intermediate, hidden, stored)
    units.flags.writeable = False
    got = recode_units(units, hidden, stored, wanted, num_threads)
    np.testing.assert_array_equal(got, layer_of(intermediate, hidden, wanted))
    assert got.ctypes.data % 64 == 0
    np.testing.assert_array_equal(recode_units(got, hidden, wanted, stored, num_threads), units)


@BOTH_WAYS
@pytest.mark.parametrize(("intermediate", "hidden"), [(1, 1), (40, 72)])
def test_channel_scales_stay_as_they_are(intermediate: int, hidden: int, stored: str, wanted: str) -> None:
    units = layer_of(intermediate, hidden, stored, scale_layout="channel")
    got = recode_units(units, hidden, stored, wanted, 2, "channel")
    np.testing.assert_array_equal(got, layer_of(intermediate, hidden, wanted, scale_layout="channel"))
    with pytest.raises(ValueError, match=f"expected {_native.unit_bytes(hidden, stored)} as {stored}"):
        _native.recode_units(units, got, hidden, stored, wanted)


@BOTH_WAYS
def test_a_slice_of_a_map(tmp_path: Path, stored: str, wanted: str) -> None:
    layer_of(100, 72, stored).tofile(tmp_path / "units")
    mapped = np.memmap(tmp_path / "units", np.uint8, mode="r").reshape(5, 7, -1)
    got = recode_units(mapped[:, 2:5], 72, stored, wanted, 2)
    np.testing.assert_array_equal(got, layer_of(100, 72, wanted)[:, 2:5])


@pytest.mark.parametrize(("stored", "wanted"), [("fp9", "fp9"), ("fp8", "fp8")])
def test_the_same_format_is_a_copy(stored: str, wanted: str) -> None:
    units = layer_of(40, 72, stored)
    np.testing.assert_array_equal(recode_units(units, 72, stored, wanted, 1), units)


@pytest.mark.parametrize("place", [0, 15, 16, 31, 511])
def test_every_byte_that_is_no_weight_is_refused(place: int) -> None:
    magnitudes = set(fp9.MAGNITUDE_OF_E4M3[FINITE_CODES].tolist())
    assert len(magnitudes) == 127
    for stored, wanted, good in (("fp9", "fp8", magnitudes), ("fp8", "fp9", set(FINITE_CODES.tolist()))):
        units = layer_of(20, 40, stored, num_experts=1)
        for byte in range(256):
            units[0, 1, 64 + place] = byte
            if byte in good:
                recode_units(units, 40, stored, wanted, 1)
                continue
            with pytest.raises(WeightFormatError, match="units: got 1 with bytes that no finite e4m3 value"):
                recode_units(units, 40, stored, wanted, 1)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[weakref.ref]]:
    """What was taken for copies, while no garbage is collected."""
    made: list[weakref.ref] = []

    def watched(*args: object, **options: object) -> np.ndarray:
        memory = private_memory(*args, **options)  # type: ignore[arg-type]
        made.append(weakref.ref(memory.base))
        return memory

    monkeypatch.setattr(recode, "private_memory", watched)
    gc.disable()
    yield made
    gc.enable()


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_copy_that_failed_is_freed_at_once(copies: list[weakref.ref], num_threads: int) -> None:
    units = layer_of(20, 40, "fp8")
    units[:, 0, 64] = 0x7F
    with pytest.raises(WeightFormatError, match="that no finite e4m3 value") as kept:
        recode_units(units, 40, "fp8", "fp9", num_threads)
    assert [memory() for memory in copies] == [None]
    assert kept.value.__cause__ is not None


def test_a_copy_that_failed_otherwise_is_freed_with_its_error(
    monkeypatch: pytest.MonkeyPatch, copies: list[weakref.ref]
) -> None:
    def fail(*args: object) -> None:
        raise MemoryError

    monkeypatch.setattr(_native, "recode_units", fail)
    with contextlib.suppress(MemoryError):
        recode_units(layer_of(20, 40, "fp8"), 40, "fp8", "fp9", 2)
    assert [memory() for memory in copies] == [None]


def test_huge_pages_are_counted_as_the_kernel_tells(tmp_path: Path) -> None:
    memory = np.zeros(64 << 10, np.uint8)
    start = memory.ctypes.data
    maps = tmp_path / "smaps"
    maps.write_text(
        f"{start - 4096:x}-{start:x} rw-p 00000000 00:00 0\nAnonHugePages:  5 kB\nVmFlags: rd wr\n"
        f"{start:x}-{start + 8192:x} rw-p 00000000 00:00 0 [heap]\nSize: 9 kB\nAnonHugePages:  16 kB\n"
        f"{start + 65535:x}-{start + 99999:x} r--p 0 fe:01 7 /a: b\nAnonHugePages:  32 kB\n"
        f"{start + 65536:x}-{start + 99999:x} r--p 0 fe:01 7 /a: b\nAnonHugePages:  64 kB\n"
    )
    assert huge_page_bytes([memory], maps) == 48 << 10
    assert huge_page_bytes([memory[:4096]], maps) == 4096
    assert huge_page_bytes([memory], tmp_path / "none") == 0
    assert 0 <= huge_page_bytes([memory]) <= memory.nbytes
    maps.write_text(
        f"{start:x}-{start + 8192:x} rw-p 0 00:0f 7 /anon_hugepage (deleted)\nPrivate_Hugetlb:  8 kB\n"
        f"{start + 8192:x}-{start + 65536:x} rw-p 0 00:00 0\nAnonHugePages:  16 kB\nPrivate_Hugetlb: 0 kB\n"
    )
    assert huge_page_bytes([memory], maps) == 24 << 10
    assert huge_page_bytes([memory], maps, reserved_only=True) == 8 << 10


def test_huge_pages_are_reserved_where_the_system_lets_programs_have_them(tmp_path: Path) -> None:
    assert not may_reserve(tmp_path)
    setting = tmp_path / "proc/sys/vm/nr_overcommit_hugepages"
    setting.parent.mkdir(parents=True)
    for text, allowed in (("0\n", False), ("512\n", True), ("?", False)):
        setting.write_text(text)
        assert may_reserve(tmp_path) is allowed


@pytest.mark.parametrize("has_pages", [True, False])
def test_memory_is_reserved_in_whole_huge_pages_and_any_other_where_there_are_none(
    has_pages: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    class System:
        """Reserves what it is asked for, in small pages; or has none to reserve."""

        MAP_PRIVATE, MAP_ANONYMOUS = mmap.MAP_PRIVATE, mmap.MAP_ANONYMOUS
        MADV_HUGEPAGE = mmap.MADV_HUGEPAGE

        def mmap(self, file: int, length: int, flags: int) -> mmap.mmap:
            asked.append((length, bool(flags & 0x40000)))
            if flags & 0x40000 and not has_pages:
                raise OSError(12, "Cannot allocate memory")
            return mmap.mmap(file, length, flags=flags & 0x3FFFF)

    monkeypatch.setattr(recode, "mmap", System())
    monkeypatch.setattr(recode, "may_reserve", lambda: True)
    memory = private_memory((3, 1 << 20), reserve=True)
    assert memory.shape == (3, 1 << 20)
    assert not memory.any()
    memory[:] = 7
    assert asked == [(4 << 20, True)] + ([] if has_pages else [((3 << 20) + (2 << 20), False)])
    asked.clear()
    private_memory((3, 1 << 20))
    assert asked == [((3 << 20) + (2 << 20), False)]  # files can be mapped over it


def test_shapes_that_do_not_fit_are_errors() -> None:
    units = layer_of(40, 72, "fp9")
    out = np.zeros((5, 3, _native.unit_bytes(72, "fp8")), np.uint8)
    with pytest.raises(ValueError, match="units: got units of 5248 bytes, expected 4672 as fp8"):
        _native.recode_units(units, out, 72, "fp8", "fp9")
    with pytest.raises(ValueError, match="out: got units of 4672 bytes, expected 5248 as fp9"):
        _native.recode_units(units, out, 72, "fp9", "fp9")
    with pytest.raises(ValueError, match="out: got 4 experts of 3 stripes, expected 5 of 3"):
        _native.recode_units(units, out[:4], 72, "fp9", "fp8")
    with pytest.raises(ValueError, match="units: got gaps"):
        _native.recode_units(units[:, :, ::2].repeat(2, axis=2)[:, :, ::-1], out, 72, "fp9", "fp8")
    with pytest.raises(ValueError, match="units: got gaps"):
        _native.flush_from_caches(units[:, :, ::2])
    with pytest.raises(ValueError, match="format"):
        _native.recode_units(units, out, 72, "fp9", "bf16")
    _native.recode_units(units, out, 72, "fp9", "fp8")


def test_flushing_changes_nothing() -> None:
    units = layer_of(40, 72, "fp8")
    before = units.copy()
    _native.flush_from_caches(units[1:, 1:])
    np.testing.assert_array_equal(units, before)


def fake_machine(root: Path, available_kb: int, group: dict[str, str]) -> Path:
    (root / "proc").mkdir()
    (root / "proc/meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable:  {available_kb} kB\n")
    (root / "sys/fs/cgroup").mkdir(parents=True)
    for name, text in group.items():
        (root / "sys/fs/cgroup" / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        ({}, 1000 * 1024),
        ({"memory.max": "max\n", "memory.current": "5\n", "memory.stat": ""}, 1000 * 1024),
        ({"memory.max": "9000\n", "memory.current": "5000\n", "memory.stat": "anon 1\n"}, 4000),
        ({"memory.max": "9000\n", "memory.current": "5000\n", "memory.stat": "inactive_file 700\n"}, 4700),
        ({"memory.max": "9000\n", "memory.current": "9500\n", "memory.stat": ""}, 0),
        ({"memory.max": "99000000\n", "memory.current": "0\n", "memory.stat": ""}, 1000 * 1024),
    ],
)
def test_memory_is_the_kernels_or_the_groups(tmp_path: Path, group: dict[str, str], expected: int) -> None:
    assert available_memory_bytes(fake_machine(tmp_path, 1000, group)) == expected


def test_a_copy_leaves_a_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recode, "available_memory_bytes", lambda: 1000)
    assert copy_fits(900)
    assert not copy_fits(901)
