"""Mutual authentication: each side proves that it holds the cluster token without sending it.

Called first on every connection by both sides, before anything of variable length is parsed:

    host   -> AUTH_OPEN       has_token, nonce_h
    worker -> AUTH_CHALLENGE  has_token, nonce_w
    host   -> AUTH_PROOF      HMAC-SHA256(token, "duck-llm host" | nonce_h | nonce_w)
    worker -> AUTH_PROOF      HMAC-SHA256(token, "duck-llm worker" | nonce_h | nonce_w)

Without a token on either side the two proofs are left out. It authenticates the ends of a connection; it
encrypts nothing, and belongs on a network that nobody else can write to.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from duckllm import _native
from duckllm._native import FrameType
from duckllm.cluster.frames import ControlChannel
from duckllm.errors import AuthenticationError, ProtocolError


def prove(role: str, token: str, nonce_host: bytes, nonce_worker: bytes) -> bytes:
    """The proof of ``role`` ("host" or "worker"), 32 bytes."""
    message = f"duck-llm {role}".encode() + nonce_host + nonce_worker
    return hmac.new(token.encode(), message, hashlib.sha256).digest()


def authenticate_host(channel: ControlChannel, token: str | None, *, deadline: float) -> None:
    """The host's side.

    Raises:
        AuthenticationError: One side has a token and the other none, or the tokens differ.
    """
    nonce_host = secrets.token_bytes(_native.NONCE_BYTES)
    opening = _native.encode_auth_payload(token is not None, nonce_host)
    channel.send(FrameType.AUTH_OPEN, opening, deadline=deadline)
    challenge = channel.receive(FrameType.AUTH_CHALLENGE, deadline=deadline)
    worker_has_token, nonce_worker = _decode(channel, challenge)
    _check_both_or_neither(token is not None, worker_has_token, "this host", channel.peer)
    if token is None:
        return
    channel.send(FrameType.AUTH_PROOF, prove("host", token, nonce_host, nonce_worker), deadline=deadline)
    proof = channel.receive(FrameType.AUTH_PROOF, deadline=deadline)
    if not hmac.compare_digest(proof, prove("worker", token, nonce_host, nonce_worker)):
        raise AuthenticationError(f"cluster_token: {channel.peer} has another one than this host")


def authenticate_worker(channel: ControlChannel, token: str | None, *, deadline: float) -> None:
    """The worker's side; it proves nothing before the host has.

    Raises:
        AuthenticationError: One side has a token and the other none, or the tokens differ.
    """
    opening = channel.receive(FrameType.AUTH_OPEN, deadline=deadline)
    host_has_token, nonce_host = _decode(channel, opening)
    _check_both_or_neither(host_has_token, token is not None, "the host", "this worker")
    nonce_worker = secrets.token_bytes(_native.NONCE_BYTES)
    challenge = _native.encode_auth_payload(token is not None, nonce_worker)
    channel.send(FrameType.AUTH_CHALLENGE, challenge, deadline=deadline)
    if token is None:
        return
    proof = channel.receive(FrameType.AUTH_PROOF, deadline=deadline)
    if not hmac.compare_digest(proof, prove("host", token, nonce_host, nonce_worker)):
        raise AuthenticationError("cluster_token: the host has another one than this worker")
    channel.send(FrameType.AUTH_PROOF, prove("worker", token, nonce_host, nonce_worker), deadline=deadline)


def _decode(channel: ControlChannel, payload: bytes) -> tuple[bool, bytes]:
    try:
        return _native.decode_auth_payload(payload)
    except _native.WireError as error:
        raise ProtocolError(f"malformed frame from {channel.peer}: {error.args[1]}") from None


def _check_both_or_neither(host_has_token: bool, worker_has_token: bool, host: str, worker: str) -> None:
    if host_has_token and not worker_has_token:
        raise AuthenticationError(f"cluster_token: {host} has one and {worker} has none")
    if worker_has_token and not host_has_token:
        raise AuthenticationError(f"cluster_token: {worker} has one and {host} has none")
