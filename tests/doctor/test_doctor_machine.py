"""This machine: facts from folders that stand in for /proc and /sys, and what they mean."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from duckllm import _native
from duckllm.cluster.address import Address
from duckllm.doctor.finding import Finding, Unknown
from duckllm.doctor.machine_checks import CHECKS, HERE, check_machine, usual_gb_per_s
from duckllm.doctor.machine_facts import MachineFacts, congestion_of, gather_machine
from duckllm.doctor.token_check import check_token

GIB = 1 << 30
GOOD = MachineFacts(
    cpu="Duck 9000",
    isas=("scalar", "avx2"),
    isa="avx2",
    bf16=(),
    forced_isa="",
    cores=4,
    smt=False,
    memory_bytes=(16 * GIB, 15 * GIB),
    read_gb_per_s=33.0,
    kept_gb_per_s=None,
    huge_pages="madvise",
    reserved_pages=(0, 0),
    governors=("performance",),
    swap_bytes=(0, 0),
    clock_is_kept=True,
    congestion="cubic",
    default_congestion="cubic",
)


def finding(check: str, **changes: Any) -> Finding:
    [found] = [each for each in check_machine(replace(GOOD, **changes)) if each.check == check]
    return found


def write(root: Path, **files: str) -> None:
    for name, content in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def test_cards_are_found_by_their_driver_or_on_the_bus(tmp_path: Path) -> None:
    def cards() -> tuple[tuple[str, ...], str]:
        facts = gather_machine(tmp_path, measure=float, clock_state=int, find_problem=lambda: "a reason")
        return facts.cards, facts.card_problem

    assert cards() == ((), "")
    bus = "sys/bus/pci/devices/0000:01:00"
    write(tmp_path, **{f"{bus}.0/vendor": "0x10de\n", f"{bus}.0/class": "0x030000\n"})  # the card
    write(tmp_path, **{f"{bus}.1/vendor": "0x10de\n", f"{bus}.1/class": "0x040300\n"})  # its sound
    write(tmp_path, **{f"{bus}.2/vendor": "0x8086\n", f"{bus}.2/class": "0x030000\n"})  # another's
    assert cards() == (("an NVIDIA GPU",), "a reason")
    write(tmp_path, **{"proc/driver/nvidia/gpus/0/information": "Model: \t NVIDIA RTX 9\nIRQ: 1\n"})
    assert cards() == (("NVIDIA RTX 9",), "a reason")


def gather(root: Path, clock: int = 0) -> MachineFacts:
    return gather_machine(
        root,
        measure=lambda threads: 10.0 * threads,
        clock_state=lambda: clock,
        congestion=lambda: "cubic",
    )


def test_a_good_machine_has_nothing_to_change() -> None:
    findings = check_machine(GOOD)
    assert {each.status for each in findings} == {"ok"}
    assert not any(each.advice for each in findings)
    assert {each.where for each in findings} == {HERE}


@pytest.mark.parametrize(
    ("check", "changes", "status", "found", "advice"),
    [
        ("CPU", {"isa": "scalar", "forced_isa": "scalar"}, "warning", "with scalar", "it is 'scalar'"),
        ("CPU", {"isas": ("scalar",), "isa": "scalar"}, "warning", "without AVX2", "AVX2 or AVX-512"),
        ("CPU", {"isa": Unknown("DUCK_FORCE_ISA: got 'mmx'")}, "problem", "'mmx'", "unset DUCK_FORCE_ISA"),
        ("CPU", {"bf16": ("avx512_bf16", "amx_bf16")}, "ok", "--prefill bf16 may use amx_bf16", ""),
        ("cores", {"smt": True}, "ok", "two for each core", "duckllm bench kernel --threads 2,4"),
        ("cores", {"smt": Unknown("no file")}, "ok", "unknown: no file", ""),
        ("memory", {"memory_bytes": (16 * GIB, 3 * GIB)}, "warning", "3.0 of 16.0 GiB", "ps aux"),
        ("memory speed", {"read_gb_per_s": 17.4}, "warning", "17.4 GB/s read by 4", "dmidecode"),
        ("memory speed", {"read_gb_per_s": 17.6}, "ok", "35 are usual", ""),
        ("said speed", {"kept_gb_per_s": (Path("/c/a.json"), 20.0)}, "warning", "33.0", "rm /c/a.json"),
        ("said speed", {"kept_gb_per_s": (Path("/c/a.json"), 30.0)}, "ok", "30.0 GB/s", ""),
        (
            "said speed",
            {"said_gb_per_s": ((70.9, 4), (67.5, 4))},
            "warning",
            "say 70.9 and 67.5 GB/s, but",
            "without --speed",
        ),
        ("said speed", {"said_gb_per_s": ((34.0, 4), (16.0, 2))}, "ok", "34.0 and 16.0 GB/s", ""),
        (
            "said speed",
            {"said_gb_per_s": ((42.0, 1), (33.0, 4), (32.0, 4))},
            "warning",
            "32.0 to 42.0",
            "start",
        ),
        ("huge pages", {"huge_pages": "never"}, "warning", "never", "echo madvise | sudo tee"),
        ("reserved huge pages", {"reserved_pages": (8, 5)}, "warning", "5 of 8", "vm.nr_hugepages=0"),
        ("reserved huge pages", {"reserved_pages": (8, 0)}, "ok", "0 of 8", ""),
        ("clock governor", {"governors": ("performance", "powersave")}, "warning", "powersave", "cpupower"),
        ("clock governor", {"governors": ("powersave/balance_power",)}, "warning", "power", "cpupower"),
        ("clock governor", {"governors": ("powersave/performance",)}, "ok", "powersave", ""),
        ("swap", {"swap_bytes": (8 * GIB, GIB)}, "warning", "1.0 of 8.0 GiB", "swapoff"),
        ("swap", {"swap_bytes": (8 * GIB, GIB // 4)}, "ok", "0.2 of 8.0", ""),
        ("clock", {"clock_is_kept": False}, "warning", "nothing keeps", "timedatectl set-ntp true"),
        ("GPU", {}, "ok", "no NVIDIA card", ""),
        ("GPU", {"cards": ("RTX 9",)}, "ok", "RTX 9: a host here computes on it", ""),
        (
            "GPU",
            {"cards": ("A", "B"), "card_problem": "no driver"},
            "warning",
            "A, B; not used, as no",
            "docs/",
        ),
        ("TCP congestion control", {"congestion": "bbr"}, "warning", "bbr", "congestion_control=cubic"),
        (
            "TCP congestion control",
            {"default_congestion": "bbr"},
            "ok",
            "cubic, which duck-llm's connections choose; the system's is bbr",
            "",
        ),
        ("TCP congestion control", {"default_congestion": Unknown("no such file")}, "ok", "cubic", ""),
    ],
)
def test_what_is_to_be_changed(
    check: str, changes: dict[str, Any], status: str, found: str, advice: str
) -> None:
    got = finding(check, **changes)
    assert (got.status, bool(got.advice)) == (status, bool(advice))
    assert found in got.found
    assert advice in got.advice


@pytest.mark.parametrize(
    ("field", "check"),
    [
        ("memory_bytes", "memory"),
        ("read_gb_per_s", "memory speed"),
        ("huge_pages", "huge pages"),
        ("reserved_pages", "reserved huge pages"),
        ("governors", "clock governor"),
        ("swap_bytes", "swap"),
        ("clock_is_kept", "clock"),
        ("congestion", "TCP congestion control"),
    ],
)
def test_what_cannot_be_known_says_why(field: str, check: str) -> None:
    got = finding(check, **{field: Unknown("no such file")})
    assert (got.status, got.found, got.advice) == ("unknown", "no such file", "")


def test_usual_speeds_grow_with_cores() -> None:
    speeds = [usual_gb_per_s(cores) for cores in (1, 2, 3, 4, 8, 16, 64)]
    assert speeds == [14.0, 28.0, 28.0, 35.0, 64.0, 128.0, 512.0]


def test_facts_are_read_from_files(tmp_path: Path) -> None:
    write(
        tmp_path,
        proc__cpuinfo="processor: 0\nmodel name\t: Duck 9000\n",
        proc__meminfo="MemTotal: 2048 kB\nMemAvailable: 1024 kB\nSwapTotal: 512 kB\nSwapFree: 128 kB\n"
        "HugePages_Total: 7\nHugePages_Free: 3\nodd\n",
        proc__sys__net__ipv4__tcp_congestion_control="reno\n",
        sys__devices__system__cpu__smt__active="1\n",
        sys__kernel__mm__transparent_hugepage__enabled="always madvise [never]\n",
        sys__devices__system__cpu__cpu0__cpufreq__scaling_governor="powersave\n",
        sys__devices__system__cpu__cpu0__cpufreq__energy_performance_preference="balance_power\n",
        sys__devices__system__cpu__cpu1__cpufreq__scaling_governor="performance\n",
    )
    facts = gather(tmp_path)
    assert facts.cpu == "Duck 9000"
    assert facts.memory_bytes == (2 << 20, 1 << 20)
    assert facts.swap_bytes == (512 << 10, 384 << 10)
    assert facts.reserved_pages == (7, 3)
    assert (facts.smt, facts.huge_pages) == (True, "never")
    assert (facts.congestion, facts.default_congestion) == ("cubic", "reno")
    assert facts.governors == ("performance", "powersave/balance_power")
    assert facts.read_gb_per_s == 10.0 * facts.cores
    assert facts.clock_is_kept is True
    assert gather(tmp_path, clock=5).clock_is_kept is False


def test_without_files_facts_are_unknown_with_the_reason(tmp_path: Path) -> None:
    facts = gather(tmp_path)
    unknown = (facts.smt, facts.memory_bytes, facts.huge_pages, facts.reserved_pages)
    for fact in (*unknown, facts.default_congestion):
        assert isinstance(fact, Unknown)
        assert "No such file" in fact.reason
    assert isinstance(facts.governors, Unknown)
    assert len(check_machine(facts)) >= len(CHECKS) - 1


def test_the_congestion_control_is_that_of_a_socket_of_ours(tmp_path: Path) -> None:
    """Whatever the system's default is, which a file says."""
    write(tmp_path, proc__sys__net__ipv4__tcp_congestion_control="bbr\n")
    facts = gather_machine(tmp_path, measure=float, clock_state=int)
    with socket.socket() as ours:
        _native.set_connection_options(ours.fileno())
        assert facts.congestion == congestion_of(ours)
        assert f"TCP, {facts.congestion}" in _native.describe_connection(ours.fileno())
    assert facts.default_congestion == "bbr"


def test_odd_files_are_unknown(tmp_path: Path) -> None:
    write(
        tmp_path,
        proc__meminfo="MemTotal: many kB\n",
        sys__kernel__mm__transparent_hugepage__enabled="sometimes\n",
    )
    facts = gather(tmp_path)
    assert isinstance(facts.memory_bytes, Unknown)
    assert isinstance(facts.huge_pages, Unknown)
    write(tmp_path, proc__meminfo="MemTotal: 5 kB\n")
    assert gather(tmp_path).memory_bytes == Unknown("/proc/meminfo has no MemAvailable")


def test_a_clock_that_cannot_be_asked(tmp_path: Path) -> None:
    def refuse() -> int:
        raise PermissionError(1, "Operation not permitted")

    facts = gather_machine(tmp_path, measure=lambda threads: 1.0, clock_state=refuse)
    assert facts.clock_is_kept == Unknown("Operation not permitted")


def test_this_machine_is_gathered() -> None:
    facts = gather_machine(measure=lambda threads: 30.0)
    assert facts.isa in facts.isas
    assert all(isinstance(each, Finding) for each in check_machine(facts))


LOCAL, FAR = [Address("127.0.0.1", 1), Address("localhost", 2)], [Address("10.0.0.1", 1)]


def _content(content: bytes, mode: int = 0o600) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = folder / "token"
        path.write_bytes(content)
        path.chmod(mode)
        return path

    return make


@pytest.mark.parametrize(
    ("make", "status", "words", "token"),
    [
        (_content(b" duck\n"), "ok", "its owner's alone", "duck"),
        (_content(b"duck", 0o644), "warning", "others can read", "duck"),
        (_content(b"\n"), "problem", "is empty", None),
        (_content(b"d" * 4097), "problem", "more than 4096 bytes", None),
        (_content(b"\xff"), "problem", "not UTF-8", None),
        (lambda folder: folder / "none", "problem", "No such file", None),
    ],
)
def test_token_files(
    tmp_path: Path, make: Callable[[Path], Path], status: str, words: str, token: str | None
) -> None:
    found, got = check_token(make(tmp_path), FAR)
    assert (found.status, got) == (status, token)
    assert words in found.found
    if status == "warning":
        assert found.advice == f"chmod 600 {tmp_path / 'token'}"


def test_tokens_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_token(None, LOCAL)[0].status == "ok"
    found, token = check_token(None, [*LOCAL, *FAR])
    assert (found.status, token) == ("problem", None)
    assert "none, but 10.0.0.1:1 is beyond loopback" in found.found
    assert "chmod 600 token" in found.advice
    monkeypatch.setenv("DUCKLLM_CLUSTER_TOKEN", "quack")
    assert check_token(None, FAR) == (Finding(HERE, "token", "ok", "in $DUCKLLM_CLUSTER_TOKEN"), "quack")
