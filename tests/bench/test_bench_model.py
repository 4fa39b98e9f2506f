"""Benchmarks of a whole model: what is counted, what is verified, and what a report says."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from duckllm import LLM
from duckllm.bench.grid import Cell, GridConfig, Setting
from duckllm.bench.html_report import COLOURS, Picture, Section, Table, check_html, render
from duckllm.bench.model_report import html_report, print_run
from duckllm.bench.model_runs import GridMeasurement, GridRun, Line
from duckllm.bench.model_samples import Sample, decode_once, prefill_once
from duckllm.bench.token_ceilings import LinkFacts, StepCeiling
from duckllm.errors import ConfigError
from duckllm.models.inspection import inspect_model

NAMES = {"workers": "0", "format": "auto", "draft": "off", "lanes": "off", "wire_dtype": "f32"}
RATES = SimpleNamespace(read_gb_per_s=20.0, gflop_per_s=100.0, sample=lambda: None)


@pytest.fixture(scope="module")
def llm(demo_folder: Path) -> Any:
    with LLM(demo_folder, workers=0, kv_cache_bytes="16MiB", draft="on", device="cpu") as loaded:
        yield loaded


def prompts(count: int, length: int, seed: int = 0) -> list[list[int]]:
    return [
        [100 + (seed + 7 * number + 3 * place) % 5000 for place in range(length)] for number in range(count)
    ]


def test_replies_are_counted_from_when_all_have_begun(llm: LLM) -> None:
    sample = decode_once(llm, prompts(3, 40), output_len=12)
    assert [len(tokens) for tokens in sample.token_ids] == [12, 12, 12]
    assert len(sample.first_s) == 3
    assert max(sample.first_s) > 0
    # The last one to begin has 11 more; those before it may have begun a step earlier.
    assert 11 <= sample.num_tokens <= 33
    assert len(sample.gaps_s) <= 33
    assert sample.num_tokens / 3 <= sample.num_steps + sample.num_accepted_tokens
    assert sample.num_accepted_tokens <= sample.num_draft_tokens
    assert sample.num_draft_tokens > 0
    assert 0 < sum(sample.parts_s.values()) < sample.seconds
    assert sample.tokens_per_s == pytest.approx(sample.num_tokens / sample.seconds)
    assert decode_once(llm, prompts(3, 40), output_len=12).token_ids == sample.token_ids


def test_prompts_are_computed_whole_and_what_is_cached_is_not_counted(llm: LLM) -> None:
    sample = prefill_once(llm, prompts(2, 50, seed=1000))
    assert sample.num_tokens == 100
    assert [len(tokens) for tokens in sample.token_ids] == [1, 1]
    assert sample.seconds == max(sample.first_s)
    assert sample.gaps_s == ()
    again = prefill_once(llm, prompts(2, 50, seed=1000))
    assert again.num_tokens == 100 - 2 * 48  # three pages of 16 of each


def measurement(
    folder: Path, config: GridConfig, settings: list[Setting], open_llm: Callable[..., Any]
) -> Any:
    return GridMeasurement(
        config,
        settings,
        inspect_model(folder),
        "demo",
        open_llm=open_llm,
        interface_of=lambda name: LinkFacts(name),
        worker_speeds=lambda setting: None,
        rates=RATES,  # type: ignore[arg-type]
    )


class Borrowed:
    """A loaded model that stays open, some of whose replies are changed."""

    def __init__(self, llm: LLM, change: int = 0, weight_format: str = "fp9") -> None:
        self._llm, self._change, self._format = llm, change, weight_format

    def cluster_info(self) -> Any:
        return replace(self._llm.cluster_info(), weight_format=self._format)

    def __enter__(self) -> Borrowed:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def new_requests(self, token_ids: list[int], params: Any) -> Any:
        return self._llm.new_requests([*token_ids[:-1], (token_ids[-1] + self._change) % 8000], params)


def test_every_setting_is_measured_on_every_load(llm: LLM, demo_folder: Path) -> None:
    config = GridConfig("decode", (20, 40), 4, (1, 2), num_iters=2)
    settings = [
        Setting(NAMES | {"draft": draft}, {"device": "auto", "draft": draft}) for draft in ("off", "on")
    ]
    opened: list[dict[str, Any]] = []

    def open_llm(**arguments: Any) -> Borrowed:
        opened.append(arguments)
        return Borrowed(llm)

    seen: list[float] = []
    run = measurement(demo_folder, config, settings, open_llm).measure(
        lambda name, done, total: seen.append(done / total)
    )
    assert run.in_turns
    assert [each["draft"] for each in opened] == ["off", "on"]
    # Side by side each takes what the loads need, not most of the memory.
    assert len({each["kv_cache_bytes"] for each in opened}) == 1
    assert 0 < opened[0]["kv_cache_bytes"] < 16 << 20
    assert seen == sorted(seen)
    assert [(line.cell, line.setting.names["draft"]) for line in run.lines] == [
        (cell, draft) for cell in config.cells for draft in ("off", "on")
    ]
    assert {len(line.samples) for line in run.lines} == {2}
    found = json.loads(json.dumps(run.to_json()))
    assert found["read_gb_per_s"] == 20.0
    first = found["runs"][0]
    assert (first["input_len"], first["batch_size"], first["output_len"]) == (20, 1, 4)
    assert first["ceiling"]["link"] == "none, the experts are in this process"
    assert first["of_ceiling"] == pytest.approx(
        first["tokens_per_s"] / first["ceiling_tokens_per_s"], rel=0.01
    )


def test_other_replies_are_not_measured(llm: LLM, demo_folder: Path) -> None:
    config = GridConfig("decode", (20,), 4, (1,), num_iters=1)
    settings = [
        Setting(NAMES | {"draft": draft}, {"device": "auto", "draft": draft}) for draft in ("off", "on")
    ]
    wrong = measurement(
        demo_folder,
        config,
        settings,
        lambda **options: Borrowed(llm, change=1234 * (options["draft"] == "on")),
    )
    with pytest.raises(RuntimeError, match=r"other replies than in another .* nothing measured"):
        wrong.measure(lambda *_: None)


@pytest.mark.parametrize(("weight_format", "is_right"), [("fp8", False), ("int8", True), ("fp8+int4", True)])
def test_weights_that_were_rounded_may_reply_otherwise(
    llm: LLM, demo_folder: Path, weight_format: str, is_right: bool
) -> None:
    config = GridConfig("decode", (20,), 4, (1,), num_iters=1)
    settings = [
        Setting(NAMES | {"format": name}, {"device": "auto", "weight_format": name})
        for name in ("fp9", weight_format)
    ]

    def open_llm(weight_format: str, **_: object) -> Borrowed:
        return Borrowed(llm, 1234 * (weight_format != "fp9"), weight_format)

    measured = measurement(demo_folder, config, settings, open_llm)
    if is_right:
        measured.measure(lambda *_: None)
        return
    with pytest.raises(RuntimeError, match="other replies than in another"):
        measured.measure(lambda *_: None)


def test_a_load_that_does_not_fit_is_left_out_and_said(llm: LLM, demo_folder: Path) -> None:
    config = GridConfig("prefill", (20, 4095), 1, (8,), num_iters=1)
    run = measurement(demo_folder, config, [Setting(NAMES, {})], lambda **_: Borrowed(llm)).measure(
        lambda *_: None
    )
    assert [line.cell for line in run.lines] == [Cell(20, 8)]
    assert [note.partition(",")[0] for note in run.notes] == ["left out: 8 contexts of 4096 tokens"]


def sample(seconds: float, **changes: Any) -> Sample:
    values = {
        "num_tokens": 10, "seconds": seconds, "first_s": (0.5,), "gaps_s": (0.1, 0.2), "num_steps": 5,
        "num_draft_tokens": 8, "num_accepted_tokens": 6, "parts_s": {"wait_s": 1.0, "head_s": 0.0},
        "token_ids": ((1, 2),),
    } | changes  # fmt: skip
    return Sample(**values)


def a_run(model: str = "demo") -> GridRun:
    config = GridConfig("decode", (128, 256), 2, (1,), num_iters=3)
    run = GridRun(config, model, True, 0.5, 20.0, 100.0)
    info: Any = SimpleNamespace(num_workers=2, weight_format="fp9", isas=("avx2",), stripes=(1, 1))
    samples = (sample(1.0), sample(4.0, gaps_s=(0.3,)), sample(2.0, first_s=(0.7,)))
    step = StepCeiling(2.0, 4e6, 8_000_000, 1e9, 100.0, 200.0, 0.1, 0.05, None)
    for length in config.input_lens:
        run.lines.append(Line(Setting(NAMES, {}), info, Cell(length, 1), 2, samples, step, LinkFacts("lo")))
    return run


def test_a_lines_figures_follow_from_its_samples() -> None:
    line = a_run().lines[0]
    assert line.rates == [10.0, 2.5, 5.0]
    assert line.tokens_per_s == 5.0
    assert line.tokens_per_step == 2.0
    assert line.ceiling_tokens_per_s == pytest.approx(2.0 / 0.1)
    assert line.acceptance == 0.75
    assert line.step_parts_s == {"wait_s": pytest.approx(0.2)}
    assert line.percentiles("gaps_s") == {"p50": 0.2, "p90": 0.3, "p99": 0.3}
    found = line.to_json()
    assert (found["slowest_tokens_per_s"], found["fastest_tokens_per_s"]) == (2.5, 10.0)
    assert found["of_ceiling"] == 0.25
    assert found["time_to_first_token_s"] == {"p50": 0.5, "p90": 0.7, "p99": 0.7}


def test_the_table_says_speed_spread_ceiling_and_times() -> None:
    console = Console(width=110, record=True, file=io.StringIO())
    print_run(a_run(), console)
    text = console.export_text()
    assert re.search(r"128 +1 +5\.0 +2\.5 +10\.0 +20 +25\.0% +memory", text)
    assert re.search(r"128 +1 +500\.00 +700\.00 +700\.00 +200\.00 +300\.00 +300\.00 +75%", text)
    assert "no link rate to hold it against" in " ".join(text.split())


def test_the_report_is_one_file_that_loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["duckllm", "bench", "decode", "a<b"])
    text = html_report(a_run("<img src=x>"))
    assert text.count("<svg") == 3
    assert not re.search(r"<(script|img|link|iframe|object)\b", text)
    assert not re.search(r"""(src|href)=["'](?!#)""", text)
    # Names of XML namespaces are not loaded.
    assert {"www.w3.org"} >= set(re.findall(r"https?://([^/\"' ]+)", text))
    assert "color-scheme: light dark" in text
    assert "currentColor" in text
    assert "#010203" not in text
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]+)"', text)) <= set(ids)
    assert set(re.findall(r"url\(#([^)]+)\)", text)) <= set(ids)
    assert "&lt;img src=x&gt;" in text
    assert "<code>duckllm bench decode &#x27;a&lt;b&#x27;</code>" in text


def test_a_picture_is_drawn_in_colours_for_both_grounds() -> None:
    text = render(
        "t", [("n", "v")], [Section("h", "x & y", [Picture("c", lambda axes: axes.plot([1], [2]))])]
    )
    assert "<p>x &amp; y</p>" in text
    assert COLOURS[0] in text
    assert "<table" in render("t", [], [Section("h", table=Table(["a"], [["<1"]]))])


def test_where_a_report_can_be_written(tmp_path: Path) -> None:
    check_html(tmp_path / "a.html")
    for wrong in (tmp_path / "a.png", tmp_path / "none" / "a.html"):
        with pytest.raises(ConfigError, match=r"^html: "):
            check_html(wrong)
