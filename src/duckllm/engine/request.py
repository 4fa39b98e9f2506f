"""One request and how far it has come. Called by the engine; knows token ids, and text through ReplyText."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from duckllm.engine.logprobs import token_logprobs
from duckllm.engine.sampler import Sampler, check_logits
from duckllm.errors import ConfigError, PromptTooLongError, RequestError, show_value
from duckllm.outputs import (
    CachedTokens,
    CompletionOutput,
    Logprob,
    PromptLogprobs,
    RequestMetrics,
    StreamOutput,
    percentile,
)
from duckllm.sampling_params import SamplingParams
from duckllm.text.grammar import Grammar, GrammarTable
from duckllm.text.reply_text import ReplyText
from duckllm.text.tokenizer import Tokenizer


class Request:
    """A prompt and one reply that grows behind it.

    There is no prefill and no decode phase: a request has tokens, of which ``num_computed_tokens`` are in the
    KV cache, and each step computes some of the rest. Whoever has computed the last of them calls
    :meth:`advance`; of the reply, whoever reads it was given the tokens before ``num_given_tokens``.

    Args:
        request_id: Name that the replies of a prompt share with each other alone.
        prompt_token_ids: The prompt.
        params: Sampling.
        vocab_size: Tokens are below this.
        max_model_len: Most tokens of prompt and reply together.
        eos_token_ids: Tokens that end a reply.
        tokenizer: Gives the reply its text, in which stop strings are looked for; without it there is none.
        index: The number of this reply among the n of its prompt.
        grammar_table: The tokens as grammars need them; None where ``params`` has no structured outputs.

    Raises:
        RequestError: The prompt is empty, or has a token outside the vocabulary.
        PromptTooLongError: The prompt leaves no room for a reply.
        ConfigError: The sampling names a token outside the vocabulary, leaves no token to choose, or asks for
            structured outputs that the reply cannot be made to keep to.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        tokenizer: Tokenizer | None = None,
        index: int = 0,
        grammar_table: GrammarTable | None = None,
    ) -> None:
        if not prompt_token_ids:
            raise RequestError("prompt: got no tokens, expected at least 1")
        for token_id in prompt_token_ids:
            if not 0 <= token_id < vocab_size:
                got = show_value(token_id)
                raise RequestError(f"prompt: got token {got}, expected 0 to {vocab_size - 1}")
        if len(prompt_token_ids) >= max_model_len:
            raise PromptTooLongError(len(prompt_token_ids), max_model_len - 1)
        self.request_id, self.index, self.params = request_id, index, params
        self.num_prompt_tokens = len(prompt_token_ids)
        self.token_ids = list(prompt_token_ids)
        self.num_computed_tokens = 0
        self.draft_token_ids: list[int] = []  # guesses at what follows, which the next step checks
        self.num_draft_tokens = self.num_accepted_tokens = 0
        self.cached_tokens: CachedTokens | None = None  # of the prompt, as it was first scheduled
        self.num_given_tokens = self.num_prompt_tokens  # to whoever reads the reply
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.max_model_len, self._eos_token_ids = max_model_len, eos_token_ids
        self._stop_token_ids = frozenset(params.stop_token_ids or ())
        end_token_ids = {
            token_id for token_id in eos_token_ids if token_id < vocab_size
        } | self._stop_token_ids
        _check_vocabulary(params, end_token_ids, vocab_size)
        self._sampler = Sampler(params, self.num_prompt_tokens, end_token_ids=end_token_ids, index=index)
        # It has taken the tokens of the reply; a copy of it takes guesses, which may be wrong.
        self._grammar: Grammar | None = None
        self._grammar_ahead: Grammar | None = None
        self._first_grammar: Grammar | None = None
        if params.structured_outputs is not None:
            assert grammar_table is not None
            self._first_grammar = grammar_table.grammar(params.structured_outputs, end_token_ids)
            self._grammar = self._first_grammar.copy()
        assert tokenizer is not None or not params.stop_strings
        self._tokenizer = tokenizer
        self._reply_text = None if tokenizer is None else ReplyText(tokenizer, params)
        self._texts: list[str] = []  # what each token of the reply lets be shown
        self._logprobs: list[dict[int, Logprob]] = []
        # The replies to a prompt have it in common: the first one gives what is asked of it.
        asks_of_prompt = params.prompt_logprobs is not None and index == 0
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = [None] if asks_of_prompt else None
        self._start_s = 0.0
        self._token_times_s: list[float] = []

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """The prompt."""
        return tuple(self.token_ids[: self.num_prompt_tokens])

    @property
    def output_token_ids(self) -> tuple[int, ...]:
        """The reply so far."""
        return tuple(self.token_ids[self.num_prompt_tokens :])

    @property
    def num_output_tokens(self) -> int:
        """How many tokens the reply has so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """Of each token of the prompt, as far as it is computed; None where nobody asks for them."""
        return None if self._prompt_logprobs is None else tuple(self._prompt_logprobs)

    @property
    def most_cached_tokens(self) -> int:
        """How many of the first tokens need not be computed where they are in a cache.

        What follows a token is known from its own row alone, so that rows that log probabilities are made of
        have to be computed.
        """
        missing = self.logprob_rows(0, self.num_prompt_tokens)
        return missing.start if missing else len(self.token_ids)

    def logprob_rows(self, start: int, stop: int) -> range:
        """The positions in [start, stop) whose logits :meth:`add_prompt_logprobs` waits for."""
        if self._prompt_logprobs is None:
            return range(0)
        return range(max(start, len(self._prompt_logprobs) - 1), min(stop, self.num_prompt_tokens - 1))

    def add_prompt_logprobs(self, logits: torch.Tensor) -> None:
        """Notes the log probabilities of the prompt's next tokens.

        Shapes:
            logits: [n, V] f32, at the first n of :meth:`logprob_rows`; not changed

        Raises:
            ModelError: The logits are broken.
        """
        found, num_top = self._prompt_logprobs, self.params.prompt_logprobs
        assert found is not None
        assert num_top is not None
        for row in logits:
            check_logits(row)
            found.append(self._logprobs_at(row, self.token_ids[len(found)], num_top))

    def start_clock(self) -> None:
        """Times count from now."""
        self._start_s = time.perf_counter()

    def advance(self, logits: torch.Tensor) -> int:
        """The reply's next token, chosen and added; it may be the last, as ``finish_reason`` tells then.

        Shapes:
            logits: [V] f32, what follows the last token; not changed

        Raises:
            ModelError: The logits are broken.
        """
        allowed = None if self._grammar is None else self._grammar.allowed
        token_id = self._sampler.sample(logits, self.token_ids, allowed)
        if self.params.logprobs is not None:
            self._logprobs.append(self._logprobs_at(logits, token_id, self.params.logprobs))
        self.append(token_id)
        return token_id

    def verify(self, drafts: Sequence[int], logits: Sequence[torch.Tensor]) -> int:
        """Takes the reply on, through guesses that are right; how many tokens longer it is now.

        Shapes:
            logits: each [V] f32, what follows the last token, then what follows each of the guesses

        Raises:
            ModelError: The logits are broken.
        """
        self.draft_token_ids = []
        num_accepted = 0
        for number, row in enumerate(logits):
            token_id = self.advance(row)
            if number == len(drafts) or token_id != drafts[number]:
                break
            num_accepted += 1
            if self.finish_reason is not None:
                break
        self.num_draft_tokens += len(drafts)
        self.num_accepted_tokens += num_accepted
        return number + 1

    def rewind(self, num_tokens: int) -> None:
        """Makes it again as it was with its first ``num_tokens`` tokens, which did not end the reply.

        For an interruption anywhere in :meth:`verify`, which may leave its parts at odds; it may itself be
        interrupted and repeated. Tokens that were given must be among those that stay.
        """
        del self.token_ids[num_tokens:]
        self.draft_token_ids = []
        self.finish_reason = self.stop_reason = None
        del self._logprobs[self.num_output_tokens :]
        del self._token_times_s[self.num_output_tokens :]
        self._sampler.forget()
        if self._first_grammar is not None:
            self._grammar = self._first_grammar.copy()
        if self._tokenizer is not None:
            self._reply_text = ReplyText(self._tokenizer, self.params)
        self._texts = []
        for number, token_id in enumerate(self.output_token_ids, start=1):
            self._follow(token_id, number)

    def most_drafts(self, num_tokens: int) -> int:
        """How many of so many guesses could be of use: the last token of a reply needs none."""
        if self.finish_reason is not None:
            return 0
        left = self.max_model_len - len(self.token_ids)
        if self.params.max_tokens is not None:
            left = min(left, self.params.max_tokens - self.num_output_tokens)
        most, num_drafts = min(num_tokens, left - 1), len(self.draft_token_ids)
        if 0 < num_drafts < most and self._grammar_ahead is not None and self._grammar_ahead.is_finished:
            return num_drafts
        return most

    def add_draft(self, logits: torch.Tensor) -> None:
        """Guesses one token more.

        Shapes:
            logits: [V] f32, of another model; not changed
        """
        drafts, allowed = self.draft_token_ids, None
        if self._grammar is not None:
            if not drafts or self._grammar_ahead is None:
                self._grammar_ahead = self._grammar.copy()
            allowed = self._grammar_ahead.allowed
        drafts.append(self._sampler.draft(logits, self.token_ids, len(drafts), allowed))
        if self._grammar_ahead is not None:
            self._grammar_ahead.accept(drafts[-1])

    def append(self, token_id: int) -> None:
        """Adds the next token of the reply and decides whether it was the last."""
        self.token_ids.append(token_id)
        self._token_times_s.append(time.perf_counter())
        self._follow(token_id, self.num_output_tokens)

    def _follow(self, token_id: int, number: int) -> None:
        """What the reply's token of that number, counted from 1, means to everything but the list."""
        grammar = self._grammar
        if grammar is not None:
            grammar.accept(token_id)
        is_end_token = True
        if token_id in self._eos_token_ids and (grammar is not None or not self.params.ignore_eos):
            self.finish_reason = "stop"
        elif token_id in self._stop_token_ids:
            self.finish_reason, self.stop_reason = "stop", token_id
        else:
            is_end_token = False
        if self.finish_reason is None and grammar is not None and grammar.is_finished:
            self.finish_reason = "stop" if grammar.error is None else "error"
            self.stop_reason = grammar.error
        elif self.finish_reason is None and (
            number == self.params.max_tokens or self.num_prompt_tokens + number >= self.max_model_len
        ):
            self.finish_reason = "length"
        if self._reply_text is None:
            self._texts.append("")
        else:
            self._texts.append(self._read(self._reply_text, token_id, number, is_end_token))

    def given_output(self) -> StreamOutput:
        """What the token adds that was given last."""
        number = self.num_given_tokens - self.num_prompt_tokens - 1
        is_last = self.num_given_tokens == len(self.token_ids)
        times_s = self._token_times_s
        metrics = self.metrics()
        if not is_last:
            metrics = replace(metrics, num_generated_tokens=number + 1)
        return StreamOutput(
            self.request_id,
            self._texts[number],
            (self.token_ids[self.num_given_tokens - 1],),
            self.finish_reason if is_last else None,
            metrics,
            self.index,
            None if self.params.logprobs is None else (self._logprobs[number],),
            self.stop_reason if is_last else None,
            times_s[number] - times_s[number - 1] if number else None,
            None if number else self.prompt_logprobs,
        )

    def completion(self) -> CompletionOutput:
        """The whole reply so far."""
        logprobs = cumulative_logprob = None
        if self.params.logprobs is not None:
            logprobs = tuple(self._logprobs)
            pairs = zip(self.output_token_ids, logprobs, strict=True)
            cumulative_logprob = sum(at[token_id].logprob for token_id, at in pairs)
        return CompletionOutput(
            self.index,
            "".join(self._texts),
            self.output_token_ids,
            cumulative_logprob,
            logprobs,
            self.finish_reason,
            self.stop_reason,
        )

    def inter_token_s(self) -> list[float]:
        """Times between two tokens of the reply, seconds."""
        return [after - before for before, after in pairwise(self._token_times_s)]

    def metrics(self, siblings: Sequence[Request] = ()) -> RequestMetrics:
        """Counts and times so far; with later replies to the same prompt, of all of them together."""
        replies = (self, *siblings)
        num_generated = sum(reply.num_output_tokens for reply in replies)
        first_s = decode_rate = prefill_rate = None
        cached = self.cached_tokens or CachedTokens()
        firsts = [reply._token_times_s[0] for reply in replies if reply._token_times_s]
        lasts = [reply._token_times_s[-1] for reply in replies if reply._token_times_s]
        if firsts:
            first_s = min(firsts) - self._start_s
            prefill_rate = (self.num_prompt_tokens - cached.total) / first_s
            if num_generated > 1 and max(lasts) > min(firsts):
                decode_rate = (num_generated - 1) / (max(lasts) - min(firsts))
        # For every token of a reply that is not whole yet it were too much work.
        is_whole = all(reply.finish_reason is not None for reply in replies)
        gaps = [gap for reply in replies for gap in reply.inter_token_s()] if is_whole else []
        return RequestMetrics(
            self.num_prompt_tokens,
            num_generated,
            first_s,
            decode_rate,
            sum(reply.num_draft_tokens for reply in replies),
            sum(reply.num_accepted_tokens for reply in replies),
            prefill_rate,
            percentile(gaps, 50),
            percentile(gaps, 99),
            cached,
        )

    def _read(self, reply_text: ReplyText, token_id: int, number: int, is_end_token: bool) -> str:
        """The text that a token lets be shown; a stop string in it ends the reply."""
        may_stop = number > self.params.min_tokens
        text = ""
        if not is_end_token or self.params.include_stop_str_in_output:
            text = reply_text.push(token_id, may_stop=may_stop)
        if self.finish_reason is not None and reply_text.stop_string is None:
            text += reply_text.finish(may_stop=may_stop)
        if reply_text.stop_string is not None:
            self.finish_reason, self.stop_reason = "stop", reply_text.stop_string
        return text

    def _logprobs_at(self, logits: torch.Tensor, token_id: int, num_top: int) -> dict[int, Logprob]:
        return {
            each.token_id: Logprob(each.logprob, each.rank, self._text_of(each.token_id))
            for each in token_logprobs(logits, token_id, num_top)
        }

    def _text_of(self, token_id: int) -> str | None:
        if self._tokenizer is None:
            return None
        return self._tokenizer.decode([token_id], skip_special_tokens=False)


def _check_vocabulary(params: SamplingParams, end_token_ids: set[int], vocab_size: int) -> None:
    for name, token_ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
        for token_id in token_ids or ():
            if token_id >= vocab_size:
                raise ConfigError(name, token_id, f"token ids from 0 to {vocab_size - 1}")
    if params.min_tokens and len(end_token_ids) == vocab_size:
        raise ConfigError("min_tokens", params.min_tokens, "0 where every token ends a reply")
