"""int8, int4 and mxfp4 experts against float64 on the same weights, on every set of integer multipliers.

Where avx_vnni itself is missing, avx512_vnni_256 is the same code with the same instruction's other encoding.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from expert_reference import Layer as E4m3Layer
from expert_reference import assert_same_bits, expert_sums, pack, random_step, whole_expert
from integer_layers import INTEGER_FORMATS, IntegerLayer, integer_sums

from duckllm import _native

WAYS = [(isa, name) for isa in _native.available_isas() for name in _native.available_integer(isa)]
LAYOUTS = [*((name, None) for name in INTEGER_FORMATS), ("int8", "channel")]


@pytest.fixture(params=WAYS, ids=lambda way: "-".join(way))
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Forces the multipliers; gives the ISA that goes with them."""
    isa, name = request.param
    monkeypatch.setenv("DUCK_FORCE_INTEGER", name)
    return isa


def new_experts(layer: IntegerLayer, isa: str, **changes: Any) -> _native.Experts:
    settings = whole_expert(layer) | {"isa": isa, "format": layer.format} | changes  # type: ignore[arg-type]
    return _native.Experts(**settings)


def whole_bytes(num_tokens: int, hidden: int, seed: int = 3) -> np.ndarray:
    """Rows that bytes hold without rounding: whole numbers up to 127, which each group of 32 has."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-127, 128, (num_tokens, hidden)).astype(np.float32)
    x[:, ::32] = np.where(rng.random(x[:, ::32].shape) < 0.5, -127, 127)
    return x


def test_the_multipliers_are_those_that_were_asked_for(
    monkeypatch: pytest.MonkeyPatch, way: str, request: pytest.FixtureRequest
) -> None:
    layer = IntegerLayer.random("int8", 1, 32, 16)
    assert new_experts(layer, way).integer == request.node.callspec.params["way"][1]
    monkeypatch.setenv("DUCK_FORCE_INTEGER", "mmx")
    with pytest.raises(ValueError, match="DUCK_FORCE_INTEGER: got 'mmx', expected one of"):
        new_experts(layer, way)


@pytest.mark.parametrize(("weight_format", "layout"), LAYOUTS)
def test_products_of_whole_bytes_are_exact(way: str, weight_format: str, layout: str | None) -> None:
    """With nothing to round what is left are f32 sums: every code, place, scale and zero point counts."""
    for hidden, intermediate in ((160, 56), (1152, 100), (70, 5)):
        layer = IntegerLayer.random(weight_format, 3, hidden, intermediate, scale_layout=layout)
        layer = layer.one_live_channel_a_stripe()
        x = whole_bytes(26, hidden) / 64
        _, ids, weights = random_step(layer, 26, 2)  # type: ignore[arg-type]
        exact, bound = integer_sums(layer, x, ids, weights, exact_bytes=True)
        experts = new_experts(layer, way, scale_layout=layer.scale_layout)
        y = experts.run(layer.pack(), x, ids, weights)
        assert np.linalg.norm(bound) < 1e-3 * np.linalg.norm(exact)
        assert (abs(y - exact) <= bound).all()


@pytest.mark.parametrize(("weight_format", "layout"), LAYOUTS)
@pytest.mark.parametrize("num_tokens", [1, 3, 40])
def test_errors_stay_within_the_bound(
    way: str, weight_format: str, layout: str | None, num_tokens: int
) -> None:
    layer = IntegerLayer.random(weight_format, 2, 320, 72, seed=5, scale_layout=layout)
    x, ids, weights = random_step(layer, num_tokens, 2)  # type: ignore[arg-type]
    x *= np.float32(8) ** np.random.default_rng(0).integers(-2, 3, (num_tokens, 10)).repeat(32, 1)
    exact, bound = integer_sums(layer, x, ids, weights)
    y = new_experts(layer, way, scale_layout=layer.scale_layout).run(layer.pack(), x, ids, weights)
    assert (abs(y - exact) <= bound).all()
    assert 1e-4 < np.linalg.norm(y - exact) / np.linalg.norm(exact) < 0.02  # it rounds, and no more


@pytest.mark.parametrize(("weight_format", "layout"), LAYOUTS)
@pytest.mark.parametrize(("hidden", "intermediate"), [(1100, 40), (300, 330), (20, 3)])
def test_all_multipliers_give_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, weight_format: str, layout: str | None, hidden: int, intermediate: int
) -> None:
    """For as many rows of an expert as fill tiles, chunks and registers, and a few more and less."""
    layer = IntegerLayer.random(weight_format, 1, hidden, intermediate, seed=6, scale_layout=layout)
    units = layer.pack()
    x, ids, weights = random_step(layer, 61, 1)  # type: ignore[arg-type]
    x[5, 3], x[14, 2], x[40] = np.inf, np.nan, 0
    results = []
    for isa, name in WAYS:
        monkeypatch.setenv("DUCK_FORCE_INTEGER", name)
        results.append(new_experts(layer, isa, scale_layout=layer.scale_layout))
    expected = results[0].run(units, x, ids, weights)
    assert np.isnan(expected[[5, 14]]).all()
    assert np.isfinite(np.delete(expected, [5, 14], 0)).all()
    for experts in results[1:]:
        for rows in (1, 7, 8, 9, 11, 12, 15, 16, 17, 28, 33, 48, 49, 61):
            y = experts.run(units, x[:rows], ids[:rows], weights[:rows])
            assert_same_bits(expected[:rows], y)


@pytest.mark.parametrize("weight_format", INTEGER_FORMATS)
def test_a_row_depends_on_nothing_but_itself(way: str, weight_format: str) -> None:
    """Alone, among few and among many, on one thread and three."""
    layer = IntegerLayer.random(weight_format, 2, 2100, 150, seed=7)
    units = layer.pack()
    x, ids, weights = random_step(layer, 60, 2)  # type: ignore[arg-type]
    num_tokens = 20 if way == "scalar" else 60
    x, ids, weights = x[:num_tokens], ids[:num_tokens], weights[:num_tokens]
    many = new_experts(layer, way).run(units, x, ids, weights)
    assert_same_bits(many, new_experts(layer, way, num_threads=3).run(units, x, ids, weights))
    few = new_experts(layer, way, num_threads=3)
    for first, count in ((0, 1), (5, 3), (11, 8)):
        rows = slice(first, first + count)
        assert_same_bits(many[rows], few.run(units, x[rows], ids[rows], weights[rows]))


@pytest.mark.parametrize(("weight_format", "layout"), LAYOUTS)
@pytest.mark.parametrize("num_tokens", [2, 30])
def test_the_exact_path_rounds_nothing_to_bytes(
    isa: str, weight_format: str, layout: str | None, num_tokens: int
) -> None:
    layer = IntegerLayer.random(weight_format, 2, 1200, 40, seed=8, scale_layout=layout)
    x, ids, weights = random_step(layer, num_tokens, 2)  # type: ignore[arg-type]
    exact, bound = expert_sums(layer, x, ids, weights)  # type: ignore[arg-type]
    experts = new_experts(layer, isa, scale_layout=layer.scale_layout, activations="f32")
    y = experts.run(layer.pack(), x, ids, weights)
    assert (abs(y - exact) <= bound).all()
    np.testing.assert_array_equal(y[1:2], experts.run(layer.pack(), x[1:2], ids[1:2], weights[1:2]))


def test_one_object_computes_layers_of_several_formats(isa: str) -> None:
    lossless = E4m3Layer.random(2, 200, 40)
    experts = _native.Experts(**(whole_expert(lossless) | {"isa": isa}))
    x, ids, weights = random_step(lossless, 12, 2)
    first = experts.run(pack(lossless), x, ids, weights)
    for weight_format in INTEGER_FORMATS:
        layer = IntegerLayer.random(weight_format, 2, 200, 40)
        alone = new_experts(layer, isa).run(layer.pack(), x, ids, weights)
        assert_same_bits(experts.run(layer.pack(), x, ids, weights, format=weight_format), alone)
    fp8 = experts.run(pack(lossless, "fp8"), x, ids, weights, format="fp8")
    assert_same_bits(fp8, first)
    assert_same_bits(experts.run(pack(lossless), x, ids, weights), first)
    with pytest.raises(ValueError, match=r"units: got shape .*, expected shape \[2, stripes, "):
        experts.run(pack(lossless), x, ids, weights, format="int4")


@pytest.mark.parametrize("weight_format", ["int8", "int4-zero", "mxfp4"])
@pytest.mark.parametrize("num_rows", [6, 18])
def test_odd_rows_stay_by_themselves(way: str, weight_format: str, num_rows: int) -> None:
    """NaN and infinity come out in their row alone; zeros and tiny values give zero; the largest x works."""
    layer = IntegerLayer.random(weight_format, 1, 96, 20)
    x = np.random.default_rng(1).standard_normal((num_rows, 96)).astype(np.float32)
    x[0, 40], x[1, 0], x[2] = np.nan, -np.inf, 0
    x[3] *= np.float32(2.0**-120)
    ids, weights = np.zeros((num_rows, 1), np.int32), np.ones((num_rows, 1), np.float32)
    y = new_experts(layer, way).run(layer.pack(), x, ids, weights)
    assert np.isnan(y[:2]).all()
    assert not y[2:4].any()
    exact, bound = integer_sums(layer, x[4:], ids[4:], weights[4:])
    assert (abs(y[4:] - exact) <= bound).all()


@pytest.mark.parametrize("weight_format", ["int8", "int4"])
def test_bf16_x_is_what_its_f32_is(way: str, weight_format: str) -> None:
    layer = IntegerLayer.random(weight_format, 2, 100, 33)
    x, ids, weights = random_step(layer, 14, 2)  # type: ignore[arg-type]
    words = (x.view(np.uint32) >> 16).astype(np.uint16)
    wide = (words.astype(np.uint32) << 16).view(np.float32)
    experts = new_experts(layer, way)
    units = layer.pack()
    assert_same_bits(experts.run(units, words, ids, weights), experts.run(units, wide, ids, weights))


@pytest.mark.parametrize("weight_format", INTEGER_FORMATS)
def test_slices_add_up_to_the_whole(isa: str, weight_format: str) -> None:
    layer = IntegerLayer.random(weight_format, 2, 130, 150)
    units = layer.pack()
    x, ids, weights = random_step(layer, 21, 2)  # type: ignore[arg-type]
    whole = new_experts(layer, isa).run(units, x, ids, weights)
    parts = [
        new_experts(layer, isa, first_stripe=first, num_stripes=count).run(units, x, ids, weights)
        for first, count in ((0, 3), (3, 7))
    ]
    np.testing.assert_allclose(sum(parts), whole, rtol=0, atol=1e-5 * abs(whole).max())


def test_names_of_activations() -> None:
    with pytest.raises(ValueError, match="activations: got 'int4', expected 'int8' or 'f32'"):
        new_experts(IntegerLayer.random("int4", 1, 32, 16), "auto", activations="int4")
