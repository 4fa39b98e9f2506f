"""Files that verbs of bench, trace and simulate write: whole, or as they were before."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from duckllm.cli.bench_common import append_line, check_save, writing, writing_whole
from duckllm.cli.main import app
from duckllm.cli.plan_nodes import check_new_file
from duckllm.errors import ConfigError
from duckllm.tracing.writer import check_trace


def test_a_file_takes_its_place_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    link = tmp_path / "link.html"
    link.symlink_to(path)
    with writing_whole("html", link) as part:
        part.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert link.is_symlink()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["link.html", "report.html"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_what_is_not_whole_leaves_what_was_there(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "report.html"

    def half(part: Path) -> None:
        part.write_text("half")
        raise error

    for before in (None, "old"):
        if before:
            path.write_text(before)
        kind = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else ConfigError
        with pytest.raises(kind), writing_whole("html", path) as part:
            half(part)
        assert [each.read_text() for each in tmp_path.iterdir()] == ([before] if before else [])


def test_a_pipe_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    """It would be waited for, or replaced."""
    path = tmp_path / "pipe.json"
    os.mkfifo(path)
    for check in (check_save, check_trace):
        with pytest.raises(ConfigError, match=r"pipe\.json.*\(a named pipe lies there\)"):
            check(path)
    with pytest.raises(ConfigError, match="a named pipe lies there"), writing_whole("html", path):
        pass
    with pytest.raises(ConfigError, match="write_nodes"):
        check_new_file(path)
    assert path.is_fifo()


def test_a_calibration_into_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    outcome = CliRunner().invoke(app, ["calibrate", "no-model", "-o", str(path)])
    assert isinstance(outcome.exception, ConfigError)
    assert "output: got" in str(outcome.exception)
    assert "a named pipe lies there" in str(outcome.exception)


def test_a_report_keeps_the_mode_of_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 250 + ".html")
    path.write_text("old")
    path.chmod(0o600)
    with writing_whole("html", path) as part:
        part.write_text("new")
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_line_is_appended_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lines.jsonl"
    append_line("one", path)
    append_line("two", None)

    class Full:
        """A disk with room for three bytes."""

        def __init__(self, file: object) -> None:
            self.file, self.room = file, 3

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()  # type: ignore[attr-defined]

        def fileno(self) -> int:
            return int(self.file.fileno())  # type: ignore[attr-defined]

        def write(self, data: bytes) -> int:
            if not self.room:
                raise OSError(28, "No space left on device")
            wrote, self.room = self.room, 0
            self.file.write(data[:wrote])  # type: ignore[attr-defined]
            return wrote

    real = Path.open
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda self, *args, **options: Full(real(self, *args, **options)))
        with pytest.raises(ConfigError, match="No space left"):
            append_line("three", path)
    assert path.read_text() == "one\n"


def test_whether_a_file_can_be_written_is_found_out_without_a_trace(tmp_path: Path) -> None:
    check_save(tmp_path / "new.html", "html")
    assert list(tmp_path.iterdir()) == []
    for wrong in (tmp_path, tmp_path / "none" / "x.html"):
        with pytest.raises(ConfigError, match="html: got"):
            check_save(wrong, "html")


def test_a_link_to_a_file_that_is_not_there_yet_stays_a_link(tmp_path: Path) -> None:
    """Whether it can be written is found out without a trace, and what is written goes through it."""
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "new.toml", tmp_path / "link.toml"
    link.symlink_to(target)
    for check in (check_save, check_new_file, check_trace):
        check(link)
        assert link.is_symlink()
        assert not target.exists()

    def fail() -> None:
        target.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(ConfigError, match="No space left"), writing("save", link):
        fail()
    assert link.is_symlink()
    assert not target.exists()
    with writing_whole("write_nodes", link) as part:
        part.write_text("new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    link.unlink()
    link.symlink_to(link)
    with pytest.raises(ConfigError, match="symbolic links"):
        check_save(link)


def test_a_conversion_that_is_there_already_is_said(demo_checkpoint: Path, tmp_path: Path) -> None:
    arguments = ["convert", str(demo_checkpoint), str(tmp_path / "to")]
    fresh = CliRunner().invoke(app, arguments).stdout
    assert "there already" not in fresh
    again = CliRunner().invoke(app, arguments).stdout
    assert "for the host, there already: nothing was converted\n" in again
    assert again.splitlines()[1:] == fresh.splitlines()[1:]
    assert json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)["was_there"] is True
    next((tmp_path / "to").glob("experts*")).unlink()
    assert "there already" not in CliRunner().invoke(app, arguments).stdout  # mended
