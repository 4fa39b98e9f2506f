from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duckllm.text.stop_strings import StopStrings

PIECES = st.lists(st.text(alphabet="abé", max_size=5), max_size=12)
STOPS = st.lists(st.text(alphabet="abé", min_size=1, max_size=4), min_size=1, max_size=4)


def cut(text: str, stops: list[str], first_end: int, include: bool) -> tuple[str, str | None]:
    """The slow twin: every end of the whole text, for a stop string that ends there."""
    for end in range(max(1, first_end), len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def longest_beginning(text: str, stops: list[str]) -> int:
    """How many characters at the end of ``text`` may be the beginning of a stop string."""
    return max(
        length for stop in stops for length in range(len(stop)) if not length or text.endswith(stop[:length])
    )


@settings(max_examples=300, deadline=None)
@given(pieces=PIECES, stops=STOPS, include=st.booleans(), num_free=st.integers(0, 4))
def test_any_pieces_are_cut_as_the_whole_text(
    pieces: list[str], stops: list[str], include: bool, num_free: int
) -> None:
    """In the first ``num_free`` pieces no stop string counts; one that is complete later does."""
    free_text = "".join(pieces[:num_free])
    expected, found = cut("".join(pieces), stops, len(free_text) + 1, include)
    matcher, shown, so_far = StopStrings(stops, include=include), "", ""
    for number, piece in enumerate(pieces):
        shown += matcher.push(piece, may_stop=number >= num_free)
        so_far += piece
        assert expected.startswith(shown)
        if matcher.found is not None:
            break
        held = 0 if include else longest_beginning(so_far, stops)
        assert len(shown) == len(so_far) - held
    assert matcher.found == found
    if found is None:
        shown += matcher.flush()
    assert shown == expected
    assert matcher.flush() == ""


def test_without_stop_strings_everything_passes() -> None:
    matcher = StopStrings(())
    assert [matcher.push(piece) for piece in ("a", "", "bc")] == ["a", "", "bc"]
    assert (matcher.found, matcher.flush()) == (None, "")


def test_what_turns_out_to_be_no_stop_string_is_shown_then() -> None:
    matcher = StopStrings(["###end"])
    assert [matcher.push(piece) for piece in ("a#", "#", "#", "#", "en", "x")] == [
        "a",
        "",
        "",
        "#",
        "",
        "###enx",
    ]


def test_the_first_to_be_complete_counts() -> None:
    matcher = StopStrings(["abcdef", "cd", "bcd", "d"])
    assert matcher.push("xabcdef") == "xa"
    assert matcher.found == "bcd"


@pytest.mark.parametrize("length", [1000, 20000])
def test_the_cost_is_linear_in_the_text(length: int) -> None:
    """Counted as comparisons of a character: an end that always looks like a beginning is no rescan."""

    class Counted(str):
        __slots__ = ()
        compared = 0

        def __ne__(self, other: object) -> bool:
            Counted.compared += 1
            return str.__ne__(self, other)

        __hash__ = str.__hash__

    matcher = StopStrings(["a" * 500 + "b"])
    advance = matcher._advance
    for _ in range(length):
        assert advance(Counted("a")) is None
    assert Counted.compared <= 3 * length
