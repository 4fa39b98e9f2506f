"""A worker's weights: the files of a plan, mapped read-only, and the slice checked against its hashes.

Called by :mod:`duckllm.worker.session`; imports no torch. It reads only the slice, and a stripe that was
found good is not read again as long as its file stays the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from duckllm.cluster.plan import LayerPlan, WorkerPlan
from duckllm.errors import ModelNotFoundError, WeightHashError
from duckllm.weights.manifest import Manifest
from duckllm.weights.reader import map_units, stripe_sha256

_FileIdentity = tuple[int, int, int, int]


class WorkerWeights:
    """Maps and verifies; remembers what it has verified.

    Args:
        model_folder: The worker's own converted model, looked into first; None where it has none.

    Raises:
        ModelError: That folder holds no converted model, or a malformed one.
    """

    def __init__(self, model_folder: Path | None) -> None:
        self._own = None if model_folder is None else Manifest.load(model_folder)
        self._verified: set[tuple[_FileIdentity, int, str]] = set()

    def find(self, plan: WorkerPlan, layer: LayerPlan) -> Path:
        """The file of a layer: in the worker's own folder if it is of that model, else where the host has it.

        Raises:
            ModelNotFoundError: In neither place.
        """
        folders = [Path(plan.folder)]
        if self._own is not None and self._own.model_hash == plan.model_hash:
            folders.insert(0, self._own.folder)
        for folder in folders:
            with contextlib.suppress(OSError, ValueError):  # such as a name that no file can have
                if (folder / layer.file).is_file():
                    return folder / layer.file
        places = " or ".join(str(folder) for folder in dict.fromkeys(folders))
        raise ModelNotFoundError(f"{layer.file} of layer {layer.layer}: got no such file in {places}")

    def identities(self, plan: WorkerPlan) -> tuple[_FileIdentity, ...]:
        """What tells whether the files of a plan are still the same ones.

        Raises:
            ModelNotFoundError: A file is missing.
        """
        return tuple(_identity(self.find(plan, layer)) for layer in plan.layers)

    def map_layer(self, plan: WorkerPlan, layer: LayerPlan) -> tuple[npt.NDArray[np.uint8], Path]:
        """The units of the plan's slice, and their file.

        Shapes: units: [E, S, unit_bytes] u8, read-only.

        Raises:
            ModelNotFoundError: The file is missing.
            CheckpointError: It is truncated or of another shape.
        """
        path = self.find(plan, layer)
        units = map_units(path, (plan.num_experts, plan.total_stripes, plan.unit_bytes))
        return units[:, plan.first_stripe : plan.first_stripe + plan.num_stripes], path

    def verify(
        self,
        plan: WorkerPlan,
        layer: LayerPlan,
        units: npt.NDArray[np.uint8],
        path: Path,
        check_stop: Callable[[], None],
    ) -> int:
        """Hashes every stripe of the slice that is not known to be good; returns how many those were.

        Args:
            plan: The plan.
            layer: The layer of it.
            units: As :meth:`map_layer` returns them.
            path: Their file.
            check_stop: Called before each stripe; raises to give up.

        Raises:
            WeightHashError: Names the file, the layer and the stripe.
        """
        identity = _identity(path)
        hashed = 0
        for offset, expected in enumerate(layer.stripe_sha256):
            stripe = plan.first_stripe + offset
            if (identity, stripe, expected) in self._verified:
                continue
            check_stop()
            got = stripe_sha256(units, offset)
            if got != expected:
                raise WeightHashError(
                    f"{path}: layer {layer.layer}, stripe {stripe}: got SHA-256 {got}, expected {expected}"
                )
            self._verified.add((identity, stripe, expected))
            hashed += 1
        return hashed


def _identity(path: Path) -> _FileIdentity:
    try:
        status = path.stat()
    except OSError as error:  # gone since it was found
        raise ModelNotFoundError(f"{path}: {error.strerror}") from error
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
