"""What ``duckllm plan`` says of a plan: figures for scripts, and sentences and tables for people.

Called by :mod:`duckllm.cli.plan`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from duckllm.config import show_size

if TYPE_CHECKING:
    from duckllm.engine.cache_size import HostMemory
    from duckllm.plan import ClusterPlan, HostPlan


def facts_of(path: str, plan: ClusterPlan) -> dict[str, Any]:
    """The plan as plain values."""
    host = plan.host.memory
    return {
        "model": path,
        "format": plan.weight_format,
        "layer_formats": {
            form.format: count
            for form, count in sorted(plan.sizes.formats.items(), key=lambda item: -item[1])
        },
        "max_model_len": host.max_model_len,
        "drafts": plan.drafts,
        "fits": plan.fits,
        "expert_bytes_per_token": plan.read_bytes,
        "step_us": plan.step_us,
        "host_us": plan.host_us,
        "ceiling_tokens_per_s": plan.ceiling_tokens_per_s,
        "host": {
            "device": host.device.title,
            "weight_bytes": host.weight_bytes,
            "bytes_per_token": plan.host_read_bytes,
            "kv_cache_bytes": host.cache_bytes,
            "kv_cache_tokens": host.cache_tokens,
            "need_bytes": host.need_bytes,
            "have_bytes": plan.host.have_bytes,
            "vram": _facts_of_vram(host) if host.device.is_cuda else None,
        },
        "workers": [
            {
                "worker": node.worker,
                "node": node.node.name,
                "stripes": node.num_stripes,
                "share": node.share,
                "weight_bytes": node.weight_bytes,
                "buffer_bytes": node.buffer_bytes,
                "need_bytes": node.need_bytes,
                "have_bytes": node.have_bytes,
                "read_gb_per_s": node.node.gb_per_s,
                "isa": node.node.isa,
                "round_trip_us": node.node.round_trip_us,
                "step_us": node.step_us,
                "keeps_weights": node.node.keeps_weights,
                "fits": node.fits,
            }
            for node in plan.nodes
        ],
    }


def _facts_of_vram(host: HostMemory) -> dict[str, int]:
    return {
        "weight_bytes": host.weight_bytes,
        "workspace_bytes": host.workspace_bytes,
        "kv_cache_bytes": host.cache_bytes,
        "need_bytes": host.vram_bytes,
        "have_bytes": host.device.free_bytes,
        "total_bytes": host.device.total_bytes,
    }


def describe(facts: dict[str, Any], plan: ClusterPlan) -> str:
    """The plan for people."""
    from duckllm.moe.fit import table_of, words_on_repeats

    count = len(plan.nodes)
    lines = [
        f"{facts['model']}: experts in {facts['layers']}; {show_size(facts['expert_bytes_per_token'])} of "
        f"them read for each token, over {count} {'node' if count == 1 else 'nodes'}; "
        "each node's system keeps 1 GiB of its memory",
        "",
        table_of(plan.nodes),
        "",
        *_describe_host(plan.host),
        *_describe_speed(plan),
        *_describe_starts(plan),
    ]
    repeats = words_on_repeats([node.node.isa for node in plan.nodes])
    return "\n".join([*lines, repeats] if repeats else lines)


def _describe_host(host: HostPlan) -> list[str]:
    """What the host's memory goes to, and its GPU's, if it has one, in a table."""
    memory = host.memory
    have = "" if host.have_bytes is None else f"; it has {show_size(host.have_bytes)}"
    cache = f"KV cache for {memory.cache_tokens} tokens"
    if not memory.device.is_cuda:
        return [
            f"host: {show_size(memory.need_bytes)}: {show_size(memory.weight_bytes)} of weights, "
            f"{show_size(memory.cache_bytes)} of {cache}, the process itself{have}"
        ]
    rows = [
        ("weights", memory.weight_bytes),
        (cache, memory.cache_bytes),
        ("graphs and workspaces", memory.workspace_bytes),
        ("together", memory.vram_bytes),
        ("free before", memory.device.free_bytes),
    ]
    first = f"VRAM of {memory.device.title}"
    width = max(len(first), *(len(name) for name, _ in rows))
    return [
        first,
        *(f"{name:<{width}}  {show_size(num_bytes):>12}" for name, num_bytes in rows),
        "",
        f"host: {show_size(memory.need_bytes)}: {show_size(memory.embedding_bytes)} of weights, "
        f"the process itself{have}",
    ]


def _describe_starts(plan: ClusterPlan) -> list[str]:
    """What has to come over the network at each start, where workers keep nothing on a disk."""
    without = [node for node in plan.nodes if not node.node.keeps_weights]
    if not without:
        return []
    names = ", ".join(node.node.name for node in without)
    num_bytes = sum(node.weight_bytes for node in without)
    return [
        f"no disk keeps weights at {names}: unless it has a copy or reaches the host's folder, its slice "
        f"comes over the network at each start of its worker, {show_size(num_bytes)} in all: at least "
        f"{num_bytes * 8 / 1e9:.0f} s through 1 Gbit/s of the host"
    ]


def _describe_speed(plan: ClusterPlan) -> list[str]:
    """At most how fast one answer comes, where the speeds of the nodes are known."""
    if plan.step_us is None or plan.ceiling_tokens_per_s is None:
        if plan.host_us is None:
            return []
        own = f"the host's own weights, {show_size(plan.host_read_bytes)}, take {plan.host_us:.1f} us"
        return [f"{own} of a token; --speed tells the nodes' part"]
    trip = "" if any(node.node.round_trip_us for node in plan.nodes) else ", without round trips"
    if plan.host_us is None:
        host = "without the host's own time, which --host-speed tells"
    else:
        host = f"and the host's own weights, {show_size(plan.host_read_bytes)}, {plan.host_us:.1f} us"
    return [
        f"at most {plan.ceiling_tokens_per_s:.1f} tokens a second of one answer: "
        f"{plan.num_moe_layers} layers of {plan.step_us:.1f} us{trip}, {host}"
    ]
