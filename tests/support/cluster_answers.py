"""What ``/cluster`` may say, for tests of the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def cluster_answer(
    workers: int = 2, layers: int = 3, lost: Sequence[int] = (), generated: int = 100, uptime_s: float = 60.0
) -> dict[str, Any]:
    """An answer in which every number can be told from every other."""

    def worker(index: int) -> dict[str, Any]:
        return {
            "index": index,
            "address": f"10.0.0.{11 + index}:7411",
            "isa": "avx2",
            "threads": 16,
            "stripes": 8 + index,
            "share": 1 / workers,
            "weights_bytes": 2**30 + index * 2**28,
            "weight_format": "fp9",
            "connection": "tcp",
            "is_lost": index in lost,
            "num_losses": int(index in lost),
            "compute_us": 200.0 + index,
            "round_trip_us": 300.0 + index,
        }

    return {
        "model": {"id": "demo", "context_length": 2048, "weight_format": "fp9"},
        "host": {
            "memory_bytes": {"weight_bytes": 2**31, "cache_bytes": 2**29, "something_new_bytes": 3},
            "isa": "avx512",
        },
        "workers": [worker(index) for index in range(workers)],
        "layers": list(range(1, 1 + layers)),
        "compute_us": [[100.0 * layer + index for index in range(workers)] for layer in range(1, 1 + layers)],
        "engine": {
            "num_steps": 50,
            "num_prompt_tokens": 400,
            "num_generated_tokens": generated,
            "num_draft_tokens": 10,
            "num_accepted_tokens": 8,
            "window_steps": 20,
            "step_s": 0.05,
            "step_parts_s": {"attention_s": 0.01, "wait_s": 0.03, "something_new_s": 0.01},
            "prefill_tokens_per_s": 210.0,
            "decode_tokens_per_s": 18.4,
            "acceptance": 0.8,
            "time_to_first_token_p50_s": 0.84,
            "time_to_first_token_p99_s": 4.1,
            "inter_token_p50_s": None,
            "inter_token_p99_s": None,
        },
        "requests": {"running": 2, "waiting": 1},
        "uptime_s": uptime_s,
    }
