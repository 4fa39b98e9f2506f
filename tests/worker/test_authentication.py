"""Who may speak to whom, and in which protocol version."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from duckllm import _native
from duckllm._native import ErrorCode, FrameType
from duckllm.cluster import connect as connect_module
from duckllm.cluster.address import Address
from duckllm.cluster.auth import prove
from duckllm.cluster.connect import Connection
from duckllm.cluster.token import MAX_TOKEN_BYTES, read_token
from duckllm.errors import (
    AuthenticationError,
    ConfigError,
    ProtocolError,
    ProtocolVersionError,
    WorkerUnavailableError,
)
from duckllm.weights.manifest import Manifest
from worker_harness import (
    WorkerProcess,
    check_serves,
    connect,
    fake_worker,
    frame,
    plan_for,
    raw_socket,
    read_error,
    read_frame,
    running_worker,
)

NONCE = bytes(range(32))


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """A worker whose token is "quack"."""
    with running_worker(tmp_path_factory.mktemp("guarded"), token="quack") as process:
        yield process


def test_the_same_token(guarded: WorkerProcess, model: Manifest) -> None:
    check_serves(guarded, model, token="quack")


@pytest.mark.parametrize("token", ["quac", "quack ", "Quack", "x" * 500])
def test_another_token(guarded: WorkerProcess, model: Manifest, token: str) -> None:
    with pytest.raises(AuthenticationError, match="the host has another one than this worker"):
        connect(guarded.address, plan_for(model)[0], token=token)


def test_only_the_worker_has_a_token(guarded: WorkerProcess, model: Manifest) -> None:
    with pytest.raises(AuthenticationError, match="this worker has one and the host has none"):
        connect(guarded.address, plan_for(model)[0])


def test_only_the_host_has_a_token(worker: WorkerProcess, model: Manifest) -> None:
    with pytest.raises(AuthenticationError, match="the host has one and this worker has none"):
        connect(worker.address, plan_for(model)[0], token="quack")


def test_beyond_loopback_a_host_without_token_sends_nothing(
    worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connect_module, "is_loopback", lambda _: False)
    with pytest.raises(AuthenticationError, match=r"got none, expected one, as worker .* is beyond"):
        Connection(worker.address, None, 5.0)


def test_a_proof_cannot_be_reflected_or_replayed(guarded: WorkerProcess) -> None:
    opening = frame(FrameType.AUTH_OPEN, _native.encode_auth_payload(True, NONCE))
    nonces = set()
    for _ in range(3):
        with raw_socket(guarded.address) as raw:
            raw.sendall(opening)
            got = read_frame(raw)
            assert got is not None
            assert got[0] == FrameType.AUTH_CHALLENGE
            has_token, nonce = _native.decode_auth_payload(got[1])
            assert has_token
            nonces.add(nonce)
            raw.sendall(frame(FrameType.AUTH_PROOF, prove("worker", "quack", NONCE, nonce)))
            error = read_error(raw)
            assert error is not None
            assert error[0] == ErrorCode.AUTHENTICATION.value
    assert len(nonces) == 3
    assert NONCE not in nonces


def test_proofs_depend_on_everything() -> None:
    proofs = {
        prove(role, token, first, second)
        for role in ("host", "worker")
        for token in ("a", "b")
        for first, second in ((NONCE, bytes(32)), (bytes(32), NONCE))
    }
    assert len(proofs) == 8
    assert all(len(proof) == 32 for proof in proofs)


def test_nothing_is_parsed_before_authentication(guarded: WorkerProcess) -> None:
    for kind, payload in (
        (FrameType.HELLO, b"{}"),
        (FrameType.PREPARE, b"{}"),
        (FrameType.STEP_REQUEST, bytes(16)),
    ):
        with raw_socket(guarded.address) as raw:
            raw.sendall(frame(kind, payload))
            error = read_error(raw)
        assert error == (
            ErrorCode.PROTOCOL.value,
            f"frame type from the host: got {kind.name}, expected AUTH_OPEN",
        )


def test_an_impostor_without_the_token_is_found_out() -> None:
    challenge = frame(FrameType.AUTH_CHALLENGE, _native.encode_auth_payload(True, NONCE))
    with (
        fake_worker(challenge, frame(FrameType.AUTH_PROOF, bytes(32))) as address,
        pytest.raises(AuthenticationError, match=f"worker {address} has another one than this host"),
    ):
        Connection(address, "quack", 5.0)


def test_an_impostor_that_claims_to_need_no_token_is_found_out() -> None:
    challenge = frame(FrameType.AUTH_CHALLENGE, _native.encode_auth_payload(False, NONCE))
    with (
        fake_worker(challenge) as address,
        pytest.raises(AuthenticationError, match=r"this host has one and worker .* has none"),
    ):
        Connection(address, "quack", 5.0)


def test_a_worker_of_another_version_is_named_with_both() -> None:
    answer = bytearray(frame(FrameType.ERROR, bytes(4)))
    answer[4:6] = (9).to_bytes(2, "little")
    with fake_worker(bytes(answer)) as address, pytest.raises(ProtocolVersionError) as caught:
        Connection(address, None, 5.0)
    assert str(caught.value) == f"protocol version: worker {address} speaks 9, this host speaks 4"


def test_a_host_of_another_version_is_answered_with_both(worker: WorkerProcess) -> None:
    opening = bytearray(frame(FrameType.AUTH_OPEN, _native.encode_auth_payload(False, NONCE)))
    opening[4:6] = (9).to_bytes(2, "little")
    with raw_socket(worker.address) as raw:
        raw.sendall(opening)
        error = read_error(raw)
    assert error == (ErrorCode.VERSION.value, "protocol version: the host speaks 9, this worker speaks 4")


def test_a_version_error_from_a_worker_is_typed() -> None:
    answer = _native.encode_error_frame(ErrorCode.VERSION, "protocol version: the host speaks 1, ...")
    with (
        fake_worker(answer) as address,
        pytest.raises(ProtocolVersionError, match=f"worker {address}: proto"),
    ):
        Connection(address, None, 5.0)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", frame(FrameType.READY, b"{}")])
def test_what_is_no_worker(answer: bytes) -> None:
    with fake_worker(answer) as address, pytest.raises(ProtocolError, match=str(address)):
        Connection(address, None, 5.0)


def test_a_worker_that_never_answers() -> None:
    with (
        fake_worker() as address,
        pytest.raises(WorkerUnavailableError, match=r"did not answer within 0\.2 s"),
    ):
        Connection(address, None, 0.2)


def test_no_worker_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = Address(*server.getsockname())
    with pytest.raises(
        WorkerUnavailableError, match=f"worker {address} is not available: Connection refused"
    ):
        Connection(address, None, 5.0)
    with pytest.raises(WorkerUnavailableError, match=r"worker duck\.invalid:5 is not available: "):
        Connection(Address("duck.invalid", 5), None, 5.0)


def test_where_the_token_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("DUCKLLM_CLUSTER_TOKEN", raising=False)
    assert read_token() is None
    monkeypatch.setenv("DUCKLLM_CLUSTER_TOKEN", "from-the-environment")
    assert read_token() == "from-the-environment"
    monkeypatch.setenv("DUCKLLM_CLUSTER_TOKEN", "secret\udcff")
    with pytest.raises(ConfigError, match=r"DUCKLLM_CLUSTER_TOKEN: got bytes that are not UTF-8, expected "):
        read_token()
    file = tmp_path / "token"
    file.write_text("from-the-file\n")
    file.chmod(0o600)
    assert read_token(file) == "from-the-file"
    assert capsys.readouterr().err == ""
    for mode in (0o640, 0o604):
        file.chmod(mode)
        assert read_token(file) == "from-the-file"
        assert capsys.readouterr().err == (
            f"duckllm: warning: token_file: others can read {file}, expected only its owner (chmod 600)\n"
        )
    file.chmod(0o600)
    file.write_text("\n")
    with pytest.raises(ConfigError, match=r"token_file: got .* \(this one is empty\)"):
        read_token(file)
    with pytest.raises(ConfigError, match=r"token_file: got .* \(No such file or directory\)"):
        read_token(tmp_path / "missing")
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"\(not UTF-8\)"):
        read_token(file)


def test_a_token_file_is_read_no_further_than_a_token_goes(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_text("x" * MAX_TOKEN_BYTES)
    assert read_token(file) == "x" * MAX_TOKEN_BYTES
    for endless in (file, Path("/dev/zero")):
        file.write_text("x" * MAX_TOKEN_BYTES + "\n")
        with pytest.raises(ConfigError) as caught:
            read_token(endless)
        assert str(caught.value) == f"token_file: got '{endless}', expected a file of at most 4096 bytes"
