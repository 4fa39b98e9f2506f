"""Token ids to text, one at a time, without ever showing half a character.

Called by the engine for each generated token. Knows only :class:`duckllm.text.tokenizer.Tokenizer`.

A byte-level or byte-fallback token may end inside a UTF-8 character. The bytes of the tokens tell exactly
where that is so; the text itself comes from the tokenizer's own ``decode`` of a short window, so that
whatever the decoder does with spaces is done here as well.
"""

from __future__ import annotations

import codecs

from duckllm.text.tokenizer import Tokenizer


class StreamingDetokenizer:
    """Joined, the results of :meth:`push` and :meth:`flush` are ``tokenizer.decode`` of all the tokens.

    A character split over tokens is held back until it is whole. Bytes that can begin no character come out
    as U+FFFD as soon as that is certain, an unfinished character at the end only from :meth:`flush`.

    Args:
        tokenizer: Of the model.
        skip_special_tokens: Whether special tokens have no text.

    Threading: one detokenizer belongs to one reply; it is not shared.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._context: list[int] = []  # the tokens just before the window: a text's start is special
        self._window: list[int] = []  # the tokens since the last place where no character was unfinished
        self._num_emitted_chars = 0  # of the window's text

    def push(self, token_id: int) -> str:
        """The text that ``token_id`` completes; empty while a character is unfinished."""
        data = self._tokenizer.token_bytes(token_id)
        if not data or (self._skip_special_tokens and token_id in self._tokenizer.special_token_ids):
            return ""
        self._window.append(token_id)
        self._utf8.decode(data)
        text = self._window_text()
        if self._utf8.getstate()[0]:
            return self._emit(text[:-1])  # the unfinished character decodes to one U+FFFD
        delta = self._emit(text)
        self._context, self._window, self._num_emitted_chars = self._window, [], 0
        return delta

    def flush(self) -> str:
        """What is still held back, an unfinished character as U+FFFD; then ready for another text."""
        delta = self._emit(self._window_text()) if self._window else ""
        self._utf8.reset()
        self._context, self._window, self._num_emitted_chars = [], [], 0
        return delta

    def _window_text(self) -> str:
        before = self._decode(self._context)
        return self._decode([*self._context, *self._window])[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)

    def _emit(self, text: str) -> str:
        delta = text[self._num_emitted_chars :]
        self._num_emitted_chars = max(self._num_emitted_chars, len(text))
        return delta
