"""What needs no weights to be found wrong is found before workers start and before anything is loaded."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import duckllm.assembly
import duckllm.assembly_experts
import duckllm.llm
from duckllm import LLM
from duckllm.device import Device
from duckllm.engine.page_files import PageFolder, PageFormat
from duckllm.errors import CacheFormatError, ConfigError, DuckError
from duckllm.weights.manifest import Manifest


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 4097}, "max_model_len: got 4097, expected at most 4096, the model's longest"),
        ({"kv_disk_dir": "{folder}/thesis.txt"}, "kv_disk_dir: got '{folder}/thesis.txt', expected a folder"),
        ({"kv_disk_dir": "{folder}"}, "{folder}: got a folder with 'thesis.txt' and no kv-cache.json"),
        (
            {"kv_disk_bytes": "2GiB"},
            "kv_disk_bytes: got 2.00 GiB, expected a folder for them: it needs kv_disk_dir",
        ),
        ({"kv_cache_bytes": "much"}, "kv_cache_bytes: got 'much', expected a size: 2GiB"),
        ({"kv_memory_bytes": "-1"}, "kv_memory_bytes: got '-1', expected a size"),
        ({"kv_memory_bytes": None}, "kv_memory_bytes: got None, expected an integer of at least 0"),
        ({"draft": "off", "draft_tokens": 4}, "draft_tokens: got 4, expected nothing with draft off, which"),
        ({"device": "gpu"}, "device: got 'gpu', expected auto, cpu, cuda, or a card of several: cuda:1"),
        ({"device": "cuda"}, "device: got 'cuda', expected cpu or auto, as "),
        ({"workers": "two"}, "workers: got 'two', expected name:port"),
        ({"workers": ["a:1", "two"]}, "workers: got 'two', expected name:port"),
        ({"workers": ["a:1"], "threads_per_worker": 4}, "threads_per_worker: got 4, expected nothing with"),
        ({"workers": ["a:1"], "prefill": "bf16"}, "prefill: got 'bf16', expected nothing with workers elsew"),
        (
            {"workers": ["a:1"], "spin_us": 5},
            "spin_us: got 5, expected nothing with workers elsewhere, whose",
        ),
    ],
)
def test_a_mistake_is_found_before_workers_start(
    demo_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    message: str,
) -> None:
    def start(*_: object) -> None:
        raise AssertionError("workers were started")

    monkeypatch.setattr(duckllm.llm, "begin_workers", start)
    (tmp_path / "thesis.txt").write_text("mine")
    given = {
        name: value.format(folder=tmp_path) if isinstance(value, str) else value
        for name, value in options.items()
    }
    with pytest.raises(DuckError) as caught:
        LLM(demo_folder, **given)
    assert str(caught.value).startswith(message.format(folder=tmp_path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_memory_bytes": "1KiB"}, "kv_memory_bytes: got 1.00 KiB, expected 0, or at least 4"),
        ({"kv_cache_bytes": 1000}, "kv_cache_bytes: got 1000 bytes, expected at least "),
        (
            {"kv_disk_dir": "pages", "kv_disk_bytes": "1KiB"},
            "kv_disk_bytes: got 1.00 KiB, expected more than 49.00 KiB, one page",
        ),
        (
            {"kv_cache_bytes": "15GiB", "kv_memory_bytes": "15GiB"},
            "memory: got 23.50 GiB available, expected",
        ),
        ({"kv_cache_bytes": "23.4GiB"}, "memory: got 23.50 GiB available, expected at least 23."),
    ],
)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_size_that_cannot_be_is_found_before_workers_start_and_weights_are_loaded(
    demo_folder: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str, workers: int
) -> None:
    def begin(*_: object, **__: object) -> None:
        raise AssertionError("weights were loaded, or workers started")

    monkeypatch.setattr("duckllm.assembly.load_model", begin)
    monkeypatch.setattr(duckllm.llm, "begin_workers", begin)
    monkeypatch.setattr(duckllm.llm, "available_memory_bytes", lambda: 47 << 29)
    with pytest.raises(ConfigError) as caught:
        LLM(demo_folder, workers=workers, **options)
    assert str(caught.value).startswith(message)


CARD = Device("cuda:0", "a card", 1 << 30, 2 << 30)


def test_a_card_that_has_too_little_vram_is_refused_or_left(
    demo_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name before workers start; with auto the CPU computes, and it is said why."""
    asked = []

    def find(name: str) -> Device:
        asked.append(name)
        return dataclasses.replace(CARD, free_bytes=1 << 28)

    monkeypatch.setattr(duckllm.assembly, "find_device", find)
    monkeypatch.setattr(duckllm.llm, "begin_workers", lambda *_: pytest.fail("workers were started"))
    message = r"VRAM: got 256\.00 MiB free on a card, expected at least 5\d\d\."
    with pytest.raises(ConfigError, match=message) as caught:
        LLM(demo_folder, device="cuda:0")
    with LLM(demo_folder, workers=0, max_model_len=64) as llm:
        assert not llm.device.is_cuda
        assert llm.device.why.startswith("VRAM: got 256.00 MiB free on a card, expected at least 5")
        assert str(llm.memory()).startswith(f"host on CPU ({llm.device.why}): ")
        assert llm.memory().vram_bytes == 0
    assert asked == ["cuda:0", "auto"]
    assert caught.value.exit_code == 2


def test_vram_that_another_process_took_meanwhile_is_an_error_of_ours(
    demo_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object, **how: Any) -> None:
        assert how["device"] == torch.device("cuda:0")
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(duckllm.assembly, "find_device", lambda _: CARD)
    monkeypatch.setattr(duckllm.assembly, "load_model", load)
    monkeypatch.setattr(duckllm.assembly_experts, "experts_of_gpu", lambda executor, *_: executor)
    with pytest.raises(ConfigError, match="VRAM: got too little on a card while the model was loaded"):
        LLM(demo_folder, workers=0)


def test_auto_does_not_hide_what_is_wrong_with_other_memory(
    demo_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duckllm.assembly, "find_device", lambda _: CARD)
    monkeypatch.setattr(duckllm.llm, "available_memory_bytes", lambda: 1 << 30)
    with pytest.raises(ConfigError, match=r"memory: got 1\.00 GiB available, expected at least 1\.3"):
        LLM(demo_folder, workers=0)


def test_pages_that_a_gpu_computed_are_refused_before_workers_start(
    demo_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duckllm.llm, "begin_workers", lambda *_: pytest.fail("workers were started"))
    model_hash = Manifest.load(demo_folder).model_hash
    for dtype in ("bfloat16", "float32"):
        PageFolder(tmp_path / dtype, PageFormat(model_hash, dtype, ((1,),) * 7, 16, 16), 1 << 20)
    with pytest.raises(CacheFormatError, match="computed on a GPU in bfloat16, and it is a CPU now"):
        LLM(demo_folder, kv_disk_dir=tmp_path / "bfloat16")
    monkeypatch.setattr(duckllm.assembly, "find_device", lambda _: CARD)
    with pytest.raises(CacheFormatError, match="computed on a CPU in float32, and it is a GPU now"):
        LLM(demo_folder, kv_disk_dir=tmp_path / "float32")
