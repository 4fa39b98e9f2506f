"""The documents tell the truth: links resolve, trees are the trees, commands exist."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from duckllm.cli.main import app
from worker_harness import running_worker

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md")])
LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
SERVER = "http://127.0.0.1:8000"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """The fragments that the headings of a document can be linked by."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def commands(text: str) -> list[str]:
    """Every line of a document's code that runs ``duckllm`` or ``make``."""
    indented = re.findall(r"^    (.+)$", text, re.MULTILINE)
    fenced = [line for _, block in FENCE.findall(text) for line in block.splitlines()]
    inline = re.findall(r"`([^`\n]+)`", text)
    found = []
    for line in (*indented, *fenced, *inline):
        line = line.split(" # ")[0].strip()
        for piece in line.split(" | "):
            if re.match(r"(\.venv/bin/)?duckllm [a-z-]|make( |$)", piece):
                found.append(piece.removeprefix(".venv/bin/"))
    return found


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_resolve(path: Path) -> None:
    for target in LINK.findall(path.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        name, _, fragment = target.partition("#")
        linked = path if not name else path.parent / name
        assert linked.exists(), f"{path.name}: {target}"
        if fragment:
            assert fragment in anchors(linked.read_text(encoding="utf-8")), f"{path.name}: {target}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_exist(path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    for command in commands(path.read_text(encoding="utf-8")):
        words = [word for word in shlex.split(command.replace("`", "")) if word != "..."]
        if words[0] == "make":
            assert {word for word in words[1:] if "=" not in word} <= targets, command
            continue
        verb = words[1:] if words[1] in GROUPS else words[1:2]  # duckllm bench roofline
        shown = help_of(*(word for word in verb[:2] if not word.startswith("-")))
        for word in words[1:]:
            if word.startswith("-"):
                assert re.search(rf"{re.escape(word.split('=')[0])}\b", shown), command


# Verbs that have verbs of their own.
GROUPS = ("bench", "node-image")
_HELP: dict[tuple[str, ...], str] = {}


def help_of(*verb: str) -> str:
    if verb not in _HELP:
        # In this process: to start one for each verb takes as long as all else here.
        done = CliRunner().invoke(app, [*verb, "--help"], prog_name="duckllm", env={"COLUMNS": "80"})
        assert done.exit_code == 0, f"duckllm {' '.join(verb)} --help: {done.output}"
        _HELP[verb] = done.stdout
    return _HELP[verb]


@pytest.mark.parametrize("verb", [(), *((group,) for group in GROUPS)], ids=str)
def test_a_list_of_commands_says_what_each_does_to_the_end(verb: tuple[str, ...]) -> None:
    """Typer ends what is too long with three dots."""
    listed = help_of(*verb).partition("Commands:\n")[2].splitlines()
    assert len(listed) >= 2
    assert [line for line in listed if line.endswith("...")] == []


def tree_of_readme() -> set[str]:
    """Paths in the README's file tree: two more spaces of indentation are one folder deeper."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.split("## Files\n")[1].split("\n## ")[0]
    folders: list[str] = []
    found = set()
    for line in section.splitlines():
        if not line.startswith("    ") or not line.strip():
            continue
        depth = (len(line) - len(line.lstrip())) // 2 - 2
        name = line.split()[0]
        del folders[depth:]
        if name.endswith("/"):
            folders.append(name)
        else:
            assert len(line.split()) > 1, f"the tree says nothing about {name}"
            path = "".join(folders) + name
            assert path not in found, f"the tree has {path} twice"
            found.add(path)
    return found


def test_the_readmes_tree_is_the_tree() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "src", "csrc"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    unnamed = ("__init__.py", "py.typed", "bind.cpp")
    actual = {
        path
        for path in listed.stdout.splitlines()
        if not path.endswith(unnamed) and "/demo/checkpoint/" not in path and (ROOT / path).exists()
    }
    # A header and its source are one entry.
    sources = {path for path in actual if path.endswith(".cpp") and f"{path[:-4]}.h" in actual}
    assert tree_of_readme() == actual - sources


def program_of(document: str) -> str:
    """A document's Python code, all of it as one program.

    Code that asks a server is left to tests/server, where there is one.
    """
    text = (ROOT / document).read_text(encoding="utf-8")
    blocks = [code for language, code in FENCE.findall(text) if language == "python" and SERVER not in code]
    assert blocks
    return "\n".join(blocks)


def test_python_code_of_the_readme_runs(tmp_path: Path) -> None:
    """In a process of its own, with a warning as an error. What other pages have runs in this one."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program_of("README.md")],
        cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    printed = done.stdout
    assert "small wild or domesticated web-footed broad-billed swimming bird" in printed
    assert re.search(r"^What is a duck\? \d+ tokens cached$", printed, re.MULTILINE)


def test_python_code_of_the_page_on_python_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = program_of("docs/python.md")
    (tmp_path / "token").write_text("secret\n")
    monkeypatch.chdir(tmp_path)
    with (
        running_worker(tmp_path, token="secret") as first,
        running_worker(tmp_path, token="secret") as second,
    ):
        for written, address in (("10.0.0.11:7411", first.address), ("10.0.0.12:7411", second.address)):
            assert written in program
            program = program.replace(written, str(address))
        exec(compile(program, "docs/python.md", "exec"), {"__name__": "__main__"})
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"No, 1001 is not prime: 1001 = 7 x 11 x 13\. \(stop, \d+ tokens\)", lines[0])
    assert "is_prime" in lines[1]
    assert lines[2] in ("yes", "no")
    begin = lines.index("No, 1001 is not prime: 1001 = 7 x 11 x 13.")  # behind a duck's and a swan's
    assert any("web-footed broad-billed swimming bird" in line for line in lines[3:begin])
    assert sorted(lines[begin + 1 : begin + 4]) == [f"conversation {n} has its reply" for n in range(3)]
    assert lines[begin + 4] == "What is a duck?"
    assert lines[begin + 5] == f"({str(first.address)!r}, {str(second.address)!r})"
    assert any("web-footed broad-billed swimming bird" in line for line in lines[begin + 6 :])


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "offline.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("verb: to move (the head or body) quickly downwards")
    assert "No, 1001 is not prime: 1001 = 7 x 11 x 13. (stop)" in lines
    assert any("What is a goose?" in line for line in lines)
    assert re.match(r"\d+ tokens: '", lines[-1])


def test_the_architectures_list_is_the_one_that_is_checked() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").split("## 3. Modules")[1]
    block = re.search(r"(?:^    .*\n|^\n)+", text.lstrip("\n"), re.MULTILINE)
    assert block is not None
    names = [
        word.rstrip("/").removesuffix(".py")
        for line in block[0].splitlines()
        if re.match(r"    \S", line)
        for word in re.findall(r"^    ((?:\S+(?:/|\.py) ?)+)", line)[0].split()
    ]
    code = (ROOT / "tests" / "test_layout.py").read_text(encoding="utf-8")
    order = re.findall(r'"(\w+)"', code.split("ORDER = [")[1].split("]")[0])
    assert names == [name for name in order if name != "__main__"]
