"""A loaded model's experts exchanged for ones that round no activations: what a format's weights alone cost.

Called by ``duckllm quality --exact``. Knows where a model has its experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from duckllm.config import available_cores
from duckllm.models.causal_lm import MoEBlock
from duckllm.moe.local import LocalExperts
from duckllm.weights.manifest import Manifest

if TYPE_CHECKING:
    from duckllm import LLM


def with_exact_experts(llm: LLM, manifest: Manifest) -> LLM:
    """The same LLM, its experts computed in this process from float32 activations, slowly.

    Args:
        llm: One whose experts are in this process.
        manifest: Its model.
    """
    exact = LocalExperts(manifest, num_threads=available_cores(), activations="f32")
    model, draft = llm.host_model()
    for layer in [*model.layers, *([] if draft is None else [draft.layer])]:
        if isinstance(layer.mlp, MoEBlock):
            layer.mlp.experts = exact
    return llm
