"""A reply as the Responses API's events; the last of them holds the whole response.

The server streams the events, or answers with what the last one holds: both say the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from duckllm.server.responses_items import CallItem, Item, MessageItem, ReasoningItem, Told
from duckllm.text.chat import ReasoningDelta, ReplyDelta, ToolCallDelta

if TYPE_CHECKING:
    from duckllm.server.chat_service import ChatOutput

Event = dict[str, Any]


class ResponseEvents:
    """The events of one reply, in their order.

    Args:
        response: The response without what the reply adds to it: output, status, usage and what went wrong.
        new_id: Makes an id that begins as it is told.
        namespaces: The namespace and the name of functions in one, by the name that the model knows.
        shows_summary: Thinking comes as a summary instead of as content.
        keeps_reasoning: Reasoning items hold what the client needs to send them back unread.
    """

    def __init__(
        self,
        response: Event,
        new_id: Callable[[str], str],
        *,
        namespaces: Mapping[str, tuple[str, str]],
        shows_summary: bool,
        keeps_reasoning: bool,
    ) -> None:
        self._response, self._new_id, self._namespaces = response, new_id, namespaces
        self._shows_summary, self._keeps_reasoning = shows_summary, keeps_reasoning
        self._num_events = 0
        self._output: list[Event] = []
        self._open: Item | None = None
        self._logprobs: list[Event] = []  # of tokens that have added no text yet

    def begin(self) -> list[Event]:
        """The events before anything is computed."""
        response = self._whole("in_progress", None)
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def push(self, output: ChatOutput, logprobs: list[Event]) -> list[Event]:
        """The events of what was added to the reply; its last ones where it has ended.

        Args:
            output: What was added.
            logprobs: Of its tokens behind the thinking; empty where the client asked for none.
        """
        self._logprobs += logprobs
        events = [event for delta in output.deltas for event in self._delta(delta)]
        if output.finish_reason is not None:
            status = "incomplete" if output.finish_reason == "length" else "completed"
            events += self._close(status)
            response = self._whole(status, _usage(output))
            if status == "incomplete":
                response["incomplete_details"] = {"reason": "max_output_tokens"}
            events.append(self._event(f"response.{status}", response=response))
        return events

    def fail(self, code: str, message: str) -> list[Event]:
        """The events of a reply that an error has ended."""
        events = self._close("incomplete")
        response = self._whole("failed", None)
        response["error"] = {"code": code, "message": message}
        return [*events, self._event("response.failed", response=response)]

    def _delta(self, delta: ReplyDelta) -> list[Event]:
        if isinstance(delta, ToolCallDelta):
            kind: str | int = delta.index
            text = delta.arguments
        else:
            kind = "reasoning" if isinstance(delta, ReasoningDelta) else "message"
            text = delta.text
            if not text:
                return []
        events = []
        if self._open is None or self._open.kind != kind:
            events = self._close("completed") + self._begin(self._new_item(delta))
        assert self._open is not None
        # Tokens go with the text that they add to: the next one, where they are a part of a character.
        logprobs, self._logprobs = self._logprobs, []
        return events + (self._told(self._open.push(text, logprobs)) if text else [])

    def _new_item(self, delta: ReplyDelta) -> Item:
        if isinstance(delta, ToolCallDelta):
            namespace, name = self._namespaces.get(delta.name or "", (None, delta.name or ""))
            return CallItem(delta.index, self._new_id("fc_"), self._new_id("call_"), namespace, name)
        if isinstance(delta, ReasoningDelta):
            return ReasoningItem(
                self._new_id("rs_"), as_summary=self._shows_summary, keeps_text=self._keeps_reasoning
            )
        return MessageItem(self._new_id("msg_"))

    def _begin(self, item: Item) -> list[Event]:
        self._open = item
        self._output.append(item.content)
        item.content["status"] = "in_progress"
        added = self._event("response.output_item.added", **self._item_now)
        return [added, *self._told(item.begin())]

    def _close(self, status: str) -> list[Event]:
        """Ends the open item, if there is one."""
        if self._open is None:
            return []
        told = self._told(self._open.end())
        self._open.content["status"] = status
        done = self._event("response.output_item.done", **self._item_now)
        self._open = None
        return [*told, done]

    @property
    def _item_now(self) -> Event:
        """The open item as it is, and its place."""
        return {"output_index": len(self._output) - 1, "item": copy.deepcopy(self._output[-1])}

    def _told(self, told: list[Told]) -> list[Event]:
        place = {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}
        return [self._event(name, **place, **fields) for name, fields in told]

    def _event(self, name: str, /, **fields: Any) -> Event:
        self._num_events += 1
        return {"type": name, "sequence_number": self._num_events - 1, **fields}

    def _whole(self, status: str, usage: Event | None) -> Event:
        return {
            **self._response,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": copy.deepcopy(self._output),
            "usage": usage,
        }


def _usage(output: ChatOutput) -> Event:
    metrics = output.metrics
    return {
        "input_tokens": metrics.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": metrics.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": metrics.num_generated_tokens,
        "output_tokens_details": {"reasoning_tokens": output.num_reasoning_tokens},
        "total_tokens": metrics.num_prompt_tokens + metrics.num_generated_tokens,
    }
