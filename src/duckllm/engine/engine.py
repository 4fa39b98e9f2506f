"""The step loop: many requests' tokens through the model until their replies end.

Called by :class:`duckllm.LLM`; calls the scheduler, the model and the requests. Knows token ids, no text
and no workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from duckllm.engine.kv_cache import KvCache
from duckllm.engine.request import Request
from duckllm.engine.scheduler import Scheduler
from duckllm.models.causal_lm import CausalLM
from duckllm.sampling_params import SamplingParams
from duckllm.text import Tokenizer


class Engine:
    """Runs requests, many at a time.

    Args:
        model: The host's part of the model.
        max_model_len: Most tokens of prompt and reply together.
        max_step_tokens: Most tokens of one step; a longer prompt takes several.
        cache_tokens: Tokens that the KV cache holds, over all requests; at least ``max_model_len``.
        max_num_seqs: Most requests that are computed at a time; others wait.
        eos_token_ids: Tokens that end a reply.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        max_model_len: int,
        max_step_tokens: int,
        cache_tokens: int,
        max_num_seqs: int = 64,
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.model = model
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.kv_cache = KvCache(model, cache_tokens)
        self.scheduler = Scheduler(self.kv_cache, max_step_tokens, max_num_seqs)
        self._num_requests = 0

    def new_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None = None,
        *,
        request_id: str | None = None,
        index: int = 0,
    ) -> Request:
        """A request, not yet run; with the first one's ``request_id``, another reply to its prompt.

        Arguments and errors as of :class:`Request`.
        """
        if request_id is None:
            request_id = str(self._num_requests)
            self._num_requests += 1
        return Request(
            request_id,
            prompt_token_ids,
            params,
            vocab_size=self.model.config.vocab_size,
            max_model_len=self.max_model_len,
            eos_token_ids=self.eos_token_ids,
            tokenizer=tokenizer,
            index=index,
        )

    def add(self, request: Request) -> None:
        """Lets the next steps compute the request, beside others."""
        self.scheduler.add(request)

    def abort(self, request: Request) -> None:
        """Takes the request out of the next steps; it may be run again and goes on where it was."""
        self.scheduler.remove(request)

    def run(self, request: Request) -> Iterator[int]:
        """The tokens of the reply, as they come. Whoever was added or is run meanwhile comes forward as well.

        After an exception, KeyboardInterrupt included, the request may be run on and others may be started.

        Raises:
            WorkerLostError: A worker went away, or did not answer in time.
        """
        try:
            while True:
                while request.num_given_tokens < len(request.token_ids):
                    request.num_given_tokens += 1
                    yield request.token_ids[request.num_given_tokens - 1]
                if request.finish_reason is not None:
                    return
                self.add(request)
                self.step()
        finally:
            self.abort(request)

    def step(self) -> None:
        """Computes the next tokens of the requests whose turn it is, and samples where all are computed."""
        scheduled = self.scheduler.schedule()
        token_ids: list[int] = []
        sequences = []
        for each in scheduled:
            sequences.append(
                self.kv_cache.sequence(each.table, len(token_ids), each.start, each.stop - each.start)
            )
            token_ids += each.request.token_ids[each.start : each.stop]
        hidden = self.model.forward(torch.tensor(token_ids), sequences, self.kv_cache.tensors)
        ends = [each.ends for each in scheduled]
        last_rows = [sequence.rows.stop - 1 for sequence, end in zip(sequences, ends, strict=True) if end]
        logits = iter(self.model.compute_logits(hidden[last_rows]) if last_rows else ())
        for each, end in zip(scheduled, ends, strict=True):
            request = each.request
            self.scheduler.finish(each)
            if end:
                request.advance(next(logits))
            if request.finish_reason is not None:
                self.scheduler.remove(request)
