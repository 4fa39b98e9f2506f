"""Images: what is chosen, and bytes that depend on content alone."""

from __future__ import annotations

import contextlib
import hashlib
import lzma
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from duckllm.errors import ConfigError
from duckllm.node_image import build, programs
from duckllm.node_image.build import BuildError, BuildOptions, epoch_from_environment, run
from duckllm.node_image.packages import (
    choose_modules,
    module_name,
    read_dependencies,
    suite_for,
    wanted_modules,
)
from duckllm.node_image.tree import PARTS, compile_library, copy_initramfs, name_old_places, settle

DEPENDENCIES = """\
kernel/net/core/a.ko:
kernel/drivers/net/igc.ko: kernel/drivers/ptp/ptp.ko kernel/drivers/pps/pps-core.ko
kernel/drivers/ptp/ptp.ko: kernel/drivers/pps/pps-core.ko
kernel/drivers/pps/pps-core.ko:
kernel/fs/nls/nls_iso8859-1.ko.xz:
"""


def test_a_node_gets_every_part_of_the_package_that_a_worker_imports() -> None:
    code = "import sys, duckllm.worker.__main__; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    names = [name.split(".") for name in done.stdout.split()]
    parts = {name[1] for name in names if name[0] == "duckllm" and len(name) > 1} - {"_native"}
    assert {"worker", "errors"} <= parts <= {name.removesuffix(".py") for name in PARTS}


def needs(*programs: str) -> pytest.MarkDecorator:
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    missing = [name for name in programs if shutil.which(name, path=path) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


def test_modules_come_with_what_they_need() -> None:
    dependencies = read_dependencies(DEPENDENCIES)
    chosen, missing = choose_modules(["igc", "nls-iso8859-1", "nothing"], dependencies)
    assert chosen == [
        "kernel/drivers/net/igc.ko",
        "kernel/drivers/pps/pps-core.ko",
        "kernel/drivers/ptp/ptp.ko",
        "kernel/fs/nls/nls_iso8859-1.ko.xz",
    ]
    assert missing == ["nothing"]
    assert module_name("kernel/x/snd-hda.ko.zst") == "snd_hda"


@pytest.mark.parametrize("merged", [False, True])
def test_modules_of_every_release_are_plain_files_of_the_initramfs(tmp_path: Path, merged: bool) -> None:
    """Debian 12 has plain modules in /lib; Debian 13 compressed ones in /usr/lib, and no /lib."""
    debian, target, usr = tmp_path / "debian", tmp_path / "target", "usr/" if merged else ""
    modules = debian / f"{usr}lib/modules/6.9"
    content = b"\x7fELF of a driver" * 99
    suffix = ".xz" if merged else ""
    (modules / "kernel").mkdir(parents=True)
    (modules / f"kernel/igc.ko{suffix}").write_bytes(lzma.compress(content) if merged else content)
    (modules / "modules.builtin").write_text("kernel/fs/loop.ko\n")
    (modules / "modules.dep").write_text(f"kernel/igc.ko{suffix}:\n")
    (debian / f"{usr}bin").mkdir(parents=True)
    (debian / f"{usr}bin/busybox").write_text("busybox")
    target.mkdir()
    name_old_places(debian)
    ran: list[list[str]] = []
    missing = copy_initramfs(
        debian, target, ["igc", "loop", "nothing"], lambda words: ran.append(words) or ""
    )
    assert missing == ["nothing"]
    assert (target / "lib/modules/6.9/kernel/igc.ko").read_bytes() == content
    assert (target / "bin/busybox").read_text() == "busybox"
    assert ran == [["depmod", "-b", str(folder), "6.9"] for folder in (debian, target)]


def test_a_keyboard_only_where_there_is_a_shell() -> None:
    assert set(wanted_modules(True)) - set(wanted_modules(False)) == {"usbhid", "hid_generic"}
    names = wanted_modules(True)
    assert len(names) == len(set(names))


def test_the_release_is_that_of_this_python() -> None:
    assert (suite_for((3, 11)), suite_for((3, 13))) == ("bookworm", "trixie")
    with pytest.raises(ConfigError, match=r"got 3\.12, expected 3\.11 \(bookworm\) or 3\.13"):
        suite_for((3, 12))


def test_the_time_of_files_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    assert epoch_from_environment() == 1767225600
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "12")
    assert epoch_from_environment() == 12
    for wrong in ("today", "\uff11\uff12", "9" * 5000):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", wrong)
        with pytest.raises(ConfigError, match="SOURCE_DATE_EPOCH"):
            epoch_from_environment()


def make_tree(root: Path, names: list[str], mode: int) -> None:
    """The same content, made in another order, by somebody with another umask, at another time."""
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {Path(name).name}\nvalue = {{'a', 'b', 'c', 'd'}}\n")
        path.chmod(mode | (0o100 if name == "init" else 0))
    (root / "link").symlink_to("init")


NAMES = ["init", "usr/lib/one.py", "usr/lib/deep/two.py", "etc/three"]


@needs("cpio", "zstd", "mksquashfs")
def test_archives_depend_on_content_alone(tmp_path: Path) -> None:
    hashes = set()
    for number, (names, mode) in enumerate(((NAMES, 0o600), (NAMES[::-1], 0o664))):
        root = tmp_path / f"somewhere{number}" / "root"
        make_tree(root, names, mode)
        compile_library(root)
        settle(root, 1_000_000_000)
        squashed, archive = tmp_path / f"{number}.squashfs", tmp_path / f"{number}.cpio"
        build._pack_root(root, squashed, 1_000_000_000)
        build._pack_initramfs(root, archive)
        hashes.add(tuple(hashlib.sha256(path.read_bytes()).digest() for path in (squashed, archive)))
    assert len(hashes) == 1
    listed = subprocess.run(
        f"zstd -dc {archive} | cpio -tv --quiet --numeric-uid-gid",
        shell=True,
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    assert "usr/lib/deep/two.pyc" in listed
    assert ".py\n" not in listed  # no source, which would be in a node's memory
    assert all(line.split()[2:4] == ["0", "0"] for line in listed.splitlines())
    (root / "etc/three").write_text("other")
    settle(root, 1_000_000_000)
    build._pack_initramfs(root, archive)
    assert hashlib.sha256(archive.read_bytes()).digest() not in {pair[1] for pair in hashes}


@needs("mformat", "mcopy", "sfdisk")
def test_the_usb_form_depends_on_content_alone_and_holds_the_settings(tmp_path: Path) -> None:
    hashes = set()
    for number in range(2):
        debian, ready, work = (tmp_path / f"{number}" / name for name in ("debian", "ready", "work"))
        loader = debian / "usr/lib/systemd/boot/efi/systemd-bootx64.efi"
        for path, content in (
            (loader, b"loader"),
            (ready / "vmlinuz", b"kernel" * 1000),
            (ready / "initrd.img", b"initramfs" * 100_000),
        ):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        work.mkdir()
        build._pack_usb(debian, ready, 'token = "abc"\n', 1_000_000_000, work)
        hashes.add(hashlib.sha256((ready / "usb.img").read_bytes()).hexdigest())
    assert len(hashes) == 1
    volume = f"{ready / 'usb.img'}@@{1 << 20}"
    shown = {
        name: run(["mtype", "-i", volume, f"::{name}"])
        for name in ("node.toml", "EFI/BOOT/BOOTX64.EFI", "loader/entries/node.conf")
    }
    assert shown["node.toml"] == 'token = "abc"\n'
    assert shown["EFI/BOOT/BOOTX64.EFI"] == "loader"
    assert "initrd /initrd.img" in shown["loader/entries/node.conf"]
    assert "DUCKLLM" in run(["mlabel", "-s", "-i", volume, "::"])


def test_the_cause_is_the_first_error_that_apt_names() -> None:
    said = "I: begins\\nE: Failed to fetch x\\nE: failed to run"
    with pytest.raises(BuildError, match=r"exit status 25: E: Failed to fetch x$"):
        run([sys.executable, "-c", f"import sys; print('{said}', file=sys.stderr); sys.exit(25)"])


@pytest.mark.parametrize(("user", "modes"), [(0, []), (1000, ["--mode=chrootless"])])
def test_packages_are_extracted_by_any_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: int, modes: list[str]
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(build, "run", commands.append)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    build.extract_packages(tmp_path / "debian", "bookworm", "")
    [command] = commands
    assert [word for word in command if word.startswith("--mode")] == modes
    assert command[-2:] == ["bookworm", str(tmp_path / "debian")]


def test_packages_of_a_build_that_was_interrupted_are_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "check_programs", lambda: None)
    monkeypatch.setattr(build, "suite_for", lambda version: "bookworm")
    (tmp_path / "debian/usr").mkdir(parents=True)
    with pytest.raises(ConfigError) as error:
        build.build(tmp_path / "out", BuildOptions(packages=tmp_path / "debian"), lambda line: None)
    assert error.value.field == "packages"


def test_a_program_that_fails_is_named_with_its_last_line() -> None:
    with pytest.raises(BuildError, match="exit status 3: second"):
        run([sys.executable, "-c", "import sys; print('first\\nsecond', file=sys.stderr); sys.exit(3)"])


# Stands in for mmdebstrap: it starts another, which goes on writing as long as it is let.
ENDLESS = """#!/bin/sh
echo $$ > STARTED
while :; do for last; do :; done; echo x >> "$last/written"; sleep 0.01; done
"""


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)]
)
def test_a_build_that_is_ended_leaves_nothing(tmp_path: Path, number: int, status: int) -> None:
    started, temporary = tmp_path / "started", tmp_path / "tmp"
    temporary.mkdir()
    program = tmp_path / "bin/mmdebstrap"
    program.parent.mkdir()
    inner = tmp_path / "bin/inner"
    inner.write_text(ENDLESS.replace("STARTED", str(started)))
    program.write_text(f'#!/bin/sh\n{inner} "$@" &\nwait\n')
    for path in (program, inner):
        path.chmod(0o755)
    code = (
        "from duckllm.node_image import build, programs; programs.PROGRAMS = {};"
        "build.suite_for = lambda version: 'bookworm';"
        "import sys; sys.argv = ['duckllm', 'node-image', 'build', 'out'];"
        "from duckllm.cli.main import main; main()"
    )
    environment = os.environ | {
        "TMPDIR": str(temporary),
        "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}",
    }
    builder = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=environment)
    while not started.exists() or not started.read_text():
        assert builder.poll() is None
        time.sleep(0.02)
    builder.send_signal(number)
    assert builder.wait(30) == status
    assert list(temporary.iterdir()) == []
    state = "ended"
    with contextlib.suppress(OSError):
        state = Path(f"/proc/{int(started.read_text())}/stat").read_text().rpartition(")")[2].split()[0]
    assert state in ("ended", "Z")


def test_missing_programs_are_named_with_their_packages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(programs, "PROGRAMS", {"no-such-program": "its-package", "sh": "dash"})
    with pytest.raises(ConfigError, match=r"no no-such-program.*apt-get install its-package\)"):
        build.build(tmp_path / "out", BuildOptions(), lambda line: None)
    assert not (tmp_path / "out").exists()


def test_a_wrong_node_toml_is_found_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(programs, "PROGRAMS", {})
    monkeypatch.setattr(build, "suite_for", lambda version: "bookworm")
    config = tmp_path / "node.toml"
    config.write_text("port = 0\n")
    with pytest.raises(ConfigError, match="port: got 0"):
        build.build(tmp_path / "out", BuildOptions(config=config), lambda line: None)
    assert not (tmp_path / "out").exists()
