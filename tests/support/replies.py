"""Replies given to a parser in pieces, and what came of them."""

from __future__ import annotations

from collections.abc import Iterable

from duckllm.text.chat import ContentDelta, ReasoningDelta, ReplyDelta, ReplyParser, ToolCallDelta

# A part of a reply: ("reasoning" | "content", text), or ("call", name, arguments).
Part = tuple[str, ...]


def parts_of(deltas: Iterable[ReplyDelta]) -> list[Part]:
    """Deltas of the same part put together."""
    parts: list[list[str]] = []
    num_calls = 0
    for delta in deltas:
        if isinstance(delta, ToolCallDelta):
            if delta.name is not None:
                assert delta.index == num_calls
                num_calls += 1
                parts.append(["call", delta.name, ""])
            assert delta.index == num_calls - 1
            assert parts[-1][0] == "call"
            parts[-1][2] += delta.arguments
            continue
        assert isinstance(delta, ContentDelta | ReasoningDelta)
        assert delta.text
        kind = "content" if isinstance(delta, ContentDelta) else "reasoning"
        if not parts or parts[-1][0] != kind:
            parts.append([kind, ""])
        parts[-1][1] += delta.text
    return [tuple(part) for part in parts]


def parse(parser: ReplyParser, pieces: Iterable[str]) -> list[Part]:
    """What a parser makes of a reply that comes in these pieces."""
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    parts = parts_of([*deltas, *parser.finish()])
    assert parser.num_tool_calls == sum(part[0] == "call" for part in parts)
    return parts
