"""Rows before and after attention over latents, on a GPU: values against float64, and bits in any company."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytestmark = pytest.mark.gpu
mla_rows = pytest.importorskip("duckllm.kernels.mla_rows", reason="needs Triton and an NVIDIA GPU")
step_rows = pytest.importorskip("duckllm.kernels.step_rows", reason="needs Triton and an NVIDIA GPU")

DEVICE, CACHE = "cuda", torch.bfloat16
# Heads, nope, rope, v, lora.
PUBLISHED = (128, 128, 64, 128, 512)
SIZES = [(4, 128, 64, 128, 512), (3, 20, 6, 24, 40), (2, 256, 16, 128, 144), (5, 16, 8, 16, 32)]
STORED = ["fp8", "bf16", "f32"]


def some_rows(num_rows: int, rope: int) -> step_rows.StepRows:
    """Rows at positions of any order, every fifth of them nobody's."""
    i = torch.arange(num_rows, device=DEVICE)
    slots = torch.randperm(2 * num_rows, device=DEVICE)[:num_rows]
    slots[2::5] = -1
    positions = i * 37 % 101
    positions[2::5] = 0
    angles = torch.rand(101, rope // 2, device=DEVICE) * 6
    none = torch.zeros(num_rows, dtype=torch.int32, device=DEVICE)
    pages = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    return step_rows.StepRows(
        positions.int(), none, none, slots.int(), pages, angles.cos() * 1.2, angles.sin() * 1.2
    )


def part_of(rows: step_rows.StepRows, which: slice) -> step_rows.StepRows:
    """Some rows of a step alone."""
    names = ("positions", "contexts", "firsts", "slots")
    return dataclasses.replace(rows, **{name: getattr(rows, name)[which] for name in names})


def rotated(x: torch.Tensor, rows: step_rows.StepRows, interleaved: bool) -> torch.Tensor:
    """[R, ..., rope] in float64, results of first elements before those of second ones."""
    half = x.shape[-1] // 2
    shape = (len(x), *[1] * (x.dim() - 2), half)
    cos = rows.cos.double()[rows.positions.long()].view(shape)
    sin = rows.sin.double()[rows.positions.long()].view(shape)
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def random_weight(
    out_features: int, in_features: int, stored: str
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """A weight as stored, its scales, and what it stands for in float64."""
    if stored != "fp8":
        dtype = torch.float32 if stored == "f32" or DEVICE == "cpu" else torch.bfloat16
        weight = torch.randn(out_features, in_features, device=DEVICE).to(dtype)
        return weight, None, weight.double()
    codes = torch.randint(0, 127, (out_features, in_features), dtype=torch.uint8, device=DEVICE)
    codes |= torch.randint(0, 2, codes.shape, dtype=torch.uint8, device=DEVICE) << 7
    scales = torch.rand(-(-out_features // 128), -(-in_features // 128), device=DEVICE) + 0.01
    spread = scales.double().repeat_interleave(128, 0)[:out_features]
    spread = spread.repeat_interleave(128, 1)[:, :in_features]
    weight = codes.view(torch.float8_e4m3fn)
    return weight, scales, weight.double() * spread


def random_rows(num_rows: int, width: int) -> torch.Tensor:
    """Numbers of some magnitudes; each row lies in a longer one whose other numbers are NaN."""
    longer = torch.full((num_rows, width + 24), float("nan"), device=DEVICE)
    longer[:, 8 : width + 8] = torch.randn(num_rows, width, device=DEVICE).exp() - 1
    return longer[:, 8 : width + 8]


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("lora", "rope"), [(512, 64), (40, 6), (1, 2), (129, 34)])
def test_latents_are_normed_and_rotated(lora: int, rope: int, interleaved: bool) -> None:
    torch.manual_seed(lora)
    rows = some_rows(11, rope)
    kv, weight = random_rows(11, lora + rope), torch.rand(lora, device=DEVICE) + 0.5
    cache = torch.full((22, lora + rope), float("nan"), device=DEVICE, dtype=CACHE)
    mla_rows.store_latents(kv, weight, 1e-6, interleaved, rows, cache)
    latents = kv[:, :lora].double()
    latents = latents / (latents.square().mean(1, keepdim=True) + 1e-6).sqrt() * weight.double()
    wanted = torch.cat([latents, rotated(kv[:, lora:].double(), rows, interleaved)], 1)
    owned = rows.slots >= 0
    got = cache[rows.slots[owned].long()].double()
    epsilon = torch.finfo(CACHE).eps
    torch.testing.assert_close(got, wanted[owned], rtol=0.51 * epsilon, atol=1e-5)
    others = torch.ones(22, dtype=torch.bool, device=DEVICE)
    others[rows.slots[owned].long()] = False
    assert cache[others].isnan().all()


@pytest.mark.parametrize(("num_rows", "interleaved"), [(1, True), (17, False), (130, True)])
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("sizes", SIZES)
def test_absorbed_queries_are_those_of_float64(
    sizes: tuple[int, ...], stored: str, num_rows: int, interleaved: bool
) -> None:
    torch.manual_seed(num_rows)
    num_heads, nope, rope, v, lora = sizes
    rows = some_rows(num_rows, rope)
    heads = random_rows(num_rows, num_heads * (nope + rope))
    weight, scales, values = random_weight(num_heads * (nope + v), lora, stored)
    key_up = mla_rows.HeadWeights.stored(weight, scales, num_heads, 0, nope)
    q = mla_rows.absorb(heads, key_up, interleaved, rows, torch.float32)
    x = heads.double().view(num_rows, num_heads, -1)
    matrices = values.view(num_heads, nope + v, lora)[:, :nope]
    wanted = torch.einsum("rhn,hnl->rhl", x[..., :nope], matrices)
    largest = torch.einsum("rhn,hnl->rhl", x[..., :nope].abs(), matrices.abs())
    assert q.shape == (num_rows, num_heads, lora + rope)
    assert ((q[..., :lora].double() - wanted).abs() <= 2.0**-11 * largest + 1e-30).all()
    turned = rotated(x[..., nope:], rows, interleaved)
    torch.testing.assert_close(q[..., lora:].double(), turned, rtol=1e-5, atol=1e-5)
    rounded = mla_rows.absorb(heads, key_up, interleaved, rows, CACHE)
    assert torch.equal(rounded, q.to(CACHE))


@pytest.mark.parametrize("num_rows", [1, 17, 130])
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("sizes", SIZES)
def test_raised_values_are_those_of_float64(sizes: tuple[int, ...], stored: str, num_rows: int) -> None:
    torch.manual_seed(num_rows)
    num_heads, nope, _, v, lora = sizes
    weight, scales, values = random_weight(num_heads * (nope + v), lora, stored)
    value_up = mla_rows.HeadWeights.stored(weight, scales, num_heads, nope, v)
    context = random_rows(num_rows, num_heads * lora).contiguous().view(num_rows, num_heads, lora)
    matrices = values.view(num_heads, nope + v, lora)[:, nope:]
    for dtype in (torch.float32, CACHE):
        x = context.to(dtype)
        y = mla_rows.raise_values(x, value_up)
        wanted = torch.einsum("rhl,hvl->rhv", x.double(), matrices).flatten(1)
        largest = torch.einsum("rhl,hvl->rhv", x.double().abs(), matrices.abs()).flatten(1)
        assert y.values.shape == wanted.shape
        assert y.values.dtype == torch.float32
        assert ((y.values.double() - wanted).abs() <= 2.0**-11 * largest + 1e-30).all()
        factors = y.half.factors.repeat_interleave(128, 0)[: num_heads * v, :num_rows].T
        half = y.half.values[:num_rows].double() * factors.double()
        assert y.half.num_rows == num_rows
        blocks = torch.stack([each.abs().amax(1) for each in y.values.split(128, 1)])
        top = blocks.repeat_interleave(128, 0)[: num_heads * v].T.double()
        assert ((half - y.values.double()).abs() <= 2.0**-11 * top).all()


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("sizes", [PUBLISHED, SIZES[1]])
def test_a_row_has_the_same_bits_in_any_company(sizes: tuple[int, ...], stored: str) -> None:
    torch.manual_seed(1)
    num_heads, nope, rope, v, lora = sizes
    rows = some_rows(64, rope)
    weight, scales, _ = random_weight(num_heads * (nope + v), lora, stored)
    key_up = mla_rows.HeadWeights.stored(weight, scales, num_heads, 0, nope)
    value_up = mla_rows.HeadWeights.stored(weight, scales, num_heads, nope, v)
    heads = random_rows(64, num_heads * (nope + rope))
    q = mla_rows.absorb(heads, key_up, True, rows, CACHE)
    context = random_rows(64, num_heads * lora).contiguous().view(64, num_heads, lora)
    y = mla_rows.raise_values(context, value_up)
    for which in (slice(0, 1), slice(5, 8), slice(20, 37), slice(63, 64)):
        alone = mla_rows.absorb(heads[which], key_up, True, part_of(rows, which), CACHE)
        assert torch.equal(alone, q[which])
        raised = mla_rows.raise_values(context[which], value_up)
        assert torch.equal(raised.values, y.values[which])
        assert torch.equal(raised.half.values[: raised.half.num_rows], y.half.values[which])
        assert torch.equal(raised.half.factors[:, : raised.half.num_rows], y.half.factors[:, which])


def test_fp8_stays_bytes_where_blocks_begin_with_matrices() -> None:
    weight, scales, _ = random_weight(4 * 256, 512, "fp8")
    kept = mla_rows.HeadWeights.stored(weight, scales, 4, 128, 128)
    assert torch.equal(kept.weight, weight.view(torch.uint8).view(4, 256, 512)[:, 128:])
    kept = mla_rows.HeadWeights.stored(weight, scales, 4, 0, 128)
    assert torch.equal(kept.weight, weight.view(torch.uint8).view(4, 256, 512)[:, :128].mT)
    assert kept.scales.shape == (4, 4, 1)
    weight, scales, _ = random_weight(4 * 192, 512, "fp8")
    changed = mla_rows.HeadWeights.stored(weight, scales, 4, 128, 64)
    assert changed.weight.dtype == torch.float32
