"""Linear layers and the gated MLP: values, rows in any company, errors."""

from __future__ import annotations

import pytest
import torch

from duckllm.errors import CheckpointError, ConfigError
from duckllm.layers.cpu_runtime import CpuRuntime
from duckllm.layers.linear import GatedMLP, Linear
from duckllm.weights.host_tensors import dequantise
from duckllm.weights.scales import ScaleGrid
from support.experts import DictTensors

KINDS = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


@pytest.fixture(scope="module")
def runtime() -> CpuRuntime:
    return CpuRuntime.new(512, 2)


def stored(name: str, shape: tuple[int, int], kind: str, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator)
    if kind == "fp8":
        scales = torch.rand(-(-shape[0] // 128), -(-shape[1] // 128), generator=generator) + 0.5
        return {f"{name}.weight": weight.to(torch.float8_e4m3fn), f"{name}.weight_scale_inv": scales}
    return {f"{name}.weight": weight.to(KINDS[kind])}


def dense(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    weight, scales = tensors[f"{name}.weight"], tensors.get(f"{name}.weight_scale_inv")
    if scales is None:
        return weight.double()
    return dequantise(weight, ScaleGrid(scales.numpy(), 128, 128, tuple(weight.shape))).double()


@pytest.mark.parametrize("kind", ["fp8", *KINDS])
@pytest.mark.parametrize("factor", [1.0, 0.125, 0.3])
@pytest.mark.parametrize("num_rows", [1, 11])
def test_the_product_has_its_factor_and_its_bias(
    runtime: CpuRuntime, kind: str, factor: float, num_rows: int
) -> None:
    tensors = stored("a", (70, 300), kind) | {"a.bias": torch.linspace(-3, 3, 70)}
    layer = Linear.load(DictTensors(tensors), "a", 70, 300, bias=True, runtime=runtime, factor=factor)
    formats = {"fp8": runtime.fp8_format, "bf16": "bf16"}
    assert [weight.format for weight in layer.weights] == [formats.get(kind, "f32")]
    x = torch.randn(num_rows, 300, generator=torch.Generator().manual_seed(1))
    exact = factor * (x.double() @ dense(tensors, "a").T) + tensors["a.bias"].double()
    torch.testing.assert_close(layer(x).double(), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("gate_kind", "up_kind"),
    [("fp8", "fp8"), ("bf16", "bf16"), ("f32", "f32"), ("f16", "f32"), ("fp8", "f16"), ("bf16", "fp8")],
)
@pytest.mark.parametrize("intermediate", [128, 100])
def test_gated_mlp_rows_are_the_same_bits_in_any_company(
    runtime: CpuRuntime, gate_kind: str, up_kind: str, intermediate: int
) -> None:
    """Sizes whose scale blocks can and cannot be joined, and types that can and cannot."""
    tensors = (
        stored("m.gate_proj", (intermediate, 96), gate_kind, 1)
        | stored("m.up_proj", (intermediate, 96), up_kind, 2)
        | stored("m.down_proj", (96, intermediate), gate_kind, 3)
    )
    mlp = GatedMLP(DictTensors(tensors), "m", 96, intermediate, runtime)
    x = torch.randn(37, 96, generator=torch.Generator().manual_seed(4))
    whole = mlp(x)
    hidden = x.double() @ dense(tensors, "m.gate_proj").T
    gated = hidden / (1 + torch.exp(-hidden)) * (x.double() @ dense(tensors, "m.up_proj").T)
    exact = gated @ dense(tensors, "m.down_proj").T
    torch.testing.assert_close(whole.double(), exact, rtol=1e-4, atol=1e-4 * float(exact.abs().max()))
    for sizes in ([1] * 37, [8, 8, 8, 8, 5], [9, 28]):
        assert torch.equal(torch.cat([mlp(part) for part in x.split(sizes)]), whole)


@pytest.mark.parametrize("with_gate", [False, True])
def test_gated_mlp_is_down_of_silu_gate_times_up(runtime: CpuRuntime, with_gate: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    gate, up = torch.randn(6, 4, generator=generator), torch.randn(6, 4, generator=generator)
    down, output_gate = torch.randn(4, 6, generator=generator), torch.randn(1, 4, generator=generator)
    tensors = {"m.gate_proj.weight": gate, "m.up_proj.weight": up, "m.down_proj.weight": down}
    x = torch.randn(5, 4, generator=generator)
    hidden = x @ gate.T
    expected = (hidden / (1 + torch.exp(-hidden)) * (x @ up.T)) @ down.T
    if with_gate:
        tensors["g.weight"] = output_gate
        expected *= 1 / (1 + torch.exp(-x @ output_gate.T))
    mlp = GatedMLP(DictTensors(tensors), "m", 4, 6, runtime, "g" if with_gate else None)
    torch.testing.assert_close(mlp(x), expected)


def test_an_unknown_instruction_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUCK_FORCE_ISA", "sse9")
    with pytest.raises(ConfigError, match="DUCK_FORCE_ISA: got 'sse9', expected one of scalar"):
        CpuRuntime.new(64, 1)


def test_nan_weights_name_their_tensor(runtime: CpuRuntime) -> None:
    tensors = stored("a", (4, 8), "fp8")
    tensors["a.weight"].view(torch.uint8)[1, 2] = 0x7F
    with pytest.raises(CheckpointError, match=r"^a\.weight: got 1 NaN bytes \(0x7f, 0xff\), expected none$"):
        Linear.load(DictTensors(tensors), "a", 4, 8, runtime=runtime)


def test_a_wrong_shape_names_the_tensor_and_both_shapes(runtime: CpuRuntime) -> None:
    tensors = DictTensors({"a.weight": torch.zeros(3, 4), "a.bias": torch.zeros(2)})
    with pytest.raises(CheckpointError, match=r"^a\.weight: got shape \[3, 4\], expected \[4, 3\]"):
        Linear.load(tensors, "a", 4, 3, runtime=runtime)
    with pytest.raises(CheckpointError, match=r"^a\.bias: got shape \[2\], expected \[3\]"):
        Linear.load(tensors, "a", 3, 4, bias=True, runtime=runtime)


def test_a_weight_of_whole_numbers_is_refused(runtime: CpuRuntime) -> None:
    tensors = DictTensors({"a.weight": torch.zeros(3, 4, dtype=torch.int8)})
    with pytest.raises(CheckpointError, match=r"^a\.weight: got torch\.int8, expected a floating type$"):
        Linear.load(tensors, "a", 3, 4, runtime=runtime)


def test_both_formats_of_an_fp8_weight_give_the_same_bits(runtime: CpuRuntime) -> None:
    tensors = DictTensors(stored("a", (40, 200), "fp8"))
    x = torch.randn(3, 200, generator=torch.Generator().manual_seed(1))
    results = [
        Linear.load(tensors, "a", 40, 200, runtime=CpuRuntime(runtime.native, weight_format))(x)
        for weight_format in ("fp8", "fp9")
    ]
    assert torch.equal(*results)
    assert runtime.fp8_format in ("fp8", "fp9")
