"""A reply as the Anthropic API's events, and the message that they make together.

The server streams the events, or folds them into one message: both say the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json

from duckllm.server.opaque import to_opaque
from duckllm.text.chat import ReasoningDelta, ReplyDelta, ToolCallDelta

if TYPE_CHECKING:
    from duckllm.server.chat_service import ChatOutput

Event = dict[str, Any]


class MessageEvents:
    """The events of one reply, in their order.

    Args:
        message_id: The message's id.
        model: The model's name, as the client wrote it.
        num_prompt_tokens: Tokens of the prompt.
        max_tokens: Most tokens that the client asked for.
        hide_thinking: Thinking blocks have no text; their signature holds it.
        answers_diagnostics: The message says of the cache that nothing is known about earlier requests.
        new_tool_id: Makes the id of a call.
    """

    def __init__(
        self,
        message_id: str,
        model: str,
        num_prompt_tokens: int,
        max_tokens: int,
        *,
        hide_thinking: bool,
        answers_diagnostics: bool,
        new_tool_id: Callable[[], str],
    ) -> None:
        self._message_id, self._model = message_id, model
        self._num_prompt_tokens, self._max_tokens = num_prompt_tokens, max_tokens
        self._hide_thinking, self._new_tool_id = hide_thinking, new_tool_id
        self._answers_diagnostics = answers_diagnostics
        self._index = -1
        self._open: str | int | None = None  # the kind of the block that is open, or the number of its call
        self._thinking = ""

    def begin(self) -> list[Event]:
        """The events before anything is computed; what of the prompt was cached is not known yet."""
        message: Event = {
            "id": self._message_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(self._num_prompt_tokens),
        }
        if self._answers_diagnostics:
            message["diagnostics"] = {"cache_miss_reason": {"type": "unavailable"}}
        return [{"type": "message_start", "message": message}, {"type": "ping"}]

    def push(self, output: ChatOutput) -> list[Event]:
        """The events of what was added to the reply; its last ones where it has ended."""
        events = [event for delta in output.deltas for event in self._delta(delta)]
        if output.finish_reason is not None:
            events += self._close() + self._end(output)
        return events

    def _delta(self, delta: ReplyDelta) -> list[Event]:
        if isinstance(delta, ToolCallDelta):
            events = []
            if self._open != delta.index:
                block: Event = {
                    "type": "tool_use",
                    "id": self._new_tool_id(),
                    "name": delta.name,
                    "input": {},
                }
                events = self._begin(delta.index, block)
            if delta.arguments:
                events.append(self._changed({"type": "input_json_delta", "partial_json": delta.arguments}))
            return events
        if not delta.text:
            return []
        if isinstance(delta, ReasoningDelta):
            events = self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            self._thinking += delta.text
            if not self._hide_thinking:
                events.append(self._changed({"type": "thinking_delta", "thinking": delta.text}))
            return events
        events = self._begin("text", {"type": "text", "text": "", "citations": None})
        return [*events, self._changed({"type": "text_delta", "text": delta.text})]

    def _begin(self, kind: str | int, block: Event) -> list[Event]:
        if self._open == kind:
            return []
        events = self._close()
        self._open = kind
        self._index += 1
        return [*events, {"type": "content_block_start", "index": self._index, "content_block": block}]

    def _close(self) -> list[Event]:
        if self._open is None:
            return []
        events = []
        if self._open == "thinking":
            events.append(self._changed({"type": "signature_delta", "signature": self._signature()}))
            self._thinking = ""
        self._open = None
        return [*events, {"type": "content_block_stop", "index": self._index}]

    def _changed(self, delta: Event) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _signature(self) -> str:
        """What names the thinking: the text itself where it is not shown, else its hash."""
        if self._hide_thinking:
            return to_opaque(self._thinking)
        return hashlib.sha256(self._thinking.encode()).hexdigest()

    def _end(self, output: ChatOutput) -> list[Event]:
        metrics = output.metrics
        stop_reason, stop_sequence = "end_turn", None
        if output.finish_reason == "length":
            at_limit = metrics.num_generated_tokens >= self._max_tokens
            stop_reason = "max_tokens" if at_limit else "model_context_window_exceeded"
        elif output.finish_reason == "tool_calls":
            stop_reason = "tool_use"
        elif isinstance(output.stop_reason, str):
            stop_reason, stop_sequence = "stop_sequence", output.stop_reason
        return [
            {
                "type": "message_delta",
                "delta": {"stop_reason": stop_reason, "stop_sequence": stop_sequence},
                "usage": _usage(
                    metrics.num_prompt_tokens,
                    metrics.num_cached_tokens,
                    metrics.num_generated_tokens,
                    output.num_reasoning_tokens,
                ),
            },
            {"type": "message_stop"},
        ]


def fold(events: Iterable[Event]) -> Event:
    """The message that a reply's events make together."""
    message: Event = {}
    arguments: dict[int, str] = {}
    for event in events:
        kind = event["type"]
        if kind == "message_start":
            message = {**event["message"], "content": []}
        elif kind == "content_block_start":
            message["content"].append(dict(event["content_block"]))
        elif kind == "content_block_delta":
            block, delta = message["content"][-1], event["delta"]
            if delta["type"] == "input_json_delta":
                index = event["index"]
                arguments[index] = arguments.get(index, "") + delta["partial_json"]
            else:
                name = delta["type"].removesuffix("_delta")
                block[name] += delta[name]
        elif kind == "message_delta":
            message |= event["delta"]
            message["usage"] = {**message["usage"], **event["usage"]}
    for index, text in arguments.items():
        message["content"][index]["input"] = _as_object(text)
    return message


def _as_object(arguments: str) -> dict[str, Any]:
    """A call's arguments; of those that were cut, what is whole, as in the official package."""
    try:
        value = from_json(arguments, allow_partial=True)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}


def _usage(num_prompt: int, num_cached: int = 0, num_generated: int = 0, num_thinking: int = 0) -> Event:
    """Tokens by their kind; input tokens are those that were computed, as in the official API."""
    return {
        "input_tokens": num_prompt - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": num_generated,
        "output_tokens_details": {"thinking_tokens": num_thinking},
    }
