"""Endless training batches: conversations made of random questions, some about the conversation itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.utils.data import IterableDataset, get_worker_info

BOS, EOS, USER, ASSISTANT = 0, 1, 2, 3
KIND_WEIGHTS = {"define": 2.0, "plus": 0.6, "prime": 2.0, "primes": 6.0}  # others: 1
QUESTION_WEIGHT, ANSWER_WEIGHT = 0.1, 1.0
RECALL_SHARE = 0.06
MOST_TURNS = 60

Turns = Iterator[tuple[np.ndarray, np.ndarray]]  # questions and answers


class Episodes(IterableDataset):
    """Batches of conversations.

    Args:
        data: Folder that build_data.py wrote.
        context: Tokens in a sequence.
        batch: Sequences in a batch.
        seed: Of the random choices; each loader process adds its own number.
    """

    def __init__(self, data: Path, context: int, batch: int, seed: int) -> None:
        self.data, self.context, self.batch, self.seed = data, context, batch, seed

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields token ids [B, context + 1] i64 and the weight of each in the loss, the same shape, f32."""
        info = get_worker_info()
        rng = np.random.default_rng(self.seed * 1000 + (info.id if info else 0))
        stored = np.load(self.data / "pairs.npz")
        tokens, rows = stored["tokens"], stored["rows"]
        cumulative = self._cumulative_weights(rows)
        tokenizer = Tokenizer.from_file(str(self.data / "tokenizer/tokenizer.json"))
        ask_first, ask_previous = (
            np.array(tokenizer.encode(f"What was my {which} question?").ids, np.uint16)
            for which in ("first", "previous")
        )

        def conversation() -> Turns:
            """Turns of one conversation: question and answer."""
            first = previous = None
            for _turn in range(rng.integers(1, MOST_TURNS)):
                row = rows[np.searchsorted(cumulative, rng.random())]
                question, answer = tokens[row[1] : row[1] + row[2]], tokens[row[3] : row[3] + row[4]]
                if first is not None and rng.random() < RECALL_SHARE:
                    recall_first = rng.random() < 0.5
                    question, answer = (ask_first, first) if recall_first else (ask_previous, previous)
                first = question if first is None else first
                previous = question
                yield question, answer

        while True:
            ids = np.zeros((self.batch, self.context + 1), np.int64)
            weights = np.zeros((self.batch, self.context + 1), np.float32)
            for index in range(self.batch):
                self._fill(ids[index], weights[index], conversation)
            yield torch.from_numpy(ids), torch.from_numpy(weights)

    def _cumulative_weights(self, rows: np.ndarray) -> np.ndarray:
        kinds = json.loads((self.data / "kinds.json").read_text())
        weights = np.array([KIND_WEIGHTS.get(kind, 1.0) for kind in kinds])[rows[:, 0]] / rows[:, 5]
        return np.cumsum(weights / weights.sum())

    @staticmethod
    def _fill(ids: np.ndarray, weights: np.ndarray, conversation: Callable[[], Turns]) -> None:
        """Fills a sequence with conversations, one after the other, the last one cut off."""
        place = 0
        while place < len(ids):
            ids[place] = BOS
            place += 1
            for question, answer in conversation():
                turn = np.concatenate(([USER], question, [ASSISTANT], answer, [EOS]))
                weight = np.full(len(turn), QUESTION_WEIGHT)
                weight[len(question) + 2 :] = ANSWER_WEIGHT
                length = min(len(turn), len(ids) - place)
                ids[place : place + length], weights[place : place + length] = turn[:length], weight[:length]
                place += length
                if place == len(ids):
                    return
