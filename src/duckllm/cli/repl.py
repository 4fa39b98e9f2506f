"""The conversation of ``duckllm chat`` on a terminal: reads messages, shows replies as they come.

Called by cli/chat.py. Knows a :class:`duckllm.cli.common.ChatModel` and a terminal, no tensors.
"""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable
from contextlib import closing
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, TextIO

from duckllm.cli.common import (
    EMPTY_REPLY,
    ChatConversation,
    ChatModel,
    describe_ending,
    describe_facts,
    describe_stats,
    describe_workers,
    tell,
)
from duckllm.cli.terminal import ReplyWriter, keys_unseen, wrapped
from duckllm.config import count_of
from duckllm.errors import ClusterError, PromptTooLongError, RequestError, WorkerLostError

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

    from duckllm.outputs import RequestMetrics, StreamOutput
    from duckllm.sampling_params import SamplingParams

HELP = """\
/reset   begin a new conversation{}
/stats   tokens and times of this conversation
/help    this list
/quit    leaves, as /exit and Ctrl-D do
Enter sends, Alt-Enter begins a new line, several pasted lines are one message.
Ctrl-C stops a reply and keeps what was said."""
_COMMAND = re.compile(r"/[a-z]*")
_LEAVE = ("/quit", "/exit")
_COMMANDS = ("/reset", "/stats", "/help", *_LEAVE)
_TOO_LONG_HINT = "The conversation fills the context; /reset begins a new one."


class Repl:
    """A conversation with ``model`` on this terminal.

    Args:
        model: Answers.
        params: Sampling of every reply.
        conversation: Goes on with this one; a new one by default.
        out: Where to show it.
        read: Gives the next message; raises EOFError at the end, KeyboardInterrupt for Ctrl-C. The
            terminal's line editor by default.
        title: Said of the model at the start.
        session: Name of the session that keeps the conversation; empty for none.
        after_turn: Called whenever the conversation has changed.
    """

    def __init__(
        self,
        model: ChatModel,
        params: SamplingParams,
        conversation: ChatConversation | None = None,
        out: TextIO | None = None,
        read: Callable[[], str] | None = None,
        title: str = "",
        session: str = "",
        after_turn: Callable[[], object] = lambda: None,
    ) -> None:
        self._model, self._params = model, params
        self._conversation = conversation or model.conversation()
        self._after_turn = after_turn
        self._out = out or sys.stdout
        self._read = read or _line_editor()
        self._title, self._session = title, session
        self._forget_counts()

    def run(self) -> int:
        """Talks until the user leaves, or until no reply can come any more.

        Returns:
            The exit code: 0, or that of an error of the cluster, after one sentence on stderr.
        """
        with keys_unseen():
            if self._title:
                self._say(self._title)
            self._say(f"{describe_workers(self._model.cluster_info())}. /help lists commands, Ctrl-D leaves.")
            while True:
                try:
                    text = self._read().strip()
                except KeyboardInterrupt:
                    continue  # the line is gone, as in a shell
                except EOFError:
                    return 0
                if text in _LEAVE:
                    return 0
                try:
                    self._answer(text)
                except ClusterError as error:
                    tell(f"the conversation is over, because {error}")
                    return error.exit_code

    def _answer(self, text: str) -> None:
        if _COMMAND.fullmatch(text):
            self._run_command(text)
        elif (word := text.partition(" ")[0]) in _COMMANDS and "\n" not in text:
            self._say(f"{word} takes nothing behind it.")
        elif text:
            self._reply_to(text)

    def _run_command(self, command: str) -> None:
        if command == "/help":
            self._say(
                HELP.format(f"; what session {self._session} held is forgotten" if self._session else "")
            )
        elif command == "/reset":
            self._conversation.reset()
            self._forget_counts()
            self._after_turn()
            lost = f"; what session {self._session} held is forgotten" if self._session else ""
            self._say(f"A new conversation{lost}.")
        elif command == "/stats":
            self._say(self._stats())
        else:
            self._say(f"{command} is no command; /help lists them.")

    def _forget_counts(self) -> None:
        self._num_prompt_tokens = self._num_generated_tokens = self._num_replies = 0
        self._last_metrics: RequestMetrics | None = None

    def _reply_to(self, text: str) -> None:
        """Shows the reply to ``text``; the conversation keeps both unless there was nothing of a reply."""
        problem = ""
        is_empty = False
        last: StreamOutput | None = None
        try:
            with (
                _Interrupt() as interrupt,
                ReplyWriter(self._out) as writer,
                closing(self._conversation.stream(text, self._params)) as outputs,
            ):
                for last in outputs:
                    writer.write(last.text)
                    self._last_metrics = last.metrics
                    if interrupt.wanted and last.finish_reason is None:
                        break
                is_empty = writer.is_empty
        except PromptTooLongError as error:
            problem = f"[{error}. {_TOO_LONG_HINT}]"
        except (RequestError, WorkerLostError) as error:  # the next message asks the workers again
            problem = f"[{error}]"
        except KeyboardInterrupt:
            if last is None:
                problem = "[stopped]"
        finally:
            if last is not None:
                self._after_turn()
        if last is not None:
            self._count()
        if problem:
            self._say(problem)
        elif last is not None:
            ending = describe_ending(last, self._params)
            if is_empty:
                self._say(EMPTY_REPLY)
            if is_empty or ending:
                self._say(describe_facts(self._model.cluster_info(), last.metrics, ending))

    def _count(self) -> None:
        if self._last_metrics is not None:
            self._num_replies += 1
            self._num_prompt_tokens = self._last_metrics.num_prompt_tokens
            self._num_generated_tokens += self._last_metrics.num_generated_tokens

    def _stats(self) -> str:
        if self._last_metrics is None:
            return "No reply yet."
        return (
            f"This conversation: {count_of(self._num_replies, 'reply')}, "
            f"{count_of(self._num_generated_tokens, 'token')} generated, "
            f"{count_of(self._num_prompt_tokens, 'token')} in the last prompt.\n"
            f"Last reply: {describe_facts(self._model.cluster_info(), self._last_metrics)}\n"
            f"{describe_stats(self._model.stats())}"
        ).rstrip()

    def _say(self, text: str) -> None:
        self._out.write(wrapped(text, self._out) + "\n")
        self._out.flush()


class _Interrupt:
    """While a reply comes, the first Ctrl-C asks for its end between two tokens; a second one breaks in."""

    def __init__(self) -> None:
        self.wanted = False

    def __enter__(self) -> _Interrupt:
        self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.wanted:
            raise KeyboardInterrupt
        self.wanted = True


def _line_editor() -> Callable[[], str]:
    """Reads a message with editing and history; pasted lines and Alt-Enter make more than one line."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.keys import Keys

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add(Keys.Vt100MouseEvent, eager=True)
    def _(event: KeyPressEvent) -> None:
        """Drops what looks like a mouse's report, such as the colour ESC [31m: it was pasted, no mouse is on.

        prompt_toolkit's own binding takes it apart as such a report and fails.
        """

    session: PromptSession[str] = PromptSession(history=InMemoryHistory(), key_bindings=keys)
    return lambda: session.prompt("> ")
