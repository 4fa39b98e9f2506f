"""Frames over a socket in the control phase: one at a time, each with a deadline, sizes checked before use.

Called by both ends (:mod:`duckllm.cluster.connect` and :mod:`duckllm.worker.session`); the bytes themselves
are made and read by csrc/wire alone. Knows nothing of plans, tokens or models.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from typing import Any

from duckllm import _native
from duckllm._native import ErrorCode, FrameType
from duckllm.errors import (
    AuthenticationError,
    CheckpointError,
    ClusterError,
    ConfigError,
    DiskSpaceError,
    DuckError,
    ModelNotFoundError,
    ProtocolError,
    ProtocolVersionError,
    WeightFormatError,
    WeightHashError,
    WorkerUnavailableError,
)

_CHUNK_BYTES = 1 << 16
_MAX_TEXT_CHARACTERS = 4000

# What travels as a code, and which error it is on the host. The first class that fits gives the code.
_CODE_OF_ERROR: tuple[tuple[type[DuckError], ErrorCode], ...] = (
    (ModelNotFoundError, ErrorCode.MODEL_NOT_FOUND),
    (CheckpointError, ErrorCode.CHECKPOINT),
    (WeightFormatError, ErrorCode.WEIGHT_FORMAT),
    (WeightHashError, ErrorCode.WEIGHT_HASH),
    (DiskSpaceError, ErrorCode.DISK_SPACE),
    (ConfigError, ErrorCode.PLAN),
    (ProtocolVersionError, ErrorCode.VERSION),
    (ProtocolError, ErrorCode.PROTOCOL),
    (AuthenticationError, ErrorCode.AUTHENTICATION),
    (WorkerUnavailableError, ErrorCode.BUSY),
)
_ERROR_OF_CODE: dict[int, type[DuckError]] = {
    code.value: kind for kind, code in _CODE_OF_ERROR if kind is not ConfigError
} | {
    ErrorCode.PLAN.value: ProtocolError,
    ErrorCode.TIMEOUT.value: WorkerUnavailableError,
}


class PeerClosedError(ConnectionError):
    """The other end closed the connection between or inside frames."""


def error_code(error: Exception) -> ErrorCode:
    """The code that tells the host what kind of error this is."""
    if isinstance(error, TimeoutError):
        return ErrorCode.TIMEOUT
    return next((code for kind, code in _CODE_OF_ERROR if isinstance(error, kind)), ErrorCode.INTERNAL)


def safe_text(text: str) -> str:
    """A message as one line of valid, printable text of bounded length, whatever a peer put into it."""
    if len(text) > _MAX_TEXT_CHARACTERS:
        text = text[: _MAX_TEXT_CHARACTERS - 3] + "..."
    text = text.encode("utf-8", "replace").decode("utf-8")
    return "".join(character if character.isprintable() else "?" for character in text)


class ControlChannel:
    """One end of a connection in its control phase.

    Args:
        connection: A connected socket; the channel does not close it.
        us: What this end is called in messages, ``"this host"`` or ``"this worker"``.
        peer: What the other end is called, ``"worker 127.0.0.1:7000"`` or ``"the host"``.
        hears_errors: Whether the other end may send ERROR frames; a worker may, a host may not.
    """

    def __init__(self, connection: socket.socket, *, us: str, peer: str, hears_errors: bool) -> None:
        self.connection, self.us, self.peer = connection, us, peer
        self._hears_errors = hears_errors

    def send(self, kind: FrameType, payload: bytes = b"", *, deadline: float) -> None:
        """Sends one frame before ``deadline`` (time.monotonic() seconds)."""
        self._set_timeout(deadline, f"taking {kind.name}")
        self.connection.sendall(_native.encode_frame_header(kind, len(payload)) + payload)

    def send_json(self, kind: FrameType, value: dict[str, Any], *, deadline: float) -> None:
        """Sends one frame whose payload is a JSON object.

        Raises:
            ProtocolError: The object is larger than frames of this kind may be.
        """
        payload = json.dumps(value, separators=(",", ":")).encode()
        most = _native.payload_limits(kind)[1]
        if len(payload) > most:
            raise ProtocolError(f"{kind.name} payload bytes: got {len(payload)}, expected at most {most}")
        self.send(kind, payload, deadline=deadline)

    def send_error(self, code: ErrorCode, text: str, *, timeout_s: float = 1.0) -> None:
        """Says why this end is about to close; best effort, whatever the text holds."""
        with contextlib.suppress(Exception):
            self.connection.settimeout(timeout_s)
            self.connection.sendall(_native.encode_error_frame(code, safe_text(text)))

    def receive(self, expected: FrameType, *, deadline: float) -> bytes:
        """The payload of the next frame, which must be of the ``expected`` kind.

        Nothing of a payload is read, and no memory set aside for it, before its header is found good.

        Raises:
            ProtocolVersionError: The other end speaks another protocol version.
            ProtocolError: A frame that does not follow the format, or is not the expected one.
            DuckError: The typed error that the other end reports.
            PeerClosedError: It closed the connection.
            TimeoutError: ``deadline`` passed.
        """
        return self.receive_one_of((expected,), deadline=deadline)[1]

    def receive_one_of(self, expected: tuple[FrameType, ...], *, deadline: float) -> tuple[FrameType, bytes]:
        """The next frame, which must be of one of these kinds; raises as :meth:`receive` does."""
        header = self._receive_bytes(_native.FRAME_HEADER_BYTES, deadline, expected[0].name)
        kind, payload_bytes = self._check_header(header, expected)
        payload = self._receive_bytes(payload_bytes, deadline, kind.name)
        if kind not in expected:
            raise self._reported_error(payload)
        return kind, payload

    def receive_into(self, expected: FrameType, buffer: memoryview, *, deadline: float) -> memoryview:
        """As :meth:`receive`, into a buffer that has room for the largest payload of the kind.

        Payloads that follow each other then take no memory each.
        """
        header = self._receive_bytes(_native.FRAME_HEADER_BYTES, deadline, expected.name)
        kind, payload_bytes = self._check_header(header, (expected,))
        if kind != expected:
            raise self._reported_error(self._receive_bytes(payload_bytes, deadline, kind.name))
        payload = buffer[:payload_bytes]
        received = 0
        while received < payload_bytes:
            self._set_timeout(deadline, expected.name)
            count = self.connection.recv_into(payload[received:])
            if count == 0:
                raise self.closed(expected.name)
            received += count
        return payload

    def take_frame(
        self, received: bytearray, expected: tuple[FrameType, ...]
    ) -> tuple[FrameType, bytes] | None:
        """Takes the first frame out of bytes that were received; None while it is not whole.

        Raises:
            ProtocolVersionError: As :meth:`receive` does.
            ProtocolError: As :meth:`receive` does, by the header alone.
            DuckError: The typed error that the other end reports.
        """
        head = _native.FRAME_HEADER_BYTES
        if len(received) < head:
            return None
        kind, payload_bytes = self._check_header(bytes(received[:head]), expected)
        if len(received) < head + payload_bytes:
            return None
        payload = bytes(received[head : head + payload_bytes])
        del received[: head + payload_bytes]
        if kind not in expected:
            raise self._reported_error(payload)
        return kind, payload

    def receive_json(self, expected: FrameType, *, deadline: float) -> dict[str, Any]:
        """The next frame's JSON object; raises as :meth:`receive` does."""
        return self.parse_json(expected, self.receive(expected, deadline=deadline))

    def parse_json(self, kind: FrameType, payload: bytes) -> dict[str, Any]:
        """The JSON object that a frame's payload holds.

        Raises:
            ProtocolError: It holds something else.
        """
        try:
            value = json.loads(payload)
        except (ValueError, RecursionError) as error:
            raise ProtocolError(
                f"{kind.name} from {self.peer}: got no valid JSON, expected an object"
            ) from error
        if not isinstance(value, dict):
            raise ProtocolError(
                f"{kind.name} from {self.peer}: got a JSON {type(value).__name__}, expected an object"
            )
        return value

    def raise_reported_error(self, *, deadline: float) -> None:
        """Raises what the other end said before it closed; returns where it said nothing."""
        with contextlib.suppress(OSError):
            self.receive(FrameType.ERROR, deadline=deadline)

    def _check_header(self, header: bytes, expected: tuple[FrameType, ...]) -> tuple[FrameType, int]:
        """Type and payload length of a frame that is one of these, or an error that this end hears."""
        try:
            kind, payload_bytes, _ = _native.decode_frame_header(header)
        except _native.WireError as error:
            raise self._wire_error(error, header) from None
        if kind not in expected and not (kind == FrameType.ERROR and self._hears_errors):
            names = " or ".join(each.name for each in expected)
            raise ProtocolError(f"frame type from {self.peer}: got {kind.name}, expected {names}")
        return kind, payload_bytes

    def closed(self, what: str) -> PeerClosedError:
        """The error of a connection that ended before ``what`` was complete."""
        return PeerClosedError(f"{self.peer} closed the connection before {what} was complete")

    def _receive_bytes(self, count: int, deadline: float, what: str) -> bytes:
        received = bytearray()
        while len(received) < count:
            self._set_timeout(deadline, what)
            chunk = self.connection.recv(min(count - len(received), _CHUNK_BYTES))
            if not chunk:
                raise self.closed(what)
            received += chunk
        return bytes(received)

    def _set_timeout(self, deadline: float, what: str) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"{self.peer}: {what} did not come in time")
        self.connection.settimeout(left)

    def _wire_error(self, error: _native.WireError, header: bytes) -> ClusterError:
        code, message = error.args
        if code == ErrorCode.VERSION:
            theirs = int.from_bytes(header[4:6], "little")
            return ProtocolVersionError(
                f"protocol version: {self.peer} speaks {theirs}, {self.us} speaks {_native.PROTOCOL_VERSION}"
            )
        return ProtocolError(f"malformed frame from {self.peer}: {message}")

    def _reported_error(self, payload: bytes) -> DuckError:
        code, text = _native.decode_error_payload(payload)
        sentence = safe_text(text.decode("utf-8", errors="replace"))
        return _ERROR_OF_CODE.get(code, ClusterError)(f"{self.peer}: {sentence}")
