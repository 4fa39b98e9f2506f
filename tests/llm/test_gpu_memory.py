"""What a start counts of a GPU's memory, held against what PyTorch has taken there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from duckllm import LLM, SamplingParams
from duckllm.engine.cache_size import PAGE_TOKENS

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("visible_gpu")]


@pytest.mark.parametrize("draft", ["off", "on"])
def test_a_start_takes_what_was_counted(demo_folder: Path, draft: str) -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    options = {"workers": 0, "device": "cuda", "draft": draft, "max_num_seqs": 4}
    with LLM(demo_folder, **options) as llm:
        memory = llm.memory()
        assert llm.device.title == torch.cuda.get_device_name(0)
        assert str(memory).startswith(f"host on {llm.device.title}: ")
        tensors = [tensor for layer in llm._engine.kv_cache.tensors for tensor in layer]
        assert {(tensor.dtype, tensor.device.type) for tensor in tensors} == {(torch.bfloat16, "cuda")}
        assert memory.cache_bytes == sum(tensor.nbytes for tensor in tensors)
        assert memory.cache_tokens == 4 * 4096 == llm._engine.kv_cache.num_pages * PAGE_TOKENS
        held = torch.cuda.memory_allocated() - allocated - memory.cache_bytes
        assert memory.weight_bytes <= held < memory.weight_bytes + memory.workspace_bytes
        question = [{"role": "user", "content": "What is a duck?"}]
        llm.chat(question, SamplingParams(temperature=0, max_tokens=20))
        assert torch.cuda.max_memory_reserved() - reserved <= memory.vram_bytes
