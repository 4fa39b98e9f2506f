"""From port to stop: loading, failing to load, signals, and what is left behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from server_harness import ServerProcess, running_server

from duckllm.cli.serve import KEY_VARIABLE, _keys, _name
from duckllm.errors import ConfigError

DUCK = [{"role": "user", "content": "List all prime numbers below 400."}]
ENDLESS = {"model": "demo", "messages": DUCK, "stream": True, "max_tokens": 4000}
WAIT_S = 20.0


def stream(server: ServerProcess, **options: Any) -> Any:
    """A stream that has begun."""
    asked = {**ENDLESS, "extra_body": {"ignore_eos": True}, **options}
    iterator = iter(server.openai().chat.completions.create(**asked))
    next(iterator)
    return iterator


def children(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, WAIT_S)
    assert alive == []


def test_a_stop_lets_replies_end_and_cuts_those_that_do_not(demo_folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "stderr"
    with running_server(log, "--workers", "1", "--shutdown-timeout-s", "1") as server:
        workers = children(server.process)
        assert len(workers) == 1
        with server.http.stream("POST", "/v1/chat/completions", json={**ENDLESS, "ignore_eos": True}) as cut:
            lines = cut.iter_lines()
            next(lines)
            short = stream(server, max_tokens=20)
            server.process.send_signal(signal.SIGTERM)
            assert [chunk.choices[0].finish_reason for chunk in short][-1] == "length"
            *_, error, end = [line for line in lines if line]
        assert end == "data: [DONE]"
        assert error.startswith('data: {"error":{"message":"the server is stopping"')
        assert server.process.wait(WAIT_S) == 0
        with pytest.raises(httpx.ConnectError):
            server.http.get("/health")
    assert_gone(workers)
    assert "Traceback" not in log.read_text()


def test_a_second_signal_leaves_at_once(demo_folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "stderr"
    with running_server(log, "--workers", "1", "--shutdown-timeout-s", "600") as server:
        workers = children(server.process)
        _running = stream(server)
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(WAIT_S) == 130
    assert_gone(workers)
    expected = "stopping; waiting for 600 s at most, or until Ctrl-C again: replies under way: 1\n"
    assert log.read_text().endswith(expected)
    assert "Traceback" not in log.read_text()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_nobody_has_to_read_that_it_is_ready(demo_folder: Path, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{(port := free_port())}/health"
    command = [sys.executable, "-m", "duckllm", "serve", str(demo_folder), "--port", str(port)]
    log = tmp_path / "stderr"
    with log.open("wb") as stderr, open("/dev/full", "wb") as full:
        process = subprocess.Popen([*command, "--workers", "0"], stdout=full, stderr=stderr, text=True)
    deadline = time.monotonic() + WAIT_S
    status = None
    while status != 200:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
        with suppress(httpx.ConnectError):
            status = httpx.get(url).status_code
    process.terminate()
    assert process.wait(WAIT_S) == 0
    assert "Traceback" not in log.read_text()


def test_while_it_loads_it_says_so_and_can_be_stopped(demo_folder: Path, tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "duckllm", "serve", str(demo_folder), "--port", str(port)]
    log = tmp_path / "stderr"
    with log.open("wb") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            health = httpx.get(f"http://127.0.0.1:{port}/health")
            break
        except httpx.ConnectError:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
    models = httpx.get(f"http://127.0.0.1:{port}/v1/models")
    metrics = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    workers = children(process)
    process.terminate()
    assert process.wait(WAIT_S) == 0
    assert process.stdout is not None
    assert process.stdout.read() == ""
    process.stdout.close()
    assert (health.status_code, health.json()["status"]) == (503, "loading")
    assert set(health.json()) == {"status", "stage", "progress"}
    assert models.status_code == 503
    assert models.json()["error"]["message"].startswith("the model is loading: ")
    assert_gone(workers)
    assert 'duckllm_requests_total{endpoint="/health",outcome="refused"} 1.0' in metrics
    assert log.read_text() == (
        f"duckllm: loading {demo_folder.name}; http://127.0.0.1:{port}/health says how far it is\n"
    )


def run(*arguments: str, variables: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "duckllm", "serve", *arguments]
    environment = {**os.environ, **(variables or {})}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=60)


def test_a_model_that_cannot_be_loaded_ends_it_with_one_line() -> None:
    done = run("/nowhere/model", "--port", "0")
    assert (done.returncode, done.stdout) == (1, "")
    loading, failure = done.stderr.splitlines()
    assert re.fullmatch(
        r"duckllm: loading /nowhere/model; http://127\.0\.0\.1:\d+/health says how far it is", loading
    )
    assert failure.startswith("duckllm: /nowhere/model")


def test_a_taken_port_is_an_error_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("/nowhere/model", "--port", str(port))
    assert done.returncode == 2
    expected = "expected one that is free here, such as by --port 0 (address already in use)"
    assert done.stderr == f"duckllm: port: got {port}, {expected}\n"


def test_beyond_loopback_it_wants_a_key() -> None:
    done = run("--host", "0.0.0.0", variables={KEY_VARIABLE: ""})
    assert done.returncode == 2
    assert done.stderr.startswith("duckllm: host: got '0.0.0.0', expected a loopback address")


def test_keys_come_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "from-environment")
    file = tmp_path / "keys"
    file.write_text("from-file\n\n second-from-file \n")
    file.chmod(0o600)
    assert _keys(["given"], file) == ("given", "from-environment", "from-file", "second-from-file")
    monkeypatch.delenv(KEY_VARIABLE)
    assert _keys([], None) == ()
    file.write_text("a key\n")
    with pytest.raises(ConfigError, match="api_key_file: got 5 characters, expected 1 to 512 letters"):
        _keys([], file)
    with pytest.raises(ConfigError, match="api_key_file: got '/nowhere', expected a readable file"):
        _keys([], Path("/nowhere"))


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (None, "demo"),
        ("org/Name-30B", "org/Name-30B"),
        ("/models/mine", "mine"),
        ("org/a b@main", "org/a-b@main"),
    ],
)
def test_what_a_model_is_called(model: str | None, name: str, tmp_path: Path) -> None:
    if model == "/models/mine":
        (tmp_path / "mine").mkdir()
        model = str(tmp_path / "mine")
    assert _name(model) == name
