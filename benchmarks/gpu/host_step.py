"""A decode step of a whole model's host part on a GPU, with experts that answer zeros at once.

    python benchmarks/gpu/host_step.py
    python benchmarks/gpu/host_step.py --model Qwen3-30B-A3B --context 1000 --trace step.json

All layers at full size, with random weights made on the card. What remains is the host's own time: its
weights' bytes, the kernels between them, and one exchange with the host's memory for each layer of experts.
Beside a step's time: the bytes of all weights on the card over the bandwidth of a copy in the same run, which
is the floor, and the time of a graph of the same exchanges alone. One JSON line at the end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from pathlib import Path

import torch
from fp8_linear import copy_bytes_per_us
from random_host import host_model, weight_bytes

from duckllm.bench.machine import commit
from duckllm.layers.step import SequenceStep
from duckllm.models.causal_lm import CausalLM

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"
PAGE = 16


class Decoder:
    """Steps of some contexts of equal length.

    Args:
        model: The model.
        context: Tokens of each context.
    """

    def __init__(self, model: CausalLM, context: int, most_rows: int) -> None:
        self.model, self.context = model, context
        self.cache = model.new_kv_cache(most_rows * (context + PAGE))
        for layer in self.cache:
            for tensor in layer:
                tensor.normal_()
        num_pages = -(-context // PAGE)
        pages = torch.randperm(len(self.cache[0][0]) // PAGE).int()
        self.pages = pages[: most_rows * num_pages].view(most_rows, num_pages).numpy()

    def step(self, num_rows: int, num_lanes: int = 1) -> torch.Tensor:
        """Logits of one token of each context."""
        lanes = []
        for rows in torch.arange(num_rows).chunk(num_lanes):
            sequences = [
                SequenceStep.of(number, self.context - 1, 1, self.pages[row], PAGE)
                for number, row in enumerate(rows.tolist())
            ]
            lanes.append((torch.full((len(rows),), 7), sequences))
        hidden = self.model.forward_lanes(lanes, self.cache)
        return self.model.compute_logits(hidden)


def median_us(run: object, rounds: int) -> float:
    """The median time of a call."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()  # type: ignore[operator]
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


def kernel_times(run: object, path: str | None) -> Counter[str]:
    """Microseconds of each kernel in one call, and a trace of it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()  # type: ignore[operator]
        torch.cuda.synchronize()
    if path:
        profile.export_chrome_trace(path)
    times: Counter[str] = Counter()
    for event in profile.events():
        times[event.name] += event.device_time
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="DeepSeek-V3.2", help="a folder of examples/configs")
    parser.add_argument("--context", type=int, nargs="+", default=[1000, 8000])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--trace", help="where a trace of one step goes, for Perfetto")
    arguments = parser.parse_args()

    bandwidth = copy_bytes_per_us()
    torch.cuda.empty_cache()
    start = time.perf_counter()
    model = host_model(CONFIGS / arguments.model, max(arguments.context) + PAGE)
    num_bytes = weight_bytes(model)
    card = torch.cuda.get_device_name()
    floor_us = num_bytes / bandwidth
    num_layers = sum(model.config.is_moe_layer)
    print(
        f"{card}, {arguments.model}: {num_bytes / 1e9:.2f} GB of weights on the card, made in "
        f"{time.perf_counter() - start:.0f} s; {bandwidth / 1e6:.2f} TB/s copied, floor {floor_us:.0f} us; "
        f"{num_layers} layers of experts; commit {commit()}",
        flush=True,
    )
    result: dict[str, object] = {
        **{"benchmark": "gpu/host_step", "device": card, "commit": commit(), "model": arguments.model},
        **{"weight_bytes": num_bytes, "floor_us": round(floor_us)},
    }
    for context in arguments.context:
        decoder = Decoder(model, context, max(arguments.rows))
        for num_rows in arguments.rows:
            for num_lanes in (1, 2) if num_rows > 1 else (1,):

                def run(rows: int = num_rows, lanes: int = num_lanes) -> torch.Tensor:
                    return decoder.step(rows, lanes)  # noqa: B023

                first, second = run(), run()
                assert first.isfinite().all(), "the logits are not finite"
                assert torch.equal(first, second), "two steps of the same rows differ"
                took = median_us(run, arguments.rounds)
                what = f"context {context}, {num_rows} rows, {num_lanes} lanes"
                print(
                    f"  {what}: {took:.0f} us a step, {took / floor_us:.2f} x the floor, "
                    f"{(took - floor_us) / num_layers:.1f} us over it a layer",
                    flush=True,
                )
                result[what] = {"us": round(took), "of_floor": round(took / floor_us, 3)}
        if context == arguments.context[0]:
            times = kernel_times(lambda: decoder.step(1), arguments.trace)  # noqa: B023
            print("  kernels of a step of one row, us:")
            for name, total in times.most_common(24):
                print(f"    {total:8.0f}  {name[:90]}")
            result["kernels_us"] = {name[:40]: round(total) for name, total in times.most_common(24)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
