"""What is taken from Debian: packages, kernel modules, files of Python's library.

Called by :mod:`duckllm.node_image.tree`. Lists are data; the functions choose by them and read no network.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping

from duckllm.errors import ConfigError, InWords

PACKAGES = (
    "linux-image-amd64",
    "busybox-static",
    "libc6",
    "libpython3-stdlib",
    "libstdc++6",
    "python3-minimal",
    "systemd-boot-efi",
)
# The Debian release whose Python is this interpreter's: compiled modules of the package and of NumPy are
# taken from here, and fit no other.
SUITES = {(3, 11): "bookworm", (3, 13): "trixie"}

# Names of modules without .ko, underscores for hyphens; what they need comes with them.
MODULES = {
    "wired Ethernet": (
        "e1000 e1000e igb igc ixgbe i40e ice r8169 realtek tg3 bnxt_en atlantic mlx4_en mlx5_core virtio_net "
        "vmxnet3 r8152 ax88179_178a asix cdc_ether cdc_ncm af_packet"
    ),
    "disks and USB": (
        "nvme ahci ata_piix sd_mod usb_storage uas xhci_pci ehci_pci virtio_blk virtio_scsi sdhci_pci "
        "sdhci_acpi mmc_block"
    ),
    "file systems": (
        "loop squashfs ext4 crc32c_generic crc32c_intel vfat nls_cp437 nls_ascii nls_iso8859_1 nls_utf8"
    ),
    "the machine": (
        "virtio_pci virtio_rng acpi_cpufreq iTCO_wdt sp5100_tco i6300esb softdog thermal fan processor "
        "intel_rapl_msr coretemp k10temp i2c_i801"
    ),
}
SHELL_MODULES = "usbhid hid_generic"  # a keyboard, where there is a shell

# Of Python's library; none of it is imported by a worker.
UNUSED_LIBRARY = frozenset((
    "_aix_support.py", "_pydecimal.py", "_pyio.py", "_pyrepl", "aifc.py", "antigravity.py", "asynchat.py",
    "asyncore.py", "cProfile.py", "cgi.py", "cgitb.py", "chunk.py", "config-3.11-x86_64-linux-gnu",
    "config-3.13-x86_64-linux-gnu", "crypt.py", "curses", "dbm", "distutils", "doctest.py", "ensurepip",
    "ftplib.py", "html", "idlelib", "imaplib.py", "imghdr.py", "lib2to3", "mailbox.py", "mailcap.py",
    "modulefinder.py", "multiprocessing", "nntplib.py", "optparse.py", "pdb.py", "pickletools.py", "pipes.py",
    "plistlib.py", "poplib.py", "profile.py", "pstats.py", "pyclbr.py", "pydoc.py", "pydoc_data", "sched.py",
    "shelve.py", "sitecustomize.py", "smtpd.py", "smtplib.py", "sndhdr.py", "sqlite3", "sunau.py",
    "telnetlib.py", "test", "this.py", "timeit.py", "tkinter", "trace.py", "turtle.py", "turtledemo",
    "unittest", "venv", "wave.py", "webbrowser.py", "wsgiref", "xdrlib.py", "xml", "xmlrpc", "zipapp.py",
    "zoneinfo", "__pycache__",
))  # fmt: skip
UNUSED_COMPILED = (
    "_codecs_", "_crypt", "_ctypes_test", "_curses", "_dbm", "_gdbm", "_multibytecodec", "_sqlite3", "_ssl",
    "_test", "_tkinter", "_xx", "audioop", "nis", "ossaudiodev", "readline", "xxlimited",
)  # fmt: skip


def suite_for(version: tuple[int, int]) -> str:
    """The Debian release whose Python is of this version.

    Raises:
        ConfigError: No release has it.
    """
    if version not in SUITES:
        known = " or ".join(f"{major}.{minor} ({suite})" for (major, minor), suite in SUITES.items())
        raise ConfigError(
            "python", InWords(".".join(map(str, version))), f"{known}, of which Debian has a release"
        )
    return SUITES[version]


def this_python() -> tuple[int, int]:
    """Version of this interpreter."""
    return sys.version_info[:2]


def wanted_modules(with_shell: bool) -> list[str]:
    """Names of the modules that an image has, without what they need."""
    lists = [*MODULES.values(), *([SHELL_MODULES] if with_shell else [])]
    return [name for names in lists for name in names.split()]


def module_name(path: str) -> str:
    """A module's name from its path: ``igc`` of ``kernel/drivers/net/ethernet/intel/igc/igc.ko``."""
    return path.rpartition("/")[2].partition(".ko")[0].replace("-", "_")


def read_dependencies(text: str) -> dict[str, list[str]]:
    """``modules.dep``: each module's path, and the paths of those that it needs."""
    found = {}
    for line in text.splitlines():
        path, _, needed = line.partition(":")
        found[path] = needed.split()
    return found


def choose_modules(
    names: Iterable[str], dependencies: Mapping[str, list[str]]
) -> tuple[list[str], list[str]]:
    """Sorted paths of the modules of these names and of all that they need; and names that are not there.

    A name that is not there may be compiled into the kernel, or belong to another version of it.
    """
    by_name = {module_name(path): path for path in dependencies}
    chosen: set[str] = set()
    missing = []
    for name in names:
        path = by_name.get(name.replace("-", "_"))
        if path is None:
            missing.append(name)
        else:
            chosen |= {path, *dependencies[path]}
    return sorted(chosen), missing
