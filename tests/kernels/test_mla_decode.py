"""Attention over latents on a GPU: values against float64, and a row's bits in any company."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu
mla_decode = pytest.importorskip("duckllm.kernels.mla_decode", reason="needs Triton and an NVIDIA GPU")

PAGE, SCALE = 16, 0.07


def made_up(lengths: list[int], num_heads: int) -> tuple[torch.Tensor, torch.Tensor, mla_decode.QueryRows]:
    """Queries, a cache whose pages lie anywhere, and NaN in every slot that no row may see."""
    num_pages, num_contexts = max(lengths) // PAGE + 1, 2
    shape = (num_contexts * num_pages * PAGE, 576)
    cache = torch.full(shape, float("nan"), device="cuda", dtype=torch.bfloat16)
    pages = torch.randperm(num_contexts * num_pages, device="cuda").int().view(num_contexts, num_pages)
    contexts = (torch.arange(len(lengths), device="cuda") % num_contexts).int()
    for context in range(num_contexts):
        longest = max(lengths[context::num_contexts], default=0)
        position = torch.arange(longest, device="cuda")
        slots = pages[context].long()[position // PAGE] * PAGE + position % PAGE
        cache[slots] = torch.randn(longest, 576, device="cuda").bfloat16()
    q = torch.randn(len(lengths), num_heads, 576, device="cuda").bfloat16()
    seen = torch.tensor(lengths, device="cuda", dtype=torch.int32)
    return q, cache, mla_decode.QueryRows(pages, contexts, seen, PAGE)


def reference(
    q: torch.Tensor, cache: torch.Tensor, rows: mla_decode.QueryRows, selection: torch.Tensor | None = None
) -> torch.Tensor:
    outs = []
    for row, length in enumerate(rows.lengths.tolist()):
        position = (
            torch.arange(length, device="cuda") if selection is None else selection[row, :length].long()
        )
        slots = rows.pages[rows.contexts[row]].long()[position // PAGE] * PAGE + position % PAGE
        keys = cache[slots].double()
        outs.append(((q[row].double() @ keys.T) * SCALE).softmax(-1) @ keys[:, :512])
    return torch.stack(outs)


def check(y: torch.Tensor, wanted: torch.Tensor) -> None:
    """Within what bf16 weights and a bf16 result round: 2^-8 of a row's largest."""
    assert y.isfinite().all()
    assert ((y.double() - wanted).abs().amax((1, 2)) <= 2.0**-8 * wanted.abs().amax((1, 2))).all()


@pytest.mark.parametrize("num_heads", [128, 64, 20])
@pytest.mark.parametrize("lengths", [[1], [63, 64, 65], [129, 128, 1000], [8191, 2, 9000]])
def test_values_are_those_of_float64(lengths: list[int], num_heads: int) -> None:
    torch.manual_seed(len(lengths))
    q, cache, rows = made_up(lengths, num_heads)
    check(mla_decode.attend_latents(q, cache, rows, SCALE), reference(q, cache, rows))


@pytest.mark.parametrize("num_selected", [[1, 5], [64, 2048]])
def test_a_selection_is_all_that_is_seen(num_selected: list[int]) -> None:
    torch.manual_seed(0)
    q, cache, rows = made_up([5000, 4000], 128)
    selection = torch.stack([torch.randperm(4000, device="cuda")[:2048].sort()[0] for _ in range(2)]).int()
    counts = torch.tensor(num_selected, device="cuda", dtype=torch.int32)
    chosen = mla_decode.QueryRows(rows.pages, rows.contexts, counts, PAGE)
    for row, count in enumerate(num_selected):  # what lies behind a row's count is no position
        selection[row, count:] = 2**30
    y = mla_decode.attend_latents(q, cache, chosen, SCALE, selection)
    check(y, reference(q, cache, chosen, selection))


def test_a_row_has_the_same_bits_in_any_company() -> None:
    torch.manual_seed(1)
    lengths = [3000, 70, 3001, 9000, 3002, 1]
    q, cache, rows = made_up(lengths, 128)
    together = mla_decode.attend_latents(q, cache, rows, SCALE)
    for row in range(len(lengths)):
        alone = mla_decode.QueryRows(
            rows.pages, rows.contexts[row : row + 1], rows.lengths[row : row + 1], PAGE
        )
        y = mla_decode.attend_latents(q[row : row + 1].clone(), cache, alone, SCALE)
        assert torch.equal(y[0], together[row])
