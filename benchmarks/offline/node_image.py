"""Two nodes booted from the image in QEMU: one from the network, one from a USB disk, and what they do.

    sudo python benchmarks/offline/node_image.py IMAGE

Makes network namespaces of its own, with a bridge, a DHCP server as a network has one, and ``duckllm
node-image serve`` beside it; boots one machine by PXE and one by UEFI from usb.img, with a disk labelled for
weights. Then it

1. verifies that the demo model's answers through both are those of two workers of this machine, to the token,
2. resets each machine in the middle of an answer, and verifies the tokens of that answer,
3. verifies that a host with another token or address is refused, that a machine without a token does not
   join, and that consoles say why,
4. tries every TCP port of both machines,
5. prints what the consoles said of time, memory, processes and ports, and one JSON line.

IMAGE is what ``duckllm node-image build`` wrote. Machines have one virtual CPU and are emulated
(``--accel tcg``) unless KVM is asked for; times are those of an emulated CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

TOKEN = "c0ffee" * 8
NET = "10.77.0"
QUESTIONS = ("What is a duck?", "What is a swan?", "Is 1001 prime?", "Is 97 prime?")
RESET_AFTER = 16  # tokens
OPTIONS: dict[str, Any] = {"lanes": "off", "draft": "off", "max_model_len": 256, "shares": "even"}
PATIENT: dict[str, Any] = {"worker_silence_s": 10.0, "worker_timeout_s": 400.0, "connect_timeout_s": 30.0}
OVMF = (Path("/usr/share/OVMF/OVMF_CODE_4M.fd"), Path("/usr/share/OVMF/OVMF_VARS_4M.fd"))


def need(what: bool, text: str) -> None:
    if not what:
        raise SystemExit(f"not as expected: {text}")


def call(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


class Machine:
    """A virtual machine on a tap of its own."""

    def __init__(
        self, stack: ExitStack, folder: Path, name: str, number: int, options: list[str], args: Any
    ) -> None:
        self.name, self.log, self._control = name, folder / f"{name}.console", folder / f"{name}.qmp"
        self._keyboard = folder / f"{name}.serial"
        tap = f"tap{number}"
        call("ip", "tuntap", "add", tap, "mode", "tap")
        call("ip", "link", "set", tap, "master", "br0", "up")
        command = ["qemu-system-x86_64", "-machine", f"q35,accel={args.accel}", "-cpu", args.cpu, "-smp", "1"]
        command += ["-m", str(args.memory), "-display", "none", "-vga", "std", "-monitor", "none"]
        serial = f"socket,id=serial,path={self._keyboard},server=on,wait=off,logfile={self.log}"
        command += ["-chardev", serial, "-serial", "chardev:serial"]
        command += ["-qmp", f"unix:{self._control},server=on,wait=off"]
        command += ["-device", "i6300esb", "-netdev", f"tap,id=net,ifname={tap},script=no,downscript=no"]
        command += ["-device", f"virtio-net-pci,netdev=net,mac=52:54:00:77:00:{number:02x}", *options]
        self.started = time.monotonic()
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        stack.callback(self.process.wait)
        stack.callback(self.process.kill)

    def text(self) -> str:
        """What the console has said."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def wait_for(self, text: str, times: int = 1, limit_s: float = 420.0) -> float:
        """Waits until the console has said it so often; seconds since it was called."""
        began = time.monotonic()
        while self.text().count(text) < times:
            need(self.process.poll() is None, f"{self.name}: QEMU ended")
            if time.monotonic() - began > limit_s:
                print(self.text()[-3000:], file=sys.stderr)
                raise SystemExit(f"{self.name}: the console did not say {text!r} within {limit_s:g} s")
            time.sleep(0.1)
        return time.monotonic() - began

    def reset(self) -> None:
        """As the machine's reset button."""
        with socket.socket(socket.AF_UNIX) as control:
            control.connect(str(self._control))
            file = control.makefile("rw")
            for command in ("qmp_capabilities", "system_reset"):
                file.readline()
                file.write(json.dumps({"execute": command}) + "\n")
                file.flush()
            file.readline()

    def type(self, line: str) -> None:
        """A line for the shell of an image that has one."""
        with socket.socket(socket.AF_UNIX) as keyboard:
            keyboard.connect(str(self._keyboard))
            keyboard.sendall(line.encode() + b"\n")
            time.sleep(1.0)

    def address(self) -> str:
        """The address that it said it has."""
        return re.findall(r"node: \w+ has ([0-9.]+)/", self.text())[-1]

    def said(self, beginning: str) -> str:
        """The last line of the console that begins so, without its beginning."""
        lines = [line for line in self.text().splitlines() if line.startswith(beginning)]
        need(bool(lines), f"{self.name}: no line {beginning!r}")
        return lines[-1].removeprefix(beginning)


def open_tcp_ports(address: str) -> list[int]:
    """Every TCP port of a machine that takes a connection."""
    found = []
    for port in range(1, 65536):
        with socket.socket() as tried:
            tried.settimeout(5.0)
            if tried.connect_ex((address, port)) == 0:
                found.append(port)
    return found


def bridge() -> None:
    """The network of the machines, and this one's two addresses in it."""
    call("ip", "link", "set", "lo", "up")
    call("ip", "link", "add", "br0", "type", "bridge")
    call("ip", "addr", "add", f"{NET}.1/24", "dev", "br0")
    call("ip", "addr", "add", f"{NET}.3/24", "dev", "br0")
    call("ip", "link", "set", "br0", "up")


def network(stack: ExitStack, folder: Path, image: Path) -> None:
    """The bridge, a DHCP server in a namespace of its own, and what hands the image out."""
    bridge()
    server = f"duckdhcp{os.getpid()}"
    call("ip", "netns", "add", server)
    stack.callback(subprocess.run, ["ip", "netns", "del", server], check=False)
    call("ip", "link", "add", "toserver", "type", "veth", "peer", "name", "eth0", "netns", server)
    call("ip", "link", "set", "toserver", "master", "br0", "up")
    inside = ["ip", "netns", "exec", server]
    call(*inside, "ip", "addr", "add", f"{NET}.2/24", "dev", "eth0")
    call(*inside, "ip", "link", "set", "eth0", "up")
    dhcp = ["dnsmasq", "--keep-in-foreground", "--conf-file=/dev/null", "--port=0", "--interface=eth0"]
    dhcp += [f"--dhcp-range={NET}.50,{NET}.99,1h", f"--dhcp-leasefile={folder}/leases", "--log-facility=-"]
    token = folder / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    serve = [sys.executable, "-m", "duckllm", "node-image", "serve", str(image), "--interface", "br0"]
    serve += ["--token-file", str(token), "--host", f"{NET}.1", "--http-port", "8069"]
    for name, command in (("dhcp", [*inside, *dhcp]), ("serve", serve)):
        child = subprocess.Popen(command, stderr=(folder / f"{name}.log").open("w"), stdin=subprocess.DEVNULL)
        stack.callback(child.wait)
        stack.callback(child.terminate)


def usb(folder: Path, image: Path) -> Path:
    """A copy of the USB form with settings in it, as a user writes them."""
    disk = folder / "usb.img"
    shutil.copyfile(image / "usb.img", disk)
    settings = folder / "node.toml"
    settings.write_text(f'token = "{TOKEN}"\nhost = "{NET}.1"\n')
    call("mcopy", "-o", "-i", f"{disk}@@1048576", str(settings), "::node.toml")
    return disk


def cache_disk(folder: Path) -> Path:
    disk = folder / "cache.img"
    with disk.open("wb") as file:
        file.truncate(256 << 20)
    call("mke2fs", "-q", "-t", "ext4", "-L", "DUCKCACHE", str(disk))
    return disk


def inside(args: Any) -> None:
    """All of it, in the namespace."""
    from duckllm import LLM, SamplingParams
    from duckllm.bench.machine import commit, cpu_name
    from duckllm.errors import AuthenticationError

    greedy = SamplingParams(temperature=0, max_tokens=64)

    def answers(llm: Any) -> list[list[int]]:
        asked = [[{"role": "user", "content": question}] for question in QUESTIONS]
        return [list(output.outputs[0].token_ids) for output in llm.chat(asked, greedy)]

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="duckllm-nodes-")))
        folder.chmod(0o755)
        network(stack, folder, args.image)
        with LLM(workers=2, **OPTIONS) as llm:
            expected = answers(llm)
        code, variables = OVMF
        shutil.copyfile(variables, folder / "vars.fd")
        pxe = Machine(stack, folder, "pxe", 1, ["-boot", "n"], args)
        firmware = ["-drive", f"if=pflash,format=raw,readonly=on,file={code}"]
        firmware += ["-drive", f"if=pflash,format=raw,file={folder / 'vars.fd'}"]
        disks = [
            "-device",
            "qemu-xhci",
            "-drive",
            f"if=none,id=usb,format=raw,file={usb(folder, args.image)}",
        ]
        disks += ["-device", "usb-storage,drive=usb,bootindex=0"]
        disks += ["-drive", f"if=virtio,format=raw,file={cache_disk(folder)}"]
        stick = Machine(stack, folder, "usb", 2, [*firmware, *disks], args)
        nodes = (pxe, stick)
        power_on_s = {}
        for node in nodes:
            node.wait_for("node: joined")
            power_on_s[node.name] = round(time.monotonic() - node.started, 1)
        for node in nodes:
            node.wait_for("node: open ports: ")
        workers = [f"{node.address()}:7411" for node in nodes]
        result: dict[str, Any] = {
            "cpu": cpu_name(), "commit": commit(), "accel": args.accel, "qemu_cpu": args.cpu, "isa": args.isa,
            "memory_mib": args.memory, "image": json.loads((args.image / "image.json").read_text())["bytes"],
            "power_on_to_ready_s": power_on_s,
        }  # fmt: skip
        for node in nodes:
            ready = node.said("node: ready ")
            result[node.name] = {
                "boot_s": float(ready.split(" s ")[0]),
                "memory_used_mb": int(node.said("node: memory used: ").split()[0]),
                "processes": node.said("node: processes: "),
                "ports": node.said("node: open ports: "),
            }
            need(result[node.name]["memory_used_mb"] < 150, f"{node.name}: {result[node.name]}")
        with LLM(workers=workers, cluster_token=TOKEN, **OPTIONS, **PATIENT) as llm:
            need(answers(llm) == expected, "the answers of the nodes are those of workers here")
            print(f"answers: {len(expected)} of {len(expected)} as of two workers here", flush=True)
            pauses = {}
            for node in nodes:
                pauses[node.name] = reset_in_an_answer(llm, node, expected[0], greedy)
            result["pause_of_reset_s"] = pauses
            need(answers(llm) == expected, "the answers after both resets")
        ready = [line for line in shown(stick.text()) if ": ready, " in line]
        need("fetched" in ready[0] and "fetched" not in ready[-1], f"weights stay on the disk: {ready}")
        for node, worker in zip(nodes, workers, strict=True):
            try:
                with LLM(workers=[worker], cluster_token="another", **OPTIONS, **PATIENT):
                    need(False, "a host with another token is refused")
            except AuthenticationError as error:
                print(f"another token: {error}", flush=True)
            node.wait_for("refused: ")
            refused = re.findall(r"worker: .*refused: .*", node.text())[-1].strip()
            print(f"{node.name}: {refused}", flush=True)
            result[node.name]["wrong_token"] = refused
        for node in nodes:
            with socket.create_connection((node.address(), 7411), 20, (f"{NET}.3", 0)) as other:
                need(b"no connections from that address" in other.recv(4096), "another address is refused")
        print("another address of the network: refused", flush=True)
        for node in nodes:
            result[node.name]["open_tcp_ports"] = open_tcp_ports(node.address())
            need(result[node.name]["open_tcp_ports"] == [7411], f"{node.name}: {result[node.name]}")
            print(f"{node.name}: open TCP ports: {result[node.name]['open_tcp_ports']}", flush=True)
        without = ["-kernel", str(args.image / "vmlinuz"), "-initrd", str(args.image / "initrd.img")]
        stranger = Machine(stack, folder, "stranger", 3, [*without, "-append", "quiet console=ttyS0"], args)
        stranger.wait_for("node: does not join")
        result["no_token"] = stranger.said("node: does not join: ").strip()
        print(f"no token: {result['no_token']}", flush=True)
        for node in (*nodes, stranger):
            print(f"--- console of {node.name}\n" + "\n".join(shown(node.text())), flush=True)
        print(json.dumps(result))


def reset_in_an_answer(llm: Any, node: Any, expected: list[int], params: Any) -> float:
    """Resets a node while it computes an answer; how long the answer stood still, seconds."""
    tokens: list[int] = []
    pause, last = 0.0, time.monotonic()
    prompt = [{"role": "user", "content": QUESTIONS[0]}]
    for output in llm.stream(prompt, params):
        now = time.monotonic()
        pause = max(pause, now - last if tokens else 0.0)
        before = len(tokens)
        tokens += output.token_ids
        if before < RESET_AFTER <= len(tokens):
            node.reset()
        last = time.monotonic()
    need(tokens == expected, f"{node.name}: tokens {tokens}, expected {expected}")
    print(
        f"{node.name}: reset after {RESET_AFTER} tokens, the same {len(tokens)} tokens, {pause:.1f} s",
        flush=True,
    )
    return round(pause, 1)


def shown(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(("node: ", "worker: "))]


def in_a_namespace(description: str | None, inside: Callable[[Any], None], programs: Sequence[str]) -> None:
    """Parses the command line and calls ``inside`` in a network namespace of its own."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("image", type=Path, help="folder that duckllm node-image build wrote")
    parser.add_argument("--memory", type=int, default=512, help="MiB of each machine")
    parser.add_argument("--accel", default="tcg", help="tcg, or kvm where that works")
    parser.add_argument("--cpu", default="max", help="QEMU's CPU model")
    parser.add_argument(
        "--isa", default="avx2", help="instruction set of the workers here: that of the CPU model"
    )
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.image = args.image.resolve()
    if args.inside:
        os.environ["DUCK_FORCE_ISA"] = args.isa  # what an emulated CPU has, so that bits can be compared
        inside(args)
        return
    need(os.geteuid() == 0, "run as root: it makes network namespaces")
    for program in programs:
        need(shutil.which(program) is not None, f"{program} is installed")
    name = f"duckimage{os.getpid()}"
    call("ip", "netns", "add", name)
    try:
        again = [sys.executable, *sys.argv, "--inside"]
        sys.exit(subprocess.run(["ip", "netns", "exec", name, *again], check=False).returncode)
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False)


if __name__ == "__main__":
    in_a_namespace(__doc__, inside, ("qemu-system-x86_64", "ip", "dnsmasq", "mcopy", "mke2fs"))
