"""``duckllm node-image build``: a kernel, an initramfs that holds everything, and a USB form of the same.

Called by the command line. Extracts Debian packages, chooses files (:mod:`duckllm.node_image.tree`) and packs
them: a squashfs as the node's root, inside a cpio archive that also has drivers, and a disk image with a boot
loader for UEFI. The same packages, the same installation and the same options give the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import duckllm
from duckllm.errors import ConfigError
from duckllm.node_image.packages import PACKAGES, SUITES, suite_for, this_python, wanted_modules
from duckllm.node_image.programs import BuildError, check_programs, ended_in_order, run
from duckllm.node_image.settings import MEDIUM_LABEL, merge, read_file
from duckllm.node_image.tree import (
    check_imports,
    compile_library,
    copy_initramfs,
    copy_root,
    name_old_places,
    settle,
)
from duckllm.paths import check_replaceable

# Cores but the first have no timer tick, no interrupts and no other work; on a single core the kernel says
# that there are none, and goes on. A panic starts the node again. Lockdown takes ways into the kernel from
# root, and spares the 18 MB that its tracing would take; of other security modules nothing is used. Nothing
# here speaks IPv6. Of control groups nothing is counted, which spares 4 MB; where there are more than 4 GiB,
# 4 MiB instead of 64 are for devices that reach no further; tables of files are for a node's few, however
# large the machine.
KERNEL_OPTIONS = (
    "quiet panic=10 lockdown=confidentiality lsm=lockdown ipv6.disable=1 cgroup.memory=nokmem swiotlb=2048 "
    "dhash_entries=4096 ihash_entries=4096 irqaffinity=0 isolcpus=managed_irq,domain,1-N nohz_full=1-N "
    "rcu_nocbs=1-N console=ttyS0,115200 console=tty0"
)
KERNEL, INITRD, USB, FACTS = "vmlinuz", "initrd.img", "usb.img", "image.json"
MOST_BYTES = 200_000_000
_SECTOR = 512
_FIRST_SECTOR = 2048  # 1 MiB, as every tool aligns partitions
_PACKAGE_LIST = "duckllm-packages"


@dataclass(frozen=True)
class BuildOptions:
    """What an image is made of.

    Args:
        packages: Folder of extracted packages: filled where it is missing or empty, else taken as it is;
            None for one that is removed afterwards.
        mirror: Where Debian packages come from; empty for Debian's own servers.
        shell: Whether the console has a shell.
        config: A node.toml for the USB form; None for one in which all is a comment.
        epoch_s: Time of every file, seconds since 1970.
    """

    packages: Path | None = None
    mirror: str = ""
    shell: bool = False
    config: Path | None = None
    epoch_s: int = 0


def epoch_from_environment() -> int:
    """``$SOURCE_DATE_EPOCH``, or 1 January 2026.

    Raises:
        ConfigError: It is no number of seconds.
    """
    text = os.environ.get("SOURCE_DATE_EPOCH", "1767225600")
    if not (text.isascii() and text.isdecimal() and len(text) <= 10) or int(text) >= 2**32:
        raise ConfigError("SOURCE_DATE_EPOCH", text, "seconds since 1970")
    return int(text)


def build(out: Path, options: BuildOptions, tell: Callable[[str], None]) -> dict[str, Any]:
    """Builds an image into a folder.

    Args:
        out: The folder; files of an earlier image in it are replaced when everything is ready.
        options: What it is made of.
        tell: Takes a line about what is going on.

    Returns:
        The content of image.json: versions, sizes and hashes.

    Raises:
        BuildError: A program failed; says which, and its last line.
        ConfigError: A program is not there, this Python is no Debian release's, ``config`` is wrong, or
            something else than a file lies where one of the image is to be.
    """
    is_filled = options.packages is not None and _is_filled(options.packages)
    if options.mirror and is_filled:
        expected = f"nothing with {options.packages}, whose packages are taken as they are"
        raise ConfigError("mirror", options.mirror, expected)
    check_programs()
    suite = suite_for(this_python())
    config = _check_config(options.config)
    out.mkdir(parents=True, exist_ok=True)
    made = {name: check_replaceable("out", out / name) for name in (KERNEL, INITRD, USB, FACTS)}
    with ended_in_order(), tempfile.TemporaryDirectory(prefix="duckllm-image-") as name:
        work = Path(name)
        debian = work / "debian" if options.packages is None else options.packages
        if not is_filled:
            tell(f"packages of Debian {suite}")
            extract_packages(debian, suite, options.mirror)
        if len(list((debian / "boot").glob("vmlinuz-*"))) != 1:  # of a build that was interrupted
            expected = "a folder that is empty, or that a build has filled to the end"
            raise ConfigError("packages", str(debian), expected)
        name_old_places(debian)
        tell("files of the node")
        root, first = work / "root", work / "first"
        root.mkdir()
        first.mkdir()
        copy_root(debian, root, shell=options.shell)
        compile_library(root)
        check_imports(root)
        settle(root, options.epoch_s)
        missing = copy_initramfs(debian, first, wanted_modules(options.shell), run)
        tell("compressing")
        _pack_root(root, first / "root.squashfs", options.epoch_s)
        settle(first, options.epoch_s)
        ready = work / "ready"
        ready.mkdir()
        [kernel] = (debian / "boot").glob("vmlinuz-*")
        shutil.copyfile(kernel, ready / KERNEL)
        _pack_initramfs(first, ready / INITRD)
        _pack_usb(debian, ready, config, options.epoch_s, work)
        facts = _facts(debian, ready, suite, options, missing, kernel.name.removeprefix("vmlinuz-"))
        for name, target in made.items():
            shutil.move(ready / name, target)
    return facts


def _is_filled(folder: Path) -> bool:
    return folder.exists() and any(folder.iterdir())


def extract_packages(debian: Path, suite: str, mirror: str) -> None:
    """Extracts the packages and all that they depend on, without running anything of them."""
    debian.mkdir(parents=True, exist_ok=True)
    hook = f'cd "$1/var/cache/apt/archives" && sha256sum *.deb > "$1/{_PACKAGE_LIST}"'
    command = ["mmdebstrap", "--variant=extract", "--include=" + ",".join(PACKAGES)]
    if os.geteuid():  # else it would look for a user's range of ids, of which nothing here has a use
        command.append("--mode=chrootless")
    run([*command, "--extract-hook=" + hook, suite, str(debian), *([mirror] if mirror else [])])


def _check_config(path: Path | None) -> str:
    """The USB form's node.toml, of which a mistake is found here and not at a node's start."""
    if path is None:
        return (files("duckllm.node_image") / "files/node.toml").read_text(encoding="utf-8")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("config", str(path), f"a readable file ({error})") from None
    merge(read_file(text, str(path)))
    return text


def _pack_root(root: Path, target: Path, epoch_s: int) -> None:
    """The node's root, which stays in its memory as it is here, so that size counts before speed."""
    times = ["-all-time", str(epoch_s), "-mkfs-time", str(epoch_s)]
    packing = ["-comp", "xz", "-Xbcj", "x86", "-b", "256K", "-processors", "2"]
    run(
        [
            "mksquashfs",
            str(root),
            str(target),
            "-noappend",
            "-all-root",
            "-no-xattrs",
            "-quiet",
            *times,
            *packing,
        ]
    )


def _pack_initramfs(first: Path, target: Path) -> None:
    """A cpio archive of sorted names, root's files, no numbers of inodes or devices of this machine."""
    names = "".join(f"{path.relative_to(first)}\n" for path in sorted(first.rglob("*")))
    with tempfile.TemporaryFile() as archive:
        done = subprocess.run(
            ["cpio", "--create", "--format=newc", "--reproducible", "--owner=0:0", "--quiet"],
            input=names.encode(),
            stdout=archive,
            stderr=subprocess.PIPE,
            cwd=first,
            check=False,
        )
        if done.returncode:
            raise BuildError(f"cpio failed: {done.stderr.decode(errors='replace').strip()}")
        archive.seek(0)
        with target.open("wb") as file:
            subprocess.run(["zstd", "-19", "-T1", "-q", "-c"], stdin=archive, stdout=file, check=True)


def _pack_usb(debian: Path, ready: Path, config: str, epoch_s: int, work: Path) -> None:
    """A disk with one FAT partition that UEFI starts from, and a file of settings that anyone can edit."""
    loader = debian / "usr/lib/systemd/boot/efi/systemd-bootx64.efi"
    entry = f"title duck-llm node\nlinux /{KERNEL}\ninitrd /{INITRD}\noptions {KERNEL_OPTIONS}\n"
    content = {
        "EFI/BOOT/BOOTX64.EFI": loader.read_bytes(),
        "loader/loader.conf": b"timeout 0\neditor no\n",
        "loader/entries/node.conf": entry.encode(),
        "node.toml": config.encode(),
        KERNEL: (ready / KERNEL).read_bytes(),
        INITRD: (ready / INITRD).read_bytes(),
    }
    files_at = work / "usb"
    for name, data in content.items():
        (files_at / name).parent.mkdir(parents=True, exist_ok=True)
        (files_at / name).write_bytes(data)
    settle(files_at, epoch_s)
    num_bytes = sum(map(len, content.values()))
    # Whole MiB and room for settings; below some 34 MB there is no FAT32, which UEFI reads everywhere.
    sectors = max(40, -(-(num_bytes * 102 // 100 + (4 << 20)) // (1 << 20))) * 2048
    disk = ready / USB
    with disk.open("wb") as file:
        file.truncate((_FIRST_SECTOR + sectors + 2048) * _SECTOR)
    identity = hashlib.sha256(b"".join(content.values())).hexdigest()
    partition_id, disk_id = (_uuid(identity[at : at + 32]) for at in (0, 32))
    script = (
        f"label: gpt\nlabel-id: {disk_id}\nfirst-lba: {_FIRST_SECTOR}\n"
        f"start={_FIRST_SECTOR}, size={sectors}, type=uefi, uuid={partition_id}, name={MEDIUM_LABEL}\n"
    )
    run(["sfdisk", "--quiet", str(disk)], input=script)
    volume = f"{disk}@@{_FIRST_SECTOR * _SECTOR}"
    fixed = {"SOURCE_DATE_EPOCH": str(epoch_s), "MTOOLS_SKIP_CHECK": "1"}
    run(
        ["mformat", "-i", volume, "-F", "-T", str(sectors), "-v", MEDIUM_LABEL, "-N", identity[:8], "::"],
        env=fixed,
    )
    folders = sorted({str(parent) for name in content for parent in Path(name).parents} - {"."})
    run(["mmd", "-i", volume, *(f"::{folder}" for folder in folders)], env=fixed)
    for name in sorted(content):
        run(["mcopy", "-m", "-i", volume, str(files_at / name), f"::{name}"], env=fixed)


def _uuid(digits: str) -> str:
    return "-".join((digits[:8], digits[8:12], "4" + digits[13:16], "8" + digits[17:20], digits[20:32]))


def _facts(
    debian: Path, ready: Path, suite: str, options: BuildOptions, missing: list[str], kernel: str
) -> dict[str, Any]:
    made = {path.name: path for path in (ready / KERNEL, ready / INITRD, ready / USB)}
    list_at = debian / _PACKAGE_LIST
    listed = list_at.read_text().splitlines() if list_at.exists() else []
    facts: dict[str, Any] = {
        "version": duckllm.__version__,
        "suite": suite,
        "kernel": kernel,
        "python": ".".join(map(str, this_python())),
        "numpy": version("numpy"),
        "shell": options.shell,
        "source_date_epoch": options.epoch_s,
        "kernel_options": KERNEL_OPTIONS,
        "modules_missing": missing,
        "bytes": {name: path.stat().st_size for name, path in made.items()},
        "sha256": {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in made.items()},
        "packages": {name: digest for digest, name in map(str.split, listed)},
    }
    netboot_bytes = facts["bytes"][KERNEL] + facts["bytes"][INITRD]
    for name, num_bytes in (("kernel and initramfs", netboot_bytes), (USB, facts["bytes"][USB])):
        if num_bytes > MOST_BYTES:
            raise BuildError(f"{name}: got {num_bytes:,} bytes, expected at most {MOST_BYTES:,}")
    (ready / FACTS).write_text(json.dumps(facts, indent=1) + "\n")
    return facts


__all__ = ["SUITES", "BuildError", "BuildOptions", "build", "check_programs", "epoch_from_environment"]
