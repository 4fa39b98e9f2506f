"""Dense linear layers on a GPU: values against float64, and a row's bits in any company."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu
dense_linear = pytest.importorskip("duckllm.kernels.dense_linear", reason="needs Triton and an NVIDIA GPU")

DEVICE = "cuda"
NARROW = torch.bfloat16
# Sizes that 16, 64 and 128 do and do not divide, with and without parts of K.
SHAPES = [(64, 128), (200, 300), (1, 1), (129, 257), (256, 2048), (17, 1000)]


def random_rows(num_rows: int, width: int) -> torch.Tensor:
    """f32 numbers of many magnitudes, a slice of something wider that holds NaN."""
    x = torch.full((num_rows, width + 7), float("nan"))
    x[:, 4 : 4 + width] = torch.randn(num_rows, width) * torch.exp(2 * torch.randn(num_rows, width))
    return x.to(DEVICE)[:, 4 : 4 + width]


def random_weight(out_features: int, in_features: int, dtype: torch.dtype) -> torch.Tensor:
    """A slice of something longer that holds NaN."""
    weight = torch.full((out_features + 3, in_features), float("nan"))
    weight[1:-2] = torch.randn(out_features, in_features)
    return weight.to(DEVICE, dtype)[1:-2]


def poisoned_workspace() -> dense_linear.Workspace:
    workspace = dense_linear.Workspace(torch.device(DEVICE))
    workspace.reserve(1 << 10, 1 << 22)[0].fill_(float("nan"))
    return workspace


@pytest.fixture(params=["small weights", "large weights"], autouse=True)
def any_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of a decode step, whatever the size of a weight."""
    monkeypatch.setattr(dense_linear, "SMALL_WEIGHT", 0 if request.param == "large weights" else 1 << 30)


@pytest.mark.parametrize("dtype", [NARROW, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_rows", [1, 2, 16, 17, 64, 65, 300])
def test_products_are_those_of_float64(shape: tuple[int, int], num_rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(num_rows)
    weight, x, workspace = random_weight(*shape, dtype), random_rows(num_rows, shape[1]), poisoned_workspace()
    wanted = x.double() @ weight.double().T
    bound = 1e-6 * (x.double().abs() @ weight.double().abs().T)
    for _ in range(2):  # the workspace is left as it was
        y = dense_linear.multiply_dense(x, weight, workspace)
        assert y.dtype == torch.float32
        assert ((y - wanted).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [NARROW, torch.float32])
def test_each_bit_of_x_and_weights_counts(dtype: torch.dtype) -> None:
    """A product of one pair of numbers for each output, which no other error hides."""
    torch.manual_seed(0)
    for num_rows in (64, 128):
        x, weight = random_rows(num_rows, 1), random_weight(100, 1, dtype)
        y = dense_linear.multiply_dense(x, weight, poisoned_workspace())
        wanted = x.double() * weight.double().T
        assert ((y - wanted).abs() <= 2.0**-22 * wanted.abs()).all()


@pytest.mark.parametrize("dtype", [NARROW, torch.float32])
@pytest.mark.parametrize("shape", [(256, 7168), (1000, 2048), (20000, 128), (200, 300)])
def test_a_row_has_the_same_bits_in_any_company(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    weight, x, workspace = random_weight(*shape, dtype), random_rows(64, shape[1]), poisoned_workspace()
    together = dense_linear.multiply_dense(x, weight, workspace)
    for start, stop in ((0, 1), (5, 8), (20, 37), (63, 64)):
        for _ in range(5):  # whichever part is last
            alone = dense_linear.multiply_dense(x[start:stop].contiguous(), weight, workspace)
            assert torch.equal(alone, together[start:stop])


def test_weights_of_many_sizes_are_cut_into_enough_parts() -> None:
    """Some programs for each multiprocessor where K is long enough, and no more parts than blocks of K."""
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    for out_features, in_features in ((5120, 2048), (2048, 4096), (129280, 7168), (64, 64), (8, 9000)):
        tiling = dense_linear.decode_tiling(out_features, in_features, 0)
        programs = -(-out_features // tiling.block_n) * tiling.split
        blocks = -(-in_features // 64)
        assert 1 <= tiling.split <= min(dense_linear.MAX_SPLIT, blocks)
        assert tiling.split == 1 or programs <= 5 * multiprocessors
        assert tiling.split == min(dense_linear.MAX_SPLIT, blocks) or 2 * programs > multiprocessors
