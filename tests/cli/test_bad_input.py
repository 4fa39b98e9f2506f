"""Whatever a user gets wrong ends as one sentence on stderr and a non-zero exit, never as a traceback."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from duckllm import _native
from duckllm.cli.main import main
from duckllm.cluster.address import Address
from duckllm.cluster.connect import Connection


@dataclass
class Outcome:
    """How a command ended."""

    code: int
    out: str
    sentence: str


Run = Callable[..., Outcome]


@pytest.fixture
def duckllm(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs ``duckllm`` with some arguments; whatever it says must be one sentence."""

    def run(*arguments: str | Path) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["duckllm", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capfd.readouterr()
        told = ("Converting ", " of KV cache, which holds ")
        lines = [line for line in err.splitlines() if not any(text in line for text in told)]
        assert len(lines) == 1, err
        assert lines[0].startswith("duckllm: ")
        assert "Traceback" not in err
        return Outcome(end.value.code, out, lines[0].removeprefix("duckllm: "))

    return run


@pytest.fixture
def checkpoint(demo_checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint that may be spoilt."""
    return Path(shutil.copytree(demo_checkpoint, tmp_path / "checkpoint"))


@pytest.fixture
def converted(demo_folder: Path, tmp_path: Path) -> Path:
    """A converted model that may be spoilt."""
    return Path(shutil.copytree(demo_folder, tmp_path / "converted"))


def ask(*arguments: str | Path) -> list[str | Path]:
    return ["chat", *arguments, "--prompt", "What is a duck?"]


def truncate(path: Path, by_bytes: int = 1000) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - by_bytes)


def flip_last_byte(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, 2)
        [byte] = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([byte ^ 0xFF]))


def test_a_missing_folder(duckllm: Run, tmp_path: Path) -> None:
    for arguments in (ask(tmp_path / "no"), ["convert", tmp_path / "no", tmp_path / "to"]):
        done = duckllm(*arguments)
        assert done.code == 1
        assert f"{tmp_path}/no" in done.sentence
        assert "no such folder" in done.sentence


def test_a_folder_without_a_model(duckllm: Run, tmp_path: Path) -> None:
    done = duckllm(*ask(tmp_path))
    assert done.code == 1
    assert str(tmp_path) in done.sentence


def test_a_truncated_checkpoint(duckllm: Run, checkpoint: Path, tmp_path: Path) -> None:
    truncate(checkpoint / "model-00002-of-00003.safetensors")
    for arguments in (ask(checkpoint), ["convert", checkpoint, tmp_path / "to"]):
        done = duckllm(*arguments)
        assert done.code == 1
        assert "model-00002-of-00003.safetensors" in done.sentence


@pytest.mark.parametrize("file", ["experts-00003.safetensors", "host-other.safetensors"])
def test_a_truncated_converted_file(duckllm: Run, converted: Path, file: str) -> None:
    truncate(converted / file)
    done = duckllm(*ask(converted))
    assert done.code == 1
    assert file in done.sentence
    assert "bytes" in done.sentence


def test_a_file_that_is_no_safetensors(duckllm: Run, checkpoint: Path) -> None:
    (checkpoint / "model-00001-of-00003.safetensors").write_bytes(b"\xff" * 100)
    assert "model-00001-of-00003.safetensors" in duckllm(*ask(checkpoint)).sentence


def test_a_wrong_hash(duckllm: Run, converted: Path) -> None:
    flip_last_byte(converted / "experts-00003.safetensors")
    done = duckllm(*ask(converted))
    assert done.code == 1
    assert "experts-00003.safetensors" in done.sentence
    assert "stripe 7" in done.sentence


def test_a_malformed_manifest(duckllm: Run, converted: Path) -> None:
    manifest = json.loads((converted / "duck.json").read_text())
    (converted / "duck.json").write_text(json.dumps({**manifest, "format_version": 99}))
    done = duckllm(*ask(converted))
    assert done.code == 1
    assert "99" in done.sentence
    (converted / "duck.json").write_text("{")
    assert "duck.json" in duckllm(*ask(converted)).sentence


def test_an_unknown_architecture(duckllm: Run, checkpoint: Path, tmp_path: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    config |= {"architectures": ["GooseForCausalLM"], "model_type": "goose"}
    (checkpoint / "config.json").write_text(json.dumps(config))
    for arguments in (ask(checkpoint), ["convert", checkpoint, tmp_path / "to"]):
        done = duckllm(*arguments)
        assert done.code == 1
        assert "GooseForCausalLM" in done.sentence


def test_no_such_worker(duckllm: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    done = duckllm(*ask("--workers", address))
    assert done.code == 1
    assert f"worker {address} is not available" in done.sentence


def test_a_worker_name_that_does_not_exist(duckllm: Run) -> None:
    done = duckllm(*ask("--workers", "no-such-node.invalid:7411"))
    assert done.code == 1
    assert "worker no-such-node.invalid:7411 is not available" in done.sentence


@pytest.fixture
def other_version() -> Iterator[str]:
    """The address of what answers like a worker of protocol version 99."""
    frame = bytearray(_native.encode_error_frame(_native.ErrorCode.VERSION, "protocol version: got 1"))
    assert struct.unpack_from("<H", frame, 4) == (_native.PROTOCOL_VERSION,)
    struct.pack_into("<H", frame, 4, 99)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(ConnectionResetError):
                connection.recv(4096)
                connection.sendall(frame)
                while connection.recv(4096):
                    pass

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join(10)


def test_a_worker_of_another_protocol_version(duckllm: Run, other_version: str) -> None:
    done = duckllm(*ask("--workers", other_version))
    assert done.code == 1
    assert f"protocol version: worker {other_version} speaks 99" in done.sentence


@pytest.fixture
def worker() -> Iterator[str]:
    """The address of a worker whose token is "right"."""
    process = subprocess.Popen(
        [sys.executable, "-m", "duckllm", "worker", "--listen", "127.0.0.1:0", "--json", "--exit-with-stdin"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={"DUCKLLM_CLUSTER_TOKEN": "right", "PATH": ""},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())["address"]
    finally:
        process.stdin.close()
        process.stdout.close()
        assert process.wait(20) == 0


def test_a_wrong_token(duckllm: Run, worker: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("wrong")
    (tmp_path / "token").chmod(0o600)
    done = duckllm(*ask("--workers", worker, "--token-file", tmp_path / "token"))
    assert done.code == 1
    assert "token" in done.sentence
    done = duckllm(*ask("--workers", worker))
    assert "cluster_token" in done.sentence


def test_a_worker_that_is_busy(duckllm: Run, worker: str, demo_folder: Path, tmp_path: Path) -> None:
    from duckllm.moe.placement import plan_workers
    from duckllm.weights.manifest import Manifest

    name, _, port = worker.rpartition(":")
    connection = Connection(Address(name, int(port)), "right", 10)
    [plan] = plan_workers(Manifest.load(demo_folder), 1, max_step_tokens=8)
    connection.send_plan(plan)
    connection.wait_ready(60)
    (tmp_path / "token").write_text("right")
    (tmp_path / "token").chmod(0o600)
    done = duckllm(*ask("--workers", worker, "--token-file", tmp_path / "token"))
    connection.close()
    assert done.code == 1
    assert "busy" in done.sentence


def test_a_prompt_longer_than_the_context(duckllm: Run) -> None:
    done = duckllm("chat", "--prompt", "duck " * 200, "--max-model-len", "64")
    assert done.code == 1
    assert done.sentence.startswith("prompt: got ")
    assert done.sentence.endswith("tokens, expected at most 63")
    assert done.out == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect", "http://drake:sesame@h/x"],
        ["chat", "http://drake:sesame@h/x", "--prompt", "a"],
        ["worker", "--model", "http://drake:sesame@h/x"],
        ["worker", "--listen", "drake:sesame@h:1"],
        ["plan", "--workers", "http://drake:sesame@h:1"],
        ask("--trace", "http://drake:sesame@h/x"),
        ["bench", "serve", "--base-url", "http://h/?api_key=sesame"],
    ],
)
def test_no_sentence_has_a_password(duckllm: Run, arguments: list[str]) -> None:
    done = duckllm(*arguments)
    assert done.code in (1, 2)
    assert "***" in done.sentence
    assert "sesame" not in done.sentence


@pytest.mark.parametrize(
    "arguments", [["http://drake:sesame@h"], ["bench", "kernel", "http://drake:sesame@h"]]
)
def test_no_word_on_a_wrong_command_line_has_a_password(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["duckllm", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capfd.readouterr().err
    assert "http://***@h" in said
    assert "sesame" not in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (ask("--workers", "9"), "workers: got 9, expected 1 to 8"),
        (
            ask("--workers", "127.0.0.1:9,127.0.0.1:9"),
            "workers: got '127.0.0.1:9', expected each worker once",
        ),
        (["plan", "--workers", "a:9,a:9"], "workers: got 'a:9', expected each worker once"),
        (["doctor", "--workers", "a:9,a:9"], "workers: got 'a:9', expected each worker once"),
        (ask("--max-model-len", "1"), "max_model_len: got 1"),
        (ask("--max-model-len", "5000"), "max_model_len: got 5000, expected at most 4096"),
        (ask(""), "model: got an empty name"),
        (["worker", "--listen", "here"], "listen: got 'here'"),
        (["worker", "--listen", "127.0.0.1:99999"], "listen: got '127.0.0.1:99999'"),
        (["worker", "--listen", "0.0.0.0:0"], "cluster_token: got None"),
        (["worker", "--threads", "-1"], "threads: got -1"),
        (["worker", "--spin-us", "-5"], "spin_us: got -5"),
        (["worker", "--handshake-timeout-s", "0"], "handshake_timeout_s: got 0.0"),
        (["worker", "--frame-timeout-s", "-1"], "frame_timeout_s: got -1.0"),
        (["worker", "--send-timeout-s", "nan"], "send_timeout_s: got nan"),
        (["worker", "--model", "/nowhere"], "/nowhere"),
        (["worker", "--token-file", "/nowhere"], "token_file: got '/nowhere'"),
    ],
)
def test_a_wrong_value(duckllm: Run, arguments: list[str | Path], message: str) -> None:
    done = duckllm(*arguments)
    assert done.code in (1, 2)
    assert message in done.sentence


def test_a_wrong_format(duckllm: Run, demo_checkpoint: Path, tmp_path: Path) -> None:
    done = duckllm("convert", demo_checkpoint, tmp_path / "to", "--format", "fp7")
    assert done.code == 2
    assert "'fp7'" in done.sentence
    assert not (tmp_path / "to").exists()


def test_a_forced_instruction_set_that_does_not_exist(duckllm: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUCK_FORCE_ISA", "mmx")
    for arguments in (["worker"], ask(), ask("--workers", "0")):
        done = duckllm(*arguments)
        assert done.code in (1, 2)
        assert "DUCK_FORCE_ISA: got 'mmx', expected one of scalar" in done.sentence


@pytest.mark.parametrize(
    "arguments", [["--quack"], ["chat", "--quack"], ["chat", "--seed", "x"], ["worker", "a"]]
)
def test_wrong_usage_in_a_process_of_its_own(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "duckllm", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("Error: ")] == [
        done.stderr.splitlines()[-1]
    ]


def run_without_torch(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The command in an interpreter that has neither torch nor transformers."""
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from duckllm.cli.main import main; main()"
    )
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--workers", "127.0.0.1:1"], "worker 127.0.0.1:1 is not available: Connection refused"),
        (["--workers", "9"], "workers: got 9, expected 1 to 8, as an expert has 8 stripes"),
        (["--max-model-len", "1"], "max_model_len: got 1, expected an integer of at least 2"),
        (["/nowhere"], "/nowhere: no such folder"),
        (["--workers", "0"], "transformers is not installed: a node does without it, a host needs it"),
    ],
)
def test_what_is_cheap_to_check_is_checked_before_torch_is_imported(
    demo_folder: Path, arguments: list[str], sentence: str
) -> None:
    """The last one is what comes once nothing is wrong any more."""
    done = run_without_torch(*ask(*arguments))
    assert done.returncode in (1, 2)
    assert done.stderr.startswith(f"duckllm: {sentence}")


def test_a_config_that_the_manifest_does_not_know_is_found_before_torch(converted: Path) -> None:
    (converted / "config.json").write_text("{}")
    assert "config.json: got SHA-256" in run_without_torch(*ask(converted)).stderr
