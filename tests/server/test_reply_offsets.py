"""Where the tokens of a reply begin in its text, whatever characters they are pieces of."""

from __future__ import annotations

from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from duckllm.server.openai_replies import ReplyOffsets
from duckllm.text.detokenizer import StreamingDetokenizer
from duckllm.text.tokenizer import Tokenizer


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.sampled_from("ab \u00fc\u00e9\u4e2d\U0001f986"), max_size=20), cut=st.integers(0, 20))
def test_what_comes_from_a_place_on_is_what_follows_it(demo_checkpoint: Path, text: str, cut: int) -> None:
    tokenizer = Tokenizer(demo_checkpoint)
    special = min(tokenizer.special_token_ids)
    ids = tokenizer.encode(text)
    ids = [*ids[:cut], special, *ids[cut:]]
    reply = StreamingDetokenizer(tokenizer)
    whole = "".join(map(reply.push, ids)) + reply.flush()
    counter = ReplyOffsets(tokenizer, 7)
    offsets = [offset - 7 for offset in counter.take(ids[:cut]) + counter.take(ids[cut:])]
    begun = [
        b"".join(tokenizer.token_bytes(each) for each in ids[:number] if each != special)
        for number in range(len(ids))
    ]
    # A character that is begun before a token, and not over, is where the token is.
    assert offsets == [len(data.decode(errors="ignore")) for data in begun]
    assert [whole.startswith(data.decode(errors="ignore")) for data in begun] == [True] * len(ids)
