from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from duckllm import _native
from duckllm.errors import CheckpointError
from duckllm.layers.cpu_runtime import CpuRuntime
from duckllm.layers.norm import LayerNorm, RMSNorm
from support.experts import DictTensors

RUNTIME = CpuRuntime.new(64, 1)


@pytest.mark.parametrize("scale", [1e-20, 1e-4, 1e-3, 1.0, 1e4])
@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_equals_torchs_rms_norm(scale: float, eps: float) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(40, generator=generator)
    x = torch.randn(3, 5, 40, generator=generator) * scale
    got = RMSNorm(DictTensors({"n.weight": weight}), "n", 40, eps, RUNTIME)(x)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, F.rms_norm(x, (40,), weight, eps))


@pytest.mark.parametrize("offset", [0.0, 300.0])
def test_equals_torchs_layer_norm(offset: float) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(40, generator=generator), torch.randn(40, generator=generator)
    x = torch.randn(7, 40, generator=generator) + offset
    norm = LayerNorm(DictTensors({"n.weight": weight, "n.bias": bias}), "n", 40, 1e-6, RUNTIME)
    got = torch.from_numpy(_native.layer_norm(x.numpy(), norm.weight, norm.bias, norm.eps))
    exact = F.layer_norm(x.double(), (40,), weight.double(), bias.double(), 1e-6)
    torch.testing.assert_close(got.double(), exact, rtol=1e-6, atol=1e-6)


def test_heads_that_lie_apart_are_read_where_they_are() -> None:
    norm = RMSNorm(DictTensors({"n.weight": torch.linspace(0.5, 2, 8)}), "n", 8, 1e-6, RUNTIME)
    heads = torch.randn(5, 7, 8, generator=torch.Generator().manual_seed(0))
    for part in (heads[:, 2:5], heads[1:, :1], heads[:, 0], heads[2]):
        assert torch.equal(norm(part), norm(part.clone()))


def test_zeros_stay_zeros() -> None:
    norm = RMSNorm(DictTensors({"n.weight": torch.ones(8)}), "n", 8, 1e-6, RUNTIME)
    assert norm(torch.zeros(2, 8)).tolist() == [[0.0] * 8] * 2


def test_a_wrong_size_names_the_tensor() -> None:
    with pytest.raises(CheckpointError, match=r"n\.weight: got shape \[7\], expected \[8\]"):
        RMSNorm(DictTensors({"n.weight": torch.ones(7)}), "n", 8, 1e-6, RUNTIME)
    with pytest.raises(CheckpointError, match=r"n\.bias: got shape \[7\], expected \[8\]"):
        LayerNorm(DictTensors({"n.weight": torch.ones(8), "n.bias": torch.ones(7)}), "n", 8, 1e-6, RUNTIME)
