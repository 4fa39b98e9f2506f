"""The worker as a process: start, refusals at the start, imports, and every way to stop it."""

from __future__ import annotations

import errno
import inspect
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import duckllm.worker.__main__
from duckllm._native import ErrorCode
from duckllm.cli.worker import worker as worker_command
from duckllm.cluster.address import parse_address
from duckllm.errors import CheckpointError, ConfigError, ProtocolError
from duckllm.worker.__main__ import main, make_parser
from duckllm.worker.config import WorkerConfig
from duckllm.worker.server import MAX_CONNECTIONS, WorkerServer
from duckllm.worker.session import Sessions
from worker_harness import (
    WorkerProcess,
    check_serves,
    connect,
    make_model,
    plan_for,
    raw_socket,
    read_error,
    read_exactly,
    running_worker,
)


def run_worker_process(*flags: str, **variables: str) -> tuple[int, str]:
    """Exit status and standard error of a worker that should refuse to start."""
    environment = {key: value for key, value in os.environ.items() if key != "DUCKLLM_CLUSTER_TOKEN"}
    done = subprocess.run(
        [sys.executable, "-m", "duckllm.worker", "--exit-with-stdin", *flags],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=environment | variables,
        timeout=60,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0"])
def test_beyond_loopback_it_needs_a_token(listen: str) -> None:
    status, errors = run_worker_process("--listen", listen)
    assert status == 2
    assert errors.strip() == (
        f"error: cluster_token: got None, expected a token, as {listen} is beyond loopback "
        "(--token-file FILE or $DUCKLLM_CLUSTER_TOKEN)"
    )


@pytest.mark.parametrize(
    ("flags", "variables", "sentence"),
    [
        (["--listen", "nonsense"], {}, "error: listen: got 'nonsense', expected name:port"),
        (
            ["--listen", "duck.invalid:1"],
            {},
            "error: listen: got 'duck.invalid:1', expected an address of this machine",
        ),
        (["--threads", "-1"], {}, "error: threads: got -1, expected 0"),
        (["--spin-us", "-2"], {}, "error: spin_us: got -2"),
        (["--frame-timeout-s", "0"], {}, "error: frame_timeout_s: got 0.0"),
        (["--handshake-timeout-s", "nan"], {}, "error: handshake_timeout_s: got nan"),
        (["--token-file", "/no/such/file"], {}, "error: token_file: got '/no/such/file'"),
        (["--model", "/no/such/folder"], {}, "error: /no/such/folder: no such folder"),
        (["--listen", "127.0.0.1:0"], {"DUCK_FORCE_ISA": "mmx"}, "error: DUCK_FORCE_ISA: got 'mmx'"),
    ],
)
def test_a_refusal_is_one_sentence(flags: list[str], variables: dict[str, str], sentence: str) -> None:
    status, errors = run_worker_process(*flags, **variables)
    assert status in (1, 2)
    assert errors.startswith(sentence)
    assert errors.count("\n") == 1


def test_a_wrong_flag_is_one_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    for flags, sentence in (
        (["--threads", "many\x1b"], "error: argument --threads: invalid int value: 'many\\x1b'\n"),
        (["--no-such-flag\n"], "error: unrecognized arguments: --no-such-flag?\n"),
    ):
        with pytest.raises(SystemExit) as caught:
            main(flags)
        assert caught.value.code == 2
        assert capfd.readouterr().err == sentence


@pytest.mark.parametrize(
    ("error", "status", "sentence"),
    [
        (OSError(errno.EMFILE, "Too many open files"), 1, "error: Too many open files\n"),
        (PermissionError(errno.EACCES, "Permission denied", "/m"), 1, "error: /m: Permission denied\n"),
        (MemoryError(), 1, "error: out of memory\n"),
        (CheckpointError("duck.json: \x1b[2J\n"), 1, "error: duck.json: ?[2J?\n"),
        (
            RuntimeError("can't start new thread\nsecond line"),
            70,
            "error: internal error: RuntimeError: can't start new thread "
            "(set DUCKLLM_DEBUG=1 for the traceback, and please report it)\n",
        ),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_whatever_goes_wrong_is_one_sentence(
    error: BaseException,
    status: int,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(duckllm.worker.__main__, "run_worker", fail)
    assert main([]) == status
    assert capfd.readouterr().err == sentence
    monkeypatch.setenv("DUCKLLM_DEBUG", "1")
    assert main([]) == status
    assert ("Traceback" in capfd.readouterr().err) == (sentence != "")


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"token": "quack\udcff"}, "token: got text that UTF-8 cannot hold, expected valid text"),
        ({"token": b"quack"}, "token: got bytes, expected text, or None"),
        ({"listen": 7411}, "listen: got 7411, expected an address, name:port"),
        (
            {"announce": True},
            "cluster_token: got None, expected a token, by which an announced worker and its hosts know each "
            "other (--token-file FILE or $DUCKLLM_CLUSTER_TOKEN)",
        ),
        ({"announce": 1}, "announce: got 1, expected True or False"),
        ({"node_name": "a.b"}, "node_name: got 'a.b', expected letters, digits, - and _, at most 40"),
        ({"model": "/m"}, "model: got '/m', expected a path, or None"),
        ({"threads": 2.0}, "threads: got 2.0, expected 0 (every core) to 1024"),
        ({"threads": 1025}, "threads: got 1025, expected 0 (every core) to 1024"),
        ({"spin_us": True}, "spin_us: got True, expected -1 (decide by the cores) to 1000000"),
        ({"send_timeout_s": "1"}, "send_timeout_s: got '1', expected 0.001 to 1000000"),
    ],
)
def test_a_wrong_field_of_the_configuration(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        WorkerConfig(**fields)
    assert str(caught.value) == sentence


def test_a_connection_that_can_have_no_thread_is_refused_and_the_next_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    lines: list[str] = []
    server = WorkerServer(WorkerConfig(listen="127.0.0.1:0", threads=1), lines.append)
    serving = threading.Thread(target=server.serve)
    serving.start()
    try:
        with monkeypatch.context() as patch:
            patch.setattr("duckllm.worker.server.threading.Thread", Refusing)
            for _ in range(MAX_CONNECTIONS + 1):  # a refused one takes no room
                with raw_socket(server.address) as raw:
                    text = "busy: this worker can start no further thread"
                    assert read_error(raw) == (ErrorCode.BUSY.value, text)
        manifest = make_model(tmp_path / "model")
        connect(server.address, plan_for(manifest)[0]).close()
    finally:
        server.stop()
        serving.join(20)
    assert not serving.is_alive()
    assert sum("can start no further thread" in line for line in lines) == MAX_CONNECTIONS + 1


def test_a_taken_port(tmp_path: Path) -> None:
    with running_worker(tmp_path) as worker:
        status, errors = run_worker_process("--listen", str(worker.address))
    assert status == 2
    assert (
        f"listen: got '{worker.address}', expected an address that can be bound (Address already in use)"
        in errors
    )


def test_it_runs_without_torch(tmp_path: Path) -> None:
    """After a whole session: no library of torch, triton or transformers is mapped, no such module loaded."""
    manifest = make_model(tmp_path / "model")
    with running_worker(tmp_path, PYTHONVERBOSE="1") as worker:
        check_serves(worker, manifest)
        mapped = Path(f"/proc/{worker.pid}/maps").read_text()
        log = worker.log()
    assert "_native" in mapped
    assert "import 'duckllm.worker.session'" in log
    for module in ("torch", "triton", "transformers", "safetensors", "typer"):
        assert f"import '{module}" not in log
        assert f"-packages/{module}/" not in mapped


def test_importing_the_hosts_side_needs_no_torch_and_does_nothing() -> None:
    code = """
import sys, threading
import duckllm.cluster.local, duckllm.cluster.static, duckllm.transport.transport, duckllm.moe.placement
import duckllm.worker.server, duckllm.cli.worker
assert not {"torch", "triton", "transformers"} & sys.modules.keys()
assert threading.active_count() == 1
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("in_session", [False, True])
def test_a_signal_stops_it_politely(tmp_path: Path, number: signal.Signals, in_session: bool) -> None:
    manifest = make_model(tmp_path / "model")
    with running_worker(tmp_path) as worker, raw_socket(worker.address) as visitor:
        connection = connect(worker.address, plan_for(manifest)[0]) if in_session else None
        worker.process.send_signal(number)
        assert worker.process.wait(20) == 0
        assert read_exactly(visitor, 1) == b""
        if connection is not None:
            assert read_exactly(connection._socket, 1) == b""
            connection.close()


@pytest.mark.parametrize("in_session", [False, True])
def test_the_end_of_its_input_stops_it(tmp_path: Path, in_session: bool) -> None:
    manifest = make_model(tmp_path / "model")
    with running_worker(tmp_path) as worker:
        connection = connect(worker.address, plan_for(manifest)[0]) if in_session else None
        assert worker.process.stdin is not None
        worker.process.stdin.write(b"what is written does not matter\n")
        worker.process.stdin.flush()
        check = raw_socket(worker.address)  # it is still there
        check.close()
        worker.process.stdin.close()
        assert worker.process.wait(20) == 0
        if connection is not None:
            connection.close()


def test_without_the_flag_its_input_does_not_matter(tmp_path: Path) -> None:
    manifest = make_model(tmp_path / "model")
    command = [sys.executable, "-m", "duckllm.worker", "--listen", "localhost:0", "--threads", "1"]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.fullmatch(
                r"worker listening on (\S+):(\d+) \((\w+), 1 thread, without a cluster token\); "
                r"Ctrl-C stops it\n",
                line,
            )
            assert found, line
            address = parse_address(f"{found[1]}:{found[2]}")
            check_serves(WorkerProcess(process, address, tmp_path), manifest)  # type: ignore[arg-type]
        finally:
            process.terminate()
        assert process.wait(20) == 0


def test_the_listening_line(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "duckllm.worker",
        "--listen",
        "127.0.0.1:0",
        "--json",
        "--exit-with-stdin",
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        facts = json.loads(process.stdout.readline())
        process.stdin.close()
        assert process.stdout.read() == b""
        assert process.wait(20) == 0
    assert facts["event"] == "listening"
    assert facts["pid"] == process.pid
    assert re.fullmatch(r"127\.0\.0\.1:\d+", facts["address"])


def test_both_command_lines_have_the_same_flags_and_defaults() -> None:
    parser = {action.dest: action.default for action in make_parser()._actions if action.dest != "help"}
    assert parser.pop("shared_memory") == ()  # descriptors that only a host can give
    assert parser.pop("die_with_parent") is False  # for who starts workers, not for people
    command = {name: p.default for name, p in inspect.signature(worker_command).parameters.items()}
    assert parser == command
    fields = {name: value for name, value in vars(WorkerConfig()).items()}
    assert (fields.pop("token"), fields.pop("shared_memory")) == (None, ())
    assert (parser.pop("allow"), fields.pop("allow")) == (None, ())
    assert {name: parser[name] for name in fields} == fields


def test_threads_and_spinning_are_resolved() -> None:
    cores = len(os.sched_getaffinity(0))
    assert WorkerConfig().resolved_threads == cores
    assert WorkerConfig().resolved_spin_us == 0  # every core is taken
    assert WorkerConfig().resolved_pin is True
    assert WorkerConfig(threads=cores + 1).resolved_pin is False
    assert WorkerConfig(pin=False).resolved_pin is False
    assert WorkerConfig(threads=1, pin=True).resolved_pin is True
    with pytest.raises(ConfigError, match=rf"threads: got {cores + 1}, expected at most {cores}, the cores"):
        WorkerConfig(threads=cores + 1, pin=True)
    with pytest.raises(ConfigError, match="copy: got 1, expected True or False"):
        WorkerConfig(copy=1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="pin: got 'yes', expected True, False or None"):
        WorkerConfig(pin="yes")  # type: ignore[arg-type]
    assert WorkerConfig(threads=3, spin_us=7).resolved_threads == 3
    assert WorkerConfig(threads=3, spin_us=7).resolved_spin_us == 7
    if cores > 1:
        assert WorkerConfig(threads=cores - 1).resolved_spin_us == 200


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full", ">&- 2>&-"])
def test_a_log_line_that_cannot_be_written_is_lost(tmp_path: Path, redirection: str) -> None:
    manifest = make_model(tmp_path / "model")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = parse_address(f"127.0.0.1:{taken.getsockname()[1]}")
    command = f'exec "$0" -m duckllm.worker --exit-with-stdin --threads 1 --listen {address} {redirection}'
    with subprocess.Popen(
        ["sh", "-c", command, sys.executable], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as process:
        try:
            deadline = time.monotonic() + 30
            while True:
                try:
                    raw_socket(address).close()
                    break
                except ConnectionRefusedError:
                    assert time.monotonic() < deadline
                    assert process.poll() is None
                    time.sleep(0.05)
            worker = WorkerProcess(process, address, tmp_path / "none")
            for seed in range(2):
                check_serves(worker, manifest, seed=seed)
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(20) == 0
        finally:
            process.kill()


def test_a_closed_input_has_ended() -> None:
    command = 'exec "$0" -m duckllm.worker --exit-with-stdin --threads 1 --listen 127.0.0.1:0 <&-'
    done = subprocess.run(["sh", "-c", command, sys.executable], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("worker listening on 127.0.0.1:")


def test_whatever_goes_wrong_a_session_tells_the_host_and_does_not_raise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing_log(line: str) -> None:
        raise BrokenPipeError(line)

    def refuse(*args: object) -> None:
        raise ProtocolError("\ud800\x1b[2J" + "x" * 100_000)

    sessions = Sessions(WorkerConfig(threads=1), failing_log)
    monkeypatch.setattr(sessions, "_receive_plan", refuse)
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            sessions.serve(theirs, "a host")
        answer = read_error(ours)
    assert answer is not None
    assert answer[1] == r"\ud800?[2J" + "x" * (4000 - 3 - 10) + "..."
