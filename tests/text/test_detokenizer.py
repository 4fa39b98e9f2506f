from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from duckllm.text import StreamingDetokenizer, Tokenizer
from support.tokenizers import trained_tokens, write_byte_fallback, write_kimi

REPLACEMENT = "\ufffd"
PIECES = ["duck", " the", " ", "  ", "\n", "é", "e\u0301", "你", "好", "世界", "🦆", "한국", "नि", "ß"]
PIECES += ["👩\u200d👩\u200d👧", "🏳️\u200d🌈", "\u200d", "\ufeff", "\u0301", ".", ",", " 't", "42"]
PIECES += ["<|user|>", REPLACEMENT, "\U0010ffff", "\x00"]
TEXTS = st.one_of(
    st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40),
    st.lists(st.sampled_from(PIECES), max_size=20).map("".join),
)


# Not flagged as special, so that they are text: one holds another, spaces, a character that no single byte
# prints, letters that byte-level BPE takes for bytes.
ADDED = ["<think>", "<think>ing", "  duck  ", "🦆!", "Über"]


@pytest.fixture(scope="module")
def byte_level(demo_checkpoint: Path) -> Tokenizer:
    return Tokenizer(demo_checkpoint)


@pytest.fixture(scope="module")
def byte_level_added(demo_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("byte-level-added")
    for name in ("config.json", "tokenizer_config.json"):
        shutil.copy(demo_checkpoint / name, folder)
    backend = Backend.from_file(str(demo_checkpoint / "tokenizer.json"))
    backend.add_tokens(ADDED)
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_byte_fallback(tmp_path_factory.mktemp("byte-fallback")))


@pytest.fixture(scope="module")
def metaspace(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("metaspace")
    return Tokenizer(write_byte_fallback(folder, metaspace=True, added=ADDED))


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_kimi(tmp_path_factory.mktemp("kimi"), trained_tokens()))


KINDS = ["byte_level", "byte_level_added", "byte_fallback", "metaspace", "kimi"]


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found: Tokenizer = request.getfixturevalue(request.param)
    return found


def stream(tokenizer: Tokenizer, ids: list[int]) -> tuple[list[str], str]:
    detokenizer = StreamingDetokenizer(tokenizer)
    return [detokenizer.push(token_id) for token_id in ids], detokenizer.flush()


@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
def test_joined_deltas_are_the_decoded_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    deltas, rest = stream(tokenizer, ids)
    joined = "".join(deltas)
    assert joined + rest == tokenizer.decode(ids)
    assert rest == ""
    assert joined.count(REPLACEMENT) == text.count(REPLACEMENT)


@settings(max_examples=100, deadline=None)
@given(text=TEXTS, data=st.data())
def test_characters_come_once_whole(tokenizer: Tokenizer, text: str, data: st.DataObject) -> None:
    ids = tokenizer.encode(text)
    cut = data.draw(st.integers(0, len(ids)))
    deltas, _ = stream(tokenizer, ids[:cut])
    whole = tokenizer.decode(ids)
    so_far = "".join(deltas)
    assert whole.startswith(so_far)
    shown = tokenizer.decode(ids[:cut])
    if REPLACEMENT not in shown:
        assert so_far == shown


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_tokens_stream_as_they_decode(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Special tokens, ids that no token has and bytes in any order included."""
    last = tokenizer.max_token_id
    first_added = last - 8
    # Mostly the first tokens, the bytes among them, and those that were added at the end.
    likely = st.one_of(st.integers(0, 270), st.integers(first_added, last + 1))
    ids = data.draw(st.lists(st.one_of(likely, likely, st.integers(0, last + 100)), max_size=30))
    deltas, rest = stream(tokenizer, ids)
    assert "".join(deltas) + rest == tokenizer.decode(ids)
    spelled = b"".join(
        tokenizer.token_bytes(token_id) for token_id in ids if token_id not in tokenizer.special_token_ids
    ).decode("utf-8", "replace")
    # One U+FFFD for each broken character, and none for one that is whole.
    assert ("".join(deltas) + rest).count(REPLACEMENT) == spelled.count(REPLACEMENT)


@settings(max_examples=100, deadline=None)
@given(text=TEXTS, data=st.data())
def test_whole_characters_decode_as_transformers_decodes_them(
    byte_fallback: Tokenizer, text: str, data: st.DataObject
) -> None:
    ids = byte_fallback.encode(text)
    assert byte_fallback.decode(ids) == byte_fallback._inner.decode(ids, skip_special_tokens=True)


def test_a_bad_byte_spares_the_characters_around_it(tokenizer: Tokenizer) -> None:
    ids = byte_ids(tokenizer, "k你".encode() + b"\xff\xe4" + "好".encode() + b"\xe4\xbd")
    deltas, rest = stream(tokenizer, ids)
    assert tokenizer.decode(ids) == "k你" + REPLACEMENT * 2 + "好" + REPLACEMENT
    assert "".join(deltas) == "k你" + REPLACEMENT * 2 + "好"
    assert rest == REPLACEMENT


def test_an_added_token_breaks_a_character_and_is_whole_itself(byte_level_added: Tokenizer) -> None:
    added = byte_level_added.max_token_id - len(ADDED) + 1
    duck = byte_ids(byte_level_added, "🦆".encode())
    deltas, rest = stream(byte_level_added, [*duck[:2], added + 1, *duck, added + 4, added + 3, added + 2])
    assert deltas == ["", "", REPLACEMENT + "<think>ing", "", "", "", "🦆", "Über", "🦆!", "  duck  "]
    assert rest == ""


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 20) | st.integers(0, 8191), max_size=30))
def test_special_tokens_are_streamed_where_they_are_asked_for(tokenizer: Tokenizer, ids: list[int]) -> None:
    detokenizer = StreamingDetokenizer(tokenizer, skip_special_tokens=False)
    deltas = [detokenizer.push(token_id) for token_id in ids]
    assert "".join(deltas) + detokenizer.flush() == tokenizer.decode(ids, skip_special_tokens=False)


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token a byte: the hardest way to write ``data``."""
    single: dict[bytes, int] = {}
    for token_id in range(1000):
        if token_id not in tokenizer.special_token_ids:
            single[tokenizer.token_bytes(token_id)] = token_id
    return [single[bytes([byte])] for byte in data]


@pytest.mark.parametrize("char", ["é", "你", "🦆", "\U0010ffff"])
def test_a_character_of_many_tokens_comes_with_its_last(tokenizer: Tokenizer, char: str) -> None:
    ids = byte_ids(tokenizer, ("k" + char + "k" + char).encode())
    size = len(char.encode())
    waiting = [""] * (size - 1)
    deltas, rest = stream(tokenizer, ids)
    assert deltas == ["k", *waiting, char, "k", *waiting, char]
    assert rest == ""


def test_an_unfinished_character_comes_only_from_flush(tokenizer: Tokenizer) -> None:
    ids = byte_ids(tokenizer, b"k" + "🦆".encode()[:3])
    deltas, rest = stream(tokenizer, ids)
    assert deltas == ["k", "", "", ""]
    assert rest.startswith(REPLACEMENT)
    assert "k" + rest == tokenizer.decode(ids)


def test_invalid_bytes_do_not_hold_the_text_after_them(tokenizer: Tokenizer) -> None:
    ids = byte_ids(tokenizer, b"\xff" * 5 + b"k" + b"\xe4" + b"duck")
    deltas, rest = stream(tokenizer, ids)
    assert "".join(deltas) + rest == REPLACEMENT * 5 + "k" + REPLACEMENT + "duck"
    assert deltas[0] == REPLACEMENT
    assert deltas[-4:] == [REPLACEMENT + "d", "u", "c", "k"]


def test_a_token_that_ends_one_character_and_begins_the_next_is_split_there(tmp_path: Path) -> None:
    """Byte-level merges may straddle characters: "é" is C3 A9, and here A9 C3 is one token."""
    vocab = {"Ã": 0, "©": 1, "©Ã": 2, "k": 3}
    backend = Backend(models.BPE(vocab, [("©", "Ã")]))
    backend.decoder = decoders.ByteLevel()
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    deltas, rest = stream(Tokenizer(tmp_path), [3, 0, 2, 2, 1, 3])
    assert (deltas, rest) == (["k", "", "é", "é", "é", "k"], "")


def test_special_and_unknown_tokens_give_nothing_and_harm_nothing(byte_level: Tokenizer) -> None:
    duck = byte_ids(byte_level, "🦆".encode())
    deltas, rest = stream(byte_level, [0, duck[0], 3, duck[1], 1, duck[2], 99999, duck[3]])
    assert (deltas, rest) == (["", "", "", "", "", "", "", "🦆"], "")


def test_the_first_space_goes_and_later_ones_stay(byte_fallback: Tokenizer) -> None:
    ids = byte_fallback.encode(" the duck")
    deltas, _ = stream(byte_fallback, ids)
    assert "".join(deltas) == byte_fallback.decode(ids)
    assert deltas[0] == ""  # BOS


def test_flush_leaves_it_ready_for_another_text(byte_level: Tokenizer) -> None:
    detokenizer = StreamingDetokenizer(byte_level)
    duck = byte_ids(byte_level, "🦆".encode())
    assert detokenizer.push(duck[0]) == ""
    assert detokenizer.flush() == REPLACEMENT
    assert [detokenizer.push(token_id) for token_id in duck] == ["", "", "", "🦆"]
    assert detokenizer.flush() == ""
