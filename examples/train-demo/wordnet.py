"""Reads the WordNet 3.0 database files (``data.*`` and ``index.*``, described in Debian's wndb(5WN))."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

FILE_OF = {"n": "noun", "v": "verb", "a": "adj", "r": "adv"}
WORD_CLASS = {"n": "noun", "v": "verb", "a": "adjective", "s": "adjective", "r": "adverb"}
ANIMALS = 5  # lexicographer file noun.animal

Key = tuple[str, str]  # part of speech and offset


@dataclass(frozen=True)
class Synset:
    """A meaning: the words that have it, and how it is explained.

    Args:
        words: The words, most usual first.
        topic: Number of the lexicographer file.
        pointers: (symbol, key of the other synset): ``@`` is a kind of, ``~`` has kinds, ...
        definition: The gloss.
        examples: Sentences that use it.
    """

    words: list[str]
    topic: int
    pointers: list[tuple[str, Key]]
    definition: str
    examples: list[str]


@dataclass(frozen=True)
class Senses:
    """A word's meanings in one part of speech.

    Args:
        tagged: How many of them were found in tagged texts: a measure of how common the word is.
        offsets: Keys' offsets, most usual meaning first.
    """

    tagged: int
    offsets: list[str]


@dataclass(frozen=True)
class WordNet:
    """The database.

    Args:
        synsets: Meanings by key.
        lemmas: For each word its senses by part of speech (``n v a r``).
    """

    synsets: dict[Key, Synset]
    lemmas: dict[str, dict[str, Senses]]


def load_wordnet(folder: Path) -> WordNet:
    """The database in a folder such as /usr/share/wordnet."""
    synsets: dict[Key, Synset] = {}
    lemmas: dict[str, dict[str, Senses]] = {}
    for part, file in FILE_OF.items():
        for line in _lines(folder / f"data.{file}"):
            offset, synset = _parse_synset(line)
            synsets[part, offset] = synset
    for part, file in FILE_OF.items():
        for line in _lines(folder / f"index.{file}"):
            lemma, senses = _parse_senses(line)
            lemmas.setdefault(lemma, {})[part] = senses
    return WordNet(synsets, lemmas)


def _lines(path: Path) -> list[str]:
    """The lines of a file but for its licence, whose lines start with two spaces."""
    return [line for line in path.read_text(encoding="latin-1").splitlines() if not line.startswith("  ")]


def _parse_synset(line: str) -> tuple[str, Synset]:
    head, gloss = line.split(" | ", 1)
    fields = head.split()
    num_words = int(fields[3], 16)
    words = [re.sub(r"\(.*\)", "", word).replace("_", " ") for word in fields[4 : 4 + 2 * num_words : 2]]
    place = 4 + 2 * num_words
    pointers = []
    for index in range(int(fields[place])):
        symbol, offset, part, _ = fields[place + 1 + 4 * index : place + 5 + 4 * index]
        pointers.append((symbol, ("a" if part == "s" else part, offset)))
    definition, *examples = [piece.strip() for piece in re.split(r';\s*(?=")', gloss.strip())]
    examples = [example.strip().strip('"') for example in examples]
    return fields[0], Synset(words, int(fields[1]), pointers, definition, examples)


def _parse_senses(line: str) -> tuple[str, Senses]:
    fields = line.split()
    num_senses, num_pointer_symbols = int(fields[2]), int(fields[3])
    tagged = int(fields[3 + num_pointer_symbols + 2])
    return fields[0].replace("_", " "), Senses(tagged, fields[-num_senses:])
