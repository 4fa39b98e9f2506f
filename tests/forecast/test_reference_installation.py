"""docs/planning.md says of the published installation what the forecast says."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from duckllm.forecast.step import EXCHANGE, EXPERTS, WIRE

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/planning.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "reference_installation", ROOT / "benchmarks/offline/reference_installation.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_pages_table_is_the_programs(program: ModuleType) -> None:
    rows = program.predictions()
    ours = [made for name, made in rows.items() if not name.startswith("theirs")]
    listed = re.findall(r"^\| (?:fp9|fp8), .* \| ([\d.]+) \| ([\d.]+) \|$", PAGE, re.MULTILINE)
    assert listed == [(f"{made.step_us / 1e3:.1f}", f"{made.tokens_per_s:.1f}") for made in ours]
    shares = [f"{made.tokens_per_s:.1f}" for made in program.by_share().values()]
    told = PAGE.partition("By the share of 35 GB/s")[2].partition(". What decides")[0]
    assert re.findall(r"[01]\.\d\d (?:\([^)]+\) )?(\d\d\.\d)", told) == shares
    assert f"a hand-over of {program.most_exchange_us():.0f} us" in PAGE


def test_their_published_figures_are_met_with_their_published_limits(program: ModuleType) -> None:
    rows = program.predictions()
    plain, theirs = rows["theirs, without guesses"], rows["theirs"]
    waiting_ms = sum(plain.parts_us[name] for name in (EXPERTS, WIRE, EXCHANGE)) / 1e3
    names = "earlier state, a token|of it waiting for nodes|with guesses"
    told = dict(re.findall(rf"^\| ({names}) \| .* \| ([\d.]+) ", PAGE, re.MULTILINE))
    assert told == {
        "earlier state, a token": f"{plain.step_us / 1e3:.1f}",
        "of it waiting for nodes": f"{waiting_ms:.1f}",
        "with guesses": f"{theirs.tokens_per_s:.1f}",
    }
    published = program.PUBLISHED
    assert waiting_ms == pytest.approx(published["wait_ms"], rel=0.02)
    assert theirs.tokens_per_s == pytest.approx(published["tokens_per_s"], rel=0.05)
