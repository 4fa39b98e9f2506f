"""The exceptions of duck-llm, all of one tree.

    DuckError
    ├── ConfigError               a value the user gave is missing, of the wrong kind or out of range
    │   └── PlacementError            the nodes have too little memory; shows the plan's table
    ├── ModelError                a model folder cannot be used
    │   ├── ModelNotFoundError        no such folder, or nothing of a model in it
    │   ├── UnsupportedModelError     an architecture or feature that is not implemented
    │   ├── CheckpointError           a file is truncated, malformed, or a tensor is missing or wrong
    │   ├── WeightFormatError         a weight that the format cannot hold, or an unknown format version
    │   └── WeightHashError           a file's content is not what its manifest says
    ├── MissingPackageError       a package that an option needs is not installed
    ├── CacheFormatError          kept pages or a kept conversation of another model or format
    ├── DiskSpaceError            not enough room for what is about to be written
    ├── RequestError              a request that cannot be honoured
    │   └── PromptTooLongError        more tokens than the context holds
    ├── ServerError               the server cannot serve a request now
    │   ├── UnavailableError          it is loading or stopping
    │   ├── OverloadedError           too many requests wait already
    │   ├── UnreadError               nobody reads what is sent
    │   └── EngineError               a step failed for a reason of our own
    └── ClusterError              the flock
        ├── WorkerUnavailableError    no worker answers at an address, or it would not start
        ├── ProtocolVersionError      a worker speaks another protocol version
        ├── ProtocolError             a message that does not follow docs/wire-format.md
        ├── AuthenticationError       the cluster token is missing or differs
        └── WorkerLostError           a worker went away, or did not answer in time, during work

Every message is one sentence that names the field, the value got and the value expected. The command line
prints it without a traceback and exits with ``exit_code``.
"""

from __future__ import annotations

import os
import re


class InWords(str):
    """What was got, in words: a message shows it without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


# Most characters of somebody else's message that ours quotes.
_QUOTED = 200

# Most characters of a value that a message shows: a usual path is shown whole.
_SHOWN = 240

# And most that is looked through for passwords, from its beginning and from its end.
_EXAMINED = 2048


def show_value(got: object) -> str:
    """A value on one line, its middle left out where it is long, and passwords in addresses."""
    if isinstance(got, InWords):
        return without_credentials(got, HIDDEN)
    try:
        text = repr(os.fspath(got) if isinstance(got, os.PathLike) else got).replace("\n", " ")
    except ValueError:  # Python writes no whole number of more than some thousand digits
        text = "a value of too many digits"
    except RecursionError:
        text = "a value that is nested too deeply"
    if len(text) > 2 * _EXAMINED:  # what is left out need not be looked through
        text = f"{text[:_EXAMINED]}...{text[-_EXAMINED:]}"
    text = without_credentials(text, HIDDEN)
    half = (_SHOWN - 3) // 2
    return text if len(text) <= _SHOWN else f"{text[:half]}...{text[-half:]}"


HIDDEN = "***"  # in place of a password

# In an address: a user's name and password, and what may be a key or a signature. As a path it has one slash.
# Each is bounded, so that a long text costs no more than its length.
_NAME_AND_PASSWORD = re.compile(
    r"(?<=:/)(/?)(?:(?<=//)[^\s/?#]{0,256}|[^\s/?#:@]{0,64}:(?!\d{1,5}[/?#])\S{0,256})@"
)
_QUERY = re.compile(r"(:/{1,2}[^\s?#]{0,512})[?#](?:[^\s)'\"]*[^\s)'\":,;.])?")
# The same without a scheme, name:password@host; a multicast group with an interface is none.
_BEFORE_A_HOST = re.compile(
    r"(?<![^\s'\"(,=])(?!(?:\d+\.){3}\d+:\d{1,5}@)"
    r"[^\s/@'\",:=]{1,64}:(?!/)(?:(?!//)[^\s'\",]){1,256}@(?=[\w\[])"
)
_PARAMETER = re.compile(
    r"([?&;][\w.-]{0,40}(?:key|token|secret|passw|pwd|sig|auth|credential)[\w.-]{0,40}=)[^\s&;'\"#)]+",
    re.IGNORECASE,
)


def without_credentials(text: str, mark: str = "") -> str:
    """The text without names, passwords and queries in its addresses, for what people pass on.

    Args:
        text: Any.
        mark: What stands in the place of each.
    """
    before = f"{mark}@" if mark else ""
    text = _NAME_AND_PASSWORD.sub(rf"\1{before}", text)
    text = _BEFORE_A_HOST.sub(before, text)
    text = _QUERY.sub(rf"\1?{mark}" if mark else r"\1", text)
    return _PARAMETER.sub(rf"\1{mark}", text)


class DuckError(Exception):
    """Base of every error that a user's input or surroundings can cause; no message has a password in it."""

    exit_code = 1

    def __init__(self, message: str = "") -> None:
        super().__init__(_printable(without_credentials(message, HIDDEN)))


class ConfigError(DuckError):
    """A value the user gave is missing, of the wrong kind or out of range."""

    exit_code = 2

    def __init__(self, field: str, got: object, expected: str, hint: str = "") -> None:
        self.field, self.got, self.expected, self.hint = field, got, expected, hint
        message = f"{field}: got {show_value(got)}, expected {expected}"
        super().__init__(f"{message} ({hint})" if hint else message)

    def named(self, field: str) -> ConfigError:
        """The same of a value that is called otherwise."""
        return ConfigError(field, self.got, self.expected, self.hint)


class PlacementError(ConfigError):
    """The nodes have too little memory for their shares of the experts.

    Args:
        table: Each node, what it would need and what it has, in lines.
    """

    def __init__(self, field: str, got: object, expected: str, hint: str = "", *, table: str) -> None:
        super().__init__(field, got, expected, hint)
        self.table = table


class ModelError(DuckError):
    """A model folder cannot be used."""


class ModelNotFoundError(ModelError):
    """No such folder, or nothing of a model in it."""


class UnsupportedModelError(ModelError):
    """An architecture or feature that is not implemented, refused by name."""


class CheckpointError(ModelError):
    """A file is truncated or malformed, or a tensor is missing or wrong."""


class WeightFormatError(ModelError):
    """A weight that the format cannot hold, or an unknown format version."""


class WeightHashError(ModelError):
    """A file's content is not what its manifest says."""


class MissingPackageError(DuckError):
    """A package that an option needs is not installed; an extra of this package installs it."""

    def __init__(self, package: str, field: str, extra: str) -> None:
        self.package, self.field, self.extra = package, field, extra
        super().__init__(
            f"{field}: {package} is not installed; "
            f"install this package with its extra: pip install 'duckllm[{extra}]'"
        )


class DiskSpaceError(DuckError):
    """Not enough room for what is about to be written."""


class CacheFormatError(DuckError):
    """Kept pages of the KV cache, or a kept conversation, are of another model or another format."""


class RequestError(DuckError):
    """A request that cannot be honoured."""


class PromptTooLongError(RequestError):
    """More tokens than the context holds.

    Args:
        got_tokens: Tokens of the prompt.
        limit_tokens: Most that there may be.
        is_least: Whether ``got_tokens`` is not all of them, as counting was given up.
        field: What the caller calls the prompt.
    """

    def __init__(
        self, got_tokens: int, limit_tokens: int, *, is_least: bool = False, field: str = "prompt"
    ) -> None:
        self.got_tokens, self.limit_tokens, self.is_least = got_tokens, limit_tokens, is_least
        self.field = field
        least = "at least " if is_least else ""
        super().__init__(f"{field}: got {least}{got_tokens} tokens, expected at most {limit_tokens}")

    def named(self, field: str) -> PromptTooLongError:
        """The same of a prompt that is called otherwise."""
        return PromptTooLongError(self.got_tokens, self.limit_tokens, is_least=self.is_least, field=field)


class ServerError(DuckError):
    """The server cannot serve a request now."""


class UnavailableError(ServerError):
    """The server is loading or stopping."""


class OverloadedError(ServerError):
    """Too many requests wait already."""

    def __init__(self, num_waiting: int, limit: int) -> None:
        self.num_waiting, self.limit = num_waiting, limit
        super().__init__(f"{num_waiting} replies are under way or wait, expected at most {limit}")


class UnreadError(ServerError):
    """Nobody reads what is sent."""

    def __init__(self) -> None:
        super().__init__("the reply was ended, as nobody read what had been sent of it")


class EngineError(ServerError):
    """A step failed for a reason of our own."""

    def __init__(self, kind: str) -> None:
        super().__init__(f"internal error: {kind} while the reply was computed (please report it)")


class ClusterError(DuckError):
    """Something about the flock of workers."""


class WorkerUnavailableError(ClusterError):
    """No worker answers at an address, or it would not start."""


class ProtocolVersionError(ClusterError):
    """A worker speaks another protocol version."""


class ProtocolError(ClusterError):
    """A message that does not follow docs/wire-format.md."""


class AuthenticationError(ClusterError):
    """The cluster token is missing or differs."""


class WorkerLostError(ClusterError):
    """A worker went away, or did not answer in time, during work.

    Args:
        address: Where the worker was.
        reason: What happened, in a few words.
        layer: The layer whose step was being sent or waited for, where there was one.
    """

    def __init__(self, address: str, reason: str, layer: int | None = None) -> None:
        self.address, self.reason, self.layer = address, reason, layer
        during = "" if layer is None else f" at layer {layer}"
        super().__init__(f"worker {address} is lost{during}: {reason}")


def _printable(text: str) -> str:
    """The text with half characters, as a name may have them, in digits: no stream takes them as they are."""
    return text.encode("utf-8", "backslashreplace").decode()


def _shortened(text: str) -> str:
    return text if len(text) <= _QUOTED else text[: _QUOTED - 3] + "..."


def describe_error(error: Exception) -> tuple[str, int]:
    """One sentence for an error that ends a program, ours or not, and the program's exit code."""
    if isinstance(error, DuckError):
        return str(error), error.exit_code
    kind, line = type(error).__name__, _shortened(str(error).strip().partition("\n")[0])
    if isinstance(error, OSError):
        name = "" if error.filename is None else f"{_shortened(os.fsdecode(error.filename))}: "
        return _printable(without_credentials(name + (error.strerror or line or kind), HIDDEN)), 1
    if isinstance(error, MemoryError):
        return "out of memory", 1
    what = f"{kind}: {_printable(line)}" if line else kind
    return f"internal error: {what} (set DUCKLLM_DEBUG=1 for the traceback, and please report it)", 70
