"""The items of a response: what each is made of, and the events by which it grows.

Events are told without their place in the stream, which :mod:`duckllm.server.responses_events` adds.
"""

from __future__ import annotations

from typing import Any, Protocol

from duckllm.server.opaque import to_opaque

# The name of an event, and its fields but item_id, output_index and sequence_number.
Told = tuple[str, dict[str, Any]]


class Item(Protocol):
    """An item that is growing.

    Attributes:
        content: It as it is now.
    """

    content: dict[str, Any]

    @property
    def kind(self) -> str | int:
        """What may go into it: text, thinking, or the call of that number."""

    def begin(self) -> list[Told]:
        """What follows the item's beginning."""

    def push(self, text: str, logprobs: list[dict[str, Any]]) -> list[Told]:
        """What more of its text is told by."""

    def end(self) -> list[Told]:
        """What comes before the item's end."""


class MessageItem:
    """Text, in one part."""

    kind = "message"

    def __init__(self, item_id: str) -> None:
        self._part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self.content: dict[str, Any] = {"id": item_id, "type": "message", "role": "assistant", "content": []}

    def begin(self) -> list[Told]:
        """Its part's beginning."""
        self.content["content"] = [self._part]
        return [("response.content_part.added", {"content_index": 0, "part": dict(self._part)})]

    def push(self, text: str, logprobs: list[dict[str, Any]]) -> list[Told]:
        """More text, with what is known of its tokens."""
        self._part["text"] += text
        self._part["logprobs"] = [*self._part["logprobs"], *logprobs]
        return [
            ("response.output_text.delta", {"content_index": 0, "delta": text, "logprobs": logprobs}),
        ]

    def end(self) -> list[Told]:
        """Its text as a whole, and its part."""
        text, logprobs = self._part["text"], self._part["logprobs"]
        return [
            ("response.output_text.done", {"content_index": 0, "text": text, "logprobs": logprobs}),
            ("response.content_part.done", {"content_index": 0, "part": dict(self._part)}),
        ]


class ReasoningItem:
    """What is thought, as content or as a summary, in one part.

    Args:
        item_id: Its id.
        as_summary: It is shown as a summary.
        keeps_text: The item holds what the client needs to send it back unread.
    """

    kind = "reasoning"

    def __init__(self, item_id: str, *, as_summary: bool, keeps_text: bool) -> None:
        self._as_summary, self._keeps_text = as_summary, keeps_text
        self._part = {"type": "summary_text" if as_summary else "reasoning_text", "text": ""}
        self.content: dict[str, Any] = {"id": item_id, "type": "reasoning", "summary": []}
        if not as_summary:
            self.content["content"] = []
        if keeps_text:
            self.content["encrypted_content"] = ""

    @property
    def _place(self) -> dict[str, Any]:
        return {"summary_index" if self._as_summary else "content_index": 0}

    @property
    def _names(self) -> tuple[str, str]:
        """Of events about its part, and about its text."""
        if self._as_summary:
            return "response.reasoning_summary_part", "response.reasoning_summary_text"
        return "response.content_part", "response.reasoning_text"

    def begin(self) -> list[Told]:
        """Its part's beginning."""
        self.content["summary" if self._as_summary else "content"] = [self._part]
        return [(f"{self._names[0]}.added", {**self._place, "part": dict(self._part)})]

    def push(self, text: str, logprobs: list[dict[str, Any]]) -> list[Told]:
        """More of it."""
        self._part["text"] += text
        return [(f"{self._names[1]}.delta", {**self._place, "delta": text})]

    def end(self) -> list[Told]:
        """It as a whole, and its part."""
        if self._keeps_text:
            self.content["encrypted_content"] = to_opaque(self._part["text"])
        return [
            (f"{self._names[1]}.done", {**self._place, "text": self._part["text"]}),
            (f"{self._names[0]}.done", {**self._place, "part": dict(self._part)}),
        ]


class CallItem:
    """A call of a function.

    Args:
        number: The call's number in the reply.
        item_id: The item's id.
        call_id: What the client calls it by.
        namespace: Where the function is from; None for nowhere.
        name: The function.
    """

    def __init__(self, number: int, item_id: str, call_id: str, namespace: str | None, name: str) -> None:
        self.kind = number
        self.content: dict[str, Any] = {
            "id": item_id, "type": "function_call", "call_id": call_id, "name": name, "arguments": "",
        }  # fmt: skip
        if namespace is not None:
            self.content["namespace"] = namespace

    def begin(self) -> list[Told]:
        """Nothing: a call has no parts."""
        return []

    def push(self, text: str, logprobs: list[dict[str, Any]]) -> list[Told]:
        """More of its arguments."""
        self.content["arguments"] += text
        return [("response.function_call_arguments.delta", {"delta": text})]

    def end(self) -> list[Told]:
        """Its arguments as a whole."""
        return [("response.function_call_arguments.done", {"arguments": self.content["arguments"]})]
