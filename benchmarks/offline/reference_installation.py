"""What the forecast says of the published installation of 32 small PCs, with its software's limits and ours.

    python benchmarks/offline/reference_installation.py

DeepSeek-V3.2 on one RTX 5090 and 32 Intel N100, 89 % of guesses right: its author published 16.17 tokens a
second of one reply, and before the runtime was flattened 77 ms a token, 47.8 of them waiting for nodes.
Nothing is measured here: arithmetic on published figures and on docs/planning.md's assumptions; the tables of
that page are made of it. Ends with one JSON line.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from duckllm.bench.machine import commit
from duckllm.forecast.coefficients import ON_CARD, REFERENCE, Coefficients
from duckllm.forecast.flock import Flock, read_flock
from duckllm.forecast.load import ModelLoad, model_load
from duckllm.forecast.step import EXCHANGE, EXPERTS, WIRE, Prediction, Setting, predict
from duckllm.models.inspection import inspect_model
from duckllm.models.registry import load_config

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ACCEPTANCE, CONTEXT, TARGET = 0.89, 1024, 32.0
PUBLISHED = {"tokens_per_s": 16.171, "token_ms": 77.0, "wait_ms": 47.8}
SHARES = (0.58, 0.70, 0.78, 0.90, 1.00)


def installation() -> tuple[ModelLoad, Flock, list[int]]:
    """The model's load, the hardware, and each node's stripes."""
    folder = EXAMPLES / "configs" / "DeepSeek-V3.2"
    load = model_load(inspect_model(folder), load_config(folder), on_card=True)
    flock = read_flock(EXAMPLES / "flocks" / "32-n100.toml")
    return load, flock, [load.num_stripes // len(flock.nodes)] * len(flock.nodes)


def predictions() -> dict[str, Prediction]:
    """Every row of the table of docs/planning.md, in its order."""
    load, flock, stripes = installation()

    def made(coefficients: Coefficients, setting: Setting, on: Flock = flock) -> Prediction:
        return predict(load, on, stripes, coefficients, replace(setting, context=CONTEXT))

    plain = Setting("fp9", x_bytes=2, reply_bytes=2)
    guessing = replace(plain, drafts=1, acceptance=ACCEPTANCE)
    ours = replace(guessing, weight_format="fp8", lanes=True)
    ten = flock.with_nodes(tuple(replace(node, link_gbit_per_s=10.0) for node in flock.nodes))
    return {
        "theirs, without guesses": made(REFERENCE, plain),
        "theirs": made(REFERENCE, guessing),
        "ours in their way: fp9, no lanes": made(ON_CARD, guessing),
        "the same in fp8": made(ON_CARD, replace(guessing, weight_format="fp8")),
        "fp9, lanes": made(ON_CARD, replace(guessing, lanes=True)),
        "fp8, lanes": made(ON_CARD, ours),
        "fp8, lanes, f32 on the wire": made(ON_CARD, replace(ours, x_bytes=4, reply_bytes=4)),
        "fp8, lanes, multicast": made(ON_CARD, replace(ours, multicast=True)),
        "fp8, lanes, nodes' links of 10 Gbit/s": made(ON_CARD, ours, ten),
        "fp8, lanes, two replies together": made(ON_CARD, replace(ours, batch=2)),
        "fp8, lanes, eight replies together": made(ON_CARD, replace(ours, batch=8)),
    }


def by_share() -> dict[float, Prediction]:
    """Ours in fp8 with lanes, by the share of a node's read bandwidth that the expert kernel reaches."""
    load, flock, stripes = installation()
    setting = Setting("fp8", 1, CONTEXT, True, 1, ACCEPTANCE, 2, 2)
    return {
        share: predict(load, flock, stripes, replace(ON_CARD, expert_share={"avx2 fp8": share}), setting)
        for share in SHARES
    }


def most_exchange_us() -> float:
    """With how slow a hand-over one reply of ours still comes at the target, microseconds a layer."""
    load, flock, stripes = installation()
    setting = Setting("fp8", 1, CONTEXT, True, 1, ACCEPTANCE, 2, 2)

    def speed(exchange_us: float) -> float:
        coefficients = replace(ON_CARD, exchange_us=exchange_us)
        return predict(load, flock, stripes, coefficients, setting).tokens_per_s

    return _last(speed, TARGET)


def _last(function: Callable[[float], float], least: float) -> float:
    """The largest argument below 1000 at which a falling function is at least that; 0 where none is."""
    low, high = 0.0, 1000.0
    if function(low) < least:
        return 0.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) >= least else (low, middle)
    return low


def main() -> None:
    rows = predictions()
    theirs, plain = rows["theirs"], rows["theirs, without guesses"]
    waiting_ms = sum(plain.parts_us[name] for name in (EXPERTS, WIRE, EXCHANGE)) / 1e3
    print("before the flattened runtime, without guesses   published  predicted")
    for name, published, predicted in (
        ("a token, ms", PUBLISHED["token_ms"], plain.step_us / 1e3),
        ("of it waiting for nodes", PUBLISHED["wait_ms"], waiting_ms),
        ("tokens a second with guesses, flattened", PUBLISHED["tokens_per_s"], theirs.tokens_per_s),
    ):
        print(f"{name:48s}{published:9.2f}{predicted:11.2f}")
    print(f"\n{'':42s}{'step, ms':>9s}{'experts':>9s}{'tok/s':>8s}{'bottleneck':>16s}")
    for name, made in rows.items():
        print(
            f"{name:42s}{made.step_us / 1e3:9.1f}{made.parts_us[EXPERTS] / 1e3:9.1f}{made.tokens_per_s:8.1f}"
            f"{made.bottleneck:>16s}"
        )
    print("\nfp8, lanes, by the kernel's share of 35 GB/s")
    for share, made in by_share().items():
        print(f"{share:6.2f}{made.tokens_per_s:8.1f} tok/s")
    most_us = most_exchange_us()
    print(f"above {TARGET:.0f} tok/s where sending, taking and waking cost {most_us:.0f} us a layer at most")
    summary = {
        "benchmark": "offline/reference_installation",
        "commit": commit(),
        "published": PUBLISHED,
        "tokens_per_s": {name: round(made.tokens_per_s, 2) for name, made in rows.items()},
        "by_share": {str(share): round(made.tokens_per_s, 2) for share, made in by_share().items()},
        "most_exchange_us": round(most_us),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
