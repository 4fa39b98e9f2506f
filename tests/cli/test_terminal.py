"""The conversation on a real terminal (a pty): what keys and pastes do."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from duckllm.cli.terminal import TABLE_WIDTH, table_console

CTRL_C, CTRL_D, ENTER = b"\x03", b"\x04", b"\r"
PASTE_BEGIN, PASTE_END = b"\x1b[200~", b"\x1b[201~"
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\r")


class Terminal:
    """A program on a pty of its own, as its session's foreground."""

    def __init__(self, command: list[str]) -> None:
        self.end, inner = pty.openpty()
        termios.tcsetwinsize(inner, (40, 120))
        # setsid makes the pty the controlling terminal of the program, so that Ctrl-C there is a signal.
        self.process = subprocess.Popen(
            ["setsid", "--ctty", "--wait", *command],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            env={**os.environ, "TERM": "xterm"},
        )
        os.close(inner)
        self.seen = ""
        self.all_seen = ""
        self._raw = b""

    def send(self, keys: bytes) -> None:
        os.write(self.end, keys)

    def wait_for(self, pattern: str, timeout_s: float = 60) -> str:
        """What is seen up to ``pattern``, which is then forgotten."""
        limit_s = time.monotonic() + timeout_s
        while not (found := re.search(pattern, self.seen)):
            assert time.monotonic() < limit_s, f"{pattern!r} did not come; seen: {self.seen!r}"
            if not self._read(limit_s - time.monotonic()):
                raise AssertionError(f"{pattern!r} did not come before the end; seen: {self.seen!r}")
        upto = self.seen[: found.end()]
        self.seen = self.seen[found.end() :]
        return upto

    def _read(self, timeout_s: float) -> bool:
        if not select.select([self.end], [], [], max(0, timeout_s))[0]:
            return True
        try:
            data = os.read(self.end, 65536)
        except OSError:  # the other end is closed
            return False
        if b"\x1b[6n" in data:
            os.write(self.end, b"\x1b[1;1R")  # it asks where the cursor is
        self._raw += data
        seen = _CONTROL.sub("", data.decode(errors="ignore"))
        self.seen += seen
        self.all_seen += seen
        return bool(data)

    def wait_end(self, timeout_s: float = 60) -> int:
        limit_s = time.monotonic() + timeout_s
        while self.process.poll() is None and time.monotonic() < limit_s:
            self._read(0.05)
        while select.select([self.end], [], [], 0)[0] and self._read(0):
            pass  # what it said last
        return self.process.wait(timeout=max(0.1, limit_s - time.monotonic()))

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        os.close(self.end)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    found = Terminal([sys.executable, str(Path(__file__).with_name("fake_model.py"))])
    try:
        found.wait_for("Ctrl-D leaves")
        found.wait_for(">")
        yield found
    finally:
        found.close()


def test_a_line_is_a_message_and_ctrl_d_leaves_with_0(terminal: Terminal) -> None:
    terminal.send(b"hello" + ENTER)
    terminal.wait_for("heard 'hello'")
    terminal.wait_for(">")
    terminal.send(CTRL_D)
    assert terminal.wait_end() == 0


def test_pasted_lines_are_one_message(terminal: Terminal) -> None:
    terminal.send(PASTE_BEGIN + b"one\ntwo\r\n\nthree\n" + PASTE_END)
    terminal.send(ENTER)
    terminal.wait_for(re.escape(r"heard 'one\ntwo\n\nthree'"))


@pytest.mark.parametrize(
    ("pasted", "heard"),
    [
        (b"\x1b[31mred\x1b[0m \x1b[1;4mbold\x1b[0m duck", "red bold duck"),
        (b"\x1b[Mtail duck", "l duck"),  # an old mouse's report has three more characters
        (b"\x1b[<0;1;1Ma\x1b[5;5Rb\x1b]0;t\x07c", "ab]0;tc"),
    ],
    ids=["colours", "old-mouse", "others"],
)
def test_escape_sequences_pasted_as_if_typed_do_no_harm(
    terminal: Terminal, pasted: bytes, heard: str
) -> None:
    """A terminal without bracketed paste sends a paste as if it was typed."""
    terminal.send(pasted + ENTER)
    terminal.wait_for(f"heard {re.escape(repr(heard))}")
    terminal.wait_for(">")
    terminal.send(CTRL_D)
    assert terminal.wait_end() == 0
    assert "xception" not in terminal.seen


def test_alt_enter_begins_a_new_line(terminal: Terminal) -> None:
    terminal.send(b"one\x1b\rtwo" + ENTER)
    terminal.wait_for(re.escape(r"heard 'one\ntwo'"))


def test_ctrl_c_clears_the_line(terminal: Terminal) -> None:
    terminal.send(b"never mind")
    terminal.wait_for("never mind")
    terminal.send(CTRL_C)
    terminal.wait_for(">")
    terminal.send(b"hello" + ENTER)
    terminal.wait_for("heard 'hello'")


def test_ctrl_c_stops_a_reply_and_the_conversation_goes_on(terminal: Terminal) -> None:
    terminal.send(b"slow" + ENTER)
    terminal.wait_for("0 1 2 ")
    terminal.send(CTRL_C)
    terminal.wait_for(r"\n\[.*tok/s.*, stopped\]")
    terminal.wait_for(">")
    terminal.send(b"/stats" + ENTER)
    terminal.wait_for("1 reply,")
    terminal.send(b"hello" + ENTER)
    terminal.wait_for("heard 'hello'")
    terminal.wait_for(">")
    terminal.send(CTRL_D)
    assert terminal.wait_end() == 0


def test_keys_pressed_while_a_reply_comes_wait_for_the_prompt(terminal: Terminal) -> None:
    terminal.send(b"slow" + ENTER)
    terminal.wait_for("0 1 ")
    terminal.send(b"hello" + ENTER + CTRL_D)
    assert "hello" not in terminal.wait_for("98 99 ")
    terminal.wait_for("heard 'hello'")
    assert terminal.wait_end() == 0


def test_the_terminal_is_as_before_afterwards(terminal: Terminal) -> None:
    terminal.send(CTRL_D)
    assert terminal.wait_end() == 0
    flags = termios.tcgetattr(terminal.end)[3]
    assert flags & termios.ICANON
    assert flags & termios.ECHO


@pytest.fixture
def loading(request: pytest.FixtureRequest) -> Iterator[Terminal]:
    found = Terminal([sys.executable, str(Path(__file__).with_name("fake_model.py")), request.param])
    try:
        found.wait_for("Loading the fake model")
        yield found
    finally:
        found.close()


def echoes(terminal: Terminal) -> bool:
    return bool(termios.tcgetattr(terminal.end)[3] & termios.ECHO)


@pytest.mark.parametrize("loading", ["load"], indirect=True)
def test_keys_pressed_while_the_model_loads_wait_for_the_prompt(loading: Terminal) -> None:
    loading.send(b"hello" + ENTER + CTRL_D)
    assert "hello" not in loading.wait_for("Ctrl-D leaves")
    loading.wait_for("heard 'hello'")
    assert loading.wait_end() == 0
    assert echoes(loading)


@pytest.mark.parametrize("loading", ["load"], indirect=True)
def test_ctrl_c_while_the_model_loads_leaves_with_130(loading: Terminal) -> None:
    loading.send(b"hello" + CTRL_C)
    assert loading.wait_end() == 130
    assert loading.seen.endswith("\n")
    assert not re.search(r"hello|Traceback|\^C", loading.seen)
    assert echoes(loading)


@pytest.mark.parametrize("loading", ["fail"], indirect=True)
def test_a_model_that_does_not_load_leaves_the_terminal_as_it_was(loading: Terminal) -> None:
    assert not echoes(loading)
    loading.wait_for("duckllm: model: got 'fake', expected another one")
    assert loading.wait_end() == 2
    assert echoes(loading)


def test_replies_are_wrapped_at_the_terminals_width(terminal: Terminal) -> None:
    termios.tcsetwinsize(terminal.end, (40, 40))
    terminal.send(b"slow" + ENTER)
    terminal.wait_for(r" 15 16\n17 18 [0-9 ]* 28 29 \n30 31 ")


def test_commands(terminal: Terminal) -> None:
    terminal.send(b"/help" + ENTER)
    terminal.wait_for("/reset   begin a new conversation")
    terminal.send(b"/nonsense" + ENTER)
    terminal.wait_for("/nonsense is no command")
    terminal.send(b"/reset" + ENTER)
    terminal.wait_for("A new conversation")


def workers_of(pid: int) -> list[psutil.Process]:
    return [
        child for child in psutil.Process(pid).children(recursive=True) if "duckllm.worker" in child.cmdline()
    ]


def test_a_conversation_with_the_demo_model(demo_folder: Path) -> None:
    """The whole path on a terminal: stop a reply, go on in the same conversation, leave nothing behind.

    A worker that dies meanwhile is replaced.
    """
    terminal = Terminal([sys.executable, "-m", "duckllm", "chat", "--workers", "2"])
    try:
        terminal.wait_for("2 workers, fp9, .*Ctrl-D leaves")
        workers = workers_of(terminal.process.pid)
        assert len(workers) == 2
        terminal.send(b"What are the first 32 primes?" + ENTER)
        terminal.wait_for("2, 3, 5, 7, 11, ")
        terminal.send(CTRL_C)
        terminal.wait_for(r"\n\[.*tok/s.*, stopped\]")
        terminal.wait_for(">")
        workers[0].kill()
        terminal.send(b"Is 1001 prime?" + ENTER)
        terminal.wait_for("worker 127.0.0.1:[0-9]+ is lost at layer [0-9]+: .*; waiting for it or a spare")
        terminal.wait_for("worker 127.0.0.1:[0-9]+ goes on in place of 127.0.0.1:[0-9]+ after [0-9.]+ s")
        workers += workers_of(terminal.process.pid)
        assert len(set(workers)) == 3
        terminal.wait_for("No, 1001 is not prime: 1001 = 7 x 11 x 13.")
        terminal.send(b"What was my first question?" + ENTER)
        terminal.wait_for(re.escape("What are the first 32 primes?"))
        terminal.wait_for(">")
        terminal.send(b"/stats" + ENTER)
        terminal.wait_for("3 replies")
        terminal.wait_for(">")
        terminal.send(CTRL_D)
        assert terminal.wait_end() == 0
        assert "Traceback" not in terminal.all_seen
        _, alive = psutil.wait_procs(workers, timeout=10)
        assert not alive
    finally:
        terminal.close()


def test_a_host_that_is_killed_leaves_no_worker(demo_folder: Path) -> None:
    terminal = Terminal([sys.executable, "-m", "duckllm", "chat", "--workers", "2"])
    try:
        terminal.wait_for("Ctrl-D leaves")
        workers = workers_of(terminal.process.pid)
        terminal.process.kill()
        _, alive = psutil.wait_procs(workers, timeout=10)
        assert not alive
    finally:
        terminal.close()


def test_tables_in_a_pipe_are_wide_unless_a_width_is_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert table_console().width == TABLE_WIDTH
    monkeypatch.setenv("COLUMNS", "90")
    assert table_console().width == 90
