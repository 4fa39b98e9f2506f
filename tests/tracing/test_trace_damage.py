"""Traces that are damaged, made up or given in another order: read, or refused in a sentence."""

from __future__ import annotations

import contextlib
import copy
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from duckllm.errors import ConfigError
from duckllm.tracing import read as module
from duckllm.tracing.read import Trace, read_trace
from duckllm.tracing.report import print_heat_maps, print_summary
from duckllm.tracing.summary import heat_maps, summarise

FACTS = {"start_unix_s": 1.5, "model": "m", "num_experts": 4, "workers": ["a", "b"]}
ODD = [0, -1, 1e18, 1e400, -1e400, float("nan"), 10**30, 2**63, 65535, "x", None, True, [], {}, [1], 1.5]


def step(number: int, at_us: float, layer: int = 1) -> list[dict[str, Any]]:
    def event(name: str, pid: int, start: float, us: float, **args: Any) -> dict[str, Any]:
        where = {"ph": "X", "pid": pid, "tid": 1, "ts": at_us + start, "dur": us}
        return {"name": name, **where, "args": {"step": number, "layer": layer, **args}}

    events = [event("dispatch", 1, 0.0, 2.0, tokens=2, experts=[0, 3], rows=[2, 1])]
    for pid in (2, 3):
        events.append(event("queue", pid, 0.0, 1.0))
        events.append(event("wire", pid, 1.0, 2.0))
        events.append(event("compute", pid, 3.0, 4.0 * pid, error_ns=500))
        events.append(event("reply", pid, 3 + 4.0 * pid, 1.0))
    events += [event("wait", 1, 2.0, 14.0), event("combine", 1, 16.0, 1.0)]
    engine = {"prompt_tokens": 0, "decode_tokens": 1, "new_tokens": 1, "parts_us": [1.0] * 9}
    return [
        *events,
        {"name": "step", "ph": "X", "pid": 1, "tid": 0, "ts": at_us, "dur": 20.0, "args": engine},
    ]


def write(path: Path, events: list[dict[str, Any]], facts: dict[str, Any] = FACTS) -> Path:
    head = '{"displayTimeUnit":"ms","otherData":{"duckllm":' + json.dumps(facts) + '},"traceEvents":[\n'
    path.write_text(head + ",\n".join(map(json.dumps, events)) + "\n]}\n")
    return path


def said(trace: Trace) -> dict[str, Any]:
    """Everything that is printed of a trace, as JSON that any program reads."""
    summary, maps = summarise(trace), heat_maps(trace)
    console = Console(file=io.StringIO(), width=100)
    print_summary(summary, console, 8)
    print_heat_maps(maps, console)
    whole = summary.to_json() | {"heat_maps": maps.to_json(), "facts": trace.facts}
    found: dict[str, Any] = json.loads(json.dumps(whole, allow_nan=False))
    return found


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    inside = list(value.items() if isinstance(value, dict) else enumerate(value))
    for key, each in inside:
        yield value, key
        if isinstance(each, dict | list):
            yield from places(each)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_value_anywhere_is_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    events = [each for number in range(10) for each in step(number, 30.0 * number, 1 + number % 2)]
    whole = {"facts": json.loads(json.dumps(FACTS)), "events": events}
    for _ in range(data.draw(st.integers(1, 3))):
        holder, key = data.draw(st.sampled_from(list(places(whole))[2:]))
        if data.draw(st.booleans()):
            holder[key] = copy.deepcopy(data.draw(st.sampled_from(ODD)))  # [] may be put into itself
        elif isinstance(holder, dict):
            del holder[key]
    shuffled = data.draw(st.sampled_from(["", "reversed", "jump"]))
    if shuffled == "reversed":
        events.reverse()
    for event in events[len(events) // 2 :] if shuffled == "jump" else ():
        if isinstance(event, dict) and isinstance(event.get("ts"), float):
            event["ts"] -= 1e6
    with contextlib.suppress(ConfigError):
        said(read_trace([write(tmp_path / "run.json", events, whole["facts"])]))


def test_of_a_worker_with_a_line_missing_nothing_is_known(tmp_path: Path) -> None:
    events = step(1, 0.0) + [
        each for each in step(2, 30.0) if (each["name"], each["pid"]) not in {("wire", 2)}
    ]
    found = said(read_trace([write(tmp_path / "run.json", events)]))
    assert [worker["compute_us"] for worker in found["workers"]] == [8.0, 12.0]
    assert found["heat_maps"]["compute_us"] == [[8.0, 12.0]]
    assert [worker["queue_us"] for worker in found["workers"]] == [1.0, 1.0]


def test_an_engine_that_ran_no_step_at_workers_has_no_bubbles(tmp_path: Path) -> None:
    assert said(read_trace([write(tmp_path / "run.json", step(1, 0.0)[-1:])]))["lanes"] == []


def test_parts_are_taken_once_and_in_their_order(tmp_path: Path) -> None:
    first = write(tmp_path / "run.earlier.json", step(1, 0.0))
    second = write(tmp_path / "run.json", step(2, 30.0))
    assert len(read_trace([first, second]).layer) == 2
    for wrong in ([second, first], [first, first]):
        with pytest.raises(ConfigError, match="earlier ones first"):
            read_trace(wrong)


def test_a_line_without_end_is_refused_before_it_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_LINE_BYTES", 4096)
    path = write(tmp_path / "run.json", step(1, 0.0))
    read_trace([path])
    with path.open("ab") as file:
        file.truncate(path.stat().st_size - 4)
        file.write(b",\n" + bytes(5000))
    with pytest.raises(ConfigError, match="line 14"):
        read_trace([path])
    with pytest.raises(ConfigError, match="line 1 "):
        read_trace([Path("/dev/zero")])
