"""Norms, gated activations and gates on a GPU: values against float64, and a row's bits in any company."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu
rowwise = pytest.importorskip("duckllm.kernels.rowwise", reason="needs Triton and an NVIDIA GPU")
fp8_linear = pytest.importorskip("duckllm.kernels.fp8_linear", reason="needs Triton and an NVIDIA GPU")

DEVICE = "cuda"
WIDTHS = [1, 100, 128, 130, 576, 1536, 7168]
ROWS = [1, 3, 17, 65]
EPS = 1e-6


def random_rows(num_rows: int, width: int) -> torch.Tensor:
    """f32 numbers, a slice of something wider that holds NaN; rows of very different sizes."""
    x = torch.full((num_rows, width + 12), float("nan"))
    sizes = 10.0 ** torch.randint(-4, 5, (num_rows, 1))
    x[:, 8 : 8 + width] = torch.randn(num_rows, width) * sizes
    return x.to(DEVICE)[:, 8 : 8 + width]


def check_half(y: rowwise.Activations) -> None:
    """What linear layers of FP8 weights get is what they would make of the f32 numbers."""
    wanted = fp8_linear.to_half_rows(y.values)
    num_rows = len(y.values)
    assert y.half.num_rows == num_rows
    assert y.half.values.shape == wanted.values.shape
    assert torch.equal(y.half.values[:num_rows], wanted.values[:num_rows])
    assert torch.equal(y.half.factors[:, :num_rows], wanted.factors[:, :num_rows])


def exact_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("num_rows", ROWS)
def test_norms_are_those_of_float64(num_rows: int, width: int) -> None:
    torch.manual_seed(width)
    x, weight = random_rows(num_rows, width), torch.randn(width).to(DEVICE)
    for eps in (EPS, 3.0):
        y = rowwise.rms_norm(x, weight, eps)
        assert y.values.dtype == torch.float32
        wanted = exact_norm(x, weight, eps)
        assert ((y.values - wanted).abs() <= 6e-7 * wanted.abs()).all()
        check_half(y)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("num_rows", ROWS)
def test_a_sum_and_its_norm(num_rows: int, width: int) -> None:
    torch.manual_seed(width)
    hidden, delta = random_rows(num_rows, width), random_rows(num_rows, width)
    weight = torch.randn(width).to(DEVICE)
    before = hidden.clone(), delta.clone()
    total, y = rowwise.add_rms_norm(hidden, (delta,), weight, EPS)
    assert torch.equal(total, hidden + delta)
    assert torch.equal(hidden, before[0])
    assert torch.equal(delta, before[1])
    wanted = exact_norm(hidden + delta, weight, EPS)
    assert ((y.values - wanted).abs() <= 6e-7 * wanted.abs()).all()
    check_half(y)
    other = random_rows(num_rows, width)
    total, y = rowwise.add_rms_norm(hidden, (delta, other), weight, EPS)
    assert torch.equal(total, hidden + (delta + other))
    wanted = exact_norm(total, weight, EPS)
    assert ((y.values - wanted).abs() <= 6e-7 * wanted.abs()).all()
    check_half(y)


def test_the_widest_rows() -> None:
    torch.manual_seed(0)
    x, weight = random_rows(2, 32768), torch.randn(32768).to(DEVICE)
    wanted = exact_norm(x, weight, EPS)
    assert ((rowwise.rms_norm(x, weight, EPS).values - wanted).abs() <= 6e-7 * wanted.abs()).all()


@pytest.mark.parametrize("width", [1, 100, 512, 768, 2048, 2100])
@pytest.mark.parametrize("num_rows", ROWS)
def test_gated_activations_are_those_of_float64(num_rows: int, width: int) -> None:
    torch.manual_seed(width)
    gate_up = torch.randn(num_rows, 2 * width) * torch.exp(torch.randn(num_rows, 2 * width))
    gate_up[0, 0] = -200.0
    gate_up[-1, width - 1] = 200.0
    gate_up = gate_up.to(DEVICE)
    gate, up = gate_up.double().split(width, 1)
    y = rowwise.silu_mul(gate_up)
    assert y.values.shape == (num_rows, width)
    wanted = gate * gate.sigmoid() * up
    # Numbers that are not normal in f32 may be zero.
    bound = (6 + gate.abs()) * 2.0**-23 * wanted.abs() + 2.0**-125 * up.abs()
    assert ((y.values - wanted).abs() <= bound).all()
    check_half(y)


@pytest.mark.parametrize("width", [1, 100, 1024, 7168])
@pytest.mark.parametrize("num_rows", ROWS)
def test_rows_are_scaled_by_the_sigmoid_of_their_gate(num_rows: int, width: int) -> None:
    torch.manual_seed(width)
    y, gate = torch.randn(num_rows, width).to(DEVICE), (3 * torch.randn(num_rows, 1)).to(DEVICE)
    wanted = y.double() * gate.double().sigmoid()
    assert rowwise.scale_by_sigmoid(y, gate) is None
    assert ((y - wanted).abs() <= 1e-6 * wanted.abs()).all()


def test_a_row_has_the_same_bits_in_any_company() -> None:
    torch.manual_seed(1)
    hidden, delta, weight = random_rows(64, 1536), random_rows(64, 1536), torch.randn(1536).to(DEVICE)
    total, y = rowwise.add_rms_norm(hidden, (delta,), weight, EPS)
    normal = rowwise.rms_norm(hidden, weight, EPS)
    activated = rowwise.silu_mul(hidden)
    for start, stop in ((0, 1), (5, 8), (20, 37), (63, 64)):
        rows = slice(start, stop)
        own_total, own = rowwise.add_rms_norm(hidden[rows], (delta[rows],), weight, EPS)
        assert torch.equal(own_total, total[rows])
        assert torch.equal(own.values, y.values[rows])
        assert torch.equal(rowwise.rms_norm(hidden[rows], weight, EPS).values, normal.values[rows])
        assert torch.equal(rowwise.silu_mul(hidden[rows]).values, activated.values[rows])
