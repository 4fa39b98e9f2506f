"""``duckllm bench ablation``: what it refuses, how it counts, and that a wrong variant is found."""

from __future__ import annotations

import io
import json
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from duckllm import _native
from duckllm.bench import ablation as module
from duckllm.bench.ablation import (
    PLAIN_READ,
    PRODUCTION,
    SHIPPED,
    AblationConfig,
    AblationRun,
    Bench,
    Trial,
    in_turns,
    measure_ablation,
    measure_decode,
    measure_tiles,
    same,
    trial,
)
from duckllm.bench.ablation_report import ablation_json, print_ablation
from duckllm.cli.main import app
from duckllm.config import available_cores
from duckllm.errors import ConfigError

WIDE = [isa for isa in _native.available_isas() if isa != "scalar"]
wide = pytest.mark.skipif(not WIDE, reason="this machine has scalar kernels only")


@pytest.fixture
def built() -> ModuleType:
    return pytest.importorskip("duckllm._ablation", reason="built without DUCK_BUILD_ABLATION")


@wide
def test_without_the_module_it_is_said_how_to_build_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "duckllm._ablation", None)
    error = CliRunner().invoke(app, ["bench", "ablation"]).exception
    assert isinstance(error, ConfigError)
    assert str(error) == (
        "ablation: got a build without the module duckllm._ablation, expected one that has it "
        "(from a checkout: pip install -e . -C cmake.define.DUCK_BUILD_ABLATION=ON)"
    )


@wide
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--channels", "65"], "channels: got 65, expected a multiple of 16, 16 to 2048"),
        (["--channels", "0"], "channels: got 0, expected a multiple of 16"),
        (["--channels", "x"], "channels: got 'x', expected numbers with commas between"),
        (["--channels", ""], "channels: got '', expected a number at least"),
        (["--isa", "scalar"], "isa: got 'scalar', expected one of auto, avx2"),
        (["--threads", "9999"], f"threads: got 9999, expected 1 to {available_cores()}"),
        (["--repeats", "8"], "repeats: got 8, expected 9 to 10000"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_refused(arguments: list[str], message: str) -> None:
    error = CliRunner().invoke(app, ["bench", "ablation", *arguments]).exception
    assert isinstance(error, ConfigError), error
    assert str(error).startswith(message)
    assert error.exit_code == 2


@wide
def test_too_little_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "load_module", lambda: None)
    monkeypatch.setattr(module, "available_memory_bytes", lambda: 10**9)
    with pytest.raises(ConfigError, match=r"memory: got 1.0 GB available, expected 2.5 GB: four layouts"):
        measure_ablation(AblationConfig(), size_bytes=5 * 10**8)


def test_results_are_compared_to_the_bit_or_within_rounding() -> None:
    production = np.array([[1.0, -2.0]], np.float32)
    near = np.nextafter(production, np.float32(9))
    same(production.copy(), production, True, "x")
    same(near, production, False, "x")
    for result, same_bits in ((near, True), (production + 3e-5, False), (production * np.nan, False)):
        with pytest.raises(RuntimeError, match="x: the result is not production's: nothing measured"):
            same(result.astype(np.float32), production, same_bits, "x")


class FakeBench:
    channels = 64

    def __init__(self) -> None:
        self.diary: list[str] = []

    def choose(self, steps: int, num_experts: int) -> np.ndarray:
        return np.zeros((steps, num_experts), np.int32)


def test_variants_take_turns_and_each_round_has_its_own_order() -> None:
    bench: Any = FakeBench()

    def run(name: str, seconds: float) -> Any:
        def timed(ids: np.ndarray, out: np.ndarray) -> list[float]:
            assert ids.shape == (4, 8)
            bench.diary.append(name)
            return [99.0, seconds, 2 * seconds, 3 * seconds]

        return timed

    seconds = in_turns(bench, {"a": run("a", 1.0), "b": run("b", 2.0)}, 8, 1, 20)
    assert seconds == {"a": [2.0] * 20, "b": [4.0] * 20}  # without the first, the median
    rounds = {"".join(bench.diary[i : i + 2]) for i in range(0, 40, 2)}
    assert rounds == {"ab", "ba"}


def test_speed_is_that_of_the_same_round() -> None:
    result = trial("scale on x before the dot", "q", FakeBench(), [2.0, 4.0, 8.0], [1.0, 4.0, 16.0], 10**9)  # type: ignore[arg-type]
    assert (result.step_s, result.speed, result.best) == (4.0, 0.0, -0.5)
    assert (result.low, result.high) == (-0.5, 1.0)
    assert result.gb_per_s == 0.25
    assert result.reference == -0.013


def test_tables_and_json_have_every_trial() -> None:
    trials = [
        Trial("a", "q", 64, 1e-4, -0.057, -0.06, -0.05, -0.055, 40.0, -0.024),
        Trial("b", "q", 128, 2e-4, 0.02, 0.0, 0.05, 0.03, 41.0, "slower"),
    ]
    tile = Trial("c", "tiles", 64, 3e-4, 0.01, 0.0, 0.02, 0.04, 1.0)
    run = AblationRun(AblationConfig() if WIDE else AblationConfig(isa="auto"), 2, "avx2", trials, [tile])
    text = io.StringIO()
    print_ablation(run, Console(file=text, width=80, highlight=False, markup=False))
    shown = [" ".join(row.split()) for row in text.getvalue().splitlines()]
    for row in (
        "a 100.0 -5.7% -6.0% -5.0% -5.5% -2.4%",
        "b 200.0 +2.0% +0.0% +5.0% +3.0% slower",
        "c 300.0 +1.0% +0.0% +2.0% +4.0%",
    ):
        assert row in shown
    assert "…" not in text.getvalue()
    values = json.loads(json.dumps(ablation_json(run)))
    assert [each["step_us"] for each in values["decode"] + values["tiles"]] == [100.0, 200.0, 300.0]
    assert set(values["decode"][0]) == {
        "name", "question", "channels", "step_us", "speed", "low", "high", "best", "gb_per_s", "reference",
    }  # fmt: skip
    assert values["channels"] == [64, 128]


@wide
@pytest.mark.parametrize("isa", WIDE)
def test_every_variant_gives_productions_result(built: ModuleType, isa: str) -> None:
    bench = Bench(built, 32, 2, isa, 1 << 20)
    trials = measure_decode(bench, 9)
    names = [each.name for each in trials]
    assert names[:3] == [PLAIN_READ, SHIPPED, PRODUCTION]
    assert {
        "prefetch of the payload", "place of the scale", "chains", "signs", "pre-scaled x", "down by blocks",
        "prefetch", "layout", "ceiling", PRODUCTION,
    } == {each.question for each in trials}  # fmt: skip
    assert trials[2].speed == 0.0
    tiles = measure_tiles(bench, 9, isa)
    assert len(tiles) == 1 + 4 * 3


@wide
def test_a_variant_that_is_wrong_is_found(built: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(built, 16, 1, WIDE[-1], 1 << 20)
    masks = bench.in_layout(1)
    masks[:, :, -64:] ^= 1  # signs of the last record, of the variants that read them as masks
    monkeypatch.setattr(module, "in_turns", lambda *_: pytest.fail("something was measured"))
    with pytest.raises(RuntimeError, match=r"signs: .*: the result is not production's: nothing measured"):
        measure_decode(bench, 9)


@wide
def test_layouts_have_the_same_bytes_in_another_order(built: ModuleType) -> None:
    bench = Bench(built, 16, 1, WIDE[-1], 1 << 20)
    head = 704
    units = [bench.in_layout(layout)[0, 0] for layout in range(4)]
    fours, masks, rows, pairs = (each[head:].reshape(-1, 576) for each in units)
    assert all(np.array_equal(units[0][:head], each[:head]) for each in units)
    assert np.array_equal(fours[:, :512], masks[:, :512])
    # [8 fours, 16 lanes, rows 0 2 1 3] to rows
    by_row = fours[:, :512].reshape(-1, 8, 16, 4)[..., [0, 2, 1, 3]].transpose(0, 1, 3, 2)
    assert np.array_equal(by_row.reshape(-1, 512), rows[:, :512])
    by_pair = by_row.reshape(-1, 16, 2, 16).transpose(0, 1, 3, 2)
    assert np.array_equal(by_pair.reshape(-1, 512), pairs[:, :512])
    assert np.array_equal(fours[:, 512:], pairs[:, 512:])
    negative = [int(np.unpackbits(each[:, 512:]).sum()) for each in (fours, masks, rows)]
    assert negative == [negative[0]] * 3
    assert not np.array_equal(fours[:, 512:], masks[:, 512:])


@wide
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"variant": 999}, "variant: got 999, expected below "),
        ({"units": np.zeros((8, 2, 387_776), np.uint8)}, "units: got 2, expected 1 stripes"),
        ({"units": np.zeros((8, 1, 64), np.uint8)}, "units: got 64, expected 387776 bytes a unit"),
        ({"x": np.zeros((2, 7168), np.float32)}, "x: got 2, expected 1 row"),
        ({"topk_ids": np.full((1, 2), 8, np.int32)}, "topk_ids: got 8, expected below 8"),
        ({"topk_ids": np.zeros((1, 9), np.int32)}, "topk_ids: got 9, expected 1 to 8 experts"),
        ({"topk_weights": np.zeros(3, np.float32)}, "topk_weights: got 3, expected one of each"),
        ({"out": np.zeros((2, 7168), np.float32)}, "out: got 2, expected the shape of x"),
    ],
)
def test_the_module_checks_what_it_is_given(built: ModuleType, change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "variant": 0, "units": np.zeros((8, 1, 387_776), np.uint8), "x": np.zeros((1, 7168), np.float32),
        "topk_ids": np.array([[0, 1]], np.int32), "topk_weights": np.ones(2, np.float32),
        "out": np.zeros((1, 7168), np.float32),
    }  # fmt: skip
    ablation = built.Ablation(7168, 1, 8, 8, 1, 0, WIDE[-1])
    assert len(ablation.decode(**arguments)) == 1
    with pytest.raises(ValueError, match=message):
        ablation.decode(**(arguments | change))
    with pytest.raises(ValueError, match="hidden_size: got 160, expected a multiple of 128"):
        built.Ablation(160, 1, 8, 8, 1, 0, WIDE[-1])
