"""The logits of a model behind the tokens of a passage, and a file that keeps the reference's.

Called by :mod:`duckllm.quality.measure`. Computes through a KV cache of its own, so that nothing of requests
is in the way.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import torch

from duckllm.errors import DiskSpaceError
from duckllm.layers.step import SequenceStep
from duckllm.quality.divergence import F32, I64
from duckllm.quality.texts import Passage
from duckllm.weights.cache_folder import cache_folder
from duckllm.weights.files import free_bytes

if TYPE_CHECKING:
    from duckllm.models.causal_lm import CausalLM

STEP_TOKENS = 256
# Rows whose logits are in memory at once: 33 MB of 129280 tokens, and several times that in float64.
_ROWS = 64
_SPARE_BYTES = 1 << 28


def logits_of(model: CausalLM, passage: Passage, step_tokens: int = STEP_TOKENS) -> Iterator[tuple[F32, I64]]:
    """Logits of a passage's predictions that count, and the tokens that they are of, piece by piece.

    Args:
        model: On a CPU.
        passage: With its reply.
        step_tokens: Tokens of a step, at most what its experts take.

    Shapes: pieces: [n, V] f32 and [n].
    """
    ids = torch.tensor(passage.token_ids)
    num_tokens = len(ids) - 1  # nothing is behind the last one
    cache = model.new_kv_cache(num_tokens)
    for start in range(0, num_tokens, step_tokens):
        stop = min(start + step_tokens, num_tokens)
        hidden = model.forward(ids[start:stop], [SequenceStep.of(0, start, stop - start)], cache)
        for row in range(max(passage.first - 1, start), stop, _ROWS):
            end = min(row + _ROWS, stop)
            logits = model.compute_logits(hidden[row - start : end - start])
            yield logits.numpy(), ids[row + 1 : end + 1].numpy()


class LogitsFile:
    """Logits on disk, in a file without a name that goes with this object: what memory need not hold.

    Args:
        num_rows: Most rows.
        vocab_size: V.

    Raises:
        DiskSpaceError: The folder of the model cache has no room for them.
    """

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        need, have = 4 * num_rows * vocab_size + _SPARE_BYTES, free_bytes(folder)
        if have < need:
            raise DiskSpaceError(
                f"{folder}: got {have:,} bytes free, expected at least {need:,} for the "
                f"reference's logits of {num_rows:,} predictions; fewer tokens need less"
            )
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed by this object's own end
        self._vocab_size = vocab_size

    def __enter__(self) -> LogitsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, logits: F32) -> None:
        """Appends rows [n, V]."""
        self._file.write(np.ascontiguousarray(logits, dtype=np.float32).data)

    def rewind(self) -> None:
        """Goes back to the first row."""
        self._file.seek(0)

    def read(self, num_rows: int) -> F32:
        """The next rows, [n, V]."""
        data = self._file.read(4 * num_rows * self._vocab_size)
        return np.frombuffer(data, np.float32).reshape(num_rows, self._vocab_size)
