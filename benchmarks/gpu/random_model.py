"""Random models of real sizes, made in seconds: a converted folder, or tensors and experts in memory.

Used by full_size.py. FP8 weights are e4m3 codes of a normal distribution, so that codes are as frequent as in
trained weights, with one scale that makes a matrix keep the size of what it is multiplied with; activations
stay finite through all layers. Numbers are made once, and each tensor, or unit of an expert, takes a stretch
of them from a random place on: for the speed of memory it matters that bytes lie apart, not that they differ.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from duckllm.bench.memory import new_memory
from duckllm.config import available_cores
from duckllm.demo import CHECKPOINT
from duckllm.weights.architectures import layout_of
from duckllm.weights.e4m3 import E4M3_MAX, F32, U8, scale_shape
from duckllm.weights.files import hash_file
from duckllm.weights.formats import num_stripes, unit_bytes, unit_scale_bytes
from duckllm.weights.layout import ModelLayout
from duckllm.weights.manifest import MANIFEST_FILE, ExpertLayer, HostFile, Manifest
from duckllm.weights.reader import DATA_ALIGNMENT, UNITS
from duckllm.weights.records import RECORD_ROWS, STRIPE_CHANNELS
from duckllm.weights.safetensors_file import DTYPE_BYTES, build_header

FORMAT = "fp8"
OTHER_HOST_FILE = "host-other.safetensors"
# The largest of 128 x 128 numbers of a normal distribution is about 4 standard deviations.
CODE_STD = E4M3_MAX / 4
# What stays as it is in checkpoints whose other matrices are FP8.
WIDE = ("embed_tokens", "lm_head", "mlp.gate", "shared_expert_gate", "weights_proj", "block_sparse_moe.gate")
TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn}
_NUMBERS = 1 << 24
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


@dataclass(frozen=True)
class HostTensor:
    """A tensor of the host; numbers of a normal distribution, for FP8 times ``CODE_STD``.

    Args:
        dtype: Safetensors' name of the type.
        shape: Its shape.
        mean: Of the numbers.
        std: Their standard deviation.
    """

    dtype: str
    shape: tuple[int, ...]
    mean: float
    std: float


def host_tensors(config: Mapping[str, Any], layout: ModelLayout) -> dict[str, HostTensor]:
    """The host's tensors by name, with the scales of FP8 ones: all matrices in layers but routers."""
    is_fp8 = config.get("quantization_config") is not None
    tensors = {}
    for name, shape in layout.host_shapes.items():
        if name.endswith("e_score_correction_bias"):
            tensors[name] = HostTensor("F32", shape, 0.0, 0.01)
        elif len(shape) == 1:
            tensors[name] = HostTensor("BF16", shape, 0.0 if name.endswith("bias") else 1.0, 0.1)
        elif is_fp8 and not name.removesuffix(".weight").endswith(WIDE):
            tensors[name] = HostTensor("F8_E4M3", shape, 0.0, 1.0)
            scales = scale_shape(*shape)
            tensors[f"{name}_scale_inv"] = HostTensor("F32", scales, weight_scale(shape[1]), 0.0)
        else:
            std = 1.0 if name == "model.embed_tokens.weight" else shape[-1] ** -0.5
            tensors[name] = HostTensor("BF16", shape, 0.0, std)
    return tensors


def weight_scale(fan_in: int) -> float:
    """The scale of FP8 weights with which a product is about as large as its ``fan_in`` factors."""
    return 1 / (CODE_STD * math.sqrt(fan_in))


class Numbers:
    """Numbers of a normal distribution, and their e4m3 codes.

    Args:
        seed: Of the numbers.
        device: Where they lie.
        count: How many.
    """

    def __init__(self, seed: int, device: str = "cpu", count: int = _NUMBERS) -> None:
        values = np.random.default_rng(seed).standard_normal(count, np.float32)
        self.values = torch.from_numpy(values).to(device)
        codes = (self.values * CODE_STD).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        self.codes = codes.view(torch.uint8)

    def stretches(self, count: int, rng: np.random.Generator) -> Iterator[tuple[slice, slice]]:
        """Where ``count`` numbers go, piece by piece, and where each is taken from."""
        most = len(self.values) // 2
        for start in range(0, count, most):
            length = min(most, count - start)
            source = int(rng.integers(len(self.values) - length + 1))
            yield slice(start, start + length), slice(source, source + length)

    def tensor(self, kind: HostTensor, rng: np.random.Generator) -> torch.Tensor:
        """A tensor of that kind, on the device of the numbers."""
        dtype = TORCH_DTYPES[kind.dtype]
        result = torch.empty(kind.shape, dtype=dtype, device=self.values.device)
        is_fp8 = dtype == torch.float8_e4m3fn
        flat = (result.view(torch.uint8) if is_fp8 else result).reshape(-1)
        for target, source in self.stretches(flat.numel(), rng):
            flat[target] = self.codes[source] if is_fp8 else self.values[source] * kind.std + kind.mean
        return result


class RandomTensors:
    """The host's tensors of a model that is nowhere, for :func:`duckllm.models.registry.load_model`.

    Has the part of :class:`duckllm.weights.host_tensors.HostTensors` that models ask for. A tensor has the
    same numbers each time.

    Args:
        config: The model's config.json.
        layout: Of the same.
        device: Where they are made; the embedding, of which the host reads rows, on the CPU.
        seed: Of the numbers.
    """

    def __init__(
        self, config: Mapping[str, Any], layout: ModelLayout, device: str = "cpu", seed: int = 0
    ) -> None:
        self.folder = Path("random")
        self._kinds = host_tensors(config, layout)
        self._places = {name: place for place, name in enumerate(self._kinds)}
        self._seed, self._numbers = seed, Numbers(seed, device)
        self._embedding: torch.Tensor | None = None

    def names(self) -> list[str]:
        """Every tensor, sorted."""
        return sorted(self._kinds)

    def __contains__(self, name: str) -> bool:
        return name in self._kinds

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""
        return self._kinds[name].shape

    def get(self, name: str) -> torch.Tensor:
        """A tensor as a checkpoint would have it."""
        rng = np.random.default_rng([self._seed, self._places[name]])
        if name != "model.embed_tokens.weight":
            return self._numbers.tensor(self._kinds[name], rng)
        if self._embedding is None:  # the largest one, and the same for every model made of these
            self._embedding = Numbers(self._seed).tensor(self._kinds[name], rng)
        return self._embedding

    def linear(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A linear layer's weight, dequantised."""
        weight, scales = self.stored_linear(name)
        if scales is None:
            return weight.to(dtype)
        return weight.float().mul_(scales[0, 0]).to(dtype)  # all are the same

    def stored_linear(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A linear layer's weight as it is stored, with the scales of an FP8 one."""
        scales = f"{name}.weight_scale_inv"
        return self.get(f"{name}.weight"), self.get(scales) if scales in self else None


class RandomUnits:
    """Fills units of experts.

    Args:
        layout: The model.
        seed: Of the numbers.

    Raises:
        ValueError: A unit of this model has padding, which has to be zeros.
    """

    def __init__(self, layout: ModelLayout, seed: int = 0) -> None:
        hidden, intermediate = layout.hidden_size, layout.moe_intermediate_size
        if hidden % RECORD_ROWS or intermediate % STRIPE_CHANNELS:
            expected = f"multiples of {RECORD_ROWS} and of {STRIPE_CHANNELS}"
            raise ValueError(
                f"hidden size and width of experts: got {hidden}, {intermediate}, want {expected}"
            )
        self.expert_shape = num_stripes(intermediate), unit_bytes(hidden, FORMAT)
        self._scales = self._scale_section(hidden, intermediate)
        num_codes = self.expert_shape[1] - len(self._scales)
        self._codes = Numbers(seed, count=max(_NUMBERS, 2 * num_codes)).codes.numpy()

    @staticmethod
    def _scale_section(hidden: int, intermediate: int) -> U8:
        section = np.zeros(unit_scale_bytes(hidden, FORMAT) // 4, np.float32)
        blocks = scale_shape(hidden, hidden)[0]
        section[: 2 * blocks] = weight_scale(hidden)
        section[2 * blocks : 3 * blocks] = weight_scale(intermediate)
        return section.view(np.uint8)

    def fill(self, units: U8, rng: np.random.Generator) -> None:
        """Makes the units of one expert: [S, unit_bytes(H)]."""
        length = units.shape[1] - len(self._scales)
        for unit, start in zip(
            units, rng.integers(len(self._codes) - length + 1, size=len(units)), strict=True
        ):
            unit[: len(self._scales)] = self._scales
            unit[len(self._scales) :] = self._codes[start : start + length]


def random_layers(layout: ModelLayout, count: int, seed: int = 0) -> list[U8]:
    """The units of ``count`` layers' experts in huge pages, made by all cores.

    Shapes:
        result: [E, S, unit_bytes(H)] u8 of each layer
    """
    filler = RandomUnits(layout, seed)
    shape = (layout.num_experts, *filler.expert_shape)
    layers = [new_memory(math.prod(shape), huge_pages=True).reshape(shape) for _ in range(count)]

    def fill(number: int) -> None:
        layer, expert = divmod(number, layout.num_experts)
        filler.fill(layers[layer][expert], np.random.default_rng([seed, number]))

    with ThreadPoolExecutor(available_cores()) as pool:
        list(pool.map(fill, range(count * layout.num_experts)))
    return layers


def cut(config: Mapping[str, Any], num_layers: int | None, num_experts: int | None = None) -> dict[str, Any]:
    """A configuration with fewer layers, or fewer experts, and no layer of multi-token prediction."""
    changes: dict[str, Any] = {"num_nextn_predict_layers": 0} if "num_nextn_predict_layers" in config else {}
    if num_layers is not None:
        changes["num_hidden_layers"] = num_layers
        if "first_k_dense_replace" in config:
            changes["first_k_dense_replace"] = min(config["first_k_dense_replace"], num_layers - 1)
    if num_experts is not None:
        changes["n_routed_experts" if "n_routed_experts" in config else "num_experts"] = num_experts
    return {**config, **changes}


def write_model(folder: Path, config: Mapping[str, Any], seed: int = 0) -> Manifest:
    """Writes a converted model, with the demo model's tokenizer, by all cores.

    Args:
        folder: To be made; there must be none.
        config: The model's config.json.
        seed: Of the numbers.

    Raises:
        ValueError: As :class:`RandomUnits`.
    """
    layout = layout_of(config, {})
    filler, numbers = RandomUnits(layout, seed), Numbers(seed)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for name in _TOKENIZER_FILES:
        if (CHECKPOINT / name).is_file():
            (folder / name).write_bytes((CHECKPOINT / name).read_bytes())
    by_file: dict[str, dict[str, HostTensor]] = {OTHER_HOST_FILE: {}}
    for name, kind in host_tensors(config, layout).items():
        layer = layout.layer_of(name)
        file = OTHER_HOST_FILE if layer is None else f"host-{layer:05d}.safetensors"
        by_file.setdefault(file, {})[name] = kind
    with ThreadPoolExecutor(available_cores()) as pool:
        hosts = {
            file: pool.submit(_write_host_file, folder / file, tensors, numbers, [seed, 0, place])
            for place, (file, tensors) in enumerate(by_file.items())
        }
        layers = {
            layer: pool.submit(_write_experts, folder, layer, layout, filler, [seed, 1, layer])
            for layer in layout.moe_layers
        }
        host_files = {file: each.result() for file, each in hosts.items()}
        expert_layers = {layer: each.result() for layer, each in layers.items()}
    manifest = Manifest(
        folder=folder,
        format=FORMAT,
        architecture=layout.architecture,
        model_type=layout.model_type,
        source={"fingerprint": f"random {seed}", "dtype": "fp8"},
        hidden_size=layout.hidden_size,
        moe_intermediate_size=layout.moe_intermediate_size,
        num_experts=layout.num_experts,
        num_experts_per_tok=layout.num_experts_per_tok,
        num_stripes=filler.expert_shape[0],
        unit_bytes=filler.expert_shape[1],
        config_sha256=hash_file(folder / "config.json"),
        host_files=host_files,
        expert_layers=expert_layers,
        created_by="benchmarks/gpu/random_model.py",
    )
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest.to_json()))
    return manifest


def _write_host_file(
    path: Path, tensors: Mapping[str, HostTensor], numbers: Numbers, seed: Sequence[int]
) -> HostFile:
    rng, digest = np.random.default_rng(seed), hashlib.sha256()
    with path.open("wb", buffering=0) as file:

        def write(data: bytes | U8) -> None:
            digest.update(data)
            _write_all(file, data)

        ordered = dict(sorted(tensors.items(), key=lambda item: -DTYPE_BYTES[item[1].dtype]))  # aligned
        header = {name: (kind.dtype, kind.shape) for name, kind in ordered.items()}
        write(build_header(header, {"format": "pt"}, 64))
        for kind in ordered.values():
            for _, source in numbers.stretches(math.prod(kind.shape), rng):
                if kind.dtype == "F8_E4M3":
                    write(numbers.codes.numpy()[source])
                    continue
                values: F32 = numbers.values.numpy()[source] * np.float32(kind.std) + np.float32(kind.mean)
                write((values if kind.dtype == "F32" else bf16_bits(values)).view(np.uint8))
        return HostFile(digest.hexdigest(), file.tell())


def bf16_bits(values: F32) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Finite numbers in bf16, rounded half up; numpy has no such type."""
    return ((values.view(np.uint32) + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16)


def _write_experts(
    folder: Path, layer: int, layout: ModelLayout, filler: RandomUnits, seed: Sequence[int]
) -> ExpertLayer:
    rng, path = np.random.default_rng(seed), folder / f"experts-{layer:05d}.safetensors"
    units = np.empty(filler.expert_shape, np.uint8)
    digests = [hashlib.sha256() for _ in range(len(units))]
    shape = (layout.num_experts, *filler.expert_shape)
    with path.open("wb", buffering=0) as file:
        metadata = {"format": FORMAT, "layer": str(layer)}
        _write_all(file, build_header({UNITS: ("U8", shape)}, metadata, DATA_ALIGNMENT))
        for _ in range(layout.num_experts):
            filler.fill(units, rng)
            for digest, unit in zip(digests, units, strict=True):
                digest.update(unit)
            _write_all(file, units)
        return ExpertLayer(path.name, file.tell(), tuple(digest.hexdigest() for digest in digests))


def _write_all(file: BinaryIO, data: bytes | U8) -> None:
    rest = memoryview(data).cast("B")
    while rest:
        rest = rest[file.write(rest) :]
