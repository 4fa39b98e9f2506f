"""FP8 linear layers on a GPU: values against float64, and a row's bits in any company."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu
fp8_linear = pytest.importorskip("duckllm.kernels.fp8_linear", reason="needs Triton and an NVIDIA GPU")

# Sizes that 16, 64 and 128 do and do not divide, and one that is split along K.
SHAPES = [(64, 128), (192, 256), (200, 300), (1, 1), (129, 257), (576, 7168), (2304, 1536)]


def random_weight(out_features: int, in_features: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All finite codes, scales of a wide range, and what they stand for in float64."""
    codes = torch.randint(0, 127, (out_features, in_features), dtype=torch.uint8)
    codes |= torch.randint(0, 2, codes.shape, dtype=torch.uint8) << 7
    scales = torch.rand(-(-out_features // 128), -(-in_features // 128)) * 10.0 ** torch.randint(-3, 3, (1,))
    spread = scales.double().repeat_interleave(128, 0)[:out_features]
    spread = spread.repeat_interleave(128, 1)[:, :in_features]
    return codes.cuda(), scales.cuda(), (codes.view(torch.float8_e4m3fn).double() * spread).cuda()


def random_rows(num_rows: int, width: int) -> torch.Tensor:
    """Numbers of many magnitudes, as activations with outliers have them."""
    return (torch.randn(num_rows, width) * torch.exp(2 * torch.randn(num_rows, width))).bfloat16().cuda()


@pytest.fixture(scope="module")
def workspace() -> object:
    return fp8_linear.Workspace(torch.device("cuda"))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_rows", [1, 2, 7, 16, 17, 64, 65, 128, 300])
def test_products_are_those_of_float64(
    shape: tuple[int, int], num_rows: int, workspace: fp8_linear.Workspace
) -> None:
    torch.manual_seed(num_rows)
    codes, scales, weight = random_weight(*shape)
    x = random_rows(num_rows, shape[1])
    wanted = x.double() @ weight.T
    rows = fp8_linear.to_half_rows(x)
    y = fp8_linear.multiply(rows, codes, scales, workspace, torch.float32)
    assert y.isfinite().all()
    assert (y - wanted).norm() <= 1e-6 * wanted.norm()
    rounded = fp8_linear.multiply(rows, codes, scales, workspace, torch.bfloat16)
    torch.testing.assert_close(rounded, y.bfloat16(), rtol=0, atol=0)


def test_rows_in_half_precision_are_the_rows() -> None:
    torch.manual_seed(0)
    x = random_rows(33, 1000)
    x[3] = 0
    x[5] *= 1e30
    x[6] *= 1e-25
    rows = fp8_linear.to_half_rows(x)
    assert rows.values.shape == (48, 1000)
    factors = rows.factors.repeat_interleave(128, 0)[:1000].T
    back = rows.values.double() * factors
    assert not back[33:].any()
    block_max = torch.stack([each.abs().amax(1) for each in x.double().split(128, 1)])
    largest = block_max.repeat_interleave(128, 0)[:1000].T
    exact = x.double().abs() >= 2.0**-21 * largest
    assert (back[:33][exact] == x.double()[exact]).all()
    assert ((back[:33] - x.double()).abs() <= 2.0**-32 * largest).all()


@pytest.mark.parametrize("shape", [(576, 7168), (24576, 1536), (200, 300)])
def test_a_row_has_the_same_bits_in_any_company(
    shape: tuple[int, int], workspace: fp8_linear.Workspace
) -> None:
    torch.manual_seed(1)
    codes, scales, _ = random_weight(*shape)
    x = random_rows(64, shape[1])
    together = fp8_linear.multiply(fp8_linear.to_half_rows(x), codes, scales, workspace, torch.float32)
    for start, stop in ((0, 1), (5, 7), (20, 40), (63, 64)):
        rows = fp8_linear.to_half_rows(x[start:stop])
        for _ in range(5):  # whichever part is last
            alone = fp8_linear.multiply(rows, codes, scales, workspace, torch.float32)
            assert torch.equal(alone, together[start:stop])


def test_cards_without_e4m3_instructions_widen_the_same_values() -> None:
    x = fp8_linear.to_half_rows(random_rows(16, 256))
    codes, scales, _ = random_weight(128, 256)
    results = []
    for has_e4m3 in (True, False):
        y = torch.full((16, 128), float("nan"), device="cuda")
        fp8_linear._multiply_rows[(1, 2, 1)](
            x.values, x.factors, codes, scales, y, y, torch.zeros(1, dtype=torch.int32, device="cuda"),
            16, 16, 128, 256, 128, 1,
            ROWS=16, BLOCK_N=64, STAGES=3, EVEN=True, HAS_E4M3=has_e4m3, num_warps=2,
        )  # fmt: skip
        results.append(y)
    torch.testing.assert_close(results[0], results[1], rtol=2e-7, atol=0)
