"""What a checkpoint's configuration says of its quantised weights: FP8 and 4-bit forms; others are refused.

Called by the checkpoint reader and by the host's tensor loader. It knows the JSON of the tools that write
such checkpoints, and no tensors: which of them are quantised follows from their types.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from duckllm.errors import CheckpointError, UnsupportedModelError, show_value
from duckllm.weights.imports.awq import Awq
from duckllm.weights.imports.compressed_tensors import PackQuantized
from duckllm.weights.imports.gptq import Gptq
from duckllm.weights.imports.mxfp4 import GROUP, MxFp4Blocks, MxFp4PackQuantized
from duckllm.weights.imports.packed import PackedForm, StoredMatrix, Tensors
from duckllm.weights.scales import BLOCK_128, PER_CHANNEL, PER_TENSOR, ScaleKind

_SUPPORTED = (
    "FP8 weights as fp8, compressed-tensors or modelopt write them, 4-bit ones as compressed-tensors, gptq, "
    "awq or gpt-oss do, or an unquantised checkpoint"
)
_Said = tuple[tuple[ScaleKind, ...], tuple[PackedForm, ...]]


@dataclass(frozen=True)
class Quantisation:
    """How a checkpoint's FP8 weights are scaled, and in which forms it has 4-bit ones.

    Args:
        method: The tool's name for it; empty where nothing says that weights are quantised.
        kinds: What may share a scale of FP8 weights.
        packed: Forms of 4-bit matrices.
    """

    method: str
    kinds: tuple[ScaleKind, ...]
    packed: tuple[PackedForm, ...] = ()

    def find_packed(self, tensors: Tensors, weight: str, shape: tuple[int, ...]) -> StoredMatrix | None:
        """The matrix that a checkpoint has in a tool's form in place of a weight; None where it has none.

        Raises:
            CheckpointError: It has a part of one, or one of other shapes or types.
            UnsupportedModelError: It is of a kind that is not supported.
        """
        wrong: CheckpointError | None = None
        for form in self.packed if len(shape) == 2 else ():
            try:
                found = form.find(tensors, weight, (shape[0], shape[1]))
            except CheckpointError as error:  # the form of another group may fit
                wrong = wrong or error
                continue
            if found is not None:
                return found
        if wrong is not None:
            raise wrong
        return None

    def expected_format(self, dtype: str) -> str:
        """The weight format that will hold 4-bit experts as they are, as far as a configuration tells.

        Args:
            dtype: Type of the weights that are not quantised, as safetensors call it; compressed-tensors has
                scales of it, GPTQ and AWQ have f16 ones.

        Returns:
            The format; empty where there are no 4-bit forms, or several, or FP8 beside them.
        """
        if len(self.packed) != 1 or (self.method == "compressed-tensors" and self.kinds):
            return ""
        (form,) = self.packed
        if isinstance(form, (MxFp4Blocks, MxFp4PackQuantized)):
            return "mxfp4"
        has_zeros = isinstance(form, Awq) or not getattr(form, "symmetric", True)
        is_bf16 = isinstance(form, PackQuantized) and dtype == "BF16"
        return "int4" + "-zero" * has_zeros + "-bf16" * is_bf16

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
            UnsupportedModelError: A scheme that is not supported, by name.
            CheckpointError: A field is malformed.
        """
        for field, absent in (("quantization_config", None), ("compression_config", "compressed-tensors")):
            if config.get(field) is not None:
                at = f"{where}: {field}"
                value = _object(config[field], at)
                method = value.get("quant_method", absent)
                if not isinstance(method, str) or method not in _METHODS:
                    raise _unsupported(f"{at}.quant_method", method, " or ".join(map(repr, _METHODS)))
                return cls(method, *_METHODS[method](value, at))
        if modelopt is not None:
            at = f"{where}: hf_quant_config.json: quantization"
            return cls("modelopt", *_modelopt(_object(modelopt.get("quantization"), at), at))
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


def _group_size(value: object, where: str) -> int | None:
    """Weights of a row that share a scale; None for all of them, which tools write as -1."""
    if type(value) is not int or (value < 1 and value != -1):
        raise CheckpointError(
            f"{where}: got {show_value(value)}, expected a whole number of at least 1, or -1"
        )
    return None if value == -1 else value


def _flag(value: Mapping[str, Any], where: str, field: str, absent: bool | None = None) -> bool:
    got = value.get(field, absent)
    if type(got) is not bool:
        raise CheckpointError(f"{where}.{field}: got {show_value(got)}, expected true or false")
    return got


def _fp8(value: Mapping[str, Any], where: str) -> _Said:
    _check(value, where, "fmt", "e4m3", absent="e4m3")
    if "weight_block_size" not in value:
        # transformers takes it for 128 x 128, vLLM for one scale per tensor; the scales' shapes tell.
        return (BLOCK_128, PER_TENSOR), ()
    size = value["weight_block_size"]
    return (PER_TENSOR if size is None else _block(size, f"{where}.weight_block_size"),), ()


def _compressed_tensors(value: Mapping[str, Any], where: str) -> _Said:
    whole = value.get("format")
    if whole != _MIXED:
        _check_format(whole, f"{where}.format")
    sparsity = _object(value.get("sparsity_config") or {}, f"{where}.sparsity_config")
    _check(sparsity, f"{where}.sparsity_config", "format", "dense", absent="dense")
    if value.get("transform_config"):
        raise _unsupported(f"{where}.transform_config", value["transform_config"], "none")
    kinds: dict[ScaleKind, None] = {}
    packed: dict[PackedForm, None] = {}
    for name, group in _object(value.get("config_groups"), f"{where}.config_groups").items():
        at = f"{where}.config_groups.{name}"
        group = _object(group, at)
        form = _check_format(group.get("format") or whole, f"{at}.format")
        if group.get("weights") is None:
            continue
        weights, at = _object(group["weights"], f"{at}.weights"), f"{at}.weights"
        if form == "float-quantized":
            kinds[_float_quantized(weights, at)] = None
        else:
            packed[_PACKED[form](weights, at)] = None
    return tuple(kinds), tuple(packed)


def _check_format(form: object, where: str) -> str:
    known = ("float-quantized", *_PACKED)
    if not isinstance(form, str) or form not in known:
        raise _unsupported(where, form, " or ".join(map(repr, known)))
    return form


def _float_quantized(weights: Mapping[str, Any], where: str) -> ScaleKind:
    _check(weights, where, "num_bits", 8)
    _check(weights, where, "type", "float")
    _check(weights, where, "symmetric", True, absent=True)
    strategy = weights.get("strategy")
    if strategy == "block":
        return _block(weights.get("block_structure"), f"{where}.block_structure")
    if isinstance(strategy, str) and strategy in _STRATEGIES:
        return _STRATEGIES[strategy]
    raise _unsupported(f"{where}.strategy", strategy, "'tensor', 'channel' or 'block'")


def _pack_quantized(weights: Mapping[str, Any], where: str) -> PackedForm:
    _check(weights, where, "num_bits", 4)
    _check(weights, where, "type", "int")
    # "static" and "weight" leave the inputs where they are; "group" and "dynamic" scatter groups.
    if weights.get("actorder") not in (None, "static", "weight"):
        raise _unsupported(f"{where}.actorder", weights["actorder"], "null, 'static' or 'weight'")
    strategy, size = weights.get("strategy"), None
    if strategy == "group":
        size = _group_size(weights.get("group_size"), f"{where}.group_size")
    elif strategy != "channel":
        raise _unsupported(f"{where}.strategy", strategy, "'group' or 'channel'")
    return PackQuantized(size, _flag(weights, where, "symmetric", absent=True))


def _mxfp4_pack_quantized(weights: Mapping[str, Any], where: str) -> PackedForm:
    _check(weights, where, "num_bits", 4)
    _check(weights, where, "type", "float")
    _check(weights, where, "strategy", "group")
    _check(weights, where, "group_size", GROUP)
    _check(weights, where, "symmetric", True, absent=True)
    return MxFp4PackQuantized()


def _gptq(value: Mapping[str, Any], where: str) -> _Said:
    _check(value, where, "bits", 4)
    _check(value, where, "pack_dtype", "int32", absent="int32")
    _check(value, where, "is_marlin_format", False, absent=False)
    field = "format" if "checkpoint_format" not in value and "format" in value else "checkpoint_format"
    version = value.get(field, "gptq")
    if version not in ("gptq", "gptq_v2"):
        raise _unsupported(f"{where}.{field}", version, "'gptq' or 'gptq_v2'")
    size = _group_size(value.get("group_size"), f"{where}.group_size")
    is_symmetric = _flag(value, where, "sym", absent=True)
    ordered = _flag(value, where, "desc_act", absent=False)
    return (), (Gptq(size, is_symmetric, version == "gptq", ordered),)


def _awq(value: Mapping[str, Any], where: str) -> _Said:
    _check(value, where, "bits" if "bits" in value else "w_bit", 4)
    _check(value, where, "zero_point", True, absent=True)
    field = "format" if "version" not in value and "format" in value else "version"
    version = value.get(field, "gemm")
    if not isinstance(version, str) or version.lower() != "gemm":
        raise _unsupported(f"{where}.{field}", version, "'gemm'")
    field = "group_size" if "group_size" in value else "q_group_size"
    return (), (Awq(_group_size(value.get(field), f"{where}.{field}")),)


def _mxfp4(value: Mapping[str, Any], where: str) -> _Said:
    return (), (MxFp4Blocks(),)


def _modelopt(value: Mapping[str, Any], where: str) -> _Said:
    _check(value, where, "quant_algo", "FP8")
    return (PER_TENSOR,), ()


_MIXED = "mixed-precision"  # each group says its own
_PACKED = {"pack-quantized": _pack_quantized, "mxfp4-pack-quantized": _mxfp4_pack_quantized}
_STRATEGIES = {"tensor": PER_TENSOR, "channel": PER_CHANNEL}
_METHODS = {
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "gptq": _gptq,
    "awq": _awq,
    "mxfp4": _mxfp4,
}
