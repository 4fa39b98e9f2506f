"""The choice of the instruction set: what this machine has, and DUCK_FORCE_ISA."""

from __future__ import annotations

from pathlib import Path

import pytest

from duckllm import _native

ALL = ("scalar", "avx2", "avx512")


def new(isa: str = "auto") -> _native.Experts:
    return _native.Experts(
        hidden_size=32,
        intermediate_size=16,
        num_experts=1,
        top_k=1,
        first_stripe=0,
        num_stripes=1,
        max_tokens=1,
        num_threads=1,
        spin_us=0,
        isa=isa,
    )


def cpu_flags() -> set[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return set(line.split(":")[1].split())
    raise AssertionError("no flags in /proc/cpuinfo")


def test_available_isas_are_those_of_the_cpu() -> None:
    flags = cpu_flags()  # the kernel leaves out what it does not save on a task switch
    expected = ["scalar"]
    if {"avx2", "fma"} <= flags:
        expected.append("avx2")
    if {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= flags:
        expected.append("avx512")
    assert _native.available_isas() == expected


def test_best_isa_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DUCK_FORCE_ISA", raising=False)
    assert _native.select_isa() == _native.available_isas()[-1]
    monkeypatch.setenv("DUCK_FORCE_ISA", "")
    assert _native.select_isa() == _native.available_isas()[-1]


def test_force_isa_takes(monkeypatch: pytest.MonkeyPatch, isa: str) -> None:
    monkeypatch.setenv("DUCK_FORCE_ISA", isa)
    assert _native.select_isa() == isa
    assert new().isa == isa


def test_named_isa_wins_over_the_variable(monkeypatch: pytest.MonkeyPatch, isa: str) -> None:
    monkeypatch.setenv("DUCK_FORCE_ISA", "scalar")
    assert new(isa).isa == isa


@pytest.mark.parametrize("name", ["neon", "AVX2", " avx2"])
def test_unknown_isa(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("DUCK_FORCE_ISA", name)
    with pytest.raises(ValueError, match=f"^DUCK_FORCE_ISA: got '{name}', expected one of scalar"):
        _native.select_isa()
    with pytest.raises(ValueError, match=f"^isa: got '{name}', expected one of scalar"):
        new(name)


def test_isa_that_the_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in set(ALL) - set(_native.available_isas()):
        monkeypatch.setenv("DUCK_FORCE_ISA", name)
        with pytest.raises(ValueError, match=f"^DUCK_FORCE_ISA: got '{name}', which this machine cannot run"):
            _native.select_isa()
