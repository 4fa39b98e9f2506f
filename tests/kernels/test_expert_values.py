"""Single weights and activations through the kernels themselves: every e4m3 byte, and SiLU."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from expert_reference import Layer, decode_e4m3, pack, silu

from duckllm import _native

NewExperts = Callable[..., _native.Experts]

FINITE = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
ONE = 0x38
SIXTY_FOUR = 0x68
ONE_IDS, ONE_WEIGHTS = np.zeros((1, 1), np.int32), np.ones((1, 1), np.float32)


def unit_scales(hidden: int, intermediate: int) -> dict[str, np.ndarray]:
    hidden_blocks, channel_blocks = -(-hidden // 128), -(-intermediate // 128)
    return {
        "gate_scale": np.ones((1, channel_blocks, hidden_blocks), np.float32),
        "up_scale": np.ones((1, channel_blocks, hidden_blocks), np.float32),
        "down_scale": np.ones((1, hidden_blocks, channel_blocks), np.float32),
    }


def empty_layer(hidden: int, intermediate: int) -> Layer:
    return Layer(
        gate=np.zeros((1, intermediate, hidden), np.uint8),
        up=np.zeros((1, intermediate, hidden), np.uint8),
        down=np.zeros((1, hidden, intermediate), np.uint8),
        **unit_scales(hidden, intermediate),
    )


def test_every_byte_of_down_is_exact(new_experts: NewExperts) -> None:
    """silu(64) is 64 in f32, so the activation 64 * (1/64) is 1 and each output is one weight of down."""
    layer = empty_layer(254, 1)
    layer.gate[0, 0, 0], layer.up[0, 0, 1] = SIXTY_FOUR, ONE
    layer.down[0, :, 0] = FINITE
    x = np.zeros((1, 254), np.float32)
    x[0, :2] = 1.0, 1 / 64
    y = new_experts(layer).run(pack(layer), x, ONE_IDS, ONE_WEIGHTS)
    np.testing.assert_array_equal(y[0], decode_e4m3(FINITE))


def test_every_byte_of_up_is_exact(new_experts: NewExperts) -> None:
    """Channel c holds weight c at the hidden index c, its gate is 64 and its down is the identity."""
    layer = empty_layer(255, 254)
    layer.gate[0, :, 254] = SIXTY_FOUR
    layer.up[0, np.arange(254), np.arange(254)] = FINITE
    layer.down[0, np.arange(254), np.arange(254)] = ONE
    x = np.full((1, 255), 1 / 64, np.float32)
    x[0, 254] = 1.0
    y = new_experts(layer).run(pack(layer), x, ONE_IDS, ONE_WEIGHTS)
    np.testing.assert_array_equal(y[0, :254], decode_e4m3(FINITE))
    assert y[0, 254] == 0


def test_every_byte_of_gate(new_experts: NewExperts) -> None:
    layer = empty_layer(255, 254)
    layer.gate[0, np.arange(254), np.arange(254)] = FINITE
    layer.up[0, :, 254] = ONE
    layer.down[0, np.arange(254), np.arange(254)] = ONE
    x = np.ones((1, 255), np.float32)
    y = new_experts(layer).run(pack(layer), x, ONE_IDS, ONE_WEIGHTS)[0, :254]
    exact = silu(decode_e4m3(FINITE))
    exact[abs(exact) < 2.0**-50] = 0
    assert len(np.unique(exact)) > 200
    np.testing.assert_allclose(y, exact, rtol=2.0**-22, atol=0)


@pytest.mark.parametrize("limit", [1.0, 10.0, 35.0, 200.0])
def test_silu_within_its_bound(new_experts: NewExperts, limit: float) -> None:
    """g through the gate, 1 through up and down: the output is silu(g), within 3 ulp."""
    layer = empty_layer(2, 1)
    layer.gate[0, 0, 0] = layer.up[0, 0, 1] = layer.down[0, 0, 0] = ONE
    experts = new_experts(layer, max_tokens=20_000, top_k=1)
    x = np.ones((20_000, 2), np.float32)
    x[:, 0] = np.linspace(-limit, limit, 20_000)
    ids, weights = np.zeros((20_000, 1), np.int32), np.ones((20_000, 1), np.float32)
    y = experts.run(pack(layer), x, ids, weights)[:, 0]
    exact = silu(x[:, 0].astype(np.float64))
    kept = abs(exact) >= 2.0**-50
    ulp = np.spacing(abs(exact[kept]).astype(np.float32)).astype(np.float64)
    assert (abs(y[kept] - exact[kept]) / ulp).max() <= 3
    assert np.all(abs(y[~kept]) <= 2.0**-50)


def test_large_gates_do_not_overflow(new_experts: NewExperts) -> None:
    layer = empty_layer(2, 1)
    layer.gate[0, 0, 0] = layer.up[0, 0, 1] = layer.down[0, 0, 0] = ONE
    gates = [-3e18, -1e10, -1000.0, -88.5, 88.5, 1000.0, 3e18]
    x = np.ones((len(gates), 2), np.float32)
    x[:, 0] = gates
    x[:4, 1] = 3e18  # what is left of a gate that is shut must not come back through a large up
    ids, weights = np.zeros((len(gates), 1), np.int32), np.ones((len(gates), 1), np.float32)
    y = new_experts(layer).run(pack(layer), x, ids, weights)[:, 0]
    np.testing.assert_array_equal(y, [0, 0, 0, 0, np.float32(88.5), 1000, np.float32(3e18)])


def test_topk_weight_scales_the_activation(new_experts: NewExperts) -> None:
    layer = empty_layer(2, 1)
    layer.gate[0, 0, 0], layer.up[0, 0, 1], layer.down[0, 0, 0] = SIXTY_FOUR, ONE, ONE
    x = np.array([[1.0, 1 / 64]] * 3, np.float32)
    weights = np.array([[0.25], [-3.0], [0.0]], np.float32)
    y = new_experts(layer).run(pack(layer), x, np.zeros((3, 1), np.int32), weights)
    np.testing.assert_array_equal(y[:, 0], [0.25, -3.0, 0.0])
