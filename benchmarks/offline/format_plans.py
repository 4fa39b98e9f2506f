"""How many small PCs three large models need in each format, and how fast one reply would be.

    python benchmarks/offline/format_plans.py

DeepSeek-V3.2, Kimi-K2 and Qwen3-235B-A22B on Intel N100 of 16, 32 and 64 GiB at 2.5 Gbit/s, the host a
desktop with an RTX 5090 at 25 Gbit/s, bf16 on the wire, 1024 tokens of context, one request, no guesses.
Nothing is measured here: arithmetic on docs/planning.md's assumptions, whose table it prints. Ends with one
JSON line.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from duckllm.bench.machine import commit
from duckllm.device import CPU
from duckllm.errors import ConfigError
from duckllm.forecast.coefficients import ON_CARD
from duckllm.forecast.flock import Flock, read_flock
from duckllm.forecast.load import ModelLoad, model_load
from duckllm.forecast.step import Setting, predict
from duckllm.models.inspection import Inspection, inspect_model
from duckllm.models.registry import load_config
from duckllm.plan import ClusterPlan, fewest_nodes

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MODELS = ("DeepSeek-V3.2", "Kimi-K2-Instruct", "Qwen3-235B-A22B")
FORMATS = ("fp9", "fp8", "int8", "int4", "int4-zero")
MEMORY_GIB = (16, 32, 64)
CONTEXT = 1024


def planned(model: Inspection, weight_format: str, memory_gib: int) -> ClusterPlan | None:
    """The fewest nodes of a size; None where no number of them holds the model."""
    try:
        return fewest_nodes(
            model,
            memory_gib << 30,
            weight_format=weight_format,
            max_model_len=8192,
            max_step_tokens=256,
            drafts=model.num_mtp_layers > 0,
            device=CPU,
        )
    except ConfigError:
        return None


def tokens_per_s(load: ModelLoad, flock: Flock, plan: ClusterPlan) -> float:
    """Of one reply on the nodes of a plan."""
    stripes = [node.num_stripes for node in plan.nodes]
    nodes = tuple(replace(flock.nodes[0], name=str(number)) for number in range(len(stripes)))
    setting = Setting(plan.weight_format, context=CONTEXT, x_bytes=2, reply_bytes=2)
    return predict(load, flock.with_nodes(nodes), stripes, ON_CARD, setting).tokens_per_s


def main() -> None:
    flock = read_flock(EXAMPLES / "flocks" / "32-n100.toml")
    flock = replace(flock, host=replace(flock.host, link_gbit_per_s=25.0))
    print("| model | format | experts, GiB | " + " | ".join(f"{size} GiB" for size in MEMORY_GIB) + " |")
    print("|---|---|---|" + "---|" * len(MEMORY_GIB))
    rows = []
    for name in MODELS:
        folder = EXAMPLES / "configs" / name
        model = inspect_model(folder)
        load = model_load(model, load_config(folder), on_card=True)
        for weight_format in FORMATS:
            num_bytes = model.expert_bytes(weight_format, drafts=model.num_mtp_layers > 0)
            cells, nodes = [], {}
            for size in MEMORY_GIB:
                plan = planned(model, weight_format, size)
                if plan is None:
                    cells.append("-")
                    continue
                speed = tokens_per_s(load, flock, plan)
                nodes[size] = {"nodes": len(plan.nodes), "tokens_per_s": speed}
                cells.append(f"{len(plan.nodes)}, {speed:.1f} tok/s")
            print(f"| {name} | {weight_format} | {num_bytes / 2**30:.0f} | {' | '.join(cells)} |")
            rows.append(
                {"model": name, "format": weight_format, "expert_bytes": num_bytes, "by_memory_gib": nodes}
            )
    print(json.dumps({"benchmark": "offline/format_plans", "commit": commit(), "rows": rows}))


if __name__ == "__main__":
    main()
