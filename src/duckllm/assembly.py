"""The parts of an LLM, put together: its workers, the experts, the host's model, the engine.

Called by :mod:`duckllm.llm`, which has checked what the user gave. Workers are started and greeted
without torch; while they prepare, the host's half is imported, and torch with it, and loaded.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from duckllm.assembly_experts import (
    ClusterInfo,
    ExpertsView,
    experts_here,
    experts_on_workers,
    warn_of_turns,
    with_layers,
)
from duckllm.cluster import open_cluster
from duckllm.config import ClusterConfig, StepConfig, available_cores, show_size, total_memory_bytes
from duckllm.device import CPU, Device, find_device
from duckllm.engine.cache_size import HostMemory, host_needs, num_pages, plan_host
from duckllm.errors import CheckpointError, ConfigError, InWords
from duckllm.models.registry import ModelFolder, load_config, load_draft_layer, load_model
from duckllm.moe.fit import ExpertSizes, check_fits, nodes_of, place_slices, plan_nodes
from duckllm.moe.placement import Slice, plan_slices, plan_workers
from duckllm.prefill import check_prefill, select_isa
from duckllm.weights.formats import LayerFormat, is_lossless

if TYPE_CHECKING:
    from duckllm.cluster.base import Cluster
    from duckllm.cluster.connect import WorkerInfo
    from duckllm.engine.engine import Engine
    from duckllm.text import Tokenizer
    from duckllm.weights.host_tensors import HostTensors
    from duckllm.weights.manifest import Manifest

# Host weights a token reads, in elements, above which a second torch thread pays for its start.
_ONE_THREAD_ELEMENTS = 30_000_000


@dataclass(frozen=True)
class CacheLimits:
    """Room for the KV cache, as :class:`duckllm.LLM` was asked for it.

    Args:
        available_bytes: Memory that can be had, before anything of the model is loaded.
        cache_bytes: Of its pool; None decides by what is available.
        memory_bytes: Of the memory tier.
        disk_dir: Folder of the disk tier; None for none.
        disk_bytes: Of the disk tier; None for the default.
    """

    available_bytes: int
    cache_bytes: int | None = None
    memory_bytes: int = 0
    disk_dir: Path | None = None
    disk_bytes: int | None = None

    @property
    def has_sizes(self) -> bool:
        """Whether a size was asked for that may turn out not to be possible."""
        return self.cache_bytes is not None or self.memory_bytes > 0 or self.disk_bytes is not None


def drafts(model: ModelFolder, step_config: StepConfig) -> bool:
    """Whether tokens are guessed ahead.

    Raises:
        ConfigError: It is asked for, and the checkpoint has no layer that does it.
    """
    if step_config.draft in ("on", "stateless") and not model.has_draft_layer:
        expected = "auto or off, as the checkpoint has no layer of multi-token prediction"
        raise ConfigError("draft", InWords(step_config.draft), expected)
    return step_config.draft != "off" and model.has_draft_layer


def choose_device(asked: str, plan: Callable[[Device], HostMemory]) -> Device:
    """The device that computes the host's part: for ``"auto"`` a card, where there is one that holds it.

    Args:
        asked: As for :class:`duckllm.LLM`.
        plan: What memory goes to with a card.

    Raises:
        ConfigError: A card was asked for that is not there, cannot be used, or has too little VRAM; or other
            memory is too little.
    """
    found = find_device(asked)
    if found.is_cuda:
        try:
            plan(found)
        except ConfigError as error:
            if asked != "auto" or error.field != "VRAM":
                raise
            return replace(CPU, why=f"VRAM: got {error.got}, expected {error.expected}")
    return found


def asked_slices(model: ModelFolder, config: ClusterConfig) -> tuple[Slice, ...]:
    """Each worker's slice as far as ``config`` alone says; none where it does not say how many there are.

    Raises:
        ConfigError: More workers than stripes, or shares that are none.
    """
    if not config.num_workers:
        return ()
    asked = None if isinstance(config.shares, str) else config.shares
    return plan_slices(model.manifest.num_stripes, config.num_workers, asked)


def begin_workers(
    stack: ExitStack, model: ModelFolder, config: ClusterConfig, step_config: StepConfig
) -> Cluster:
    """Starts or finds the workers and gives each its plan; ``stack`` lets go of them.

    Raises:
        ConfigError: More workers than stripes, a malformed address, or bf16 on a CPU that lacks it.
        ClusterError: A worker does not start, cannot be reached or refuses.
    """
    if config.kind == "local":
        check_prefill(config.prefill, select_isa())
        warn_of_turns("threads_per_worker", config.threads_per_worker)
    slices = asked_slices(model, config)  # before the processes start
    num_layers = model.num_layers + drafts(model, step_config)
    cluster = stack.enter_context(open_cluster(config))
    if config.kind != "local":  # workers started here are all alike, and their memory is this machine's
        slices = place_experts(model.manifest, cluster.greet(), config, num_layers)
    plans = plan_workers(
        model.manifest,
        cluster.num_workers,
        max_step_tokens=config.max_step_tokens,
        wire_dtype=config.wire_dtype,
        reply_dtype=config.reply_dtype,
        weight_format=config.weight_format,
        slices=slices,
        num_layers=num_layers,
    )
    cluster.begin(plans)
    return cluster


def place_experts(
    manifest: Manifest, workers: Sequence[WorkerInfo], config: ClusterConfig, num_layers: int
) -> tuple[Slice, ...]:
    """Each worker's slice, by what the workers say of themselves.

    Raises:
        PlacementError: They have too little memory.
        ConfigError: More workers than stripes, or shares that are none.
    """
    sizes = ExpertSizes(
        manifest.hidden_size,
        manifest.moe_intermediate_size,
        manifest.num_experts,
        manifest.num_experts_per_tok,
        manifest.num_stripes,
        _counted_formats(manifest, config, num_layers),
        config.max_step_tokens,
    )
    nodes = nodes_of(workers)
    slices = place_slices(sizes, nodes, config.shares)
    check_fits(sizes, plan_nodes(sizes, nodes, slices))
    return slices


def _counted_formats(manifest: Manifest, config: ClusterConfig, num_layers: int) -> dict[LayerFormat, int]:
    """How many of the workers' layers will be computed in each format, as far as it is known."""
    asked = config.weight_format
    counted: Counter[LayerFormat] = Counter()
    for layer in manifest.expert_layers:
        form = manifest.layer_format(layer)
        if layer < num_layers:
            copied = is_lossless(asked) and is_lossless(form.format)
            counted[LayerFormat(asked, form.scale_layout) if copied else form] += 1
    return dict(counted)


def plan_memory(
    model: ModelFolder,
    num_workers_here: int | None,
    config: ClusterConfig,
    step_config: StepConfig,
    *,
    device: Device,
    max_model_len: int | None,
    cache_limits: CacheLimits,
    max_num_seqs: int,
) -> HostMemory:
    """What this machine's memory goes to, from the headers of the model's files; imports torch.

    Args:
        model: The converted model.
        num_workers_here: Workers that share this machine's memory; None computes the experts in this process.
        config: The cluster's configuration.
        step_config: What steps do beside the necessary.
        device: What computes the host's part.
        max_model_len: As for :class:`duckllm.LLM`.
        cache_limits: Memory and disk of the KV cache.
        max_num_seqs: As for :class:`duckllm.LLM`.

    Raises:
        ConfigError: A size cannot be: weights and one context are more than memory holds, or a part of the KV
            cache has room for less than its least.
    """
    from duckllm.models.inspection import inspect_model

    has_experts = num_workers_here != 0
    memory = plan_host(
        host_needs(
            inspect_model(model.path),
            drafts=drafts(model, step_config),
            # Where Ray puts some of the workers here, their slices are counted as all of the experts.
            weight_format=_format_of(model, config) if has_experts else None,
            num_workers=num_workers_here or 0,
            tier_bytes=cache_limits.memory_bytes,
            available_bytes=cache_limits.available_bytes,
            total_bytes=total_memory_bytes(),
            device=device,
            max_step_tokens=config.max_step_tokens,
        ),
        max_model_len=max_model_len,
        cache_bytes=cache_limits.cache_bytes,
        max_num_seqs=max_num_seqs,
    )
    _check_disk_budget(cache_limits, memory)
    return memory


def build_engine(
    stack: ExitStack,
    model: ModelFolder,
    cluster: Cluster | None,
    config: ClusterConfig,
    step_config: StepConfig,
    *,
    device: Device,
    max_model_len: int | None,
    cache_limits: CacheLimits,
    max_num_seqs: int,
    host_threads: int,
    tokenizer: Tokenizer,
) -> tuple[Engine, ExpertsView, HostMemory]:
    """The engine with the host's model, loaded, what can be asked about the experts, and what memory goes to.

    Args:
        stack: Closes the connections to the workers.
        model: The converted model.
        cluster: Workers from :func:`begin_workers`; None computes the experts in this process.
        config: The cluster's configuration.
        step_config: What steps do beside the necessary.
        device: What computes the host's part.
        max_model_len: As for :class:`duckllm.LLM`.
        cache_limits: Memory and disk of the KV cache.
        max_num_seqs: As for :class:`duckllm.LLM`.
        host_threads: As for :class:`duckllm.LLM`.
        tokenizer: The model's; says which tokens end a reply.

    Raises:
        ConfigError: ``max_model_len`` is more than the model's longest context, or weights and one context
            are more than memory holds.
        ModelError: The model cannot be used, by this process or by a worker.
        ClusterError: A worker is gone, or takes too long to prepare.
    """
    import torch

    from duckllm.engine.engine import Drafting, Engine
    from duckllm.engine.tiers import DEFAULT_DISK_BYTES, TierSettings
    from duckllm.weights.host_tensors import HostTensors

    parsed = load_config(model.path)
    if tokenizer.max_token_id >= parsed.vocab_size:
        raise CheckpointError(
            f"tokenizer: got token id {tokenizer.max_token_id} in {model.path}, "
            f"expected ids below vocab_size, {parsed.vocab_size}, of its config.json"
        )
    num_here = 0 if cluster is None else cluster.num_here
    memory = plan_memory(
        model,
        None if cluster is None else num_here,
        config,
        step_config,
        device=device,
        max_model_len=max_model_len,
        cache_limits=cache_limits,
        max_num_seqs=max_num_seqs,
    )
    length = memory.max_model_len
    tensors = HostTensors(model.path)
    on = torch.device(device.name)
    warn_of_turns("host_threads", host_threads)
    torch.set_num_threads(host_threads or _host_threads(tensors))
    if cluster is None:
        experts, view = experts_here(model.manifest, config, on)
    else:
        experts, view = experts_on_workers(stack, model.manifest, cluster, config, on)
    guesses = drafts(model, step_config)
    view = replace(view, info=partial(with_layers, view.info, model.manifest, model.num_layers + guesses))
    loaded = load_model(parsed, tensors, experts, max_tokens=length, device=on)
    drafting = None
    if guesses:
        is_stateless = step_config.draft == "stateless"
        drafting = Drafting(
            load_draft_layer(loaded, tensors, experts),
            step_config.draft_tokens,
            "on" if is_stateless else step_config.draft,
            is_stateless,
        )
    # Experts in this process are computed when they are waited for: there is nothing to overlap.
    lanes = "off" if cluster is None and step_config.lanes == "auto" else step_config.lanes
    engine = Engine(
        loaded,
        max_model_len=length,
        max_step_tokens=config.max_step_tokens,
        cache_tokens=memory.cache_tokens,
        max_num_seqs=max_num_seqs,
        eos_token_ids=frozenset(tokenizer.eos_token_ids),
        drafting=drafting,
        lanes=lanes,
        tiers=TierSettings(
            model.manifest.model_hash,
            _arithmetic(config, step_config, view.info()),
            cache_limits.memory_bytes,
            cache_limits.disk_dir,
            DEFAULT_DISK_BYTES if cache_limits.disk_bytes is None else cache_limits.disk_bytes,
        ),
    )
    stack.callback(engine.kv_cache.shut)
    return engine, view, memory


def _check_disk_budget(limits: CacheLimits, memory: HostMemory) -> None:
    """Refuses, before weights are loaded, room on the disk for less than a page's content."""
    page_bytes = memory.cache_bytes // num_pages(memory.cache_tokens)
    if limits.disk_bytes is not None and limits.disk_bytes < page_bytes:
        least = show_size(page_bytes, up=True)
        raise ConfigError("kv_disk_bytes", show_size(limits.disk_bytes), f"more than {least}, one page")


def _format_of(model: ModelFolder, config: ClusterConfig) -> str:
    """The format that the experts are computed in, as far as it is known before they are loaded."""
    return model.manifest.format if config.weight_format == "auto" else config.weight_format


def _arithmetic(config: ClusterConfig, step_config: StepConfig, info: ClusterInfo) -> str:
    """What rounds activations or leaves the drafting layer's rows out: pages that differ are strangers."""
    prefill = "bf16" if any("+" in isa for isa in info.isas) else "f32"
    stateless = ", stateless drafts" if step_config.draft == "stateless" else ""
    return f"wire {config.wire_dtype}, replies {config.reply_dtype}, prefill {prefill}{stateless}"


def _host_threads(tensors: HostTensors) -> int:
    """Threads for the host's layers: all cores, as workers started here wait while these compute."""
    num_elements = sum(
        math.prod(tensors.shape(name)) for name in tensors.names() if "embed_tokens" not in name
    )
    if num_elements < _ONE_THREAD_ELEMENTS:
        return 1
    return available_cores()
