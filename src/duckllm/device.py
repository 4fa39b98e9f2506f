"""Where the host's part is computed: on the CPU, or on a GPU.

Called once, early, by what loads or plans a model; never by a worker. torch is imported only where there is
an NVIDIA driver or a GPU was asked for, Triton only where there is a card that it can compute on.
"""

from __future__ import annotations

import ctypes
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from duckllm.config import show_size
from duckllm.errors import ConfigError, InWords

# The kernels' matrix units and asynchronous copies.
LEAST_CAPABILITY = (8, 0)
EXPECTED = "auto, cpu, cuda, or a card of several: cuda:1"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_NAME = re.compile(r"cuda(?::(\d{1,3}))?", re.ASCII)


@dataclass(frozen=True)
class Device:
    """What computes the host's part.

    Args:
        name: As torch names it: ``"cpu"``, ``"cuda:0"``.
        title: For people: ``"CPU"``, ``"NVIDIA H200"``.
        free_bytes: VRAM that can be had; 0 on a CPU, whose memory is counted elsewhere.
        total_bytes: VRAM in all.
        why: Why it is none of the cards there are, where auto chose it.
    """

    name: str
    title: str
    free_bytes: int = 0
    total_bytes: int = 0
    why: str = ""

    @property
    def is_cuda(self) -> bool:
        """Whether it is a GPU."""
        return self.name != "cpu"

    def __str__(self) -> str:
        return f"{self.title} ({self.why})" if self.why else self.title


CPU = Device("cpu", "CPU")


def check_device(asked: object) -> None:
    """Refuses what names no device; looks for none.

    Raises:
        ConfigError: It is neither auto, cpu, cuda nor a card's name.
    """
    if not isinstance(asked, str) or not (asked in ("auto", "cpu") or _NAME.fullmatch(asked)):
        raise ConfigError("device", asked, EXPECTED)


def find_device(asked: str) -> Device:
    """The device that ``asked`` names; for ``"auto"`` the first card, if it can be used, else the CPU.

    Of a card the free memory is measured, for which CUDA takes its own part of it first: processes that are
    forked from here afterwards cannot use CUDA.

    Raises:
        ConfigError: It names none, or a card that is not there or cannot be used.
    """
    check_device(asked)
    if asked == "cpu" or (asked == "auto" and not _has_driver()):
        return CPU
    match = _NAME.fullmatch(asked)
    try:
        return _find_card(int(match[1] or 0) if match else 0)
    except _Unusable as error:
        if asked == "auto":
            return Device("cpu", "CPU", why=error.why)
        raise ConfigError("device", asked, f"cpu or auto, as {error.why}", error.hint) from error


def card_problem() -> str:
    """Why no card here can compute the host's part; empty where the first one can."""
    if not _has_driver():
        if os.environ.get(_VISIBLE) in ("", "-1"):
            return f"{_VISIBLE} is {os.environ[_VISIBLE]!r}"
        return "NVIDIA's driver is not installed (no libcuda.so.1)"
    try:
        _find_card(0)
    except _Unusable as error:
        return f"{error.why} ({error.hint})" if error.hint else error.why
    except ImportError as error:
        return f"torch cannot be imported ({_first_line(error)})"
    return ""


@contextmanager
def vram_kept(device: Device) -> Iterator[None]:
    """Lets what is inside take VRAM that was counted before.

    Raises:
        ConfigError: It is not there any more, or the count was wrong.
    """
    try:
        yield
    except Exception as error:
        if not device.is_cuda or type(error).__name__ != "OutOfMemoryError":  # torch's, not imported here
            raise
        raise ConfigError(
            "VRAM",
            InWords(f"too little on {device.title} while the model was loaded"),
            f"the {show_size(device.free_bytes)} that were free before",
            f"if no other process took it, a smaller kv_cache_bytes; {_first_line(error)}",
        ) from error


class _Unusable(Exception):
    """A card that is not there or cannot be used: why, and what helps."""

    def __init__(self, why: str, hint: str = "") -> None:
        super().__init__(why)
        self.why, self.hint = why, hint


def _has_driver() -> bool:
    """Whether CUDA may find a card, without starting it."""
    if os.environ.get(_VISIBLE) in ("", "-1"):
        return False
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _find_card(index: int) -> Device:
    import torch

    count, problem = _count_cards(torch)
    if not count:
        visible = os.environ.get(_VISIBLE)
        hint = problem if visible is None else f"{_VISIBLE} is {visible!r}"
        if torch.version.cuda is None:
            raise _Unusable(
                "this torch was built without CUDA",
                "docs/operations.md, A host with a GPU, says how to get it",
            )
        raise _Unusable("CUDA finds no GPU here", hint)
    if index >= count:
        raise _Unusable(f"CUDA finds {count} here, " + ", ".join(f"cuda:{each}" for each in range(count)))
    title = torch.cuda.get_device_name(index)
    capability = torch.cuda.get_device_capability(index)
    if capability < LEAST_CAPABILITY:
        got, least = (".".join(map(str, each)) for each in (capability, LEAST_CAPABILITY))
        raise _Unusable(f"{title} has compute capability {got} and needs {least}")
    try:
        import_module("triton")
    except Exception as error:  # a broken installation raises anything
        hint = f"pip install triton; {type(error).__name__}: {_first_line(error)}"
        raise _Unusable("Triton cannot be imported", hint) from error
    try:
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    except RuntimeError as error:  # in use by another alone, or with no memory left for CUDA itself
        raise _Unusable(f"{title} cannot be used", _first_line(error)) from error
    return Device(f"cuda:{index}", title, free_bytes, total_bytes)


def _count_cards(torch: Any) -> tuple[int, str]:
    """How many cards CUDA finds, and what it says where that is not all well."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return count, _first_line(caught[0].message) if caught else ""


def _first_line(error: object) -> str:
    return (str(error).splitlines() or [""])[0]
