"""A model in several formats, each beside the 8-bit lossless one: predictions, guesses, suite, speed.

Called by ``duckllm quality``. Loads one format after the other, the reference first, whose logits lie in a
file meanwhile; replies come from :class:`duckllm.LLM`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from duckllm.demo.suite import MAX_TOKENS, RECALL, TASKS, load_suite
from duckllm.errors import ConfigError, InWords
from duckllm.quality.divergence import Divergence
from duckllm.quality.logits import LogitsFile, logits_of
from duckllm.quality.texts import Passage
from duckllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from duckllm import LLM
    from duckllm.outputs import RequestOutput

Progress = Callable[[str, float, float], None]
SUITE_TASKS = (*TASKS, RECALL)
# Replies whose speed and guesses count; computed one by one.
MOST_REPLIES = 16
_SUITE_BATCH = 60
# What a token of a reply, and a question of the suite, cost beside a token of a prompt: for the bar alone.
_REPLY_COST = 4
_QUESTION_COST = 60


@dataclass(frozen=True)
class Variant:
    """A model in one format.

    Args:
        name: As tables call it.
        open_llm: Loads it, its host's part on a CPU.
        layers: Its layers' formats in words, where they are not all of that name.
    """

    name: str
    open_llm: Callable[[], LLM]
    layers: str = ""


@dataclass(frozen=True)
class FormatQuality:
    """What was measured of a format.

    Args:
        name: The format.
        expert_bytes: Size of the experts, those of the layers that guess included.
        isas: Instruction sets that computed them.
        divergence: Its predictions beside the reference's.
        num_draft_tokens: Guesses that were checked.
        num_accepted_tokens: Guesses that were right.
        tokens_per_s: Of one reply at a time here, its first token aside; the median. None without replies.
        suite: Right answers of the demo model's suite by task; None where it was not asked.
        layers: Its layers' formats in words, where they are not all of that name.
    """

    name: str
    expert_bytes: int
    isas: tuple[str, ...]
    divergence: Divergence
    num_draft_tokens: int
    num_accepted_tokens: int
    tokens_per_s: float | None
    suite: Counter[str] | None
    layers: str = ""

    @property
    def acceptance(self) -> float | None:
        """Share of guesses that were right; None where there were none."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def num_right(self) -> int | None:
        """Right answers of the suite in all."""
        return None if self.suite is None else sum(self.suite.values())

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        divergence = self.divergence
        return {
            "format": self.name,
            "layer_formats": self.layers or self.name,
            "expert_bytes": self.expert_bytes,
            "isas": sorted(set(self.isas)),
            "num_tokens": divergence.num_tokens,
            "kl_mean_nats": divergence.kl_mean,
            "kl_p99_nats": divergence.kl_p99,
            "kl_max_nats": divergence.kl_max,
            "top1_agreement": divergence.agreement,
            "perplexity": divergence.perplexity,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "acceptance": self.acceptance,
            "measured_tokens_per_s": self.tokens_per_s,
            "suite": None if self.suite is None else {task: self.suite[task] for task in SUITE_TASKS},
        }


class Measurement:
    """The formats of one model, one after the other.

    Args:
        passages: What is predicted; open ones get the reference's replies.
        reply_tokens: Most tokens of a reply.
        every: Of the demo model's suite each so-manieth question is asked; 0 for none.
        progress: Called with what is done, the work done and the work in all.
    """

    def __init__(
        self, passages: Sequence[Passage], reply_tokens: int, every: int, progress: Progress
    ) -> None:
        self._passages, self._reply_tokens, self._progress = list(passages), reply_tokens, progress
        self._suite = load_suite()[::every] if every else []
        self._logits: LogitsFile | None = None
        self._name, self._done, self._total = "", 0.0, 1.0

    @property
    def num_questions(self) -> Counter[str]:
        """Questions of the suite that are asked, by task."""
        return Counter(item.task for item in self._suite)

    def run(self, variants: Sequence[Variant]) -> list[FormatQuality]:
        """Measures each; the first one is the reference.

        Raises:
            ConfigError: A passage is longer than the model's context.
            DiskSpaceError: No room for the reference's logits.
            DuckError: A variant cannot be loaded or run.
        """
        self._done, self._total = 0.0, len(variants) * self._work()
        with ExitStack() as stack:
            return [self._measure(variant, stack) for variant in variants]

    def _work(self) -> float:
        prompts = sum(map(self._length, self._passages))
        replies = _REPLY_COST * self._reply_tokens * len(self._asked())
        return prompts + replies + _QUESTION_COST * len(self._suite)

    def _length(self, passage: Passage) -> int:
        """Tokens of a passage with its reply."""
        return len(passage.token_ids) + (self._reply_tokens if passage.is_open else 0)

    def _asked(self) -> list[Passage]:
        """Passages whose replies are timed."""
        return self._passages[:: max(1, -(-len(self._passages) // MOST_REPLIES))]

    def _worked(self, work: float) -> None:
        self._done = min(self._done + work, self._total)
        self._progress(self._name, self._done, self._total)

    def _measure(self, variant: Variant, stack: ExitStack) -> FormatQuality:
        self._name = variant.name
        self._worked(0)
        with variant.open_llm() as llm:
            for passage in self._passages:
                if self._length(passage) > llm.max_model_len:
                    got = InWords(f"{self._length(passage)} tokens in a row")
                    raise ConfigError("text", got, f"at most {llm.max_model_len}, the longest context")
            outputs = [self._reply(llm, passage) for passage in self._asked()]
            self._passages = [self._answered(llm, passage) for passage in self._passages]
            divergence = self._compare(llm, stack)
            suite: Counter[str] | None = None
            if self._suite:
                suite, answers = self._ask(llm)
                outputs += answers
            info = llm.cluster_info()
        rates = [each.metrics.decode_tokens_per_s for each in outputs[: len(self._asked())]]
        known = [rate for rate in rates if rate is not None]
        return FormatQuality(
            variant.name,
            sum(info.weight_bytes),
            info.isas,
            divergence,
            sum(each.metrics.num_draft_tokens for each in outputs),
            sum(each.metrics.num_accepted_tokens for each in outputs),
            median(known) if known else None,
            suite,
            variant.layers,
        )

    def _reply(self, llm: LLM, passage: Passage) -> RequestOutput:
        room = llm.max_model_len - passage.num_prompt_tokens
        params = SamplingParams(temperature=0, max_tokens=min(self._reply_tokens, room))
        (output,) = llm.generate([list(passage.prompt)], params)
        self._worked(_REPLY_COST * self._reply_tokens)
        return output

    def _answered(self, llm: LLM, passage: Passage) -> Passage:
        """The passage with a reply: the reference's, as it is the first."""
        if not passage.is_open:
            return passage
        params = SamplingParams(temperature=0, max_tokens=self._reply_tokens)
        (output,) = llm.generate([list(passage.prompt)], params)
        return passage.with_reply(output.outputs[0].token_ids)

    def _compare(self, llm: LLM, stack: ExitStack) -> Divergence:
        """Predictions beside the reference's, which are kept where these are they."""
        model, _ = llm.host_model()
        is_reference = self._logits is None
        if self._logits is None:
            num_rows = sum(passage.num_counted for passage in self._passages)
            self._logits = stack.enter_context(LogitsFile(num_rows, model.config.vocab_size))
        self._logits.rewind()
        divergence = Divergence()
        for passage in self._passages:
            for logits, next_ids in logits_of(model, passage):
                if is_reference:
                    self._logits.write(logits)
                divergence.add(logits if is_reference else self._logits.read(len(logits)), logits, next_ids)
            self._worked(len(passage.token_ids))
        return divergence

    def _ask(self, llm: LLM) -> tuple[Counter[str], list[RequestOutput]]:
        """Right answers by task: word for word, and ended by themselves."""
        right: Counter[str] = Counter()
        outputs: list[RequestOutput] = []
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
        for start in range(0, len(self._suite), _SUITE_BATCH):
            items = self._suite[start : start + _SUITE_BATCH]
            for item, output in zip(items, llm.chat([item.chat for item in items], params), strict=True):
                reply = output.outputs[0]
                right[item.task] += reply.text == item.answer and reply.finish_reason == "stop"
                outputs.append(output)
            self._worked(_QUESTION_COST * len(items))
        return right, outputs
