"""The tokenizer of a model folder, with its chat template.

Called by the engine and by :mod:`duckllm.text.detokenizer`. Wraps what :mod:`duckllm.text.loading` reads, and
turns whatever goes wrong into our typed errors. Knows no tensors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from duckllm.errors import CheckpointError, RequestError
from duckllm.text.byte_tokens import byte_level_bytes, byte_level_spelling, fallback_byte, mend_fallback_bytes
from duckllm.text.chat_template import ChatTemplate, JinjaTemplate, Message
from duckllm.text.control_text import control_texts, free_mark, put_marks, spelled_in, texts_of
from duckllm.text.formats.deepseek_v32 import DeepseekV32Template
from duckllm.text.loading import load_tokenizer, read_json_object, wrong_field
from duckllm.text.messages import check_messages

# Texts are counted in pieces of so many characters, and a cut makes at most so many tokens more.
_COUNTED_CHARACTERS = 1 << 14
_CUT_TOKENS = 32


class Tokenizer:
    """Text to token ids and back, as the model's own files say.

    Args:
        folder: A model folder: tokenizer files, and generation_config.json where there is one.

    Attributes:
        eos_token_ids: The tokens that end a reply, ascending.
        special_token_ids: The tokens that :meth:`decode` leaves out.
        special_texts: Their spellings.
        control_token_ids: These, and others that steer the model and are no text of its own.
        bos_token_id: The token that begins a text, or None.
        chat_template: How the folder says that conversations are written; None where it does not.
        max_token_id: The highest id of any token. A model may have rows for more, which no token has.

    Raises:
        ModelNotFoundError: There is no such folder, or no tokenizer in it.
        CheckpointError: The tokenizer's files cannot be used.
        UnsupportedModelError: They leave out what only code beside them says, and that code is not known.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._inner = load_tokenizer(self.folder)
        self.bos_token_id: int | None = self._inner.bos_token_id
        self.eos_token_ids = self._find_eos_token_ids()
        added = self._inner.added_tokens_decoder
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.special_texts = frozenset(token.content for token in added.values() if token.special)
        self.chat_template = self._find_template()
        self._control_texts = control_texts(
            ((token.content, token.special) for token in added.values()),
            "" if self.chat_template is None else self.chat_template.source,
        )
        self.control_token_ids = self.special_token_ids | {
            token_id for token_id, token in added.items() if token.content in self._control_texts
        }
        self._control_ids: dict[str, int] = {
            added[token_id].content: token_id for token_id in sorted(self.control_token_ids)
        }
        decoders = _decoder_types(self._inner)
        self._byte_level = "ByteLevel" in decoders
        self._byte_fallback = "ByteFallback" in decoders
        # An added token is spelled as it is, which a byte-level decoder would take for stand-ins of bytes.
        self._added_spellings = {
            token_id: byte_level_spelling(token.content.encode())
            for token_id, token in added.items()
            if self._byte_level
        }
        self.max_token_id: int = max(self._inner.get_vocab().values())
        self._adds_bos = self.bos_token_id is not None and (
            self._inner.encode("a")[:1] == [self.bos_token_id]
            # Where there is a tokenizer.json, transformers no longer reads this.
            or read_json_object(self.folder / "tokenizer_config.json").get("add_bos_token") is True
        )
        self._template_begins_with_bos = self._probe_template()

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, begun by BOS exactly once where the tokenizer, template or text begins so.

        A control token that is spelled in the text becomes that token, so that a caller may write a
        conversation by hand; a text from somebody else belongs into :meth:`apply_chat_template`.

        Raises:
            RequestError: ``text`` is not valid Unicode.
        """
        ids = self._encode(text, "prompt")
        begins_with_bos = self._adds_bos or self._template_begins_with_bos or ids[:1] == [self.bos_token_id]
        return self._with_one_bos(ids) if begins_with_bos else ids

    def count_beyond(self, texts: Sequence[str], most: int) -> int | None:
        """A number of tokens above ``most`` that the texts have at least; None where they may have fewer.

        For texts of any length at a cost that ``most`` bounds: they are counted in pieces until it is enough.

        Raises:
            RequestError: A text is not valid Unicode.
        """
        num_tokens = 0
        for text in texts if sum(map(len, texts)) > most else ():
            for start in range(0, len(text), _COUNTED_CHARACTERS):
                piece = self._encode(text[start : start + _COUNTED_CHARACTERS], "prompt")
                num_tokens += max(0, len(piece) - _CUT_TOKENS)
                if num_tokens > most:
                    return num_tokens
        return None

    def control_parts(self, text: str) -> list[int | str]:
        """``text`` as the ids of the control tokens that it spells, and the texts between them, if any.

        Where several begin at the same character, the longest counts.
        """
        spelled = sorted(filter(None, self._control_ids), key=len, reverse=True)
        pieces = re.split(f"({'|'.join(map(re.escape, spelled))})", text) if spelled else [text]
        return [self._control_ids.get(piece, piece) for piece in pieces if piece]

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] = (),
        options: Message | None = None,
        own_texts: Mapping[str, str] | None = None,
    ) -> list[int]:
        """Token ids of a conversation, ending where the assistant's reply begins.

        Control tokens come from the template alone: one that is spelled in a message, a tool or an option is
        ordinary text there, cut behind its first character, with the same characters when decoded. The one
        exception are tokens that are not flagged as special and that the template itself looks for in
        replies (``</think>``).

        Args:
            messages: ``{"role": "system" | "user" | "assistant" | "tool", "content": text}`` and what else
                the template knows (``tool_calls``, ``reasoning_content``), oldest first.
            tools: ``{"type": "function", "function": {...}}``, for templates that know tools.
            options: More names for the template.
            own_texts: Texts with control tokens of their own that take the place of others in messages.

        Raises:
            RequestError: A message is malformed, or the template refuses the conversation.
            CheckpointError: The folder has no chat template, or a broken one.
        """
        return self.encode_pieces(self.render_chat(messages, tools, options, own_texts))

    def render_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] = (),
        options: Message | None = None,
        own_texts: Mapping[str, str] | None = None,
    ) -> list[str]:
        """What :meth:`apply_chat_template` encodes: the text, cut inside each control token that is none.

        Args and errors as there.
        """
        pieces = self._pieces(check_messages(messages), tools, options or {})
        for stand_in, text in (own_texts or {}).items():
            pieces = [piece.replace(stand_in, text) for piece in pieces]
        return pieces

    def encode_pieces(self, pieces: Sequence[str]) -> list[int]:
        """Token ids of a rendered conversation, each piece encoded for itself, with one BOS."""
        ids = self._encode_pieces(pieces)
        return self._with_one_bos(ids) if self._adds_bos or ids[:1] == [self.bos_token_id] else ids

    def continue_chat_template(
        self, messages: Sequence[Message], *, keep_replies: bool = True
    ) -> list[int] | None:
        """Token ids of what the template writes behind the last reply of a conversation.

        They follow the tokens that the reply really had, and begin with what ends its turn. Control tokens as
        for :meth:`apply_chat_template`.

        Args:
            messages: A conversation with a reply in it and more behind that.
            keep_replies: Whether replies stay as they were even where the template writes earlier ones
                otherwise, such as without their thinking.

        Returns:
            None where the template writes what was before otherwise now: what follows is not to be had alone.

        Raises:
            RequestError: As :meth:`apply_chat_template`.
            CheckpointError: Likewise.
        """
        check_messages(messages)
        last = max(number for number, message in enumerate(messages) if message["role"] == "assistant")
        stand_in = free_mark([self._template().source, *_all_texts(messages)])
        hidden = [
            {**message, "content": stand_in} if message["role"] == "assistant" else message
            for message in messages
        ]
        pieces = self._pieces(hidden)
        found = max((number for number, piece in enumerate(pieces) if stand_in in piece), default=None)
        if found is None:
            return None
        before, _, after = pieces[found].rpartition(stand_in)
        # What is written for a reply to begin, such as a mark before its thinking, may be missing later.
        if not "".join(self._pieces(hidden[:last])).startswith("".join(pieces[:found]) + before):
            return None
        if not keep_replies:
            said = self._render(_Given(messages[:last])) + messages[last]["content"]
            if not self._render(_Given(messages)).startswith(said):
                return None
        ids = self._encode_pieces([after, *pieces[found + 1 :]])
        return ids if ids and self._encode_pieces(pieces)[-len(ids) :] == ids else None

    def _pieces(
        self, messages: Sequence[Message], tools: Sequence[Message] = (), options: Message | None = None
    ) -> list[str]:
        """The rendered conversation, cut inside each control token that is spelled in what is rendered."""
        given = _Given(messages, tools, options or {})
        text = self._render(given)
        _check_unicode(text, "messages")
        spelled = set().union(*(spelled_in(each, self._control_texts) for each in given.all))
        self._refuse_hidden(given, spelled)
        return self._render_in_pieces(given, text, spelled) if spelled else [text]

    def _encode_pieces(self, pieces: Sequence[str]) -> list[int]:
        return [token_id for piece in pieces for token_id in self._encode(piece, "messages")]

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ``token_ids``, without ids that no token has, and without special tokens unless asked.

        Each broken character is one U+FFFD.
        """
        ids = list(token_ids)
        if not self._byte_level and not self._byte_fallback:
            text: str = self._inner.decode(
                ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
            return text
        left_out = self.special_token_ids if skip_special_tokens else ()
        spelled = (self._token(token_id) for token_id in ids if token_id not in left_out)
        tokens = [token for token in spelled if token is not None]
        if self._byte_fallback:
            tokens = mend_fallback_bytes(tokens)
        return str(self._inner.backend_tokenizer.decoder.decode(tokens))

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes that one token stands for, whole characters or not; empty for an unknown token.

        Bytes of whole characters may differ from the decoded text (a space may be written ``▁``).
        """
        token = self._token(token_id)
        if token is None:
            return b""
        data = byte_level_bytes(token) if self._byte_level else None
        if data is None and self._byte_fallback:
            data = fallback_byte(token)
        return token.encode() if data is None else data

    def bytes_in_text(self, token_id: int, *, first: bool = False) -> bytes:
        """The UTF-8 bytes that one token adds to a decoded text, within it or as its ``first``.

        Empty for a control token and for an unknown one.
        """
        if token_id in self.control_token_ids:
            return b""
        data = self.token_bytes(token_id)
        if not data or self._byte_level or (self._byte_fallback and len(data) == 1 and data[0] >= 0x80):
            return data
        before = [] if first else self._inner.encode("a", add_special_tokens=False)[-1:]
        return self.decode([*before, token_id])[len(self.decode(before)) :].encode()

    def info(self) -> dict[str, str | None]:
        """Names and texts that ``tokenizer_config.json`` has for them: class, special tokens, chat template.

        The template is None where the folder has none in Jinja; of several it is the default one.
        """
        inner, template = self._inner, self._inner.chat_template
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        return {
            "tokenizer_class": type(inner).__name__,
            **{name: getattr(inner, name, None) for name in names},
            "chat_template": template.get("default") if isinstance(template, dict) else template,
        }

    def _token(self, token_id: int) -> str | None:
        """The token as its decoder takes it; None for an id that no token has."""
        token: str | None = self._added_spellings.get(token_id)
        return self._inner.convert_ids_to_tokens(token_id) if token is None else token

    def _encode(self, text: str, field: str) -> list[int]:
        if not isinstance(text, str):
            raise RequestError(f"{field}: got {type(text).__name__}, expected text")
        _check_unicode(text, field)
        ids: list[int] = self._inner.encode(text, add_special_tokens=False)
        return ids

    def _with_one_bos(self, ids: list[int]) -> list[int]:
        assert self.bos_token_id is not None
        start = 0
        while start < len(ids) and ids[start] == self.bos_token_id:
            start += 1
        return [self.bos_token_id, *ids[start:]]

    def _find_template(self) -> ChatTemplate | None:
        if self._inner.chat_template:
            return JinjaTemplate(self._inner, self.folder)
        model_type = read_json_object(self.folder / "config.json").get("model_type")
        own = DeepseekV32Template()
        is_v32 = model_type == "deepseek_v32" and own.control_tokens <= self._inner.get_vocab().keys()
        return own if is_v32 else None

    def _template(self) -> ChatTemplate:
        if self.chat_template is None:
            raise CheckpointError(
                f"chat_template: {self.folder} has none, expected one in tokenizer_config.json "
                "or chat_template.jinja"
            )
        return self.chat_template

    def _render(self, given: _Given) -> str:
        return self._template().render(given.messages, given.tools, given.options)

    def _render_in_pieces(self, given: _Given, text: str, spelled: set[str]) -> list[str]:
        """``text``, the rendered conversation, cut inside each control token that is spelled in it."""
        mark = free_mark([text, self._template().source, *given.texts])

        def marked(in_replies: set[str], elsewhere: set[str]) -> str:
            return self._render(given.marked(in_replies, elsewhere, mark))

        looked_for = {
            control
            for control in spelled - self.special_texts
            if marked({control}, set()).replace(mark, "") != text
        }
        return marked(spelled - looked_for, spelled).split(mark)

    def _refuse_hidden(self, given: _Given, spelled: set[str]) -> None:
        """Refuses a control token that only the tokenizer's normalisation spells, as of wide letters."""
        normalizer = getattr(getattr(self._inner, "backend_tokenizer", None), "normalizer", None)
        if normalizer is None:
            return
        for text in given.texts:
            normalized = {"content": normalizer.normalize_str(text)}
            for control in spelled_in(normalized, self._control_texts) - spelled:
                raise RequestError(
                    f"messages: got text that the tokenizer reads as {control!r}, expected no control token"
                )

    def _probe_template(self) -> bool:
        if self.bos_token_id is None or self.chat_template is None:
            return False
        try:
            text = self._render(_Given([{"role": "user", "content": "a"}]))
        except (CheckpointError, RequestError):
            return False  # said again, and loudly, to whoever uses the template
        return text.startswith(str(self._inner.bos_token))

    def _find_eos_token_ids(self) -> tuple[int, ...]:
        found = {self._inner.eos_token_id}
        path = self.folder / "generation_config.json"
        listed = read_json_object(path).get("eos_token_id")
        ids = listed if isinstance(listed, list) else [] if listed is None else [listed]
        if not all(type(each) is int and each >= 0 for each in ids):
            raise wrong_field(path, "eos_token_id", listed, "a token id, or a list of them")
        found.update(ids)
        return tuple(sorted(token_id for token_id in found if token_id is not None))


class _Given:
    """What a template is given, all of which somebody else may have written."""

    def __init__(
        self, messages: Sequence[Message], tools: Sequence[Message] = (), options: Message | None = None
    ) -> None:
        self.messages, self.tools, self.options = messages, tools, options or {}

    @property
    def all(self) -> list[Message]:
        """Messages, tools and options."""
        return [*self.messages, *self.tools, {"options": self.options}]

    @property
    def texts(self) -> list[str]:
        """Every text in it, but for roles."""
        return _all_texts(self.all)

    def marked(self, in_replies: set[str], elsewhere: set[str], mark: str) -> _Given:
        """The same with a mark in these control texts, by who spells them."""
        messages = [
            put_marks(message, in_replies if message["role"] == "assistant" else elsewhere, mark)
            for message in self.messages
        ]
        tools = [put_marks(tool, elsewhere, mark) for tool in self.tools]
        return _Given(messages, tools, put_marks({"options": self.options}, elsewhere, mark)["options"])


def _all_texts(messages: Sequence[Message]) -> list[str]:
    return [text for message in messages for text in texts_of(message)]


def _check_unicode(text: str, field: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{field}: got an unpaired surrogate at character {error.start}, expected valid Unicode text"
        ) from error


def _decoder_types(inner: Any) -> set[str]:
    """Names of every decoder in the tokenizer's chain."""
    decoder = getattr(getattr(inner, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return set()
    found: set[str] = set()
    waiting = [json.loads(decoder.__getstate__())]
    while waiting:
        decoder = waiting.pop()
        if isinstance(decoder, dict):
            found.add(decoder["type"])
            waiting.extend(decoder.get("decoders", []))
    return found
