"""Replies that keep to a grammar: whatever the logits say, the text is one of the grammar's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from duckllm import LLM, SamplingParams, StructuredOutputsParams
from duckllm.engine.engine import Drafting, Engine
from duckllm.errors import ConfigError, ModelError
from duckllm.models.causal_lm import CausalLM
from duckllm.models.mtp import MTPLayer
from duckllm.text import Tokenizer
from duckllm.text.grammar import GrammarTable
from support.drafting import GROUPED, Remembering, make_engine, make_model
from support.grammars import EOS, TOKENS, new_request, random_logits, run, spell, tiny_table
from support.tokenizers import trained_tokens, write_byte_fallback, write_kimi

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": -5, "maximum": 99},
        "b": {"type": "array", "items": {"enum": ["ab", "é🦆", "x"]}, "maxItems": 3},
        "c": {"type": "boolean"},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}
NO_SPACES = {"x-guidance": {"whitespace_flexible": False}}
NESTED = '{"items":' * 300 + "{}" + "}" * 300
CHOICES = ["yes", "no", "no way", "é🦆", '"{}"']
LARK = 'start: item ("," item)*\nitem: NAME ":" /[0-9]{1,3}/\nNAME: /[a-f]{2}/'
GBNF = 'root ::= pair ("-" pair)? \npair ::= [a-c] [0-9]+'


def meets_schema(text: str) -> bool:
    value = json.loads(text)
    assert list(value) in (["a", "b"], ["a", "b", "c"]), text
    assert isinstance(value["a"], int)
    assert -5 <= value["a"] <= 99
    assert isinstance(value["b"], list)
    assert len(value["b"]) <= 3
    assert all(item in ("ab", "é🦆", "x") for item in value["b"])
    return value.get("c", True) in (True, False)


GRAMMARS: dict[str, tuple[StructuredOutputsParams, Callable[[str], object]]] = {
    "json": (StructuredOutputsParams(json=SCHEMA), meets_schema),
    "json text": (StructuredOutputsParams(json=json.dumps(SCHEMA | NO_SPACES)), meets_schema),
    "json object": (
        StructuredOutputsParams(json_object=True),
        lambda text: isinstance(json.loads(text), dict),
    ),
    "regex": (
        StructuredOutputsParams(regex="[a-c]{2,5}(é|🦆|[0-9]+)?x"),
        lambda text: re.fullmatch("[a-c]{2,5}(é|🦆|[0-9]+)?x", text),
    ),
    "any characters": (StructuredOutputsParams(regex=".{3}"), lambda text: re.fullmatch(".{3}", text)),
    "choice": (StructuredOutputsParams(choice=CHOICES), CHOICES.__contains__),
    "lark": (
        StructuredOutputsParams(grammar=LARK),
        lambda text: re.fullmatch("[a-f]{2}:[0-9]{1,3}(,[a-f]{2}:[0-9]{1,3})*", text),
    ),
    "gbnf": (
        StructuredOutputsParams(grammar=GBNF),
        lambda text: re.fullmatch("[a-c][0-9]+(-[a-c][0-9]+)?", text),
    ),
}


@pytest.fixture(scope="module")
def table() -> GrammarTable:
    return tiny_table()


def wanting(*token_ids: int, size: int = len(TOKENS)) -> torch.Tensor:
    """Logits that prefer these tokens, the first one most."""
    logits = torch.zeros(size)
    for number, token_id in enumerate(token_ids):
        logits[token_id] = 20.0 - number
    return logits


def ids_of(text: str) -> list[int]:
    """One token a character."""
    return [TOKENS.index(char.encode()) for char in text]


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_whole_reply_is_a_text_of_the_grammar(table: GrammarTable, name: str) -> None:
    outputs, matches = GRAMMARS[name]
    texts = set()
    for seed in range(40):
        options = {"temperature": 1.5, "top_p": 0.9, "seed": seed} if seed % 2 else {"temperature": 0.0}
        request = new_request(
            table, outputs, max_tokens=120, logit_bias={EOS: 3, 0: 100}, presence_penalty=0.5, **options
        )
        run(request, random_logits(len(TOKENS), seed))
        assert request.finish_reason in ("stop", "length")
        if request.finish_reason == "stop":
            assert request.stop_reason is None
            text = spell(request.output_token_ids)
            assert matches(text), text
            texts.add(text)
    assert len(texts) >= 4


@pytest.fixture(scope="module", params=["demo", "kimi", "byte fallback", "metaspace"])
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, demo_checkpoint: Path
) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    if request.param == "demo":
        return Tokenizer(demo_checkpoint)
    if request.param == "kimi":
        return Tokenizer(write_kimi(folder, trained_tokens()))
    metaspace = request.param == "metaspace"
    return Tokenizer(write_byte_fallback(folder, metaspace=metaspace, added=["<think>", "quack"]))


def test_texts_of_every_kind_of_tokenizer(tokenizer: Tokenizer) -> None:
    """With characters over several tokens, spaces at the beginning, and rows of no token."""
    vocab_size = tokenizer.max_token_id + 9
    eos = tokenizer.eos_token_ids
    table = GrammarTable.of(tokenizer, vocab_size, frozenset(eos))
    controls = sorted(tokenizer.control_token_ids - set(eos))
    wanted = dict.fromkeys([*controls[:5], vocab_size - 1], 100.0)
    patterns = [" ?[a-z ]{0,3}d(鸭|🦆|é| ){2}", r"[^\n\"]{4}", "(?s:.{2})é.", "the duck"]
    texts = []
    for seed, pattern in enumerate(patterns * 5):
        outputs = StructuredOutputsParams(regex=pattern)
        request = new_request(table, outputs, tokenizer, eos, max_tokens=60, logit_bias=wanted)
        run(request, random_logits(vocab_size, seed))
        done = request.completion()
        assert done.finish_reason == "stop"
        assert re.fullmatch(pattern, done.text), (pattern, done.text)
        assert not set(request.output_token_ids[:-1]) & (tokenizer.control_token_ids | {vocab_size - 1})
        texts.append(done.text)
    assert "the duck" in texts
    assert any(len(text.encode()) > len(text) for text in texts)


def test_control_tokens_are_spelled_out(tokenizer: Tokenizer) -> None:
    """Their spelling may be text of a reply; the tokens themselves may not."""
    texts = {token.content for token in tokenizer._inner.added_tokens_decoder.values()}
    [control, *_] = sorted(texts & set(tokenizer._control_texts))
    table = GrammarTable.of(tokenizer, tokenizer.max_token_id + 1)
    request = new_request(table, StructuredOutputsParams(choice=[control]), tokenizer, ())
    run(request, random_logits(table.end, 1))
    assert request.completion().text == control
    assert not set(request.output_token_ids) & tokenizer.control_token_ids


def test_it_ends_only_where_the_grammar_may(table: GrammarTable) -> None:
    outputs = StructuredOutputsParams(regex="[ab]{2}c*")
    # The end token is what the model wants most, and "a" next.
    request = run(new_request(table, outputs), iter([wanting(EOS, *ids_of("ab"))] * 3))
    assert (spell(request.output_token_ids), request.finish_reason) == ("aa", "stop")
    assert request.output_token_ids[-1] == EOS
    assert request.num_output_tokens == 3
    # Nothing may follow: no step for an end token, and none is needed.
    for eos in ((EOS,), ()):
        request = new_request(table, StructuredOutputsParams(regex="[ab]{2}"), eos=eos)
        run(request, iter([wanting(EOS)] * 2))
        assert (request.num_output_tokens, request.finish_reason, request.stop_reason) == (2, "stop", None)
    # At the last token that max_tokens allows, the whole reply is whole.
    request = new_request(table, StructuredOutputsParams(regex="[ab]{2}"), max_tokens=2)
    assert run(request, iter([wanting()] * 2)).finish_reason == "stop"
    request = new_request(table, StructuredOutputsParams(regex="[ab]{3}"), max_tokens=2)
    assert run(request, iter([wanting()] * 2)).finish_reason == "length"


def test_the_grammar_goes_before_min_tokens_and_ignore_eos(table: GrammarTable) -> None:
    outputs = StructuredOutputsParams(regex="a+|b")
    a, b = ids_of("ab")
    request = run(new_request(table, outputs, min_tokens=3, ignore_eos=True), iter([wanting(EOS, a, b)] * 9))
    assert request.output_token_ids == (a, a, a, EOS)
    assert request.finish_reason == "stop"
    request = run(new_request(table, outputs, min_tokens=3), iter([wanting(b)]))
    assert (request.output_token_ids, request.finish_reason) == ((b,), "stop")
    # A stop token that is text, and the only one that the grammar has.
    request = new_request(table, StructuredOutputsParams(regex="ax"), min_tokens=2, stop_token_ids=[a])
    request.advance(wanting(EOS, b))
    assert (request.output_token_ids, request.finish_reason, request.stop_reason) == ((a,), "stop", a)


def test_stop_tokens_and_stop_strings_cut(demo_checkpoint: Path) -> None:
    tokenizer = Tokenizer(demo_checkpoint)
    table = GrammarTable.of(tokenizer, 8192, frozenset({1}))
    outputs = StructuredOutputsParams(choice=["one duck", "one duckling"])
    request = new_request(table, outputs, tokenizer, (1,), stop="ne d")
    run(request, random_logits(8192, 3))
    assert (request.completion().text, request.stop_reason) == ("o", "ne d")
    # The last token's text is part of a reply that ends with it, and a stop string may lie in it.
    request = new_request(table, StructuredOutputsParams(choice=["duck"]), tokenizer, (1,), stop="k")
    run(request, random_logits(8192, 3))
    assert (request.completion().text, request.stop_reason) == ("duc", "k")
    # A control token that stops: where the text may end and not before.
    request = new_request(table, outputs, tokenizer, (), stop_token_ids=[2])
    run(request, iter([wanting(2, size=8192)] * 30))
    assert (request.completion().text, request.stop_reason) == ("one duck", 2)


def test_log_probabilities_are_the_models_own(table: GrammarTable) -> None:
    request = new_request(table, StructuredOutputsParams(choice=["b"]), logprobs=1)
    logits = next(random_logits(len(TOKENS), 5))
    [b], [best] = ids_of("b"), logits.topk(1).indices.tolist()
    assert request.advance(logits) == b
    [at] = request.completion().logprobs or ()
    expected = logits.double().log_softmax(0)
    assert list(at) == [b, best]
    assert best != b
    assert at[b].logprob == pytest.approx(float(expected[b]), abs=2e-6)
    assert at[best].logprob == pytest.approx(float(expected[best]), abs=2e-6)


def test_logits_that_leave_nothing_are_broken(table: GrammarTable) -> None:
    request = new_request(table, StructuredOutputsParams(regex="[xyz]"))
    logits = torch.zeros(len(TOKENS))
    logits[ids_of("xyz")] = -torch.inf
    with pytest.raises(ModelError, match="every token that is allowed"):
        request.advance(logits)
    assert request.advance(torch.zeros(len(TOKENS))) == ids_of("x")[0]  # nothing was noted of it


def test_guesses_keep_to_the_grammar_and_are_forgotten(table: GrammarTable) -> None:
    request = new_request(table, StructuredOutputsParams(regex="a[bc]d?"))
    a, b, c, d = ids_of("abcd")
    for _ in range(2):
        request.draft_token_ids = []
        assert request.most_drafts(9) == 9
        for _ in range(3):
            request.add_draft(wanting(EOS, d, c, b, a))
        assert request.draft_token_ids == [a, c, EOS]
        assert request.most_drafts(9) == 3  # nothing follows an end token
    # Wrong guesses: the model's choice at each place is what the grammar of the reply itself allows.
    assert request.verify([a, c, EOS], [wanting(d, a), wanting(b), wanting(), wanting()]) == 2
    assert request.output_token_ids == (a, b)
    assert request.verify([d], [wanting(EOS, d), wanting()]) == 1
    assert (request.output_token_ids, request.finish_reason) == ((a, b, EOS), "stop")
    # Right ones up to the grammar's end, behind which there is nothing.
    request = new_request(table, StructuredOutputsParams(regex="a[bc]d?"))
    assert request.verify([a, c, d], [wanting(), wanting(c), wanting(d), wanting()]) == 3
    assert (request.finish_reason, request.num_accepted_tokens) == ("stop", 3)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[CausalLM, MTPLayer]:
    return make_model(tmp_path_factory.mktemp("model"), GROUPED, max_tokens=64)


def replies(engine: Engine, table: GrammarTable, name: str) -> list[tuple[int, ...]]:
    """Greedy and sampled ones, several at once."""
    engine.grammar_table = table
    outputs, _ = GRAMMARS[name]
    each: list[dict[str, Any]] = [{"temperature": 0.0}, *({"temperature": 1.2, "seed": n} for n in range(3))]
    requests = [
        engine.new_request([5, 9, 20], SamplingParams(max_tokens=40, structured_outputs=outputs, **options))
        for options in each
    ]
    for request in requests:
        engine.add(request)
    for request in requests:
        list(engine.run(request))
    return [request.output_token_ids for request in requests]


@pytest.mark.parametrize("num_tokens", [1, 4])
def test_no_token_depends_on_guesses(
    pair: tuple[CausalLM, MTPLayer], table: GrammarTable, num_tokens: int
) -> None:
    model, mtp = pair
    for name, (_, matches) in GRAMMARS.items():
        expected = replies(make_engine(model, eos_token_ids=frozenset({EOS})), table, name)
        whole = [reply for reply in expected if len(reply) < 40]
        assert all(matches(spell(reply)) for reply in whole)
        right = Remembering(model)
        for reply in expected:
            right.learn([20, *reply])
        for layer in (mtp, right):
            engine = make_engine(model, Drafting(layer, num_tokens, "on"), eos_token_ids=frozenset({EOS}))
            assert replies(engine, table, name) == expected, name
        assert engine.stats.metrics().num_accepted_tokens > 0


def test_the_demo_model_answers_in_json() -> None:
    schema = {
        "type": "object",
        "properties": {
            "answer": {"enum": ["yes", "no"]},
            "digits": {"type": "string", "pattern": "^[0-9]{4}$"},
        },
        "required": ["answer", "digits"],
        "additionalProperties": False,
    } | NO_SPACES
    messages = [{"role": "user", "content": "Is 1001 prime?"}]
    outputs = StructuredOutputsParams(json=schema)
    sampled = SamplingParams(temperature=1.0, seed=2, n=3, structured_outputs=outputs)
    found = {}
    for draft in ("on", "off"):
        with LLM(workers=0, draft=draft, draft_tokens=2 if draft == "on" else 1) as llm:
            [greedy] = llm.chat(messages, SamplingParams(temperature=0, structured_outputs=outputs))
            [three] = llm.generate("1 + 1 =", sampled)
            [free] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=40))
            streamed = list(llm.stream("1 + 1 =", sampled))
            with pytest.raises(ConfigError, match=r"structured_outputs\.json: .*uniqueItems"):
                llm.chat(
                    messages,
                    SamplingParams(structured_outputs=StructuredOutputsParams(json={"uniqueItems": True})),
                )
        assert free.outputs[0].text == "No, 1001 is not prime: 1001 = 7 x 11 x 13."
        done = [*greedy.outputs, *three.outputs]
        for each in done:
            value = json.loads(each.text)
            assert value["answer"] in ("yes", "no")
            assert re.fullmatch("[0-9]{4}", value["digits"])
            assert each.finish_reason == "stop"
        assert len({each.text for each in three.outputs}) > 1
        texts = ["".join(each.text for each in streamed if each.index == index) for index in range(3)]
        assert texts == [each.text for each in three.outputs]
        found[draft] = [each.token_ids for each in done]
    assert found["on"] == found["off"]


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ({"json": {"uniqueItems": True}}, r"Unimplemented keys: \[\"uniqueItems\"\]"),
        ({"json": {"x-guidance": {"lenient": True}, "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"properties": {"a": {"type": "string", "format": "duck"}}}}, "Unknown format: duck"),
        ({"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "oneOf"),
        ({"json": {"$ref": "http://localhost/schema"}}, "http://localhost/schema"),
        ({"json": {"minimum": 3, "maximum": 1, "type": "integer"}}, "Unsatisfiable"),
        ({"json": NESTED}, "recursion limit"),
        ({"regex": "(?=a)b"}, "look-ahead"),
        ({"regex": "("}, r"kept to \(unclosed group\)$"),
        ({"regex": "()"}, "not the empty text alone"),
        ({"regex": "Q"}, "the model's tokens can begin"),
        ({"grammar": "start: thing"}, r"unknown name: \"thing\"\)$"),
        ({"grammar": "root ::= ("}, "GBNF to Lark"),
        ({"grammar": "start: g\ng[max_tokens=3, temperature=0.5]: /a+/"}, "a rule has temperature="),
        ({"grammar": "start: <[0]>"}, "no token for what must follow"),
        ({"grammar": 'start: "a" start'}, "Too many items"),
    ],
)
def test_what_cannot_be_kept_to_is_refused(
    table: GrammarTable, outputs: dict[str, Any], message: str
) -> None:
    [field] = outputs
    with pytest.raises(ConfigError, match=message) as raised:
        new_request(table, StructuredOutputsParams(**outputs))
    assert raised.value.field == f"structured_outputs.{field}"
    assert raised.value.got == outputs[field]


def test_a_grammar_that_leads_nowhere_ends_the_reply(table: GrammarTable) -> None:
    for text, at_most in (('start: "a" "Q"', 1), ('start: "ab" <[0]>', 2)):
        request = new_request(table, StructuredOutputsParams(grammar=text))
        run(request, iter([wanting()] * 3))
        assert request.finish_reason == "error"
        assert isinstance(request.stop_reason, str)
        assert len(request.stop_reason) > 5
        assert request.num_output_tokens <= at_most
        assert request.completion().finish_reason == "error"


def test_a_token_that_is_not_allowed_is_an_error_of_this_reply_alone(table: GrammarTable) -> None:
    grammar = table.grammar(StructuredOutputsParams(regex="a.|b"), [EOS])
    other = grammar.copy()
    other.accept(ids_of("z")[0])
    assert other.is_finished
    assert other.error
    assert not other.allowed.any()
    assert grammar.error is None
    assert grammar.allowed.nonzero()[0].tolist() == [*ids_of("ab"), TOKENS.index(b"ab")]


def allowed_bytes(table: GrammarTable, text: str, **schema: Any) -> set[bytes]:
    """What may follow this beginning of a JSON object, token by token."""
    grammar = table.grammar(StructuredOutputsParams(json={"type": "object", **schema}), [EOS])
    for character in text:
        grammar.accept(TOKENS.index(character.encode()))
    return {TOKENS[number] for number in np.flatnonzero(grammar.allowed)}


def test_white_space_between_parts_has_an_end(table: GrammarTable) -> None:
    """A model that has lost its way may not go on with spaces until it is stopped."""
    assert b" " in allowed_bytes(table, '{"a":')
    assert b" " not in allowed_bytes(table, '{"a": ')
    assert b"1" in allowed_bytes(table, '{"a": ')


@pytest.mark.parametrize(
    "options",
    [{"key_separator": "-"}, {"item_separator": "-"}, {"whitespace_pattern": " *"}],
    ids=lambda options: next(iter(options)),
)
def test_a_schema_does_not_say_how_json_is_written(table: GrammarTable, options: dict[str, str]) -> None:
    def follows(text: str) -> set[bytes]:
        return allowed_bytes(table, text, **{"x-guidance": options})

    assert follows('{"a"') == {b":", b" "}
    assert follows('{"a":true') == {b",", b" ", b"}"}
    assert b" " not in follows('{"a": ')
