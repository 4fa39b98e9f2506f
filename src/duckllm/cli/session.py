"""Named conversations of ``duckllm chat --session``: what was said, its tokens and pages of the KV cache.

Called by cli/chat.py. Each is a folder of its own, for its user alone to read, that one chat at a time uses.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from duckllm.cli.common import tell
from duckllm.errors import CacheFormatError, ConfigError, InWords
from duckllm.weights.files import FolderLock

if TYPE_CHECKING:
    from duckllm import LLM
    from duckllm.conversation import Conversation

SESSION_VARIABLE = "DUCKLLM_SESSION_DIR"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
_FILE = "conversation.json"
_PAGES = "kv-cache"


def sessions_folder() -> Path:
    """Where sessions are kept: ``$DUCKLLM_SESSION_DIR``, or ``~/.local/share/duckllm/sessions``.

    Raises:
        ConfigError: Nothing names a folder, and this user has no home.
    """
    named = os.environ.get(SESSION_VARIABLE)
    if named:
        return Path(named)
    base = os.environ.get("XDG_DATA_HOME")
    try:
        return (Path(base) if base else Path.home() / ".local" / "share") / "duckllm" / "sessions"
    except RuntimeError as error:
        raise ConfigError(SESSION_VARIABLE, None, "a folder, as this user has no home") from error


class Session:
    """A session's folder, made where there is none, and held while the ``with`` block runs.

    Args:
        name: The session's.

    Raises:
        ConfigError: The name is none, the folder cannot be used, or another chat holds it.
    """

    def __init__(self, name: str) -> None:
        if not _NAME.fullmatch(name):
            expected = "up to 64 letters, digits, dots, dashes and underscores, not begun by a dot or dash"
            raise ConfigError("session", name, expected)
        self.name, self.folder = name, sessions_folder() / name
        self._lock = FolderLock(self.folder, self._refuse)
        self._has_warned = False

    def pages_folder(self, draft: str) -> Path:
        """Where its pages of the KV cache lie: those with guesses hold a layer more."""
        return self.folder / (f"{_PAGES}-plain" if draft == "off" else _PAGES)

    def __enter__(self) -> Session:
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock.__enter__()
        except OSError as error:
            expected = f"a folder that can be used, below ${SESSION_VARIABLE}"
            raise ConfigError("session", str(self.folder), expected, error.strerror or "") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.__exit__(kind, error, trace)

    def _refuse(self) -> None:
        raise ConfigError("session", self.name, "one that no other chat has open")

    @property
    def is_kept(self) -> bool:
        """Whether there is something of it to go on with."""
        return (self.folder / _FILE).exists()

    def check(self, model_hash: str, system: str | None) -> None:
        """Finds out before anything is loaded whether the conversation so far can go on.

        Args:
            model_hash: Of the model that is to go on with it.
            system: A system message that was asked for.

        Raises:
            CacheFormatError: It is another model's, or cannot be read.
            ConfigError: It has another system message.
        """
        from duckllm.conversation import read_conversation, system_of

        facts = read_conversation(self.folder / _FILE)
        if facts.get("model_hash") != model_hash:
            raise CacheFormatError(
                f"session {self.name} is another model's (folder {self.folder}); "
                "another name begins a new one"
            )
        begun = system_of(facts["messages"])
        if system is not None and system != begun:
            kept = InWords("none") if begun is None else begun
            raise ConfigError("system", system, f"{kept!r}, with which session {self.name} has begun")

    def open(self, llm: LLM, system: str | None) -> Conversation:
        """The conversation so far, which :meth:`check` has found good, or a new one.

        Raises:
            CacheFormatError: It cannot be read.
        """
        from duckllm.conversation import Conversation

        return Conversation.load(self.folder / _FILE, llm) if self.is_kept else llm.conversation(system)

    def save(self, conversation: Conversation) -> None:
        """Keeps the conversation as it is now. Where it cannot be written stderr says so, once."""
        try:
            conversation.save(self.folder / _FILE)
        except ConfigError as error:
            if not self._has_warned:
                tell(f"{self.folder / _FILE}: cannot be written ({error.hint})")
            self._has_warned = True
