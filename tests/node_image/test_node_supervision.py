"""The node's first program over its worker, in a process of its own, as it reaps every child that ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# Plays the node: argv is the image's facts and the worker's program; prints what the console shows. What else
# runs on this machine is no part of it.
NODE = """
import functools, subprocess, sys, types
from pathlib import Path
from duckllm.node_image import init, watchdog
init.IMAGE_FACTS = Path(sys.argv[1])
init._LISTEN_TIMEOUT_S, init._PROBE_EVERY_S, init._LOOK_AFTER_S = 3.0, 0.1, 0.0
init.Watchdog = lambda: watchdog.Watchdog(Path("/nowhere/watchdog"))
init.answers = lambda port, has_token: ANSWERS
for name in ("describe_processes", "describe_ports", "describe_memory"):
    setattr(init, name, functools.partial(getattr(init, name), Path(sys.argv[1]).parent))
node = init.Node(types.SimpleNamespace(say=lambda line: print(line, flush=True)))
worker = subprocess.Popen(
    [sys.executable, "-c", sys.argv[2]], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
)
node._children[worker.pid] = worker
try:
    print("reason:", node._watch(worker, 7411), flush=True)
except init._StopError:
    print("stopped", flush=True)
    worker.kill()
"""
LISTENING = 'print(\'{"event": "listening", "isa": "avx2"}\', flush=True)\n'


@pytest.fixture
def facts(tmp_path: Path) -> Path:
    """The image's facts, in a root whose processes and ports are those of a node."""
    path = tmp_path / "image.json"
    path.write_text(json.dumps({"version": "1", "shell": False, "announce": False}))
    proc = tmp_path / "proc"
    (proc / "net").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 99000 kB\nMemAvailable: 9000 kB\n")
    (proc / "iomem").write_text("00000000-090dcbff : System RAM\n")
    (proc / "net/tcp").write_text("sl local rem st\n0: 00000000:1CF3 00000000:0000 0A\n")
    for number, words in ((1, b"python3\0-I\0/sbin/init\0"), (7, b"sh\0-c\0a=0\nnode: b\n")):
        (proc / f"{number}").mkdir()
        (proc / f"{number}/cmdline").write_bytes(words)
        (proc / f"{number}/status").write_text("RssAnon:\t12000 kB\n")
    return path


def start(facts: Path, worker: str, *, answers: bool = True) -> subprocess.Popen[str]:
    code = NODE.replace("ANSWERS", repr(answers))
    return subprocess.Popen(
        [sys.executable, "-c", code, str(facts), worker],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def lines_of(node: subprocess.Popen[str]) -> list[str]:
    text, _ = node.communicate(timeout=60)
    assert node.returncode == 0, text
    return text.splitlines()


def test_the_end_of_a_worker_is_noticed_and_its_last_words_shown(facts: Path) -> None:
    ends = "import sys; print('first'); sys.stdout.write('no line end'); sys.stdout.flush(); sys.exit(3)"
    assert lines_of(start(facts, ends)) == ["first", "no line end", "reason: ended (exit status 3)"]


def test_a_worker_that_does_not_listen_is_killed(facts: Path) -> None:
    said = lines_of(start(facts, "import time; time.sleep(600)"))
    assert said == ["reason: did not listen within 3 s, and was killed"]


def test_a_worker_that_gives_no_sign_of_life_is_killed_after_three_questions(facts: Path) -> None:
    said = lines_of(start(facts, LISTENING + "import time; time.sleep(600)", answers=False))
    assert said[0] == "node: joined: the worker listens on port 7411 (avx2)"
    assert said[-1] == "reason: gave no sign of life 3 times, and was killed"


def test_what_runs_and_listens_is_shown_once_the_worker_listens(facts: Path) -> None:
    said = lines_of(start(facts, LISTENING + "import time; time.sleep(1.5)"))
    assert said[0] == "node: joined: the worker listens on port 7411 (avx2)"
    assert said[1].startswith("node: ready ")
    assert said[2:] == [
        "node: memory used: 143 MB, 51 of them the kernel's own code and tables",
        "node: processes: 1 python3 -I /sbin/init (12 MB); 7 sh -c a=0 node: b (12 MB)",
        "node: open ports: tcp 0.0.0.0:7411",
        "reason: ended (exit status 0)",
    ]


def test_a_line_that_does_not_end_is_shown_in_pieces(facts: Path) -> None:
    said = lines_of(start(facts, LISTENING + "print('x' * 300_000 + 'y')"))
    pieces = [line for line in said if line.startswith("x")]
    assert "".join(pieces) == "x" * 300_000 + "y"
    assert len(pieces) > 1
    assert max(map(len, pieces)) <= 3 * 65536  # what was there, and what a look at it adds


def test_ctrl_alt_del_ends_the_watch(facts: Path) -> None:
    node = start(facts, LISTENING + "import time; time.sleep(600)")
    assert node.stdout is not None
    assert "joined" in node.stdout.readline()
    node.send_signal(2)
    assert lines_of(node)[-1] == "stopped"


# argv is the image's facts; each look at the medium finds the next of these.
MEDIUM = """
import sys, types
from pathlib import Path
from duckllm.node_image import init, settings, watchdog
init.IMAGE_FACTS = Path(sys.argv[1])
init._SETTINGS_AGAIN_S = 0.01
init.Watchdog = lambda: watchdog.Watchdog(Path("/nowhere/watchdog"))
node = init.Node(types.SimpleNamespace(say=lambda line: print(line, flush=True)))
texts = ["hots = '10.0.0.1'", "host = '10.0.0.1'"]
init.look_at_medium = lambda say: settings.read_file(texts.pop(0), "node.toml")
print(node._read_medium())
"""


def test_a_mistake_on_the_medium_is_waited_out_and_not_passed_over(facts: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEDIUM, str(facts)], capture_output=True, text=True, check=True, timeout=60
    )
    first, last = done.stdout.splitlines()
    assert first.startswith("node: does not join: node.toml: hots: got an unknown name, expected one of")
    assert last == "{'host': '10.0.0.1'}"
