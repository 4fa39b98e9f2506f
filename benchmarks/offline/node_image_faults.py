"""A node in QEMU that is told its address, and whose worker, first program or kernel fails: it comes back.

    sudo python benchmarks/offline/node_image_faults.py IMAGE

IMAGE is what ``duckllm node-image build --shell`` wrote, as faults are made by its shell, on a serial line.
The machine has the watchdog of Intel's 6300ESB (QEMU resets it where nobody pets it) and no DHCP server; its
kernel's command line names an address, a router and a time server, a program here that is a day ahead. Then
this

1. verifies that the node has that address, and that its clock moved by a day,
2. kills the worker six times: the node starts again,
3. in the middle of an answer has a program take the only core from everybody, the node's first program too:
   the watchdog resets the node,
4. in the middle of another has the kernel panic: the node starts again,

and verifies after each that the worker is back, and the tokens. Prints one JSON line.
"""

from __future__ import annotations

import json
import re
import socket
import struct
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from node_image import (
    NET,
    OPTIONS,
    PATIENT,
    QUESTIONS,
    TOKEN,
    Machine,
    bridge,
    in_a_namespace,
    need,
    reset_in_an_answer,
    shown,
)

ADDRESS = f"{NET}.90"
AHEAD_S = 86400
KILLS = 6
# Without the limit that leaves a twentieth of a core to all others.
HOG = (
    "echo -1 > /proc/sys/kernel/sched_rt_runtime_us; python3 -c 'import os; "
    "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(99)); any(iter(int, 1))' &"
)
PANIC = "echo c > /proc/sysrq-trigger"


def time_server(stack: ExitStack) -> None:
    """Answers as an NTP server (RFC 5905) that is a day ahead, in a thread."""
    server = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    server.bind((f"{NET}.1", 123))

    def moment() -> bytes:
        seconds = time.time() + AHEAD_S + 2_208_988_800
        return struct.pack("!2I", int(seconds), int(seconds % 1 * 2**32))

    def answer() -> None:
        while True:
            try:
                _, asked_by = server.recvfrom(128)
                server.sendto(bytes([0x24, 2]) + bytes(30) + 2 * moment(), asked_by)
            except OSError:
                return

    threading.Thread(target=answer, daemon=True).start()


class Fault:
    """A machine whose reset is a fault that its shell is told to make."""

    def __init__(self, machine: Machine, name: str, line: str) -> None:
        self.machine, self.name, self.line = machine, name, line

    def reset(self) -> None:
        """Makes it."""
        self.machine.type(self.line)


def worker_pid(machine: Machine) -> str:
    """Of the worker that has joined last; asks the shell."""
    num_before = machine.text().count("worker is /proc/")
    machine.type(
        "for p in /proc/[0-9]*; do busybox grep -q duckllm.worker $p/cmdline && echo worker is $p; done"
    )
    machine.wait_for("worker is /proc/", times=num_before + 1)
    return re.findall(r"worker is /proc/(\d+)", machine.text())[-1]


def inside(args: Any) -> None:
    from duckllm import LLM, SamplingParams
    from duckllm.bench.machine import commit, cpu_name

    need(json.loads((args.image / "image.json").read_text())["shell"], f"{args.image} was built with --shell")
    greedy = SamplingParams(temperature=0, max_tokens=64)
    asked = [[{"role": "user", "content": QUESTIONS[0]}]]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="duckllm-node-")))
        bridge()
        time_server(stack)
        with LLM(workers=1, **OPTIONS) as llm:
            expected = list(llm.chat(asked, greedy)[0].outputs[0].token_ids)
        told = f"duck.token={TOKEN} duck.address={ADDRESS}/24 duck.gateway={NET}.1 duck.time_server={NET}.1"
        facts = json.loads((args.image / "image.json").read_text())
        options = facts["kernel_options"].replace(" console=tty0", "")
        boot = ["-kernel", str(args.image / "vmlinuz"), "-initrd", str(args.image / "initrd.img")]
        boot += ["-append", f"{options} {told}", "-action", "watchdog=reset"]
        node = Machine(stack, folder, "node", 1, boot, args)
        stack.callback(lambda: print("--- console\n" + "\n".join(shown(node.text())), flush=True))
        joined = 1
        node.wait_for("node: joined")
        need(node.address() == ADDRESS, f"the address: {node.address()}")
        moved = re.findall(r"the clock is .*, moved by ([+-][0-9.]+) s", node.text())
        need(len(moved) == 1 and abs(float(moved[0]) - AHEAD_S) < 60, f"the clock moved by a day: {moved}")
        need("i6300ESB" in node.said("node: watchdog: "), "the watchdog of the machine")
        print(f"{ADDRESS} as told; the clock moved by {moved[0]} s; watchdog i6300ESB", flush=True)

        for kill in range(KILLS):
            node.type(f"kill -9 {worker_pid(node)}")
            node.wait_for("node: the worker ended (exit status -9)", times=kill + 1)
            joined += 1
            if kill < KILLS - 1:
                node.wait_for("node: joined", times=joined)
        node.wait_for("node: it ended too often; the node starts again")
        began = time.monotonic()
        node.wait_for("node: joined", times=joined)
        again_s = round(time.monotonic() - began, 1)
        print(f"the worker killed {KILLS} times: the node starts again, joined after {again_s} s", flush=True)

        result: dict[str, Any] = {
            "cpu": cpu_name(), "commit": commit(), "accel": args.accel, "memory_mib": args.memory,
            "clock_moved_s": float(moved[0]), "joined_after_kills_s": again_s,
        }  # fmt: skip
        starts = node.text().count("node: duckllm ")
        with LLM(workers=[f"{ADDRESS}:7411"], cluster_token=TOKEN, **OPTIONS, **PATIENT) as llm:
            need(list(llm.chat(asked, greedy)[0].outputs[0].token_ids) == expected, "the answer of the node")
            for name, line in (("watchdog", HOG), ("panic", PANIC)):
                said_before = node.text().count("node: starts again")
                pause_s = reset_in_an_answer(llm, Fault(node, name, line), expected, greedy)
                starts += 1
                need(node.text().count("node: duckllm ") == starts, f"{name}: the node began anew, once")
                need(node.text().count("node: starts again") == said_before, f"{name}: and not by itself")
                result[f"pause_of_{name}_s"] = pause_s
    print(json.dumps(result))


if __name__ == "__main__":
    in_a_namespace(__doc__, inside, ("qemu-system-x86_64", "ip"))
