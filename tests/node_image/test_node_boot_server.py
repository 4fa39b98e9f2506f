"""Network boot: what dnsmasq is told, what nodes fetch, and that nothing is served by default."""

from __future__ import annotations

import ipaddress
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from duckllm.errors import ConfigError
from duckllm.node_image import serve
from duckllm.node_image.serve import (
    ServeOptions,
    boot_script,
    commands,
    dnsmasq_config,
    interface_address,
    is_way_out,
    prepare,
)
from duckllm.node_image.settings import merge, read_command_line, read_file

NETWORK = ipaddress.IPv4Interface("10.0.0.1/24")


@pytest.fixture
def options(tmp_path: Path) -> ServeOptions:
    image, ipxe = tmp_path / "image", tmp_path / "ipxe"
    for folder, names in ((image, ("vmlinuz", "initrd.img")), (ipxe, ("undionly.kpxe", "snponly.efi"))):
        folder.mkdir()
        for name in names:
            (folder / name).write_text(name)
    (image / "image.json").write_text(json.dumps({"kernel_options": "quiet panic=10"}))
    return ServeOptions(image, "lo", "the token", host="10.0.0.1", ipxe=ipxe)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def changed(options: ServeOptions, **fields: object) -> ServeOptions:
    return ServeOptions(**(vars(options) | fields))  # type: ignore[arg-type]


def test_proxy_dhcp_gives_no_addresses_and_serves_one_interface(
    options: ServeOptions, tmp_path: Path
) -> None:
    lines = dnsmasq_config(options, NETWORK, tmp_path).splitlines()
    assert [line for line in lines if line.startswith("dhcp-range")] == ["dhcp-range=10.0.0.0,proxy"]
    assert {"port=0", "interface=lo", "bind-interfaces", "enable-tftp"} <= set(lines)
    assert 'pxe-service=tag:!ipxe,x86PC,"duck-llm node",undionly.kpxe' in lines
    assert 'pxe-service=tag:ipxe,X86-64_EFI,"duck-llm node",boot.ipxe' in lines


def test_a_range_makes_it_the_dhcp_server(options: ServeOptions, tmp_path: Path) -> None:
    text = dnsmasq_config(changed(options, dhcp_range="10.0.0.5,10.0.0.9"), NETWORK, tmp_path)
    assert "dhcp-range=10.0.0.5,10.0.0.9,255.255.255.0,12h\n" in text
    assert "proxy" not in text


@pytest.mark.parametrize("dhcp_range", [None, "127.0.0.5,127.0.0.9"])
def test_dnsmasq_takes_the_configuration(
    options: ServeOptions, tmp_path: Path, dhcp_range: str | None
) -> None:
    program = shutil.which("dnsmasq", path="/usr/sbin:/usr/bin:/sbin")
    if program is None:
        pytest.skip("needs dnsmasq")
    prepared = prepare(changed(options, dhcp_range=dhcp_range), tmp_path / "served")
    done = subprocess.run(
        [program, "--test", f"--conf-file={prepared.config}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_what_is_sent_is_what_a_node_reads(options: ServeOptions, tmp_path: Path) -> None:
    prepared = prepare(changed(options, http_port=8069, port=7500), tmp_path / "served")
    names = {path.name for path in prepared.files.iterdir()}
    assert names == {"vmlinuz", "initrd.img", "undionly.kpxe", "snponly.efi", "boot.ipxe", "node.toml"}
    [line] = [line for line in (prepared.files / "boot.ipxe").read_text().splitlines() if "kernel" in line]
    assert "the token" not in line
    said = merge(read_command_line(line.partition("||")[0]))
    assert said.config == "http://127.0.0.1:8069/node.toml"
    settings = merge(read_file((prepared.files / "node.toml").read_text(), "node.toml"))
    assert (settings.token, settings.host, settings.port) == ("the token", "10.0.0.1", 7500)


def test_the_script_tries_again_where_a_file_does_not_come() -> None:
    lines = boot_script("tftp://10.0.0.1", "quiet").splitlines()
    assert lines[0] == "#!ipxe"
    assert all(
        line.endswith("|| goto again") for line in lines if line.startswith(("kernel", "initrd", "boot"))
    )


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"interface": "no-such-card"}, "interface"),
        ({"token": None}, "cluster_token"),
        ({"host": "my.host"}, "host"),
        ({"image": Path("/nowhere")}, "image"),
        ({"ipxe": Path("/nowhere")}, "ipxe"),
        ({"dhcp_range": "127.0.0.9,127.0.0.5"}, "range"),
        ({"dhcp_range": "10.0.0.5,10.0.0.9"}, "range"),
        ({"dhcp_range": "127.0.0.5"}, "range"),
        ({"http_port": 0}, "http_port"),
        ({"interface": "lo\nenable-ra"}, "interface"),
        ({"interface": "lo\0"}, "interface"),
        ({"interface": "l" * 16}, "interface"),
        ({"token": " "}, "token"),
    ],
)
def test_mistakes_are_named_before_anything_is_written(
    options: ServeOptions, tmp_path: Path, fields: dict[str, object], named: str
) -> None:
    with pytest.raises(ConfigError) as error:
        prepare(changed(options, **fields), tmp_path / "served")
    assert error.value.field == named
    assert not (tmp_path / "served").exists()


@pytest.mark.parametrize(
    "content",
    ["{", "[]", "{}", '{"kernel_options": 1}', '{"kernel_options": "quiet\\nshell"}', "[" * 9999, "\udc80"],
    ids=range(7),
)
def test_facts_of_an_image_that_no_build_wrote(options: ServeOptions, tmp_path: Path, content: str) -> None:
    (options.image / "image.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match="what duckllm node-image build wrote"):
        prepare(options, tmp_path / "served")


@pytest.mark.parametrize("name", ["a,b", "a #b", 'a"b', "a\\b", "a\nb"])
def test_a_folder_that_dnsmasq_would_misread(options: ServeOptions, tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError) as error:
        prepare(options, tmp_path / name)
    assert error.value.field == "write_only"
    assert not (tmp_path / name).exists()


def test_another_user_reads_what_is_sent(options: ServeOptions, tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        prepared = prepare(options, tmp_path / "served")
    finally:
        os.umask(before)
    assert prepared.files.stat().st_mode & 0o777 == 0o755
    assert {path.stat().st_mode & 0o777 for path in prepared.files.iterdir()} == {0o644}


def test_a_node_reads_every_token_as_it_was_given(options: ServeOptions, tmp_path: Path) -> None:
    token = "\N{DUCK} \x7f\"\\\n\t\x01'''host = 1 \u2028 #\xe9"
    prepared = prepare(changed(options, token=token), tmp_path / "served")
    text = (prepared.files / "node.toml").read_bytes().decode("utf-8")
    assert read_file(text, "node.toml") == {"token": token, "port": 7411, "host": "10.0.0.1"}


def test_by_hand_it_is_started_by_lines_for_a_shell(options: ServeOptions, tmp_path: Path) -> None:
    prepared = prepare(options, tmp_path / "with space")
    [dnsmasq] = commands(prepared, None)
    assert shlex.split(dnsmasq)[-1] == f"--conf-file={tmp_path}/with space/dnsmasq.conf"
    assert commands(prepared, 8069)[0] == dnsmasq
    words = shlex.split(commands(prepared, 8069)[1])
    assert words[:4] == ["python3", "-m", "http.server", "8069"]
    assert words[4:] == ["--bind", "127.0.0.1", "--directory", str(prepared.files)]


def test_http_sends_files_and_shows_no_folder(options: ServeOptions, tmp_path: Path) -> None:
    port = free_port()
    prepared = prepare(changed(options, http_port=port), tmp_path / "served")
    with serve._serving_http(prepared, port):
        at = f"http://127.0.0.1:{port}/"
        with urllib.request.urlopen(at + "vmlinuz", timeout=20) as reply:
            assert reply.read() == b"vmlinuz"
        for name in ("", "../dnsmasq.conf", "nothing"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(at + name, timeout=20)


def test_an_interface_must_be_named() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "duckllm", "node-image", "serve", "image"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "--interface" in done.stderr


def test_the_way_to_other_networks_is_known(tmp_path: Path) -> None:
    table = tmp_path / "proc/net/route"
    assert not is_way_out("eth0", tmp_path)
    table.parent.mkdir(parents=True)
    table.write_text(
        "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
        "eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"
        "eth1\t00000A0A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"
    )
    assert [name for name in ("eth0", "eth1", "eth") if is_way_out(name, tmp_path)] == ["eth0"]


def test_loopback_has_its_address() -> None:
    assert interface_address("lo") == ipaddress.IPv4Interface("127.0.0.1/8")
