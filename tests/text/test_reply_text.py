from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duckllm.sampling_params import SamplingParams
from duckllm.text import Tokenizer
from duckllm.text.reply_text import ReplyText


@pytest.fixture(scope="module")
def tokenizer(demo_checkpoint: Path) -> Tokenizer:
    return Tokenizer(demo_checkpoint)


@settings(max_examples=200, deadline=None)
@given(
    words=st.lists(st.sampled_from(["duck", " the", "é", "🦆", "你好", "\n", "a", "aa"]), max_size=10),
    extra=st.lists(st.integers(0, 8191), max_size=4),
    data=st.data(),
)
def test_any_tokens_show_the_decoded_text_up_to_a_stop_string(
    tokenizer: Tokenizer, words: list[str], extra: list[int], data: st.DataObject
) -> None:
    """Stop strings are cut from the whole text and from others; tokens may end inside characters."""
    ids = [token_id for word in words for token_id in tokenizer.encode(word)[1:]]
    place = data.draw(st.integers(0, len(ids)))
    ids[place:place] = extra
    whole = tokenizer.decode(ids)
    start = data.draw(st.integers(0, len(whole)))
    cut_out = whole[start : data.draw(st.integers(start, min(len(whole), start + 6)))]
    stops = [stop for stop in (cut_out, "aaa", "🦆🦆") if stop]
    ends = [(end, -len(stop), stop) for stop in stops if (end := whole.find(stop) + len(stop)) >= len(stop)]
    expected, found = whole, None
    if ends:
        end, _, found = min(ends)
        expected = whole[: end - len(found)]
    text, shown = ReplyText(tokenizer, SamplingParams(stop=stops)), ""
    for count, token_id in enumerate(ids, start=1):
        shown += text.push(token_id, may_stop=True)
        assert expected.startswith(shown)
        if text.stop_string is not None:
            assert found is not None
            assert found in tokenizer.decode(ids[:count])
            break
    else:
        shown += text.finish(may_stop=True)
    assert (shown, text.stop_string) == (expected, found)
