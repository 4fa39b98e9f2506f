"""Peak memory of a conversion: under two layers' experts, whatever the number of layers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from random_checkpoint import make_checkpoint
from stacking import stack

MEASURED = """
import json, re, sys
from duckllm.weights.convert import convert
def peak():  # not getrusage's, which begins with the parent's
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
convert(sys.argv[1], sys.argv[2])
small = peak()
manifest = convert(sys.argv[3], sys.argv[4])
grown = peak() - small
convert(sys.argv[3], sys.argv[4], verify=True)
layers = [entry.bytes for entry in manifest.expert_layers.values()]
print(json.dumps([grown, peak() - small, max(layers), len(layers)]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "form"), [("F8_E4M3", None), ("BF16", None), ("BF16", {"transposed": True})]
)
def test_memory_stays_under_two_layers(tmp_path: Path, dtype: str, form: dict | None) -> None:
    """Whether an expert has tensors of its own (None), or all have one."""
    make_checkpoint(tmp_path / "small", dtype=dtype)
    sizes = {"hidden_size": 512, "moe_intermediate_size": 256, "n_routed_experts": 32, "num_hidden_layers": 3}
    edit = None if form is None else lambda tensors: stack(tensors, **form)
    make_checkpoint(tmp_path / "src", dtype=dtype, edit=edit, **sizes)
    folders = [str(tmp_path / name) for name in ("small", "small-out", "src", "out")]
    command = [sys.executable, "-c", MEASURED, *folders]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200).stdout
    converting_bytes, verifying_bytes, layer_bytes, num_layers = json.loads(output)
    assert num_layers == 3
    assert layer_bytes > 14_000_000
    assert converting_bytes < 2 * layer_bytes
    assert verifying_bytes < 2 * layer_bytes
