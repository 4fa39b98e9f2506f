"""What a DHCP server said, as the node's network: called by udhcpc, once for each event, in the image alone.

udhcpc gives the event as the first argument and all else in the environment. The lease is written to a file
that :mod:`duckllm.node_image.network` reads.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

LEASES = Path("/run/node")
RESOLVER = Path("/run/resolv.conf")


def commands(event: str, facts: Mapping[str, str]) -> list[list[str]]:
    """Arguments of ``ip`` that an event asks for."""
    interface = facts["interface"]
    if event == "deconfig":
        return [["link", "set", interface, "up"], ["addr", "flush", "dev", interface]]
    if event not in ("bound", "renew"):
        return []  # leasefail, nak: udhcpc goes on asking
    address = f"{facts['ip']}/{facts.get('mask', '24')}"
    asked = [["addr", "replace", address, "broadcast", "+", "dev", interface]]
    asked += [
        ["route", "replace", "default", "via", router, "dev", interface]
        for router in facts.get("router", "").split()[:1]
    ]
    return asked


def lease(facts: Mapping[str, str]) -> dict[str, object]:
    """What the node keeps of a lease."""
    return {
        "interface": facts["interface"],
        "address": f"{facts['ip']}/{facts.get('mask', '24')}",
        "time_servers": facts.get("ntpsrv", "").split(),
    }


def main() -> None:
    """Carries one event out."""
    event, facts = sys.argv[1], os.environ
    for arguments in commands(event, facts):
        subprocess.run(["/bin/busybox", "ip", *arguments], check=False)
    if event in ("bound", "renew"):
        names = facts.get("dns", "").split()
        RESOLVER.write_text("".join(f"nameserver {name}\n" for name in names))
        path = LEASES / f"lease-{facts['interface']}.json"
        part = path.with_suffix(".part")
        part.write_text(json.dumps(lease(facts)))
        part.replace(path)
