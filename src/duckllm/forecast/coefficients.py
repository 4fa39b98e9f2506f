"""What software makes of hardware: shares of ceilings that it reaches, and times that no bytes explain.

Used by :mod:`duckllm.forecast.step`; :mod:`duckllm.forecast.measure` makes them of measurements on this
machine. Every default has its source in ``sources``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Coefficients:
    """One software on one kind of host.

    Args:
        name: For people.
        expert_share: Share of a node's read bandwidth that its expert kernel reaches, by instruction set and
            format: ``"avx2 fp9"``.
        expert_flop_share: Share of a node's multiply-adds that it reaches where rows share experts.
        node_step_us: What a node's step takes beside its bytes.
        dense_share: Share of the host's bandwidth that its own dense layers reach.
        cache_share: Likewise attention over the KV cache.
        attention_flop_share: Share of a CPU host's multiply-adds that attention reaches; 0 leaves them out,
            as a card's tensor cores are never the bound of a decode step.
        layer_us: The host's time in a layer beside bytes, for one row.
        layer_row_us: Likewise for each row more.
        step_us: The host's time in a step beside layers, for one request: scheduling, sampling, text.
        step_request_us: Likewise for each request more.
        exchange_us: Sending a layer's step to one worker and taking its answer, beside bytes and compute,
            where no round trip is known of the node.
        worker_us: The host's time for a worker's message, half for sending and half for taking the answer,
            where its port takes no longer.
        hides_shared: Whether the shared expert is computed while the workers compute.
        sources: Where each figure is from, by field.
    """

    name: str
    expert_share: Mapping[str, float]
    expert_flop_share: float
    node_step_us: float
    dense_share: float
    cache_share: float
    attention_flop_share: float
    layer_us: float
    layer_row_us: float
    step_us: float
    step_request_us: float
    exchange_us: float
    worker_us: float
    hides_shared: bool = True
    sources: Mapping[str, str] = field(default_factory=dict)

    def share_of(self, isa: str, weight_format: str) -> float:
        """The expert kernel's share of a plain read there; the least one that is known for others."""
        # All formats of 4 bits are computed alike.
        name = weight_format if weight_format in ("fp9", "fp8", "int8") else "int4"
        known = self.expert_share.get(f"{isa.partition('+')[0]} {name}")
        return min(self.expert_share.values()) if known is None else known


_KERNELS = {
    "expert_share": "docs/performance.md, section 6: AVX-512 0.75 to 0.83 and AVX2 0.74 to 0.84 on Zen 5, "
    "AVX2 0.81 on Zen 3; no other CPU with AVX2 was measured. int8 and int4: 0.76 "
    "and 0.80 with AVX-512, 0.56 to 0.73 with AVX2, on a loaded Zen 5. Scalar: an estimate",
    "expert_flop_share": "the same: 512 rows, 0.53 to 0.66",
    "node_step_us": "the same: 3 to 10 us a step of one expert beside its bytes, and starting threads",
}
_SHARES = {
    "avx512 fp9": 0.81,
    "avx512 fp8": 0.78,
    "avx512 int8": 0.76,
    "avx512 int4": 0.80,
    "avx2 fp9": 0.80,
    "avx2 fp8": 0.78,
    "avx2 int8": 0.70,
    "avx2 int4": 0.70,
    "scalar fp9": 0.10,
    "scalar fp8": 0.10,
    "scalar int8": 0.10,
    "scalar int4": 0.10,
}

ON_CPU = Coefficients(
    "duckllm, host on its CPU",
    expert_share=_SHARES,
    expert_flop_share=0.55,
    node_step_us=8.0,
    dense_share=0.90,
    cache_share=0.5,
    attention_flop_share=0.3,
    layer_us=90.0,
    layer_row_us=25.0,
    step_us=80.0,
    step_request_us=50.0,
    exchange_us=50.0,
    worker_us=8.0,
    sources={
        **_KERNELS,
        "dense_share": "README: 0.88 to 0.93 of a plain read",
        "cache_share": "an estimate: its own kernels read rows of pages; --measure says what it is here",
        "attention_flop_share": "an estimate, as above",
        "layer_us": "docs/performance.md, section 15: 1.06, 2.94 and 13.7 ms a step of 1, 8 and 64 requests "
        "of the demo model on an EPYC (Zen 5), shared out by estimate; --measure says what it is here",
        "layer_row_us": "the same",
        "step_us": "the same",
        "step_request_us": "the same",
        "exchange_us": "docs/performance.md, section 14: 48 us over TCP, blocking, one worker",
        "worker_us": "two system calls of 4 us, as is published of the 32-node installation; an estimate",
    },
)

ON_CARD = Coefficients(
    "duckllm, host on a card",
    expert_share=_SHARES,
    expert_flop_share=0.55,
    node_step_us=8.0,
    dense_share=0.70,
    cache_share=0.12,
    attention_flop_share=0.0,
    layer_us=50.0,
    layer_row_us=4.0,
    step_us=150.0,
    step_request_us=20.0,
    exchange_us=60.0,
    worker_us=8.0,
    sources={
        **_KERNELS,
        "dense_share": "FP8 layers on an H200: 0.785 of the copy bandwidth, which is 0.886 of the paper's "
        "(benchmarks/results/h200.jsonl, gpu/fp8_linear)",
        "cache_share": "gpu/mla_decode of the same file, 8192 tokens: 0.12 of the floor",
        "layer_us": "an estimate: 19 us of attention at least (gpu/mla_decode) and a dozen small kernels",
        "layer_row_us": "the same file: 23 us for two rows",
        "step_us": "an estimate",
        "step_request_us": "an estimate",
        "exchange_us": "13 us between a captured graph and the host (gpu/round_trip), and 48 us of TCP",
        "worker_us": "two system calls of 4 us, as is published of the 32-node installation; an estimate",
    },
)

# What the author of the 32-node installation published of their own software, as far as it goes.
REFERENCE = Coefficients(
    "the reference's software",
    expert_share={"avx2 fp9": 20.7 / 35.0},
    expert_flop_share=0.2,
    node_step_us=95.0,
    dense_share=0.70,
    cache_share=0.12,
    attention_flop_share=0.0,
    layer_us=236.0,
    layer_row_us=0.0,
    step_us=0.0,
    step_request_us=0.0,
    exchange_us=0.0,
    worker_us=0.0,
    hides_shared=False,
    sources={
        "expert_share": "published: 13.96 Gparam/s with 4 experts, 17.30 with 20, of 9 bits: 20.7 GB/s and "
        "95 us a step; 20.3 GB/s with many is published too, 35 read",
        "node_step_us": "the same two figures",
        "dense_share": "taken as ours",
        "layer_us": "published: 77 ms a token, 47.8 of them waiting for nodes, before the runtime was "
        "flattened; what is left of 29.2 ms without the weights' bytes, over 61 layers",
        "exchange_us": "full synchronisation; what the wire takes is counted, nothing else",
    },
)
