"""Memory to measure on: alignment, huge pages as the kernel reports them, windows in turn, cache sizes."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from duckllm.bench.machine import (
    ASSUMED_LLC_BYTES,
    Caches,
    available_memory_bytes,
    parse_cache_size,
    read_caches,
)
from duckllm.bench.memory import HUGE_PAGE_BYTES, Windows, huge_page_share, new_memory
from duckllm.worker.other_load import LoadMeter, OtherLoad


@pytest.mark.parametrize("huge_pages", [True, False])
def test_memory_begins_on_a_huge_page_and_can_be_written_to_its_end(huge_pages: bool) -> None:
    memory = new_memory(3 * HUGE_PAGE_BYTES + 4096, huge_pages)
    assert memory.nbytes == 3 * HUGE_PAGE_BYTES + 4096
    assert memory.ctypes.data % HUGE_PAGE_BYTES == 0
    assert not memory.any()
    memory[:] = 7
    assert memory[-1] == 7


def test_memory_without_huge_pages_has_none() -> None:
    memory = new_memory(2 * HUGE_PAGE_BYTES, huge_pages=False)
    memory[:] = 1
    assert huge_page_share(memory) == 0


def test_the_huge_page_share_counts_the_mappings_that_the_memory_is_in(tmp_path: Path) -> None:
    memory = new_memory(2 * HUGE_PAGE_BYTES, huge_pages=False)
    start = memory.ctypes.data
    middle, end = start + HUGE_PAGE_BYTES, start + memory.nbytes

    def mapping(first: int, last: int, kilobytes: int) -> str:
        return (
            f"{first:x}-{last:x} rw-p 00000000 00:00 0 \n"
            f"Size:      99 kB\nAnonHugePages:      {kilobytes} kB\nVmFlags: rd wr\n"
        )

    smaps = tmp_path / "smaps"
    smaps.write_text(
        mapping(start - 4096, start, 512)
        + mapping(start, middle, 1024)
        + mapping(middle, end + 4096, 0)
        + mapping(end + 4096, end + 8192, 512)
    )
    assert huge_page_share(memory, smaps) == 0.25
    smaps.write_text(mapping(start - 4096, end + 4096, 1 << 20))
    assert huge_page_share(memory, smaps) == 1


def test_a_window_comes_again_only_after_all_the_others() -> None:
    memory = np.zeros(100_000, np.uint8)
    windows = Windows(memory, granule_bytes=8192, num_windows=3)
    assert windows.window_bytes == 32768
    assert len(windows) == 3
    taken = [windows.take() for _ in range(7)]
    assert [number for number, _ in taken] == [0, 1, 2, 0, 1, 2, 0]
    starts = [window.ctypes.data - memory.ctypes.data for _, window in taken]
    assert starts == [0, 32768, 65536, 0, 32768, 65536, 0]
    assert {window.nbytes for window in windows} == {32768}


def cache(folder: Path, cpu: int, index: int, level: int, kind: str, size: str, sharers: str) -> None:
    entry = folder / f"cpu{cpu}" / "cache" / f"index{index}"
    entry.mkdir(parents=True)
    for name, text in (("level", level), ("type", kind), ("size", size), ("shared_cpu_list", sharers)):
        (entry / name).write_text(f"{text}\n")


def test_caches_are_those_of_the_cores_that_may_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 4, 5})
    for cpu, second, last in ((0, "0-1", "0-3"), (1, "0-1", "0-3"), (4, "4-5", "4-7"), (5, "4-5", "4-7")):
        cache(tmp_path, cpu, 0, 1, "Data", "48K", str(cpu))
        cache(tmp_path, cpu, 1, 1, "Instruction", "64M", str(cpu))
        cache(tmp_path, cpu, 2, 2, "Unified", "2048K", second)
        cache(tmp_path, cpu, 3, 3, "Unified", "32M", last)
    cache(tmp_path, 6, 3, 3, "Unified", "32M", "nobody")
    assert read_caches(tmp_path) == Caches(l2_bytes=1 << 20, llc_bytes=64 << 20)


def test_caches_are_assumed_where_the_system_does_not_tell(tmp_path: Path) -> None:
    assert read_caches(tmp_path) == Caches(1 << 20, ASSUMED_LLC_BYTES, "assumed")


def test_cache_sizes_are_read() -> None:
    assert [parse_cache_size(text) for text in ("32K\n", "1M", "2G", "77")] == [1 << 15, 1 << 20, 1 << 31, 77]


def test_the_memory_available_is_no_more_than_there_is() -> None:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < available_memory_bytes() < total


def test_the_meter_counts_what_others_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    clock, own = [100.0], [3.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monkeypatch.setattr(os, "times", lambda: SimpleNamespace(user=own[0], system=1.0))

    def write(
        user: int, nice: int, system: int, idle: int, iowait: int, irq: int, soft: int, steal: int
    ) -> None:
        fields = " ".join(str(each * ticks) for each in (user, nice, system, idle, iowait, irq, soft, steal))
        (tmp_path / "stat").write_text(f"cpu  {fields} 0 0\ncpu0 {fields} 0 0\n")

    write(10, 0, 10, 500, 0, 0, 0, 7)
    meter = LoadMeter(tmp_path / "stat")
    write(18, 1, 13, 900, 50, 1, 1, 9)  # 14 seconds busy, 2 stolen
    clock[0], own[0] = 104.0, 9.0  # of 4 seconds; 6 of the 14 are our own
    assert meter.read() == OtherLoad(programs=2.0, hypervisor=0.5)
    own[0] = 30.0
    assert meter.read().programs == 0
