"""Runs prompts through a model and records what its experts' weights are multiplied by.

Called by ``duckllm calibrate``. A recorder stands before whoever computes the experts; all tokens go through
the model in one step, so that each expert's matrices are unpacked once however many tokens there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

from duckllm.config import LOSSLESS_FORMATS
from duckllm.errors import ConfigError, InWords
from duckllm.layers.step import SequenceStep
from duckllm.models.causal_lm import DecoderLayer, MoEBlock
from duckllm.quality.importance import GateUp, Importance
from duckllm.quality.texts import Passage
from duckllm.weights.e4m3 import dequantise
from duckllm.weights.formats import is_lossless
from duckllm.weights.layer_formats import in_words
from duckllm.weights.manifest import Manifest
from duckllm.weights.reader import ExpertFile
from duckllm.weights.recode import recode_units
from duckllm.weights.units import unpack_expert_units

if TYPE_CHECKING:
    from duckllm.models.causal_lm import CausalLM
    from duckllm.models.mtp import MTPLayer
    from duckllm.moe.executor import ExpertExecutor, PendingStep

Record = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]


class RecordingExperts:
    """An expert executor that shows each step to ``record`` before another one computes it."""

    def __init__(self, inner: ExpertExecutor, record: Record) -> None:
        self._inner, self._record = inner, record

    def submit(
        self, layer: int, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, lane: int = 0
    ) -> PendingStep:
        """As :class:`duckllm.moe.executor.ExpertExecutor`."""
        self._record(layer, x, topk_ids, topk_weights)
        return self._inner.submit(layer, x, topk_ids, topk_weights, lane)


class StoredExperts:
    """The matrices of a converted model's experts.

    Args:
        manifest: The model, in a format that holds e4m3 weights as they are.

    Raises:
        ConfigError: It is in another one.
    """

    def __init__(self, manifest: Manifest) -> None:
        if not all(map(is_lossless, manifest.layer_formats().values())):
            expected = (
                "a checkpoint of 8 or 16 bits, or a model in " + " or ".join(LOSSLESS_FORMATS) + ": what has "
                "4 bits already is not rounded, and needs no calibration"
            )
            raise ConfigError("model", InWords(f"one in {in_words(manifest.layer_formats())}"), expected)
        self._manifest = manifest
        self._files: dict[int, ExpertFile] = {}

    def gate_up(self, layer: int, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Gate and up of an expert, [I, H] f32 each.

        Raises:
            CheckpointError: The layer's file is missing or truncated.
            WeightFormatError: The units hold what the format cannot.
        """
        manifest = self._manifest
        if layer not in self._files:
            self._files[layer] = ExpertFile.open(manifest, layer)
        units = self._files[layer].units[expert : expert + 1]
        stored, layout = self._files[layer].format.format, self._files[layer].format.scale_layout
        if stored != "fp8":  # numpy unpacks that ten times as fast
            units = recode_units(units, manifest.hidden_size, stored, "fp8", 1, layout)
        weights = unpack_expert_units(
            units[0], manifest.moe_intermediate_size, manifest.hidden_size, "fp8", layout
        )
        return (
            torch.from_numpy(dequantise(weights.gate, weights.gate_scales)),
            torch.from_numpy(dequantise(weights.up, weights.up_scales)),
        )


@contextmanager
def recording(layers: Sequence[DecoderLayer], record: Record) -> Iterator[None]:
    """Has the experts of these layers recorded, until the end of the block."""
    blocks = [layer.mlp for layer in layers if isinstance(layer.mlp, MoEBlock)]
    before = [block.experts for block in blocks]
    try:
        for block in blocks:
            block.experts = RecordingExperts(block.experts, record)
        yield
    finally:
        for block, experts in zip(blocks, before, strict=True):
            block.experts = experts


def calibrate(
    model: CausalLM,
    draft_layer: MTPLayer | None,
    passages: Sequence[Passage],
    gate_up: GateUp,
    importance: Importance,
    progress: Callable[[str, float, float], None] = lambda name, done, total: None,
) -> None:
    """Adds what the experts of a model see of passages.

    Args:
        model: On a CPU, its experts ready for a step of all tokens.
        draft_layer: The layer that guesses, whose experts are recorded, too.
        passages: With their replies.
        gate_up: The experts' matrices.
        importance: What is added to.
        progress: Called with what is done, the work done and the work in all.
    """
    layers = [*model.layers, *([] if draft_layer is None else [draft_layer.layer])]
    total = float(sum(isinstance(layer.mlp, MoEBlock) for layer in layers))
    done = 0

    def record(layer: int, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> None:
        nonlocal done
        name = f"layer {layer}"
        importance.add(
            layer, x, topk_ids, topk_weights, gate_up, lambda share: progress(name, done + share, total)
        )
        done += 1

    longest = max(len(each.token_ids) for each in passages)
    room = len(passages) * longest
    with recording(layers, record):
        rows = [list(each.token_ids) for each in passages]
        ids = torch.tensor([token for row in rows for token in row])
        hidden = model.forward(ids, _side_by_side(rows, longest), model.new_kv_cache(room))
        if draft_layer is None:
            return
        # Row by row the hidden state of a token, and the token behind it, which the last one has not.
        parts = torch.split(hidden, [len(row) for row in rows])
        behind = [row[1:] for row in rows if len(row) > 1]
        states = torch.cat([part[:-1] for part, row in zip(parts, rows, strict=True) if len(row) > 1])
        draft_layer.forward(
            states,
            torch.tensor([token for row in behind for token in row]),
            _side_by_side(behind, longest),
            draft_layer.new_kv_cache(room),
        )


def cut(passages: Sequence[Passage], most_tokens: int, most_in_a_row: int) -> list[Passage]:
    """Passages from all over a list with so many tokens in all, at most; longer ones are cut, and the last.

    Raises:
        ConfigError: There is room for no two tokens.
    """
    if most_tokens < 2:
        raise ConfigError("tokens", most_tokens, "2 at least")
    sizes = [len(each.token_ids) for each in passages]
    chosen: list[Passage] = []
    room = most_tokens
    for passage in passages[:: max(1, sum(sizes) // most_tokens)]:
        if room < 2:
            break
        ids = passage.token_ids[: min(room, most_in_a_row)]
        if len(ids) < 2:
            continue
        chosen.append(Passage(ids, 1, 1))
        room -= len(ids)
    if not chosen:
        raise ConfigError("prompts", InWords("no prompt of two tokens"), "one at least")
    return chosen


def _side_by_side(rows: Sequence[Sequence[int]], longest: int) -> list[SequenceStep]:
    """Contexts that begin together, each in a page of its own."""
    steps, first = [], 0
    for number, row in enumerate(rows):
        steps.append(SequenceStep.of(first, 0, len(row), np.array([number], np.int32), longest))
        first += len(row)
    return steps
