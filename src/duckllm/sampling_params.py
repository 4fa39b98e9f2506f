"""How the next token is chosen and when a reply ends; names and meanings as in vLLM."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from duckllm.config import is_utf8
from duckllm.errors import ConfigError, InWords

# No vocabulary and no context is larger: a number above is a slip of the finger.
MOST = 2**31 - 1
MAX_N = 16384
MAX_LOGPROBS = 20


@dataclass(frozen=True)
class StructuredOutputsParams:
    r"""What a reply's text must be: exactly one of these; names as in vLLM.

    A reply that ends at an end token, or where no more text may follow, is a whole text of its kind; one that
    ``max_tokens``, a stop string or a stop token that is text cuts is the beginning of one.

    Args:
        json: A JSON Schema, as a mapping or its text. What of it cannot be kept to is refused by name.
            Properties come in the schema's order. Between the parts of it may be a space, or a new line with
            up to 32 spaces; ``"x-guidance": {"whitespace_flexible": False}`` in the schema allows nothing.
        regex: A regular expression that the whole text matches, in the syntax of Rust's regex crate, without
            look-around; ``.`` is no line feed.
        choice: Texts, of which it is one.
        grammar: A context-free grammar: Lark's EBNF, with the start rule ``start`` (llguidance's dialect), or
            llama.cpp's GBNF, with ``root ::=``.
        json_object: True for any JSON object.
        parts: Beside ``grammar`` in Lark's form: what it means by ``@name``, for each such name.
        control_token_ids: Beside ``grammar``: the control tokens that it may name by their numbers
            (``<[128798]>``). Parts cannot, and without these nothing can: what is no text stays out.
        label: What messages call it where it cannot be kept to; empty for ``structured_outputs.json`` and the
            like.

    Raises:
        ConfigError: None of them or several, or one of the wrong kind. What a schema, an expression or a
            grammar says is checked when a request is made of it.

    Example:
        >>> StructuredOutputsParams(choice=["yes", "no"]).kind
        'choice'
        >>> StructuredOutputsParams(regex=r"\d+", json_object=True)
        Traceback (most recent call last):
        duckllm.errors.ConfigError: structured_outputs: got json_object and regex, expected exactly one of ...

        Free thoughts, and then one of two words:

        >>> answer = StructuredOutputsParams(choice=["yes", "no"])
        >>> thought = 'start: thought @answer\nthought[lazy]: /(?s:.*)<\/think>/'
        >>> StructuredOutputsParams(grammar=thought, parts={"answer": answer}).kind
        'grammar'
    """

    json: Mapping[str, Any] | str | None = field(default=None, hash=False)
    regex: str | None = None
    choice: Sequence[str] | None = field(default=None, hash=False)
    grammar: str | None = None
    json_object: bool | None = None
    parts: Mapping[str, StructuredOutputsParams] = field(default_factory=dict, hash=False)
    control_token_ids: Sequence[int] = ()
    label: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.json_object, bool | None):
            raise ConfigError("structured_outputs.json_object", self.json_object, "True, or None")
        given = self._given()
        if len(given) != 1:
            names = ", ".join(_STRUCTURES)
            got = InWords(" and ".join(sorted(given)) or "none")
            raise ConfigError("structured_outputs", got, f"exactly one of {names}")
        if self.kind == "json":
            self._check_schema()
        elif self.kind == "choice":
            expected = "a list of texts that are not empty"
            if (
                not isinstance(self.choice, Sequence)
                or isinstance(self.choice, str | bytes)
                or not self.choice
            ):
                raise ConfigError("structured_outputs.choice", self.choice, expected)
            for number, text in enumerate(self.choice):
                _require_text(f"structured_outputs.choice[{number}]", text, "a text that is not empty")
        elif self.kind != "json_object":
            _require_text(f"structured_outputs.{self.kind}", getattr(self, self.kind), "text, not empty")
        self._check_parts()

    @property
    def kind(self) -> str:
        """The field that is given."""
        return self._given()[0]

    @property
    def schema(self) -> str:
        """The JSON Schema of ``json`` or ``json_object``, as text."""
        if self.kind == "json_object":
            return '{"type": "object"}'
        schema = json.loads(self.json) if isinstance(self.json, str) else dict(self.json or {})
        return json.dumps(schema, ensure_ascii=False, allow_nan=False)

    def _given(self) -> list[str]:
        return [name for name in _STRUCTURES if getattr(self, name) not in (None, False)]

    def _check_schema(self) -> None:
        name, expected = "structured_outputs.json", "a JSON Schema, as a mapping or its text"
        if not isinstance(self.json, str | Mapping):
            raise ConfigError(name, self.json, expected)
        try:
            schema = self.schema
        except (ValueError, TypeError, RecursionError) as error:
            raise ConfigError(name, self.json, expected, str(error)) from error
        if not schema.startswith("{"):
            raise ConfigError(name, self.json, expected)
        _require_text(name, schema, expected)

    def _check_parts(self) -> None:
        for name in ("parts", "control_token_ids"):
            if getattr(self, name) and self.kind != "grammar":
                raise ConfigError(
                    f"structured_outputs.{name}", getattr(self, name), f"nothing beside {self.kind}"
                )
        name, expected = "structured_outputs.parts", "StructuredOutputsParams by names such as answer_2"
        if not isinstance(self.parts, Mapping):
            raise ConfigError(name, self.parts, expected)
        for key, part in self.parts.items():
            is_name = isinstance(key, str) and re.fullmatch("[a-z][a-z0-9_]*", key)
            if not is_name or not isinstance(part, StructuredOutputsParams) or part.parts:
                raise ConfigError(name, {key: part}, f"{expected}, without parts of their own")
            # A token's number in Lark; how it could be hidden in a string is not worth finding out.
            if part.control_token_ids or "<[" in (part.grammar or ""):
                raise ConfigError(f"{name}.{key}", part.grammar, "a grammar that has no <[")
        name = "structured_outputs.control_token_ids"
        is_list = isinstance(self.control_token_ids, Sequence) and not isinstance(
            self.control_token_ids, str | bytes
        )
        if not is_list or not all(_is_int(each, 0, MOST) for each in self.control_token_ids):
            raise ConfigError(name, self.control_token_ids, "a list of token ids")


_STRUCTURES = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True)
class SamplingParams:
    r"""Sampling of one request.

    Logits are changed in this order: ``logit_bias``, then the penalties for repetition, frequency and
    presence; then what ``structured_outputs`` does not allow is left out; what is greedy then takes the
    likeliest token. Otherwise temperature, min_p, top_k and top_p
    follow, each on what the one before it left.

    Args:
        temperature: Divides the logits; 0 (and anything below 1e-5) takes the likeliest token; at most 1e6.
        top_k: Number of likeliest tokens to choose from; 0 or -1, or more than there are, for all.
        top_p: Smallest set of likeliest tokens whose probabilities sum to this, in (0, 1].
        min_p: Least probability of a token, as a share of the likeliest token's, in [0, 1].
        seed: Makes a sampled reply repeatable; None for a new one each time.
        max_tokens: Most tokens of a reply, which a full context ends too; None until the end or until then
            (vLLM's default is 16).
        ignore_eos: Go on after an end token.
        repetition_penalty: Divides the positive logits of tokens of prompt and reply, and multiplies the
            others; above 1 against repeating, below 1 for it; above 0, at most 1e6.
        frequency_penalty: Taken off a token's logit for each time that it is in the reply, in [-2, 2].
        presence_penalty: Taken off a token's logit if it is in the reply, in [-2, 2].
        logit_bias: Added to the logits of these tokens, each in [-100, 100].
        min_tokens: End tokens and ``stop_token_ids`` are not chosen, and stop strings do not count, before so
            many tokens; at most ``max_tokens``.
        stop: A string, or several, that ends the reply where its text has it. Special tokens have no text
            in which it could be, unless ``skip_special_tokens`` is False.
        stop_token_ids: Tokens that end the reply, beside the model's end tokens.
        include_stop_str_in_output: The text keeps the stop string, or what ``stop_token_ids`` or an end
            token that is no special one stand for.
        logprobs: For each token of the reply its log probability and those of so many likeliest tokens,
            0 to 20; None for none. They are the model's own, before bias, penalties and temperature
            (vLLM's ``raw_logprobs``).
        prompt_logprobs: The same for each token of the prompt but the first, which nothing goes before; None
            for none. The whole prompt is computed for them, whatever of it is in the KV cache.
        n: Number of replies to the prompt, up to 16384; more than one needs a temperature above 0. Reply i is
            the one that a seed of ``seed + i`` gives alone.
        skip_special_tokens: The text has no special tokens.
        structured_outputs: What the text must be; None for anything. End tokens are chosen where the text may
            end and nowhere else, and there they end the reply in spite of ``ignore_eos``. It ends without one
            where nothing may follow, in spite of ``min_tokens``. A control token is never part of the text,
            unless the grammar was given its number.

    Raises:
        ConfigError: A value is of the wrong kind or out of range.

    Example:
        >>> params = SamplingParams(temperature=0.7, top_p=0.95, stop=["\n\n", "User:"], seed=1, n=2)
        >>> params.stop_strings
        ('\n\n', 'User:')
        >>> SamplingParams(presence_penalty=3)
        Traceback (most recent call last):
        duckllm.errors.ConfigError: presence_penalty: got 3, expected a number from -2 to 2
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    min_tokens: int = 0
    stop: str | Sequence[str] | None = field(default=None, hash=False)
    stop_token_ids: Sequence[int] | None = field(default=None, hash=False)
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        self._require_number("temperature", "a number from 0 to 1000000", lambda v: 0 <= v <= 1_000_000)
        self._require_int("top_k", f"an integer from 0 to {MOST}, or -1", lambda v: -1 <= v <= MOST)
        self._require_number("top_p", "a number above 0, at most 1", lambda v: 0 < v <= 1)
        self._require_number("min_p", "a number from 0 to 1", lambda v: 0 <= v <= 1)
        expected = "a number above 0, at most 1000000"
        self._require_number("repetition_penalty", expected, lambda v: 0 < v <= 1_000_000)
        for name in ("frequency_penalty", "presence_penalty"):
            self._require_number(name, "a number from -2 to 2", lambda v: -2 <= v <= 2)
        if self.seed is not None:
            self._require_int("seed", "an integer from 0 to 2**63 - 1, or None", lambda v: 0 <= v < 2**63)
        if self.max_tokens is not None:
            self._require_int("max_tokens", f"an integer from 1 to {MOST}, or None", lambda v: 1 <= v <= MOST)
        most = MOST if self.max_tokens is None else self.max_tokens
        shown = f"{most}" if self.max_tokens is None else f"max_tokens={most}"
        self._require_int("min_tokens", f"an integer from 0 to {shown}", lambda v: 0 <= v <= most)
        expected = f"an integer from 0 to {MAX_LOGPROBS}, or None"
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._require_int(name, expected, lambda v: 0 <= v <= MAX_LOGPROBS)
        self._require_int("n", f"an integer from 1 to {MAX_N}", lambda v: 1 <= v <= MAX_N)
        if self.n > 1 and self.greedy:
            raise ConfigError(
                "n", self.n, f"1 with temperature={self.temperature}: all replies were the same"
            )
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(name, getattr(self, name), "True or False")
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise ConfigError(
                "structured_outputs", self.structured_outputs, "StructuredOutputsParams, or None"
            )
        self._check_logit_bias()
        self._check_stops()

    @classmethod
    def from_generation_config(cls, values: Mapping[str, Any]) -> SamplingParams:
        """The defaults that a model's ``generation_config.json`` asks for: greedy unless ``do_sample``.

        Raises:
            ConfigError: A value is of the wrong kind or out of range.
        """
        names = ["repetition_penalty"]
        if values.get("do_sample", False):
            names += ["temperature", "top_k", "top_p", "min_p"]
        given = {name: values[name] for name in names if values.get(name) is not None}
        return cls(**given) if values.get("do_sample", False) else cls(temperature=0.0, **given)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < 1e-5

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple, empty where there is none."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def _check_logit_bias(self) -> None:
        if self.logit_bias is None:
            return
        expected = "a mapping from token ids to numbers from -100 to 100, or None"
        if not isinstance(self.logit_bias, Mapping):
            raise ConfigError("logit_bias", self.logit_bias, expected)
        for token_id, bias in self.logit_bias.items():
            if not (_is_int(token_id, 0, MOST) and _is_number(bias) and -100 <= bias <= 100):
                raise ConfigError("logit_bias", {token_id: bias}, expected)

    def _check_stops(self) -> None:
        expected = "a string that is not empty, a list of such, or None"
        if not isinstance(self.stop, str | Sequence | None) or isinstance(self.stop, bytes):
            raise ConfigError("stop", self.stop, expected)
        for string in self.stop_strings:
            if not isinstance(string, str) or not string:
                raise ConfigError("stop", string, expected)
            if not is_utf8(string):
                raise ConfigError("stop", InWords("text that UTF-8 cannot hold"), expected)
        expected = "a list of token ids, or None"
        if not isinstance(self.stop_token_ids, Sequence | None) or isinstance(
            self.stop_token_ids, str | bytes
        ):
            raise ConfigError("stop_token_ids", self.stop_token_ids, expected)
        for token_id in self.stop_token_ids or ():
            if not _is_int(token_id, 0, MOST):
                raise ConfigError("stop_token_ids", token_id, expected)

    def _require_number(self, name: str, expected: str, in_range: Callable[[Any], bool]) -> None:
        value = getattr(self, name)
        if not (_is_number(value) and in_range(value)):
            raise ConfigError(name, value, expected)

    def _require_int(self, name: str, expected: str, in_range: Callable[[Any], bool]) -> None:
        value = getattr(self, name)
        if not (isinstance(value, int) and not isinstance(value, bool) and in_range(value)):
            raise ConfigError(name, value, expected)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_int(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _require_text(name: str, value: object, expected: str) -> None:
    if not isinstance(value, str) or not value:
        raise ConfigError(name, value, expected)
    if not is_utf8(value):
        raise ConfigError(name, InWords("text that UTF-8 cannot hold"), expected)
