"""Page files: what is read is what was written, or nothing; budgets, order, other models, two processes."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import random
import stat
import struct
from pathlib import Path

import numpy as np
import pytest

from duckllm.engine import page_files
from duckllm.engine.page_files import PageFolder, PageFormat, PageKey, check_folder, to_file
from duckllm.errors import CacheFormatError, ConfigError

FORMAT = PageFormat("a" * 64, "float32", ((2,), (1,)), 4, 4 * 3 * 4)
FILE = FORMAT.file_bytes
MANY = 100 * FILE


def key_of(number: int, parent: bytes = FORMAT.seed) -> PageKey:
    return PageKey.of(parent, struct.pack("<4q", *range(number, number + 4)))


def content_of(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, FORMAT.page_bytes, np.uint8)


def folder_with(path: Path, *numbers: int, budget: int = MANY) -> PageFolder:
    folder = PageFolder(path, FORMAT, budget)
    for number in numbers:
        folder.write(key_of(number), content_of(number))
    return folder


def held(folder: PageFolder, *numbers: int) -> list[int]:
    """Which of these pages can be read, with the content that was written."""
    found = []
    for number in numbers:
        content = folder.read(key_of(number))
        if content is not None:
            assert (content == content_of(number)).all()
            found.append(number)
    return found


def files(path: Path) -> list[Path]:
    return sorted(each for each in path.rglob("*") if each.is_file() and each.name != "kv-cache.json")


def test_a_file_is_what_the_page_specifies(tmp_path: Path) -> None:
    """Written by hand, as docs/kv-cache.md says, without the code that writes."""
    from hashlib import blake2b

    folder = folder_with(tmp_path, 7)
    description = (
        b'{"dtype":"float32","format_version":1,"layer_widths":[[2],[1]],"model_hash":"' + b"a" * 64
        + b'","page_tokens":4}'
    )  # fmt: skip
    tokens = struct.pack("<4q", 7, 8, 9, 10)
    parent = blake2b(description + b"\n", digest_size=16).digest()
    rest = struct.pack("<IIQ", 1, len(description), 48) + description + parent + tokens
    rest += content_of(7).tobytes()
    name = blake2b(parent + tokens, digest_size=16).hexdigest()
    path = tmp_path / name[:2] / f"{name}.page"
    checksum = blake2b(b"DUCKPAGE" + rest, digest_size=32).digest()
    assert path.read_bytes() == b"DUCKPAGE" + checksum + rest
    assert path.stat().st_size == FILE
    assert json.loads((tmp_path / "kv-cache.json").read_text()) == json.loads(description)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert files(tmp_path) == [path]
    assert held(folder, 7) == [7]


def test_what_a_process_wrote_the_next_one_reads(tmp_path: Path) -> None:
    folder_with(tmp_path, 1, 2, 3)
    assert held(folder_with(tmp_path), 1, 2, 3, 4) == [1, 2, 3]


def test_a_flipped_bit_anywhere_is_found_and_the_file_is_gone(tmp_path: Path) -> None:
    whole = bytes(to_file(FORMAT, key_of(1), content_of(1)))
    path = PageFolder(tmp_path, FORMAT, MANY).path_of(key_of(1).hash)
    path.parent.mkdir()
    rng = random.Random(1)
    for byte in range(len(whole)):
        broken = bytearray(whole)
        broken[byte] ^= 1 << rng.randrange(8)
        path.write_bytes(broken)
        folder = PageFolder(tmp_path, FORMAT, MANY)
        assert key_of(1).hash in folder
        assert folder.read(key_of(1)) is None, byte
        assert key_of(1).hash not in folder
        assert not path.exists(), byte
    path.write_bytes(whole)
    assert held(PageFolder(tmp_path, FORMAT, MANY), 1) == [1]


def test_every_truncation_is_found_at_the_start_and_while_running(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, 1)
    path = folder.path_of(key_of(1).hash)
    whole = path.read_bytes()
    for length in [*range(0, FILE, 17), FILE - 1]:
        path.write_bytes(whole[:length])
        assert key_of(1).hash not in PageFolder(tmp_path, FORMAT, MANY)
        assert not path.exists()
    path.write_bytes(whole + b"x")
    assert key_of(1).hash not in PageFolder(tmp_path, FORMAT, MANY)
    assert not path.exists()
    folder = folder_with(tmp_path, 1)
    path.write_bytes(whole[:-5])
    assert folder.read(key_of(1)) is None
    assert not path.exists()
    folder.write(key_of(1), content_of(1))
    assert held(folder, 1) == [1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_hash": "b" * 64}, f'model_hash: got "{"a" * 57}'),
        ({"dtype": "float16"}, 'dtype: got "float32", expected "float16"'),
        ({"dtype": "bfloat16"}, "these pages were computed on a CPU in float32, and it is a GPU now"),
        ({"page_tokens": 8}, "page_tokens: got 4, expected 8"),
        ({"layer_widths": ((2,), (2,))}, r"layer_widths: got [[2], [1]], expected [[2], [2]]"),
    ],
)
def test_another_model_or_format_is_refused_by_name(
    tmp_path: Path, change: dict[str, object], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = folder_with(tmp_path / "a", 1)
    other = dataclasses.replace(FORMAT, **change)
    with pytest.raises(CacheFormatError) as caught:
        PageFolder(tmp_path / "a", other, MANY)
    assert str(caught.value).startswith(f"{tmp_path / 'a' / 'kv-cache.json'}: {message}")
    if "model_hash" in change:  # which is known before anything is loaded
        with pytest.raises(CacheFormatError, match=r"kv-cache\.json: model_hash: got \"aaaa"):
            check_folder(tmp_path / "a", other.model_hash, 2, "float32")
    check_folder(tmp_path / "a", FORMAT.model_hash, 2, "float32")
    check_folder(tmp_path / "nothing", other.model_hash, 2, "float32")
    # A single file of it is named, left alone and never used.
    mine = PageFolder(tmp_path / "b", other, MANY)
    strange = mine.path_of(key_of(1).hash)
    strange.parent.mkdir()
    folder.path_of(key_of(1).hash).rename(strange)
    mine = PageFolder(tmp_path / "b", other, MANY)
    with caplog.at_level(logging.WARNING):
        assert mine.read(key_of(1)) is None
    assert f"{strange}: {message}" in caplog.text
    assert strange.exists()
    assert key_of(1).hash not in mine


def test_pages_with_guesses_and_without_are_told_apart_in_words(tmp_path: Path) -> None:
    folder_with(tmp_path, 1)  # of two layers
    for widths, words in (
        (((2,),), "on or auto, and it is off now"),
        (((2,), (1,), (1,)), "off, and it is on or auto now"),
    ):
        message = f"these pages were made with draft {words}; another model"
        with pytest.raises(CacheFormatError, match=message):
            PageFolder(tmp_path, dataclasses.replace(FORMAT, layer_widths=widths), MANY)
        with pytest.raises(CacheFormatError, match=message):
            check_folder(tmp_path, FORMAT.model_hash, len(widths), "float32")


def test_pages_of_a_gpu_and_of_a_cpu_are_told_apart_in_words(tmp_path: Path) -> None:
    folder_with(tmp_path / "cpu", 1)
    with pytest.raises(CacheFormatError, match="computed on a CPU in float32, and it is a GPU now; another"):
        check_folder(tmp_path / "cpu", FORMAT.model_hash, 2, "bfloat16")
    PageFolder(tmp_path / "gpu", dataclasses.replace(FORMAT, dtype="bfloat16"), MANY)
    check_folder(tmp_path / "gpu", FORMAT.model_hash, 2, "bfloat16")
    with pytest.raises(CacheFormatError, match="computed on a GPU in bfloat16, and it is a CPU now; another"):
        check_folder(tmp_path / "gpu", FORMAT.model_hash, 2, "float32")


def test_a_file_under_another_name_or_of_another_version_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_with(tmp_path, 1, 2)
    one, two = (folder.path_of(key_of(number).hash) for number in (1, 2))
    one.replace(two)
    assert folder.read(key_of(2)) is None
    assert (
        f"{two}: hash: got {key_of(1).hash.hex()}, expected {key_of(2).hash.hex()}; not used" in caplog.text
    )
    monkeypatch.setattr(page_files, "FORMAT_VERSION", 2)
    data = to_file(FORMAT, key_of(3), content_of(3))
    monkeypatch.undo()
    path = folder.path_of(key_of(3).hash)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    folder = PageFolder(tmp_path, FORMAT, MANY)
    assert folder.read(key_of(3)) is None
    assert f"{path}: format_version: got 2, expected 1; not used" in caplog.text
    path.write_bytes(bytes(5 * FILE))
    assert key_of(3).hash not in PageFolder(tmp_path, FORMAT, MANY)
    assert f"{path}: got {5 * FILE} bytes, expected {FILE}; not used" in caplog.text


def test_pages_of_other_arithmetic_are_others(tmp_path: Path) -> None:
    other = dataclasses.replace(FORMAT, arithmetic="prefill bf16")
    assert other.seed != FORMAT.seed
    folder_with(tmp_path, 1)
    assert len(PageFolder(tmp_path, other, MANY)) == 1  # and none of them has this seed


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"model_hash": 1}', b"\xff", b"[" * 10**6])
def test_a_broken_description_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "kv-cache.json").write_bytes(content)
    with pytest.raises(CacheFormatError, match=r"kv-cache\.json: "):
        PageFolder(tmp_path, FORMAT, MANY)


def test_a_folder_with_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(CacheFormatError, match=r"got a folder with 'thesis\.txt' and no kv-cache\.json"):
        PageFolder(tmp_path, FORMAT, MANY)
    with pytest.raises(ConfigError, match=r"kv_disk_dir: got '.*thesis\.txt', expected a folder"):
        PageFolder(tmp_path / "thesis.txt", FORMAT, MANY)
    with pytest.raises(CacheFormatError, match=r"got a folder with 'thesis\.txt'"):
        check_folder(tmp_path, FORMAT.model_hash, 2, "float32")
    with pytest.raises(ConfigError, match=r"kv_disk_dir: got '.*thesis\.txt', expected a folder"):
        check_folder(tmp_path / "thesis.txt", FORMAT.model_hash, 2, "float32")
    least = f"kv_disk_bytes: got {FILE - 1} bytes, expected at least {FILE} bytes, one page"
    with pytest.raises(ConfigError, match=least):
        PageFolder(tmp_path / "new", FORMAT, FILE - 1)


def test_a_budget_holds_exactly_and_the_least_used_goes_first(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, 1, 2, 3, budget=3 * FILE + FILE - 1)
    folder.use([key_of(1).hash])
    for number in (4, 5):
        folder.write(key_of(number), content_of(number))
        assert sum(path.stat().st_size for path in files(tmp_path)) == 3 * FILE
    assert held(folder, 1, 2, 3, 4, 5) == [1, 4, 5]


def test_the_next_process_knows_the_order_and_its_own_budget(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, *range(6))
    folder.use([key_of(number).hash for number in (5, 3, 0, 4, 1, 2)])
    folder.use([key_of(3).hash], lasting=False)  # which the next one does not know
    folder = PageFolder(tmp_path, FORMAT, 4 * FILE)
    assert len(files(tmp_path)) == 4
    assert held(folder, *range(6)) == [0, 1, 2, 4]
    folder.write(key_of(9), content_of(9))
    assert held(folder, 0, 1, 2, 4, 9) == [1, 2, 4, 9]


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_with(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
        with pytest.raises(OSError, match="No space left"):
            folder.write(key_of(2), content_of(2))
    assert files(tmp_path) == [folder.path_of(key_of(1).hash)]
    assert key_of(2).hash not in folder
    folder.write(key_of(2), content_of(2))
    assert held(folder, 1, 2) == [1, 2]


def test_what_an_interrupted_write_left_is_removed_unless_its_process_runs(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, 1)
    beside = folder.path_of(key_of(1).hash).parent
    gone = 4_000_000_000  # above any process's number
    left, other = (beside / f".{'0' * 32}.{pid}-00ff00ff.partial" for pid in (gone, os.getppid()))
    for path in (left, other):
        path.write_bytes(b"half")
    PageFolder(tmp_path, FORMAT, MANY)
    assert not left.exists()
    assert other.exists()


def test_two_processes_on_one_folder_do_no_harm(tmp_path: Path) -> None:
    one = folder_with(tmp_path, 1, 2, budget=3 * FILE)
    two = PageFolder(tmp_path, FORMAT, 3 * FILE)
    for number in range(3, 8):
        one.write(key_of(number), content_of(number))
    assert held(two, 1, 2) == []  # the other one removed them
    two.write(key_of(7), content_of(7))
    two.write(key_of(8), content_of(8))
    assert held(one, 5, 6, 7) == [5, 6, 7]
    assert held(two, 7, 8) == [7, 8]


def starting_meanwhile(monkeypatch: pytest.MonkeyPatch, *, seen: bool) -> None:
    """Another process begins to use a new folder just before, or just after, its files are listed."""
    listdir = os.listdir

    def listing(path: Path) -> list[str]:
        monkeypatch.setattr(os, "listdir", listdir)
        before = listdir(path)
        folder_with(path, 1)
        return listdir(path) if seen else before

    monkeypatch.setattr(os, "listdir", listing)


@pytest.mark.parametrize("seen", [True, False])
def test_of_two_that_begin_at_once_the_first_decides_what_the_folder_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: bool
) -> None:
    starting_meanwhile(monkeypatch, seen=seen)
    assert held(PageFolder(tmp_path / "same", FORMAT, MANY), 1) == [1]
    starting_meanwhile(monkeypatch, seen=seen)
    with pytest.raises(CacheFormatError, match=r"model_hash: got \"aaa"):
        PageFolder(tmp_path / "other", dataclasses.replace(FORMAT, model_hash="b" * 64), MANY)
    assert [each.name for each in (tmp_path / "other").iterdir() if each.is_file()] == ["kv-cache.json"]


def test_a_file_system_without_links_is_good_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refusing)
    folder_with(tmp_path, 1)
    assert held(PageFolder(tmp_path, FORMAT, MANY), 1) == [1]


def test_what_another_process_removes_and_what_is_no_file_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = folder_with(tmp_path, 1, 2, 3, 4, 5)
    paths = {number: folder.path_of(key_of(number).hash) for number in range(1, 6)}
    for number in range(2, 6):
        paths[number].unlink()
    paths[2].mkdir()
    os.mkfifo(paths[3])
    paths[4].symlink_to("/dev/zero")
    paths[5].symlink_to(tmp_path / "nowhere")
    other = PageFolder(tmp_path, FORMAT, MANY)
    assert len(other) == 1
    assert held(other, *range(1, 6)) == [1]
    assert "got no regular file; not used" in caplog.text
    paths[1].unlink()
    os.mkfifo(paths[1])
    assert held(other, 1) == []

    def removing(pid: object) -> bool:
        raise FileNotFoundError

    (paths[1].parent / f".{'0' * 32}.1-00ff00ff.partial").write_bytes(b"half")
    monkeypatch.setattr(page_files, "_is_running", removing)
    assert len(PageFolder(tmp_path, FORMAT, MANY)) == 0
