"""Expert files of a converted model, mapped read-only, and verified slice by slice.

Called by workers and by the in-process experts; imports no torch. It maps, and reads nothing before a unit is
touched.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from duckllm.errors import CheckpointError, WeightHashError
from duckllm.weights.manifest import Manifest
from duckllm.weights.safetensors_file import read_header

UNITS = "units"
DATA_ALIGNMENT = 4096


def find_units(path: Path, shape: tuple[int, int, int]) -> int:
    """Where the units begin in an expert file, bytes; a multiple of 4096.

    Args:
        path: The file.
        shape: Experts, stripes, bytes of a unit, as the manifest says.

    Raises:
        CheckpointError: The file is missing, truncated or of another shape.
    """
    info = read_header(path).get(UNITS)
    if info is None or info.dtype != "U8" or info.shape != shape:
        got = "no such tensor" if info is None else f"{info.dtype} {list(info.shape)}"
        raise CheckpointError(f"{path}: {UNITS}: got {got}, expected U8 {list(shape)}")
    if info.offset % DATA_ALIGNMENT:
        raise CheckpointError(
            f"{path}: {UNITS}: data starts at {info.offset}, expected a multiple of {DATA_ALIGNMENT}"
        )
    return info.offset


def map_units(path: Path, shape: tuple[int, int, int]) -> np.memmap[tuple[int, ...], np.dtype[np.uint8]]:
    """The units of an expert file, mapped read-only.

    A file that is truncated later takes the process with it (SIGBUS) when a lost page is touched: who changes
    a model's file writes another one and renames it, as the converter does.

    Args:
        path: The file.
        shape: Experts, stripes, bytes of a unit, as the manifest says.

    Shapes: result: [E, S_total, unit_bytes] u8, read-only.

    Raises:
        CheckpointError: The file is missing, truncated or of another shape.
    """
    offset = find_units(path, shape)
    try:
        return np.memmap(path, np.uint8, mode="r", offset=offset, shape=shape)
    except (OSError, ValueError) as error:  # replaced or truncated since its header was read
        raise CheckpointError(f"{path}: cannot be mapped ({error})") from error


def stripe_sha256(units: npt.NDArray[np.uint8], stripe: int) -> str:
    """SHA-256 over one stripe's units of every expert, in hex.

    Shapes: units: [E, S, unit_bytes] u8.
    """
    digest = hashlib.sha256()
    for expert in range(units.shape[0]):
        digest.update(units[expert, stripe])
    return digest.hexdigest()


class ExpertFile:
    """One layer's experts.

    Attributes:
        format: How they are stored.
        units: The mapped units; ``units[e, s]`` is one contiguous unit.
        data_offset: Where the units start in the file, bytes; a multiple of 4096.

    Shapes: units: [E, S_total, unit_bytes] u8, read-only.
    """

    def __init__(self, path: str | Path, manifest: Manifest, layer: int) -> None:
        """Maps the file.

        Raises:
            CheckpointError: The layer has no experts, or the file is missing, truncated or of another shape.
        """
        self.path, self.layer = Path(path), layer
        if layer not in manifest.expert_layers:
            manifest.expert_path(layer)
        self._entry = manifest.expert_layers[layer]
        self.format = manifest.layer_format(layer)
        self.units = map_units(self.path, manifest.units_shape(layer))
        self.data_offset = int(self.units.offset)

    @classmethod
    def open(cls, manifest: Manifest, layer: int) -> ExpertFile:
        """The layer's file in the manifest's own folder."""
        return cls(manifest.expert_path(layer), manifest, layer)

    def slice(self, first_stripe: int, num_stripes: int) -> npt.NDArray[np.uint8]:
        """The units of a slice, a view.

        Shapes: result: [E, num_stripes, unit_bytes] u8, read-only, contiguous per expert.
        """
        return self.units[:, first_stripe : first_stripe + num_stripes]

    def verify(self, first_stripe: int = 0, num_stripes: int | None = None) -> None:
        """Hashes a slice, reading only that slice.

        Raises:
            WeightHashError: Names the file, the layer and the first stripe that differs.
        """
        total = self.units.shape[1]
        last = total if num_stripes is None else first_stripe + num_stripes
        for stripe in range(first_stripe, last):
            got = stripe_sha256(self.units, stripe)
            expected = self._entry.stripe_sha256[stripe]
            if got != expected:
                raise WeightHashError(
                    f"{self.path}: layer {self.layer}, stripe {stripe}: got SHA-256 {got}, "
                    f"expected {expected}"
                )
