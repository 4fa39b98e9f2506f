"""duck-llm: large mixture-of-experts models, attention on one host, routed experts on cheap CPU machines."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from duckllm.conversation import Conversation
    from duckllm.llm import LLM
    from duckllm.outputs import CompletionOutput, RequestMetrics, RequestOutput, StreamOutput
    from duckllm.sampling_params import SamplingParams, StructuredOutputsParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "CompletionOutput",
    "Conversation",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StreamOutput",
    "StructuredOutputsParams",
    "__version__",
]

# Loaded on first use, so that a worker, which needs none of them, starts without torch.
_LAZY = {
    "LLM": "duckllm.llm",
    "CompletionOutput": "duckllm.outputs",
    "Conversation": "duckllm.conversation",
    "RequestMetrics": "duckllm.outputs",
    "RequestOutput": "duckllm.outputs",
    "SamplingParams": "duckllm.sampling_params",
    "StreamOutput": "duckllm.outputs",
    "StructuredOutputsParams": "duckllm.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
