"""``duckllm bench roofline``: what it refuses, its JSON, its tables and its picture."""

from __future__ import annotations

import io
import json
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from duckllm import _native
from duckllm.bench import roofline as module
from duckllm.bench.ceilings import Ceiling, Spread
from duckllm.bench.machine import Caches
from duckllm.bench.plot import check_plot, draw_roofline, write_plot
from duckllm.bench.points import Placed, Point
from duckllm.bench.report import nodes_file_figures, print_roofline
from duckllm.bench.roofline import (
    CAVEATS,
    Roofline,
    RooflineConfig,
    measure_roofline,
    thread_counts,
)
from duckllm.cli.bench_common import parse_numbers, parse_words
from duckllm.cli.main import app
from duckllm.config import available_cores, parse_size
from duckllm.errors import ConfigError, DuckError, MissingPackageError
from duckllm.worker.other_load import OtherLoad

TINY = ("--threads", "1", "--size", "4M", "--repeats", "9", "--huge-pages", "off")


def canned() -> Roofline:
    """A roofline with rates that are easy to recognise."""

    def memory(threads: int, state: str, rate: float, huge: bool, operation: str = "read") -> Ceiling:
        spread = Spread(rate, rate - 1, rate + 1)
        return Ceiling(
            operation, state, threads, "avx2", "GB/s", {"slow": Spread(1, 1, 1), "streams": spread},
            1 << 28, huge, 1.0 if huge else 0.0,
        )  # fmt: skip

    def fma(threads: int, isa: str, rate: float) -> Ceiling:
        return Ceiling("fma", "registers", threads, isa, "GFLOP/s", {"chains": Spread(rate, rate, rate)})

    roofline = Roofline(RooflineConfig(), 256 << 20, Caches(1 << 20, 32 << 20), 2)
    roofline.ceilings.extend([
        memory(1, "cold", 90, True), memory(2, "cold", 40.5, True), memory(2, "cold", 39, False),
        memory(2, "l2", 250, True), memory(2, "cold", 77, True, "memset"),
        fma(1, "avx2", 999), fma(2, "scalar", 57), fma(2, "avx2", 132),
    ])  # fmt: skip
    roofline.points.append(Placed(Point("a kernel", 2.0, 60.0), Point("", 2.0, 80.0), Spread(40, 9, 50)))
    return roofline


def test_thread_counts_double_up_to_all_cores() -> None:
    assert [thread_counts(cores) for cores in (1, 2, 6, 8)] == [(1,), (1, 2), (1, 2, 4, 6), (1, 2, 4, 8)]


def test_roofs_are_the_best_pages_of_the_most_threads() -> None:
    assert canned().memory_roofs() == {"cold read": 40.5, "l2 read": 250}
    assert canned().compute_roofs() == {"scalar multiply-add": 57, "avx2 multiply-add": 132}


def test_a_footprint_that_fits_in_the_cache_is_not_called_cold() -> None:
    def notes(size_bytes: int, caches: Caches) -> list[str]:
        return Roofline(RooflineConfig(), size_bytes, caches, 1).notes

    assert notes(4 << 20, Caches(1, 1 << 20)) == []
    [note] = notes(3 << 20, Caches(1, 1 << 20))
    assert note.startswith("NOT COLD: the footprint is 3.00 times the last-level cache")
    [note] = notes(4 << 20, Caches(1, 1 << 20, "assumed"))
    assert "assumed" in note


def test_a_run_that_was_not_alone_says_so() -> None:
    def notes(programs: float, hypervisor: float) -> list[str]:
        load = OtherLoad(programs, hypervisor)
        return Roofline(RooflineConfig(), 4 << 20, Caches(1, 1 << 20), 2, other_load=load).notes

    assert notes(0.09, 0) == []
    [note] = notes(0.5, 0.25)
    assert note.startswith(
        "NOT ALONE: meanwhile other programs used 0.50 cores and other virtual machines took"
    )
    assert len(notes(0, 0.2)) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--threads", "0"], f"threads: got 0, expected 1 to {available_cores()}, "),
        (["--threads", "1,5000"], f"threads: got 5000, expected 1 to {available_cores()}, "),
        (["--threads", "1,,2"], "threads: got '1,,2', expected numbers with commas between"),
        (["--threads", "many"], "threads: got 'many', expected numbers with commas between"),
        (["--isa", "neon"], "isa: got 'neon', expected one of auto, scalar"),
        (["--size", "64Q"], "size: got '64Q', expected a size: 2GiB, 800MB or a number of bytes"),
        (["--size", "1K"], "size: got '1024 bytes', expected at least "),
        (
            ["--size", "600M"],
            "size: got 0.6 GB, which needs 1.3 GB of memory, expected at most half of the 1.0 GB that are",
        ),
        (["--repeats", "8"], "repeats: got 8, expected 9 to 10000"),
        (["--huge-pages", "some"], "huge_pages: got 'some', expected one of both, on, off"),
        (["--plot", "roof.jpg"], "plot: got 'roof.jpg', expected a file name that ends in .png"),
        (
            ["--plot", "/no/such/folder/a.png"],
            "plot: got '/no/such/folder/a.png', expected a file in a folder",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_refused(monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str) -> None:
    monkeypatch.setattr(module, "available_memory_bytes", lambda: 10**9)
    monkeypatch.setattr(module, "memory_ceilings", lambda *_: pytest.fail("something was measured"))
    error = CliRunner().invoke(app, ["bench", "roofline", *arguments]).exception
    assert isinstance(error, ConfigError)
    assert str(error).startswith(message)
    assert error.exit_code == 2


def test_too_little_memory_for_the_default_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_memory_bytes", lambda: 100_000)
    with pytest.raises(ConfigError, match=r"size: got 25000 bytes, a quarter of the memory"):
        measure_roofline(RooflineConfig(threads=(1,)))


def test_sizes_and_threads_are_read() -> None:
    assert [parse_size("size", text) for text in ("0", "4096", "3k", "512M", "2G ")] == [
        0, 4096, 3072, 512 << 20, 2 << 30,
    ]  # fmt: skip
    assert parse_numbers("threads", " ") == ()
    assert parse_numbers("threads", "4, 1, 4") == (4, 1)
    assert parse_words("fp9, fp8,fp9") == ("fp9", "fp8")


def test_the_command_prints_json_and_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture, saved = tmp_path / "roof.png", tmp_path / "lines.jsonl"
    saved.write_text("before\n")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "duckllm", "bench", "roofline",
         *TINY, "--json", "--plot", picture, "--save", saved],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    [line] = done.stdout.splitlines()
    assert saved.read_text() == f"before\n{line}\n"
    result = json.loads(line)
    assert set(result) == {
        "benchmark", "commit", "date", "cpu", "cores", "kernel", "caches", "other_load_cores", "threads",
        "isa", "size", "repeats", "huge_pages", "size_per_llc", "verified", "ceilings", "roofs",
        "points", "notes", "caveats",
    }  # fmt: skip
    assert (result["benchmark"], result["threads"], result["size"]) == ("roofline", [1], 4 << 20)
    assert (result["repeats"], result["huge_pages"], result["verified"]) == (9, "off", True)
    assert result["caveats"] == list(CAVEATS)
    assert set(result["other_load_cores"]) == {"programs", "hypervisor"}
    for ceiling in result["ceilings"]:
        assert set(ceiling) == {
            "operation", "state", "threads", "isa", "huge_pages", "huge_page_share", "footprint_bytes",
            "unit", "best", "median", "least", "most", "variants",
        }  # fmt: skip
        assert 0 < ceiling["least"] <= ceiling["median"] <= ceiling["most"]
        assert ceiling["variants"][ceiling["best"]]["median"] == ceiling["median"]
    operations = [(each["operation"], each["state"]) for each in result["ceilings"]]
    assert operations[:3] == [("read", "cold"), ("memset", "cold"), ("memcpy", "cold")]
    assert [each["isa"] for each in result["ceilings"] if each["operation"] == "fma"] == (
        _native.available_isas()
    )
    cold = result["ceilings"][0]
    assert result["roofs"]["gb_per_s"]["cold read"] == cold["median"]
    one, eight = result["points"]
    assert one["flop_per_byte"] == pytest.approx(6 * 7168 * 64 / (4 * 387_776), abs=1e-4)
    assert eight["flop_per_byte"] == pytest.approx(8 * one["flop_per_byte"], abs=1e-3)
    for point in (one, eight):
        assert point["gb_per_s"] == pytest.approx(point["gflop_per_s"] / point["flop_per_byte"], rel=1e-3)
        assert point["fastest_gb_per_s"] >= point["gb_per_s"]
        assert point["fastest_read_gb_per_s"] >= point["read_gb_per_s"]
        assert point["fastest_of_ceiling"] == pytest.approx(
            point["fastest_gb_per_s"] / point["fastest_read_gb_per_s"], abs=1e-3
        )
        assert point["of_ceiling"] == pytest.approx(point["gb_per_s"] / point["read_gb_per_s"], abs=1e-3)
    header = picture.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", header[16:24]) == (1350, 900)


def test_tables_have_every_row_and_the_caveats() -> None:
    text = io.StringIO()
    print_roofline(canned(), Console(file=text, width=80, highlight=False, markup=False))
    lines = [" ".join(line.split()) for line in text.getvalue().splitlines()]
    for row in (
        "1 read cold 100% streams 90.0 89.0 91.0",
        "2 read cold 100% streams 40.5 39.5 41.5",
        "2 read cold 0% streams 39.0 38.0 40.0",
        "2 memset cold 100% streams 77.0 76.0 78.0",
        "1 avx2 999.0 999.0 999.0",
        "2 scalar 57.0 57.0 57.0",
        "a kernel 2.00 60.0 30.0 40.0 75%",
        "fastest of each 2.00 80.0 40.0 50.0 80%",
    ):
        assert row in lines
    assert "L2 1 MiB a core" in " ".join(lines)
    assert "8.0 times the last-level cache" in " ".join(lines)
    for caveat in CAVEATS:
        assert caveat in " ".join(lines)


def test_a_file_of_nodes_gets_what_a_worker_would_compute_with() -> None:
    ceilings = [each for each in canned().ceilings if each.operation != "fma" or each.threads == 2]
    avx2 = next(each for each in ceilings if each.isa == "avx2" and each.operation == "fma")
    slower = replace(avx2, isa="avx512", variants={"chains": Spread(120, 120, 120)})
    figures = '    cores = 2\n    isa = "{}"\n    read_gb_per_s = 40.5\n    gflop_per_s = {}'
    assert nodes_file_figures(canned().ceilings) == figures.format("avx2", 132)
    assert nodes_file_figures([*ceilings, slower]) == figures.format("avx512", 120)
    assert nodes_file_figures([each for each in ceilings if each.operation != "fma"]) == ""


def test_the_picture_has_the_roofs_and_the_points() -> None:
    pytest.importorskip("matplotlib")
    points = [Point("slow", 0.125, 3.0), Point("fast", 16.0, 100.0)]
    figure = draw_roofline("a machine", {"cold": 40.0, "l2": 250.0}, {"avx2": 132.0, "avx512": 264.0}, points)
    [axes] = figure.axes
    assert axes.get_title() == "a machine"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("arithmetic intensity, FLOP/byte", "GFLOP/s")
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    cold, l2, avx2, avx512, slow, fast = axes.get_lines()
    for line, rate in ((cold, 40.0), (l2, 250.0)):
        x, y = line.get_data()
        assert list(y) == [pytest.approx(rate * each) for each in x]
        assert y[-1] == 264.0  # up to the highest peak
    for line, rate in ((avx2, 132.0), (avx512, 264.0)):
        assert list(line.get_ydata()) == [rate, rate]
        assert line.get_xdata()[0] == pytest.approx(rate / 250)
    assert [tuple(map(float, (*line.get_xdata(), *line.get_ydata()))) for line in (slow, fast)] == [
        (0.125, 3.0), (16.0, 100.0),
    ]  # fmt: skip
    left, right = axes.get_xlim()
    bottom, top = axes.get_ylim()
    assert left < 0.125 < 16 < right
    assert bottom < 3 < 264 < top
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels[0] == "cold 40.0 GB/s"
    assert labels[-1] == "fast: 100 GFLOP/s, 6.2 GB/s"


def test_a_picture_of_roofs_alone_can_be_read_again(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    path = tmp_path / "roof.png"
    write_plot(path, "no kernels", {"cold": 40.0}, {"avx2": 132.0}, [])
    pixels = imread(path)
    assert pixels.shape[:2] == (900, 1350)
    assert pixels[..., :3].std() > 0.01


def test_a_picture_takes_no_folders_place(tmp_path: Path) -> None:
    (tmp_path / "roof.png").mkdir()
    with pytest.raises(ConfigError, match="expected a file in a folder that exists"):
        check_plot(tmp_path / "roof.png")


def test_without_matplotlib_it_is_said_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingPackageError) as caught:
        check_plot(tmp_path / "roof.png")
    assert str(caught.value) == (
        "plot: matplotlib is not installed; install this package with its extra: pip install 'duckllm[bench]'"
    )
    assert isinstance(caught.value, DuckError)
    assert caught.value.exit_code == 1


def test_help_shows_the_verb_and_examples() -> None:
    assert "roofline" in CliRunner().invoke(app, ["bench", "--help"]).output
    shown = CliRunner().invoke(app, ["bench", "roofline", "--help"]).output
    assert "duckllm bench roofline --plot roofline.png" in shown
