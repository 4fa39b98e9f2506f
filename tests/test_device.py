"""The choice of a device, with cards made up: what is taken, and what is said where it cannot be."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import duckllm.device
from duckllm.device import CPU, Device, card_problem, check_device, find_device, vram_kept
from duckllm.errors import ConfigError

GIB = 1 << 30
H200 = ("NVIDIA H200", (9, 0), (130 * GIB, 139 * GIB))
T4 = ("Tesla T4", (7, 5), (14 * GIB, 15 * GIB))
Cards = Callable[..., None]


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Cards:
    """Gives this machine cards that it does not have."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "triton", sys)  # something that can be imported

    def have(*found: tuple[str, tuple[int, int], Any], cuda: str | None = "13.0") -> None:
        def memory(index: int) -> tuple[int, int]:
            if isinstance(found[index][2], Exception):
                raise found[index][2]
            return found[index][2]

        monkeypatch.setattr(duckllm.device, "_has_driver", lambda: True)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: len(found) > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: found[index][0])
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: found[index][1])
        monkeypatch.setattr(torch.cuda, "mem_get_info", memory)

    return have


def refusal(asked: str) -> str:
    with pytest.raises(ConfigError) as caught:
        find_device(asked)
    return str(caught.value)


def test_a_card_is_taken_by_name_or_because_it_is_there(cards: Cards) -> None:
    cards(H200, ("NVIDIA A100", (8, 0), (30 * GIB, 40 * GIB)))
    first = Device("cuda:0", "NVIDIA H200", 130 * GIB, 139 * GIB)
    assert find_device("auto") == find_device("cuda") == find_device("cuda:0") == first
    assert find_device("cuda:1") == Device("cuda:1", "NVIDIA A100", 30 * GIB, 40 * GIB)
    assert first.is_cuda
    assert str(first) == "NVIDIA H200"
    assert refusal("cuda:2") == (
        "device: got 'cuda:2', expected cpu or auto, as CUDA finds 2 here, cuda:0, cuda:1"
    )
    assert find_device("cpu") is CPU
    assert not CPU.is_cuda


def test_what_is_missing_is_said(cards: Cards, monkeypatch: pytest.MonkeyPatch) -> None:
    cards()
    assert refusal("cuda") == "device: got 'cuda', expected cpu or auto, as CUDA finds no GPU here"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert refusal("cuda:1").endswith("as CUDA finds no GPU here (CUDA_VISIBLE_DEVICES is '7')")
    cards(cuda=None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert refusal("cuda") == (
        "device: got 'cuda', expected cpu or auto, as this torch was built without CUDA "
        "(docs/operations.md, A host with a GPU, says how to get it)"
    )
    assert card_problem().startswith("this torch was built without CUDA (docs/")
    cards(H200)
    assert card_problem() == ""
    assert refusal("cuda:1") == "device: got 'cuda:1', expected cpu or auto, as CUDA finds 1 here, cuda:0"
    cards(T4)
    assert refusal("cuda") == (
        "device: got 'cuda', expected cpu or auto, as Tesla T4 has compute capability 7.5 and needs 8.0"
    )
    cards(("NVIDIA H200", (9, 0), RuntimeError("CUDA error: busy\nand more")))
    assert refusal("cuda") == (
        "device: got 'cuda', expected cpu or auto, as NVIDIA H200 cannot be used (CUDA error: busy)"
    )
    cards(H200)
    monkeypatch.setitem(sys.modules, "triton", None)
    assert refusal("cuda").startswith(
        "device: got 'cuda', expected cpu or auto, as Triton cannot be imported (pip install triton; "
    )


def test_what_the_driver_complains_of_is_passed_on(cards: Cards, monkeypatch: pytest.MonkeyPatch) -> None:
    cards()

    def complain() -> bool:
        warnings.warn("the driver is too old\nby years", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", complain)
    assert refusal("cuda").endswith("as CUDA finds no GPU here (the driver is too old)")


def test_auto_takes_the_cpu_and_says_why_where_a_card_cannot_be_used(
    cards: Cards, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards(T4)
    found = find_device("auto")
    assert not found.is_cuda
    assert str(found) == "CPU (Tesla T4 has compute capability 7.5 and needs 8.0)"
    monkeypatch.setattr(duckllm.device, "_has_driver", lambda: False)
    assert find_device("auto") is CPU


@pytest.mark.parametrize("visible", ["", "-1"])
def test_auto_sees_no_card_where_none_is_visible(monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    monkeypatch.setattr(duckllm.device.ctypes, "CDLL", lambda name: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert not duckllm.device._has_driver()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert duckllm.device._has_driver()


@pytest.mark.parametrize("asked", ["gpu", "cuda:", "cuda:-1", "cuda:1x", "CPU", "", 0, None, b"cpu"])
def test_what_names_no_device_is_refused(asked: Any) -> None:
    with pytest.raises(ConfigError, match=r"device: got .*, expected auto, cpu, cuda, or a card of several"):
        check_device(asked)


def test_a_machine_without_a_driver_imports_neither_torch_nor_triton() -> None:
    code = (
        "import sys, ctypes\n"
        "def none(name): raise OSError(name)\n"
        "ctypes.CDLL = none\n"
        "from duckllm.device import CPU, find_device\n"
        "assert find_device('auto') is CPU and find_device('cpu') is CPU\n"
        "assert not {'torch', 'triton'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_vram_that_is_gone_by_the_time_it_is_taken_is_an_error_of_ours() -> None:
    card = Device("cuda:0", "a card", 3 * GIB, 4 * GIB)
    with pytest.raises(ConfigError) as caught, vram_kept(card):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmore")
    assert str(caught.value) == (
        "VRAM: got too little on a card while the model was loaded, expected the 3.00 GiB that were free "
        "before (if no other process took it, a smaller kv_cache_bytes; CUDA out of memory. Tried to "
        "allocate)"
    )
    with pytest.raises(torch.OutOfMemoryError), vram_kept(CPU):
        raise torch.OutOfMemoryError("not ours")
    with pytest.raises(RuntimeError, match="other"), vram_kept(card):
        raise RuntimeError("other")


@pytest.mark.gpu
@pytest.mark.usefixtures("visible_gpu")
def test_the_true_card_is_found() -> None:
    found = find_device("auto")
    assert found == find_device("cuda:0") or found.total_bytes == find_device("cuda:0").total_bytes
    assert found.title == torch.cuda.get_device_name(0)
    assert 0 < found.free_bytes <= found.total_bytes


def test_a_missing_driver_is_the_reason_why_no_card_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duckllm.device, "_has_driver", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert card_problem() == "NVIDIA's driver is not installed (no libcuda.so.1)"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert card_problem() == "CUDA_VISIBLE_DEVICES is '-1'"
