"""The step loop: a request's tokens through the model until its reply ends.

Called by :class:`duckllm.LLM`; calls the model, the sampler and the KV cache. Knows token ids, no text and no
workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from duckllm.engine.kv_cache import KvCache
from duckllm.engine.request import Request
from duckllm.models.causal_lm import CausalLM
from duckllm.sampling_params import SamplingParams


class Engine:
    """Runs requests, one at a time.

    Args:
        model: The host's part of the model.
        max_model_len: Most tokens of prompt and reply together.
        max_step_tokens: Most tokens of one step; a longer prompt takes several.
        eos_token_ids: Tokens that end a reply.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        max_model_len: int,
        max_step_tokens: int,
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.model = model
        self.max_model_len, self.max_step_tokens = max_model_len, max_step_tokens
        self.eos_token_ids = eos_token_ids
        self.kv_cache = KvCache(model, max_model_len)
        self._num_requests = 0

    def new_request(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> Request:
        """A request, not yet run. Raises as :class:`Request`."""
        request_id = str(self._num_requests)
        self._num_requests += 1
        return Request(
            request_id,
            prompt_token_ids,
            params,
            vocab_size=self.model.config.vocab_size,
            max_model_len=self.max_model_len,
            eos_token_ids=self.eos_token_ids,
        )

    def run(self, request: Request) -> Iterator[int]:
        """The tokens of the reply, as they come.

        Several may be under way: each step of one that was interrupted by another computes its context anew.
        After an exception, KeyboardInterrupt included, the request may be run on and others may be started.

        Raises:
            WorkerLostError: A worker went away, or did not answer in time.
        """
        while request.finish_reason is None:
            token_id = self.step(request)
            if token_id is not None:
                yield token_id

    def step(self, request: Request) -> int | None:
        """Computes the request's next tokens; the reply's next one, or None while the prompt is not done."""
        self.kv_cache.claim(request)
        # A step interrupted after the model had run is repeated: there is always a token to compute.
        start = min(request.num_computed_tokens, len(request.token_ids) - 1)
        scheduled = request.token_ids[start : start + self.max_step_tokens]
        hidden = self.model.forward(torch.tensor(scheduled), start, self.kv_cache.tensors)
        request.num_computed_tokens = start + len(scheduled)
        if request.num_computed_tokens < len(request.token_ids):
            return None
        token_id = request.sampler.sample(self.model.compute_logits(hidden[-1:])[0])
        request.append(token_id)
        return token_id
