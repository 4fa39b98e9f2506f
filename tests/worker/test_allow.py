"""Who may connect to a worker: any address, or those that it was given and its own machine's."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from duckllm._native import ErrorCode
from duckllm.cluster.address import Address
from duckllm.errors import ConfigError
from duckllm.worker.__main__ import make_parser
from duckllm.worker.config import WorkerConfig
from duckllm.worker.server import WorkerServer
from worker_harness import raw_socket, read_error


def test_addresses_that_are_let_in() -> None:
    config = WorkerConfig(allow=("10.0.0.10", "fd00::1"))
    for peer, expected in (
        ("10.0.0.10", True),
        ("::ffff:10.0.0.10", True),
        ("fd00::1%eth0", True),
        ("127.0.0.1", True),
        ("::1", True),
        ("10.0.0.11", False),
        ("::ffff:10.0.0.11", False),
        ("fd00::2", False),
    ):
        assert config.lets_in(peer) is expected, peer
    assert WorkerConfig().lets_in("10.0.0.11")


def test_what_is_no_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="allow: got 'duck', expected an address"):
        WorkerConfig(allow=("duck",))
    assert make_parser().parse_args(["--allow", "10.0.0.1", "--allow", "10.0.0.2"]).allow == [
        "10.0.0.1",
        "10.0.0.2",
    ]


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "[::1]:0", "localhost:0"])
def test_on_loopback_it_would_change_nothing(listen: str) -> None:
    """Nobody but this machine connects there, which is let in anyway."""
    with pytest.raises(ConfigError, match=r"^allow: got '10\.0\.0\.1, ::1', expected nothing on loopback"):
        WorkerServer(WorkerConfig(listen=listen, allow=("10.0.0.1", "::1")), print)


def test_others_hear_why_and_the_log_names_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(WorkerConfig, "lets_in", lambda self, peer: peer != "127.0.0.1")
    lines: list[str] = []
    server = WorkerServer(WorkerConfig(listen="127.0.0.1:0", speed=0.0), lines.append)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        with raw_socket(Address("127.0.0.1", server.address.port)) as connection:
            error = read_error(connection)
            assert error is not None
            assert error[0] == ErrorCode.AUTHENTICATION.value
            assert error[1] == "this worker takes no connections from that address"
    finally:
        server.stop()
        thread.join()
    assert len(lines) == 1
    assert "refused: this worker takes no connections" in lines[0]
