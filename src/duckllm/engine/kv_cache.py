"""The KV cache: allocated once, held by one request at a time.

Called by the engine. The layout inside belongs to the attention layers; here is how large it is and whose.
"""

from __future__ import annotations

from duckllm.engine.request import Request
from duckllm.models.deepseek_v32 import DeepseekV32Config, DeepseekV32ForCausalLM

DEFAULT_BUDGET_BYTES = 2 << 30


def default_max_model_len(config: DeepseekV32Config, element_bytes: int = 4) -> int:
    """The model's longest context, or what 2 GiB of KV cache hold if that is less."""
    tokens = DEFAULT_BUDGET_BYTES // (config.cache_elements_per_token * element_bytes)
    return max(2, min(config.max_position_embeddings, tokens))


class KvCache:
    """Memory for the tokens of one context.

    Args:
        model: Says what a token needs.
        max_tokens: Most tokens.
    """

    def __init__(self, model: DeepseekV32ForCausalLM, max_tokens: int) -> None:
        self.tensors = model.new_kv_cache(max_tokens)
        self.max_tokens = max_tokens
        self._owner: Request | None = None

    def claim(self, request: Request) -> None:
        """Makes the cache this request's; one that comes back after another computes its tokens anew."""
        if self._owner is not request:
            request.num_computed_tokens = 0
            self._owner = request
