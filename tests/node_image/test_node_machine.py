"""What a node does with its machine, on folders that stand in for /proc and /sys."""

from __future__ import annotations

import socket
import struct
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from duckllm.node_image import init, network
from duckllm.node_image.console import Console
from duckllm.node_image.dhcp_event import commands, lease
from duckllm.node_image.facts import (
    describe_memory,
    describe_ports,
    describe_processes,
    used_memory_bytes,
)
from duckllm.node_image.network import clock_offset, fetch_config, host_name, wired_interfaces
from duckllm.node_image.settings import NodeSettings
from duckllm.node_image.tuning import make_room, tune
from duckllm.node_image.watchdog import Restarts, answers
from worker_harness import running_worker


def write(root: Path, name: str, text: str) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_tuning_sets_what_is_there_and_names_what_is_not(tmp_path: Path) -> None:
    write(tmp_path, "proc/swaps", "Filename Type Size Used Priority\n")
    write(tmp_path, "proc/meminfo", "MemTotal: 16000000 kB\n")
    reserve = write(tmp_path, "proc/sys/vm/min_free_kbytes", "67584")
    overcommit = write(tmp_path, "proc/sys/vm/nr_overcommit_hugepages", "0")
    interval = write(tmp_path, "proc/sys/vm/stat_interval", "1")
    huge = write(tmp_path, "sys/kernel/mm/transparent_hugepage/enabled", "")
    governors = [
        write(tmp_path, f"sys/devices/system/cpu/cpu{core}/cpufreq/scaling_governor", "") for core in (0, 1)
    ]
    interrupts = [write(tmp_path, f"proc/irq/{number}/smp_affinity", "") for number in (1, 24)]
    states = [
        write(tmp_path, f"sys/devices/system/cpu/cpu1/cpuidle/state{number}/disable", "0")
        for number in range(3)
    ]
    for state, latency_us in zip(states, (0, 20, 133), strict=True):
        (state.parent / "latency").write_text(f"{latency_us}\n")
    write(tmp_path, "proc/irq/25/other", "")
    write(tmp_path, "sys/devices/system/cpu/isolated", "1-3\n")
    said = " ".join(tune(tmp_path))
    assert interval.read_text() == "30"
    assert overcommit.read_text() == "7812"  # huge pages, of 2048 kB
    assert reserve.read_text() == "16000"  # the square root of 16 times the memory, as the kernel has it
    assert huge.read_text() == "madvise"
    assert [path.read_text() for path in governors] == ["performance", "performance"]
    assert [path.read_text() for path in interrupts] == ["1", "1"]
    assert "performance governor on 2 cores" in said
    assert [state.read_text() for state in states] == ["0", "0", "1"]
    assert "1 idle states off" in said
    assert "2 of 2 interrupts on core 0, isolated cores: 1-3" in said
    assert "not here: " in said
    assert "tcp_rto_min_us" in said
    assert "stat_interval" not in said
    assert "no swap" in said


def test_room_is_made_by_dropping_caches_and_compaction(tmp_path: Path) -> None:
    paths = [write(tmp_path, f"proc/sys/vm/{name}", "") for name in ("drop_caches", "compact_memory")]
    make_room(tmp_path)
    assert [path.read_text() for path in paths] == ["3", "1"]


def test_cards_are_wired_ethernet_with_a_device(tmp_path: Path) -> None:
    for name, kind, radio in (
        ("eth1", "1", False),
        ("eth0", "1", False),
        ("wlan0", "1", True),
        ("ib0", "32", False),
    ):
        write(tmp_path, f"sys/class/net/{name}/type", f"{kind}\n")
        write(tmp_path, f"sys/class/net/{name}/device/vendor", "")
        write(tmp_path, f"sys/class/net/{name}/address", f"52:54:00:00:00:0{name[-1]}\n")
        if radio:
            write(tmp_path, f"sys/class/net/{name}/wireless/x", "")
    write(tmp_path, "sys/class/net/lo/type", "772\n")
    assert wired_interfaces(tmp_path) == ["eth0", "eth1"]
    assert host_name(tmp_path) == "duck-525400000000"


def test_what_a_lease_asks_for() -> None:
    facts = {
        "interface": "eth0",
        "ip": "10.0.0.5",
        "mask": "23",
        "router": "10.0.0.1 10.0.0.2",
        "ntpsrv": "10.0.0.9",
    }
    address, route = commands("bound", facts)
    assert address == ["addr", "replace", "10.0.0.5/23", "broadcast", "+", "dev", "eth0"]
    assert route == ["route", "replace", "default", "via", "10.0.0.1", "dev", "eth0"]
    assert commands("deconfig", {"interface": "eth0"})[-1] == ["addr", "flush", "dev", "eth0"]
    assert commands("leasefail", {"interface": "eth0"}) == []
    assert lease(facts) == {"interface": "eth0", "address": "10.0.0.5/23", "time_servers": ["10.0.0.9"]}


def answer_of(received: float, sent: float, *, mode: int = 4, leap: int = 0, stratum: int = 2) -> bytes:
    def moment(seconds: float) -> tuple[int, int]:
        whole = int(seconds)
        return whole + 2_208_988_800, int((seconds - whole) * 2**32)

    head = bytes([leap << 6 | 4 << 3 | mode, stratum])
    return head + bytes(30) + struct.pack("!4I", *moment(received), *moment(sent))


def fake_busybox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    """What stands in for busybox; writes its arguments into the file that is returned."""
    program, arguments = tmp_path / "busybox", tmp_path / "arguments"
    program.write_text(f'#!/bin/sh\nprintf "%s " "$@" > {arguments}\n{script}\n')
    program.chmod(0o755)
    monkeypatch.setattr(network, "BUSYBOX", str(program))
    monkeypatch.setattr(network, "FETCHED", tmp_path / "fetched")
    return arguments


@pytest.mark.parametrize(
    ("address", "asked"),
    [
        ("http://10.0.0.1:8069/node.toml", "wget -q -O FETCHED http://10.0.0.1:8069/node.toml "),
        ("tftp://10.0.0.1/a/node.toml", "tftp -g -l FETCHED -r a/node.toml 10.0.0.1 69 "),
        ("tftp://10.0.0.1:6969/x", "tftp -g -l FETCHED -r x 10.0.0.1 6969 "),
    ],
)
def test_settings_are_fetched_and_nothing_of_them_stays(
    address: str, asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = tmp_path / "fetched"
    arguments = fake_busybox(tmp_path, monkeypatch, f"printf 'port = 7412\\n' > {fetched}")
    assert fetch_config(address) == "port = 7412\n"
    assert arguments.read_text() == asked.replace("FETCHED", str(fetched))
    assert not fetched.exists()


@pytest.mark.parametrize(
    ("script", "named"),
    [
        (
            "echo half > FETCHED; echo 'wget: server returned error: HTTP/1.1 404' >&2; exit 1",
            "HTTP/1.1 404$",
        ),
        ("exit 1", "it cannot be fetched"),
        ("head -c 65537 /dev/zero > FETCHED", "more than 65536 bytes"),
        ("printf '\\377' > FETCHED", "not UTF-8"),
        ("true", "No such file"),
    ],
)
def test_what_cannot_be_fetched_is_an_error_that_is_tried_again(
    script: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = tmp_path / "fetched"
    fake_busybox(tmp_path, monkeypatch, script.replace("FETCHED", str(fetched)))
    with pytest.raises(OSError, match=named):
        fetch_config("http://10.0.0.1/node.toml")
    assert not fetched.exists()


def test_the_clock_moves_by_the_middle_of_both_ways() -> None:
    # Ours is 100 s behind; the way there takes 0.25 s, the work 0.5 s, the way back 0.25 s.
    answer = answer_of(1100.25, 1100.75)
    assert clock_offset(answer, 1000.0, 1001.0) == pytest.approx(100.0, abs=1e-6)


@pytest.mark.parametrize(
    "answer",
    [b"", answer_of(1, 1, mode=3), answer_of(1, 1, leap=3), answer_of(1, 1, stratum=0), answer_of(1, 1)[:47]],
)
def test_servers_that_do_not_know_the_time_are_not_believed(answer: bytes) -> None:
    with pytest.raises(OSError, match="does not know"):
        clock_offset(answer, 0.0, 1.0)


def test_ports_are_those_that_take_what_was_not_asked_for(tmp_path: Path) -> None:
    head = "  sl  local_address rem_address   st\n"
    tcp = head + "   0: 00000000:1CF3 00000000:0000 0A\n   1: 0100007F:1CF3 0100007F:8000 01\n"
    write(tmp_path, "proc/net/tcp", tcp)
    write(tmp_path, "proc/net/udp", head + "   0: 00000000:14E9 00000000:0000 07\n")
    write(tmp_path, "proc/net/tcp6", head + "   0: 00000000000000000000000001000000:0016 0:0 0A\n")
    assert describe_ports(tmp_path) == "tcp 0.0.0.0:7411; tcp6 [::1]:22; udp 0.0.0.0:5353"


def test_processes_are_those_with_a_command(tmp_path: Path) -> None:
    write(tmp_path, "proc/2/cmdline", "")
    write(tmp_path, "proc/2/status", "Name: kthreadd\n")
    write(tmp_path, "proc/10/cmdline", "/usr/bin/python3\0-I\0-m\0duckllm.worker\0--json\0")
    write(tmp_path, "proc/10/status", "RssAnon:\t   20480 kB\n")
    write(tmp_path, "proc/9/cmdline", "/sbin/init\0")
    write(tmp_path, "proc/9/status", "RssAnon:\t   1000 kB\n")
    assert describe_processes(tmp_path) == "9 init (1 MB); 10 python3 -I -m duckllm.worker (20 MB)"


def test_words_of_others_stay_in_one_line_of_bounded_length(tmp_path: Path) -> None:
    commands = {
        3: b"/bin/bash\0-c\0large_limit=0\n  while true\n",
        4: b"/a/\x1b[2Jclear\0\xff\xfe\0" + b"w" * 3000 + b"\0tab\there\0not shown\0",
        5: b"\0\0",
        6: b"one\xe2\x80\xa8two\0\xc2\x9b31m\0" + "Ente \U0001f986".encode(),
        7: b"x" * 10_000,
    }
    for number, command in commands.items():
        write(tmp_path, f"proc/{number}/cmdline", "").write_bytes(command)
        write(tmp_path, f"proc/{number}/status", f"Name:\tits\\nname{number}\nRssAnon:\t 1000 kB\n")
    write(tmp_path, "proc/8/cmdline", "ended meanwhile")
    said = describe_processes(tmp_path)
    assert said == (
        "3 bash -c large_limit=0 while true (1 MB); "
        f"4 ?[2Jclear \ufffd\ufffd {'w' * 29}... tab here (1 MB); "
        "5 [its\\nname5] (1 MB); "
        "6 one two ?31m Ente \U0001f986 (1 MB); "
        f"7 {'x' * 29}... (1 MB)"
    )


def test_the_console_shows_one_printable_line_of_bounded_length(tmp_path: Path) -> None:
    write(tmp_path, "sys/class/tty/console/active", "tty0 ttyS0\n")
    screen = write(tmp_path, "dev/tty0", "")  # and no serial line
    console = Console(tmp_path)
    console.say("node: a\nb\tc\x1b[2J\x00\x9b\udcff \u2028 ü")
    console.say("w" * 10_000)
    first, second, rest = screen.read_bytes().split(b"\r\n")
    assert first.decode() == "node: a b c?[2J???   ü"
    assert second == b"w" * 3997 + b"..."
    assert rest == b""


def test_used_memory_is_what_nobody_could_have(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", "MemTotal: 200000 kB\nMemFree: 100 kB\nMemAvailable: 100000 kB\n")
    write(
        tmp_path,
        "proc/iomem",
        "00000000-00000fff : Reserved\n00001000-00100fff : System RAM\n"
        "00100000-0fffffff : System RAM\n  02000000-02ffffff : Kernel code\n",
    )
    kept = (1 << 20) + (255 << 20) - 200000 * 1024
    assert used_memory_bytes(tmp_path) == (100000 * 1024, kept)
    said = describe_memory(tmp_path)
    assert said == "166 MB, 64 of them the kernel's own code and tables"
    write(tmp_path, "proc/iomem", "")  # of a kernel that does not say
    assert used_memory_bytes(tmp_path) == (100000 * 1024, 0)


def test_the_node_starts_again_after_too_many_ends_in_a_window() -> None:
    restarts = Restarts(most=3, window_s=100)
    assert [restarts.ended(now) for now in (0, 10, 20)] == [True, True, True]
    assert not restarts.ended(30)
    spread = Restarts(most=3, window_s=100)
    assert all(spread.ended(now) for now in range(0, 2000, 40))


def test_a_worker_answers_and_hears_of_no_fault(tmp_path: Path) -> None:
    with running_worker(tmp_path, token="secret") as worker:
        assert answers(worker.address.port, has_token=True, timeout_s=20.0)
        assert "failed" not in worker.log()


def test_who_only_listens_gives_no_sign_of_life() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert not answers(port, has_token=True, timeout_s=0.2)
        listener.accept()[0].close()  # the first asker's, which waited in the queue
        closer = threading.Thread(target=lambda: listener.accept()[0].close())
        closer.start()
        assert not answers(port, has_token=True, timeout_s=5.0)
        closer.join()
    assert not answers(port, has_token=True, timeout_s=0.2)


@pytest.mark.parametrize(("has_cache", "folder"), [(True, "/var/cache/duckllm"), (False, "/run/worker")])
def test_a_worker_is_told_where_it_may_write(
    monkeypatch: pytest.MonkeyPatch, has_cache: bool, folder: str
) -> None:
    started: list[dict[str, Any]] = []

    def start(command: list[str], **given: Any) -> SimpleNamespace:
        started.append(given)
        return SimpleNamespace(pid=7)

    monkeypatch.setattr(init.subprocess, "Popen", start)
    monkeypatch.setattr(init.os, "sched_setaffinity", lambda *_: None)
    node = object.__new__(init.Node)
    node._image, node._children = {"announce": False}, {}
    node._start_worker(NodeSettings(), has_cache)
    [given] = started
    assert given["env"] == {
        "HOME": "/run/worker",
        "DUCKLLM_CACHE_DIR": folder,
        "OPENBLAS_NUM_THREADS": "1",
    }
    assert (given["user"], given["group"], given["extra_groups"]) == (1000, 1000, [])


def test_a_process_may_be_called_like_a_field_of_its_status(tmp_path: Path) -> None:
    folder = tmp_path / "proc/12"
    folder.mkdir(parents=True)
    (folder / "cmdline").write_bytes(b"")
    (folder / "status").write_text("Name:\tRssAnon: x\nPid:\t12\nRssAnon:\t    3000 kB\n")
    assert describe_processes(tmp_path) == "12 [RssAnon: x] (3 MB)"
