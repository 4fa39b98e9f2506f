"""Workers and the ways to them: facts of real and fake ones, and what they mean."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_doctor_machine import GOOD
from typer.testing import CliRunner

import duckllm
from duckllm import _native
from duckllm._native import FrameType
from duckllm.cli.main import app
from duckllm.cluster.connect import THIS_MACHINE, WorkerInfo
from duckllm.cluster.survey import RoundTrip
from duckllm.doctor import examine as examine_module
from duckllm.doctor.examine import said_here
from duckllm.doctor.finding import Finding, Unknown
from duckllm.doctor.link_checks import check_flock, check_worker
from duckllm.doctor.link_facts import (
    STEP_BYTES,
    Interface,
    LinkFacts,
    WorkerFacts,
    find_interface,
    find_route,
    gather_worker,
    read_interface,
)
from duckllm.errors import (
    AuthenticationError,
    ClusterError,
    ConfigError,
    ProtocolError,
    ProtocolVersionError,
    WorkerUnavailableError,
)
from worker_harness import fake_worker, frame, running_worker

GIB = 1 << 30
INFO = WorkerInfo("10.0.0.1:7411", "avx2", duckllm.__version__, 4, 7, 16 * GIB, 14 * GIB, 33.0, 0.01, 0.0002)
LINK = LinkFacts(
    beyond_loopback=True,
    interface=Interface("eth0", 9000, 2500, "full", False),
    path_mtu=9000,
    segment_bytes=8948,
    retransmit_us=5000,
    congestion="cubic",
    options="TCP, cubic, retransmits after 5 ms at the least",
    route="10.0.0.0/24 dev eth0",
    has_rto_setting=False,
)
FAST = RoundTrip(0, (50.0, 60.0, 70.0))
FACTS = WorkerFacts("10.0.0.1:7411", None, None, INFO, LINK, FAST, RoundTrip(28_688, (90.0, 95.0, 99.0)))
CHALLENGE = frame(FrameType.AUTH_CHALLENGE, _native.encode_auth_payload(False, bytes(32)))
HELLO = {"isa": "avx2", "build": duckllm.__version__, "threads": 2, "pid": 7, "memory_bytes": 16 * GIB}


def finding(facts: WorkerFacts, check: str) -> Finding:
    [found] = [each for each in check_worker(facts) if each.check.startswith(check)]
    return found


def test_a_good_worker_has_nothing_to_change() -> None:
    findings = check_worker(FACTS)
    assert {each.status for each in findings} == {"ok"}
    assert not any(each.advice for each in findings)
    assert finding(FACTS, "MTU").found == "9000 by eth0; a step of one token is 4 packets"
    assert finding(FACTS, "round trip, 29 kB").found == "95 us, 99 of 100 within 99 us"


@pytest.mark.parametrize(
    ("check", "changes", "status", "found", "advice"),
    [
        ("version", {"build": "0.0.9"}, "warning", "0.0.9, and", "install the same version"),
        ("memory", {"available_bytes": 7 * GIB}, "warning", "7.0 of 16.0 GiB", "ps aux"),
        ("memory", {"available_bytes": None}, "unknown", "older build", ""),
        ("speed", {"read_gb_per_s": None}, "warning", "says no memory speed", "--speed"),
        ("speed", {"isa": "scalar"}, "warning", "scalar, 4 threads, 33.0", "unset DUCK_FORCE_ISA"),
        ("clock", {"clock_offset_s": -3.5}, "warning", "-3.500 s from here", "timedatectl"),
        ("clock", {"clock_offset_s": 3.5, "clock_error_s": 4.0}, "ok", "to 4000.0 ms", ""),
        ("clock", {"clock_offset_s": None}, "unknown", "older build", ""),
    ],
)
def test_what_a_worker_says(
    check: str, changes: dict[str, Any], status: str, found: str, advice: str
) -> None:
    got = finding(replace(FACTS, info=replace(INFO, **changes)), check)
    assert (got.status, bool(got.advice)) == (status, bool(advice))
    assert found in got.found
    assert advice in got.advice


ETH = LINK.interface
assert isinstance(ETH, Interface)


@pytest.mark.parametrize(
    ("check", "changes", "status", "found", "advice"),
    [
        (
            "MTU",
            {"path_mtu": 1500, "interface": replace(ETH, mtu=1500)},
            "ok",
            "1500 by eth0",
            "eth0 mtu 9000",
        ),
        ("MTU", {"path_mtu": 1400}, "warning", "eth0 has 9000", "tracepath 10.0.0.1"),
        ("MTU", {"path_mtu": Unknown("not supported")}, "unknown", "not supported", ""),
        ("link", {"interface": replace(ETH, mbit_per_s=100)}, "warning", "100 Mbit/s", "ethtool eth0"),
        ("link", {"interface": replace(ETH, duplex="half")}, "warning", "half duplex", "ethtool eth0"),
        ("link", {"interface": replace(ETH, is_wireless=True)}, "warning", "wireless", "cable"),
        ("link", {"interface": replace(ETH, mbit_per_s=Unknown("x"))}, "unknown", "eth0: x", ""),
        ("link", {"interface": Unknown("none has it")}, "unknown", "none has it", ""),
        (
            "retransmission",
            {"retransmit_us": 204_000},
            "warning",
            "204 ms",
            "sudo ip route change 10.0.0.0/24 dev eth0 rto_min 1ms",
        ),
        (
            "retransmission",
            {"retransmit_us": 204_000, "has_rto_setting": True},
            "warning",
            "204 ms",
            "sysctl -w net.ipv4.tcp_rto_min_us=1000",
        ),
        ("retransmission", {"retransmit_us": Unknown("x")}, "unknown", "x", ""),
        ("TCP congestion", {"congestion": "bbr"}, "warning", "bbr", "cubic"),
    ],
)
def test_what_the_way_is(check: str, changes: dict[str, Any], status: str, found: str, advice: str) -> None:
    got = finding(replace(FACTS, link=replace(LINK, **changes)), check)
    assert (got.status, bool(got.advice)) == (status, bool(advice))
    assert found in got.found
    assert advice in got.advice


def test_on_loopback_no_link_is_looked_at() -> None:
    facts = replace(FACTS, link=replace(LINK, beyond_loopback=False, retransmit_us=204_000, path_mtu=1400))
    assert {each.check for each in check_worker(facts)}.isdisjoint({"link", "retransmission"})
    assert finding(facts, "MTU").status == "ok"


@pytest.mark.parametrize(
    ("samples", "status"),
    [
        ((900.0,), "ok"),
        ((1100.0,), "warning"),
        ((50.0, 60.0, 6000.0), "warning"),
        ((50.0, 60.0, 4000.0), "ok"),
    ],
)
def test_slow_round_trips(samples: tuple[float, ...], status: str) -> None:
    assert finding(replace(FACTS, small=RoundTrip(0, samples)), "round trip, empty").status == status


@pytest.mark.parametrize(
    ("error", "cause", "check", "advice"),
    [
        (WorkerUnavailableError("x"), ConnectionRefusedError(), "port", "--listen 0.0.0.0:7411"),
        (WorkerUnavailableError("no answer within 5 s"), TimeoutError(), "port", "firewall"),
        (WorkerUnavailableError("w did not answer within 5 s"), TimeoutError(), "port", "is it stopped"),
        (WorkerUnavailableError("x"), socket.gaierror(), "port", "getent hosts 10.0.0.1"),
        (WorkerUnavailableError("busy: 8 connections"), None, "port", "too many connections"),
        (WorkerUnavailableError("x"), OSError(), "port", "ip route get 10.0.0.1"),
        (AuthenticationError("x"), None, "token", "--token-file token"),
        (ProtocolVersionError("x"), None, "version", "install the same version"),
        (ProtocolError("x"), None, "port", "sport = :7411"),
    ],
)
def test_a_worker_that_does_not_answer(
    error: ClusterError, cause: BaseException | None, check: str, advice: str
) -> None:
    [found] = check_worker(WorkerFacts("10.0.0.1:7411", error, cause))
    assert (found.check, found.status, found.found) == (check, "problem", str(error))
    assert advice in found.advice


def test_a_flock_of_two_kinds() -> None:
    info = replace(INFO, address="10.0.0.2:7411")
    other = replace(FACTS, info=replace(info, isa="avx512+amx_bf16", read_gb_per_s=70.0))
    isas, speeds = check_flock([FACTS, other])
    assert isas.status == "warning"
    assert "avx2 and avx512, which round differently" in isas.found
    assert speeds.found == "33.0 to 70.0 GB/s, 103.0 together; shares auto follow them"
    isas, speeds = check_flock([FACTS, replace(other, info=replace(info, read_gb_per_s=34.0))])
    assert (isas.status, isas.found) == ("ok", "avx2")
    assert speeds.found.endswith("shares auto are even")
    assert check_flock([FACTS, WorkerFacts("b:1", ClusterError("x"))]) == []
    _, speeds = check_flock([FACTS, replace(other, info=replace(INFO, read_gb_per_s=35.0))])
    assert speeds.found.startswith("16.5 to 17.5 GB/s, 34.0 together")
    assert speeds.found.endswith("workers on one machine divide its speed")


def test_workers_here_are_those_whose_speed_this_machine_has() -> None:
    here = replace(INFO, reached_at=THIS_MACHINE, threads=2)
    silent = replace(here, read_gb_per_s=None)
    assert said_here([INFO, here, silent, replace(INFO, reached_at="10.0.0.1")]) == ((33.0, 2),)


def test_interfaces_and_routes(tmp_path: Path) -> None:
    folder = tmp_path / "sys/class/net/eth0"
    (folder / "wireless").mkdir(parents=True)
    for name, content in {"mtu": "9000\n", "speed": "-1\n", "duplex": "full\n"}.items():
        (folder / name).write_text(content)
    expected = Interface("eth0", 9000, Unknown("the driver does not say"), "full", True)
    assert read_interface("eth0", tmp_path) == expected
    (folder / "speed").write_text("2500\n")
    assert read_interface("eth0", tmp_path).mbit_per_s == 2500
    assert isinstance(read_interface("eth1", tmp_path).mtu, Unknown)
    (tmp_path / "proc/net").mkdir(parents=True)
    (tmp_path / "proc/net/route").write_text(
        "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n"
        "eth0 00000000 0100000A 0003 0 0 0 00000000 0 0 0\n"
        "eth0 0000000A 00000000 0001 0 0 0 00FFFFFF 0 0 0\nodd line\n"
    )
    assert find_route("10.0.0.7", tmp_path) == "10.0.0.0/24 dev eth0"
    assert find_route("192.168.1.7", tmp_path) == "default via 10.0.0.1 dev eth0"
    assert find_route("::1", tmp_path) is None
    assert find_route("10.0.0.7", tmp_path / "none") is None
    assert find_interface("127.0.0.1") == find_interface("::ffff:127.0.0.1") == "lo"
    (tmp_path / "proc/net/if_inet6").write_text("fe80000000000000000000000000000a 02 40 20 80 eth0\n")
    assert find_interface("fe80::a%eth0", tmp_path) == "eth0"
    with pytest.raises(OSError, match=r"no interface has 203\.0\.113\.9"):
        find_interface("203.0.113.9")


def test_a_real_worker_and_the_way_to_it(tmp_path: Path) -> None:
    with running_worker(tmp_path, "--speed", "12", token="t") as worker:
        facts = gather_worker(worker.address, "t")
        wrong = gather_worker(worker.address, "u")
    assert facts.error is None
    assert facts.info is not None
    assert facts.info.read_gb_per_s == 12
    assert facts.small is not None
    assert facts.step is not None
    assert len(facts.small.samples_us) > 1
    assert facts.step.num_bytes == STEP_BYTES == 28_752
    assert 0 < facts.small.samples_us[0] <= facts.small.median_us <= facts.small.p99_us
    assert facts.link is not None
    assert not facts.link.beyond_loopback
    assert isinstance(facts.link.interface, Interface)
    assert facts.link.interface.name == "lo"
    [found] = check_worker(wrong)
    assert (found.check, found.status) == ("token", "problem")
    refused = gather_worker(worker.address, "t")
    assert isinstance(refused.cause, ConnectionRefusedError)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"isa": "avx2\x1b[2J"}, "got 'avx2\\x1b[2J', expected a printable text"),
        ({"read_gb_per_s": 1e300}, "read_gb_per_s"),
        ({"unix_time_s": -1}, "unix_time_s"),
    ],
)
def test_a_worker_that_says_nonsense_is_a_problem(change: dict[str, Any], words: str) -> None:
    hello = frame(FrameType.HELLO, json.dumps(HELLO | change).encode())
    with fake_worker(CHALLENGE, hello) as address:
        [found] = check_worker(gather_worker(address, None))
    assert (found.check, found.status) == ("port", "problem")
    assert words in found.found


def test_a_worker_of_an_older_build() -> None:
    refusal = _native.encode_error_frame(_native.ErrorCode.PROTOCOL, "frame type: got 13, expected 1 to 12")
    with fake_worker(CHALLENGE, frame(FrameType.HELLO, json.dumps(HELLO).encode()), refusal) as address:
        findings = check_worker(gather_worker(address, None))
    assert findings[0].status == "problem"
    assert "or an older one" in findings[0].advice
    assert {each.status for each in findings if each.check in ("memory", "clock")} == {"unknown"}


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["doctor", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine_module, "gather_machine", lambda: replace(GOOD, huge_pages="never"))
    code, out = run("--json")
    facts = json.loads(out)
    assert (code, facts["problems"], facts["warnings"]) == (0, 0, 1)
    assert [each["check"] for each in facts["findings"]][:2] == ["CPU", "cores"]
    code, out = run()
    assert code == 0
    advice = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
    assert f"this machine, huge pages: {advice}\n" in out  # whole, on one line
    assert "0 problems, 1 warning, 0 unknown" in out
    with running_worker(tmp_path, "--speed", "9") as worker:
        code, out = run("--workers", f"{worker.address},127.0.0.1:1", "--json")
    findings = json.loads(out)["findings"]
    assert code == 1
    assert [each["where"] for each in findings if each["status"] == "problem"] == ["127.0.0.1:1"]
    assert {"port", "speed", "clock", "MTU"} <= {
        each["check"] for each in findings if each["where"] == str(worker.address)
    }


@pytest.mark.parametrize("workers", ["3", "nonsense", "a:1,b"])
def test_workers_are_addresses(workers: str) -> None:
    with pytest.raises(ConfigError, match="workers: got"):
        run("--workers", workers)
