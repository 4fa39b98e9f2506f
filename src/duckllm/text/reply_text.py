"""The text of one reply, from its tokens to what is shown. Called by the engine's request."""

from __future__ import annotations

from duckllm.sampling_params import SamplingParams
from duckllm.text.detokenizer import StreamingDetokenizer
from duckllm.text.stop_strings import StopStrings
from duckllm.text.tokenizer import Tokenizer


class ReplyText:
    """Text that is shown as tokens come: no half characters, nothing of a stop string.

    Args:
        tokenizer: Of the model.
        params: Its stop strings, and whether special tokens and stop strings are shown.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._detokenizer = StreamingDetokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._stops = StopStrings(params.stop_strings, include=params.include_stop_str_in_output)

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._stops.found

    def push(self, token_id: int, *, may_stop: bool) -> str:
        """The text that ``token_id`` lets be shown; where ``may_stop``, a stop string may end it."""
        return self._stops.push(self._detokenizer.push(token_id), may_stop=may_stop)

    def finish(self, *, may_stop: bool) -> str:
        """What was held back, as no token follows; an unfinished character as U+FFFD."""
        return self._stops.push(self._detokenizer.flush(), may_stop=may_stop) + self._stops.flush()
