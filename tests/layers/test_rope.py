from __future__ import annotations

import math

import pytest
import torch

from duckllm.layers.rope import RotaryTable, rotate_half_split, rotate_interleaved

DIM = 8


def table(scaling: float = 1.0) -> RotaryTable:
    return RotaryTable(1.0 / 10000.0 ** (torch.arange(0, DIM, 2) / DIM), scaling, 64)


@pytest.mark.parametrize("scaling", [1.0, 1.25])
def test_pairs_rotate_by_position_times_frequency(scaling: float) -> None:
    x = torch.randn(1, DIM, generator=torch.Generator().manual_seed(0))
    position = 37
    cos, sin = table(scaling).rows(torch.tensor([position]))
    interleaved, half_split = rotate_interleaved(x, cos, sin)[0], rotate_half_split(x, cos, sin)[0]
    half = DIM // 2
    for pair in range(half):
        turn = scaling * complex(
            math.cos(position * 10000 ** (-2 * pair / DIM)), math.sin(position * 10000 ** (-2 * pair / DIM))
        )
        neighbours = complex(x[0, 2 * pair], x[0, 2 * pair + 1]) * turn
        halves = complex(x[0, pair], x[0, half + pair]) * turn
        assert complex(interleaved[pair], interleaved[half + pair]) == pytest.approx(neighbours, abs=1e-5)
        assert complex(half_split[pair], half_split[half + pair]) == pytest.approx(halves, abs=1e-5)


@pytest.mark.parametrize("rotate", [rotate_interleaved, rotate_half_split])
def test_products_depend_on_the_distance_alone(rotate: object) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(1, DIM, generator=generator), torch.randn(1, DIM, generator=generator)
    rotary = table()

    def product(at_q: int, at_k: int) -> float:
        rotated = [rotate(x, *rotary.rows(torch.tensor([at]))) for x, at in ((q, at_q), (k, at_k))]
        return float((rotated[0] * rotated[1]).sum())

    assert product(20, 13) == pytest.approx(product(50, 43), abs=1e-5)
    assert abs(product(20, 13) - product(20, 14)) > 1e-3


@pytest.mark.parametrize("rotate", [rotate_interleaved, rotate_half_split])
def test_heads_are_rotated_alike_and_in_place(rotate: object) -> None:
    wide = torch.randn(3, 2, DIM + 3, generator=torch.Generator().manual_seed(2))
    x, cos_sin = wide[..., 1 : DIM + 1], table().rows(torch.tensor([4, 5, 9]))
    expected = torch.stack([rotate(x[:, head], *cos_sin) for head in range(2)], dim=1)
    beside = wide[..., DIM + 1 :].clone()
    assert torch.equal(rotate(x, *cos_sin), expected)
    rotate(x, *cos_sin, x)
    assert torch.equal(x, expected)
    assert torch.equal(wide[..., DIM + 1 :], beside)


def test_angles_of_another_size_are_refused() -> None:
    cos, sin = table().rows(torch.tensor([4, 5]))
    with pytest.raises(ValueError, match=r"^cos: got shape \[2, 4\], expected shape \[3, 4\]$"):
        rotate_interleaved(torch.zeros(3, DIM), cos, sin)
