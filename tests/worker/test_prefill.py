"""Workers and in-process experts compute prompts in bf16 where they are asked to, and say so."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from duckllm import LLM, _native
from duckllm.errors import ConfigError
from duckllm.moe.local import LocalExperts
from duckllm.worker.__main__ import main
from duckllm.worker.config import WorkerConfig
from worker_harness import connect, make_model, make_step, open_transport, plan_for, running_worker

needs_bf16 = pytest.mark.skipif(not _native.available_bf16(), reason="this CPU has no bf16 multipliers")


@needs_bf16
def test_a_worker_computes_what_experts_here_do(tmp_path: Path) -> None:
    manifest = make_model(tmp_path / "model")
    step = make_step(manifest, 40)
    arrays = [torch.from_numpy(array) for array in (step.x, step.topk_ids, step.topk_weights)]
    here = {
        prefill: LocalExperts(manifest, prefill=prefill).submit(step.layer, *arrays).wait().numpy()
        for prefill in ("f32", "bf16")
    }
    with running_worker(tmp_path, "--prefill", "bf16") as worker:
        connection = connect(worker.address, plan_for(manifest, max_step_tokens=40)[0])
        assert connection.info.isa == f"{_native.select_isa()}+{_native.select_bf16('avx512')}"
        with open_transport([connection]) as transport:
            got = transport.wait(transport.submit(step.layer, step.x, step.topk_ids, step.topk_weights))
    np.testing.assert_array_equal(got, here["bf16"])
    off = abs(here["bf16"] - here["f32"]).max() / abs(here["f32"]).max()
    assert 1e-4 < off < 1e-2


@needs_bf16
@pytest.mark.parametrize("workers", [0, 1])
def test_the_option_reaches_the_experts(demo_folder: Path, workers: int) -> None:
    with LLM(demo_folder, workers=workers, max_model_len=64, prefill="bf16") as llm:
        assert llm.cluster_info().isas == (f"avx512+{_native.select_bf16('avx512')}",)
        reply = llm.chat([{"role": "user", "content": "Is 1001 prime?"}])[0].outputs[0]
    assert reply.text == "No, 1001 is not prime: 1001 = 7 x 11 x 13."


@pytest.mark.parametrize("value", ["f16", "", "BF16"])
def test_an_unknown_prefill_is_refused(value: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"prefill: got .*, expected one of f32, bf16"):
        WorkerConfig(prefill=value)
    assert main(["--prefill", value]) == 2
    assert "expected one of f32, bf16" in capfd.readouterr().err
    with pytest.raises(ConfigError, match=r"prefill: got .*, expected one of f32, bf16"):
        LLM(prefill=value)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_cpu_without_bf16_is_refused_before_anything_starts(
    demo_folder: Path, workers: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_native, "available_bf16", list)
    sentence = "prefill: got 'bf16', expected f32, as this CPU has neither AVX512-BF16 nor AMX-BF16"
    with pytest.raises(ConfigError, match=f"^{sentence}$"):
        LLM(demo_folder, workers=workers, prefill="bf16")
    assert main(["--listen", "127.0.0.1:0", "--prefill", "bf16"]) == 2
    assert capfd.readouterr().err == f"error: {sentence}\n"
