"""Files that appear whole or not at all: what they replace, and how."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from duckllm.weights.files import AtomicFile, is_partial, write_atomically


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


@pytest.mark.parametrize("before", [0o600, 0o640, 0o444])
def test_a_replaced_file_keeps_its_mode(tmp_path: Path, before: int) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    path.chmod(before)
    write_atomically(path, b"new")
    assert (path.read_text(), mode(path)) == ("new", before)


@pytest.mark.parametrize(("private", "expected"), [(True, 0o600), (False, 0o640)])
def test_a_new_file_is_private_where_that_is_asked_for(tmp_path: Path, private: bool, expected: int) -> None:
    umask = os.umask(0o027)
    try:
        write_atomically(tmp_path / "file", b"new", private=private)
    finally:
        os.umask(umask)
    assert mode(tmp_path / "file") == expected


@pytest.mark.parametrize("is_there", [True, False])
def test_links_are_followed(tmp_path: Path, is_there: bool) -> None:
    (tmp_path / "elsewhere").mkdir()
    target, link, chain = tmp_path / "elsewhere" / "file", tmp_path / "link", tmp_path / "chain"
    if is_there:
        target.write_text("old")
    link.symlink_to(target)
    chain.symlink_to("link")
    with AtomicFile(chain) as file:
        assert file.partial.parent == target.parent.resolve()
        file.write(b"new")
        file.commit()
    assert target.read_text() == "new"
    assert link.is_symlink()
    assert chain.is_symlink()
    assert [each.name for each in target.parent.iterdir()] == ["file"]


def test_a_pipe_is_neither_replaced_nor_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(FileExistsError, match="a named pipe lies there"):
        write_atomically(path, b"new")
    assert path.is_fifo()
    assert [each.name for each in tmp_path.iterdir()] == ["pipe"]


def test_a_name_may_be_as_long_as_a_name_can_be(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 255)
    write_atomically(path, b"new")
    assert path.read_text() == "new"


def test_two_writers_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with AtomicFile(path) as one, AtomicFile(path) as other:
        assert one.partial != other.partial
        assert is_partial(one.partial.name)
        one.write(b"one")
        other.write(b"other")
        one.commit()
        assert path.read_text() == "one"
        other.commit()
    assert path.read_text() == "other"
    assert not is_partial(".experts-00001.safetensors.partial")


def test_what_is_not_committed_leaves_nothing(tmp_path: Path) -> None:
    with AtomicFile(tmp_path / "file") as file:
        file.write(b"half")
    assert list(tmp_path.iterdir()) == []
