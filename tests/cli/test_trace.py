"""A traced run of the demo model, and ``duckllm trace`` of it."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from duckllm import LLM, SamplingParams
from duckllm.cli.main import app
from duckllm.errors import ConfigError
from duckllm.outputs import WorkerTimes
from duckllm.tracing.read import PARTS, read_trace
from duckllm.tracing.summary import PHASES, summarise

DUCK = [{"role": "user", "content": "What is a duck?"}]
NUM_TOKENS = 12


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None:
        raise result.exception
    return result.stdout


@pytest.fixture(scope="module")
def traced(model_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, WorkerTimes, int]:
    """The trace of a run of two workers with shares 1 to 3, the host's own statistics, and its steps."""
    path = tmp_path_factory.mktemp("trace") / "run.json"
    with LLM(workers=2, shares=(1, 3), trace=path, max_model_len=128) as llm:
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        llm.chat([DUCK, DUCK], params)
        times, num_steps = llm.worker_times(), llm.stats().num_steps
    with LLM(workers=0, max_model_len=128) as alone:
        (reply,) = alone.chat(DUCK, params)
    assert len(reply.outputs[0].token_ids) == NUM_TOKENS
    return path, times, num_steps


def test_every_step_of_every_layer_is_there(traced: tuple[Path, WorkerTimes, int]) -> None:
    path, times, num_steps = traced
    trace = read_trace([path])
    layers, counts = np.unique(trace.layer, return_counts=True)
    assert dict(zip(layers.tolist(), counts.tolist(), strict=True)) == dict(
        zip(times.layers, times.num_steps, strict=True)
    )
    assert len(trace.engine_us) == num_steps
    assert trace.engine_new_tokens.sum() == 2 * NUM_TOKENS
    assert [name.split(",")[1:] for name in trace.workers] == [
        [" 2 stripes", " 1 thread"],
        [" 6 stripes", " 1 thread"],
    ]
    # Every token chooses four experts in each of its steps.
    rows = np.bincount(trace.expert_step, weights=trace.expert_rows, minlength=len(trace.layer))
    assert (rows == 4 * trace.tokens).all()
    assert not np.isnan(trace.taken).any()
    # Workers here have the host's clock: what they say of it lies within the step as it is.
    assert (trace.free >= trace.submitted[:, None]).all()
    assert (trace.started <= trace.finished).all()
    assert (trace.error_us >= 0).all()


def test_the_hosts_time_adds_up(traced: tuple[Path, WorkerTimes, int]) -> None:
    trace = read_trace([traced[0]])
    summary = summarise(trace)
    assert sum(summary.parts_ms.values()) == pytest.approx(summary.engine_ms)
    assert summary.parts_ms["wait: not known"] == pytest.approx(0, abs=0.1)
    assert all(summary.parts_ms[f"wait: {phase}"] >= 0 for phase in PHASES)
    # The engine's own account: what it spent on parts is all but a little of its steps.
    parts = dict(zip(PARTS, trace.engine_parts_us.sum(axis=0) / 1000, strict=True))
    assert 0 < sum(parts.values()) <= summary.engine_ms * 1.01
    assert parts["device"] == 0


def test_the_verb_prints_json_tables_and_pictures(
    traced: tuple[Path, WorkerTimes, int], tmp_path: Path
) -> None:
    path = traced[0]
    found: dict[str, Any] = json.loads(run("trace", path, "--json", "--late", "1"))
    assert (len(found["workers"]), len(found["layers"]), len(found["late"]) <= 1) == (2, 6, True)
    maps = found["heat_maps"]
    assert maps["layers"] == [1, 2, 3, 4, 5, 6]
    assert (len(maps["compute_us"][0]), len(maps["expert_rows"][0])) == (2, 32)
    assert found["facts"]["num_experts"] == 32
    text = run("trace", path, "--layers", "2")
    for words in ("Where the host's time goes", "Bubbles", "Workers, us a step", "Slowest layers"):
        assert words in text
    for title in (
        "Median compute time of a step, layer x worker",
        "Choices, layer x expert",
        "Time, layer x expert",
    ):
        assert title in text
    pytest.importorskip("matplotlib")
    picture = tmp_path / "heat.png"
    run("trace", path, "--plot", picture)
    assert struct.unpack_from(">II", picture.read_bytes(), 16)[0] == 900
    run("trace", path, "--plot", tmp_path / "heat.svg")
    assert "<svg" in (tmp_path / "heat.svg").read_text()[:2000]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--plot", "a.jpg"], "a file name that ends in .png or .svg"),
        (["--plot", "/no/such/a.png"], "a file in a folder that exists"),
        (["--layers", "-1"], "at least 0"),
        ([], "a file that can be read"),
    ],
)
def test_what_the_verb_refuses(arguments: list[str], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        run("trace", tmp_path / "none.json", *arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--trace", "/no/such/a.json"], "trace: got '/no/such/a.json', expected a file in a folder"),
        (
            ["--trace", "TRACE", "--trace-bytes", "1000"],
            "trace_bytes: got '1000', expected at least 1.00 MiB",
        ),
        (["--trace", "TRACE", "--trace-bytes", "much"], "trace_bytes: got 'much', expected a size"),
    ],
)
@pytest.mark.parametrize("verb", ["chat", "serve"])
def test_wrong_options_are_refused_before_anything_is_loaded(
    verb: str, arguments: list[str], words: str, tmp_path: Path
) -> None:
    prompt = ["--prompt", "x"] if verb == "chat" else ["--port", "0"]
    with pytest.raises(ConfigError, match=words):
        run(verb, *prompt, *(each.replace("TRACE", str(tmp_path / "t.json")) for each in arguments))


@pytest.mark.parametrize(
    ("field", "value"), [("trace", 5), ("trace", ""), ("trace_bytes", 5), ("trace_bytes", 1.5)]
)
def test_wrong_arguments_are_refused(field: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^{field}: got"):
        LLM(**{"trace": tmp_path / "t.json", field: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^trace_bytes: got 2097152, expected nothing without a trace"):
        LLM(trace_bytes=2 << 20)


def test_without_workers_the_engines_steps_are_traced(model_cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "alone.json"
    with LLM(workers=0, trace=path, max_model_len=128) as llm:
        llm.chat(DUCK, SamplingParams(temperature=0, max_tokens=4))
        llm.attend_workers()
        assert len(read_trace([path]).engine_us) == llm.stats().num_steps > 0  # written while it is idle
    assert "in this process" in run("trace", path)


def test_names_that_a_terminal_or_a_picture_would_obey_are_shown_as_they_are(
    traced: tuple[Path, WorkerTimes, int], tmp_path: Path
) -> None:
    odd = tmp_path / "a$\\frac$\x1b[31m.json"
    odd.write_text(traced[0].read_text().replace('"workers": ["', '"workers": ["\\u001b]0;title\\u0007', 1))
    picture = tmp_path / "heat.png"
    said = run("trace", odd, "--plot", picture)
    assert "]0;title" in said
    assert "\x1b" not in said
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".")] == []
