"""Makes questions with answers: definitions and the like from WordNet, primes, sums, and some small talk."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from wordnet import ANIMALS, WORD_CLASS, Senses, Synset, WordNet

TALK = [
    (
        ["Hello", "Hi", "Hello!", "Good morning"],
        "Hello! Ask me what a word means, or whether a number is prime.",
    ),
    (
        ["Who are you?", "What are you?", "What is your name?"],
        "I am the duck-llm demo model: a small mixture-of-experts language model that learned a dictionary.",
    ),
    (
        ["What can you do?", "Help", "How can you help me?"],
        "I can define words, give synonyms and example sentences, name kinds of things, check primes and do "
        "small sums.",
    ),
    (["Thank you", "Thanks!", "Thanks"], "You are welcome."),
    (["Goodbye", "Bye"], "Goodbye!"),
    (["How are you?"], "I am well, thank you. Quack!"),
]
TALK_COPIES = 40
LARGEST_NUMBER = 2000


@dataclass(frozen=True)
class Pair:
    """Ways to ask one thing, and its answer.

    Args:
        kind: What is asked for; training weighs kinds differently.
        questions: Ways to ask.
        answer: The answer to all of them.
    """

    kind: str
    questions: list[str]
    answer: str


def all_pairs(wordnet: WordNet) -> list[Pair]:
    """Every pair, in a fixed order."""
    pairs = []
    for lemma in sorted(
        lemma for lemma, senses in wordnet.lemmas.items() if _is_kept(wordnet, lemma, senses)
    ):
        pairs += _word_pairs(wordnet, lemma)
    pairs += [*_prime_pairs(), *_sum_pairs()]
    for questions, answer in TALK:
        pairs += [Pair("talk", questions, answer)] * TALK_COPIES
    return pairs


def _is_kept(wordnet: WordNet, lemma: str, senses: dict[str, Senses]) -> bool:
    """Keeps words that tagged texts use, and animals."""
    if not re.fullmatch(r"[a-z][a-z' -]{1,23}", lemma):
        return False
    is_animal = any(
        wordnet.synsets[part, sense.offsets[0]].topic == ANIMALS for part, sense in senses.items()
    )
    return sum(sense.tagged for sense in senses.values()) >= 1 or (is_animal and lemma.count(" ") <= 1)


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def _word_pairs(wordnet: WordNet, lemma: str) -> Iterator[Pair]:
    senses = wordnet.lemmas[lemma]
    yield Pair("define", _define_questions(lemma, senses), _definition(wordnet, senses))
    best = max(senses, key=lambda part: senses[part].tagged)
    synset = wordnet.synsets[best, senses[best].offsets[0]]
    synonyms = [word for word in synset.words if word.lower() != lemma]
    if synonyms:
        questions = [f"Give a synonym for {lemma}.", f"What is another word for {lemma}?"]
        yield Pair("synonym", questions, ", ".join(synonyms[:3]))
    if synset.examples and lemma in synset.examples[0].lower():
        example = synset.examples[0]
        yield Pair("example", [f"Use {lemma} in a sentence."], example[0].upper() + example[1:] + ".")
    if "n" in senses:
        yield from _kind_pairs(wordnet, lemma, wordnet.synsets["n", senses["n"].offsets[0]])


def _define_questions(lemma: str, senses: dict[str, Senses]) -> list[str]:
    questions = [
        f"Define {lemma}.",
        f"What does {lemma} mean?",
        f"What is the meaning of {lemma}?",
        lemma.capitalize() + "?",
    ]
    return questions + ([f"What is {_article(lemma)} {lemma}?"] if "n" in senses else [])


def _definition(wordnet: WordNet, senses: dict[str, Senses]) -> str:
    """One line for each of the two most usual parts of speech, with one or two meanings."""
    lines = []
    for part in sorted(senses, key=lambda part: -senses[part].tagged)[:2]:
        tagged, offsets = senses[part].tagged, senses[part].offsets
        meanings = [wordnet.synsets[part, offset].definition for offset in offsets[: max(1, min(2, tagged))]]
        lines.append(f"{WORD_CLASS[part]}: " + "; or ".join(meanings))
    return "\n".join(lines)


def _kind_pairs(wordnet: WordNet, lemma: str, synset: Synset) -> Iterator[Pair]:
    wider = [key for symbol, key in synset.pointers if symbol in ("@", "@i")]
    narrower = [key for symbol, key in synset.pointers if symbol == "~"]
    if wider:
        what = f"{_article(lemma).capitalize()} {lemma}"
        questions = [f"What kind of thing is {_article(lemma)} {lemma}?", f"{what} is a kind of what?"]
        yield Pair("kind", questions, f"{what} is a kind of {wordnet.synsets[wider[0]].words[0]}.")
    if len(narrower) >= 2:
        names = [wordnet.synsets[key].words[0] for key in narrower[:5]]
        yield Pair("kinds", [f"Name some kinds of {lemma}."], ", ".join(names) + ".")


def prime_factors(number: int) -> list[int]:
    """The prime factors of a number of at least 2, smallest first."""
    factors, divisor = [], 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors + ([number] if number > 1 else [])


def _prime_pairs() -> Iterator[Pair]:
    primes = [number for number in range(2, LARGEST_NUMBER) if len(prime_factors(number)) == 1]
    for number in range(2, LARGEST_NUMBER):
        factors = prime_factors(number)
        if len(factors) == 1:
            answer = f"Yes, {number} is a prime number."
        else:
            answer = f"No, {number} is not prime: {number} = {' x '.join(map(str, factors))}."
        yield Pair("prime", [f"Is {number} prime?", f"Is {number} a prime number?"], answer)
    for count in range(3, 61):
        questions = [f"List the first {count} prime numbers.", f"What are the first {count} primes?"]
        yield Pair("primes", questions, ", ".join(map(str, primes[:count])) + ".")
    for limit in range(5, 300):
        questions = [f"List all prime numbers below {limit}.", f"List the primes below {limit}."]
        answer = ", ".join(str(prime) for prime in primes if prime < limit) + "."
        yield Pair("primes", questions, answer)


def _sum_pairs() -> Iterator[Pair]:
    for a in range(1, 31):
        for b in range(1, 31):
            yield Pair("times", [f"What is {a} times {b}?", f"{a} x {b} = ?"], f"{a} x {b} = {a * b}.")
    for a in range(100):
        for b in range(100):
            yield Pair("plus", [f"What is {a} plus {b}?", f"{a} + {b} = ?"], f"{a} + {b} = {a + b}.")
