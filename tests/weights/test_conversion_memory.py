"""Peak memory of a conversion: under two layers' experts, whatever the number of layers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from random_checkpoint import make_checkpoint

MEASURED = """
import json, resource, sys
from duckllm.weights.convert import convert
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
convert(sys.argv[1], sys.argv[2])
small = peak()
manifest = convert(sys.argv[3], sys.argv[4], verify=sys.argv[5] == "verify")
print(json.dumps([peak() - small, max(e.bytes for e in manifest.expert_layers.values())]))
"""


@pytest.mark.parametrize("dtype", ["F8_E4M3", "BF16"])
@pytest.mark.parametrize("verify", ["", "verify"])
def test_memory_stays_under_two_layers(tmp_path: Path, dtype: str, verify: str) -> None:
    make_checkpoint(tmp_path / "small", dtype=dtype)
    sizes = {"hidden_size": 512, "moe_intermediate_size": 256, "n_routed_experts": 64, "num_hidden_layers": 4}
    made = make_checkpoint(tmp_path / "src", dtype=dtype, **sizes)
    checkpoint_bytes = sum(len(data) for _, _, data in made.tensors.values())
    folders = [str(tmp_path / name) for name in ("small", "small-out", "src", "out")]
    command = [sys.executable, "-c", MEASURED, *folders, verify]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200).stdout
    grown_bytes, layer_bytes = json.loads(output)
    assert checkpoint_bytes > 3 * layer_bytes
    assert layer_bytes > 25_000_000
    assert grown_bytes < 2 * layer_bytes
