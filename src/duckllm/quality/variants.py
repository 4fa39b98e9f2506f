"""Which folder, and which computing, a format of a model stands for: conversions made where they are needed.

Called by ``duckllm quality``. Knows manifests and recipes of conversions; loads nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from duckllm.errors import ConfigError, InWords
from duckllm.models.registry import ModelFolder, open_model
from duckllm.weights.formats import FORMATS, is_lossless
from duckllm.weights.layer_formats import QUANTISED_FORMATS, in_words
from duckllm.weights.manifest import MANIFEST_FILE
from duckllm.weights.resolve import find_model

# What a checkpoint is compared in by default, beside its own.
DEFAULTS = ("fp8", "int8", "int4")


@dataclass(frozen=True)
class FormatFolder:
    """A model in a format.

    Args:
        name: The format.
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
        self._is_converted = (find_model(model).folder / MANIFEST_FILE).is_file()

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
        return [self._folder(name) for name in names]

    def _folder(self, name: str) -> FormatFolder:
        base = self.base
        if is_lossless(name) and self._is_lossless:
            return FormatFolder(name, base, name)
        importance = self._importance if FORMATS[name].grouped else None
        keep = None if is_lossless(name) else self._keep
        if name == base.manifest.format and keep is None and importance is None:
            return FormatFolder(name, base, "auto")
        if self._is_converted:
            expected = f"{base.manifest.format}, as {base.path} is, or the checkpoint it was made from"
            raise ConfigError("format", InWords(name), expected)
        if name not in QUANTISED_FORMATS:
            others = ", ".join(QUANTISED_FORMATS)
            expected = f"{base.manifest.format}, as the checkpoint is, or what it can be rounded to: {others}"
            raise ConfigError("format", InWords(name), expected)
        return FormatFolder(name, open_model(self._model, name, keep, importance), "auto")
