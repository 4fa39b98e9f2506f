"""Where the time of a trace went: made-up traces whose sums are known."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console
from trace_values import StepValues, make_trace

from duckllm.tracing.report import MEANINGS, RAMP, print_heat_maps, print_summary, shade, verdict
from duckllm.tracing.summary import PHASES, heat_maps, phases_us, summarise, waits_us

# The second worker takes 300 us where the first takes 100, in layer 1; in layer 2 both take 50.
SLOW = StepValues(
    (0, 10, 50, 390, 400), [(12, 20, 120, 130), (12, 20, 320, 390)], layer=1, experts={0: 1, 3: 1}
)
EVEN = StepValues(
    (500, 510, 530, 600, 605), [(512, 520, 570, 600), (505, 520, 570, 590)], layer=2, experts={3: 1}
)
ENGINE = [(0.0, 450.0), (480.0, 150.0)]


def test_the_hosts_parts_add_up_to_its_time() -> None:
    summary = summarise(make_trace([SLOW, EVEN], ENGINE))
    assert summary.engine_ms == pytest.approx(0.6)
    assert summary.span_ms == pytest.approx(0.63)
    assert sum(summary.parts_ms.values()) == pytest.approx(summary.engine_ms)
    # Of the first wait, from 50 to 390, worker two computes until 320; of the second, one from 530 to 570.
    assert summary.parts_ms["wait: compute"] == pytest.approx((270 + 40) / 1000)
    assert summary.parts_ms["wait: reply"] == pytest.approx((70 + 30) / 1000)
    assert summary.parts_ms["wait: wire"] == summary.parts_ms["wait: queue"] == 0
    assert summary.parts_ms["dispatch"] == pytest.approx(0.02)
    assert summary.parts_ms["combine"] == pytest.approx(0.015)
    assert summary.parts_ms["host computes"] == pytest.approx((600 - 340 - 70 - 20 - 15) / 1000)


def test_a_wait_is_told_apart_by_the_last_workers_phases() -> None:
    step = StepValues((0, 0, 5, 100, 100), [(10, 30, 60, 100), (1, 2, 3, 99)])
    assert waits_us(make_trace([step], [])) == {"queue": 5, "wire": 20, "compute": 30, "reply": 40}


def test_phases_of_a_worker() -> None:
    phases = phases_us(make_trace([SLOW, EVEN], ENGINE))
    assert phases["queue"].tolist() == [[12, 12], [12, 5]]
    assert phases["wire"].tolist() == [[8, 8], [8, 15]]
    assert phases["compute"].tolist() == [[100, 300], [50, 50]]
    assert phases["reply"].tolist() == [[10, 70], [30, 20]]
    assert not phases["held"].any()


def test_an_answer_that_waits_for_the_host_is_held() -> None:
    step = StepValues((0, 5, 80, 90, 95), [(5, 6, 40, 90), (5, 6, 85, 90)])
    phases = phases_us(make_trace([step], []))
    assert phases["held"].tolist() == [[40, 0]]
    assert phases["reply"].tolist() == [[10, 5]]


def test_workers_and_layers() -> None:
    summary = summarise(make_trace([SLOW, EVEN, SLOW], [(0.0, 1000.0)]))
    one, two = summary.workers
    assert (one.compute_us, two.compute_us) == pytest.approx((250 / 3, 650 / 3))
    assert (one.busy_share, two.busy_share) == pytest.approx((0.25, 0.65))
    assert (one.last_share, two.last_share) == pytest.approx((1 / 3, 2 / 3))
    assert (one.late_us, two.late_us) == pytest.approx((10, 260))
    assert one.clock_error_us == 2.0
    first, second = summary.layers
    assert (first.layer, first.num_steps, first.slowest_worker) == (1, 2, 1)
    assert (first.step_us, first.compute_us, first.imbalance) == pytest.approx((400, 300, 1.5))
    assert (second.imbalance, second.step_us) == pytest.approx((1.0, 105))
    assert first.expert_imbalance == pytest.approx(2.0)  # 2 choices each of two experts of four
    assert summary.imbalance_ms == pytest.approx(2 * 0.1)


def test_heat_maps() -> None:
    many = StepValues(
        (500, 510, 530, 600, 605), [(512, 520, 570, 600)] * 2, layer=2, tokens=3, experts={1: 3, 2: 1}
    )
    maps = heat_maps(make_trace([SLOW, EVEN, many], ENGINE))
    assert (maps.layers, maps.workers) == ((1, 2), ("one", "two"))
    assert maps.compute_us.tolist() == [[100, 300], [50, 50]]
    assert maps.round_trip_us.tolist() == [[130, 390], [100, 95]]
    assert maps.expert_rows.tolist() == [[1, 0, 0, 1], [0, 3, 1, 1]]
    # Layer 1: 200 us between two experts; layer 2: 50 us of one, and 50 us between two.
    np.testing.assert_allclose(maps.expert_ms, [[0.1, 0, 0, 0.1], [0, 0.025, 0.025, 0.05]])


def test_single_answers_that_took_long_are_named() -> None:
    usual = [
        StepValues((t, t + 1, t + 2, t + 40, t + 41), [(t + 2, t + 5, t + 25, t + 40)] * 2, layer=4)
        for t in range(0, 1000, 100)
    ]
    late = StepValues(
        (2000, 2001, 2002, 2240, 2241), [(2002, 2005, 2025, 2040), (2002, 2205, 2225, 2240)], layer=4
    )
    summary = summarise(make_trace([*usual, late], []))
    (found,) = summary.late
    assert (found.layer, found.worker, found.phase) == (4, 1, "wire")
    assert (found.at_ms, found.took_us, found.usual_us) == (2.0, 240, 40)
    assert [worker.num_late for worker in summary.workers] == [0, 1]
    assert summarise(make_trace([*usual, late], []), num_late=0).late == ()
    # Of few steps, or of other numbers of tokens, nothing is usual.
    assert summarise(make_trace([*usual[:3], late], [])).late == ()
    late.tokens = 7
    assert summarise(make_trace([*usual, late], [])).late == ()


def test_bubbles_of_one_lane_and_of_two() -> None:
    # The engine's second step has two lanes: while lane 0's experts compute (1010 to 1060), the host goes on
    # with lane 1, and waits from 1050 on.
    zero = StepValues((1000, 1010, 1050, 1070, 1071), [(1005, 1010, 1060, 1070)] * 2, lane=0)
    one = StepValues((1020, 1050, 1072, 1120, 1121), [(1060, 1060, 1110, 1120)] * 2, lane=1)
    summary = summarise(make_trace([SLOW, zero, one], [(0.0, 500.0), (990.0, 200.0)]))
    alone, both = summary.lanes
    assert (alone.lanes, alone.num_steps, alone.step_us) == (1, 1, 500)
    assert alone.host_waits_share == pytest.approx(340 / 500)
    assert alone.workers_idle_share == pytest.approx(1 - 200 / 500)
    # Worker one computes 20 to 120, two 20 to 320; the host waits from 50 on.
    assert alone.overlap_share == pytest.approx(30 / 500)
    assert (both.lanes, both.num_steps) == (2, 1)
    assert both.host_waits_share == pytest.approx((20 + 48) / 200)
    assert both.workers_idle_share == pytest.approx(1 - 100 / 200)
    # 1010 to 1050, and 1070 to 1072 between the waits.
    assert both.overlap_share == pytest.approx(42 / 200)


def test_moments_that_are_not_known_count_nowhere() -> None:
    none = (float("nan"),) * 4
    step = StepValues((0, 10, 50, 390, 400), [(12, 20, 120, 130), none])
    summary = summarise(make_trace([step, SLOW], [(0.0, 800.0)]))
    assert sum(summary.parts_ms.values()) == pytest.approx(0.8)
    assert summary.parts_ms["wait: not known"] == pytest.approx(0.34)
    assert summary.workers[1].compute_us == 300
    assert heat_maps(make_trace([step], [])).to_json()["compute_us"] == [[100, None]]


@pytest.mark.parametrize("names", [(), ("one",), ("one", "two")])
def test_an_empty_trace_is_no_error(names: tuple[str, ...]) -> None:
    trace = make_trace([], [], names=names)
    summary, maps = summarise(trace), heat_maps(trace)
    assert summary.num_steps == summary.span_ms == 0
    console = Console(file=io.StringIO(), width=80)
    print_summary(summary, console, 8)
    print_heat_maps(maps, console)
    json.dumps(summary.to_json() | maps.to_json())


def test_tables_and_maps_for_people() -> None:
    trace = make_trace([SLOW, EVEN], ENGINE)
    console = Console(file=io.StringIO(), width=80)
    print_summary(summarise(trace), console, 1)
    print_heat_maps(heat_maps(trace), console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "0.001 s, 0.001 s of it busy: 2 steps at 2 workers, 2 of the engine, 2 new" in text
    (row,) = [line for line in text.splitlines() if line.strip().startswith("wait: compute")]
    assert row.split() == ["wait:", "compute", "0.3", "51.7%"]
    assert "Most of it, 52%, is wait: compute: " in text
    assert "worker 1: two" in text
    assert "Slowest layers" in text
    assert "would have saved 0.1 ms of" in text
    assert max(map(len, text.splitlines())) <= 80
    assert f"|{RAMP[3] * 6}{RAMP[9] * 6}|" in text


def test_the_largest_part_is_named_with_who_is_waited_for() -> None:
    summary = summarise(make_trace([SLOW, EVEN], ENGINE))
    workers = [
        replace(worker, last_share=share) for worker, share in zip(summary.workers, (0.2, 0.8), strict=True)
    ]
    straggling = replace(summary, workers=tuple(workers))
    words = verdict(straggling)
    assert words.startswith("Most of it, 52%, is wait: compute: ")
    assert words.endswith("Worker 1 answers last in 80% of the waits.")
    even = [replace(worker, last_share=0.5) for worker in summary.workers]
    assert "answers last" not in verdict(replace(summary, workers=tuple(even)))
    busy = replace(straggling, parts_ms=summary.parts_ms | {"dispatch": summary.engine_ms})
    assert verdict(busy).startswith("Most of it, 100%, is dispatch: ")
    assert "answers last" not in verdict(busy)
    assert {*summary.parts_ms} == {*MEANINGS}
    host = replace(summary, parts_ms=summary.parts_ms | {"host computes": summary.engine_ms})
    assert "experts" not in verdict(host)
    assert "and the experts, which are in this process" in verdict(replace(host, workers=()))
    assert verdict(replace(summary, parts_ms=dict.fromkeys(MEANINGS, 0.0))) == "No time was traced."


def test_shades() -> None:
    values = np.array([[0.0, 5, 10], [float("nan"), 0, 10]])
    assert shade(values, 0, 10, 3) == [" =@".replace("=", RAMP[round(4.5)]), "? @"]
    assert shade(values, 0, 10, 2) == [RAMP[round(4.5)] + "@", " @"]  # the first two share a column
    assert shade(values, 0, 0, 3) == ["   ", "?  "]
    assert [len(line) for line in shade(np.ones((2, 500)), 0, 1, 70)] == [70, 70]
    assert set(PHASES) <= set(phases_us(make_trace([], [])))
