"""Linear layers whose stored weight goes through the native kernels: values, rows in any company, errors."""

from __future__ import annotations

import pytest
import torch

from duckllm.errors import CheckpointError, ConfigError
from duckllm.layers.linear import GatedMLP, Linear
from duckllm.layers.runtime import LinearRuntime
from duckllm.weights.host_tensors import dequantise
from duckllm.weights.scales import ScaleGrid
from support.experts import DictTensors


@pytest.fixture(scope="module")
def runtime() -> LinearRuntime:
    return LinearRuntime.new(512, 2)


def stored(name: str, shape: tuple[int, int], kind: str, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator)
    if kind == "fp8":
        scales = torch.rand(-(-shape[0] // 128), -(-shape[1] // 128), generator=generator) + 0.5
        return {f"{name}.weight": weight.to(torch.float8_e4m3fn), f"{name}.weight_scale_inv": scales}
    return {f"{name}.weight": weight.to({"bf16": torch.bfloat16, "f16": torch.float16}[kind])}


def dense(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    weight, scales = tensors[f"{name}.weight"], tensors.get(f"{name}.weight_scale_inv")
    if scales is None:
        return weight.double()
    return dequantise(weight, ScaleGrid(scales.numpy(), 128, 128, tuple(weight.shape))).double()


@pytest.mark.parametrize("kind", ["fp8", "bf16", "f16"])
@pytest.mark.parametrize("factor", [1.0, 0.125, 0.3])
@pytest.mark.parametrize("num_rows", [1, 11])
def test_the_product_has_its_factor_and_its_bias(
    runtime: LinearRuntime, kind: str, factor: float, num_rows: int
) -> None:
    tensors = stored("a", (70, 300), kind) | {"a.bias": torch.linspace(-3, 3, 70)}
    layer = Linear.load(
        DictTensors(tensors), "a", 70, 300, torch.float32, bias=True, runtime=runtime, factor=factor
    )
    assert (layer.weight is None) == (kind != "f16")  # the packed form takes the dense weight's place
    x = torch.randn(num_rows, 300, generator=torch.Generator().manual_seed(1))
    exact = factor * (x.double() @ dense(tensors, "a").T) + tensors["a.bias"].double()
    torch.testing.assert_close(layer(x).double(), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
@pytest.mark.parametrize("intermediate", [128, 100])
def test_gated_mlp_rows_are_the_same_bits_in_any_company(
    runtime: LinearRuntime, kind: str, intermediate: int
) -> None:
    """Sizes whose scale blocks can and cannot be joined."""
    tensors = (
        stored("m.gate_proj", (intermediate, 96), kind, 1)
        | stored("m.up_proj", (intermediate, 96), kind, 2)
        | stored("m.down_proj", (96, intermediate), kind, 3)
    )
    mlp = GatedMLP(DictTensors(tensors), "m", 96, intermediate, torch.float32, runtime)
    x = torch.randn(37, 96, generator=torch.Generator().manual_seed(4))
    whole = mlp(x)
    hidden = x.double() @ dense(tensors, "m.gate_proj").T
    gated = hidden / (1 + torch.exp(-hidden)) * (x.double() @ dense(tensors, "m.up_proj").T)
    exact = gated @ dense(tensors, "m.down_proj").T
    torch.testing.assert_close(whole.double(), exact, rtol=1e-4, atol=1e-4 * float(exact.abs().max()))
    for sizes in ([1] * 37, [8, 8, 8, 8, 5], [9, 28]):
        assert torch.equal(torch.cat([mlp(part) for part in x.split(sizes)]), whole)


def test_an_unknown_instruction_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUCK_FORCE_ISA", "sse9")
    with pytest.raises(ConfigError, match="DUCK_FORCE_ISA: got 'sse9', expected one of scalar"):
        LinearRuntime.new(64, 1)


def test_nan_weights_name_their_tensor(runtime: LinearRuntime) -> None:
    tensors = stored("a", (4, 8), "fp8")
    tensors["a.weight"].view(torch.uint8)[1, 2] = 0x7F
    with pytest.raises(CheckpointError, match=r"^a\.weight: got 1 NaN bytes \(0x7f, 0xff\), expected none$"):
        Linear.load(DictTensors(tensors), "a", 4, 8, torch.float32, runtime=runtime)


def test_a_wrong_shape_of_a_packed_weight_is_named(runtime: LinearRuntime) -> None:
    with pytest.raises(CheckpointError, match=r"^a\.weight: got shape \[4, 8\], expected \[8, 4\]"):
        Linear.load(DictTensors(stored("a", (4, 8), "bf16")), "a", 8, 4, torch.float32, runtime=runtime)


def test_both_formats_of_an_fp8_weight_give_the_same_bits(runtime: LinearRuntime) -> None:
    tensors = DictTensors(stored("a", (40, 200), "fp8"))
    x = torch.randn(3, 200, generator=torch.Generator().manual_seed(1))
    results = [
        Linear.load(
            tensors, "a", 40, 200, torch.float32, runtime=LinearRuntime(runtime.native, weight_format)
        )(x)
        for weight_format in ("fp8", "fp9")
    ]
    assert torch.equal(*results)
    assert runtime.fp8_format in ("fp8", "fp9")
