"""Facts of this machine, from /proc, /sys and the native module; nothing here judges them.

Every file may be missing, unreadable or odd: the fact is then unknown, with the reason.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from duckllm import _native
from duckllm.config import available_cores
from duckllm.device import card_problem
from duckllm.doctor.finding import Unknown
from duckllm.errors import ConfigError, WeightFormatError
from duckllm.prefill import select_isa
from duckllm.worker.read_speed import cpu_name, kept_read_speed, measure_read_speed

T = TypeVar("T")
_TCP_CONGESTION = 13  # of Linux
# Bytes of struct timex of any architecture; what adjtimex returns while the clock is not kept right.
_TIMEX_BYTES, _TIME_ERROR = 512, 5
# PCI: the vendor, and how classes of displays and of accelerators for them begin.
_NVIDIA, _DISPLAY = "0x10de", "0x03"


@dataclass(frozen=True)
class MachineFacts:
    """What this machine is.

    Args:
        cpu: The processor's name.
        isas: Instruction sets that it can compute with, the best one last.
        isa: The one that is used.
        bf16: Its bf16 multipliers.
        forced_isa: What $DUCK_FORCE_ISA says; empty where it says nothing.
        cores: Cores that this process may run on.
        smt: Whether two of them may be one core's threads.
        memory_bytes: Memory in all, and what of it is available.
        read_gb_per_s: What all cores together read from memory now.
        kept_gb_per_s: What a worker that starts here says it reads, and the file that it is kept in; None for
            none.
        huge_pages: Setting of transparent huge pages.
        reserved_pages: Huge pages that are set aside, in all and free.
        governors: Clock governors of the cores, each with its preference where it has one.
        swap_bytes: Swap in all, and what of it is used.
        clock_is_kept: Whether something keeps the clock right.
        congestion: TCP's congestion control of duck-llm's own connections.
        default_congestion: That of connections whose program does not say.
        cards: NVIDIA's GPUs that the kernel shows, by name.
        card_problem: Why they cannot compute the host's part; empty where one can, or there is none.
        said_gb_per_s: What each worker here that was asked says it reads, and by how many threads.
    """

    cpu: str
    isas: tuple[str, ...]
    isa: str | Unknown
    bf16: tuple[str, ...]
    forced_isa: str
    cores: int
    smt: bool | Unknown
    memory_bytes: tuple[int, int] | Unknown
    read_gb_per_s: float | Unknown
    kept_gb_per_s: tuple[Path, float] | None
    huge_pages: str | Unknown
    reserved_pages: tuple[int, int] | Unknown
    governors: tuple[str, ...] | Unknown
    swap_bytes: tuple[int, int] | Unknown
    clock_is_kept: bool | Unknown
    congestion: str | Unknown
    default_congestion: str | Unknown
    cards: tuple[str, ...] = ()
    card_problem: str = ""
    said_gb_per_s: tuple[tuple[float, int], ...] = ()


def gather_machine(
    root: Path = Path("/"),
    *,
    measure: Callable[[int], float] = measure_read_speed,
    clock_state: Callable[[], int] | None = None,
    find_problem: Callable[[], str] | None = None,
    congestion: Callable[[], str] | None = None,
) -> MachineFacts:
    """The facts of this machine.

    Args:
        root: Where ``proc`` and ``sys`` are.
        measure: Measures what so many threads read, GB/s.
        clock_state: As adjtimex returns it; None asks the kernel.
        find_problem: Says why a card cannot compute; None asks CUDA.
        congestion: Says what a connection of ours has; None asks the kernel, of one that leads nowhere.
    """
    cores = available_cores()
    memory = _meminfo(root)
    cards = _cards(root)
    return MachineFacts(
        cpu=cpu_name(root / "proc/cpuinfo"),
        isas=tuple(_native.available_isas()),
        isa=_or_unknown(select_isa),
        bf16=tuple(_native.available_bf16()),
        forced_isa=os.environ.get("DUCK_FORCE_ISA", ""),
        cores=cores,
        smt=_or_unknown(lambda: _read(root, "sys/devices/system/cpu/smt/active") == "1"),
        memory_bytes=_two_of(memory, "MemTotal", "MemAvailable", 1024),
        read_gb_per_s=_or_unknown(lambda: measure(cores)),
        kept_gb_per_s=_kept(cores),
        huge_pages=_or_unknown(lambda: _chosen(_read(root, "sys/kernel/mm/transparent_hugepage/enabled"))),
        reserved_pages=_two_of(memory, "HugePages_Total", "HugePages_Free", 1),
        governors=_governors(root),
        swap_bytes=_swap(memory),
        clock_is_kept=_or_unknown(lambda: (clock_state or _ask_clock)() != _TIME_ERROR),
        congestion=_or_unknown(congestion or _ask_congestion),
        default_congestion=_or_unknown(lambda: _read(root, "proc/sys/net/ipv4/tcp_congestion_control")),
        cards=cards,
        card_problem=(find_problem or card_problem)() if cards else "",
    )


def congestion_of(connection: socket.socket) -> str:
    """The congestion control of a TCP socket.

    Raises:
        OSError: It has none.
    """
    return connection.getsockopt(socket.IPPROTO_TCP, _TCP_CONGESTION, 16).rstrip(b"\0").decode()


def _ask_congestion() -> str:
    """The congestion control that a socket has once our options are set."""
    with socket.socket() as connection:
        _native.set_connection_options(connection.fileno())
        return congestion_of(connection)


def _cards(root: Path) -> tuple[str, ...]:
    """GPUs of NVIDIA: by name where its driver is loaded, else those that PCI shows."""
    names = []
    for path in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        for line in path.read_text(errors="replace").splitlines():
            if line.startswith("Model:"):
                names.append(line.partition(":")[2].strip())
    if names:
        return tuple(names)
    found = 0
    for device in (root / "sys/bus/pci/devices").glob("*"):
        with contextlib.suppress(OSError):
            vendor = (device / "vendor").read_text().strip()
            kind = (device / "class").read_text().strip()
            found += vendor == _NVIDIA and kind.startswith(_DISPLAY)
    return ("an NVIDIA GPU",) * found


def _or_unknown(find: Callable[[], T]) -> T | Unknown:
    try:
        return find()
    except OSError as error:
        name = "" if error.filename is None else f"{error.filename}: "
        return Unknown(f"{name}{error.strerror or error}")
    except (ConfigError, WeightFormatError, ValueError, IndexError, KeyError) as error:
        return Unknown(str(error) or type(error).__name__)


def _read(root: Path, name: str) -> str:
    return (root / name).read_text(errors="replace").strip()


def _chosen(text: str) -> str:
    """The word in brackets: ``always [madvise] never``."""
    start = text.index("[")
    return text[start + 1 : text.index("]", start)]


def _meminfo(root: Path) -> dict[str, int] | Unknown:
    def parse() -> dict[str, int]:
        lines = [line.split() for line in _read(root, "proc/meminfo").splitlines()]
        return {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1}

    return _or_unknown(parse)


def _two_of(
    memory: dict[str, int] | Unknown, first: str, second: str, unit: int
) -> tuple[int, int] | Unknown:
    if isinstance(memory, Unknown):
        return memory
    missing = [name for name in (first, second) if name not in memory]
    if missing:
        return Unknown(f"/proc/meminfo has no {' and no '.join(missing)}")
    return memory[first] * unit, memory[second] * unit


def _swap(memory: dict[str, int] | Unknown) -> tuple[int, int] | Unknown:
    both = _two_of(memory, "SwapTotal", "SwapFree", 1024)
    return both if isinstance(both, Unknown) else (both[0], both[0] - both[1])


def _governors(root: Path) -> tuple[str, ...] | Unknown:
    folders = sorted((root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq"))
    if not folders:
        return Unknown("the kernel shows no clocks here, as in most virtual machines")

    def parse() -> tuple[str, ...]:
        found = set()
        for folder in folders:
            words = [_read(folder, "scaling_governor")]
            preference = folder / "energy_performance_preference"
            if preference.is_file():
                words.append(_read(folder, preference.name))
            found.add("/".join(words))
        return tuple(sorted(found))

    return _or_unknown(parse)


def _kept(cores: int) -> tuple[Path, float] | None:
    try:
        path, speed = kept_read_speed(cores)
    except ConfigError:
        return None
    return None if speed is None else (path, speed)


def _ask_clock() -> int:
    """What adjtimex says of the clock; changes nothing, for which nobody needs a privilege."""
    library = ctypes.CDLL(None, use_errno=True)
    state = library.adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    if state < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(state)
