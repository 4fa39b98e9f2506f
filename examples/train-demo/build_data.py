"""Turns WordNet into training data: ``python build_data.py WORDNET_FOLDER DATA_FOLDER``.

Writes pairs.npz (tokens and where questions and answers lie in them), kinds.json, pairs.jsonl (to read), and
tokenizer/ (as Hugging Face has it).
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path

import numpy as np
from questions import Pair, all_pairs
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from wordnet import load_wordnet

VOCABULARY = 8192
SPECIAL_TOKENS = ["<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|system|>", "<|pad|>"]
MOST_ANSWER_TOKENS = 320
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ '<|system|>' + m['content'] }}"
    "{% elif m['role'] == 'user' %}{{ '<|user|>' + m['content'] }}"
    "{% elif m['role'] == 'assistant' %}{{ '<|assistant|>' + m['content'] + eos_token }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(pairs: list[Pair], folder: Path) -> Tokenizer:
    """A byte-level BPE over all texts, with each digit a token; saved into the folder."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()

    def texts() -> Iterator[str]:
        for pair in pairs:
            yield from pair.questions
            yield pair.answer

    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "pad_token": "<|pad|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    return tokenizer


def tokenise(pairs: list[Pair], kinds: list[str], tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """All texts in one array, and a row for each way to ask.

    Shapes: tokens: [N] u16; rows: [questions, 6] i32 of kind, question start, question length, answer start,
        answer length, number of ways to ask.
    """
    tokens: list[int] = []
    rows = []
    for pair in pairs:
        answer = tokenizer.encode(pair.answer).ids
        if len(answer) > MOST_ANSWER_TOKENS:
            continue
        answer_start = len(tokens)
        tokens += answer
        for text in pair.questions:
            question = tokenizer.encode(text).ids
            kind, ways = kinds.index(pair.kind), len(pair.questions)
            rows.append((kind, len(tokens), len(question), answer_start, len(answer), ways))
            tokens += question
    return np.array(tokens, np.uint16), np.array(rows, np.int32)


def build(wordnet: Path, data: Path) -> None:
    """Writes the data folder."""
    data.mkdir(parents=True, exist_ok=True)
    pairs = all_pairs(load_wordnet(wordnet))
    random.Random(0).shuffle(pairs)
    print(f"{len(pairs)} pairs: {dict(Counter(pair.kind for pair in pairs))}")
    tokenizer = train_tokenizer(pairs, data / "tokenizer")
    kinds = sorted({pair.kind for pair in pairs})
    tokens, rows = tokenise(pairs, kinds, tokenizer)
    np.savez(data / "pairs.npz", tokens=tokens, rows=rows)
    (data / "kinds.json").write_text(json.dumps(kinds))
    with (data / "pairs.jsonl").open("w") as file:
        file.writelines(json.dumps(astuple(pair)) + "\n" for pair in pairs)
    print(f"{len(tokens)} tokens, {len(rows)} questions, {rows[:, 4].mean():.1f} tokens in the mean answer")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wordnet", type=Path, help="folder with data.noun, index.noun, ...")
    parser.add_argument("data", type=Path, help="folder to write")
    arguments = parser.parse_args()
    build(arguments.wordnet, arguments.data)


if __name__ == "__main__":
    main()
