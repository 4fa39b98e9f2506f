"""Conversions that are killed, interrupted or raced, and what a later one makes of what they left."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from random_checkpoint import make_checkpoint

from duckllm.errors import ConfigError, DiskSpaceError, WeightFormatError
from duckllm.weights import convert as convert_module
from duckllm.weights.convert import convert
from duckllm.weights.e4m3 import QuantisationError
from duckllm.weights.files import AtomicFile, FolderLock
from duckllm.weights.manifest import Manifest
from duckllm.weights.progress_file import PROGRESS_FILE, ProgressFile

SUMS = [field.name for field in fields(QuantisationError)]
KILLED = """
import os, signal, sys
from duckllm.weights.convert import convert
left = int(sys.argv[3])
def progress(stage, done, total):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.{signal})
convert(sys.argv[1], sys.argv[2], progress=progress)
print("finished")
"""


def stop_after(src: Path, dst: Path, events: int, name: str = "SIGKILL") -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", KILLED.replace("{signal}", name), str(src), str(dst), str(events)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def identities(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        path.name: (path.stat().st_ino, path.stat().st_mtime_ns)
        for path in folder.iterdir()
        if not path.name.startswith(".")
    }


@pytest.mark.parametrize("events", [1, 26, 40, 54, 70, 88, 128])
def test_a_killed_conversion_goes_on_where_it_was(tmp_path: Path, events: int) -> None:
    make_checkpoint(tmp_path / "src")
    convert(tmp_path / "src", tmp_path / "whole")
    killed = stop_after(tmp_path / "src", tmp_path / "dst", events)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (tmp_path / "dst/duck.json").exists()
    before = identities(tmp_path / "dst")
    written: list[str] = []
    convert(
        tmp_path / "src",
        tmp_path / "dst",
        progress=lambda stage, done, total: written.append(stage) if "checking" not in stage else None,
    )
    after = identities(tmp_path / "dst")
    assert {name: after[name] for name in before} == before, "finished files are not written again"
    assert not set(written) & set(before)
    assert content(tmp_path / "dst") == content(tmp_path / "whole")


def test_the_kills_above_come_at_different_files(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "src")
    finished = set()
    for events in (1, 26, 40, 54, 70, 88, 128):
        stop_after(tmp_path / "src", tmp_path / str(events), events)
        finished.add(len(identities(tmp_path / str(events))))
    assert len(finished) >= 5
    assert min(finished) == 0
    assert max(finished) >= 6


def test_a_conversion_killed_again_and_again_gets_done(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "src")
    convert(tmp_path / "src", tmp_path / "whole")
    for _attempt in range(20):
        if stop_after(tmp_path / "src", tmp_path / "dst", 45).returncode == 0:
            break
    assert content(tmp_path / "dst") == content(tmp_path / "whole")


def test_ctrl_c_leaves_a_state_to_go_on_from(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "src")
    stopped = stop_after(tmp_path / "src", tmp_path / "dst", 60, "SIGINT")
    assert stopped.returncode != 0
    assert "KeyboardInterrupt" in stopped.stderr
    assert not list((tmp_path / "dst").glob("*.partial"))
    assert not list((tmp_path / "dst").glob(".*.partial"))
    before = identities(tmp_path / "dst")
    assert before
    convert(tmp_path / "src", tmp_path / "dst", verify=True)
    assert {name: identities(tmp_path / "dst")[name] for name in before} == before


@pytest.mark.parametrize("damage", ["remove", "shorten", "lengthen", "flip"])
@pytest.mark.parametrize("name", ["host-00000.safetensors", "experts-00001.safetensors"])
def test_finished_files_that_were_damaged_are_written_again(tmp_path: Path, damage: str, name: str) -> None:
    make_checkpoint(tmp_path / "src")
    convert(tmp_path / "src", tmp_path / "whole")
    stop_after(tmp_path / "src", tmp_path / "dst", 60)
    hurt(tmp_path / "dst" / name, damage)
    convert(tmp_path / "src", tmp_path / "dst")
    assert content(tmp_path / "dst") == content(tmp_path / "whole")


def hurt(path: Path, damage: str) -> None:
    data = path.read_bytes()
    if damage == "remove":
        path.unlink()
    elif damage == "shorten":
        path.write_bytes(data[:-1])
    elif damage == "lengthen":
        path.write_bytes(data + b"\0")
    else:
        path.write_bytes(data[:-300] + bytes([data[-300] ^ 1]) + data[-299:])


@pytest.mark.parametrize("damage", ["remove", "shorten"])
@pytest.mark.parametrize("dtype", ["F8_E4M3", "BF16"])
def test_a_finished_model_with_a_damaged_file_is_mended(tmp_path: Path, damage: str, dtype: str) -> None:
    make_checkpoint(tmp_path / "src", dtype=dtype)
    convert(tmp_path / "src", tmp_path / "dst")
    whole, before = content(tmp_path / "dst"), identities(tmp_path / "dst")
    hurt(tmp_path / "dst/experts-00002.safetensors", damage)
    convert(tmp_path / "src", tmp_path / "dst")
    assert content(tmp_path / "dst") == whole
    changed = {name for name, identity in identities(tmp_path / "dst").items() if identity != before[name]}
    assert "experts-00002.safetensors" in changed
    assert not changed & {"experts-00001.safetensors", "host-00000.safetensors"}


def test_no_file_gets_its_name_before_it_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path / "src")
    add = ProgressFile.add

    def stop(state: ProgressFile, name: str, *rest: Any) -> None:
        if name == "experts-00002.safetensors":
            assert not (tmp_path / "dst" / name).exists()
            raise KeyboardInterrupt
        add(state, name, *rest)

    monkeypatch.setattr(ProgressFile, "add", stop)
    with pytest.raises(KeyboardInterrupt):
        convert(tmp_path / "src", tmp_path / "dst")
    progress = json.loads((tmp_path / "dst" / PROGRESS_FILE).read_text())
    weights = {path.name for path in (tmp_path / "dst").glob("*.safetensors")}
    assert weights == set(progress["files"])
    assert "experts-00001.safetensors" in weights


def test_a_changed_checkpoint_does_not_go_on_from_the_old_ones_files(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "src")
    stop_after(tmp_path / "src", tmp_path / "dst", 60)
    make_checkpoint(tmp_path / "src", seed=1)
    with pytest.raises(Exception, match="a part of another model"):
        convert(tmp_path / "src", tmp_path / "dst")


def test_a_started_conversion_of_the_other_format_is_not_mixed_in(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "src")
    stop_after(tmp_path / "src", tmp_path / "dst", 60)
    before = content(tmp_path / "dst")
    assert "experts-00001.safetensors" in before
    with pytest.raises(ConfigError, match="it holds a part of one in fp9"):
        convert(tmp_path / "src", tmp_path / "dst", weight_format="fp8")
    assert content(tmp_path / "dst") == before
    assert convert(tmp_path / "src", tmp_path / "dst").format == "fp9"


def test_many_processes_at_once_convert_once(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "src")
    code = (
        "import sys; from duckllm.weights.convert import convert; calls = [];"
        "convert(sys.argv[1], sys.argv[2], progress=lambda *call: calls.append(call[0]));"
        "print(any(c.startswith('experts') for c in calls))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "src"), str(tmp_path / "dst")]
    racers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    outputs = [racer.communicate(timeout=120)[0].strip() for racer in racers]
    assert [racer.returncode for racer in racers] == [0] * 4
    assert sorted(outputs) == ["False", "False", "False", "True"]
    Manifest.load(tmp_path / "dst").check_files()
    assert not list((tmp_path / "dst").glob(".*"))


def test_a_disk_that_fills_up_midway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path / "src")
    convert(tmp_path / "src", tmp_path / "whole")

    class FullDisk(AtomicFile):
        def sync(self) -> None:
            if self.path.name == "experts-00002.safetensors":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().sync()

    with monkeypatch.context() as patch:
        patch.setattr(convert_module, "AtomicFile", FullDisk)
        with pytest.raises(DiskSpaceError, match="no room left"):
            convert(tmp_path / "src", tmp_path / "dst")
    assert (tmp_path / "dst" / PROGRESS_FILE).is_file()
    before = identities(tmp_path / "dst")
    convert(tmp_path / "src", tmp_path / "dst")
    assert {name: identities(tmp_path / "dst")[name] for name in before} == before
    assert content(tmp_path / "dst") == content(tmp_path / "whole")


@pytest.mark.parametrize("weight_format", ["fp9", "fp8"])
def test_room_counts_what_is_already_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weight_format: str
) -> None:
    make_checkpoint(tmp_path / "src")
    whole = convert(tmp_path / "src", tmp_path / "whole", weight_format=weight_format)
    need = sum(entry.bytes for entry in whole.host_files.values())
    need += sum(entry.bytes for entry in whole.expert_layers.values())
    need += 2 + (tmp_path / "src/config.json").stat().st_size + (1 << 20)
    monkeypatch.setattr(convert_module, "free_bytes", lambda folder: need - 1)
    with pytest.raises(DiskSpaceError, match=f"got {need - 1:,} bytes free .*, expected at least {need:,} "):
        convert(tmp_path / "src", tmp_path / "dst", weight_format=weight_format)
    assert not (tmp_path / "dst").exists()
    if weight_format != "fp9":
        return
    stop_after(tmp_path / "src", tmp_path / "dst", 60)
    convert(tmp_path / "src", tmp_path / "dst")


def test_a_bad_weight_found_midway_leaves_no_half_file(tmp_path: Path) -> None:
    def edit(tensors: dict) -> None:
        name = "model.layers.3.mlp.experts.3.down_proj.weight"
        dtype, shape, data = tensors[name]
        tensors[name] = (dtype, shape, b"\x7f" + data[1:])

    make_checkpoint(tmp_path / "src", edit=edit)
    with pytest.raises(WeightFormatError):
        convert(tmp_path / "src", tmp_path / "dst")
    names = {path.name for path in (tmp_path / "dst").iterdir()}
    assert "experts-00003.safetensors" not in names
    assert not [name for name in names if "partial" in name or name in ("duck.json", ".duck-lock")]


def test_a_file_left_without_commit_is_gone(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    with AtomicFile(tmp_path / "a") as file:
        file.write(b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_text() == "old"


def test_a_lock_excludes_other_processes_and_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from duckllm.weights.files import FolderLock\n"
        "with FolderLock(Path(sys.argv[1]), lambda: print('waiting', flush=True)): print('mine', flush=True)"
    )
    with FolderLock(tmp_path, lambda: pytest.fail("nobody else holds it")):
        other = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert other.stdout is not None
        assert other.stdout.readline() == "waiting\n"
        assert other.poll() is None
    assert other.communicate(timeout=60)[0] == "mine\n"
    assert list(tmp_path.iterdir()) == []


def test_a_lock_on_a_file_that_was_removed_counts_for_nothing(tmp_path: Path) -> None:
    waits, entered = threading.Semaphore(0), threading.Event()

    def second() -> None:
        with FolderLock(tmp_path, waits.release):
            entered.set()

    waiter = threading.Thread(target=second, daemon=True)
    with FolderLock(tmp_path):
        waiter.start()
        assert waits.acquire(timeout=60)
        (tmp_path / ".duck-lock").unlink()
        other = FolderLock(tmp_path)
        other.__enter__()
    assert [path.name for path in tmp_path.iterdir()] == [".duck-lock"], "the file is now the other one's"
    assert waits.acquire(timeout=60), "the waiter got the removed file's lock, and must wait for the new one"
    assert not entered.is_set()
    other.__exit__(None, None, None)
    waiter.join(60)
    assert entered.is_set()
    assert list(tmp_path.iterdir()) == []


NO_STRIPES: dict = {"stripe_sha256": []}


@pytest.mark.parametrize(
    "changes",
    [
        {"files": 3},
        {"files": {"host-00000.safetensors": 3}},
        {
            "files": {
                "experts-00001.safetensors": {"file": "experts-00002.safetensors", "bytes": 1, **NO_STRIPES}
            }
        },
        {"errors": {"experts-00001.safetensors": {}}},
        {"errors": {"experts-00001.safetensors": {**dict.fromkeys(SUMS, 0), "weights": "many"}}},
    ],
)
def test_a_malformed_progress_file_is_an_error(tmp_path: Path, changes: dict) -> None:
    make_checkpoint(tmp_path / "src")
    (tmp_path / "dst").mkdir()
    whole = {"fingerprint": "x", "format": "fp9", "files": {}, "errors": {}}
    (tmp_path / "dst" / PROGRESS_FILE).write_text(json.dumps(whole | changes))
    with pytest.raises(Exception, match=r"\.duck-progress\.json: malformed"):
        convert(tmp_path / "src", tmp_path / "dst")
