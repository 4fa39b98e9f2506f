from __future__ import annotations

import dataclasses
import io
import os
import signal
from collections.abc import Callable, Iterator

import pytest
from fake_model import FakeModel

from duckllm.cli.common import describe_stats
from duckllm.cli.repl import HELP, Repl
from duckllm.engine.stats import EngineStats
from duckllm.errors import ClusterError
from duckllm.sampling_params import SamplingParams

SYSTEM = "be brief"


def script(*lines: str | type[BaseException]) -> Callable[[], str]:
    waiting: Iterator[str | type[BaseException]] = iter([*lines, EOFError])

    def read() -> str:
        line = next(waiting)
        if isinstance(line, str):
            return line
        raise line

    return read


def talk(model: FakeModel, *lines: str | type[BaseException], system: str | None = None) -> str:
    out = io.StringIO()
    assert Repl(model, SamplingParams(), model.conversation(system), out, script(*lines)).run() == 0
    return out.getvalue()


def roles(conversation: list[dict[str, str]]) -> list[str]:
    return [f"{message['role']}: {message['content']}" for message in conversation]


def test_each_turn_sees_the_whole_conversation() -> None:
    model = FakeModel()
    shown = talk(model, "one", "two", system=SYSTEM)
    assert roles(model.conversations[-1]) == [
        "system: be brief", "user: one", "assistant: heard 'one'", "user: two",
    ]  # fmt: skip
    assert "heard 'one'\nheard 'two'\n" in shown
    assert shown.startswith("2 workers, fp9, avx2+scalar.")


def test_several_lines_are_one_message() -> None:
    model = FakeModel()
    talk(model, "a\nb\n\nc\n", "/help\nis a line of a message")
    assert model.conversations[0] == [{"role": "user", "content": "a\nb\n\nc"}]
    assert model.conversations[1][-1]["content"] == "/help\nis a line of a message"


def test_reset_forgets_all_but_the_system_message() -> None:
    model = FakeModel()
    talk(model, "one", "/reset", "two", system=SYSTEM)
    assert roles(model.conversations[-1]) == ["system: be brief", "user: two"]


def test_commands_answer_and_ask_nothing_of_the_model() -> None:
    model = FakeModel()
    shown = talk(model, "/help", "/stats", "/quack", "/", "", "   ")
    assert model.conversations == []
    assert HELP.format("") in shown
    assert "No reply yet." in shown
    assert "/quack is no command; /help lists them." in shown


@pytest.mark.parametrize("text", ["/quit now", "/stats x", "/reset  all"])
def test_a_command_with_something_behind_it_is_refused(text: str) -> None:
    model = FakeModel()
    shown = talk(model, "one", text, "two")
    assert f"{text.split()[0]} takes nothing behind it.\n" in shown
    assert roles(model.conversations[-1]) == ["user: one", "assistant: heard 'one'", "user: two"]


def test_a_reset_says_that_a_session_is_forgotten() -> None:
    out, model = io.StringIO(), FakeModel()
    Repl(model, SamplingParams(), None, out, script("/help", "/reset"), session="ducks").run()
    lost = "what session ducks held is forgotten"
    assert f"/reset   begin a new conversation; {lost}\n" in out.getvalue()
    assert f"A new conversation; {lost}.\n" in out.getvalue()
    assert "A new conversation.\n" in talk(FakeModel(), "/reset")


def test_an_empty_reply_is_told_with_its_facts() -> None:
    class Silent(FakeModel):
        def _stream(self, heard: str) -> Iterator:
            for output in super()._stream(heard):
                yield dataclasses.replace(output, text=" \n" if heard == "say nothing" else output.text)

    shown = talk(Silent(), "say nothing", "one")
    assert "[empty reply]\n[2 workers, fp9, avx2+scalar, 2 tokens, " in shown
    assert shown.count("tok/s") == 1


def test_what_is_said_breaks_between_words_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("duckllm.cli.terminal.terminal_width", lambda out: 40)
    out = Terminal()
    Repl(FakeModel(), SamplingParams(), None, out, script("one", "/stats")).run()
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 40
    assert "This conversation: 1 reply, 2 tokens " in lines


def test_a_path_is_a_message() -> None:
    model = FakeModel()
    talk(model, "/etc/hosts is what?", "/etc/hosts")
    assert [conversation[-1]["content"] for conversation in model.conversations] == [
        "/etc/hosts is what?", "/etc/hosts",
    ]  # fmt: skip


def test_stats_count_the_conversation() -> None:
    shown = talk(FakeModel(), "one", "two", "/stats")
    assert "2 replies, 4 tokens generated, 7 tokens in the last prompt" in shown
    assert "[2 workers, fp9, avx2+scalar, 2 tokens, 12.5 tok/s, first token after 0.25 s]" in shown
    assert shown.endswith(
        "Last 512 steps, 2.50 ms each: attention 1.00, waiting for experts 1.20\n"
        "2000 tok/s of prompts; 410.3 tok/s of replies; 80% of guesses right; "
        "first token 4.2 ms, 99 of 100 within 50.0; between tokens 2.4 ms, 99 of 100 within 3.1\n"
        "In all: 70 tokens of prompts computed, 1200 generated, 400 of 500 guesses right\n"
    )
    assert "No reply yet." in talk(FakeModel(), "one", "/reset", "/stats")
    assert describe_stats(EngineStats().metrics()) == ""


def test_ctrl_c_at_the_prompt_goes_on() -> None:
    model = FakeModel()
    talk(model, KeyboardInterrupt, "one")
    assert len(model.conversations) == 1


class StoppedModel(FakeModel):
    """Presses Ctrl-C while it speaks: ``presses`` times before its third token."""

    def __init__(self, presses: int) -> None:
        super().__init__()
        self.presses = presses

    def _stream(self, heard: str) -> Iterator:
        for number, output in enumerate(super()._stream(heard)):
            if number == 2 and heard.startswith("slow"):
                for _ in range(self.presses):
                    os.kill(os.getpid(), signal.SIGINT)
            yield output


@pytest.mark.parametrize(("presses", "kept"), [(1, "0 1 2 "), (2, "0 1 ")])
def test_ctrl_c_stops_the_reply_and_keeps_what_was_said(presses: int, kept: str) -> None:
    model = StoppedModel(presses)
    before = signal.getsignal(signal.SIGINT)
    shown = talk(model, "slow", "two", "/stats")
    assert roles(model.conversations[-1]) == ["user: slow", f"assistant: {kept}", "user: two"]
    assert f"\n[2 workers, fp9, avx2+scalar, {kept.count(' ')} tokens, " in shown
    assert "0.25 s, stopped]" in shown
    assert "2 replies" in shown
    assert signal.getsignal(signal.SIGINT) is before


def test_a_reply_stopped_before_its_first_word_leaves_no_trace() -> None:
    class Silent(FakeModel):
        def _stream(self, heard: str) -> Iterator:
            if heard == "stop":
                raise KeyboardInterrupt
            return super()._stream(heard)

    model = Silent()
    assert "[stopped]" in talk(model, "stop", "two")
    assert roles(model.conversations[-1]) == ["user: two"]


def test_a_full_context_is_said_and_the_conversation_stays_usable() -> None:
    model = FakeModel(context_messages=2)
    shown = talk(model, "one", "two", "/reset", "three")
    assert "[prompt: got 3 tokens, expected at most 2. The conversation fills the context; /reset" in shown
    assert roles(model.conversations[-1]) == ["user: three"]
    model = FakeModel(context_messages=2)
    talk(model, "one", "two", "again")
    assert roles(model.conversations[-1]) == ["user: one", "assistant: heard 'one'", "user: again"]


def test_a_reply_cut_at_its_limit_says_so() -> None:
    facts = "\n[2 workers, fp9, avx2+scalar, 2 tokens, 12.5 tok/s, first token after 0.25 s, cut at "
    assert facts + "the context's end (9 tokens)]\n" in talk(FakeModel(), "long")
    out = io.StringIO()
    Repl(FakeModel(), SamplingParams(max_tokens=2), None, out, script("long")).run()
    assert facts + "max_tokens=2]\n" in out.getvalue()
    assert "tok/s" not in talk(FakeModel(), "short")


@pytest.mark.parametrize(("heard", "shown"), [("lose", ""), ("lose later", "some words\n")])
def test_a_lost_worker_ends_a_reply_and_the_next_one_may_come(heard: str, shown: str) -> None:
    out, model = io.StringIO(), FakeModel()
    assert Repl(model, SamplingParams(), None, out, script(heard, "more")).run() == 0
    assert len(model.conversations) == 2
    assert (
        out.getvalue()
        .split("Ctrl-D leaves.\n")[1]
        .startswith(shown + "[worker 127.0.0.1:1 is lost at layer 3: it went away]\n")
    )


def test_an_error_of_the_cluster_ends_the_conversation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ClusterError("transport: got a step, expected none")

    monkeypatch.setattr(FakeModel, "stream", fail)
    model = FakeModel()
    assert Repl(model, SamplingParams(), None, io.StringIO(), script("one", "more")).run() == 1
    assert capsys.readouterr().err == (
        "duckllm: the conversation is over, because transport: got a step, expected none\n"
    )


@pytest.mark.parametrize("word", ["/quit", "/exit", "/quit  "])
def test_a_word_leaves_as_ctrl_d_does(word: str) -> None:
    model = FakeModel()
    shown = talk(model, word, "one")
    assert model.conversations == []
    assert "no command" not in shown


def test_the_model_is_named_first() -> None:
    out = io.StringIO()
    Repl(FakeModel(), SamplingParams(), None, out, script(), title="a model").run()
    assert out.getvalue().startswith("a model\n2 workers, fp9")


def test_replies_do_not_command_the_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    Repl(FakeModel(), SamplingParams(), None, out, script("escape")).run()
    assert "a[2Jbc\né\n" in out.getvalue()
    assert "\x1b" not in out.getvalue()
    assert "\x1b[2J" in talk(FakeModel(), "escape")


def test_whoever_keeps_the_conversation_is_told_after_each_turn() -> None:
    model = FakeModel()
    conversation = model.conversation()
    kept: list[int] = []
    Repl(
        model,
        SamplingParams(),
        conversation,
        io.StringIO(),
        script("one", "/stats", "two", "/reset", "three"),
        after_turn=lambda: kept.append(len(conversation.messages)),
    ).run()
    assert kept == [2, 4, 0, 2]
