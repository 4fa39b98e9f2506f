"""The plan of one worker, as data: which slice of which files, and the sizes of the steps to come.

Made by :mod:`duckllm.moe.placement`, sent by :mod:`duckllm.cluster.connect`, obeyed by
:mod:`duckllm.worker.session`. It is all that a worker knows about a model.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

from duckllm import _native
from duckllm.config import FORMAT_CHOICES, SCALE_LAYOUTS, WEIGHT_FORMATS, WIRE_DTYPES, parse_multicast
from duckllm.errors import ConfigError, ProtocolError, show_value
from duckllm.weights.formats import FORMATS, LayerFormat, is_lossless
from duckllm.weights.json_values import is_plain_name, is_sha256


@dataclass(frozen=True)
class LayerPlan:
    """One layer's file and the hashes of the slice's stripes.

    Args:
        layer: The layer.
        file: Name of its expert file, inside the model folder.
        stripe_sha256: SHA-256 of each stripe of the slice, in order.
        format: Weight format of the file, where that is not the plan's; else empty.
        scale_layout: Layout of the scales in it, with a format; else empty.
    """

    layer: int
    file: str
    stripe_sha256: tuple[str, ...]
    format: str = ""
    scale_layout: str = ""


@dataclass(frozen=True)
class MulticastPlan:
    """The group by which requests come.

    Args:
        group: Its IPv4 address.
        port: UDP port.
        session: What datagrams name, 16 hexadecimal digits.
        nonce: What the key of their tags is made from, 64 hexadecimal digits.
        fragment_bytes: Bytes of a request in one datagram.
    """

    group: str
    port: int
    session: str
    nonce: str
    fragment_bytes: int


@dataclass(frozen=True)
class WorkerPlan:
    """What one worker is to serve.

    Args:
        model_hash: The converted model's hash, for messages.
        format: Weight format of the files, or of most (:meth:`layer_format`).
        scale_layout: Layout of the scales in them, ``"block"``, ``"channel"`` or ``"group"``.
        hidden_size: H.
        intermediate_size: I of a whole expert.
        num_experts: E.
        top_k: K, most experts per token.
        total_stripes: Stripes of a whole expert.
        unit_bytes: Bytes of a unit in that format.
        first_stripe: First stripe of the slice.
        num_stripes: S, stripes of the slice.
        layers: Every layer that has experts.
        folder: Where the host has the model; a worker that has no folder of its own looks there. Empty where
            it is not to.
        max_step_tokens: Most tokens in one step.
        wire_dtype: Activations on the wire, ``"f32"`` or ``"bf16"``.
        reply_dtype: Partial sums on the wire, ``"f32"`` or ``"bf16"``.
        weight_format: Format to compute in; ``"auto"`` leaves it to the worker.
        multicast: The group by which requests may come beside the connection; None where there is none.
    """

    model_hash: str
    format: str
    scale_layout: str
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    total_stripes: int
    unit_bytes: int
    first_stripe: int
    num_stripes: int
    layers: tuple[LayerPlan, ...]
    folder: str
    max_step_tokens: int
    wire_dtype: str = "f32"
    reply_dtype: str = "f32"
    weight_format: str = "auto"
    multicast: MulticastPlan | None = None

    def layer_format(self, layer: LayerPlan) -> LayerFormat:
        """How a layer's experts are stored."""
        return LayerFormat(layer.format or self.format, layer.scale_layout or self.scale_layout)

    def unit_bytes_of(self, layer: LayerPlan) -> int:
        """Bytes of a unit of a layer."""
        return self.layer_format(layer).unit_bytes(self.hidden_size) if layer.format else self.unit_bytes

    def computed_bytes(self, used: Collection[str]) -> int:
        """Bytes of the slice's units as a worker computes with them: layers in fp9 or fp8 in either of these.

        Args:
            used: The formats that it says it computes in.
        """
        units = self.num_experts * self.num_stripes
        total = 0
        for layer in self.layers:
            form = self.layer_format(layer)
            if form.format not in used:
                other = next((name for name in used if is_lossless(name)), form.format)
                form = LayerFormat(other, form.scale_layout)
            total += units * form.unit_bytes(self.hidden_size)
        return total

    def to_json(self) -> dict[str, Any]:
        """The plan as PREPARE carries it; layers say their format where it is another than the plan's."""
        value = asdict(self)
        for layer in value["layers"]:
            if not layer["format"]:
                del layer["format"], layer["scale_layout"]
        return value

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> WorkerPlan:
        """The plan that a PREPARE frame carries, every field checked.

        Raises:
            ProtocolError: A field is missing, unknown, of the wrong kind or out of range.
        """
        fields = cls.__dataclass_fields__
        if value.keys() != fields.keys():
            odd = sorted(value.keys() ^ fields.keys())
            raise ProtocolError(
                f"plan: got missing or unknown fields {show_value(odd)}, expected exactly {sorted(fields)}"
            )
        layers = value["layers"]
        _check("layers", layers, "a list of at least one layer", isinstance(layers, list) and layers)
        for name in _SIZES:
            got = value[name]
            _check(name, got, "a whole number from 1 to 2147483647", type(got) is int and 1 <= got < 1 << 31)
        for name in ("model_hash", "folder"):
            _check(name, value[name], "a text", isinstance(value[name], str) and len(value[name]) <= 4096)
        for name, known in (
            ("format", WEIGHT_FORMATS),
            ("scale_layout", SCALE_LAYOUTS),
            ("wire_dtype", WIRE_DTYPES),
            ("reply_dtype", WIRE_DTYPES),
            ("weight_format", FORMAT_CHOICES),
        ):
            _check(name, value[name], "one of " + ", ".join(known), value[name] in known)
        _check_layout(value["format"], value["scale_layout"])
        first, total = value["first_stripe"], value["total_stripes"]
        whole = type(first) is int and 0 <= first <= total - value["num_stripes"]
        _check("first_stripe", first, f"a slice inside {total} stripes", whole)
        _check("top_k", value["top_k"], "at most num_experts", value["top_k"] <= value["num_experts"])
        plan_layers = tuple(_layer_from_json(entry, value["num_stripes"]) for entry in layers)
        numbers = [entry.layer for entry in plan_layers]
        _check("layers", numbers, "every layer once", len(set(numbers)) == len(numbers))
        multicast = None if value["multicast"] is None else _multicast_from_json(value["multicast"])
        return cls(**{**value, "layers": plan_layers, "multicast": multicast})


_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_experts",
    "top_k",
    "total_stripes",
    "unit_bytes",
    "num_stripes",
    "max_step_tokens",
)


def _layer_from_json(value: Any, num_stripes: int) -> LayerPlan:
    known = {"layer", "file", "stripe_sha256"}
    own = {"format", "scale_layout"}
    whole = isinstance(value, dict) and value.keys() - own == known and value.keys() & own in (set(), own)
    _check("layers", value, f"objects with {sorted(known)}, and perhaps {sorted(own)}", whole)
    layer, file, hashes = value["layer"], value["file"], value["stripe_sha256"]
    _check("layer", layer, "a whole number from 0", type(layer) is int and 0 <= layer < 1 << 31)
    _check("file", file, "a plain file name", is_plain_name(file))
    whole = isinstance(hashes, list) and len(hashes) == num_stripes
    _check("stripe_sha256", hashes, f"{num_stripes} SHA-256 in hex", whole and all(map(is_sha256, hashes)))
    if "format" not in value:
        return LayerPlan(layer, file, tuple(hashes))
    name, layout = value["format"], value["scale_layout"]
    _check("layer format", name, "one of " + ", ".join(WEIGHT_FORMATS), name in WEIGHT_FORMATS)
    _check_layout(name, layout)
    return LayerPlan(layer, file, tuple(hashes), name, layout)


def _check_layout(weight_format: str, layout: object) -> None:
    layouts = FORMATS[weight_format].scale_layouts
    _check("scale_layout", layout, f"{' or '.join(layouts)} with {weight_format}", layout in layouts)


def _multicast_from_json(value: Any) -> MulticastPlan:
    known = MulticastPlan.__dataclass_fields__.keys()
    whole = isinstance(value, dict) and value.keys() == known
    _check("multicast", value, f"null, or an object with {sorted(known)}", whole)
    plan = MulticastPlan(**value)
    try:
        group = parse_multicast(f"{plan.group}:{plan.port}")
    except ConfigError:
        group = None
    whole = type(plan.port) is int and group is not None and group.interface is None
    _check("multicast", [plan.group, plan.port], "an IPv4 group and a port", whole)
    for field, digits in (("session", 16), ("nonce", 64)):
        text = getattr(plan, field)
        good = isinstance(text, str) and len(text) == digits and set(text) <= set("0123456789abcdef")
        _check(field, text, f"{digits} hexadecimal digits", good)
    least, most = _native.MIN_FRAGMENT_BYTES, _native.MAX_FRAGMENT_BYTES
    good = type(plan.fragment_bytes) is int and least <= plan.fragment_bytes <= most
    _check("fragment_bytes", plan.fragment_bytes, f"a whole number from {least} to {most}", good)
    return plan


def _check(field: str, got: object, expected: str, good: object) -> None:
    if not good:
        raise ProtocolError(f"plan {field}: got {show_value(got)}, expected {expected}")
