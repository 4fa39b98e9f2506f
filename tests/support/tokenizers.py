"""Folders of small tokenizers of each kind, made for tests."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from duckllm.text.byte_tokens import byte_level_bytes

TEXT = (
    "The ducks don't quack; they'll say what they've said: I'm a DUCK, we're Ducks, she'd waddle.\r\n\r\n"
    "    def quack(self):\n        return 12345 + 678\n\n 鸭子会游泳，鸭子也会飞。世界上有很多鸭子。"  # noqa: RUF001
    "日本語のアヒル、한국어 오리. Straße, naïve café, Ǆ Ǆungla, नि दुनिया, Ünïcödé e\u0301le\u0300ve "
    "🦆🦆 👩\u200d👩\u200d👧!!! ... //// \n\n\n"
)
NUM_TRAINED = 420

# What tokenizer_config.json of the Kimi family says, from the first id behind the ranks on.
KIMI_TOKENS = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 4: "<|im_assistant|>"}
KIMI_TOKENS |= {
    9: "[EOT]",
    10: "<|im_system|>",
    17: "<|im_middle|>",
    22: "<think>",
    254: "[UNK]",
    255: "[PAD]",
}
KIMI_TEXT_TOKENS = {"<think>"}  # not flagged as special
KIMI_TEMPLATE = (
    "{% for m in messages %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)


def trained_tokens() -> list[bytes]:
    """The 256 bytes, and what a byte-level BPE learns from a short text, by rank."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=NUM_TRAINED, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([TEXT] * 2, trainer)
    spellings = sorted(backend.get_vocab().items(), key=lambda item: item[1])
    return [byte_level_bytes(spelling) or b"" for spelling, _ in spellings]


def rank_lines(tokens: Sequence[bytes]) -> list[str]:
    """The lines of a list of ranks."""
    return [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]


def token_entry(text: str, **flags: bool) -> dict[str, Any]:
    """An entry of added_tokens_decoder."""
    off = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
    return {"content": text, **off, "special": text not in KIMI_TEXT_TOKENS} | flags


def kimi_config(num_ranks: int) -> dict[str, Any]:
    """A tokenizer_config.json of the Kimi family."""
    added = {str(num_ranks + number): token_entry(text) for number, text in KIMI_TOKENS.items()}
    return {
        "added_tokens_decoder": added,
        "additional_special_tokens": ["<|im_end|>", "[EOT]"],
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "chat_template": KIMI_TEMPLATE,
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "tokenizer_class": "TikTokenTokenizer",
        "unk_token": "[UNK]",
    }


def write_kimi(folder: Path, tokens: Sequence[bytes], **changes: object) -> Path:
    """A tokenizer as Kimi-K2 ships it, its code included; ``changes`` to its configuration."""
    (folder / "tiktoken.model").write_text("\n".join(rank_lines(tokens)) + "\n")
    config = kimi_config(len(tokens)) | changes
    kept = {key: value for key, value in config.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(kept))
    code = f"open({str(folder / 'ran')!r}, 'w').close()\nraise RuntimeError('the code ran')\n"
    (folder / "tokenization_kimi.py").write_text(code)
    return folder


def write_byte_fallback(folder: Path, *, metaspace: bool = False, added: Iterable[str] = ()) -> Path:
    """A tokenizer in the manner of SentencePiece: ``▁`` for spaces, unknown characters as byte tokens.

    Spaces are normalised to ``▁``, or made so by Metaspace, as older and newer conversions do.
    """
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"duckth.,2", "th"]
    words += ["▁th", "▁the", "e", "é", "你", "du", "duc", "duck"]
    vocab = {word: number for number, word in enumerate(dict.fromkeys(words))}
    merges = [("t", "h"), ("▁", "th"), ("▁th", "e"), ("d", "u"), ("du", "c"), ("duc", "k")]
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if metaspace:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens(list(added))
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", vocab["<s>"])]
    )
    backend.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
