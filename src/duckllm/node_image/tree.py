"""The files of an image: chosen from extracted Debian packages and from this installation, nothing else.

Called by :mod:`duckllm.node_image.build`. A list of what is taken, not of what is removed, decides what a
node holds; libraries come by what programs say that they need.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import lzma
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable
from importlib.resources import files
from pathlib import Path

import duckllm
from duckllm import _native
from duckllm.errors import ConfigError, InWords, MissingPackageError
from duckllm.node_image.packages import (
    UNUSED_COMPILED,
    UNUSED_LIBRARY,
    choose_modules,
    read_dependencies,
    this_python,
)

_LIBRARIES = ("usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu", "lib64", "usr/lib64")
_PACKAGES_IN_IMAGE = "usr/lib/python3/dist-packages"
_FOLDERS = [
    "dev", "etc", "mnt", "proc", "run", "sys", "tmp", "usr/bin", "usr/lib/node", "usr/lib/x86_64-linux-gnu",
    "var/cache/duckllm",
]  # fmt: skip
_APPLETS = ("cat", "dmesg", "free", "ip", "ls", "mount", "netstat", "ping", "ps", "sh", "top")  # of a shell
# What the worker announces itself with, if it is installed here: the extra [discover].
ANNOUNCING = ("zeroconf", "ifaddr")
# Of this package: the worker, what stands below it in ARCHITECTURE.md's list, and what starts it on a node.
PARTS = [
    "worker", "cluster", "weights", "text", "node_image", "__init__.py", "__main__.py", "outputs.py",
    "sampling_params.py", "device.py", "config.py", "prefill.py", "paths.py", "errors.py", "py.typed",
]  # fmt: skip
# Of NumPy: what only those need who test it or compile against it, and transforms.
_NUMPY_UNUSED = (
    "tests",
    "include",
    "f2py",
    "_pyinstaller",
    "doc",
    "distutils",
    "testing",
    "fft",
    "polynomial",
)
_NUMPY_UNUSED_COMPILED = ("_simd.", "_multiarray_tests.", "_umath_tests.", "_rational_tests.",
    "_struct_ufunc_tests.", "_operand_flag_tests.")  # fmt: skip


def can_announce() -> bool:
    """Whether the packages are here by which a node announces itself."""
    return all(importlib.util.find_spec(name) is not None for name in ANNOUNCING)


def name_old_places(debian: Path) -> None:
    """Has extracted packages whose files are all in /usr be found in /bin, /lib and the like, too."""
    for name in ("bin", "lib", "lib64", "sbin"):
        if not (debian / name).exists() and (debian / "usr" / name).exists():
            (debian / name).symlink_to(f"usr/{name}")


def copy_root(debian: Path, root: Path, *, shell: bool) -> None:
    """Fills the node's root.

    Args:
        debian: Extracted packages.
        root: An empty folder.
        shell: Whether the console has a shell.

    Raises:
        ConfigError: A library that something needs is in no package.
        MissingPackageError: NumPy is not installed as a package with a list of its files.
    """
    for name in _FOLDERS:
        (root / name).mkdir(parents=True)
    for name, target in (
        ("bin", "usr/bin"),
        ("sbin", "usr/bin"),
        ("lib", "usr/lib"),
        ("lib64", "usr/lib/x86_64-linux-gnu"),
    ):
        (root / name).symlink_to(target)
    python = f"python{'.'.join(map(str, this_python()))}"
    shutil.copy2(debian / f"usr/bin/{python}", root / "usr/bin" / python)
    (root / "usr/bin/python3").symlink_to(python)
    shutil.copy2(debian / "bin/busybox", root / "usr/bin/busybox")
    if shell:
        for applet in _APPLETS:
            (root / "usr/bin" / applet).symlink_to("busybox")
    _copy_library(debian / f"usr/lib/{python}", root / f"usr/lib/{python}")
    _copy_packages(root / _PACKAGES_IN_IMAGE)
    scripts = files("duckllm.node_image") / "files"
    for name, target in (("init", "usr/bin/init"), ("dhcp-event", "usr/lib/node/dhcp-event")):
        (root / target).write_bytes((scripts / name).read_bytes())
        (root / target).chmod(0o755)
    (root / "etc/passwd").write_text("root:x:0:0::/:/nologin\nworker:x:1000:1000::/run/worker:/nologin\n")
    (root / "etc/group").write_text("root:x:0:\nworker:x:1000:\n")
    (root / "etc/hosts").write_text("127.0.0.1 localhost\n")
    (root / "etc/resolv.conf").symlink_to("../run/resolv.conf")
    facts = {"version": duckllm.__version__, "shell": shell, "announce": can_announce()}
    (root / "usr/lib/node/image.json").write_text(json.dumps(facts) + "\n")
    _copy_needed_libraries(debian, root)


def copy_initramfs(
    debian: Path, target: Path, names: Iterable[str], run: Callable[[list[str]], str]
) -> list[str]:
    """Fills the kernel's first root: its first program, busybox for it, and modules.

    Args:
        debian: Extracted packages, of one kernel.
        target: An empty folder.
        names: Names of modules.
        run: Runs a program.

    Returns:
        Names of modules that this kernel has not.
    """
    [modules] = (debian / "lib/modules").iterdir()
    version = modules.name
    run(["depmod", "-b", str(debian), version])
    dependencies = read_dependencies((modules / "modules.dep").read_text())
    chosen, missing = choose_modules(names, dependencies)
    there = target / "lib/modules" / version
    for path in chosen:
        plain = path.removesuffix(".xz")  # as of Debian 13; all together are compressed below
        content = (modules / path).read_bytes()
        (there / plain).parent.mkdir(parents=True, exist_ok=True)
        (there / plain).write_bytes(content if plain == path else lzma.decompress(content))
    for name in ("modules.order", "modules.builtin", "modules.builtin.modinfo"):
        if (modules / name).exists():
            shutil.copyfile(modules / name, there / name)
    run(["depmod", "-b", str(target), version])
    for unread in there.glob("modules.*.bin"):
        unread.unlink()  # busybox reads the texts
    builtin = {Path(line).name for line in (modules / "modules.builtin").read_text().split()}
    (target / "bin").mkdir()
    shutil.copy2(debian / "bin/busybox", target / "bin/busybox")
    (target / "init").write_bytes((files("duckllm.node_image") / "files/initramfs-init").read_bytes())
    (target / "init").chmod(0o755)
    return [name for name in missing if f"{name}.ko" not in {item.replace("-", "_") for item in builtin}]


def settle(root: Path, epoch_s: int) -> None:
    """Gives every file the same time, and modes that do not depend on who built it."""
    for path in sorted(root.rglob("*"), reverse=True):
        if not path.is_symlink():
            executable = path.is_dir() or (os.access(path, os.X_OK) and path.stat().st_mode & 0o100)
            path.chmod(0o755 if executable else 0o644)
        os.utime(path, (epoch_s, epoch_s), follow_symlinks=False)
    root.chmod(0o755)
    os.utime(root, (epoch_s, epoch_s))


def _copy_library(source: Path, target: Path) -> None:
    def unused(folder: str, names: list[str]) -> set[str]:
        at_top = Path(folder) == source
        compiled = Path(folder).name == "lib-dynload"
        return {
            name
            for name in names
            if (at_top and name in UNUSED_LIBRARY)
            or (compiled and name.startswith(UNUSED_COMPILED))
            or name in ("__pycache__", "tests")
        }

    shutil.copytree(source, target, ignore=unused, symlinks=False, ignore_dangling_symlinks=True)


def _copy_packages(target: Path) -> None:
    """This package's part for a node, and the packages that it needs, compiled."""
    target.mkdir(parents=True)
    unused = shutil.ignore_patterns("__pycache__", "*.pyc")
    [source] = [Path(path) for path in duckllm.__path__ if (Path(path) / "__init__.py").exists()][:1]
    package = target / "duckllm"
    package.mkdir()
    for name in PARTS:
        if (source / name).is_dir():
            shutil.copytree(source / name, package / name, ignore=unused)
        else:
            shutil.copyfile(source / name, package / name)
    native = Path(_native.__file__)
    shutil.copyfile(native, package / native.name)
    for name in ("numpy", *(ANNOUNCING if can_announce() else ())):
        _copy_distribution(name, target)


def _copy_distribution(name: str, target: Path) -> None:
    try:
        listed = importlib.metadata.distribution(name).files
    except importlib.metadata.PackageNotFoundError:
        listed = None
    if not listed:
        raise MissingPackageError(name, "node image", "host")
    for item in listed:
        parts = item.parts
        if ".." in parts or item.suffix in (".pyc", ".pyi") or parts[0].endswith(".dist-info"):
            continue
        if any(part in _NUMPY_UNUSED for part in parts[1:-1]) or item.suffix in (".a", ".h", ".pxd"):
            continue
        if item.name.startswith(_NUMPY_UNUSED_COMPILED):
            continue
        (target / item).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(item.locate(), target / item)


def compile_library(root: Path) -> None:
    """Compiles every Python file and leaves its source out: all of it would be in the node's memory.

    Other packages lose their docstrings and assertions, so that these are to be run by ``python -OO``, which
    NumPy minds; this package keeps both. Nothing is compared at run time, as nothing can change there.
    """
    command = [sys.executable, "-m", "compileall", "-q", "-f", "-b", "--invalidation-mode", "unchecked-hash"]
    for level, at in (("2", "usr/lib"), ("0", f"{_PACKAGES_IN_IMAGE}/duckllm")):
        if (root / at).exists():
            subprocess.run(
                [*command, "-o", level, "-s", str(root), "-p", "/", str(root / at)],
                check=True,
                env={"PYTHONHASHSEED": "0", "PATH": os.defpath},  # the order of sets would else reach files
            )
    for source in (root / "usr/lib").rglob("*.py"):
        source.unlink()


def check_imports(root: Path) -> None:
    """Imports what a node runs, by this interpreter from the image's files alone.

    Raises:
        ConfigError: Something of it is missing there.
    """
    library = root / f"usr/lib/python{'.'.join(map(str, this_python()))}"
    compiled = Path(sysconfig.get_config_var("DESTSHARED"))  # Debian has some of these in its program
    path = [str(folder) for folder in (library, compiled, root / _PACKAGES_IN_IMAGE)]
    code = f"import sys; sys.path[:] = {path!r}; import duckllm.worker.__main__, duckllm.node_image.init"
    code += ", zeroconf" if can_announce() else ""
    done = subprocess.run(
        [sys.executable, "-IOO", "-S", "-B", "-c", code], capture_output=True, text=True, check=False, env={}
    )
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:]
        raise ConfigError(
            "node image", InWords(f"files that do not start a worker ({''.join(said)})"), "all of them"
        )


def _copy_needed_libraries(debian: Path, root: Path) -> None:
    """Copies what the ELF files of the root say that they need, and what that needs."""
    target = root / "usr/lib/x86_64-linux-gnu"
    waiting = [
        path for path in sorted(root.rglob("*")) if path.is_file() and not path.is_symlink() and _is_elf(path)
    ]
    there = {path.name for path in waiting}
    while waiting:
        path = waiting.pop()
        for name in _needed(path):
            if name in there:
                continue
            source = next((debian / at / name for at in _LIBRARIES if (debian / at / name).exists()), None)
            if source is None:
                raise ConfigError(
                    "library", InWords(f"{name}, which {path.name} needs"), "one of Debian's packages"
                )
            shutil.copyfile(source, target / name)
            (target / name).chmod(0o755)
            there.add(name)
            waiting.append(target / name)


def _is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def _needed(path: Path) -> list[str]:
    done = subprocess.run(["readelf", "-d", str(path)], capture_output=True, text=True, check=True)
    return [line.partition("[")[2].rstrip("]") for line in done.stdout.splitlines() if "(NEEDED)" in line]
