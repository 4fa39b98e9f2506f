"""How evenly cores compute: from made-up clocks, counts and files, and once for real."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from duckllm.cli.jitter import show
from duckllm.cli.main import app
from duckllm.doctor.jitter import CoreJitter, Jitter, measure_jitter, summarise
from duckllm.doctor.jitter_advice import advise, causes
from duckllm.doctor.jitter_counters import Counters, kept_free, parse_cores, read_counters, siblings
from duckllm.errors import ConfigError

INTERRUPTS = """\
           CPU0       CPU2
  1:          5          6   IO-APIC   1-edge      i8042
 36:        100        200  PCI-MSIX-0000:00:02.0   1-edge      eth0-rx
LOC:       1000       2000   Local timer interrupts
TLB:          3          4   TLB shootdowns
ERR:          0
XYZ: odd
"""
NONE = Counters({}, {}, 0.0, {}, 0, None, None)


def put(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    put(tmp_path, "proc/interrupts", INTERRUPTS)
    put(tmp_path, "proc/softirqs", "       CPU0       CPU2\n    TIMER:     7     8\n")
    ticks = os.sysconf("SC_CLK_TCK")
    put(
        tmp_path,
        "proc/stat",
        f"cpu 1 2\ncpu0 {ticks} 0 0 {5 * ticks} {ticks} 0 0 {2 * ticks} 0 0\n"
        f"cpu2 0 0 {3 * ticks} 0 0 0 0 0 0 0\nintr 5\n",
    )
    put(tmp_path, "proc/thread-self/schedstat", "100 2500000000 7\n")
    put(tmp_path, "sys/devices/system/cpu/cpu2/cpufreq/scaling_cur_freq", "3400000\n")
    put(tmp_path, "sys/devices/system/cpu/cpu2/topology/thread_siblings_list", "0,2\n")
    put(tmp_path, "sys/devices/system/cpu/isolated", "2-3\n")
    put(tmp_path, "sys/devices/system/cpu/nohz_full", "(null)\n")
    return tmp_path


def test_the_counts_of_a_core(root: Path) -> None:
    found = read_counters(2, root)
    # The second column is core 2's: core 1 is off.
    assert found.interrupts == {"1 i8042": 6, "36 eth0-rx": 200, "timer": 2000, "TLB shootdowns": 4}
    assert found.softirqs == {"TIMER": 8}
    assert (found.stolen_s, found.busy_s) == (0.0, {0: 3.0, 2: 3.0})
    assert (found.waited_s, found.mhz) == (2.5, 3400.0)
    assert read_counters(0, root).stolen_s == 2.0
    assert read_counters(1, root).interrupts == {}
    assert siblings(2, root) == (0,)
    assert kept_free("isolated", root) == (2, 3)
    assert kept_free("nohz_full", root) == ()


def test_files_that_are_missing_or_odd(tmp_path: Path) -> None:
    assert replace(read_counters(0, tmp_path), num_switches=0) == NONE
    assert siblings(0, tmp_path) == kept_free("isolated", tmp_path) == ()
    for name in ("proc/interrupts", "proc/softirqs", "proc/stat", "proc/thread-self/schedstat"):
        put(tmp_path, name, "\n\0 CPU0 \xff\n: x\ncpu0 a b c d e f g h\n")
    put(tmp_path, "sys/devices/system/cpu/isolated", "5-1")
    assert replace(read_counters(0, tmp_path), num_switches=0) == NONE
    assert kept_free("isolated", tmp_path) == ()


def test_lists_of_cores() -> None:
    assert parse_cores("0-2,4\n") == (0, 1, 2, 4)
    assert parse_cores("") == parse_cores("(null)") == ()
    for text in ("a", "3-1", "0-99999999"):
        with pytest.raises(ValueError):
            parse_cores(text)


def test_what_times_and_counts_come_to(root: Path) -> None:
    times = np.full(10_000, 50_000)
    times[:200] = 60_000  # 2 %, not slow yet
    times[:20] = 100_000
    times[0] = 1_000_000
    times[200:210] = 40_000  # what is faster makes up for nothing
    before = Counters({"timer": 5, "36 eth0": 1}, {"RCU": 1}, 1.0, {0: 1.0}, 3, 0.5, 3000.0)
    after = Counters(
        {"timer": 105, "36 eth0": 1, "TLB shootdowns": 2}, {"RCU": 4}, 1.5, {0: 2.0}, 10, 0.75, 3100.0
    )
    found = summarise(2, times, 4, 2.0, before, after, root)
    assert (found.p50_us, found.p99_us, found.p999_us, found.max_us) == (50.0, 60.0, 100.0, 1000.0)
    assert (found.num_slow, found.num_switched) == (20, 4)
    assert found.lost == pytest.approx((180 * 10 + 19 * 50 + 950) / (times.sum() / 1e3))
    assert found.interrupts == {"timer": 100, "TLB shootdowns": 2}
    assert list(found.interrupts) == ["timer", "TLB shootdowns"]
    assert found.softirqs == {"RCU": 3}
    assert (found.num_switches, found.waited_s, found.stolen_s) == (7, 0.25, 0.5)
    assert (found.mhz, found.siblings, found.siblings_busy) == ((3000.0, 3100.0), (0,), 0.5)
    assert (found.is_isolated, found.is_tickless) == (True, False)


EVEN = CoreJitter(1, 20_000, 50.0, 51.0, 52.0, 60.0, 0, 0, 0.001, 1.0, {"timer": 250})
UNEVEN = replace(EVEN, p999_us=400.0, num_slow=40)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_switches": 30, "num_switched": 30}, "other programs ran on core 1 (75 % of the slow pieces)"),
        ({"stolen_s": 0.1}, "a hypervisor took core 1 away"),
        ({"interrupts": {"36 eth0-rx": 500}}, "devices interrupt (36 eth0-rx): for i in 36; do echo 0"),
        ({"interrupts": {"timer": 250}}, "the timer ticks on core 1: at boot nohz_full=1 and rcu_nocbs=1"),
        ({"interrupts": {"TLB shootdowns": 99}}, "other cores interrupt core 1"),
        ({"siblings": (3,), "siblings_busy": 0.9}, "the other thread of core 1 is busy"),
        ({"mhz": (3000.0, 2000.0)}, "the clock of core 1 changes: sudo cpupower"),
        ({"interrupts": {}}, "what came between is not counted by this kernel"),
    ],
)
def test_each_cause_has_its_advice(changes: dict[str, Any], words: str) -> None:
    core = replace(UNEVEN, **{"interrupts": {}, **changes})
    (line,) = advise(Jitter(50.0, "normal", 0.0, (core,)))
    assert line.startswith(words)
    # The same on a core that is even is no cause of anything.
    even = replace(EVEN, **{"interrupts": {}, **changes})
    assert advise(Jitter(50.0, "normal", 0.0, (even,)))[0].startswith("all cores are even")


def test_a_tickless_core_is_not_told_to_be_one() -> None:
    core = replace(UNEVEN, is_tickless=True)
    assert advise(Jitter(50.0, "normal", 0.0, (core,)))[0].startswith("what came between is not counted")


def test_causes_are_named_by_their_frequency() -> None:
    counted = {"timer": 500, "36 eth0-rx": 2000, "TLB shootdowns": 0, "XYZ": 9999}
    core = replace(UNEVEN, seconds=2.0, interrupts=counted, num_switches=40, stolen_s=0.5, waited_s=0.25)
    assert causes(core) == "36 eth0-rx 1000/s, timer 250/s, other programs 20/s, stolen 25.0 %, waited 250 ms"
    assert causes(replace(UNEVEN, interrupts={})) == "nothing counted"


def test_a_measurement_pins_and_gives_the_cores_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.sched_getaffinity(0)
    pinned: list[set[int]] = []
    real = os.sched_setaffinity
    monkeypatch.setattr(
        os, "sched_setaffinity", lambda pid, cores: (pinned.append(set(cores)), real(pid, cores))
    )
    found = measure_jitter(1000)
    assert os.sched_getaffinity(0) == before
    assert [core.core for core in found.cores] == sorted(before)
    assert {frozenset({core}) for core in before} <= {frozenset(cores) for cores in pinned}
    for core in found.cores:
        assert core.num_samples == 1000
        assert 0 < core.p50_us <= core.p99_us <= core.p999_us <= core.max_us
        assert 0 <= core.lost < 1
    assert found.scheduler


def test_a_clock_that_a_test_moves() -> None:
    """Every piece takes 7 us but each hundredth, which takes 70: the times are the clock's own."""
    now, calls = [0], [0]

    def clock() -> int:
        calls[0] += 1
        now[0] += (70_000 if calls[0] % 200 == 0 else 7_000) if calls[0] % 2 == 0 else 0
        return now[0]

    found = measure_jitter(1000, clock=clock, cores=[min(os.sched_getaffinity(0))])
    (core,) = found.cores
    assert (core.p50_us, core.max_us) == (7.0, 70.0)
    assert core.num_slow == 10


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = Jitter(
        50.0, "fifo, priority 10", 1.25, (EVEN, replace(UNEVEN, core=2, interrupts={"timer": 1000}))
    )
    show(found)
    shown = capsys.readouterr().out
    assert "20000 pieces of work of 50 us on each core in turn, scheduled as fifo, priority 10" in shown
    assert "the timer ticks on core 2" in shown
    monkeypatch.setattr("duckllm.cli.jitter.measure_jitter", lambda samples: replace(found, load=samples))
    done = CliRunner().invoke(app, ["doctor", "--jitter", "--samples", "5000", "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["load"] == 5000
    assert [core["p999_us"] for core in told["cores"]] == [52.0, 400.0]
    assert told["advice"][0].startswith("the timer ticks")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--jitter", "--samples", "999"], "samples: got 999, expected a number from 1000 to 1000000"),
        (["--jitter", "--workers", "a:1"], "workers: got 'a:1', expected nothing with --jitter"),
        (["--jitter", "--cluster", "discover"], "cluster: got 'discover', expected nothing with --jitter"),
        (["--samples", "5000"], "samples: got 5000, expected nothing without --jitter"),
    ],
)
def test_what_the_command_refuses(arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(app, ["doctor", *arguments])
    assert isinstance(done.exception, ConfigError)
    assert words in str(done.exception)
