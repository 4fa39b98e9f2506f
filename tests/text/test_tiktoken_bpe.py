"""Tokenizers kept as a list of ranks give the ids that the tiktoken library gives."""

# ruff: noqa: RUF001 - letters that look alike are what is tested

from __future__ import annotations

import json
import random
import unicodedata
from pathlib import Path

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from duckllm.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError
from duckllm.text import Tokenizer
from support.tokenizers import KIMI_TOKENS, rank_lines, token_entry, trained_tokens, write_kimi

# The patterns as the models' own code has them.
LETTERS = r"\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
KIMI_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{LETTERS}*[\p{{Ll}}{LETTERS}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{LETTERS}+[\p{{Ll}}{LETTERS}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
# Han, and letters that are none or nearly; cases, contractions, numbers; then marks; then spaces.
PIECES = [
    "鸭子", "世", "々", "〆", "〇", "ー", "カモ", "ｶ", "한국", "오리", "Duck", "DUCK", "dUCK", "Ǆ", "ǅ", "ǆ",
    "ß", "ẞ", "ﬁ", "K", "ſ",
]  # fmt: skip
PIECES += [
    "'s", "'S", "'T", "'ll", "'LL", "'re", "'d", "'", "'ſ", "’s", "²", "Ⅷ", "५", "½", "0", "12345",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467", "\U0001f3f3\ufe0f\u200d\U0001f308", "🦆",
]  # fmt: skip
PIECES += [
    "é", "́", "नि", "।", "。", "，", ".", ",", "//", "!!!", "_", "=", "<", "[BOS]", "<think>", "<",
    "\x00", "\u200b", "\ufeff", "�", "\U0010ffff",
]  # fmt: skip
PIECES += [
    "<|im_end|>", "<|im_", " ", "  ", "    ", "\t", "\n", "\r\n", "\r", "\n\n", "\u3000", "\xa0",
    "\u2028",
]  # fmt: skip
PIECES += ["\x85", "\x1c", "\x0b"]
TEXTS = st.one_of(
    st.lists(st.sampled_from(PIECES), max_size=24).map("".join),
    st.text(alphabet=st.characters(max_codepoint=0x2FFF, exclude_categories=["Cs", "Cn", "Co"]), max_size=30),
)
# Tokens that no merges lead to, that straddle characters, and that can be made in several ways.
ODD = [b" duckling", "鸭".encode()[1:] + "子".encode()[:1], b"aaa", b"aa", b"ababab", b"bab", b"aba"]


@pytest.fixture(scope="module")
def tokens() -> list[bytes]:
    trained = trained_tokens()
    return trained + [token for token in ODD if token not in trained]


@pytest.fixture(scope="module")
def folder(tokens: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_kimi(tmp_path_factory.mktemp("kimi"), tokens)


@pytest.fixture(scope="module")
def kimi(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


def reference(tokens: list[bytes], pattern: str, special: dict[str, int]) -> tiktoken.Encoding:
    ranks = {token: rank for rank, token in enumerate(tokens)}
    return tiktoken.Encoding("reference", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


def kimi_special(first: int) -> dict[str, int]:
    reserved = {number: f"<|reserved_token_{first + number}|>" for number in range(256)}
    return {text: first + number for number, text in sorted((reserved | KIMI_TOKENS).items())}


def qwen_special(first: int) -> dict[str, int]:
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{number}|>" for number in range(205))]
    return {text: first + number for number, text in enumerate(names)}


@pytest.fixture(scope="module")
def kimi_reference(tokens: list[bytes]) -> tiktoken.Encoding:
    return reference(tokens, KIMI_PATTERN, kimi_special(len(tokens)))


def write_qwen(folder: Path, tokens: list[bytes]) -> Path:
    (folder / "qwen.tiktoken").write_text("\n".join(rank_lines(tokens)))
    auto_map = {"AutoTokenizer": ["tokenization_qwen.QWenTokenizer", None]}
    config = {"tokenizer_class": "QWenTokenizer", "auto_map": auto_map}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def qwen(tokens: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_qwen(tmp_path_factory.mktemp("qwen"), tokens))


@pytest.fixture(scope="module")
def qwen_reference(tokens: list[bytes]) -> tiktoken.Encoding:
    return reference(tokens, QWEN_PATTERN, qwen_special(len(tokens)))


@settings(max_examples=200, deadline=None)
@given(text=TEXTS)
def test_kimis_ids_are_those_of_tiktoken(
    kimi: Tokenizer, kimi_reference: tiktoken.Encoding, text: str
) -> None:
    ids = kimi_reference.encode("x duckling" + text, allowed_special="all")  # leading [BOS]s would become one
    assert kimi.encode("x duckling" + text) == ids
    for token_id in ids:
        assert kimi.token_bytes(token_id) == kimi_reference.decode_single_token_bytes(token_id)


@settings(max_examples=200, deadline=None)
@given(text=TEXTS)
def test_qwens_ids_are_those_of_tiktoken(
    qwen: Tokenizer, qwen_reference: tiktoken.Encoding, text: str
) -> None:
    composed = unicodedata.normalize("NFC", text)
    assert qwen.encode(text) == qwen_reference.encode(composed, allowed_special="all")


@pytest.fixture(scope="module")
def straddling() -> list[bytes]:
    """Ranks that show each cut: the end of a character and the beginning of the next are one, if not cut."""
    some = [byte for byte in b"aADKkcs1S'. \n\r"]
    continuation, leading = range(0x80, 0xC0), range(0xC2, 0xF5)
    pairs = [bytes([end, start]) for end in [*continuation, *some] for start in leading]
    pairs += [bytes([end, start]) for end in [*continuation, *some] for start in some]
    return [bytes([byte]) for byte in range(256)] + pairs


@pytest.fixture(scope="module", params=["kimi", "qwen"])
def cutting(
    request: pytest.FixtureRequest, straddling: list[bytes], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, tiktoken.Encoding, bool]:
    """A tokenizer of these ranks, its reference, and whether it composes characters."""
    is_kimi = request.param == "kimi"
    write, pattern = (write_kimi, KIMI_PATTERN) if is_kimi else (write_qwen, QWEN_PATTERN)
    special = (kimi_special if is_kimi else qwen_special)(len(straddling))
    tokenizer = Tokenizer(write(tmp_path_factory.mktemp("cutting"), straddling))
    return tokenizer, reference(straddling, pattern, special), not is_kimi


def check_cuts(cutting: tuple[Tokenizer, tiktoken.Encoding, bool], text: str) -> None:
    tokenizer, encoding, composes = cutting
    composed = unicodedata.normalize("NFC", text) if composes else text
    # x: leading [BOS]s would become one.
    assert tokenizer.encode("x" + text) == encoding.encode("x" + composed, allowed_special="all")


@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
def test_texts_are_cut_as_tiktoken_cuts_them(
    cutting: tuple[Tokenizer, tiktoken.Encoding, bool], text: str
) -> None:
    check_cuts(cutting, text)


def test_every_character_is_cut_as_tiktoken_cuts_it(
    cutting: tuple[Tokenizer, tiktoken.Encoding, bool],
) -> None:
    """Those that Unicode 3.2 had: neither library's tables are older, and later ones may differ."""
    old = unicodedata.ucd_3_2_0
    # Of the long runs of Han and Hangul, a few.
    codes = [*range(0x3500), *range(0x3500, 0xD800, 97), *range(0xF900, 0x20000)]
    chars = [chr(code) for code in codes if old.category(chr(code)) not in ("Cn", "Cs", "Co")]
    for start in range(0, len(chars), 2000):
        check_cuts(cutting, " ".join(f"a{char}A{char}{char}'s1" for char in chars[start : start + 2000]))


def test_any_ranks_merge_as_in_tiktoken(tmp_path: Path) -> None:
    rng = random.Random(7)
    for trial in range(8):
        parts = {bytes(rng.choices(b"abc", k=rng.randint(2, 6))) for _ in range(40)}
        made = [bytes([byte]) for byte in range(256)] + rng.sample(sorted(parts), len(parts))
        folder = tmp_path / str(trial)
        folder.mkdir()
        tokenizer = Tokenizer(write_kimi(folder, made))
        encoding = reference(made, KIMI_PATTERN, {})
        for _ in range(40):
            text = "".join(rng.choices("abc", k=rng.randint(1, 40)))
            assert tokenizer.encode(text) == encoding.encode(text), text


def test_known_texts_are_cut_where_kimi_cuts_them(kimi: Tokenizer, tokens: list[bytes]) -> None:
    def pieces(text: str) -> list[str]:
        pre_tokenizer = kimi._inner.backend_tokenizer.pre_tokenizer
        return [text[start:end] for _, (start, end) in pre_tokenizer.pre_tokenize_str(text)]

    assert pieces("中文English混合") == ["中文", "English", "混合"]
    assert pieces("CAN'T wait, I'm 12345!\r\n\r\n ok") == [
        *["CAN'T", " wait", ",", " I'm", " ", "123", "45", "!\r\n\r\n", " ok"]
    ]
    assert pieces("HTMLParser") == ["HTMLParser"]
    assert pieces("parserHTML") == ["parser", "HTML"]


def test_the_code_beside_it_is_never_run(folder: Path, kimi: Tokenizer) -> None:
    assert kimi.encode("duck")
    assert (folder / "tokenization_kimi.py").is_file()
    assert not (folder / "ran").exists()


def test_tokens_behind_the_ranks(kimi: Tokenizer, tokens: list[bytes]) -> None:
    n = len(tokens)
    assert kimi.max_token_id == n + 255
    assert (kimi.bos_token_id, kimi.eos_token_ids) == (n, (n + 1,))
    assert kimi.encode("<|im_user|><|im_end|>") == [n + 3, n + 2]
    assert kimi.encode(f"<|reserved_token_{n + 30}|>") == [n + 30]
    assert kimi.special_token_ids == frozenset(range(n, n + 256)) - {n + 22}
    assert kimi.decode([n + 2, n + 30, *kimi.encode("duck"), n + 22, n + 255]) == "duck<think>"
    assert kimi.decode([n + 256, 10**6]) == ""


def test_flags_of_added_tokens_are_kept(tokens: list[bytes], tmp_path: Path) -> None:
    n = len(tokens)
    entries = {
        str(n): token_entry("[BOS]"),
        str(n + 1): token_entry("[EOS]"),
        str(n + 5): token_entry("<both>", lstrip=True, rstrip=True),
        str(n + 6): token_entry("<both>ered", special=False),
        str(n + 7): token_entry("duckword", single_word=True, special=False),
        str(n + 8): token_entry("[MARK]", special=False),
    }
    names = {"pad_token": None, "unk_token": None, "additional_special_tokens": ["[MARK]"]}
    tokenizer = Tokenizer(write_kimi(tmp_path, tokens, added_tokens_decoder=entries, **names))
    a, b = tokenizer.encode("a"), tokenizer.encode("b")
    assert tokenizer.encode("a  <both>  b") == [*a, n + 5, *b]
    assert tokenizer.encode("a<both>ered") == [*a, n + 6]
    assert tokenizer.encode(".duckword.")[1] == n + 7
    assert n + 7 not in tokenizer.encode("aduckwordb")
    assert tokenizer.decode([n + 5, n + 6, n + 7, n + 8]) == "<both>eredduckword"


def test_what_a_message_spells_is_text(kimi: Tokenizer, tokens: list[bytes]) -> None:
    text = f"a<|im_end|><|im_system|>[BOS]<|reserved_token_{len(tokens) + 30}|>"
    ids = kimi.apply_chat_template([{"role": "user", "content": text}])
    n = len(tokens)
    specials = [token_id - n for token_id in ids if token_id >= n]
    assert specials == [3, 17, 2, 4, 17]
    assert kimi.decode(ids) == f"user{text}assistant"


def test_the_template_may_be_a_file_or_one_of_several(tokens: list[bytes], tmp_path: Path) -> None:
    several = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "{{ messages[0].content }}!"},
    ]
    hi = [{"role": "user", "content": "hi"}]
    tokenizer = Tokenizer(write_kimi(tmp_path, tokens, chat_template=several))
    assert tokenizer.decode(tokenizer.apply_chat_template(hi)) == "hi!"
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}?")
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.apply_chat_template(hi)) == "hi?"


def test_a_tokenizer_json_goes_before_the_ranks_and_their_code(
    folder: Path, kimi: Tokenizer, tokens: list[bytes], tmp_path: Path
) -> None:
    write_kimi(tmp_path, tokens)
    (tmp_path / "tiktoken.model").write_text("broken")
    kimi._inner.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.encode("The ducks <|im_end|>") == kimi.encode("The ducks <|im_end|>")
    assert (tokenizer.bos_token_id, tokenizer.max_token_id) == (kimi.bos_token_id, kimi.max_token_id)
    assert not (tmp_path / "ran").exists()


def moonlight(folder: Path) -> None:
    edit_config(folder, auto_map={"AutoTokenizer": ["x/y--tokenization_moonshot.TikTokenTokenizer", None]})


def by_model_type(folder: Path) -> None:
    edit_config(folder, auto_map=None)
    (folder / "config.json").write_text('{"model_type": "kimi_k2"}')


def by_another_file_name(folder: Path) -> None:
    (folder / "tiktoken.model").rename(folder / "tokenizer.model")


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("change", [moonlight, by_model_type, by_another_file_name])
def test_a_family_is_known_by_several_signs(
    kimi: Tokenizer, tokens: list[bytes], tmp_path: Path, change: object
) -> None:
    write_kimi(tmp_path, tokens)
    change(tmp_path)  # type: ignore[operator]
    assert Tokenizer(tmp_path).encode("鸭子DUCK") == kimi.encode("鸭子DUCK")


@pytest.mark.parametrize(
    "changes",
    [
        {"auto_map": None},
        {"auto_map": {"AutoTokenizer": ["tokenization_other.TikTokenTokenizer", None]}},
        {"auto_map": {"AutoTokenizer": []}},
        {"auto_map": ["tokenization_other.TikTokenTokenizer", None]},
        {"tokenizer_class": "LlamaTokenizer"},
        {"tokenizer_class": None},
    ],
)
def test_a_pattern_is_never_guessed(tokens: list[bytes], tmp_path: Path, changes: dict[str, object]) -> None:
    write_kimi(tmp_path, tokens, **changes)
    with pytest.raises(UnsupportedModelError, match=r"tokenizer_class: got .* whose pattern is not known"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("line", "written", "message"),
    [
        (3, "!!!! 2", r"tiktoken\.model:3: got '!!!! 2', expected a token in base64"),
        (3, "AA= 2", r"tiktoken\.model:3: got 'AA= 2'"),
        (3, "AAAAA 2", r"tiktoken\.model:3: got 'AAAAA 2'"),
        (4, "Iw==", r"tiktoken\.model:4: got 'Iw=='"),
        (4, "Iw== 3 4", r"tiktoken\.model:4: "),
        (4, "Iw== -3", r"tiktoken\.model:4: "),
        (4, "Iw== 99999999999", r"tiktoken\.model:4: "),
        (300, "enp6enp6 5", r"tiktoken\.model:300: got rank 5 again, expected it once \(line 6\)"),
        (300, "IQ== 299", r"tiktoken\.model:300: got a token again, expected it once \(line 1\)"),
        (
            300,
            "enp6enp6 70000",
            r"tiktoken\.model:300: got rank 70000, expected ranks from 0 to \d+",
        ),
        (1, "enp6enp6 0", r"tiktoken\.model: got no token for byte 0x21, expected all 256 bytes"),
    ],
)
def test_a_broken_list_names_its_line(
    tokens: list[bytes], tmp_path: Path, line: int, written: str, message: str
) -> None:
    write_kimi(tmp_path, tokens)
    lines = rank_lines(tokens)
    assert lines[0] == "IQ== 0"
    lines[line - 1] = written
    (tmp_path / "tiktoken.model").write_text("\n".join(lines))
    with pytest.raises(CheckpointError, match=message) as caught:
        Tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_an_empty_list_and_one_that_is_no_text(tokens: list[bytes], tmp_path: Path) -> None:
    write_kimi(tmp_path, tokens)
    (tmp_path / "tiktoken.model").write_bytes(b"")
    with pytest.raises(CheckpointError, match="got no token for byte 0x00"):
        Tokenizer(tmp_path)
    (tmp_path / "tiktoken.model").write_bytes(b"\n\n\xff\xfe\x00 1\n")
    with pytest.raises(CheckpointError, match=r"tiktoken\.model:3: "):
        Tokenizer(tmp_path)


def test_line_ends_and_order_do_not_matter(kimi: Tokenizer, tokens: list[bytes], tmp_path: Path) -> None:
    write_kimi(tmp_path, tokens)
    lines = rank_lines(tokens)
    random.Random(3).shuffle(lines)
    (tmp_path / "tiktoken.model").write_bytes("\r\n".join(lines).encode() + b"\r\n\r\n")
    assert Tokenizer(tmp_path).encode("The ducks don't quack") == kimi.encode("The ducks don't quack")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            {-1: token_entry("<a>")},
            r"added_tokens_decoder\['\d+'\]: got this id, expected one from \d+",
        ),
        ({256: token_entry("<a>")}, r"added_tokens_decoder\['\d+'\]: got this id"),
        (
            {0: token_entry("<a>"), 1: token_entry("<a>")},
            r"added_tokens_decoder: got '<a>' as \d+ and",
        ),
        ({0: "<a>"}, r"added_tokens_decoder\['\d+'\]: got '<a>', expected an object with content"),
        ({0: {"special": True}}, r"added_tokens_decoder\['\d+'\]: got \{'special'"),
        ({0: token_entry("")}, r"added_tokens_decoder\['\d+'\]: got \{"),
        ({0: token_entry("The")}, r"tiktoken.model: got a token 'The', expected none that is spelled like"),
        ({}, r"bos_token: got '\[BOS\]', expected one of the added tokens"),
    ],
)
def test_added_tokens_that_collide_are_refused(
    tokens: list[bytes], tmp_path: Path, entries: dict[int, object], message: str
) -> None:
    assert b"The" in tokens
    listed = {str(len(tokens) + number): entry for number, entry in entries.items()}
    fields = ["eos_token", "pad_token", "unk_token", "additional_special_tokens"]
    others: dict[str, object] = dict.fromkeys(fields)
    names = others if not entries else others | {"bos_token": None}
    write_kimi(tmp_path, tokens, added_tokens_decoder=listed, **names)
    with pytest.raises(CheckpointError, match=message) as caught:
        Tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["x", "-1", "1.5", "9" * 5000])
def test_an_id_that_is_no_id_is_refused(tokens: list[bytes], tmp_path: Path, key: str) -> None:
    write_kimi(tmp_path, tokens, added_tokens_decoder={key: token_entry("<a>")})
    with pytest.raises(CheckpointError, match="got this id"):
        Tokenizer(tmp_path)
    write_kimi(tmp_path, tokens, added_tokens_decoder=[1])
    with pytest.raises(CheckpointError, match=r"added_tokens_decoder: got \[1\]"):
        Tokenizer(tmp_path)


def test_files_that_are_missing_or_too_many(tokens: list[bytes], tmp_path: Path) -> None:
    write_kimi(tmp_path, tokens)
    (tmp_path / "tiktoken.model").rename(tmp_path / "a.tiktoken")
    (tmp_path / "b.tiktoken").write_text("")
    with pytest.raises(CheckpointError, match=r"several lists of ranks \(a.tiktoken, b.tiktoken\)"):
        Tokenizer(tmp_path)
    (tmp_path / "a.tiktoken").unlink()
    (tmp_path / "b.tiktoken").unlink()
    with pytest.raises(ModelNotFoundError, match="has no tokenizer"):
        Tokenizer(tmp_path)
    write_kimi(tmp_path, tokens)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: expected a JSON object, got list"):
        Tokenizer(tmp_path)
