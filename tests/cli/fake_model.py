"""A model for the chat's tests: says what it is told to, without tensors or workers.

Run as a program it is a conversation on a terminal: ``python fake_model.py``; with the argument ``load`` or
``fail`` it loads for three seconds first, and ``fail`` fails then.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass

from duckllm.errors import ConfigError, PromptTooLongError, WorkerLostError
from duckllm.outputs import EngineMetrics, RequestMetrics, StreamOutput
from duckllm.sampling_params import SamplingParams


@dataclass(frozen=True)
class FakeInfo:
    num_workers: int = 2
    weight_format: str = "fp9"
    isas: tuple[str, ...] = ("avx2", "scalar")
    stripes: tuple[int, ...] = (4, 4)
    links: tuple[str, ...] = ("shared memory",) * 2
    own_memory_bytes: tuple[int, ...] = (0, 0)
    huge_page_bytes: tuple[int, ...] = (0, 0)
    layer_formats: str = ""


STATS = EngineMetrics(
    num_steps=900,
    num_prompt_tokens=70,
    num_generated_tokens=1200,
    num_draft_tokens=500,
    num_accepted_tokens=400,
    window_steps=512,
    step_s=0.0025,
    step_parts_s={"attention_s": 0.001, "wait_s": 0.0012, "head_s": 0.0},
    prefill_tokens_per_s=2000.4,
    decode_tokens_per_s=410.26,
    acceptance=0.805,
    time_to_first_token_p50_s=0.0042,
    time_to_first_token_p99_s=0.05,
    inter_token_p50_s=0.0024,
    inter_token_p99_s=0.0031,
    total_step_s=2.25,
    total_step_parts_s={"attention_s": 0.9, "wait_s": 1.08, "head_s": 0.0},
)


class FakeConversation:
    """As duckllm.conversation.Conversation: keeps what was said, also of a reply that was stopped."""

    def __init__(self, model: FakeModel, system: str | None) -> None:
        self.model, self.system = model, system
        self.token_ids: list[int] = []
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def stream(
        self, text: str, sampling_params: SamplingParams | None = None
    ) -> Generator[StreamOutput, None, None]:
        question = {"role": "user", "content": text}
        return self._stream(question, self.model.stream([*self.messages, question], sampling_params))

    def _stream(
        self, question: dict[str, str], outputs: Iterator[StreamOutput]
    ) -> Generator[StreamOutput, None, None]:
        said: list[str] = []
        try:
            for output in outputs:
                said.append(output.text)
                yield output
        finally:
            if said:
                self.messages += [question, {"role": "assistant", "content": "".join(said)}]


class FakeModel:
    """Answers "slow ..." a character at a time with pauses, anything else by repeating what it has heard."""

    default_sampling_params = SamplingParams(temperature=0.0)

    def __init__(self, context_messages: int = 100) -> None:
        self.conversations: list[list[Mapping[str, str]]] = []
        self.params: list[SamplingParams | None] = []
        self.context_messages = context_messages

    def __enter__(self) -> FakeModel:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def memory(self) -> str:
        return "1.00 GiB of weights, 0.50 GiB of KV cache, which holds 10 tokens"

    def stats(self) -> EngineMetrics:
        return STATS

    def cluster_info(self) -> FakeInfo:
        return FakeInfo()

    def conversation(self, system: str | None = None) -> FakeConversation:
        return FakeConversation(self, system)

    def stream(
        self, prompt: Sequence[Mapping[str, str]], sampling_params: SamplingParams | None = None
    ) -> Iterator[StreamOutput]:
        self.conversations.append([dict(message) for message in prompt])
        self.params.append(sampling_params)
        if len(prompt) > self.context_messages:
            raise PromptTooLongError(len(prompt), self.context_messages)
        return self._stream(prompt[-1]["content"])

    def _stream(self, heard: str) -> Iterator[StreamOutput]:
        if heard == "lose later":
            yield StreamOutput("0", "some words", (1,), None, RequestMetrics(7, 1, 0.25, None))
        if heard.startswith("lose"):
            raise WorkerLostError("127.0.0.1:1", "it went away", 3)
        if heard == "escape":
            pieces = ["a\x1b[2Jb", "\x07c\n", "é"]
        elif heard.startswith("slow"):
            pieces = [f"{number} " for number in range(100)]
        else:
            pieces = ["heard ", repr(heard)]
        limit = 3 if heard == "long" else len(pieces)
        for number, piece in enumerate(pieces, start=1):
            if heard.startswith("slow"):
                time.sleep(0.05)
            last = number == len(pieces)
            reason = ("length" if heard == "long" else "stop") if last else None
            yield StreamOutput(
                "0", piece, (number,), reason, RequestMetrics(7, min(number, limit), 0.25, 12.5)
            )


def load_slowly() -> None:
    """As ``duckllm chat`` while it loads: keys unseen, a spinner."""
    from duckllm.cli.common import Waiting
    from duckllm.cli.terminal import keys_unseen

    with keys_unseen():
        with Waiting("Loading the fake model", after_s=0.0):
            time.sleep(3.0)
        if "fail" in sys.argv:
            raise ConfigError("model", "fake", "another one")
        talk()


def talk() -> None:
    from duckllm.cli.repl import Repl

    raise SystemExit(Repl(FakeModel(), SamplingParams()).run())


if __name__ == "__main__":
    if len(sys.argv) == 1:
        talk()
    from duckllm.cli import main as command

    command.app = lambda prog_name: load_slowly()
    command.main()
