"""Tokenizers that are kept as a list of ranks, as the tiktoken library has them.

Called by :mod:`duckllm.text.loading`. Such a folder holds each token in base64 with its rank, the added
tokens in tokenizer_config.json, and the pattern that cuts a text before any merge only in Python code. That
code is never run: its pattern is here, for the families whose code is known, and other families are refused
by name. From these parts a byte-level BPE of the tokenizers library is built, which gives the same ids.

Two differences from the models' own code remain. Characters that came with Unicode 15 or later may be cut
otherwise, as the two libraries' tables are of different years. And a run of more than 25,000 characters
without a space is one run here, where Kimi's code cuts it.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from duckllm.errors import CheckpointError, UnsupportedModelError, show_value
from duckllm.text.byte_tokens import byte_level_spelling

_LINE = re.compile(rb"([A-Za-z0-9+/]+={0,2}) ([0-9]{1,9})")
_MAX_TOKEN_ID = 10**9
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_PUNCTUATION_AND_SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class _Family:
    """What a family's tokenizer code says and its files do not.

    Args:
        tokenizer_class: The class that tokenizer_config.json names.
        modules: Python files that ``auto_map`` may name for it.
        model_types: ``model_type`` of config.json, which tells as much as a module.
        pattern: What cuts a text into the pieces that merges stay within.
        special_tokens: Spellings of the tokens behind the ranks, from the first on.
        num_special_tokens: Ids behind the ranks; those without a spelling are reserved.
        composes: Whether characters are composed first (NFC).
    """

    tokenizer_class: str
    modules: tuple[str, ...]
    model_types: tuple[str, ...]
    pattern: str
    special_tokens: tuple[str, ...]
    num_special_tokens: int
    composes: bool = False


# Source of the patterns and spellings: tokenization_kimi.py of moonshotai/Kimi-K2-Instruct and
# tokenization_qwen.py of Qwen/Qwen-7B.
_FAMILIES = (
    _Family(
        tokenizer_class="TikTokenTokenizer",
        modules=("tokenization_kimi", "tokenization_moonshot"),
        model_types=("kimi_k2", "kimi_k25", "kimi_linear", "kimi_vl"),
        pattern="|".join(
            [
                r"\p{Han}+",
                rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}?",
                rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}?",
                r"\p{N}{1,3}",
                _PUNCTUATION_AND_SPACES,
            ]
        ),
        special_tokens=(),
        num_special_tokens=256,
    ),
    _Family(
        tokenizer_class="QWenTokenizer",
        modules=("tokenization_qwen",),
        model_types=("qwen",),
        pattern=rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_PUNCTUATION_AND_SPACES}",
        special_tokens=(
            "<|endoftext|>",
            "<|im_start|>",
            "<|im_end|>",
            *(f"<|extra_{number}|>" for number in range(205)),
        ),
        num_special_tokens=208,
        composes=True,
    ),
)


def find_rank_file(folder: Path) -> Path | None:
    """The folder's list of ranks, or None if it has none.

    Raises:
        CheckpointError: There are several.
    """
    found = [folder / "tiktoken.model"] if (folder / "tiktoken.model").is_file() else []
    found = found or sorted(folder.glob("*.tiktoken"))
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise CheckpointError(f"tokenizer: {folder} has several lists of ranks ({names}), expected one")
    if found:
        return found[0]
    path = folder / "tokenizer.model"  # SentencePiece's name, too
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return path if _LINE.fullmatch(file.readline(1024).rstrip()) else None


def build_tokenizer(path: Path, tokenizer_config: Mapping[str, Any], model_type: object) -> Any:
    """A transformers tokenizer, without a chat template, from a list of ranks.

    Args:
        path: The list of ranks.
        tokenizer_config: Content of tokenizer_config.json.
        model_type: ``model_type`` of config.json, None where there is none.

    Raises:
        CheckpointError: The list or the added tokens are broken; names the file and the line or field.
        UnsupportedModelError: The family's pattern is not known.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    family = _find_family(path, tokenizer_config, model_type)
    ranks = read_ranks(path)
    added = _added_tokens(path.parent / "tokenizer_config.json", tokenizer_config, family, len(ranks))
    vocab = {byte_level_spelling(token): rank for token, rank in ranks.items()}
    # A piece that is a token as a whole is that token, whether or not merges lead to it.
    backend = Tokenizer(models.BPE(vocab, _merges(vocab), ignore_merges=True))
    if family.composes:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(family.pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(list(added.values()))
    for token_id, token in added.items():
        if backend.token_to_id(token.content) != token_id:
            raise CheckpointError(
                f"{path}: got a token {token.content!r}, expected none that is spelled like added token "
                f"{token_id}"
            )
    named = {field: _spelling(tokenizer_config.get(field)) for field in _NAMED_TOKENS}
    options: dict[str, Any] = {field: text for field, text in named.items() if text is not None}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **options)


def read_ranks(path: Path) -> dict[bytes, int]:
    """Each token's bytes with its rank, ascending: ranks from 0 on without a gap, and all 256 bytes.

    Raises:
        CheckpointError: The file cannot be read, or is not such a list; names the line.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    line_of_rank: dict[int, int] = {}
    line_of_token: dict[bytes, int] = {}
    token_of_rank: dict[int, bytes] = {}
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        token, rank = _read_line(path, number, line)
        for what, other in ((f"rank {rank}", line_of_rank.get(rank)), ("a token", line_of_token.get(token))):
            if other is not None:
                raise CheckpointError(f"{path}:{number}: got {what} again, expected it once (line {other})")
        line_of_rank[rank] = line_of_token[token] = number
        token_of_rank[rank] = token
    for rank, number in line_of_rank.items():
        if rank >= len(line_of_rank):
            raise CheckpointError(
                f"{path}:{number}: got rank {rank}, expected ranks from 0 to {len(line_of_rank) - 1}, "
                f"one for each of {len(line_of_rank)} tokens"
            )
    for byte in range(256):
        if bytes([byte]) not in line_of_token:
            raise CheckpointError(f"{path}: got no token for byte 0x{byte:02X}, expected all 256 bytes")
    return {token_of_rank[rank]: rank for rank in sorted(token_of_rank)}


def _read_line(path: Path, number: int, line: bytes) -> tuple[bytes, int]:
    found = _LINE.fullmatch(line)
    try:
        if found:
            return base64.b64decode(found[1], validate=True), int(found[2])
    except binascii.Error:
        pass
    got = show_value(line[:40].decode("utf-8", "replace"))
    raise CheckpointError(f"{path}:{number}: got {got}, expected a token in base64, a space and its rank")


def _merges(vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every way to make a token of two, the lowest rank first: tiktoken merges by the rank of the result."""
    merges: list[tuple[str, str]] = []
    for token in vocab:
        ways = [
            (left, right)
            for cut in range(1, len(token))
            if (left := token[:cut]) in vocab and (right := token[cut:]) in vocab
        ]
        ways.sort(key=lambda way: (vocab[way[0]], vocab[way[1]]))
        merges += ways
    return merges


def _find_family(path: Path, tokenizer_config: Mapping[str, Any], model_type: object) -> _Family:
    name = tokenizer_config.get("tokenizer_class")
    auto_map = tokenizer_config.get("auto_map")
    classes = auto_map.get("AutoTokenizer") if isinstance(auto_map, Mapping) else auto_map
    first = classes[0] if isinstance(classes, list) and classes else None
    # "owner/repository--module.Class": only the module tells the family.
    module = str(first).rpartition("--")[2].partition(".")[0]
    for family in _FAMILIES:
        if name == family.tokenizer_class and (module in family.modules or model_type in family.model_types):
            return family
    known = ", ".join(f"{family.tokenizer_class} of {family.modules[0]}.py" for family in _FAMILIES)
    raise UnsupportedModelError(
        f"tokenizer_class: got {show_value(name)} with auto_map {show_value(first)} and model_type "
        f"{show_value(model_type)} for {path}, whose pattern is not known; expected a tokenizer.json, "
        f"or {known}"
    )


def _added_tokens(path: Path, config: Mapping[str, Any], family: _Family, num_ranks: int) -> dict[int, Any]:
    """An AddedToken for every id behind the ranks, by ascending id."""
    from tokenizers import AddedToken

    end = num_ranks + family.num_special_tokens
    texts = {num_ranks + number: text for number, text in enumerate(family.special_tokens)}
    flags: dict[int, dict[str, bool]] = {}
    listed = config.get("added_tokens_decoder", {})
    if not isinstance(listed, Mapping):
        raise CheckpointError(
            f"{path}: added_tokens_decoder: got {show_value(listed)}, expected an object of tokens by id"
        )
    for key, entry in listed.items():
        field = f"{path}: added_tokens_decoder[{key!r}]"
        token_id = int(key) if re.fullmatch("[0-9]{1,9}", key) else _MAX_TOKEN_ID
        if not num_ranks <= token_id < end:
            raise CheckpointError(
                f"{field}: got this id, expected one from {num_ranks}, behind the ranks, to {end - 1}"
            )
        text = _spelling(entry)
        if not isinstance(entry, Mapping) or not text:
            raise CheckpointError(f"{field}: got {show_value(entry)}, expected an object with content")
        texts[token_id] = text
        flags[token_id] = {flag: entry[flag] for flag in _FLAGS if isinstance(entry.get(flag), bool)}
    id_of_text: dict[str, int] = {}
    for token_id in range(num_ranks, end):
        text = texts.setdefault(token_id, f"<|reserved_token_{token_id}|>")
        other = id_of_text.setdefault(text, token_id)
        if other != token_id:
            raise CheckpointError(f"{path}: added_tokens_decoder: got {text!r} as {other} and as {token_id}")
    special = _special_texts(path, config, id_of_text)
    default = {"normalized": False, "special": True}
    return {
        token_id: AddedToken(
            text,
            **(default | flags.get(token_id, {}) | ({"special": True} if text in special else {})),
        )
        for text, token_id in id_of_text.items()
    }


def _special_texts(path: Path, config: Mapping[str, Any], known: Mapping[str, int]) -> set[str]:
    """Spellings that the configuration names as BOS and the like; each must be an added token."""
    listed = config.get("additional_special_tokens") or []
    others = listed if isinstance(listed, list) else [listed]
    named = [(field, config.get(field)) for field in _NAMED_TOKENS]
    named += [("additional_special_tokens", each) for each in others]
    found = set()
    for field, value in named:
        text = _spelling(value)
        if value is not None and text not in known:
            raise CheckpointError(
                f"{path}: {field}: got {show_value(value)}, expected one of the added tokens"
            )
        if text is not None:
            found.add(text)
    return found


def _spelling(value: object) -> str | None:
    """A token's text, whether it is written as that or as an object with flags."""
    content = value.get("content") if isinstance(value, Mapping) else value
    return content if isinstance(content, str) else None
