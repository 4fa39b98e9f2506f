"""Wrong sizes, types and ids: one sentence with field, got and expected, and an untouched output."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from expert_reference import Layer, pack, random_step

from duckllm import _native

NewExperts = Callable[..., _native.Experts]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 0}, "hidden_size: got 0, expected at least 1"),
        ({"intermediate_size": 0}, "intermediate_size: got 0, expected at least 1"),
        ({"num_experts": 0}, "num_experts: got 0, expected at least 1"),
        ({"top_k": 0}, "top_k: got 0, expected at least 1"),
        ({"num_stripes": 0}, "num_stripes: got 0, expected at least 1"),
        ({"max_tokens": 0}, "max_tokens: got 0, expected at least 1"),
        ({"hidden_size": -1}, "hidden_size: got -1, expected 0 to 2147483647"),
        ({"hidden_size": 1 << 25}, "hidden_size: got 33554432, expected at most 16777216"),
        ({"first_stripe": 2, "num_stripes": 2}, "first_stripe \\+ num_stripes: got 4, expected at most 3"),
        ({"num_stripes": 4}, "first_stripe \\+ num_stripes: got 4, expected at most 3"),
        ({"num_threads": 0}, "num_threads: got 0, expected 1 to 1024"),
        ({"num_threads": 1025}, "num_threads: got 1025, expected 1 to 1024"),
        ({"spin_us": -1}, "spin_us: got -1, expected 0 or more"),
    ],
)
def test_shapes_that_make_no_sense(new_experts: NewExperts, changes: dict[str, int], message: str) -> None:
    layer = Layer.random(2, 40, 40)
    with pytest.raises(ValueError, match="^" + message):
        new_experts(layer, **changes)


def ids(*values: int) -> np.ndarray:
    return np.array([[0, 0], [0, 0], list(values)], np.int32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topk_ids": ids(1, 4)}, r"topk_ids\[2, 1\]: got 4, expected 0 to 3"),
        ({"topk_ids": ids(-1, 0)}, r"topk_ids\[2, 0\]: got -1, expected 0 to 3"),
        ({"topk_ids": ids(0, 2**31 - 1)}, r"topk_ids\[2, 1\]: got 2147483647, expected 0 to 3"),
        ({"topk_ids": ids(0, 1).astype(np.int64)}, "topk_ids: got elements of type int64, expected int32"),
        (
            {"topk_ids": np.zeros((3, 1), np.int32)},
            r"topk_weights: got shape \[3, 2\], expected shape \[3, 1\]",
        ),
        ({"topk_ids": np.zeros((2, 2), np.int32)}, r"topk_ids: got shape \[2, 2\], expected shape \[3, 2\]"),
        ({"topk_ids": np.zeros(3, np.int32)}, r"topk_ids: got shape \[3\], expected shape \[T, K\]"),
        (
            {"topk_ids": np.zeros((3, 9), np.int32), "topk_weights": np.ones((3, 9), np.float32)},
            "top_k: got 9, expected 1 to 2",
        ),
        (
            {"topk_ids": np.zeros((3, 0), np.int32), "topk_weights": np.ones((3, 0), np.float32)},
            "top_k: got 0, expected 1 to 2",
        ),
        ({"topk_weights": np.ones((3, 2))}, "topk_weights: got elements of type float64, expected float32"),
        ({"x": np.ones((3, 40))}, "x: got elements of type float64, expected float32, or bfloat16 as uint16"),
        ({"x": np.ones((3, 41), np.float32)}, r"x: got shape \[3, 41\], expected shape \[3, 40\]"),
        ({"x": np.ones((3, 80), np.float32)[:, ::2]}, "x: got strides that skip elements"),
        ({"x": np.ones(40, np.float32)}, r"x: got shape \[40\], expected shape \[T, 40\]"),
        ({"out": np.zeros((3, 41), np.float32)}, r"out: got shape \[3, 41\], expected shape \[3, 40\]"),
        ({"out": np.zeros((3, 40))}, "out: got elements of type float64, expected float32"),
        ({"units_first_stripe": 1}, r"units: got stripes 1 to 4 \(exclusive\), expected at least 0 to 3"),
        (
            {"units": np.zeros((4, 3, 64), np.uint8)},
            r"units: got shape \[4, 3, 64\], expected shape \[4, stripes",
        ),
        ({"units": np.zeros((4, 2, 3520), np.uint8)}, r"units: got stripes 0 to 2"),
    ],
)
def test_steps_that_make_no_sense(new_experts: NewExperts, changes: dict[str, object], message: str) -> None:
    layer = Layer.random(4, 40, 40)
    assert _native.unit_bytes(40) == 3520
    x, topk_ids, topk_weights = random_step(layer, 3, 2)
    out = np.full((3, 40), 7.0, np.float32)
    step = {
        "units": pack(layer),
        "x": x,
        "topk_ids": topk_ids,
        "topk_weights": topk_weights,
        "out": out,
    }
    experts = new_experts(layer, top_k=2)
    with pytest.raises(ValueError, match="^" + message):
        experts.run(**(step | changes))
    assert np.all(out == 7.0)
    experts.run(**step)
    assert np.all(out != 7.0)


def test_too_many_rows(new_experts: NewExperts) -> None:
    layer = Layer.random(4, 40, 40)
    experts = new_experts(layer, max_tokens=3)
    with pytest.raises(ValueError, match=r"^num_tokens: got 4, expected at most 3$"):
        experts.run(pack(layer), *random_step(layer, 4, 2))


def test_read_only_output(new_experts: NewExperts) -> None:
    layer = Layer.random(4, 40, 40)
    out = np.zeros((3, 40), np.float32)
    out.flags.writeable = False
    with pytest.raises(ValueError, match=r"^out: got something else, expected a writable array"):
        new_experts(layer).run(pack(layer), *random_step(layer, 3, 2), out=out)
    assert np.all(out == 0)


def test_read_only_inputs_are_fine(new_experts: NewExperts) -> None:
    layer = Layer.random(4, 40, 40)
    step = (pack(layer), *random_step(layer, 3, 2))
    y = new_experts(layer).run(*step)
    for array in step:
        array.flags.writeable = False
    np.testing.assert_array_equal(new_experts(layer).run(*step), y)


def test_an_object_that_several_threads_use_at_once_refuses_all_but_one(new_experts: NewExperts) -> None:
    layer = Layer.random(2, 320, 72)
    units, step = pack(layer), random_step(layer, 40, 2)
    experts = new_experts(layer)
    expected = experts.run(units, *step)

    def run(_: int) -> str:
        try:
            return "right" if np.array_equal(experts.run(units, *step), expected) else "wrong"
        except RuntimeError as refused:
            return str(refused)

    with ThreadPoolExecutor(4) as threads:
        outcomes = set(threads.map(run, range(200)))
    refused = "Experts.run: called while another run is in progress, expected one caller at a time"
    assert "right" in outcomes
    assert outcomes <= {"right", refused}
    np.testing.assert_array_equal(experts.run(units, *step), expected)
