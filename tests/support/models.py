"""A converted model with native experts, and the comparison of its logits with reference ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from duckllm.cluster import open_cluster
from duckllm.cluster.address import Address
from duckllm.config import ClusterConfig
from duckllm.engine.engine import Engine
from duckllm.layers.step import SequenceStep
from duckllm.models.causal_lm import CausalLM
from duckllm.models.registry import load_config, load_model
from duckllm.moe.dispatch import RemoteExperts
from duckllm.moe.executor import ExpertExecutor
from duckllm.moe.local import LocalExperts
from duckllm.moe.placement import plan_workers
from duckllm.sampling_params import SamplingParams
from duckllm.transport.transport import Transport
from duckllm.weights.host_tensors import HostTensors
from duckllm.weights.manifest import Manifest

TOLERANCE = 2e-3


def build_model(folder: Path, experts: ExpertExecutor | None = None, max_tokens: int = 512) -> CausalLM:
    """The host model of a converted folder; experts run in this process unless given."""
    experts = experts or LocalExperts(Manifest.load(folder), max_step_tokens=max_tokens)
    return load_model(load_config(folder), HostTensors(folder), experts, max_tokens=max_tokens)


def all_logits(model: CausalLM, token_ids: list[int], step_tokens: int, first: int = 0) -> torch.Tensor:
    """Logits at every position from ``first`` on, computed ``step_tokens`` at a time through the KV cache."""
    cache = model.new_kv_cache(len(token_ids))
    # Whatever is read before it is written shows.
    for layer in cache:
        for tensor in layer:
            tensor.fill_(torch.nan)
    tokens = torch.tensor(token_ids)
    return torch.cat(
        [
            model.compute_logits(
                model.forward(chunk, [SequenceStep.of(0, start, len(chunk))], cache)[max(0, first - start) :]
            )
            for start, chunk in zip(
                range(0, len(token_ids), step_tokens), tokens.split(step_tokens), strict=True
            )
        ]
    )


def difference(logits: torch.Tensor, reference: torch.Tensor) -> float:
    """The largest absolute difference; the reference must be worth comparing with."""
    assert logits.shape == reference.shape
    assert reference.std() > 1, "logits near zero would agree with anything"
    return float((logits - reference).abs().max())


def greedy(engine: Engine, token_ids: list[int], num_tokens: int, *, ignore_eos: bool = True) -> list[int]:
    return greedy_replies(engine, [token_ids], num_tokens, ignore_eos=ignore_eos)[0]


def greedy_replies(
    engine: Engine, prompts: Sequence[list[int]], num_tokens: int, *, ignore_eos: bool = True
) -> list[list[int]]:
    """One for each prompt; computed together, as far as the engine does."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=ignore_eos)
    requests = [engine.new_request(prompt, params) for prompt in prompts]
    for request in requests:
        engine.add(request)
    return [list(engine.run(request)) for request in requests]


def step_sizes(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the number of tokens of each step."""
    sizes: list[int] = []
    forward = model.forward_lanes

    def counting(lanes: list[tuple[torch.Tensor, object]], *rest: object) -> torch.Tensor:
        sizes.append(sum(len(token_ids) for token_ids, _ in lanes))
        return forward(lanes, *rest)

    monkeypatch.setattr(model, "forward_lanes", counting)
    return sizes


@contextmanager
def remote_experts(
    folder: Path, workers: int | Sequence[Address], wire_dtype: str = "f32", max_step_tokens: int = 512
) -> Iterator[RemoteExperts]:
    """Experts on worker processes: so many that are started here, or those at addresses."""
    manifest = Manifest.load(folder)
    if isinstance(workers, int):
        places: dict[str, Any] = {"workers": workers}
    else:
        places = {"addresses": tuple(map(str, workers))}
    config = ClusterConfig(**places, wire_dtype=wire_dtype, max_step_tokens=max_step_tokens)
    with ExitStack() as stack:
        cluster = stack.enter_context(open_cluster(config))
        plans = plan_workers(
            manifest, config.num_workers, max_step_tokens=max_step_tokens, wire_dtype=wire_dtype
        )
        transport = Transport(
            cluster.connect(plans),
            manifest.hidden_size,
            manifest.num_experts_per_tok,
            max_step_tokens=max_step_tokens,
            wire_dtype=wire_dtype,
        )
        yield RemoteExperts(stack.enter_context(transport))
