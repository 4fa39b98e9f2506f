"""Random mixes of everything that must change no token, against one request at a time without any of it.

At least 500 mixes in each run of the suite: prompts that begin alike, chunk sizes, room for few pages or
many, tiers below them, requests given up half way, guesses by a layer of any quality, lanes, greedy and
sampled replies, with a grammar and without.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duckllm.demo import load_questions
from duckllm.engine.engine import Drafting, Engine
from duckllm.engine.kv_cache import PAGE_TOKENS, page_format
from duckllm.engine.request import Request
from duckllm.engine.tiers import TierSettings
from duckllm.layers.step import LayerCache
from duckllm.models.causal_lm import CausalLM
from duckllm.models.mtp import MTPLayer
from duckllm.sampling_params import SamplingParams, StructuredOutputsParams
from duckllm.text import Tokenizer
from duckllm.text.grammar import GrammarTable
from duckllm.weights.resolve import resolve_model
from support.drafting import GROUPED, SPARSE, Remembering, load, make_engine, make_model
from support.grammars import tiny_table

CONTEXT = 64
# May end after a few tokens, and goes on for as long as any reply.
GRAMMAR = StructuredOutputsParams(regex="[a-z ]{1,3}([0-9]+[a-m ]{1,4})*")


class Toggling:
    """Decides at random, instead of by measurement, whether a step guesses and takes lanes."""

    def __init__(self, seed: int, share: float) -> None:
        self._random, self._share = random.Random(seed), share

    def choose(self, what: str, kind: object) -> bool:
        return self._random.random() < self._share

    def record(self, *measured: object) -> None:
        pass


@dataclass(frozen=True)
class Mix:
    """What is computed at once, and how.

    Args:
        prompts: Each a beginning that is shared, its length, and what is behind it.
        counts: Most tokens of each reply.
        step: Most tokens of a step.
        pages: Of the KV cache.
        seqs: Most requests at a time.
        draft_tokens: Most guesses at once; 0 for no layer.
        guesser: ``"layer"`` for the model's random one, ``"knows"`` for one that is often right.
        share: Of steps that guess, and of those in lanes.
        memory_pages: Of the tier below the cache; 0 for none.
        disk_pages: Of the one below that; 0 for none.
        seed: Of what is decided while it runs.
    """

    prompts: list[tuple[int, int, list[int]]]
    counts: list[int]
    step: int
    pages: int
    seqs: int
    draft_tokens: int
    guesser: str
    share: float
    memory_pages: int
    disk_pages: int
    seed: int


MIXES = st.builds(
    Mix,
    prompts=st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 38), st.lists(st.integers(2, 6), max_size=3)),
        min_size=1,
        max_size=6,
    ),
    counts=st.lists(st.integers(1, 12), min_size=6, max_size=6),
    # Steps of one token are as many as all else together where they come as often.
    step=st.sampled_from([1, 3, 7, 7, 16, 16, 64, 64]),
    pages=st.integers(4, 14),
    seqs=st.integers(1, 6),
    draft_tokens=st.integers(0, 3),
    guesser=st.sampled_from(["layer", "knows"]),
    share=st.sampled_from([0.0, 0.5, 1.0]),
    memory_pages=st.sampled_from([0, 0, 1, 5]),
    disk_pages=st.sampled_from([0, 0, 0, 8]),
    seed=st.integers(0, 2**32),
)


class Subject:
    """A model, beginnings that prompts share, and what each prompt is answered alone.

    Args:
        model: The model.
        mtp: Its layer of multi-token prediction.
        stems: Beginnings of prompts.
        context: Most tokens of prompt and reply.
        table: Its tokens as grammars need them.
    """

    def __init__(
        self, model: CausalLM, mtp: MTPLayer, stems: Sequence[list[int]], context: int, table: GrammarTable
    ) -> None:
        self.model, self.mtp, self.stems, self.context = model, mtp, stems, context
        self.table = table
        self._known: dict[tuple[int, ...], tuple[int, ...]] = {}

    def params(self, prompt: list[int], count: int) -> SamplingParams:
        """Greedy for one half of the prompts, sampled for the other one; a third keeps to a grammar."""
        options: dict[str, Any] = {"max_tokens": count, "ignore_eos": True, "temperature": 0.0}
        if sum(prompt) % 2:
            options |= {"temperature": 1.3, "top_p": 0.95, "seed": sum(prompt), "presence_penalty": 0.5}
        if sum(prompt) % 3 == 0:
            options["structured_outputs"] = GRAMMAR
        return SamplingParams(**options)

    def alone(self, prompt: list[int], count: int) -> tuple[int, ...]:
        """The reply computed alone, the whole prompt at once, in an empty cache, with nothing beside."""
        if tuple(prompt) not in self._known:
            engine = make_engine(
                self.model, context=self.context, step=self.context, pages=self.context // 16
            )
            engine.grammar_table = self.table
            request = engine.new_request(prompt, self.params(prompt, min(12, self.context - len(prompt))))
            list(engine.run(request))
            self._known[tuple(prompt)] = request.output_token_ids
        return self._known[tuple(prompt)][:count]

    def check(self, mix: Mix) -> None:
        """Runs a mix; every token must be as it is alone, and no page may be lost."""
        prompts = [
            (self.stems[stem][:length] + tail)[: self.context - 13] for stem, length, tail in mix.prompts
        ]
        expected = [self.alone(prompt, count) for prompt, count in zip(prompts, mix.counts, strict=False)]
        layer: Any = self.mtp
        if mix.guesser == "knows":
            layer = Remembering(self.model)
            for prompt, reply in zip(prompts, expected, strict=True):
                layer.learn([*prompt, *reply])
        drafting = Drafting(layer, mix.draft_tokens, "auto") if mix.draft_tokens else None
        with TemporaryDirectory() as folder:
            tiers = self._tiers(mix, drafting, Path(folder))
            engine = make_engine(
                self.model,
                drafting,
                context=self.context,
                step=mix.step,
                pages=mix.pages,
                max_num_seqs=mix.seqs,
                tiers=tiers,
            )
            try:
                self._check(mix, engine, prompts, expected)
            finally:
                engine.kv_cache.shut()

    def _tiers(self, mix: Mix, drafting: Drafting | None, folder: Path) -> TierSettings:
        page_bytes = page_format(self.new_tensors(drafting), TierSettings()).page_bytes
        return TierSettings(
            memory_bytes=mix.memory_pages * page_bytes,
            disk_dir=folder if mix.disk_pages else None,
            # A file is a little longer than the page in it.
            disk_bytes=(mix.disk_pages + 1) * page_bytes,
        )

    def new_tensors(self, drafting: Drafting | None) -> list[LayerCache]:
        """Of one page."""
        own = self.model.new_kv_cache(PAGE_TOKENS)
        return own if drafting is None else [*own, drafting.layer.new_kv_cache(PAGE_TOKENS)]

    def _check(
        self, mix: Mix, engine: Engine, prompts: list[list[int]], expected: list[tuple[int, ...]]
    ) -> None:
        engine.choices = Toggling(mix.seed, mix.share)  # type: ignore[assignment]
        engine.grammar_table = self.table
        order = random.Random(mix.seed)
        requests = [
            engine.new_request(prompt, self.params(prompt, count))
            for prompt, count in zip(prompts, mix.counts, strict=False)
        ]
        self._run(engine, requests, expected, order)
        assert engine.kv_cache.num_available_pages == engine.kv_cache.num_pages
        assert engine.drafter is None or engine.drafter._kept == {}

    def _run(
        self, engine: Engine, requests: list[Request], expected: list[tuple[int, ...]], order: random.Random
    ) -> None:
        """Streams read in any order, some given up half way, some taken up again."""
        for request in requests:
            if order.random() < 0.5:
                engine.add(request)
        streams = {number: engine.run(request) for number, request in enumerate(requests)}
        while streams:
            number = order.choice(list(streams))
            token = next(streams[number], None)
            got = requests[number].output_token_ids
            assert got == expected[number][: len(got)]
            if token is None:
                assert got == expected[number]
                del streams[number]
            elif order.random() < 0.04:
                streams[number].close()
                del streams[number]
                if order.random() < 0.5:
                    streams[number] = engine.run(requests[number])


STEMS = [[5, 9, 20, 31, 7, 12, 8] * 6, [3] * 40, [*range(2, 44)]]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], Subject]:
    def subject(spec: Any) -> Subject:
        model, mtp = make_model(tmp_path_factory.mktemp("model"), spec, CONTEXT)
        return Subject(model, mtp, STEMS, CONTEXT, tiny_table())

    return subject


@pytest.fixture(scope="module")
def sparse(make: Callable[[Any], Subject]) -> Subject:
    return make(SPARSE)


@pytest.fixture(scope="module")
def grouped(make: Callable[[Any], Subject]) -> Subject:
    return make(GROUPED)


@pytest.fixture(scope="module")
def demo() -> Subject:
    folder = resolve_model(None)
    model, mtp = load(folder, 256)
    tokenizer = Tokenizer(folder)
    # Long enough for the sparse attention, which chooses 128 tokens.
    texts = [each.question for each in load_questions()[:24]]
    stems = [
        tokenizer.apply_chat_template([{"role": "user", "content": " ".join(texts[first : first + 12])}])
        for first in (0, 6, 12)
    ]
    return Subject(model, mtp, stems, 256, GrammarTable.of(tokenizer, model.config.vocab_size))


@settings(max_examples=250, deadline=None)
@given(mix=MIXES)
def test_sparse_attention(sparse: Subject, mix: Mix) -> None:
    sparse.check(mix)


@settings(max_examples=250, deadline=None)
@given(mix=MIXES)
def test_grouped_query_attention(grouped: Subject, mix: Mix) -> None:
    grouped.check(mix)


@settings(max_examples=30, deadline=None)
@given(mix=MIXES)
def test_the_demo_model(demo: Subject, mix: Mix) -> None:
    """Prompts of four times the length, and a layer that guesses well."""
    prompts = [(stem, 4 * length, tail) for stem, length, tail in mix.prompts]
    longer = Mix(**{**vars(mix), "prompts": prompts, "pages": mix.pages + 12, "step": 4 * mix.step})
    demo.check(longer)
