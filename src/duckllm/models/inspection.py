"""What a model is and what it weighs, from its configuration and the headers of its files alone.

Called by ``duckllm inspect`` and by the planner. Takes a converted model, a checkpoint, or a folder with
nothing but ``config.json``; reads no weights. What the host keeps of a tensor is what the layers of
:mod:`duckllm.layers` make of it on a CPU, or on a GPU.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from duckllm.config import LOSSLESS_FORMATS
from duckllm.errors import ModelNotFoundError
from duckllm.weights.architectures import layout_of
from duckllm.weights.checkpoint import FP8, Checkpoint, is_gguf, load_json, read_quantisation
from duckllm.weights.config_values import check_values
from duckllm.weights.e4m3 import scale_shape
from duckllm.weights.files import model_errors
from duckllm.weights.formats import FORMATS, LayerFormat, is_lossless, num_stripes
from duckllm.weights.layer_formats import (
    CONVERTED_FORMATS,
    LayerNumbers,
    check_rules,
    in_words,
    layer_formats,
)
from duckllm.weights.layout import ConfigReader, ModelLayout
from duckllm.weights.manifest import MANIFEST_FILE, Manifest
from duckllm.weights.safetensors_file import DTYPE_BYTES, TensorInfo, read_header
from duckllm.weights.scales import PER_CHANNEL
from duckllm.weights.tensor_check import find_tensors

if TYPE_CHECKING:
    from duckllm.models.config import ModelConfig

# The host's tensors by the first of these that a name holds.
_PARTS = (
    ("embed_tokens", "embedding"),
    ("lm_head", "head"),
    ("self_attn", "attention"),
    (".gate.", "router"),
    ("shared_expert", "shared expert"),
    ("proj.weight", "dense MLP"),
    ("", "norms"),
)
_WIDE = {"float32": "F32", "float16": "F16"}
MTP = "multi-token prediction"
ORDER = ("embedding", "attention", "dense MLP", "shared expert", "router", "norms", "head", MTP)


@dataclass(frozen=True)
class Part:
    """A part of what the host computes with.

    Args:
        name: One of :data:`ORDER`.
        num_weights: Numbers in its tensors, scales not counted.
        stored_bytes: In the files, scales included.
        loaded_bytes: In a CPU host's memory; 0 for what it does not load.
        read_bytes: Of that, read for each token.
        gpu_bytes: In the VRAM of a host's GPU; 0 for what is not there.
    """

    name: str
    num_weights: int
    stored_bytes: int
    loaded_bytes: int
    read_bytes: int
    gpu_bytes: int


@dataclass(frozen=True)
class Inspection:
    """A model, from outside.

    Args:
        folder: Where it lies.
        kind: ``"converted"``, ``"checkpoint"`` or ``"configuration"``.
        layout: Its shape.
        num_hidden_layers: Layers that a token passes.
        dtype: Type of the stored expert weights, or of most; of a configuration alone, what it says.
        scale_layout: Which weights of an expert share a scale, ``"block"`` or ``"channel"``.
        weight_format: The format of a converted model's experts, or of most, else None.
        layer_formats: That of each layer of a converted model; of a checkpoint the 4-bit formats that hold
            layers as they are, of a configuration alone as far as it tells; empty where there is none.
        parts: The host's part, in :data:`ORDER`.
        max_position_embeddings: Its longest context.
        cache_elements_per_token: Numbers that the KV cache holds for one token.
        draft_bytes: What a CPU host that drafts loads of the layer of multi-token prediction.
        draft_cache_elements: Numbers that the KV cache holds for one token of that layer.
        draft_gpu_bytes: What a host with a GPU loads of that layer.
        step_elements: Numbers that a step computes of one of its tokens in a layer, of which a GPU holds most
            at a time.
        rotary_elements: Cosines and sines of one position.
        has_indexer: Whether layers select what they attend to.
        vocab_size: V.
    """

    folder: Path
    kind: str
    layout: ModelLayout
    num_hidden_layers: int
    dtype: str
    scale_layout: str
    weight_format: str | None
    layer_formats: Mapping[int, str]
    parts: tuple[Part, ...]
    max_position_embeddings: int
    cache_elements_per_token: int
    draft_bytes: int
    draft_cache_elements: int
    draft_gpu_bytes: int
    step_elements: int
    rotary_elements: int
    has_indexer: bool
    vocab_size: int

    @property
    def num_moe_layers(self) -> int:
        """Layers with routed experts that a token passes."""
        return sum(layer < self.num_hidden_layers for layer in self.layout.moe_layers)

    @property
    def num_mtp_layers(self) -> int:
        """Layers of multi-token prediction."""
        return self.layout.num_layers - self.num_hidden_layers

    @property
    def num_stripes(self) -> int:
        """Stripes of a whole expert."""
        return num_stripes(self.layout.moe_intermediate_size)

    @property
    def expert_weights(self) -> int:
        """Weights of one expert."""
        return 3 * self.layout.hidden_size * self.layout.moe_intermediate_size

    @property
    def num_weights(self) -> int:
        """Weights of the model, those of multi-token prediction not counted."""
        host = sum(part.num_weights for part in self.parts if part.name != MTP)
        return host + self.num_moe_layers * self.layout.num_experts * self.expert_weights

    @property
    def active_weights(self) -> int:
        """Weights that one token is multiplied with, or picked from, the embedding not counted."""
        host = sum(part.num_weights for part in self.parts if part.name not in (MTP, "embedding"))
        return host + self.num_moe_layers * self.layout.num_experts_per_tok * self.expert_weights

    def formats_in(self, weight_format: str, keep: Sequence[str] | None = None) -> dict[int, str]:
        """The format of each layer's experts, those of multi-token prediction included.

        Args:
            weight_format: The format asked for: of a converted model its own, or fp9 or fp8 in the place of
                each other; else as a conversion into it has them.
            keep: Layers in other formats, as :func:`duckllm.weights.layer_formats.layer_formats` takes them.

        Raises:
            ConfigError: A rule is none.
        """
        stored = self.layer_formats
        if self.weight_format is not None and keep is None:
            if weight_format == self.weight_format:
                return dict(stored)
            if is_lossless(weight_format) and any(map(is_lossless, stored.values())):
                return {layer: weight_format if is_lossless(name) else name for layer, name in stored.items()}
        numbers, kept = self._rules_for(weight_format)
        return layer_formats(numbers, kept, weight_format=weight_format, keep=keep, requantise=True)

    def check_rules(self, weight_format: str, keep: Sequence[str] | None) -> None:
        """Refuses rules that change nothing of a format; raises as of :meth:`formats_in`, and for those."""
        numbers, kept = self._rules_for(weight_format)
        check_rules(numbers, kept, weight_format=weight_format, keep=keep)

    def _rules_for(self, weight_format: str) -> tuple[LayerNumbers, Mapping[int, str]]:
        """The layers that rules speak of, and what those have in 4 bits."""
        numbers = LayerNumbers(self.layout.moe_layers, self.num_hidden_layers)
        if weight_format in FORMATS and weight_format not in CONVERTED_FORMATS:
            # As if the checkpoint had it so.
            return numbers, dict.fromkeys(self.layout.moe_layers, weight_format)
        return numbers, {} if self.weight_format else self.layer_formats

    def _layers(self, drafts: bool) -> list[int]:
        """The layers with experts that a token passes, and with guesses the first that makes them."""
        passed = [layer for layer in self.layout.moe_layers if layer < self.num_hidden_layers]
        return [*passed, self.num_hidden_layers] if drafts else passed

    def formats_in_words(
        self, weight_format: str, *, drafts: bool = False, keep: Sequence[str] | None = None
    ) -> str:
        """``"int4, fp8 in layer 61"``: the workers' layers for people; arguments as of :meth:`formats_in`."""
        formats = self.formats_in(weight_format, keep)
        return in_words({layer: formats.get(layer, weight_format) for layer in self._layers(drafts)})

    @property
    def comparable_formats(self) -> tuple[str, ...]:
        """Formats to choose from without loss on loss: none where experts are rounded to one already."""
        stored = [name for name in self.layer_formats.values() if name]
        if not all(map(is_lossless, stored)):
            return ()
        return LOSSLESS_FORMATS if self.weight_format else (*LOSSLESS_FORMATS, "int8", "int4")

    def counted_formats(
        self, weight_format: str, *, drafts: bool = False, keep: Sequence[str] | None = None
    ) -> dict[LayerFormat, int]:
        """How many of the workers' layers are in each format; arguments as of :meth:`formats_in`."""
        formats = self.formats_in(weight_format, keep)
        layers = self._layers(drafts)
        return dict(
            Counter(LayerFormat.of(formats.get(each, weight_format), self._e4m3_layout) for each in layers)
        )

    @property
    def _e4m3_layout(self) -> str:
        return "channel" if self.scale_layout == "channel" else "block"

    def stripe_bytes(
        self, weight_format: str, *, drafts: bool = False, keep: Sequence[str] | None = None
    ) -> int:
        """Bytes of one stripe of every expert of every layer that a token passes, or of one layer more."""
        counted = self.counted_formats(weight_format, drafts=drafts, keep=keep)
        hidden, experts = self.layout.hidden_size, self.layout.num_experts
        return experts * sum(form.unit_bytes(hidden) * count for form, count in counted.items())

    def expert_bytes(
        self, weight_format: str, *, drafts: bool = False, keep: Sequence[str] | None = None
    ) -> int:
        """Bytes of all experts that the workers hold."""
        return self.num_stripes * self.stripe_bytes(weight_format, drafts=drafts, keep=keep)

    def expert_read_bytes(self, weight_format: str, keep: Sequence[str] | None = None) -> int:
        """Bytes of experts that one token reads, over all workers."""
        held = self.expert_bytes(weight_format, keep=keep)
        return held * self.layout.num_experts_per_tok // self.layout.num_experts


def inspect_model(folder: Path) -> Inspection:
    """What lies in a folder.

    Raises:
        ModelNotFoundError: No such folder, or no config.json in it.
        UnsupportedModelError: The architecture, or a feature of it, is not implemented.
        ModelError: A file is malformed.
    """
    with model_errors(folder):
        if not folder.is_dir():
            raise ModelNotFoundError(f"{folder}: no such folder")
        if not (folder / "config.json").is_file():
            raise ModelNotFoundError(f"{folder}: got no config.json, expected a model folder")
        is_converted = (folder / MANIFEST_FILE).is_file()
        has_weights = any(folder.glob("*.safetensors")) or any(folder.glob("*.safetensors.index.json"))
        has_weights = has_weights or is_gguf(folder)
    if is_converted:
        found = _read_converted(folder)
    elif has_weights:
        found = _read_checkpoint(folder)
    else:
        found = _read_configuration(folder)
    from duckllm.models.mtp import draft_attention  # and torch with it
    from duckllm.models.registry import load_config

    parsed = load_config(folder)
    has_draft_layer = found.layout.num_layers > parsed.num_hidden_layers
    draft_bytes = _draft_bytes(found.layout, found.host, parsed.num_hidden_layers)
    return Inspection(
        folder=folder,
        kind=found.kind,
        layout=found.layout,
        num_hidden_layers=parsed.num_hidden_layers,
        dtype=found.dtype,
        scale_layout=found.scale_layout,
        weight_format=found.weight_format,
        layer_formats=found.layer_formats,
        parts=_parts(found.layout, found.host, parsed),
        max_position_embeddings=parsed.max_position_embeddings,
        cache_elements_per_token=parsed.cache_elements_per_token,
        draft_bytes=draft_bytes[0],
        draft_cache_elements=sum(draft_attention(parsed).cache_widths) if has_draft_layer else 0,
        draft_gpu_bytes=draft_bytes[1],
        step_elements=_step_elements(parsed),
        rotary_elements=2 * parsed.rotary.inv_freq.numel(),
        has_indexer=_has_indexer(parsed),
        vocab_size=parsed.vocab_size,
    )


@dataclass(frozen=True)
class _Found:
    """What a folder holds: its kind, its shape, the host's tensors, and how its experts are stored."""

    kind: str
    layout: ModelLayout
    host: tuple[TensorInfo, ...]
    dtype: str
    scale_layout: str
    weight_format: str | None = None
    layer_formats: Mapping[int, str] = field(default_factory=dict)


def _read_converted(folder: Path) -> _Found:
    manifest = Manifest.load(folder)
    manifest.check_config()
    host: dict[str, TensorInfo] = {}
    for file in manifest.host_files:
        host |= read_header(folder / file)
    layout = layout_of(load_json(folder / "config.json"), host)
    dtype = str(manifest.source.get("dtype", ""))
    layouts = {manifest.layer_format(layer).scale_layout for layer in manifest.expert_layers}
    scale_layout = "channel" if "channel" in layouts else manifest.scale_layout
    return _Found(
        *("converted", layout, tuple(host.values()), dtype, scale_layout),
        manifest.format,
        manifest.layer_formats(),
    )


def _read_checkpoint(folder: Path) -> _Found:
    checkpoint = Checkpoint.open(folder)
    layout = layout_of(checkpoint.config, checkpoint.tensors)
    tensors = find_tensors(checkpoint, layout)
    experts = tensors.experts
    kept = {layer: experts.kept_format(layer) for layer in layout.moe_layers}
    return _Found(
        *("checkpoint", layout, tensors.host, experts.dtype, experts.scale_layout), layer_formats=kept
    )


def _read_configuration(folder: Path) -> _Found:
    config = load_json(folder / "config.json")
    check_values(config)
    layout = layout_of(config, _assumed_mtp(folder, config))
    quantisation = read_quantisation(folder, config)
    wide = _WIDE.get(str(config.get("dtype") or config.get("torch_dtype")), "BF16")
    is_fp8 = bool(quantisation.method and quantisation.kinds)
    host = _assumed_host(folder, layout, FP8 if is_fp8 else "BF16" if quantisation.packed else wide, wide)
    dtype = quantisation.packed[0].name if quantisation.packed else FP8 if is_fp8 else wide
    kept = "channel" if PER_CHANNEL in quantisation.kinds else "block"
    format_4_bits = quantisation.expected_format(wide)
    num_passed = ConfigReader(config).positive("num_hidden_layers") if format_4_bits else 0
    formats = {layer: format_4_bits for layer in layout.moe_layers if layer < num_passed}
    return _Found("configuration", layout, host, dtype, kept, layer_formats=formats)


def _parts(layout: ModelLayout, tensors: Iterable[TensorInfo], config: ModelConfig) -> tuple[Part, ...]:
    sums = {name: [0, 0, 0, 0, 0] for name in ORDER}
    for info in tensors:
        layer = layout.layer_of(info.name)
        is_mtp = layer is not None and layer >= config.num_hidden_layers
        name = MTP if is_mtp else _part_of(info.name)
        loaded = 0 if is_mtp else _loaded_bytes(info, name)
        entry = sums[name]
        entry[0] += 0 if _is_scale(info.name) else math.prod(info.shape)
        entry[1] += info.num_bytes
        entry[2] += loaded
        entry[3] += 0 if name == "embedding" else loaded
        # Of the embedding a row is read for each token, in CPU memory: only as the head too is it on the GPU.
        is_there = not is_mtp and (name != "embedding" or config.tie_word_embeddings)
        entry[4] += _gpu_bytes(info, name) if is_there else 0
    return tuple(Part(name, *values) for name, values in sums.items() if values[1])


def _draft_bytes(layout: ModelLayout, tensors: Iterable[TensorInfo], layer: int) -> tuple[int, int]:
    """What is loaded of the layer of multi-token prediction, whose embedding and head are the model's.

    On a CPU, and on a GPU.
    """
    own = [
        (info, _part_of(info.name))
        for info in tensors
        if layout.layer_of(info.name) == layer
        and "embed_tokens" not in info.name
        and "shared_head.head" not in info.name
    ]
    return sum(_loaded_bytes(*each) for each in own), sum(_gpu_bytes(*each) for each in own)


def _part_of(name: str) -> str:
    return next(part for text, part in _PARTS if text in name)


def _is_scale(name: str) -> bool:
    return "scale" in name.rpartition(".")[2]


def _loaded_bytes(info: TensorInfo, part: str) -> int:
    """What a CPU host keeps of a tensor: native layouts of FP8 and BF16 matrices, everything else as f32."""
    is_matrix = len(info.shape) == 2 and part != "norms"
    # MLA multiplies with both halves of this one itself, in f32.
    if part == "embedding" or (
        is_matrix and info.dtype in (FP8, "BF16") and not info.name.endswith("kv_b_proj.weight")
    ):
        return info.num_bytes
    return 4 * math.prod(info.shape)


def _gpu_bytes(info: TensorInfo, part: str) -> int:
    """What a host with a GPU keeps of a tensor there: FP8 and BF16 matrices as they are, the rest as f32."""
    is_matrix = len(info.shape) == 2 and part != "norms" and not _is_scale(info.name)
    if is_matrix and info.dtype in (FP8, "BF16"):
        return info.num_bytes
    return 4 * math.prod(info.shape)


def _step_elements(config: ModelConfig) -> int:
    """What a token's way through the widest layer makes, in numbers, each counted once."""
    from duckllm.layers.mla import MLAShape

    shared = config.shared.intermediate_size if config.shared else 0
    # The residual, both norms, the outputs of attention, experts and MLP; gate, up and their product.
    around = 6 * config.hidden_size + 3 * max(config.intermediate_size, shared)
    widest = 0
    for shape in config.attention:
        if isinstance(shape, MLAShape):
            query = shape.qk_nope_head_dim + shape.qk_rope_head_dim
            absorbed = shape.kv_lora_rank + shape.qk_rope_head_dim
            heads = shape.num_heads * (query + absorbed + shape.kv_lora_rank + shape.v_head_dim)
            indexer = shape.indexer
            selection = indexer.num_heads * indexer.head_dim + indexer.topk if indexer else 0
            widest = max(widest, heads + selection)
        else:  # queries, what is attended to, keys and values
            widest = max(widest, 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim)
    return around + widest


def _has_indexer(config: ModelConfig) -> bool:
    from duckllm.layers.mla import MLAShape

    return any(isinstance(shape, MLAShape) and shape.indexer for shape in config.attention)


def _assumed_mtp(folder: Path, config: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """A name in each layer of multi-token prediction that the configuration speaks of."""
    read = ConfigReader(config)
    first = read.positive("num_hidden_layers")
    names = (
        f"model.layers.{first + n}.enorm.weight" for n in range(read.count("num_nextn_predict_layers", 0))
    )
    return {name: TensorInfo(name, "BF16", (), folder, 0, 0) for name in names}


def _assumed_host(folder: Path, layout: ModelLayout, dtype: str, wide: str) -> tuple[TensorInfo, ...]:
    """The host's tensors as checkpoints have them: matrices in ``dtype``, FP8 in 128 x 128 blocks."""
    found = []
    for name, shape in layout.host_shapes.items():
        is_wide = _part_of(name) in ("embedding", "head", "router", "norms")
        is_wide = is_wide or len(shape) != 2 or name.endswith("weights_proj.weight")
        kind = wide if is_wide else dtype
        found.append(TensorInfo(name, kind, shape, folder, 0, math.prod(shape) * DTYPE_BYTES[kind]))
        if kind == FP8:
            scales = scale_shape(shape[0], shape[1])
            found.append(TensorInfo(f"{name}_scale_inv", "F32", scales, folder, 0, 4 * math.prod(scales)))
    return tuple(found)
