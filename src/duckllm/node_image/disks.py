"""The node's media: a file of settings on what it booted from, and a disk that keeps weights.

Called by :mod:`duckllm.node_image.init`, in the image alone. Both are found by the label of a file system.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from duckllm.errors import ConfigError, InWords
from duckllm.node_image.network import BUSYBOX
from duckllm.node_image.settings import MEDIUM_LABEL, read_file

CACHE = Path("/var/cache/duckllm")
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOATIME = 1, 2, 4, 1024  # of sys/mount.h


def look_at_medium(say: Callable[[str], None]) -> dict[str, Any]:
    """The settings of the medium; none where there is no medium, or no ``node.toml`` on it.

    Raises:
        OSError: It cannot be mounted or read.
        ConfigError: What it says is wrong.
    """
    device = _find_label(MEDIUM_LABEL)
    if device is None:
        return {}
    target = Path("/run/medium")
    target.mkdir(exist_ok=True)
    try:
        _mount(device, target, "vfat", MS_RDONLY | MS_NOSUID | MS_NODEV)
    except OSError as error:
        raise OSError(f"{device} cannot be mounted ({error.strerror})") from None
    try:
        path = target / "node.toml"
        found = read_file(path.read_text(encoding="utf-8"), "node.toml") if path.exists() else {}
        say(f"node: settings from {device}")
        return found
    except UnicodeDecodeError:
        raise ConfigError("node.toml", InWords("bytes that are not UTF-8"), "text in UTF-8") from None
    finally:
        subprocess.run([BUSYBOX, "umount", str(target)], check=False)


def mount_cache(label: str, user: int, say: Callable[[str], None]) -> bool:
    """Whether a disk keeps weights from now on; says which, or why none does.

    Args:
        label: Of its file system.
        user: Who writes there.
        say: Takes a line for the console.
    """
    device = _find_label(label)
    if device is None:
        say(
            f"node: no disk is labelled {label}: the slice is kept in memory, and comes from the host again "
            "after each start"
        )
        return False
    try:
        _mount(device, CACHE, "ext4", MS_NOSUID | MS_NODEV | MS_NOATIME)
        os.chown(CACHE, user, user)
    except OSError as error:
        say(f"node: {device} cannot keep weights ({error.strerror}); the slice is kept in memory")
        return False
    say(f"node: weights are kept on {device}")
    return True


def _find_label(label: str) -> str | None:
    done = subprocess.run([BUSYBOX, "findfs", f"LABEL={label}"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def _mount(device: str, target: Path, kind: str, flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(device.encode(), str(target).encode(), kind.encode(), flags, None):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
