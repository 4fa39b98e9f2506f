"""Which tokens may follow in a reply whose text must keep to a grammar.

Called by the engine, one :class:`Grammar` for each such reply. Wraps the llguidance library, which turns
JSON Schemas, regular expressions and context-free grammars into sets of allowed tokens; knows the bytes of
tokens and no tensors.

Following one takes 10 to 60 us a token with a vocabulary of 8192, and 50 us to 1 ms with one of 129280
(docs/performance.md, section 12).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from duckllm.errors import ConfigError
from duckllm.sampling_params import StructuredOutputsParams
from duckllm.text.grammar_trial import GrammarTrial
from duckllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from llguidance._lib import JsonCompileOptions

# A rule of Lark's with an attribute that llguidance reads and its matcher does not keep to.
_TEMPERATURE = re.compile(r"^\s*\w+\s*\[[^\]\n]*\btemperature\s*=", re.MULTILINE)

# Between the parts of JSON: nothing, a space, or a new line with its indentation. Without a limit a model
# that has lost its way writes white space until it is stopped.
_WHITE_SPACE = r"( |\n {0,32})?"

# What a reason says of an expression, below a picture of it; and where a picture of a grammar begins.
_REGEX_ERROR = re.compile(r"^error: (.+)$", re.MULTILINE)
_PICTURE = re.compile(r"^ *\d+ \| ", re.MULTILINE)

# What the library says of some reasons is for those who write it. It fails over names of control tokens, of
# which it is told none.
_IN_WORDS = {
    "NoExtension": "no text keeps to it",
    "removal index": "it names a token as <|name|>; tokens have numbers alone here, as in <[7]>",
    "panic": "it fails to compile",
}

# Most grammars that are kept compiled.
_MAX_COMPILED = 32

# Tokens of a text of a grammar that are tried before a reply begins.
_NUM_PROBED = 4

# Of all tables: what is tried out there is compiled in each of them.
_TRIAL = GrammarTrial()

# Most characters of the library's reasons that a message quotes.
_QUOTED = 300


class GrammarTable:
    """A vocabulary as grammars need it, made once for all replies: it takes most of a second to make.

    Args:
        tokens: The bytes that each token adds to a text; empty for those that are no text: control tokens,
            end tokens, and numbers that no token has.
        begins_alike: Whether a token adds the same where it is a text's first; None if all do. Those that do
            not never begin a reply: some decoders drop a space there, with which the grammar would not match.
        encode: How the tokenizer itself would write a text that must follow, as far as its tokens make up
            the text; None to take the longest tokens.

    Threading:
        Grammars may be made in several threads while others are followed; compiling, which takes some seconds
        at most whatever is to be compiled, keeps no other thread waiting. One grammar is one thread's.
    """

    def __init__(
        self,
        tokens: Sequence[bytes],
        begins_alike: Iterable[bool] | None = None,
        encode: Callable[[str], Sequence[int]] | None = None,
    ) -> None:
        from llguidance import LLParserLimits, LLTokenizer

        self.is_text = np.array([bool(token) for token in tokens])
        self.may_begin = self.is_text if begins_alike is None else self.is_text & np.array(list(begins_alike))
        # Two numbers behind the vocabulary: the end, whichever tokens end a reply, and what no token writes.
        self.tokens, self.end = [*tokens, b"", b""], len(tokens)
        self._encode = encode
        self._id_of = {token: number for number, token in enumerate(self.tokens) if token}
        self._longest = max(map(len, self._id_of), default=0)
        self._limits = LLParserLimits(verbose_errors=False)
        wrapper: Any = _Wrapper(self.tokens, self.end, self._write)
        self._inner = LLTokenizer(wrapper, n_vocab=len(self.tokens))
        self._compiled = lru_cache(_MAX_COMPILED)(self._compile_tried)

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int] = frozenset()
    ) -> GrammarTable:
        """The table of a model's tokenizer.

        Args:
            tokenizer: Of the model.
            vocab_size: Numbers that the model may choose; some may be no token.
            eos_token_ids: These are the end and never text.
        """
        numbers = range(vocab_size)
        tokens = [b"" if each in eos_token_ids else tokenizer.bytes_in_text(each) for each in numbers]
        alike = [
            bool(data) and tokenizer.bytes_in_text(n, first=True) == data for n, data in enumerate(tokens)
        ]

        def encode(text: str) -> list[int]:
            ids = tokenizer.encode(text)
            return ids[1:] if ids[:1] == [tokenizer.bos_token_id] else ids

        return cls(tokens, alike, encode)

    def grammar(self, params: StructuredOutputsParams, end_token_ids: Iterable[int]) -> Grammar:
        """The grammar at the beginning of a reply, compiled where none of the last ones was the same.

        Args:
            params: What the text must be.
            end_token_ids: The tokens that end the reply; of these, such as are text are text here as well.

        Raises:
            ConfigError: It cannot be compiled, or no text that this vocabulary can write begins it.
        """
        matcher = self._matcher(params, "structured_outputs")
        if max(params.control_token_ids, default=0) >= self.end:
            got = params.control_token_ids
            raise ConfigError("structured_outputs.control_token_ids", got, f"numbers below {self.end}")
        ends = [number for number in end_token_ids if not self.is_text[number]]
        grammar = Grammar(self, matcher.deep_copy(), ends, params.control_token_ids)
        if grammar.is_finished:
            field = params.label or f"structured_outputs.{params.kind}"
            got = getattr(params, params.kind)
            expected = "one with a text that the model's tokens can begin, not the empty text alone"
            raise ConfigError(field, got, expected, grammar.error or "")
        return grammar

    def _matcher(self, params: StructuredOutputsParams, name: str) -> LLMatcher:
        """The library's state at the beginning, not to be changed.

        Raises:
            ConfigError: It cannot be compiled; ``name`` or the name of its part is the field.
        """
        try:
            matcher, reason = self._compiled(_source(params))
        except ValueError as error:
            reason = in_short(error)
        if reason:
            for key, part in params.parts.items():
                self._matcher(part, f"{name}.parts.{key}")
            field = params.label or f"{name}.{params.kind}"
            raise ConfigError(field, getattr(params, params.kind), "one that can be kept to", reason)
        assert matcher is not None
        return matcher

    def compile(self, source: str) -> tuple[LLMatcher, str]:
        """A grammar in the library's form at its beginning, and why it cannot be used, empty where it can."""
        from llguidance import LLMatcher

        matcher = LLMatcher(self._inner, source, log_level=0, limits=self._limits)
        reasons = [matcher.get_error()] if matcher.is_error() else matcher.get_grammar_warnings()
        return matcher, in_short("; ".join(reasons))

    def _compile_tried(self, source: str) -> tuple[LLMatcher | None, str]:
        """The same of what anybody may have made."""
        if reason := _why_not(source):
            return None, reason
        matcher, reason = self.compile(source)
        return matcher, reason or self._first_steps(matcher.deep_copy())

    def _first_steps(self, matcher: LLMatcher) -> str:
        """Why a reply would break soon: what is too large shows where its parts are first looked at."""
        for _ in range(_NUM_PROBED):
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = np.unpackbits(bits, count=self.end, bitorder="little")
            if matcher.is_error() or not allowed.any() or not matcher.consume_token(int(allowed.argmax())):
                break
        return in_short(matcher.get_error()) if matcher.is_error() else ""

    def _write(self, text: str | bytes) -> list[int]:
        """Tokens that make up a text: the tokenizer's own where they do, to the byte, else the longest."""
        data = text.encode() if isinstance(text, str) else text
        if self._encode is not None and isinstance(text, str):
            ids = list(self._encode(text))
            if b"".join(self.tokens[each] for each in ids) == data:
                return ids
        ids, start = [], 0
        while start < len(data):
            stop = min(len(data), start + self._longest)
            while stop > start and data[start:stop] not in self._id_of:
                stop -= 1
            if stop == start:
                return [*ids, self.end + 1]
            ids.append(self._id_of[data[start:stop]])
            start = stop
        return ids


class Grammar:
    """How far one reply has come in its grammar.

    Args:
        table: The vocabulary.
        matcher: The library's state, of this grammar alone.
        end_token_ids: Tokens that are no text and end the reply.
        control_token_ids: Tokens that are no text and may be part of the reply, where the grammar names them.
    """

    def __init__(
        self,
        table: GrammarTable,
        matcher: LLMatcher,
        end_token_ids: Sequence[int],
        control_token_ids: Sequence[int] = (),
    ) -> None:
        self._table, self._matcher = table, matcher
        self._end_token_ids = list(end_token_ids)
        self._can_follow, self._can_begin = table.is_text, table.may_begin
        if control_token_ids:
            self._can_follow, self._can_begin = self._can_follow.copy(), self._can_begin.copy()
            self._can_follow[list(control_token_ids)] = self._can_begin[list(control_token_ids)] = True
        self._has_begun = self._has_ended = False
        self._allowed: npt.NDArray[np.bool_] | None = None  # until a token is accepted
        self._error: str | None = None

    def copy(self) -> Grammar:
        """Another one at the same place."""
        other = copy(self)
        other._matcher = self._matcher.deep_copy()
        return other

    @property
    def allowed(self) -> npt.NDArray[np.bool_]:
        """Which tokens may follow: what the grammar takes, and end tokens where it may end.

        There is at least one unless it is finished.

        Shapes:
            result: [V], not to be changed
        """
        if self._allowed is None:
            self._allowed = self._compute()
        return self._allowed

    @property
    def is_finished(self) -> bool:
        """Whether nothing may follow: at the grammar's end, behind an end token, or after an error."""
        return self._has_ended or not (self.allowed & self._can_follow).any()

    @property
    def error(self) -> str | None:
        """Why the grammar could not be followed to one of its ends; None where it was."""
        return self._error

    def accept(self, token_id: int) -> None:
        """Goes on by a token, which should be an allowed one; any other is an error."""
        if token_id in self._end_token_ids:
            self._has_ended = True
        elif not self._matcher.consume_token(token_id):
            self._error = in_short(self._matcher.get_error())
        self._has_begun, self._allowed = True, None

    def _compute(self) -> npt.NDArray[np.bool_]:
        table = self._table
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        flags = np.unpackbits(bits, count=table.end + 2, bitorder="little").view(np.bool_)
        # The library's way to say that it broke is to allow the end.
        if self._error is None and self._matcher.is_error():
            self._error = in_short(self._matcher.get_error())
        if self._error is not None:
            flags[:] = False
        allowed, may_end = flags[: table.end], bool(flags[table.end])
        # A grammar can name tokens by their numbers; such as are no text stay out.
        allowed &= self._can_follow if self._has_begun else self._can_begin
        if may_end:
            allowed[self._end_token_ids] = True
        elif self._error is None and not allowed.any():
            self._error = "the model has no token for what must follow"
        return allowed


class _Wrapper:
    """What the library asks of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids: Sequence[int] = ()

    def __init__(
        self, tokens: Sequence[bytes], eos_token_id: int, write: Callable[[str | bytes], list[int]]
    ) -> None:
        self.tokens, self.eos_token_id, self._write = tokens, eos_token_id, write

    def __call__(self, text: str | bytes) -> list[int]:
        return self._write(text)


def why_not(params: StructuredOutputsParams) -> str:
    """Why it could not be kept to, as far as that does not depend on a vocabulary; empty for nothing."""
    try:
        return _why_not(_source(params))
    except ValueError as error:
        return in_short(error)


@lru_cache(8 * _MAX_COMPILED)
def _why_not(source: str) -> str:
    return _TRIAL.why_not(source)


def _source(params: StructuredOutputsParams) -> str:
    """The grammar in the library's own form.

    Raises:
        ValueError: There is none.
    """
    from llguidance import LLMatcher, grammar_from

    if params.kind in ("json", "json_object"):
        # As x-guidance a schema may ask for leniency towards what cannot be kept to, for separators that are
        # not JSON's and for white space without end: none of that is for it to say.
        options: JsonCompileOptions = {
            "whitespace_pattern": _WHITE_SPACE,
            "whitespace_flexible": True,
            "item_separator": ",",
            "key_separator": ":",
            "lenient": False,
        }
        return LLMatcher.grammar_from_json_schema(params.schema, overrides=options)
    if params.kind == "regex":
        return LLMatcher.grammar_from_regex(params.regex or "")
    if params.kind == "choice":
        return LLMatcher.grammar_from_regex("|".join(map(as_regex, params.choice or ())))
    if _TEMPERATURE.search(params.grammar or ""):
        raise ValueError("a rule has temperature=, which is SamplingParams' to say")
    if not params.parts:
        return grammar_from("grammar", params.grammar or "")
    grammars: list[dict[str, Any]] = [{"lark_grammar": params.grammar}]
    for name, part in params.parts.items():
        source = _source(part)
        each = {"lark_grammar": source} if part.kind == "grammar" else json.loads(source)["grammars"][0]
        grammars.append({**each, "name": name})
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


def as_regex(text: str) -> str:
    """A regular expression, in ASCII, that matches this text alone."""
    return "".join(char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)


def in_short(reason: object) -> str:
    """The library's reason on one line, without its pictures of where; in our words where it has none."""
    text = str(reason).replace("<non-verbose/>", "")
    for sign, words in _IN_WORDS.items():
        if sign in text:
            return words
    if found := _REGEX_ERROR.search(text):
        text = found[1]
    text = " ".join(_PICTURE.split(text)[0].split())
    return text if len(text) <= _QUOTED else f"{text[:_QUOTED]}..."
