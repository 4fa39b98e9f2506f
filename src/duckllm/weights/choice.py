"""Which format a slice is computed in: as it is stored, or the other one where that was measured faster.

Called by workers and by the in-process experts; imports no torch. Which of fp9 and fp8, which hold the same
weights, decodes faster depends on the machine: where memory limits, fp8 reads an eighth less, and where the
cores limit, fp9 takes less work. Nothing is rounded here: layers in other formats are used as they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from duckllm import _native
from duckllm.config import LOSSLESS_FORMATS
from duckllm.errors import WeightFormatError
from duckllm.weights.e4m3 import U8
from duckllm.weights.formats import LayerFormat, is_lossless, unit_bytes
from duckllm.weights.layer_formats import CONVERTED_FORMATS
from duckllm.weights.recode import available_memory_bytes, copy_fits, recode_units
from duckllm.weights.records import STRIPE_CHANNELS

# A smaller slice is used as stored: a measurement would be a good part of its start.
MIN_MEASURED_BYTES = 256 << 20
# How much faster per parameter the other format must be for a copy of the slice.
MIN_GAIN = 1.05
_SAMPLE_BYTES = 16 << 20
_SAMPLE_S = 0.15
_MIN_ROUNDS, _MAX_ROUNDS = 3, 50


@dataclass(frozen=True)
class ExpertSlice:
    """The part of a model's experts that one process computes.

    Args:
        hidden_size: H.
        intermediate_size: I of a whole expert.
        num_experts: E.
        top_k: K.
        first_stripe: First stripe of the slice.
        num_stripes: S, stripes of the slice.
        num_layers: Layers.
        num_threads: Compute threads.
        scale_layout: Layout of its scales, ``"block"`` or ``"channel"``.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    first_stripe: int
    num_stripes: int
    num_layers: int
    num_threads: int
    scale_layout: str = "block"

    def unit_bytes(self, weight_format: str) -> int:
        """Bytes of one unit in a format."""
        return unit_bytes(self.hidden_size, weight_format, self.scale_layout)

    def layer_bytes(self, weight_format: str) -> int:
        """Bytes of one layer of the slice in a format."""
        return self.num_experts * self.num_stripes * self.unit_bytes(weight_format)

    def num_bytes(self, weight_format: str) -> int:
        """Bytes of the slice in a format."""
        return self.num_layers * self.layer_bytes(weight_format)


@dataclass(frozen=True)
class FormatChoice:
    """A format, and why it was chosen, as a log says it."""

    format: str
    reason: str


Speeds = Mapping[str, float]


def choose_format(
    part: ExpertSlice, stored: str, requested: str, measure: Callable[[str], Speeds]
) -> FormatChoice:
    """The format to compute in.

    Args:
        part: The slice.
        stored: Format of the files.
        requested: ``"auto"``, or the format to use whatever its speed.
        measure: Called with the other format where both can be used; 10^9 weights a second by format.

    Raises:
        WeightFormatError: A format other than the stored one was requested, and its copy does not fit.
    """
    if requested == stored or not is_lossless(stored):
        return FormatChoice(stored, f"{stored} as stored")
    if requested != "auto":
        need = part.num_bytes(requested)
        if not copy_fits(need):
            raise WeightFormatError(
                f"weights: got {stored}, expected {requested}, of which a copy takes {need:,} bytes, more "
                f"than nine tenths of the {available_memory_bytes():,} that are available"
            )
        return FormatChoice(requested, f"{stored} as a copy in {requested}")
    if part.num_bytes(stored) < MIN_MEASURED_BYTES:
        return FormatChoice(stored, f"{stored} as stored, too small to measure others")
    (other,) = set(LOSSLESS_FORMATS) - {stored}
    need = part.num_bytes(other)
    if not copy_fits(need):
        reason = f"{stored} as stored, no room for a copy of {need / 1e9:.1f} GB in {other}"
        return FormatChoice(stored, reason)
    speeds = measure(other)
    measured = f"{stored} {speeds[stored]:.2f} Gparam/s, {other} {speeds[other]:.2f} Gparam/s"
    if speeds[other] < MIN_GAIN * speeds[stored]:
        return FormatChoice(stored, f"{stored} as stored ({measured})")
    return FormatChoice(other, f"{stored} as a copy in {other} ({measured})")


@dataclass(frozen=True)
class LoadedUnits:
    """The units to compute with.

    Args:
        choice: Their formats, several with a plus, and why.
        units: By layer: as they are mapped, or copies.
        formats: By layer.
    """

    choice: FormatChoice
    units: dict[int, U8]
    formats: dict[int, LayerFormat]


def load_layers(
    part: ExpertSlice,
    layers: Mapping[int, U8],
    stored: Mapping[int, LayerFormat],
    requested: str,
    check_stop: Callable[[], None] = lambda: None,
    copy: bool = False,
) -> LoadedUnits:
    """The units to compute with, where layers may be stored in several formats.

    Those in fp9 and fp8 become what :func:`choose_format` says of them together; others stay as they are.

    Args:
        part: The slice; layers that share a format and a layout have theirs put in its place.
        layers: Its units by layer, as stored and checked.
        stored: How each layer is stored.
        requested: ``"auto"``, or the format to use whatever its speed; other than fp9 and fp8 one that a
            layer is stored in.
        check_stop: Called before each copy; raises to give up.
        copy: Copy what is used as stored, too.

    Raises:
        WeightFormatError: As :func:`load_units`; or no layer is stored so that it could be computed in the
            requested format.
    """
    groups: dict[LayerFormat, list[int]] = {}
    for layer in layers:
        groups.setdefault(stored[layer], []).append(layer)
    names = {form.format for form in groups}
    reachable = names | (set(LOSSLESS_FORMATS) if any(map(is_lossless, names)) else set())
    if requested not in ("auto", *reachable):
        is_made = requested in CONVERTED_FORMATS
        hint = "duckllm convert makes a model in that format" if is_made else "only checkpoints have it"
        raise WeightFormatError(
            f"weights: got {' and '.join(sorted(names))}, expected {requested}, to which nothing is rounded "
            f"when a model starts; {hint}"
        )
    units: dict[int, U8] = {}
    formats: dict[int, LayerFormat] = {}
    reasons: dict[str, None] = {}
    for form, numbers in groups.items():
        its = replace(part, num_layers=len(numbers), scale_layout=form.scale_layout)
        wanted = requested if is_lossless(requested) and is_lossless(form.format) else "auto"
        mine = {layer: layers[layer] for layer in numbers}
        choice, loaded = load_units(its, mine, form.format, wanted, check_stop, copy)
        units |= loaded
        formats |= dict.fromkeys(numbers, LayerFormat(choice.format, form.scale_layout))
        reasons[choice.reason] = None
    used = dict.fromkeys(form.format for form in formats.values())
    return LoadedUnits(
        FormatChoice("+".join(sorted(used)), "; ".join(reasons)),
        {layer: units[layer] for layer in layers},
        formats,
    )


def load_units(
    part: ExpertSlice,
    layers: Mapping[int, U8],
    stored: str,
    requested: str,
    check_stop: Callable[[], None] = lambda: None,
    copy: bool = False,
) -> tuple[FormatChoice, dict[int, U8]]:
    """The units to compute with, by layer: as they are mapped, or copies in the format that was chosen.

    A copy lies in huge pages where the kernel has them, which read some per cent faster than a mapped file.

    Args:
        part: The slice.
        layers: Its units by layer, as stored and checked.
        stored: Their format.
        requested: As for :func:`choose_format`.
        check_stop: Called before each copy; raises to give up.
        copy: Copy what is used as stored, too.

    Shapes: units: [E, S, part.unit_bytes(format)] u8.

    Raises:
        WeightFormatError: The requested copy does not fit, or the units hold what no finite e4m3 value is
            stored as.
    """
    first = next(iter(layers.values()))
    choice = choose_format(part, stored, requested, lambda other: measure_formats(part, first, stored, other))
    if choice.format == stored:
        if not copy:
            return choice, dict(layers)
        need = part.num_bytes(stored)
        if not copy_fits(need):
            raise WeightFormatError(
                f"copy: got a slice of {need:,} bytes, expected at most nine tenths of the "
                f"{available_memory_bytes():,} bytes of memory that are available"
            )
        choice = FormatChoice(stored, f"{choice.reason}, in a copy")
    copies: dict[int, U8] = {}
    for layer, units in layers.items():
        check_stop()
        # Others on this machine may have taken what was there; workers of one host copy side by side.
        if not copy_fits((len(layers) - len(copies)) * part.layer_bytes(choice.format)):
            if requested != "auto" or copy:
                raise WeightFormatError(
                    f"weights: the memory that is available ended after {len(copies)} of {len(layers)} "
                    f"layers of the copy in {choice.format}"
                )
            reason = f"{stored} as stored, as others took the memory of a copy in {choice.format}"
            return FormatChoice(stored, reason), dict(layers)
        copies[layer] = recode_units(
            units, part.hidden_size, stored, choice.format, part.num_threads, part.scale_layout
        )
    return choice, copies


def measure_formats(part: ExpertSlice, units: U8, stored: str, other: str) -> dict[str, float]:
    """Weights that one-row steps read from memory and compute, 10^9 a second, by format.

    It takes steps of both formats in turns for 0.15 s, on the first experts of a layer: as they are mapped,
    and on a copy of at most 16 MB. Each step's weights are put out of the caches before it.

    Args:
        part: The slice.
        units: One layer of it, as stored and checked.
        stored: Their format.
        other: The format to compare with.

    Shapes: units: [E, S, part.unit_bytes(stored)] u8.

    Raises:
        WeightFormatError: The units hold what no finite e4m3 value is stored as.
    """
    sample_units = max(1, _SAMPLE_BYTES // part.unit_bytes(stored))
    experts = min(part.top_k, sample_units)
    stripes = min(part.num_stripes, sample_units // experts)
    sample = units[:experts, :stripes]
    samples = {
        stored: sample,
        other: recode_units(sample, part.hidden_size, stored, other, part.num_threads, part.scale_layout),
    }
    kernels = {
        name: _native.Experts(
            hidden_size=part.hidden_size,
            intermediate_size=part.intermediate_size,
            num_experts=experts,
            top_k=experts,
            first_stripe=part.first_stripe,
            num_stripes=stripes,
            max_tokens=1,
            num_threads=part.num_threads,
            spin_us=0,
            format=name,
            pin_threads=True,
            scale_layout=part.scale_layout,
        )
        for name in samples
    }
    x = np.random.default_rng(0).standard_normal((1, part.hidden_size)).astype(np.float32)
    ids = np.arange(experts, dtype=np.int32)[None]
    weights = np.full((1, experts), 1 / experts, np.float32)
    best_s = dict.fromkeys(samples, float("inf"))
    start_s = time.perf_counter()
    for round_number in range(_MAX_ROUNDS):
        for name, its_units in samples.items():
            _native.flush_from_caches(its_units)
            step_s = time.perf_counter()
            kernels[name].run(its_units, x, ids, weights, units_first_stripe=part.first_stripe)
            best_s[name] = min(best_s[name], time.perf_counter() - step_s)
        if round_number + 1 >= _MIN_ROUNDS and time.perf_counter() - start_s > _SAMPLE_S:
            break
    params = 3 * part.hidden_size * STRIPE_CHANNELS * stripes * experts
    return {name: params / seconds / 1e9 for name, seconds in best_s.items()}
