"""Drafts: guesses at the next tokens of a reply, which the model confirms or rejects in one step.

Called by the engine after each step; calls the multi-token-prediction (MTP) layer. A guess never changes a
token: the engine computes what the model itself says behind each guessed token, and takes the guess only
where the model's own choice is the same (:mod:`duckllm.engine.sampler` says why that loses little).

The layer has a KV cache of its own, in the same pages: the row of position p is made of the model's hidden
state of token p - 1 and of token p, so that it depends on the tokens up to p alone, as the model's own rows
do, and pages are shared by what their tokens are. It begins with position 1. Confirmed tokens only are
appended; rows of guessed ones lie behind them and are written anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from duckllm.engine.kv_cache import PAGE_TOKENS, KvCache, PageTable
from duckllm.engine.request import Request
from duckllm.layers.step import SequenceStep
from duckllm.models.mtp import MTPLayer

FIRST_POSITION = 1


@dataclass(frozen=True)
class Computed:
    """What a step computed of a request, guessed tokens that were rejected left out.

    Args:
        request: The request, with the token that the step chose.
        table: Its pages.
        start: Position of the first token.
        hidden: Their hidden states.

    Shapes:
        hidden: [n, H]
    """

    request: Request
    table: PageTable
    start: int
    hidden: torch.Tensor


@dataclass
class _Rows:
    """Rows for the layer: hidden states, the tokens behind them, and the positions of these.

    ``first`` is the position at which the context begins that they see.
    """

    request: Request
    table: PageTable
    first: int
    start: int
    token_ids: list[int]
    hidden: torch.Tensor

    def cut(self, count: int) -> tuple[_Rows, _Rows]:
        """The first ``count`` rows, and the rest."""
        front, back = self.token_ids[:count], self.token_ids[count:]
        rest = replace(self, start=self.start + count, token_ids=back, hidden=self.hidden[count:])
        return replace(self, token_ids=front, hidden=self.hidden[:count]), rest


class Drafter:
    """Guesses what follows, with the MTP layer of a checkpoint.

    Args:
        layer: The layer.
        kv_cache: Its last tensors are the layer's.
        num_tokens: Most tokens guessed at once: the first by the layer as it was trained, each further one
            from the layer's own hidden state in place of the model's.
        max_step_tokens: Most tokens of one step.
        is_stateless: Guess without what was before, from one hidden state and one token alone. Few guesses
            are right then; it is here to be compared with.
    """

    def __init__(
        self,
        layer: MTPLayer,
        kv_cache: KvCache,
        num_tokens: int,
        max_step_tokens: int,
        *,
        is_stateless: bool = False,
    ) -> None:
        self.layer, self.kv_cache = layer, kv_cache
        self.num_tokens, self.max_step_tokens = num_tokens, max_step_tokens
        self.is_stateless = is_stateless
        # Of each request, hidden states whose next token the layer has not seen, and the first one's place.
        self._kept: dict[Request, tuple[int, torch.Tensor]] = {}

    def forget(self, request: Request) -> None:
        """Lets go of what was kept of a request."""
        self._kept.pop(request, None)

    def num_ready(self, request: Request) -> int:
        """Tokens of a request, the first ones, that are in the model's cache and in the layer's."""
        if self.is_stateless or request not in self._kept:
            return request.num_computed_tokens
        first, _ = self._kept[request]
        return min(request.num_computed_tokens, first + 1)

    @torch.inference_mode()
    def advance(self, computed: Sequence[Computed], *, guess: bool) -> None:
        """Appends what was computed to the layer's cache and, where ``guess``, guesses what follows.

        Without guesses the appending waits until a page's worth of tokens has come, as the layer's weights
        are read once for all of them.

        Raises:
            WorkerLostError: A worker went away, or did not answer in time.
        """
        batch: list[_Rows] = []
        guessers: list[_Rows] = []
        for each in computed:
            request = each.request
            request.draft_token_ids = []
            first, hidden = self._keep(each)
            stop = first + len(hidden)
            has_next = stop == len(request.token_ids) - 1
            guesses = guess and has_next and request.most_drafts(self.num_tokens) > 0
            context = FIRST_POSITION
            if self.is_stateless:
                self.forget(request)
                first, hidden, context = stop - 1, hidden[-1:], stop
            is_due = guesses or (
                not self.is_stateless and (len(hidden) >= PAGE_TOKENS or request.finish_reason is not None)
            )
            if is_due:
                tokens = request.token_ids[first + 1 : stop + 1]
                batch.append(_Rows(request, each.table, context, first + 1, tokens, hidden))
            if guesses:
                guessers.append(batch[-1])
        last = self._run(batch)
        for rows in batch:
            self.forget(rows.request)
        self._guess(guessers, last)

    def _keep(self, computed: Computed) -> tuple[int, torch.Tensor]:
        """What is kept of a request with what was computed now, which replaces what was computed before."""
        first, hidden = self._kept.get(computed.request, (computed.start, computed.hidden[:0]))
        if first <= computed.start <= first + len(hidden):
            kept = first, torch.cat((hidden[: computed.start - first], computed.hidden))
        else:
            kept = computed.start, computed.hidden
        self._kept[computed.request] = kept
        return kept

    def _guess(self, guessers: list[_Rows], last: dict[Request, torch.Tensor]) -> None:
        """Chains guesses: each one's logits, and the layer once more behind it for the next."""
        while guessers:
            hidden = torch.stack([last[rows.request] for rows in guessers])
            going_on = []
            all_logits = self.layer.model.compute_logits(hidden)
            for rows, own, logits in zip(guessers, hidden, all_logits, strict=True):
                request = rows.request
                request.add_draft(logits)
                if len(request.draft_token_ids) < request.most_drafts(self.num_tokens):
                    position = rows.start + len(rows.token_ids)
                    guess = request.draft_token_ids[-1:]
                    going_on.append(_Rows(request, rows.table, rows.first, position, guess, own[None]))
            guessers = going_on
            last = self._run(guessers)

    def _run(self, batch: Iterable[_Rows]) -> dict[Request, torch.Tensor]:
        """The layer's hidden state [H] of each request's last row; steps are filled in order."""
        last: dict[Request, torch.Tensor] = {}
        step: list[_Rows] = []
        for rows in batch:
            rest = rows
            while rest.token_ids:
                room = self.max_step_tokens - sum(len(each.token_ids) for each in step)
                part, rest = rest.cut(room)
                step.append(part)
                if len(part.token_ids) == room:
                    self._run_step(step, last)
                    step = []
        if step:
            self._run_step(step, last)
        return last

    def _run_step(self, step: list[_Rows], last: dict[Request, torch.Tensor]) -> None:
        sequences: list[SequenceStep] = []
        token_ids: list[int] = []
        for rows in step:
            first_row, count = len(token_ids), len(rows.token_ids)
            sequences.append(
                self.kv_cache.sequence(rows.table, first_row, rows.start, count, first=rows.first)
            )
            token_ids += rows.token_ids
        hidden = torch.cat([rows.hidden for rows in step])
        result = self.layer.forward(hidden, torch.tensor(token_ids), sequences, self.kv_cache.tensors[-1])
        for rows, sequence in zip(step, sequences, strict=True):
            last[rows.request] = result[sequence.rows.stop - 1]
