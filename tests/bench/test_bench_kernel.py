"""``duckllm bench kernel``: what it verifies, counts and refuses, its JSON and its tables."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from duckllm import _native
from duckllm.bench import expert_step
from duckllm.bench import kernel as module
from duckllm.bench.expert_step import ExpertStep, RandomExperts, SliceShape, gb_per_s
from duckllm.bench.kernel import (
    DEFAULT_MOST_FLOP,
    OWN,
    SAME,
    SHAPES,
    Cell,
    KernelConfig,
    KernelLine,
    KernelRun,
    cells_of,
    derived,
    measure_kernels,
    need_bytes,
    pool_experts,
)
from duckllm.bench.kernel_report import plot_points, print_kernels, roofs, run_json
from duckllm.bench.linear import LinearShape
from duckllm.bench.linear_report import linear_json, measure_linear, print_linear
from duckllm.bench.machine import Caches
from duckllm.cli.bench_common import print_line, writing
from duckllm.cli.main import app
from duckllm.config import available_cores
from duckllm.errors import ConfigError

SMALL = SliceShape("small", hidden_size=160, num_stripes=2, top_k=3, num_experts=6)


@pytest.fixture(scope="module")
def random() -> RandomExperts:
    return RandomExperts(SMALL)


def small_step(random: RandomExperts, num_tokens: int = 3, **options: Any) -> ExpertStep:
    weight_format = options.setdefault("weight_format", "fp9")
    units = random.fill(12, weight_format, huge_pages=False)
    return ExpertStep(random, units, num_tokens=num_tokens, top_k=3, threads=2, isa="auto", **options)


def test_the_shapes_are_those_of_the_models() -> None:
    facts = {
        name: (shape.hidden_size, shape.channels, shape.num_experts, shape.top_k)
        for name, shape in SHAPES.items()
    }
    assert facts == {
        "deepseek-32": (7168, 64, 256, 8),
        "deepseek-8": (7168, 256, 256, 8),
        "deepseek": (7168, 2048, 256, 8),
        "qwen3": (2048, 768, 128, 8),
        "qwen3-12": (2048, 64, 128, 8),
        "demo": (256, 128, 32, 4),
    }
    assert SHAPES["deepseek-32"].expert_bytes("fp9") == 4 * 387_776
    assert SHAPES["deepseek-32"].expert_bytes("fp8") == 4 * (704 + 3 * 224 * 512)
    assert SHAPES["demo"].expert_weights == 3 * 256 * 128


@pytest.mark.parametrize("weight_format", ["fp9", "fp8"])
@pytest.mark.parametrize(("num_tokens", "layer_experts"), [(1, None), (3, None), (40, 6), (40, None)])
def test_a_right_kernel_is_let_pass(
    random: RandomExperts, weight_format: str, num_tokens: int, layer_experts: int | None
) -> None:
    step = small_step(random, num_tokens, weight_format=weight_format, layer_experts=layer_experts)
    assert 0 < step.verify() < 1e-6


@pytest.mark.parametrize("row", [0, 16, 31])
def test_a_kernel_that_is_wrong_in_one_row_is_found(
    random: RandomExperts, row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = small_step(random, 32)
    original = step._time

    def spoilt(ids: np.ndarray, compute: bool) -> list[float]:
        seconds = original(ids, compute)
        step._y[row, 7] += 1e-3 * abs(step._y).max()
        return seconds

    monkeypatch.setattr(step, "_time", spoilt)
    with pytest.raises(RuntimeError, match="of its largest output off: nothing measured"):
        step.verify()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_that_is_not_compared_must_be_finite(
    random: RandomExperts, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = small_step(random, 32)
    assert 20 not in expert_step.VERIFIED_ROWS
    original = step._time

    def spoilt(ids: np.ndarray, compute: bool) -> list[float]:
        seconds = original(ids, compute)
        step._y[20, 0] = value
        return seconds

    monkeypatch.setattr(step, "_time", spoilt)
    with pytest.raises(RuntimeError, match="nothing measured"):
        step.verify()


def test_one_changed_weight_is_found(random: RandomExperts) -> None:
    units = random.fill(12, "fp9", huge_pages=False)
    step = ExpertStep(random, units, num_tokens=1, top_k=12, threads=1, isa="auto")
    step.verify()
    units[5, 1, -600] ^= 0x38  # a magnitude of down
    units[5, 1, -599] ^= 0x38
    with pytest.raises(RuntimeError, match="nothing measured"):
        step.verify()


def test_wrong_weights_of_rows_are_found(random: RandomExperts, monkeypatch: pytest.MonkeyPatch) -> None:
    step = small_step(random)
    original = step._time

    def other_weights(ids: np.ndarray, compute: bool) -> list[float]:
        mine = step._weights
        step._weights = mine[::-1].copy()
        try:
            return original(ids, compute)
        finally:
            step._weights = mine

    monkeypatch.setattr(step, "_time", other_weights)
    with pytest.raises(RuntimeError, match="nothing measured"):
        step.verify()


def test_cold_steps_go_through_all_experts_before_any_comes_again(random: RandomExperts) -> None:
    ids = small_step(random)._choose(4)
    assert ids.shape == (4, 3, 3)
    assert ids[:, 0].ravel().tolist() == list(range(12))
    assert (ids == ids[:, :1]).all()  # all rows the same


def test_hot_steps_take_the_same_experts(random: RandomExperts) -> None:
    assert small_step(random, hot=True)._choose(3)[:, 0].tolist() == [[0, 1, 2]] * 3


def test_rows_choose_their_own_experts_in_the_next_layer(random: RandomExperts) -> None:
    step = small_step(random, 40, layer_experts=6)
    ids = step._choose(2)
    assert set(ids[0].ravel()) == set(range(6))
    assert set(ids[1].ravel()) == set(range(6, 12))
    assert all(len(set(row)) == 3 for row in ids[0])
    assert len({tuple(row) for row in ids[0]}) > 20
    assert step.bytes_of(ids[0]) == 6 * SMALL.expert_bytes("fp9")
    assert step.bytes_of(ids[0, :1]) == 3 * SMALL.expert_bytes("fp9")


def test_a_sample_is_of_steps_and_reads_alike(random: RandomExperts) -> None:
    step = small_step(random)
    step.verify()
    step.sample()
    assert len(step.seconds) == len(step.read_seconds) == len(step.step_bytes) == len(step.read_bytes) > 0
    assert min(step.seconds + step.read_seconds) > 0
    assert set(step.step_bytes) == {3 * SMALL.expert_bytes("fp9")}


def test_native_steps_are_the_runs_they_stand_for(random: RandomExperts) -> None:
    units = random.fill(12, "fp9", huge_pages=False)
    step = small_step(random)
    ids = step._choose(2)
    y = np.empty_like(step._x)
    assert len(step.experts.time_steps(units, step._x, ids, step._weights, y)) == 2
    assert np.array_equal(y, step.experts.run(units, step._x, ids[1], step._weights))
    before = y.copy()
    assert len(step.experts.time_steps(units, step._x, ids, step._weights, y, compute=False)) == 2
    assert np.array_equal(y, before)
    with pytest.raises(ValueError, match=r"topk_ids: got shape \[3, 3\], expected shape \[N, T, K\]"):
        step.experts.time_steps(units, step._x, ids[0], step._weights, y)
    with pytest.raises(ValueError, match=r"topk_ids\[0, 0\]: got 12, expected 0 to 11"):
        step.experts.time_steps(units, step._x, ids + 12, step._weights, y)


def test_rates_are_medians_of_each_steps_own() -> None:
    assert gb_per_s([10**9, 2 * 10**9, 10**9], [1.0, 1.0, 4.0]) == 1.0


def test_the_default_grid_is_a_cross_and_full_is_all() -> None:
    cells = cells_of(KernelConfig(format=("fp9",)), "qwen3")
    same = {(cell.experts, cell.rows) for cell in cells if cell.routing == SAME}
    assert {(4, 1), (20, 1), (8, 2), (8, 32), (1, 1)} <= same
    assert (4, 2) not in same
    assert max(cell.flop for cell in cells) <= DEFAULT_MOST_FLOP
    assert {cell.rows for cell in cells if cell.routing == OWN} == {32, 128}
    full = cells_of(KernelConfig(full=True), "qwen3")
    assert len(full) == 4 * (5 * 7 + 5 * 3 + 1)
    assert {cell.format for cell in full} == {"fp9", "fp8", "int8", "int4"}
    asked = cells_of(KernelConfig(rows=(512,), experts=(3,), format=("fp8",)), "deepseek")
    assert asked == [Cell("deepseek", "fp8", 3, 512, SAME), Cell("deepseek", "fp8", 3, 512, OWN)]


def test_memory_is_reckoned_before_anything_is_measured() -> None:
    same, own = Cell("deepseek-32", "fp9", 8, 1, SAME), Cell("deepseek-32", "fp9", 8, 32, OWN)
    each = 4 * 387_776
    assert pool_experts([same], 256 << 20) == -(-(256 << 20) // each)
    assert pool_experts([same, own], 256 << 20) == 256
    assert pool_experts([own], 512 << 20) == 512
    assert pool_experts([replace(same, experts=20)], 1) == 20
    assert need_bytes([same, own], 256 << 20) > 256 * each + (256 << 20)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "gpt"], "shape: got 'gpt', expected one of deepseek-32, deepseek-8, deepseek, qwen3, "),
        (["--format", "fp9,int3"], "format: got 'int3', expected one of fp9, fp8, int8"),
        (["--isa", "neon"], "isa: got 'neon', expected one of auto, scalar"),
        (["--rows", "1,0"], "rows: got 0, expected 1 to 4096"),
        (["--rows", "few"], "rows: got 'few', expected numbers with commas between"),
        (["--experts", "65"], "experts: got 65, expected 1 to 64"),
        (["--threads", "9999"], f"threads: got 9999, expected 1 to {available_cores()}"),
        (["--repeats", "8"], "repeats: got 8, expected 9 to 10000"),
        (["--plot", "a.jpg"], "plot: got 'a.jpg', expected a file name that ends in .png"),
        (["--save", "/no/such/a.jsonl"], "save: got '/no/such/a.jsonl', expected a file in a folder that"),
        (["--linear", "--hot"], "hot: got True, expected nothing beside --linear"),
        (["--linear", "--shape", "demo"], "shape: got 'demo', expected nothing beside --linear"),
        (["--shape", "demo,deepseek"], "shape: got deepseek, which needs 2.9 GB of memory, expected at most"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_refused(monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str) -> None:
    monkeypatch.setattr(module, "available_memory_bytes", lambda: 2 * 10**9)
    monkeypatch.setattr(module, "read_caches", lambda: Caches(1 << 20, 32 << 20))
    monkeypatch.setattr(module, "measure_cell", lambda *_: pytest.fail("something was measured"))
    error = CliRunner().invoke(app, ["bench", "kernel", *arguments]).exception
    assert isinstance(error, ConfigError), error
    assert str(error).startswith(message)
    assert error.exit_code == 2


def test_shapes_that_nobody_asked_for_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_memory_bytes", lambda: 2 * 10**9)
    grid, notes = module.plan_grid(KernelConfig(), 256 << 20)
    assert [cells[0].shape for cells in grid] == ["deepseek-32", "qwen3", "qwen3-12", "demo"]
    assert [note.split(",")[0] for note in notes] == ["LEFT OUT: deepseek-8", "LEFT OUT: deepseek"]
    assert "2.0 GB are available" in notes[0]


def line(
    experts: int, rows: int, step_us: float, weight_format: str = "fp9", routing: str = SAME
) -> KernelLine:
    shape = SHAPES["demo"]
    step_bytes = experts * shape.expert_bytes(weight_format)
    rate = step_bytes / step_us / 1e3
    return KernelLine(
        Cell("demo", weight_format, experts, rows, routing), "avx2", 1e-7, step_us * 1e-6, step_us * 0.9e-6,
        step_us * 2e-6, step_bytes, rate, rate * shape.expert_weights / shape.expert_bytes(weight_format),
        2 * shape.expert_weights * experts * rows / step_us / 1e3, 25.0, 20.0, 0.5, 0.25,
    )  # fmt: skip


def test_what_follows_from_the_lines() -> None:
    lines = [line(4, 1, 100), line(4, 2, 110), line(20, 1, 400), line(1, 1, 10), line(4, 2, 1, routing=OWN)]
    [values] = derived(lines)
    gparam = 4 * SHAPES["demo"].expert_weights / 100 / 1e3
    assert values["t2_over_t1"] == {"4": 1.1}
    assert values["gparam_per_s_4"] == pytest.approx(gparam, abs=1e-3)
    assert values["few_over_many"] == pytest.approx(0.8)
    assert values["fixed_us"] == pytest.approx(10 - 111_104 / 25e3, abs=0.01)
    worse = replace(line(4, 2, 1, routing=OWN), error=3e-7)
    assert list(derived([line(4, 1, 100), worse, line(8, 2, 100, "fp8")])) == [
        {"shape": "demo", "format": "fp9", "error": 3e-7},
        {"shape": "demo", "format": "fp8", "error": 1e-7},
    ]


def test_tables_and_json_have_every_line() -> None:
    long = [replace(line(20, 128, 123_456.0, routing=OWN), of_fma=0.99)]
    integers = [replace(line(4, 1, 100, "int8"), error=8.14e-3, of_fma=None, integer="amx_int8")]
    lines = [line(4, 1, 100), line(4, 2, 110, "fp8"), line(1, 1, 10), *integers, *long]
    run = KernelRun(KernelConfig(), 2, 1 << 28, Caches(1, 2), 500.0, lines, ["LEFT OUT: x."])
    text = io.StringIO()
    print_kernels(run, Console(file=text, width=80, highlight=False, markup=False))
    shown = [" ".join(row.split()) for row in text.getvalue().splitlines()]
    assert "fp9 4 1 same 100 3.9 4.4 25.0 18% 50% 8 25%" in shown
    assert "fp8 4 2 same 110 3.6 3.6 25.0 14% 50% 14 25%" in shown
    assert "int8 4 1 same 100 3.9 4.0 25.0 16% 50% 8 -" in shown
    assert "int8: the largest error against float64 is 8.1e-03 of the largest output." in shown
    assert any(row.startswith("fp9: one expert's step takes 5.6 us more than its bytes") for row in shown)
    assert "LEFT OUT: x." in shown
    whole = " ".join(shown)
    assert "2 threads, avx2, integers with amx_int8, of few rows with avx512_vnni, cold, commit" in whole
    assert "A step of one expert and one row is measured beside those that are asked for" in whole
    assert "…" not in text.getvalue()
    values = json.loads(json.dumps(run_json(run)))
    assert [each["step_us"] for each in values["lines"]] == [100.0, 110.0, 10.0, 100.0, 123500.0]
    assert [each["experts"] for each in values["lines"]] == [4, 4, 1, 4, 20]
    assert [each["of_fma"] for each in values["lines"]] == [0.25, 0.25, 0.25, None, 0.99]
    assert values["lines"][3]["error"] == 8.14e-3
    assert values["integer"] == "amx_int8"
    assert values["lines"][0]["read_gb_per_s"] == 25.0
    assert values["lines"][0]["of_ceiling"] == pytest.approx(4 * 111_104 / 100e3 / 25, abs=1e-4)
    assert values["notes"] == ["LEFT OUT: x."]
    assert roofs(run) == ({"cold read": 25.0}, {"avx2 f32 multiply-add": 500.0})


def test_a_picture_has_the_fewest_and_the_most_rows() -> None:
    lines = [line(4, 1, 9), line(8, 1, 10), line(8, 2, 11), line(8, 4, 12), line(8, 32, 5, routing=OWN)]
    points = plot_points(lines)
    assert [point.name for point in points] == [
        "demo, fp9, 8 experts, 1 rows", "demo, fp9, 8 experts, 4 rows",
    ]  # fmt: skip
    assert points[1].flop_per_byte == pytest.approx(2 * 4 * SHAPES["demo"].expert_weights / 111_104)


@pytest.mark.parametrize("hot", [False, True])
def test_a_run_measures_its_cells(hot: bool) -> None:
    seen: list[tuple[str, float, float]] = []
    formats = ("fp8", "int8")
    config = KernelConfig(shape=("demo",), experts=(2,), rows=(1, 33), format=formats, threads=1, hot=hot)

    def progress(name: str, done: float, total: float) -> None:
        seen.append((name, done, total))

    run = measure_kernels(config, progress, size_bytes=4 << 20)
    assert [(each.cell.experts, each.cell.rows, each.cell.routing) for each in run.lines] == [
        (2, 1, SAME), (2, 33, SAME), (2, 33, OWN), (1, 1, SAME),
    ] * 2  # fmt: skip
    for each in run.lines[:2]:
        assert each.step_bytes == 2 * SHAPES["demo"].expert_bytes("fp8")
        assert each.gb_per_s == pytest.approx(each.step_bytes / each.step_s / 1e9, rel=0.3)
        assert each.gflop_per_s == pytest.approx(each.cell.flop / each.step_s / 1e9)
        assert each.least_s <= each.step_s <= each.most_s
        assert 0 < each.error < 1e-5
        assert each.of_fma == pytest.approx(each.gflop_per_s / run.fma_gflop_per_s)
    assert all(each.of_fma is None and 1e-3 < each.error < 4e-2 for each in run.lines[4:])
    multipliers = _native.available_integer(_native.select_isa())
    assert [each.integer for each in run.lines[:4]] == [""] * 4
    assert all(each.integer in multipliers for each in run.lines[4:])
    assert seen[0][:2] == ("demo fp8 2x1", 0.0)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert seen[-1][1] < seen[-1][2]


# Eight times the last cache, which the command takes of itself, may be gigabytes and take a minute.
ON_LITTLE_MEMORY = """
from duckllm.__main__ import main
from duckllm.bench import kernel
kernel.default_size_bytes = lambda caches, available_bytes: 4 << 20
main()
"""


def test_the_command_ends_with_one_json_line(tmp_path: Path) -> None:
    saved = tmp_path / "lines.jsonl"
    saved.write_text("before\n")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", ON_LITTLE_MEMORY, "bench", "kernel", "--shape", "demo",
         "--rows", "1", "--experts", "4", "--format", "fp9", "--isa", "scalar", "--threads", "1",
         "--save", saved],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    first, *_, last = done.stdout.splitlines()
    assert "1 thread, scalar, cold" in first
    assert saved.read_text() == f"before\n{last}\n"
    result = json.loads(last)
    assert set(result) == {
        "benchmark", "commit", "date", "cpu", "cores", "kernel", "caches", "other_load_cores", "shape",
        "experts", "rows", "format", "threads", "isa", "prefill", "repeats", "hot", "full", "size",
        "verified", "fma_gflop_per_s", "lines", "derived", "notes", "integer",
    }  # fmt: skip
    assert (result["benchmark"], result["isa"], result["threads"]) == ("kernel", "scalar", 1)
    assert (result["prefill"], result["integer"]) == ("f32", None)
    assert [set(each) for each in result["lines"]] == [{
        "shape", "format", "experts", "rows", "routing", "error", "step_us", "least_us",
        "most_us", "gparam_per_s", "gb_per_s", "read_gb_per_s", "of_ceiling", "fastest_of_ceiling",
        "gflop_per_s", "of_fma",
    }] * 2  # fmt: skip
    assert result["size"] == 4 << 20
    assert all(len(json.dumps(each)) < 350 for each in result["lines"])
    assert set(result["derived"][0]) == {"shape", "format", "error", "fixed_us"}


def test_a_kernel_that_is_wrong_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(original: Callable[..., Any]) -> Callable[..., Any]:
        def fill(self: RandomExperts, *arguments: Any, **options: Any) -> np.ndarray:
            units = original(self, *arguments, **options)
            units[:, :, 200:] ^= 1
            return units

        return fill

    monkeypatch.setattr(RandomExperts, "fill", wrong(RandomExperts.fill))
    config = KernelConfig(shape=("demo",), experts=(2,), rows=(1,), format=("fp9",), threads=1)
    with pytest.raises(RuntimeError, match="nothing measured"):
        measure_kernels(config, size_bytes=4 << 20)


def test_scalar_and_best_verify_alike(random: RandomExperts) -> None:
    units = random.fill(12, "fp9", huge_pages=False)
    for isa in _native.available_isas():
        step = ExpertStep(random, units, num_tokens=2, top_k=3, threads=1, isa=isa)
        assert step.experts.isa == isa
        assert step.verify() < 1e-6


@pytest.mark.skipif(not _native.available_bf16(), reason="this CPU has no bf16 multipliers")
def test_prefill_in_bf16_is_measured_and_named() -> None:
    config = KernelConfig(
        shape=("demo",), experts=(2,), rows=(9,), format=("fp9",), threads=1, isa="avx512", prefill="bf16"
    )
    run = measure_kernels(config, size_bytes=4 << 20)
    assert all(1e-4 < each.error < 1e-2 for each in run.lines)
    assert run_json(run)["prefill"] == _native.select_bf16("avx512")
    text = io.StringIO()
    print_kernels(run, Console(file=text, width=300, highlight=False, markup=False))
    assert f"more than 8 rows of an expert with {_native.select_bf16('avx512')}" in text.getvalue()


def test_prefill_in_bf16_needs_the_instruction_set() -> None:
    with pytest.raises(ConfigError, match="prefill: got 'bf16', expected f32"):
        KernelConfig(isa="scalar", prefill="bf16")
    with pytest.raises(ConfigError, match="prefill: got 'f16', expected one of f32, bf16"):
        KernelConfig(prefill="f16")


def test_dense_layers_are_measured_and_shown() -> None:
    config = KernelConfig(rows=(1, 3), format=("fp8",), threads=1, isa="scalar")
    models = {"a model": (LinearShape("o", 256, 128),)}
    seen: list[tuple[str, float, float]] = []
    run = measure_linear(config, lambda *facts: seen.append(facts), models, size_bytes=4 << 20)
    assert seen == [("a model o", 0, 1)]
    text = io.StringIO()
    print_linear(run, Console(file=text, width=80, highlight=False, markup=False))
    shown = [" ".join(row.split()) for row in text.getvalue().splitlines()]
    assert [row.split()[:5] for row in shown if row.startswith("a model")] == [
        ["a", "model", "o", "fp8", "1"], ["a", "model", "o", "fp8", "3"],
    ]  # fmt: skip
    values = json.loads(json.dumps(linear_json(run)))
    assert [(each["rows"], each["format"], each["in_features"]) for each in values["lines"]] == [
        (1, "fp8", 256), (3, "fp8", 256),
    ]  # fmt: skip
    for each in values["lines"]:
        assert each["gflop_per_s"] == pytest.approx(
            2 * each["rows"] * 256 * 128 / each["step_us"] / 1e3, rel=0.01
        )
        assert each["of_ceiling"] == pytest.approx(each["gb_per_s"] / each["read_gb_per_s"], abs=1e-2)
    assert (values["threads"], values["isa"], values["verified"]) == (1, "scalar", True)


def test_a_line_that_cannot_be_saved_is_printed_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"save: got '/dev/full', expected a file that can be written \(No"):
        print_line({"benchmark": "x"}, Path("/dev/full"))
    assert capsys.readouterr().out == '{"benchmark": "x"}\n'


def fill_the_disk(path: Path) -> None:
    with writing("plot", path):
        path.write_text("")
        raise OSError(28, "full")


def test_no_empty_file_is_left_where_writing_fails(tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    with pytest.raises(
        ConfigError, match=r"plot: got '.*plot.png', expected a file that .* written \(full\)"
    ):
        fill_the_disk(path)
    assert not path.exists()


@pytest.mark.parametrize("verb", ["kernel", "roofline", "ablation"])
def test_a_wrong_instruction_set_in_the_environment(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUCK_FORCE_ISA", "nonsense")
    result = CliRunner().invoke(app, ["bench", verb])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).startswith("DUCK_FORCE_ISA: got 'nonsense', expected one of ")
