"""What a checkpoint's configuration says of its quantised weights; everything but FP8 is refused by name.

Called by the checkpoint reader and by the host's tensor loader. It knows the JSON of the tools that write
such checkpoints, and no tensors: which of them are quantised follows from their types.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from duckllm.errors import CheckpointError, UnsupportedModelError, show_value
from duckllm.weights.scales import BLOCK_128, PER_CHANNEL, PER_TENSOR, ScaleKind

_SUPPORTED = "FP8 weights as fp8, compressed-tensors or modelopt write them, or an unquantised checkpoint"


@dataclass(frozen=True)
class Quantisation:
    """How a checkpoint's FP8 weights are scaled.

    Args:
        method: The tool's name for it; empty where nothing says that weights are quantised.
        kinds: What may share a scale.
    """

    method: str
    kinds: tuple[ScaleKind, ...]

    @classmethod
    def of(
        cls, where: str, config: Mapping[str, Any], modelopt: Mapping[str, Any] | None = None
    ) -> Quantisation:
        """What the files of a checkpoint say.

        Args:
            where: The checkpoint, for messages.
            config: config.json.
            modelopt: hf_quant_config.json, which counts where config.json says nothing.

        Raises:
            UnsupportedModelError: A scheme other than FP8, by name.
            CheckpointError: A field is malformed.
        """
        for field, absent in (("quantization_config", None), ("compression_config", "compressed-tensors")):
            if config.get(field) is not None:
                at = f"{where}: {field}"
                value = _object(config[field], at)
                method = value.get("quant_method", absent)
                if not isinstance(method, str) or method not in _METHODS:
                    raise _unsupported(f"{at}.quant_method", method, " or ".join(map(repr, _METHODS)))
                return cls(method, _METHODS[method](value, at))
        if modelopt is not None:
            at = f"{where}: hf_quant_config.json: quantization"
            return cls("modelopt", _modelopt(_object(modelopt.get("quantization"), at), at))
        return cls("", (BLOCK_128,))


def _object(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: got {show_value(value)}, expected an object")
    return value


def _unsupported(where: str, got: object, expected: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{where}: got {show_value(got)}, expected {expected} ({_SUPPORTED})")


def _check(value: Mapping[str, Any], where: str, field: str, expected: object, absent: object = None) -> None:
    got = value.get(field, absent)
    if got != expected or type(got) is not type(expected):
        raise _unsupported(f"{where}.{field}", got, repr(expected))


def _block(value: object, where: str) -> ScaleKind:
    sizes = value.split("x") if isinstance(value, str) else value
    if isinstance(sizes, list) and all(isinstance(size, str) and size.isdecimal() for size in sizes):
        sizes = [int(size) for size in sizes]
    if not isinstance(sizes, list) or [type(size) for size in sizes] != [int, int] or min(sizes) < 1:
        raise CheckpointError(f"{where}: got {show_value(value)}, expected rows and columns of a block")
    return ScaleKind(*sizes)


def _fp8(value: Mapping[str, Any], where: str) -> tuple[ScaleKind, ...]:
    _check(value, where, "fmt", "e4m3", absent="e4m3")
    if "weight_block_size" not in value:
        # transformers takes it for 128 x 128, vLLM for one scale per tensor; the scales' shapes tell.
        return BLOCK_128, PER_TENSOR
    size = value["weight_block_size"]
    return (PER_TENSOR if size is None else _block(size, f"{where}.weight_block_size"),)


def _compressed_tensors(value: Mapping[str, Any], where: str) -> tuple[ScaleKind, ...]:
    _check(value, where, "format", "float-quantized")
    sparsity = _object(value.get("sparsity_config") or {}, f"{where}.sparsity_config")
    _check(sparsity, f"{where}.sparsity_config", "format", "dense", absent="dense")
    if value.get("transform_config"):
        raise _unsupported(f"{where}.transform_config", value["transform_config"], "none")
    kinds: dict[ScaleKind, None] = {}
    for name, group in _object(value.get("config_groups"), f"{where}.config_groups").items():
        at = f"{where}.config_groups.{name}"
        group = _object(group, at)
        _check(group, at, "format", "float-quantized", absent="float-quantized")
        if group.get("weights") is None:
            continue
        weights, at = _object(group["weights"], f"{at}.weights"), f"{at}.weights"
        _check(weights, at, "num_bits", 8)
        _check(weights, at, "type", "float")
        _check(weights, at, "symmetric", True, absent=True)
        strategy = weights.get("strategy")
        if strategy == "block":
            kinds[_block(weights.get("block_structure"), f"{at}.block_structure")] = None
        elif isinstance(strategy, str) and strategy in _STRATEGIES:
            kinds[_STRATEGIES[strategy]] = None
        else:
            raise _unsupported(f"{at}.strategy", strategy, "'tensor', 'channel' or 'block'")
    return tuple(kinds)


def _modelopt(value: Mapping[str, Any], where: str) -> tuple[ScaleKind, ...]:
    _check(value, where, "quant_algo", "FP8")
    return (PER_TENSOR,)


_STRATEGIES = {"tensor": PER_TENSOR, "channel": PER_CHANNEL}
_METHODS = {"fp8": _fp8, "compressed-tensors": _compressed_tensors, "modelopt": _modelopt}
