"""``duckllm node-image serve``: what dnsmasq needs to boot nodes from the network, and dnsmasq itself.

Called by the command line. A machine asks for an address and for what to boot. By proxy DHCP the network's
own server answers the first question and this one the second: iPXE, and iPXE a script, which names kernel,
initramfs and where the settings are.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import http.server
import ipaddress
import json
import os
import re
import shlex
import shutil
import socket
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from duckllm.errors import ConfigError, DuckError, InWords
from duckllm.node_image.programs import ended_in_order
from duckllm.node_image.settings import NodeSettings

# What a machine's firmware says that it is, and what starts iPXE there (RFC 4578).
LOADERS = {"x86PC": "undionly.kpxe", "X86-64_EFI": "snponly.efi", "BC_EFI": "snponly.efi"}
SCRIPT, SETTINGS = "boot.ipxe", "node.toml"
IMAGE_FILES = ("vmlinuz", "initrd.img")
_INTERFACE = re.compile(r"[!-~]{1,15}")  # IFNAMSIZ less one, of linux/if.h
_IN_A_PATH = re.compile(r'[^,"\\#]+')  # what dnsmasq takes for a path alone
_SIOCGIFADDR, _SIOCGIFNETMASK = 0x8915, 0x891B  # of linux/sockios.h


class ServeError(DuckError):
    """dnsmasq ended, or would not start."""


@dataclass(frozen=True)
class ServeOptions:
    """What is handed out, and where.

    Args:
        image: Folder of an image.
        interface: Network interface.
        token: Cluster token for the nodes.
        host: Addresses that nodes let connect, with commas between them; empty for any.
        port: Where nodes' workers listen.
        dhcp_range: First and last address to give out, with a comma; None for proxy DHCP.
        http_port: Where to send files by HTTP; None for TFTP.
        ipxe: Folder of iPXE's boot programs.
    """

    image: Path
    interface: str
    token: str | None
    host: str = ""
    port: int = 7411
    dhcp_range: str | None = None
    http_port: int | None = None
    ipxe: Path = Path("/usr/lib/ipxe")


@dataclass(frozen=True)
class Prepared:
    """Files that are ready to be handed out.

    Args:
        config: dnsmasq's configuration.
        files: Folder of what is sent.
        address: The interface's own address.
    """

    config: Path
    files: Path
    address: str


def dnsmasq_config(options: ServeOptions, network: ipaddress.IPv4Interface, files: Path) -> str:
    """The configuration: one interface, no DNS, and boot programs by what a machine is."""
    lines = [
        "# Written by duckllm node-image serve.",
        "port=0",
        f"interface={options.interface}",
        "bind-interfaces",
        "except-interface=lo",
        "no-hosts",
        "no-resolv",
        "log-dhcp",
        "dhcp-leasefile=" + str(files.parent / "leases"),
        "enable-tftp",
        "tftp-no-fail",
        f"tftp-root={files}",
        "dhcp-match=set:ipxe,175",  # an option that iPXE alone sends
    ]
    if options.dhcp_range is None:
        lines.append(f"dhcp-range={network.network.network_address},proxy")
        lines += [
            f'pxe-service=tag:!ipxe,{kind},"duck-llm node",{loader}' for kind, loader in LOADERS.items()
        ]
        lines += [f'pxe-service=tag:ipxe,{kind},"duck-llm node",{SCRIPT}' for kind in LOADERS]
    else:
        lines += [
            f"dhcp-range={options.dhcp_range},{network.netmask},12h",
            "dhcp-match=set:efi,option:client-arch,7",
            "dhcp-match=set:efi,option:client-arch,9",
            f"dhcp-boot=tag:!ipxe,tag:!efi,{LOADERS['x86PC']}",
            f"dhcp-boot=tag:!ipxe,tag:efi,{LOADERS['X86-64_EFI']}",
            f"dhcp-boot=tag:ipxe,{SCRIPT}",
            "dhcp-option=option:ntp-server,0.0.0.0" if _serves_time() else "# no time server runs here",
        ]
    return "\n".join(lines) + "\n"


def boot_script(base: str, kernel_options: str) -> str:
    """What iPXE does: fetch kernel and initramfs, and start them; again after a moment where that fails."""
    return (
        "#!ipxe\n"
        ":start\n"
        f"kernel {base}/vmlinuz initrd=initrd.img {kernel_options} duck.config={base}/{SETTINGS}"
        " || goto again\n"
        f"initrd {base}/initrd.img || goto again\n"
        "boot || goto again\n"
        ":again\n"
        "sleep 5\n"
        "goto start\n"
    )


def node_settings(options: ServeOptions) -> str:
    """The node.toml that nodes fetch.

    Raises:
        ConfigError: There is no token, or a setting is wrong.
    """
    if options.token is None:
        raise ConfigError("cluster_token", None, "a token for the nodes", "--token-file FILE")
    settings = NodeSettings(token=options.token, host=options.host, port=options.port)
    lines = [f"token = {_toml_text(settings.token)}", f"port = {settings.port}"]
    if settings.host:
        lines.append(f"host = {_toml_text(settings.host)}")
    return "\n".join(lines) + "\n"


def _toml_text(text: str) -> str:
    """Text as TOML has it: as JSON, but characters beyond 16 bits are not written as two."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def interface_address(interface: str) -> ipaddress.IPv4Interface:
    """An interface's own IPv4 address with its network.

    Raises:
        ConfigError: There is no such interface, or it has none.
    """
    if not _INTERFACE.fullmatch(interface):
        raise ConfigError("interface", interface, "the name of a network interface")
    name = struct.pack("256s", interface.encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            address, mask = (
                socket.inet_ntoa(fcntl.ioctl(asked, request, name)[20:24])
                for request in (_SIOCGIFADDR, _SIOCGIFNETMASK)
            )
        except OSError as error:
            raise ConfigError(
                "interface", interface, f"a network interface with an IPv4 address ({error.strerror})"
            ) from None
    return ipaddress.IPv4Interface(f"{address}/{mask}")


def prepare(options: ServeOptions, folder: Path) -> Prepared:
    """Writes everything that is handed out, and dnsmasq's configuration, into a folder.

    Raises:
        ConfigError: Something that is named is not there, or a setting is wrong.
    """
    network = interface_address(options.interface)
    address = str(network.ip)
    _check_range(options.dhcp_range, network)
    if options.http_port is not None and not 1 <= options.http_port <= 65535:
        raise ConfigError("http_port", options.http_port, "1 to 65535")
    for path in (*(options.image / name for name in (*IMAGE_FILES, "image.json")),):
        if not path.is_file():
            raise ConfigError(
                "image", str(options.image), f"a folder with {path.name}", "duckllm node-image build"
            )
    for loader in sorted(set(LOADERS.values())):
        if not (options.ipxe / loader).is_file():
            raise ConfigError("ipxe", str(options.ipxe), f"a folder with {loader}", "apt-get install ipxe")
    settings = node_settings(options)
    kernel_options = _kernel_options(options.image / "image.json")
    base = f"tftp://{address}" if options.http_port is None else f"http://{address}:{options.http_port}"
    files = folder.absolute() / "files"
    if not (_IN_A_PATH.fullmatch(str(files)) and str(files).isprintable()):
        raise ConfigError("write_only", str(folder), "a path without commas, quotes, \\ and #, for dnsmasq")
    files.mkdir(parents=True, exist_ok=True)
    for source in [
        *(options.image / name for name in IMAGE_FILES),
        *(options.ipxe / name for name in LOADERS.values()),
    ]:
        shutil.copyfile(source, files / source.name)
    (files / SCRIPT).write_text(boot_script(base, kernel_options), encoding="utf-8")
    (files / SETTINGS).write_text(settings, encoding="utf-8")
    files.chmod(0o755)  # dnsmasq reads as a user of its own, whatever this one's umask
    for name in (*IMAGE_FILES, *LOADERS.values(), SCRIPT, SETTINGS):
        (files / name).chmod(0o644)
    config = folder.absolute() / "dnsmasq.conf"
    config.write_text(dnsmasq_config(options, network, files), encoding="utf-8")
    return Prepared(config, files, address)


def commands(prepared: Prepared, http_port: int | None) -> list[str]:
    """How to start by hand what :func:`run` starts, as lines for a shell."""
    lines = [shlex.join(["dnsmasq", "--keep-in-foreground", f"--conf-file={prepared.config}"])]
    if http_port is not None:
        where = ["--bind", prepared.address, "--directory", str(prepared.files)]
        lines.append(shlex.join(["python3", "-m", "http.server", str(http_port), *where]))
    return lines


def _kernel_options(path: Path) -> str:
    expected = "what duckllm node-image build wrote"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["kernel_options"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ConfigError("image", str(path), expected) from None
    if not isinstance(found, str) or not found.isprintable():
        raise ConfigError("image", str(path), expected)
    return found


def run(options: ServeOptions, tell: Callable[[str], None]) -> None:
    """Hands the image out until SIGINT, SIGTERM or SIGHUP.

    Raises:
        ConfigError: As :func:`prepare`, or dnsmasq is not installed.
        ServeError: dnsmasq ended by itself.
    """
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    program = shutil.which("dnsmasq", path=path)
    if program is None:
        raise ConfigError(
            "dnsmasq", InWords("no such program"), "it installed", "apt-get install dnsmasq-base"
        )
    with ended_in_order(), tempfile.TemporaryDirectory(prefix="duckllm-boot-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # dnsmasq reads as a user of its own
        prepared = prepare(options, folder)
        with _serving_http(prepared, options.http_port):
            command = [program, "--keep-in-foreground", "--log-facility=-", f"--conf-file={prepared.config}"]
            tell(f"nodes boot from {prepared.address} on {options.interface}; Ctrl-C stops it")
            if is_way_out(options.interface):
                tell(
                    f"warning: {options.interface} leads to other networks too: what boots from it there "
                    "becomes a node, and whoever asks gets the token"
                )
            child = subprocess.Popen(command)
            stopped = False
            try:
                status = child.wait()
            except (KeyboardInterrupt, SystemExit):
                stopped = True
                child.terminate()
                status = child.wait()
    if status != 0 and not stopped:
        raise ServeError(f"dnsmasq ended with exit status {status}; what it said is above")


class _Handler(http.server.SimpleHTTPRequestHandler):
    """Sends the files that are there, and shows no folders."""

    def list_directory(self, path: str | os.PathLike[str]) -> None:
        """Refuses."""
        self.send_error(404)


@contextlib.contextmanager
def _serving_http(prepared: Prepared, port: int | None) -> Iterator[None]:
    if port is None:
        yield
        return
    handler = functools.partial(_Handler, directory=str(prepared.files))
    try:
        server = http.server.ThreadingHTTPServer((prepared.address, port), handler)
    except OSError as error:
        raise ConfigError("http_port", port, f"a port that is free ({error.strerror})") from None
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield
        finally:
            server.shutdown()


def _check_range(text: str | None, network: ipaddress.IPv4Interface) -> None:
    if text is None:
        return
    expected = f"two addresses of {network.network} with a comma between them"
    try:
        first, last = map(ipaddress.IPv4Address, text.split(","))
    except ValueError:
        raise ConfigError("range", text, expected) from None
    if first not in network.network or last not in network.network or first > last:
        raise ConfigError("range", text, expected)


def is_way_out(interface: str, root: Path = Path("/")) -> bool:
    """Whether the default route leads through it: then it may be no network of the cluster's own."""
    table = root / "proc/net/route"
    rows = [line.split() for line in table.read_text().splitlines()[1:]] if table.exists() else []
    return any(row[0] == interface and row[1] == row[7] == "00000000" for row in rows if len(row) > 7)


def _serves_time() -> bool:
    """Whether something here answers on the port of NTP."""
    table = Path("/proc/net/udp")
    return table.exists() and any(
        line.split()[1].endswith(":007B") for line in table.read_text().splitlines()[1:]
    )
