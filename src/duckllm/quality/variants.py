"""Which folder, and which computing, a format of a model stands for: conversions made where they are needed.

Called by ``duckllm quality``. Knows manifests and recipes of conversions; loads nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from duckllm.config import LOSSLESS_FORMATS
from duckllm.errors import ConfigError
from duckllm.models.inspection import Inspection, inspect_model
from duckllm.models.registry import ModelFolder, open_model
from duckllm.weights.formats import FORMATS, is_lossless
from duckllm.weights.layer_formats import QUANTISED_FORMATS, in_words, joined, main_format
from duckllm.weights.manifest import MANIFEST_FILE
from duckllm.weights.resolve import find_model

# What a checkpoint is compared in by default, beside its own.
DEFAULTS = ("fp8", "int8", "int4")


def possible_formats(found: Inspection) -> tuple[str, ...]:
    """Formats that a model can be had and compared in: one where its experts are rounded already."""
    stored = found.formats_in(found.weight_format or "auto")
    if not all(map(is_lossless, stored.values())):
        return (main_format(stored),)
    return LOSSLESS_FORMATS if found.weight_format else (*LOSSLESS_FORMATS, *QUANTISED_FORMATS)


def check_formats(field: str, names: Sequence[str], possible: Sequence[str]) -> None:
    """Refuses formats that a model cannot be had in.

    Raises:
        ConfigError: Names those that it can, as :func:`possible_formats` has them.
    """
    if all(name in possible for name in names):
        return
    if len(possible) == 1:
        expected = (
            f"{possible[0]}, as this model is; the checkpoint that it was made from may be had in others"
        )
    else:
        expected = f"some of {', '.join(possible)}, with commas between"
    raise ConfigError(field, ",".join(names), expected)


@dataclass(frozen=True)
class FormatFolder:
    """A model in a format.

    Args:
        name: The format; of a model that is stored in several all of them.
        model: Its folder.
        weight_format: What :class:`duckllm.LLM` is told to compute in.
    """

    name: str
    model: ModelFolder
    weight_format: str

    @property
    def rounds_activations(self) -> bool:
        """Whether experts of a layer multiply bytes, to which activations are rounded."""
        formats = self.model.manifest.layer_formats().values()
        return not all(map(is_lossless, formats))

    @property
    def layers(self) -> str:
        """The layers' formats in words; empty where all are in that one."""
        formats = self.model.manifest.layer_formats()
        is_mixed = self.weight_format == "auto" and len(set(formats.values())) > 1
        return in_words(formats) if is_mixed else ""


class FormatFolders:
    """A model in several formats.

    Args:
        model: As for :func:`duckllm.weights.resolve.resolve_model`.
        keep: Layers in other formats, where a format rounds; None for the converter's own rule.
        importance: What ``duckllm calibrate`` recorded, for formats of 4 bits.

    Raises:
        ModelError: The model cannot be used.
    """

    def __init__(
        self, model: str | Path | None, keep: tuple[str, ...] | None = None, importance: Path | None = None
    ) -> None:
        self._model, self._keep, self._importance = model, keep, importance
        self.base = open_model(model)
        # As it is, not only most of its layers.
        self._is_lossless = all(map(is_lossless, self.base.manifest.layer_formats().values()))
        folder = find_model(model).folder
        self._is_converted = (folder / MANIFEST_FILE).is_file()
        self._possible = possible_formats(inspect_model(folder))

    @property
    def reference(self) -> str:
        """The format that others are compared with: as the model is stored."""
        return self.base.manifest.format

    @property
    def defaults(self) -> tuple[str, ...]:
        """Formats worth comparing that can be had."""
        if self._is_lossless:
            return tuple(name for name in DEFAULTS if is_lossless(name) or not self._is_converted)
        return ()

    @property
    def others(self) -> str:
        """Where there are formats beside the reference, for people."""
        if self._is_converted and not self._is_lossless:
            return "the checkpoint that this model was made from can be had in each, and its loss measured"
        if not self._is_lossless:
            return "this checkpoint's 4 bits are kept, which loses nothing more"
        return "--formats names others"

    def find(self, names: Sequence[str]) -> list[FormatFolder]:
        """The model in each format, converted into the model cache where it is not there.

        Raises:
            ConfigError: A format that cannot be had, or rules and importance that none of them uses.
            ModelError: The model cannot be used.
            DiskSpaceError: No room in the model cache.
        """
        grouped = [name for name in names if FORMATS[name].grouped]
        if self._importance is not None and not grouped:
            expected = "nothing without a format of 4 bits, whose rounding it weights"
            raise ConfigError("importance", str(self._importance), expected)
        if self._keep is not None and all(map(is_lossless, names)):
            raise ConfigError("keep", ",".join(self._keep), "nothing with formats that lose nothing")
        check_formats("formats", names, self._possible)
        if self._is_converted:
            asked = {"keep": self._keep, "importance": self._importance}
            for field, value in asked.items():
                if value is not None:
                    shown = str(value) if isinstance(value, Path) else ",".join(value)
                    raise ConfigError(field, shown, "nothing with a converted model, which is as it is")
        return [self._folder(name) for name in names]

    def _folder(self, name: str) -> FormatFolder:
        base = self.base
        if is_lossless(name) and self._is_lossless:
            return FormatFolder(name, base, name)
        importance = self._importance if FORMATS[name].grouped else None
        keep = None if is_lossless(name) else self._keep
        if name == base.manifest.format and keep is None and importance is None:
            return FormatFolder(joined(base.manifest.layer_formats().values()) or name, base, "auto")
        return FormatFolder(name, open_model(self._model, name, keep, importance), "auto")
