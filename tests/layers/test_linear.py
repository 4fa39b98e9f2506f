from __future__ import annotations

import pytest
import torch

from duckllm.errors import CheckpointError
from duckllm.layers import linear
from duckllm.layers.linear import GatedMLP, Linear
from support.experts import DictTensors


@pytest.mark.parametrize("with_bias", [False, True])
def test_one_row_of_a_large_weight_gives_what_many_rows_give(
    with_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(40, 24, generator=generator), torch.randn(40, generator=generator)
    layer = Linear(weight, bias if with_bias else None)
    x = torch.randn(3, 24, generator=generator)
    expected = x @ weight.T + (bias if with_bias else 0)
    torch.testing.assert_close(layer(x), expected)
    monkeypatch.setattr(linear, "MATRIX_VECTOR_ELEMENTS", 1)
    for row in range(3):
        torch.testing.assert_close(layer(x[row : row + 1]), expected[row : row + 1])


def test_a_wrong_shape_names_the_tensor_and_both_shapes() -> None:
    tensors = DictTensors({"a.weight": torch.zeros(3, 4), "a.bias": torch.zeros(2)})
    with pytest.raises(CheckpointError, match=r"a\.weight: got shape \[3, 4\], expected \[4, 3\]"):
        Linear.load(tensors, "a", 4, 3, torch.float32)
    with pytest.raises(CheckpointError, match=r"a\.bias: got shape \[2\], expected \[3\]"):
        Linear.load(tensors, "a", 3, 4, torch.float32, bias=True)


def test_gated_mlp_is_down_of_silu_gate_times_up() -> None:
    generator = torch.Generator().manual_seed(0)
    gate, up = torch.randn(6, 4, generator=generator), torch.randn(6, 4, generator=generator)
    down = torch.randn(4, 6, generator=generator)
    tensors = {"m.gate_proj.weight": gate, "m.up_proj.weight": up, "m.down_proj.weight": down}
    x = torch.randn(5, 4, generator=generator)
    hidden = x @ gate.T
    expected = (hidden / (1 + torch.exp(-hidden)) * (x @ up.T)) @ down.T
    torch.testing.assert_close(GatedMLP(DictTensors(tensors), "m", 4, 6, torch.float32)(x), expected)
