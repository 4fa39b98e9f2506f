"""What is computed to see how good a format is: passages of a file, or of the prompts that ship.

Called by :mod:`duckllm.quality.measure` and :mod:`duckllm.quality.calibrate`. Knows the tokenizer and the
demo model's suite; no model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from duckllm.demo.suite import load_suite
from duckllm.errors import CheckpointError, ConfigError, RequestError
from duckllm.text import Tokenizer
from duckllm.text.chat_format import ChatFormat, chat_format
from duckllm.text.messages import as_messages

PROMPTS = Path(__file__).parent / "prompts.jsonl"
MIN_WINDOW = 16
_MOST_BYTES = 64 << 20

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Passage:
    """Tokens that a model is shown, each predicted from those before it.

    Args:
        token_ids: All of them.
        first: The first token whose prediction counts: 1 of a text, the reply's first one of a conversation.
        num_prompt_tokens: So many tokens are the prompt where a reply is asked for.
        is_open: Whether its reply is not written yet: the reference's own is put behind it.
    """

    token_ids: tuple[int, ...]
    first: int
    num_prompt_tokens: int
    is_open: bool = False

    @property
    def prompt(self) -> tuple[int, ...]:
        """What a reply is asked for to."""
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def num_counted(self) -> int:
        """Predictions that count."""
        return len(self.token_ids) - self.first

    def with_reply(self, token_ids: Sequence[int]) -> Passage:
        """The same with its reply, of one token at least, behind it."""
        return replace(self, token_ids=(*self.token_ids, *token_ids), is_open=False)


def shipped_passages(tokenizer: Tokenizer, *, is_demo: bool) -> list[Passage]:
    """The passages of the prompts that ship: the demo model's own questions with their answers, or others.

    Args:
        tokenizer: The model's.
        is_demo: Whether the model is the demo model, which knows nothing but what it learnt.
    """
    if not is_demo:
        return read_passages(PROMPTS, tokenizer, window=MIN_WINDOW)
    chats = [[*item.chat, {"role": "assistant", "content": item.answer}] for item in load_suite()]
    chat_form = chat_format(tokenizer)
    return [_conversation("suite", chat, tokenizer, chat_form, "suite") for chat in chats]


def check_readable(field: str, path: Path) -> None:
    """Refuses a file that is not there or holds no text, before anything else is done.

    Raises:
        ConfigError: It cannot be read, or is empty, not UTF-8 or too large.
    """
    _read(field, path)


def read_passages(path: Path, tokenizer: Tokenizer, *, window: int, field: str = "text") -> list[Passage]:
    """The passages of a file.

    Args:
        path: A file whose name ends in ``.jsonl`` has a prompt a line: a string, or an object with ``prompt``
            (text) or ``messages`` (a conversation; what its last message answers is the prompt where that
            message is the assistant's). Any other file is one text, cut into windows.
        tokenizer: The model's.
        window: Tokens of a window of a text.
        field: The option that named the file, for errors.

    Raises:
        ConfigError: The file cannot be read, or holds something else.
    """
    data = _read(field, path)
    if path.suffix != ".jsonl":
        return _windows(field, data, tokenizer, window, str(path))
    found, chat_form = [], chat_format(tokenizer)
    # Not splitlines(): JSON may have other separators of lines inside its strings as they are.
    for number, line in enumerate(data.split("\n"), 1):
        if line.strip():
            found.append(_of_line(field, line, tokenizer, chat_form, f"{path}, line {number}"))
    if not found:
        raise ConfigError(field, str(path), "a file with a prompt")
    return found


def spread(passages: Sequence[Passage], most_tokens: int, reply_tokens: int) -> list[Passage]:
    """Passages from all over a list, so that about ``most_tokens`` predictions count; one at least.

    Args:
        passages: All there are.
        most_tokens: Predictions that count, at most, unless the first passage alone has more.
        reply_tokens: What a reply that is not written yet counts.
    """
    sizes = [reply_tokens if each.is_open else each.num_counted for each in passages]
    every = max(1, -(-sum(sizes) // most_tokens))
    chosen: list[Passage] = []
    total = 0
    for passage, size in list(zip(passages, sizes, strict=True))[::every]:
        if chosen and total + size > most_tokens:
            break
        chosen.append(passage)
        total += size
    return chosen


def _read(field: str, path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)  # no more, however large it is, or without an end
        if len(data) > _MOST_BYTES:
            raise ConfigError(field, str(path), f"a file of at most {_MOST_BYTES:,} bytes")
        text = data.decode()
    except OSError as error:
        raise ConfigError(field, str(path), f"a file that can be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise ConfigError(field, str(path), f"text in UTF-8 (byte {error.start} is none)") from None
    if not text.strip():
        raise ConfigError(field, str(path), "a file that is not empty")
    return text


def _windows(field: str, text: str, tokenizer: Tokenizer, window: int, where: str) -> list[Passage]:
    """Windows of a text; each begins as the tokenizer begins a text, with BOS where it has one."""
    ids = tokenizer.encode(text)
    begin = ids[:1] if ids[:1] == [tokenizer.bos_token_id] else []
    rest = ids[len(begin) :]
    step = window - len(begin)
    pieces = [[*begin, *rest[start : start + step]] for start in range(0, len(rest), step)]
    if len(pieces) > 1 and len(pieces[-1]) < MIN_WINDOW:  # hardly any context
        pieces.pop()
    if not pieces or len(pieces[0]) < 2:
        raise ConfigError(field, where, "a text of two tokens at least")
    return [Passage(tuple(each), 1, max(1, len(each) // 2)) for each in pieces]


def _of_line(field: str, line: str, tokenizer: Tokenizer, chat_form: ChatFormat, where: str) -> Passage:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(field, where, f"JSON ({error})") from None
    if isinstance(value, dict):
        value = value.get("messages", value.get("prompt"))
    if isinstance(value, str) and value.strip():
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise ConfigError(field, where, "a string, or an object with prompt or messages")
    return _conversation(field, value, tokenizer, chat_form, where)


def _conversation(
    field: str, messages: list[dict[str, Any]], tokenizer: Tokenizer, chat_form: ChatFormat, where: str
) -> Passage:
    """A conversation; open where its last message is not the assistant's."""
    try:
        parsed = as_messages(messages)
        answered = parsed[-1].role == "assistant"
        if answered and len(parsed) < 2:
            raise RequestError("messages: got a reply to nothing, expected a user's message before it")
        prompt = _prompt(field, tokenizer, chat_form, messages[:-1] if answered else messages)
        if not answered:
            return Passage(tuple(prompt), len(prompt), len(prompt), is_open=True)
        whole = tokenizer.apply_chat_template(messages)
    except RequestError as error:
        raise ConfigError(field, where, f"messages that the model's template takes ({error})") from None
    first = 0
    while first < min(len(prompt), len(whole)) and prompt[first] == whole[first]:
        first += 1
    ends = [place for place in range(first, len(whole)) if whole[place] in tokenizer.eos_token_ids]
    last = ends[0] + 1 if ends else len(whole)  # what a template puts behind a reply is none of it
    first = max(1, min(first, last - 1))
    return Passage(tuple(whole[:last]), first, first)


def _prompt(
    field: str, tokenizer: Tokenizer, chat_form: ChatFormat, messages: Sequence[dict[str, Any]]
) -> list[int]:
    """The tokens of a conversation; without a template, of a base model, the last message as text."""
    if tokenizer.chat_template is None:
        return tokenizer.encode(messages[-1]["content"])
    try:
        return list(chat_form.prompt(as_messages(messages)).token_ids)
    except CheckpointError as error:
        raise ConfigError(
            field, "a conversation", f"text, for a model without a template ({error})"
        ) from None
