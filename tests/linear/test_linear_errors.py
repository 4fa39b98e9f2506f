"""What the linear bindings refuse, and that nothing is written then."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from linear_reference import Weight, rows

from duckllm import _native


@pytest.fixture
def runtime() -> _native.LinearRuntime:
    return _native.LinearRuntime(64, 256, 1, 0)


def arguments(weight_format: str = "fp8") -> dict[str, object]:
    weight = Weight.random(40, 200, weight_format)
    return {
        "packed": _native.pack_linear(weight.stored, weight_format),
        "scales": weight.scales,
        "out_features": 40,
        "in_features": 200,
        "format": weight_format,
        "x": rows(3, 200),
        "out": np.full((3, 40), 7, np.float32),
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "fp4"}, "format: got 'fp4', expected bf16, f32, fp8 or fp9"),
        ({"packed": np.zeros(5, np.uint8)}, "packed: got shape [5], expected shape [14336]"),
        ({"packed": np.zeros(14336, np.int8)}, "packed: got elements of type int8, expected uint8"),
        ({"packed": np.zeros(28672, np.uint8)[::2]}, "packed: got strides that skip elements"),
        ({"scales": None}, "scales: got something else, expected a float32 array"),
        ({"scales": np.ones((1, 1), np.float32)}, "scales: got shape [1, 1], expected shape [1, 2]"),
        ({"scales": np.ones((1, 2))}, "scales: got elements of type float64, expected float32"),
        ({"out_features": 0}, "out_features: got 0, expected 1 to 16777216"),
        ({"in_features": -1}, "in_features: got -1, expected 1 to 16777216"),
        ({"x": rows(3, 199)}, "x: got shape [3, 199], expected shape [3, 200]"),
        ({"x": rows(3, 200)[0]}, "x: got shape [200], expected shape [T, 200]"),
        ({"x": np.zeros((3, 200), np.int32)}, "x: got elements of type int32, expected float32, or bfloat16"),
        ({"out": np.zeros((2, 40), np.float32)}, "out: got shape [2, 40], expected shape [3, 40]"),
        ({"out": 3}, "out: got something else, expected a writable array"),
    ],
)
def test_wrong_arguments_are_named(
    runtime: _native.LinearRuntime, changes: dict[str, object], message: str
) -> None:
    given = arguments() | changes
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        runtime.run(**given)
    if "out" not in changes:
        assert (given["out"] == 7).all()


@pytest.mark.parametrize("wide", ["bf16", "f32"])
def test_wide_formats_take_no_scales(runtime: _native.LinearRuntime, wide: str) -> None:
    with pytest.raises(ValueError, match=f"^scales: got an object, expected None, as {wide} has none$"):
        runtime.run(**(arguments(wide) | {"scales": np.ones((1, 2), np.float32)}))


def test_a_weight_wider_than_the_runtime_is_refused() -> None:
    runtime = _native.LinearRuntime(64, 128, 1, 0)
    given = arguments()
    with pytest.raises(ValueError, match=r"^in_features: got 200, expected at most 128$"):
        runtime.run(**given)
    assert (given["out"] == 7).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_rows": 0}, "max_rows: got 0, expected at least 1"),
        ({"max_in_features": 0}, "max_in_features: got 0, expected at least 1"),
        ({"max_in_features": 1 << 25}, "max_in_features: got 33554432, expected at most 16777216"),
        ({"num_threads": 0}, "num_threads: got 0, expected 1 to 1024"),
        ({"isa": "sse9"}, "isa: got 'sse9', expected"),
    ],
)
def test_a_runtime_that_makes_no_sense_is_refused(changes: dict[str, object], message: str) -> None:
    sizes: dict[str, object] = {"max_rows": 8, "max_in_features": 64, "num_threads": 1, "spin_us": 0}
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        _native.LinearRuntime(**(sizes | changes))


@pytest.mark.parametrize(
    ("weight", "format_name", "message"),
    [
        (
            np.zeros((4, 4), np.uint8),
            "bf16",
            "weight: got elements of type uint8, expected bfloat16 as uint16",
        ),
        (np.zeros((4, 4), np.uint16), "fp8", "weight: got elements of type uint16, expected e4m3 as uint8"),
        (np.zeros(4, np.uint8), "fp8", "weight: got shape [4], expected shape [N, K]"),
        (np.zeros((0, 4), np.uint8), "fp8", "out_features: got 0, expected 1 to 16777216"),
        (np.array([[1, 0x7F, 0xFF]], np.uint8), "fp9", "weight: got 2 NaN bytes (0x7f, 0xff), expected none"),
        (np.zeros((4, 8), np.uint8)[:, ::2], "fp8", "weight: got strides that skip elements"),
        (np.zeros((4, 4), np.float64), "f32", "weight: got elements of type float64, expected float32"),
        (np.zeros((4, 4), np.uint8), "f16", "format: got 'f16', expected bf16, f32, fp8 or fp9"),
    ],
)
def test_a_weight_that_cannot_be_packed_is_refused(
    weight: np.ndarray, format_name: str, message: str
) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        _native.pack_linear(weight, format_name)


def test_no_rows_give_no_rows(runtime: _native.LinearRuntime) -> None:
    given = arguments() | {"x": rows(0, 200), "out": None}
    assert runtime.run(**given).shape == (0, 40)


def test_packed_sizes_are_those_of_whole_records() -> None:
    assert _native.linear_bytes(1, 1, "fp8") == 2 * 512
    assert _native.linear_bytes(33, 64, "fp9") == 2 * 2 * 2 * 576
    assert _native.linear_bytes(64, 33, "bf16") == 2 * 2 * 2 * 1024
    assert _native.linear_bytes(64, 33, "f32") == 2 * 2 * 2 * 2048
    with pytest.raises(ValueError, match=r"^out_features: got 0, expected 1 to 16777216"):
        _native.linear_bytes(0, 1, "fp8")


def test_threads_of_one_runtime_are_one_at_a_time() -> None:
    """Linear layers and attention of one runtime share its scratch memory; who comes second is refused."""
    runtime = _native.LinearRuntime(8, 512, 2, 0)
    attention = _native.Attention(runtime)
    weight = Weight.random(512, 512, "fp8")
    packed, x = _native.pack_linear(weight.stored, "fp8"), rows(8, 512)
    step = _native.StepContexts(np.array([[300, 2, 0, 512]], np.int64), np.zeros(1, np.int32))
    q = np.random.default_rng(1).standard_normal((2, 4, 64), dtype=np.float32)
    keys = np.random.default_rng(2).standard_normal((512, 128), dtype=np.float32)

    def linear() -> np.ndarray:
        out = np.empty((8, 512), np.float32)
        runtime.run(packed, weight.scales, 512, 512, "fp8", x, out)
        return out

    def attend() -> np.ndarray:
        return attention.attend(step, q, keys, keys.copy(), 2, 64, 0.125, 0, None)

    expected = [linear(), attend()]
    refused = ": called while another run is in progress, expected one caller at a time"

    def run(turn: int) -> str:
        try:
            right = np.array_equal((linear, attend)[turn % 2](), expected[turn % 2])
        except RuntimeError as error:
            return str(error).removesuffix(refused)
        return "right" if right else "wrong"

    with ThreadPoolExecutor(4) as threads:
        outcomes = set(threads.map(run, range(400)))
    assert "right" in outcomes
    assert outcomes <= {"right", "Linear.run", "Attention.attend"}
    np.testing.assert_array_equal(linear(), expected[0])
