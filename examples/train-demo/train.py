"""Trains the demo model: ``python train.py DATA_FOLDER CHECKPOINT_FOLDER --minutes 22``.

Three phases, by the share of the time that has passed: dense attention; from 75 % on FP8 weights and the
indexer's own loss; from 85 % on sparse attention by the indexer's choice. ``--steps`` gives a number of steps
instead of a time.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from episodes import Episodes
from export import export
from model import Model, ModelConfig, Phase
from torch import Tensor, nn
from torch.utils.data import DataLoader

LEARNING_RATE = 3e-3
WARM_UP_STEPS = 200
PARTS = 4  # parts of a batch: one loader call each, and one backward pass each where the indexer runs
MTP_WEIGHT, BALANCE_WEIGHT = 0.3, 1e-3
BIAS_STEP = 0.003
EXPORT_EVERY_STEPS = 1000


def learning_rate(step: int, progress: float) -> float:
    """Linear warm-up, a plateau until 10 % of the time, then a cosine down to 2 %."""
    warm_up = min(1.0, (step + 1) / WARM_UP_STEPS)
    if progress < 0.1:
        return LEARNING_RATE * warm_up
    cosine = 0.5 * (1 + math.cos(math.pi * (progress - 0.1) / 0.9))
    return LEARNING_RATE * warm_up * (0.98 * cosine + 0.02)


def phase_of(step: int, progress: float) -> Phase:
    """The phase; between 75 and 85 % the indexer runs at every second step."""
    late, sparse = progress > 0.75, progress > 0.85
    return Phase(fake_quantise=late, indexer=late and (sparse or step % 2 == 0), sparse=sparse)


def make_optimizer(model: Model, fused: bool) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices outside the indexer."""
    decayed, plain = [], []
    for name, parameter in model.named_parameters():
        (decayed if parameter.dim() > 1 and "indexer" not in name else plain).append(parameter)
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), fused=fused)


def cross_entropy(head: nn.Linear, hidden: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The weighted loss, and the share of answer tokens that are right."""
    logits = F.linear(hidden, head.weight.to(hidden.dtype)).float()
    loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view_as(weight)
    counted = weight > 0.5
    right = ((logits.argmax(-1) == target) & counted).sum() / counted.sum()
    return (loss * weight).sum() / weight.sum(), right


def train_step(model: Model, ids: Tensor, weights: Tensor, phase: Phase) -> dict[str, float]:
    """Adds one batch's gradients; returns figures of the last part."""
    parts = PARTS if phase.indexer else 1
    figures: dict[str, float] = {}
    for part in range(parts):
        part_ids, part_weights = ids[part::parts], weights[part::parts]
        hidden, draft = model(part_ids[:, :-1], phase)
        loss, right = cross_entropy(model.lm_head, hidden, part_ids[:, 1:], part_weights[:, 1:])
        mtp_loss, mtp_right = cross_entropy(model.lm_head, draft, part_ids[:, 2:], part_weights[:, 2:])
        balance = torch.stack([moe.balance_loss for moe in model.moes()]).sum()
        total = loss + MTP_WEIGHT * mtp_loss + BALANCE_WEIGHT * balance
        index_losses = [block.self_attn.index_loss for block in model.blocks()]
        index_loss = sum(index_losses, torch.zeros((), device=ids.device)) if phase.indexer else None
        if index_loss is not None:
            total = total + index_loss
        (total / parts).backward()
        figures = {
            "loss": loss.item(),
            "right": right.item(),
            "mtp": mtp_loss.item(),
            "mtp_right": mtp_right.item(),
            "index": index_loss.item() if index_loss is not None else 0.0,
        }
    return figures


def move_biases(model: Model) -> None:
    """Makes experts with more than the mean load less likely, and the others more."""
    for moe in model.moes():
        moe.e_score_correction_bias -= BIAS_STEP * torch.sign(moe.load - moe.load.mean())


def batches(arguments: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches on the device, gathered from PARTS calls of the loader."""
    episodes = Episodes(arguments.data, arguments.context, max(1, arguments.batch // PARTS), seed=1)
    loaders = arguments.loaders
    loader = iter(
        DataLoader(episodes, batch_size=None, num_workers=loaders, prefetch_factor=8 if loaders else None)
    )
    while True:
        ids, weights = zip(*itertools.islice(loader, PARTS), strict=True)
        yield tuple(torch.cat(part).to(arguments.device, non_blocking=True) for part in (ids, weights))


def train(arguments: argparse.Namespace, config: ModelConfig) -> None:
    """Trains and exports."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = Model(config).to(arguments.device)
    print(f"{sum(parameter.numel() for parameter in model.parameters()) / 1e6:.1f} M parameters", flush=True)
    optimizer = make_optimizer(model, fused=arguments.device == "cuda")
    tokenizer = arguments.data / "tokenizer"
    start_s = time.monotonic()
    for step, (ids, weights) in enumerate(batches(arguments)):
        elapsed_s = time.monotonic() - start_s
        progress = step / arguments.steps if arguments.steps else elapsed_s / (60 * arguments.minutes)
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, progress)
        figures = train_step(model, ids, weights, phase_of(step, progress))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if progress < 0.8:
            move_biases(model)
        if step % arguments.report_every == 0:
            shown = " ".join(f"{name} {value:.4f}" for name, value in figures.items())
            print(f"step {step} progress {progress:.3f} {shown}", flush=True)
        if step % EXPORT_EVERY_STEPS == EXPORT_EVERY_STEPS - 1:
            export(model, arguments.checkpoint, tokenizer)
    export(model, arguments.checkpoint, tokenizer)
    print(f"exported to {arguments.checkpoint} after {step} steps", flush=True)


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    """The command line; sizes that are not given depend on the device."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="folder that build_data.py wrote")
    parser.add_argument("checkpoint", type=Path, help="folder to write")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, default=22.0, help="how long to train")
    length.add_argument("--steps", type=int, help="train so many steps instead")
    parser.add_argument("--device", choices=("cuda", "cpu"))
    parser.add_argument("--context", type=int, help="tokens in a sequence")
    parser.add_argument("--batch", type=int, help="sequences in a batch")
    parser.add_argument("--loaders", type=int, help="processes that make batches")
    parser.add_argument("--report-every", type=int, default=100, help="steps between lines of figures")
    arguments = parser.parse_args(words)
    arguments.device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    context, batch, loaders = (1024, 64, 14) if arguments.device == "cuda" else (256, 4, 0)
    arguments.context = arguments.context or context
    arguments.batch = arguments.batch or batch
    arguments.loaders = loaders if arguments.loaders is None else arguments.loaders
    return arguments


if __name__ == "__main__":
    train(parse_arguments(), ModelConfig())
