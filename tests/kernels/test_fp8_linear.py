"""FP8 linear layers on a GPU: values against float64, and a row's bits in any company."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytestmark = pytest.mark.gpu
fp8_linear = pytest.importorskip("duckllm.kernels.fp8_linear", reason="needs Triton and an NVIDIA GPU")

DEVICE = "cuda"
# Sizes that 16, 64 and 128 do and do not divide, and numbers of blocks that warps do not divide evenly.
SHAPES = [(64, 128), (192, 256), (200, 300), (1, 1), (129, 257), (40, 2176), (576, 7168), (2304, 1536)]
# Those of DeepSeek-V3.2 that have wider tiles on a large card.
LARGE_SHAPES = [(32768, 1536), (7168, 16384)]


def random_weight(out_features: int, in_features: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All finite codes, scales of a wide range, and what they stand for in float64."""
    codes = torch.randint(0, 127, (out_features, in_features), dtype=torch.uint8)
    codes |= torch.randint(0, 2, codes.shape, dtype=torch.uint8) << 7
    scales = torch.rand(-(-out_features // 128), -(-in_features // 128)) * 10.0 ** torch.randint(-3, 3, (1,))
    codes, scales = codes.to(DEVICE), scales.to(DEVICE)
    spread = scales.double().repeat_interleave(128, 0)[:out_features]
    spread = spread.repeat_interleave(128, 1)[:, :in_features]
    return codes, scales, codes.view(torch.float8_e4m3fn).double() * spread


def random_rows(num_rows: int, width: int) -> torch.Tensor:
    """Numbers of many magnitudes, as activations with outliers have them."""
    return (torch.randn(num_rows, width) * torch.exp(2 * torch.randn(num_rows, width))).bfloat16().to(DEVICE)


def half_rows(x: torch.Tensor) -> fp8_linear.HalfRows:
    """``x`` for the kernel, with NaN where no row is."""
    rows = fp8_linear.to_half_rows(x)
    rows.values[len(x) :] = float("nan")
    rows.factors[:, len(x) :] = float("nan")
    return rows


@pytest.mark.parametrize(
    ("num_rows", "shape"), [(130, LARGE_SHAPES[0]), (100, LARGE_SHAPES[1])], ids=["in pairs", "alone"]
)
def test_many_rows_of_large_weights_are_those_of_float64(num_rows: int, shape: tuple[int, int]) -> None:
    torch.manual_seed(num_rows)
    codes, scales, weight = random_weight(*shape)
    x = random_rows(num_rows, shape[1])
    wanted = x.double() @ weight.T
    y = fp8_linear.multiply(half_rows(x), codes, scales, torch.float32)
    assert (y - wanted).norm() <= 1e-6 * wanted.norm()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_rows", [1, 2, 7, 8, 9, 16, 17, 64, 65, 128, 300])
def test_products_are_those_of_float64(shape: tuple[int, int], num_rows: int) -> None:
    torch.manual_seed(num_rows)
    codes, scales, weight = random_weight(*shape)
    x = random_rows(num_rows, shape[1])
    wanted = x.double() @ weight.T
    rows = half_rows(x)
    y = fp8_linear.multiply(rows, codes, scales, torch.float32)
    assert y.isfinite().all()
    assert (y - wanted).norm() <= 1e-6 * wanted.norm()
    rounded = fp8_linear.multiply(rows, codes, scales, torch.bfloat16)
    torch.testing.assert_close(rounded, y.bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize("num_rows", [1, 33, 130])
def test_rows_in_half_precision_are_the_rows(num_rows: int) -> None:
    torch.manual_seed(0)
    x = random_rows(num_rows, 2300)
    x[num_rows // 2] = 0
    x[num_rows // 3] *= 1e30
    x[num_rows // 4] *= 1e-25
    rows = fp8_linear.to_half_rows(x)
    multiple = 128 if num_rows > 64 else 16
    assert rows.values.shape == (-(-num_rows // multiple) * multiple, 2300)
    factors = rows.factors.repeat_interleave(128, 0)[:2300].T
    back = (rows.values.double() * factors)[:num_rows]
    block_max = torch.stack([each.abs().amax(1) for each in x.double().split(128, 1)])
    largest = block_max.repeat_interleave(128, 0)[:2300].T
    exact = x.double().abs() >= 2.0**-21 * largest
    assert (back[exact] == x.double()[exact]).all()
    assert ((back - x.double()).abs() <= 2.0**-32 * largest).all()


@pytest.mark.parametrize("shape", [(576, 7168), (2304, 1536), (200, 300), *LARGE_SHAPES])
def test_a_row_has_the_same_bits_in_any_company(shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    codes, scales, weight = random_weight(*shape)
    x = random_rows(64, shape[1])
    together = fp8_linear.multiply(half_rows(x), codes, scales, torch.float32)
    wanted = x.double() @ weight.T
    assert (together - wanted).norm() <= 1e-6 * wanted.norm()
    for start, stop in ((0, 1), (5, 7), (8, 16), (20, 29), (20, 40), (63, 64)):
        alone = fp8_linear.multiply(half_rows(x[start:stop]), codes, scales, torch.float32)
        assert torch.equal(alone, together[start:stop])


@pytest.mark.parametrize("block_n", [16, 32])
@pytest.mark.parametrize("rows", [8, 16])
def test_cards_without_e4m3_instructions_widen_the_same_values(block_n: int, rows: int) -> None:
    torch.manual_seed(2)
    # More blocks than two warps take in two turns of two blocks.
    x, in_features = random_rows(rows, 640), 640
    codes, scales, weight = random_weight(192, in_features)
    halves, wanted = half_rows(x), x.double() @ weight.T
    for has_e4m3 in (True, False):
        y = torch.full((rows, 192), float("nan"), device=DEVICE)
        fp8_linear._multiply_rows[(1, 192 // block_n)](
            halves.values, halves.factors, codes, scales, y, rows, 16, 192, in_features, 192,
            ROWS=rows, BLOCK_N=block_n, WARPS=2, AHEAD=2, EVEN=True, ONCE=True, HAS_E4M3=has_e4m3,
            EARLY=False, num_warps=2,
        )  # fmt: skip
        assert (y - wanted).norm() <= 1e-6 * wanted.norm()


def test_products_wait_for_their_rows() -> None:
    """Kernels of a graph, which start before the ones in front of them have ended, as if each were alone."""
    torch.manual_seed(3)
    layers = [random_weight(1024, 1024)[:2] for _ in range(8)]
    x = torch.empty(4, 1024, device=DEVICE)

    def run(between: Callable[[], None]) -> torch.Tensor:
        results, y = [], x
        for codes, scales in layers:
            rows = fp8_linear.to_half_rows(y)
            between()
            # Of the same rows twice, one right behind the other.
            for _ in range(2):
                y = fp8_linear.multiply(rows, codes, scales, torch.float32)
                between()
                results.append(y)
            y = y / y.norm(dim=1, keepdim=True)
            between()
        return torch.stack(results)

    x.normal_()
    run(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = run(lambda: None)
    for _ in range(20):
        x.normal_()
        wanted = run(torch.cuda.synchronize)
        graph.replay()
        torch.cuda.synchronize()
        assert wanted.isfinite().all()
        assert wanted.abs().amax((1, 2)).min() > 0
        assert torch.equal(replayed, wanted)
