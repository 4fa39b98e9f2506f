"""The file of a trace: whole at any moment, limited, and what is read from it again."""

from __future__ import annotations

import itertools
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trace_values import EngineStepValues

from duckllm import _native
from duckllm._native import FrameType
from duckllm.errors import ConfigError
from duckllm.models.step_times import StepTimes
from duckllm.tracing import writer as module
from duckllm.tracing.read import PARTS, read_trace
from duckllm.tracing.writer import TraceWriter, check_trace, earlier_part
from support.fake_workers import fake_workers, read_request, rows, submit

FACTS = {"model": 'a "model"', "num_experts": 4}
LIMIT = 1 << 20


def events(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return found


def run_steps(writer: TraceWriter, count: int) -> None:
    """Steps at one worker whose clock is this one's, each also a step of the engine."""
    with fake_workers(1) as (transport, (worker,)):
        transport.set_trace(writer.steps)
        for _ in range(count):
            ticket = submit(transport)
            read_request(worker)
            payload = _native.encode_step_reply_header(5, 1, 7, 0, False, 1, 2, 3) + rows(1).tobytes()
            frame = _native.encode_frame_header(FrameType.STEP_REPLY, len(payload), ticket)
            worker.sendall(frame + payload)
            transport.wait(ticket)
            writer.step(EngineStepValues(times=StepTimes(attention_s=0.25, draft_s=0.5)))


def test_the_file_is_whole_after_every_piece_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    writer = TraceWriter(path, LIMIT, FACTS, ("a worker",))
    assert events(path)[0]["args"] == {"name": "host"}
    assert len(read_trace([path]).layer) == 0
    for count in (1, 2, 3):
        run_steps(writer, 1)
        writer.flush()
        assert [each["name"] for each in events(path)].count("combine") == count
    run_steps(writer, 1)
    writer.close()
    writer.close()
    trace = read_trace([path])
    assert trace.facts["model"] == 'a "model"'
    assert trace.workers == ("a worker",)
    assert trace.layer.tolist() == [5] * 4
    assert trace.tokens.tolist() == [1] * 4
    assert trace.expert.tolist() == [0] * 4
    assert trace.expert_rows.tolist() == [2] * 4  # both choices of the token
    assert trace.engine_new_tokens.tolist() == [1] * 4
    np.testing.assert_allclose(trace.engine_us, 1000)
    parts = dict(zip(PARTS, trace.engine_parts_us[0], strict=True))
    assert (parts.pop("attention"), parts.pop("draft")) == (250_000, 500_000)
    assert not any(parts.values())
    order = [trace.submitted, trace.dispatched, trace.waited, trace.last, trace.summed]
    assert all((one <= two + 1e-3).all() for one, two in itertools.pairwise(order))
    moments = [trace.free, trace.started, trace.finished, trace.taken]
    assert all((one <= two + 2e-3).all() for one, two in itertools.pairwise(moments))


def test_of_a_long_trace_the_newest_parts_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    writer = TraceWriter(path, LIMIT, FACTS, ())
    step, most = EngineStepValues(), 0
    for number in range(12_000):
        step.num_new_tokens = number
        writer.step(step)
        if number % 500 == 0:
            writer.flush()
            most = max(most, sum(each.stat().st_size for each in tmp_path.iterdir()))
    writer.close()
    assert most <= LIMIT
    assert {each.name for each in tmp_path.iterdir()} == {"run.json", "run.earlier.json"}
    trace = read_trace([earlier_part(path), path])
    numbers = trace.engine_new_tokens
    assert numbers[-1] == 11_999
    assert (np.diff(numbers) == 1).all()
    assert 2000 < len(numbers) < 12_000
    # A new run begins alone.
    TraceWriter(path, LIMIT, FACTS, ()).close()
    assert [each.name for each in tmp_path.iterdir()] == ["run.json"]


def test_a_link_to_a_trace_stays_when_its_parts_turn_over(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    target, link = tmp_path / "disk" / "run.json", tmp_path / "link.json"
    link.symlink_to(target)
    target.touch(mode=0o600)
    target.chmod(0o600)
    check_trace(link)
    writer, step = TraceWriter(link, LIMIT, FACTS, ()), EngineStepValues()
    for _ in range(4000):
        writer.step(step)
    writer.close()
    assert link.is_symlink()
    parts = [earlier_part(target), target]
    assert {each.name for each in target.parent.iterdir()} == {each.name for each in parts}
    assert [each.stat().st_mode & 0o777 for each in parts] == [0o600, 0o600]
    assert len(read_trace(parts).engine_new_tokens) > 2000


KILLED = """
import os, signal
from pathlib import Path
from types import SimpleNamespace
from duckllm.tracing.writer import TraceWriter
parts = "attention dense dispatch wait combine head sampling device draft".split()
times = SimpleNamespace(**{{part + "_s": 0.0 for part in parts}})
step = SimpleNamespace(seconds=0.001, num_prompt_tokens=0, num_decode_tokens=1, num_new_tokens=1, times=times)
writer = TraceWriter(Path({path!r}), 1 << 20, {{}}, ())
for _ in range(5):
    writer.step(step)
writer.flush()
writer.step(step)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    code = KILLED.format(path=str(path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len([each for each in events(path) if each["name"] == "step"]) == 5
    assert len(read_trace([path]).engine_us) == 5


def test_a_file_that_is_cut_is_read_up_to_there(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    writer = TraceWriter(path, LIMIT, FACTS, ("a worker",))
    run_steps(writer, 3)
    writer.close()
    whole = path.read_bytes()
    second = [at for at in range(len(whole)) if whole.startswith(b'{"name":"combine"', at)][1]
    for cut in (second - 1, second, second + 30):
        path.write_bytes(whole[:cut])
        assert len(read_trace([path]).layer) == 1


def test_a_failing_disk_ends_the_trace_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run.json"
    writer = TraceWriter(path, LIMIT, FACTS, ())
    ended: list[bool] = []
    writer.on_end = lambda: ended.append(True)
    writer.step(EngineStepValues())

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with caplog.at_level(logging.WARNING):
        writer.flush()
    assert ended
    assert caplog.messages == [f"trace {path}: No space left on device; the trace ends here"]
    writer.step(EngineStepValues())
    writer.close()


def test_half_a_write_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, data[:7], at))
    writer = TraceWriter(path, LIMIT, FACTS, ())
    writer.step(EngineStepValues())
    writer.close()
    assert events(path)[-1]["name"] == "step"


def test_steps_without_room_are_said_to_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BUFFER_BYTES", 1000)
    path = tmp_path / "run.json"
    writer = TraceWriter(path, LIMIT, FACTS, ("a worker",))
    monkeypatch.setattr(writer, "step", lambda _: None)
    run_steps(writer, 20)
    writer.close()
    trace = read_trace([path])
    assert 0 < len(trace.layer) < 20
    assert trace.num_dropped == 20 - len(trace.layer)


def test_what_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("precious")
    for path, expected in (
        (tmp_path, "a file in a folder that exists"),
        (tmp_path / "none" / "run.json", "a file in a folder that exists"),
        (other, "a new file, or an earlier trace to be written over"),
    ):
        with pytest.raises(ConfigError, match=expected):
            check_trace(path)
    assert other.read_text() == "precious"
    check_trace(tmp_path / "run.json")
    assert not (tmp_path / "run.json").exists()
    TraceWriter(tmp_path / "run.json", LIMIT, FACTS, ()).close()
    check_trace(tmp_path / "run.json")
    (tmp_path / "empty").touch()
    check_trace(tmp_path / "empty")


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"[]",
        b'{"name":"x"}',
        b'{"name":"step","ph":"X","pid":1,"tid":0,"ts":1,"dur":1,"args":{"new_tokens":1,"parts_us":[1]}}',
        b'{"name":"dispatch","ph":"X","pid":1,"tid":1,"ts":"x","dur":1,"args":{"step":1}}',
        b'{"name":"dropped","ph":"i","pid":1,"tid":0,"ts":1,"args":{}}',
    ],
)
def test_what_is_no_trace_is_refused_by_line(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "run.json"
    TraceWriter(path, LIMIT, FACTS, ()).close()
    text = path.read_bytes()
    path.write_bytes(text.replace(b"\n]}\n", b",\n" + line + b"\n]}\n"))
    number = len(text.splitlines())  # that of the line which ends it
    with pytest.raises(ConfigError, match=rf"a trace that duckllm has written \(line {number} is none\)"):
        read_trace([path])
    path.write_bytes(line)
    with pytest.raises(ConfigError, match=r"line 1 is none"):
        read_trace([path])


def test_parts_of_different_runs_are_refused(tmp_path: Path) -> None:
    paths = [tmp_path / "one.json", tmp_path / "two.json"]
    for path in paths:
        TraceWriter(path, LIMIT, FACTS, ()).close()
    with pytest.raises(ConfigError, match="a part of the same run as"):
        read_trace(paths)
    with pytest.raises(ConfigError, match="a file that can be read"):
        read_trace([tmp_path / "none.json"])


def test_a_file_that_is_no_trace_is_not_taken_for_the_earlier_part(tmp_path: Path) -> None:
    path, notes = tmp_path / "run.json", tmp_path / "run.earlier.json"
    notes.write_text("my notes")
    with pytest.raises(ConfigError, match=r"run\.earlier\.json"):
        check_trace(path)
    assert notes.read_text() == "my notes"
    assert not path.exists()


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    first = TraceWriter(path, LIMIT, FACTS, ("a worker",))
    run_steps(first, 1)
    for attempt in (lambda: check_trace(path), lambda: TraceWriter(path, LIMIT, FACTS, ())):
        with pytest.raises(ConfigError, match="another run writes it"):
            attempt()
    first.close()
    assert len(read_trace([path]).layer) == 1
    check_trace(path)
    TraceWriter(path, LIMIT, FACTS, ()).close()
    assert read_trace([path]).workers == ()


def test_a_disk_that_is_full_at_the_start_is_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    (tmp_path / "link.json").symlink_to("target.json")
    for name in ("new.json", "link.json"):
        with pytest.raises(ConfigError, match=r"a file that can be written \(No space left on device\)"):
            TraceWriter(tmp_path / name, LIMIT, FACTS, ())
    assert [each.name for each in tmp_path.iterdir()] == ["link.json"]


def test_a_disk_that_is_full_leaves_a_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    writer = TraceWriter(path, LIMIT, FACTS, ("a worker",))
    run_steps(writer, 1)
    writer.flush()
    before = path.read_bytes()
    real, room = os.pwrite, 100

    def pwrite(file: int, data: bytes, at: int) -> int:
        if at + 10 > len(before) + room:
            raise OSError(28, "No space left on device")
        return real(file, data[: len(before) + room - at], at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    run_steps(writer, 1)
    writer.close()
    assert path.read_bytes() == before
