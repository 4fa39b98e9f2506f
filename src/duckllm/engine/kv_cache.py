"""The KV cache: allocated once, held by one request at a time.

Called by the engine. The layout inside belongs to the attention layers; here is how large it is and whose.
"""

from __future__ import annotations

import os

from duckllm.engine.request import Request
from duckllm.errors import ConfigError
from duckllm.models.causal_lm import CausalLM
from duckllm.models.config import ModelConfig

DEFAULT_BUDGET_BYTES = 2 << 30


def resolve_max_model_len(asked: int | None, config: ModelConfig, element_bytes: int = 4) -> int:
    """``asked`` once it is known to be possible; for None the longest, or what 2 GiB of KV cache hold.

    Raises:
        ConfigError: More than the model's longest context, or than this machine's memory holds.
    """
    token_bytes = config.cache_elements_per_token * element_bytes
    longest = config.max_position_embeddings
    if asked is None:
        return max(2, min(longest, DEFAULT_BUDGET_BYTES // token_bytes))
    if asked > longest:
        raise ConfigError("max_model_len", asked, f"at most {longest}, the model's longest context")
    memory_bytes = total_memory_bytes()
    if asked * token_bytes > memory_bytes:
        raise ConfigError(
            "max_model_len",
            asked,
            f"at most {memory_bytes // token_bytes}, what the {memory_bytes} bytes of this machine's memory "
            f"hold at {token_bytes} bytes a token",
        )
    return asked


def total_memory_bytes() -> int:
    """Bytes of memory that this machine has in all."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class KvCache:
    """Memory for the tokens of one context.

    Args:
        model: Says what a token needs.
        max_tokens: Most tokens.
    """

    def __init__(self, model: CausalLM, max_tokens: int) -> None:
        self.tensors = model.new_kv_cache(max_tokens)
        self.max_tokens = max_tokens
        self._owner: Request | None = None

    def claim(self, request: Request) -> None:
        """Makes the cache this request's; one that comes back after another computes its tokens anew."""
        if self._owner is not request:
            request.num_computed_tokens = 0
            self._owner = request
