from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from duckllm.errors import CheckpointError
from duckllm.layers.norm import RMSNorm
from support.experts import DictTensors


@pytest.mark.parametrize("scale", [1e-20, 1e-4, 1e-3, 1.0, 1e4])
@pytest.mark.parametrize("eps", [1e-6, 1e-2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_torchs_rms_norm(scale: float, eps: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(40, generator=generator)
    x = (torch.randn(3, 5, 40, generator=generator) * scale).to(dtype)
    got = RMSNorm(DictTensors({"n.weight": weight}), "n", 40, eps)(x)
    assert got.dtype == dtype
    torch.testing.assert_close(got, F.rms_norm(x.float(), (40,), weight, eps).to(dtype))


def test_zeros_stay_zeros() -> None:
    norm = RMSNorm(DictTensors({"n.weight": torch.ones(8)}), "n", 8, 1e-6)
    assert norm(torch.zeros(2, 8)).tolist() == [[0.0] * 8] * 2


def test_a_wrong_size_names_the_tensor() -> None:
    with pytest.raises(CheckpointError, match=r"n\.weight: got shape \[7\], expected \[8\]"):
        RMSNorm(DictTensors({"n.weight": torch.ones(7)}), "n", 8, 1e-6)
