"""How a model writes conversations: its chat template, and replies as plain text.

Chosen by :func:`chat_format`; used by the server.
"""

from __future__ import annotations

from collections.abc import Sequence

from duckllm.errors import RequestError
from duckllm.sampling_params import SamplingParams
from duckllm.text.chat import ChatMessage, ChatOptions, ChatPrompt, ContentDelta, ReplyDelta, ReplyParser
from duckllm.text.tokenizer import Tokenizer


class PlainParser:
    """Takes all of a reply as content."""

    @property
    def num_tool_calls(self) -> int:
        """None ever."""
        return 0

    def push(self, text: str) -> list[ReplyDelta]:
        """The text itself."""
        return [ContentDelta(text)] if text else []

    def finish(self) -> list[ReplyDelta]:
        """Nothing is held back."""
        return []


class ChatFormat:
    """Conversations as the model's chat template writes them.

    Args:
        tokenizer: Of the model.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def prompt(self, messages: Sequence[ChatMessage], options: ChatOptions) -> ChatPrompt:
        """The conversation as the model reads it.

        Raises:
            RequestError: It has what the template cannot write.
        """
        asked = {
            "tools": options.tools,
            "chat_template_kwargs": options.template_kwargs or options.enable_thinking is not None,
            "reasoning_effort": options.reasoning_effort,
        }
        for field, value in asked.items():
            if value:
                raise RequestError(f"{field}: got some, expected none, as this model's template knows none")
        written = []
        for number, message in enumerate(messages):
            if message.role == "tool" or message.tool_calls or message.reasoning_content is not None:
                expected = "a message of text, as this model's template knows no other"
                raise RequestError(f"messages[{number}]: got {message.role} with more, expected {expected}")
            written.append({"role": message.role, "content": message.content})
        return ChatPrompt(tuple(self._tokenizer.apply_chat_template(written)))

    def parser(self, options: ChatOptions, begins_in_reasoning: bool) -> ReplyParser:
        """Takes one reply apart."""
        return PlainParser()

    def sampling(
        self, params: SamplingParams, options: ChatOptions, begins_in_reasoning: bool
    ) -> SamplingParams:
        """The sampling of a reply that keeps to the options.

        Raises:
            RequestError: It cannot be made to.
        """
        if options.response_format is not None:
            from dataclasses import replace

            return replace(params, structured_outputs=options.response_format)
        return params


def chat_format(tokenizer: Tokenizer) -> ChatFormat:
    """The format of a model's conversations."""
    return ChatFormat(tokenizer)
