"""Our side of the comparison of whole models: checked against a float32 reference, and timed.

Called by whole_model.py.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from duckllm import LLM, SamplingParams

VOCAB_SIZE = 32_000
CONTEXT, PROMPT, REPLY, PREFILL = 1024, 32, 64, 512
# The tokens that are verified: so many given, so many our reply's.
GIVEN, VERIFIED = 8, 8
# In float32 with lossless weights.
OUR_TOLERANCE = 1e-4
# Formats that round weights and activations, and how far log probabilities of the likeliest tokens may be off
# then, of their standard deviation.
ROUNDED_TOLERANCE = {"int8": 0.1, "int4": 0.4}
OUR_FORMATS = ("fp8", "fp9", *ROUNDED_TOLERANCE)


class Ours:
    """Our engine with the model.

    Args:
        folder: The converted model.
        options: Further ones of :class:`duckllm.LLM`.
    """

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        self._llm = LLM(
            folder,
            device="cpu",
            max_model_len=CONTEXT,
            max_num_seqs=1,
            kv_cache_bytes="256MiB",
            max_step_tokens=PREFILL,
            **options,
        )
        self._rng = np.random.default_rng(13)

    def __enter__(self) -> Ours:
        return self

    def __exit__(self, *_: object) -> None:
        self._llm.close()

    def greedy(self, prompt: list[int], logprobs: int) -> tuple[list[int], list[dict[int, float]]]:
        """A short reply, and at each of its places the log probabilities of the likeliest tokens."""
        params = SamplingParams(temperature=0, max_tokens=VERIFIED, ignore_eos=True, logprobs=logprobs)
        reply = self._llm.generate(prompt, params)[0].outputs[0]
        assert reply.logprobs is not None
        places = [{token: each.logprob for token, each in place.items()} for place in reply.logprobs]
        return list(reply.token_ids), places

    def rounding_error(self, reference: Path, tolerance: float) -> float:
        """The error of the likeliest tokens' log probabilities behind the prompt, of a model that rounds.

        The root mean square over twenty tokens, over the standard deviation of all.

        Raises:
            SystemExit: It is too large.
        """
        with np.load(reference) as stored:
            tokens, logits = stored["tokens"], torch.from_numpy(stored["logits"][GIVEN - 1])
        exact = logits.double().log_softmax(-1).numpy()
        found = self.greedy(tokens[:GIVEN].tolist(), 20)[1][0]
        off = np.array([exact[token] - logprob for token, logprob in found.items()])
        error = float(np.sqrt(np.mean(off**2)) / exact.std())
        if not error <= tolerance:
            sys.exit(
                f"whole_model.py: our log probabilities are {error:.4f} of their spread off: nothing measured"
            )
        return error

    def error(self, reference: Path) -> float:
        """The largest error of a log probability among the likeliest tokens of each place of the reply.

        Raises:
            SystemExit: The reply is another than the one that was compared, or the error is too large.
        """
        with np.load(reference) as stored:
            tokens, logits = stored["tokens"], torch.from_numpy(stored["logits"][GIVEN - 1 : -1])
        reply, places = self.greedy(tokens[:GIVEN].tolist(), 20)
        exact = logits.double().log_softmax(-1).numpy()
        if reply != tokens[GIVEN:].tolist() or reply != exact.argmax(-1).tolist():
            sys.exit("whole_model.py: our reply is not float32's: nothing measured")
        worst = max(
            abs(exact[place, token] - logprob)
            for place, found in enumerate(places)
            for token, logprob in found.items()
        )
        if not worst <= OUR_TOLERANCE:
            sys.exit(f"whole_model.py: our log probabilities are {worst:.1e} off float32: nothing measured")
        return float(worst)

    def seconds(self, rows: int) -> float:
        """Of a prompt of so many tokens; of a token of a reply for 1."""
        prompt = self._rng.integers(0, VOCAB_SIZE, PROMPT if rows == 1 else rows).tolist()
        length = REPLY + 1 if rows == 1 else 1
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        metrics = self._llm.generate(prompt, params)[0].metrics
        if rows == 1:
            assert metrics.decode_tokens_per_s is not None
            return 1 / metrics.decode_tokens_per_s
        assert metrics.time_to_first_token_s is not None
        assert metrics.num_cached_tokens == 0
        return metrics.time_to_first_token_s
