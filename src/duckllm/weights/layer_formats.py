"""Which format the experts of each layer are converted into: the user's choice, with what the checkpoint has.

Called by the converter and by plans; it knows names of formats and numbers of layers, and no tensors.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from duckllm.config import LOSSLESS_FORMATS, WEIGHT_FORMATS
from duckllm.errors import ConfigError
from duckllm.weights.formats import FORMATS

# What weights can be rounded to; the other formats come from checkpoints that have them.
QUANTISED_FORMATS = ("int8", "int4", "int4-bf16")
KEPT_FORMATS = (*LOSSLESS_FORMATS, "int8")  # of layers that --keep names
CONVERTED_FORMATS = ("auto", *LOSSLESS_FORMATS, *QUANTISED_FORMATS)
_MTP_FORMAT = "fp8"  # of layers of multi-token prediction beside 4 bits, where nothing else is said
_RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?", re.ASCII)


@dataclass(frozen=True)
class LayerNumbers:
    """The layers with experts that rules speak of.

    Args:
        moe_layers: All of them, ascending, those of multi-token prediction included.
        num_hidden_layers: Layers that a token passes; those of multi-token prediction follow.
    """

    moe_layers: Sequence[int]
    num_hidden_layers: int

    @property
    def mtp(self) -> list[int]:
        """Those of multi-token prediction."""
        return [layer for layer in self.moe_layers if layer >= self.num_hidden_layers]

    def named(self, text: str) -> list[int]:
        """The layers of one word of a rule.

        Raises:
            ConfigError: The word is none, or names layers that are not there, or none with experts.
        """
        passed = [layer for layer in self.moe_layers if layer < self.num_hidden_layers]
        words = {"first": passed[:1], "last": passed[-1:], "mtp": self.mtp}
        if text in words:
            return words[text]
        match = _RANGE.fullmatch(text)
        expected = "first, last, mtp, or numbers of layers with experts, 3 or 3-7"
        if match is None:
            raise ConfigError("keep", text, expected)
        first, last = int(match[1]), int(match[2] or match[1])
        found = [layer for layer in self.moe_layers if first <= layer <= last]
        if not found or last > max(self.num_hidden_layers - 1, *self.moe_layers):
            have = f"{self.moe_layers[0]} to {self.moe_layers[-1]}" if self.moe_layers else "none"
            raise ConfigError("keep", text, f"{expected}; this model's are {have}")
        return found


def layer_formats(
    layers: LayerNumbers,
    kept: Mapping[int, str],
    *,
    weight_format: str = "auto",
    keep: Iterable[str] | None = None,
    requantise: bool = False,
) -> dict[int, str]:
    """The format of each layer's experts.

    Args:
        layers: The model's layers.
        kept: The 4-bit format that holds a layer's experts as the checkpoint has them, empty where none does.
        weight_format: The format asked for; ``"auto"`` keeps 4-bit experts, and makes fp9 of others.
        keep: Rules such as ``"fp8:first,last"`` for layers in another format, of which the last counts.
            Before them stands ``"fp8:mtp"`` where the format has 4 bits, as guesses need better weights,
            unless one of them is ``"none"``.
        requantise: Whether 4-bit experts of the checkpoint may be rounded to another format.

    Raises:
        ConfigError: An unknown format or rule, one that nothing can be rounded to, or 4-bit experts asked for
            in another format without ``requantise``.
    """
    if weight_format not in ("auto", *WEIGHT_FORMATS):
        raise ConfigError("format", weight_format, "one of " + ", ".join(CONVERTED_FORMATS))
    plain = LOSSLESS_FORMATS[0] if weight_format == "auto" else weight_format
    formats = {
        layer: (kept.get(layer) or plain) if weight_format == "auto" else plain for layer in layers.moe_layers
    }
    rules = list(keep or ())
    if FORMATS[plain].grouped and "none" not in rules:
        for layer in layers.mtp:
            if not kept.get(layer):
                formats[layer] = _MTP_FORMAT
    for rule in rules:
        name, _, words = rule.partition(":")
        if rule == "none":
            continue
        if name not in KEPT_FORMATS or not words:
            expected = f"none, or FORMAT:LAYERS with one of {', '.join(KEPT_FORMATS)}, as fp8:first,last,mtp"
            raise ConfigError("keep", rule, expected)
        for word in words.split(","):
            for layer in layers.named(word.strip()):
                formats[layer] = name
    _refuse(formats, kept, requantise)
    return formats


def check_rules(
    layers: LayerNumbers,
    kept: Mapping[int, str],
    *,
    weight_format: str = "auto",
    keep: Iterable[str] | None = None,
) -> None:
    """Refuses rules that change nothing; arguments as of :func:`layer_formats`, which has taken them.

    A rule may say what layers of multi-token prediction would be in anyway, beside 4 bits.

    Raises:
        ConfigError: The first rule without which every layer would have the format that it has.
    """
    rules = list(keep or ())

    def made(some: Sequence[str]) -> dict[int, str]:
        return layer_formats(layers, kept, weight_format=weight_format, keep=some, requantise=True)

    for index, rule in enumerate(rules):
        others = [] if rule == "none" else ["none", *rules[:index], *rules[index + 1 :]]
        if made(others) == made(["none"] if rule == "none" else ["none", *rules]):
            hint = "each layer has the same format without it"
            raise ConfigError("keep", rule, "a rule that changes a layer's format", hint)


def _refuse(formats: Mapping[int, str], kept: Mapping[int, str], requantise: bool) -> None:
    for layer, name in formats.items():
        have = kept.get(layer, "")
        if have == name:
            continue
        if name not in (*LOSSLESS_FORMATS, *QUANTISED_FORMATS):
            what = f"{have}, as the checkpoint has layer {layer}" if have else ", ".join(CONVERTED_FORMATS)
            raise ConfigError("format", name, what, "no weights are rounded to it")
        if have and not requantise:
            raise ConfigError(
                "format",
                name,
                f"auto or {have}, in which the checkpoint has layer {layer}; rounding 4-bit weights again "
                "loses more, and needs --requantise",
            )


def main_format(formats: Mapping[int, str]) -> str:
    """The format of most layers, the first of equals; fp9 of a model without experts."""
    return Counter(formats.values()).most_common(1)[0][0] if formats else LOSSLESS_FORMATS[0]


def joined(names: Iterable[str]) -> str:
    """``"fp8+int4"``: formats that layers are in as one word, each once."""
    return "+".join(sorted(set(names)))


def in_words(formats: Mapping[int, str]) -> str:
    """``"int4"``, or ``"int4, fp8 in layers 3-5 and 61"``: the formats of layers for people."""
    main = main_format(formats)
    parts = [main]
    for name in dict.fromkeys(formats.values()):
        if name != main:
            runs = _runs(sorted(layer for layer, its in formats.items() if its == name))
            few = len(runs) == 1 and "-" not in runs[0]
            last = f" and {runs[-1]}" if len(runs) > 1 else ""
            parts.append(f"{name} in layer{'' if few else 's'} {', '.join(runs[:-1] or runs)}{last}")
    return ", ".join(parts)


def _runs(numbers: Sequence[int]) -> list[str]:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
