"""The step loop: many requests' tokens through the model until their replies end.

Called by :class:`duckllm.LLM`; calls the scheduler, the model and the requests. Knows token ids, no text
and no workers.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count, islice, pairwise

import torch

from duckllm.engine.kv_cache import KvCache
from duckllm.engine.request import Request
from duckllm.engine.scheduler import Scheduled, Scheduler
from duckllm.engine.speculative import Computed, Drafter
from duckllm.engine.stats import Choices, EngineStats, StepWatch
from duckllm.engine.tiers import TierSettings
from duckllm.errors import RequestError
from duckllm.layers.step import LayerCache, SequenceStep
from duckllm.models.causal_lm import CausalLM
from duckllm.models.mtp import MTPLayer
from duckllm.outputs import EngineState
from duckllm.sampling_params import SamplingParams
from duckllm.text import Tokenizer
from duckllm.text.grammar import GrammarTable

# Rows whose logits are in memory at once for a prompt's log probabilities: 33 MB of 129280 tokens.
_LOGPROB_ROWS = 64


@dataclass(frozen=True)
class Drafting:
    """How tokens are guessed ahead.

    Args:
        layer: Guesses.
        num_tokens: Most guesses at once.
        policy: ``"on"``, or ``"auto"`` for where it pays.
        is_stateless: Whether the layer sees nothing of what was before.
    """

    layer: MTPLayer
    num_tokens: int = 1
    policy: str = "auto"
    is_stateless: bool = False


class Engine:
    """Runs requests, many at a time.

    Args:
        model: The host's part of the model.
        max_model_len: Most tokens of prompt and reply together.
        max_step_tokens: Most tokens of one step; a longer prompt takes several.
        cache_tokens: Tokens that the KV cache holds, over all requests; at least ``max_model_len``.
        max_num_seqs: Most requests that are computed at a time; others wait.
        eos_token_ids: Tokens that end a reply.
        drafting: How tokens are guessed ahead; None for not at all.
        lanes: Whether a step's rows are computed in two lanes, the one's attention while the other's experts
            are computed: ``"on"``, ``"off"``, or ``"auto"`` for where it pays.
        tiers: Where pages of the KV cache go when their room is needed; None for nowhere.

    Threading:
        One thread at a time; a step that meets another one is refused. :meth:`abort` may come at any moment,
        as it is what the end of a stream calls that nobody holds any more, and so may :meth:`new_request`.
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
        drafting: Drafting | None = None,
        lanes: str = "off",
        tiers: TierSettings | None = None,
    ) -> None:
        self.model = model
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids

        def new_tensors(max_tokens: int) -> list[LayerCache]:
            own = model.new_kv_cache(max_tokens)
            return own if drafting is None else [*own, drafting.layer.new_kv_cache(max_tokens)]

        self.kv_cache = KvCache(new_tensors, cache_tokens, tiers)
        self.drafter: Drafter | None = None
        if drafting is not None:
            self.drafter = Drafter(
                drafting.layer,
                self.kv_cache,
                drafting.num_tokens,
                max_step_tokens,
                is_stateless=drafting.is_stateless,
            )
        self.scheduler = Scheduler(
            self.kv_cache, max_step_tokens, max_num_seqs, drafting.num_tokens if drafting else 0
        )
        self.choices = Choices(drafting.policy if drafting else "off", lanes)
        self.stats = EngineStats()
        self.grammar_table: GrammarTable | None = None  # until a reply needs one
        self._grammar_lock = threading.Lock()
        self._request_numbers = count()
        self._busy_thread: int | None = None  # where a step or an abortion is under way
        self._step_thread: int | None = None  # where the last one was
        self._leaving: deque[Request] = deque()
        # Whose reply grows, and how many tokens it had before: an interruption may leave it half way.
        self._growing: tuple[Request, int] | None = None
        self._scheduled: list[Scheduled] = []  # the last step

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

        Any thread may make one while another computes: a large schema takes some tenths of a second, and the
        first one of all as long again for the vocabulary. Arguments and errors as of :class:`Request`.
        """
        return Request(
            str(next(self._request_numbers)) if request_id is None else request_id,
            prompt_token_ids,
            params,
            vocab_size=self.model.config.vocab_size,
            max_model_len=self.max_model_len,
            eos_token_ids=self.eos_token_ids,
            tokenizer=tokenizer,
            index=index,
            grammar_table=self._table(tokenizer) if params.structured_outputs is not None else None,
        )

    def state(self) -> EngineState:
        """What is under way. Any thread may ask, while a step is computed too."""
        scheduler = self.scheduler
        return EngineState(scheduler.num_running, scheduler.num_waiting, self.kv_cache.occupancy())

    def _table(self, tokenizer: Tokenizer | None) -> GrammarTable:
        """The tokens as grammars need them, made once."""
        with self._grammar_lock:
            if self.grammar_table is None:
                assert tokenizer is not None
                vocab_size = self.model.config.vocab_size
                self.grammar_table = GrammarTable.of(tokenizer, vocab_size, self.eos_token_ids)
            return self.grammar_table

    def add(self, request: Request) -> None:
        """Lets the next steps compute the request, beside others."""
        while request in self._leaving:
            self._leaving.remove(request)
        self.scheduler.add(request)

    def abort(self, request: Request) -> None:
        """Takes the request out of the next steps; it may be run again and goes on where it was.

        In the midst of a step, or in a thread that computes none, as where the garbage collector ends a
        stream, it waits for the next one.
        """
        self._leaving.append(request)
        here = threading.get_ident()
        if self._busy_thread is None and self._step_thread in (None, here):
            try:
                self._busy_thread = here
                self._let_go()
            finally:
                self._busy_thread = None

    def _let_go(self) -> None:
        """Takes out who has left."""
        while self._leaving:
            request = self._leaving[0]
            self.scheduler.remove(request)
            if self.drafter is not None:
                self.drafter.forget(request)
            self._leaving.popleft()

    def _settle(self) -> None:
        """Makes a reply whole that an interruption left half way: what the step chose is chosen again."""
        if self._growing is not None:
            request, num_tokens = self._growing
            request.rewind(num_tokens)
            self._growing = None

    def run(self, request: Request) -> Iterator[int]:
        """The tokens of the reply, as they come. Whoever was added or is run meanwhile comes forward as well.

        After an exception, KeyboardInterrupt included, the request may be run on and others may be started.

        Raises:
            WorkerLostError: A worker went away, or did not answer in time.
        """
        try:
            while True:
                if self._busy_thread is None:
                    self._settle()
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
        """Computes the next tokens of the requests whose turn it is, and samples where all are computed.

        After an exception the step may be repeated: what it had not noted is computed once more.

        Raises:
            RequestError: Another step is under way.
        """
        if self._busy_thread is not None:
            raise RequestError("this model is computing another step, expected one thread at a time")
        try:
            self._busy_thread = self._step_thread = threading.get_ident()
            self._let_go()
            self._settle()
            self._step()
            self._let_go()
        finally:
            self._busy_thread = None

    def concerned(self) -> list[Request]:
        """Whom the exception that ended the last step concerns.

        The request whose reply was being taken on, or else all of which the step computed something.
        """
        return [each.request for each in self._scheduled] if self._growing is None else [self._growing[0]]

    def _step(self) -> None:
        self._scheduled = []
        self._scheduled = step = self.scheduler.schedule()
        if not step:
            return
        watch = StepWatch(step, self.choices, self.scheduler.max_step_tokens)
        hidden = self.model.forward_lanes(self._lanes(step, watch), self.kv_cache.tensors, watch.times)
        computed = self._sample(step, hidden, watch)
        if self.drafter is not None:
            self.drafter.advance(computed, guess=watch.guesses)
            watch.times.lap("draft_s")
        for each in step:
            self.scheduler.finish(each, self._num_ready(each.request))
        watch.finish(self.stats)

    def _lanes(
        self, step: Sequence[Scheduled], watch: StepWatch
    ) -> list[tuple[torch.Tensor, list[SequenceStep]]]:
        """The step's rows, with the contexts that they belong to; in two lanes cut in the middle."""
        num_rows = sum(len(each.token_ids) for each in step)
        cuts = [0, num_rows // 2, num_rows] if watch.uses_lanes else [0, num_rows]
        return [self._rows(step, first, stop) for first, stop in pairwise(cuts)]

    def _rows(
        self, step: Sequence[Scheduled], first: int, stop: int
    ) -> tuple[torch.Tensor, list[SequenceStep]]:
        """Rows [first, stop) of the step."""
        token_ids: list[int] = []
        sequences = []
        row = 0
        for each in step:
            tokens = each.token_ids
            begin, end = max(first - row, 0), min(stop - row, len(tokens))
            row += len(tokens)
            if begin < end:
                position = each.start + begin
                sequences.append(self.kv_cache.sequence(each.table, len(token_ids), position, end - begin))
                token_ids += tokens[begin:end]
        return torch.tensor(token_ids), sequences

    def _sample(self, step: Sequence[Scheduled], hidden: torch.Tensor, watch: StepWatch) -> list[Computed]:
        """Takes replies on where all their tokens are computed; what was computed of each request."""
        firsts = list(accumulate((len(each.token_ids) for each in step), initial=0))
        for each, first in zip(step, firsts, strict=False):
            self._note_prompt(each, hidden[first : first + each.stop - each.start])
        # The last token's logits and those of each guess behind it.
        rows = [
            range(last - len(each.drafts) - 1, last) if each.ends else range(0)
            for each, last in zip(step, firsts[1:], strict=True)
        ]
        wanted = [row for each in rows for row in each]
        logits = iter(self.model.compute_logits(hidden, wanted) if wanted else ())
        watch.times.lap("head_s")
        computed = []
        for each, first, own in zip(step, firsts, rows, strict=False):
            request, num_rows = each.request, each.stop - each.start
            if own:
                self._growing = request, len(request.token_ids)
                num_new = request.verify(each.drafts, list(islice(logits, len(own))))
                self._growing = None
                num_rows += num_new - 1
            request.num_computed_tokens = each.start + num_rows
            computed.append(Computed(request, each.table, each.start, hidden[first : first + num_rows]))
        watch.times.lap("sampling_s")
        return computed

    def _note_prompt(self, each: Scheduled, hidden: torch.Tensor) -> None:
        """Log probabilities of the prompt's tokens behind those that were computed, where they are asked for.

        Shapes:
            hidden: [n, H], of tokens [start, stop) of the request
        """
        request = each.request
        rows = request.logprob_rows(each.start, each.stop)
        self._growing = (request, len(request.token_ids)) if rows else None
        for first in range(rows.start, rows.stop, _LOGPROB_ROWS):
            part = hidden[first - each.start : min(first + _LOGPROB_ROWS, rows.stop) - each.start]
            request.add_prompt_logprobs(self.model.compute_logits(part))
        self._growing = None

    def _num_ready(self, request: Request) -> int:
        return request.num_computed_tokens if self.drafter is None else self.drafter.num_ready(request)
