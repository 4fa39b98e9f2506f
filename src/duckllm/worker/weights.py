"""A worker's weights: the slice of a plan, from files, from the node cache or from the host, and checked.

Called by :mod:`duckllm.worker.session`; imports no torch. A layer's file is looked for in the worker's own
folder, then where the host has it, and mapped; what is in neither is mapped from the node cache, shard by
shard, and what the cache lacks comes from the host. It reads only the slice, and a stripe that was found good
is not read again as long as its file stays the same.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from duckllm.cluster.frames import ControlChannel
from duckllm.cluster.plan import LayerPlan, WorkerPlan
from duckllm.errors import ModelNotFoundError, ProtocolError, WeightFormatError, WeightHashError
from duckllm.weights.cache_folder import shard_folder
from duckllm.weights.e4m3 import U8
from duckllm.weights.formats import unit_bytes
from duckllm.weights.manifest import Manifest
from duckllm.weights.reader import map_units, stripe_sha256
from duckllm.weights.recode import available_memory_bytes, copy_fits
from duckllm.worker.config import WorkerConfig
from duckllm.worker.fetch import Shard, new_buffer, receive_shard, request_shards
from duckllm.worker.node_cache import FileIdentity, NodeCache, file_identity
from duckllm.worker.shard_memory import ShardMemory


@dataclass
class MappedSlice:
    """The units of a plan's slice, and where they are from.

    Args:
        units: By layer.
        paths: Files of the layers that have one.
        shards: Memory of the other layers.
        verified_stripes: Stripes hashed for it; those from the host are hashed on their way.
        fetched_bytes: What the host sent.
        cache_folder: The node cache that shards are mapped from; None where they are in memory alone.

    Shapes: units: [E, S, unit_bytes] u8, read-only, each unit contiguous.
    """

    units: dict[int, U8] = field(default_factory=dict)
    paths: dict[int, Path] = field(default_factory=dict)
    shards: dict[int, ShardMemory] = field(default_factory=dict)
    verified_stripes: int = 0
    fetched_bytes: int = 0
    cache_folder: Path | None = None

    @property
    def in_memory(self) -> bool:
        """Whether there are shards, in this worker's own memory."""
        return bool(self.shards) and self.cache_folder is None

    def origin(self) -> str:
        """The folders that units are mapped from, for the log."""
        places = [str(folder) for folder in dict.fromkeys(path.parent for path in self.paths.values())]
        if self.cache_folder is not None:
            places.append(f"the cache {self.cache_folder}")
        return " and ".join(places)


class WorkerWeights:
    """Maps, fetches and verifies; remembers what it has verified.

    Args:
        config: The worker's configuration: its own model folder, and the node cache.

    Raises:
        ModelError: The model folder holds no converted model, or a malformed one.
        ConfigError: The cache's folder was named and cannot be used.
    """

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._own = None if config.model is None else Manifest.load(config.model)
        self._verified: set[tuple[FileIdentity, int, str]] = set()
        self._cache: NodeCache | None = None
        if config.cache_dir is not None:
            self._open_cache()

    def find(self, plan: WorkerPlan, layer: LayerPlan) -> Path | None:
        """The file of a layer: in the worker's own folder if it is of that model, else where the host has it.

        None where it is in neither.
        """
        folders = [Path(plan.folder)] if plan.folder else []
        if self._own is not None and self._own.model_hash == plan.model_hash:
            folders.insert(0, self._own.folder)
        for folder in folders:
            with contextlib.suppress(OSError, ValueError):  # such as a name that no file can have
                if (folder / layer.file).is_file():
                    return folder / layer.file
        return None

    def identities(self, plan: WorkerPlan) -> tuple[object, ...]:
        """What tells whether the files of a plan are still the same ones.

        Raises:
            ModelNotFoundError: A file is gone since it was found.
        """
        return tuple(self._identities_of(plan, layer) for layer in plan.layers)

    def release(self) -> None:
        """Lets others remove what the last plan needed of the node cache."""
        if self._cache is not None:
            self._cache.close()

    def map(self, plan: WorkerPlan) -> MappedSlice:
        """Maps the files of a plan's layers, and sets memory aside for the layers that have none.

        Raises:
            CheckpointError: A file is truncated or of another shape.
            ProtocolError: The plan's sizes do not fit each other.
            DiskSpaceError: The node cache has no room for the rest.
            WeightFormatError: The memory has none, without a cache.
        """
        mapped = MappedSlice()
        last = plan.first_stripe + plan.num_stripes
        for layer in plan.layers:
            path = self.find(plan, layer)
            if path is not None:
                units = map_units(path, (plan.num_experts, plan.total_stripes, plan.unit_bytes_of(layer)))
                mapped.paths[layer.layer] = path
                mapped.units[layer.layer] = units[:, plan.first_stripe : last]
        lacking = [layer for layer in plan.layers if layer.layer not in mapped.units]
        if lacking:
            self._reserve(plan, lacking)
            mapped.cache_folder = self._open_cache().folder if self._config.cache else None
        for layer in lacking:
            memory = ShardMemory(
                plan.num_experts,
                plan.num_stripes,
                plan.unit_bytes_of(layer),
                in_memory=not self._config.cache,
            )
            mapped.shards[layer.layer], mapped.units[layer.layer] = memory, memory.units
        return mapped

    def verify(self, plan: WorkerPlan, mapped: MappedSlice, check_stop: Callable[[], None]) -> None:
        """Hashes every stripe of mapped files that is not known to be good.

        Args:
            plan: The plan.
            mapped: As :meth:`map` returns it.
            check_stop: Called before each stripe; raises to give up.

        Raises:
            WeightHashError: Names the file, the layer and the stripe.
        """
        for layer in plan.layers:
            path = mapped.paths.get(layer.layer)
            if path is None:
                continue
            identity = _identity(path)
            for offset, expected in enumerate(layer.stripe_sha256):
                stripe = plan.first_stripe + offset
                if (identity, stripe, expected) in self._verified:
                    continue
                check_stop()
                got = stripe_sha256(mapped.units[layer.layer], offset)
                if got != expected:
                    raise WeightHashError(
                        f"{path}: layer {layer.layer}, stripe {stripe}: got SHA-256 {got}, "
                        f"expected {expected}"
                    )
                self._verified.add((identity, stripe, expected))
                mapped.verified_stripes += 1

    def fill(
        self,
        plan: WorkerPlan,
        mapped: MappedSlice,
        channel: ControlChannel,
        check_stop: Callable[[], None],
    ) -> None:
        """Maps the other layers' shards from the node cache; fetches those that are missing or damaged.

        Raises:
            WeightHashError: The host sent something else than the plan says.
            ProtocolError: The host does not follow docs/wire-format.md.
            DiskSpaceError: The disk is full.
        """
        if not mapped.shards:
            return
        missing: list[Shard] = []
        shard_bytes = {layer.layer: plan.num_experts * plan.unit_bytes_of(layer) for layer in plan.layers}
        for layer in plan.layers:
            if layer.layer not in mapped.shards:
                continue
            for offset, sha256 in enumerate(layer.stripe_sha256):
                if mapped.in_memory or not self._map_cached(plan, mapped, layer, offset, check_stop):
                    missing.append(Shard(layer.layer, plan.first_stripe + offset, sha256))
        if not missing:
            return
        if not mapped.in_memory:  # damaged ones were removed since there was room for the others
            self._reserve(plan, [layer for layer in plan.layers if layer.layer in mapped.shards])
        request_shards(channel, missing)
        buffer = new_buffer()
        for shard in missing:
            check_stop()
            self._fetch(plan, mapped, shard, shard_bytes[shard.layer], channel, buffer)
            mapped.fetched_bytes += shard_bytes[shard.layer]

    def _fetch(
        self,
        plan: WorkerPlan,
        mapped: MappedSlice,
        shard: Shard,
        num_bytes: int,
        channel: ControlChannel,
        buffer: memoryview,
    ) -> None:
        memory, offset = mapped.shards[shard.layer], shard.stripe - plan.first_stripe
        if mapped.in_memory:
            room, filled = memory.shard(offset), 0

            def take(piece: memoryview) -> None:
                nonlocal filled
                room[filled : filled + len(piece)] = piece
                filled += len(piece)

            receive_shard(channel, shard, num_bytes, buffer, take)
            return
        with self._open_cache().writer(shard.sha256, num_bytes) as writer:
            receive_shard(channel, shard, num_bytes, buffer, writer.write)
            descriptor = writer.commit()
        try:
            memory.map_file(offset, descriptor)
            self._verified.add((file_identity(os.fstat(descriptor)), shard.stripe, shard.sha256))
        finally:
            os.close(descriptor)

    def _map_cached(
        self,
        plan: WorkerPlan,
        mapped: MappedSlice,
        layer: LayerPlan,
        offset: int,
        check_stop: Callable[[], None],
    ) -> bool:
        """Maps a shard from the node cache if it is there and intact; one that is damaged is removed."""
        cache, sha256 = self._open_cache(), layer.stripe_sha256[offset]
        descriptor = cache.open_shard(sha256, plan.num_experts * plan.unit_bytes_of(layer))
        if descriptor is None:
            return False
        try:
            mapped.shards[layer.layer].map_file(offset, descriptor)
            known = (file_identity(os.fstat(descriptor)), plan.first_stripe + offset, sha256)
        finally:
            os.close(descriptor)
        if known in self._verified:
            return True
        check_stop()
        mapped.verified_stripes += 1
        if stripe_sha256(mapped.units[layer.layer], offset) != sha256:
            cache.remove(sha256)
            return False
        self._verified.add(known)
        return True

    def _reserve(self, plan: WorkerPlan, lacking: list[LayerPlan]) -> None:
        """Refuses what does not fit, before a byte is fetched."""
        expected = unit_bytes(plan.hidden_size, plan.format, plan.scale_layout)
        if plan.unit_bytes != expected:
            raise ProtocolError(f"plan unit_bytes: got {plan.unit_bytes}, expected {expected}")
        shard_bytes = {layer.layer: plan.num_experts * plan.unit_bytes_of(layer) for layer in lacking}
        if self._config.cache:
            needed = {sha256: shard_bytes[layer.layer] for layer in lacking for sha256 in layer.stripe_sha256}
            self._open_cache().reserve(needed)
            return
        need = plan.num_stripes * sum(shard_bytes.values())
        if not copy_fits(need):
            raise WeightFormatError(
                f"no_cache: got a slice of {need:,} bytes, expected at most nine tenths of the "
                f"{available_memory_bytes():,} bytes of memory that are available"
            )

    def _open_cache(self) -> NodeCache:
        if self._cache is None:
            self._cache = NodeCache(self._config.cache_dir or shard_folder(), self._config.cache_bytes)
        return self._cache

    def _identities_of(self, plan: WorkerPlan, layer: LayerPlan) -> object:
        path = self.find(plan, layer)
        if path is not None:
            return _identity(path)
        if not self._config.cache:
            return "in memory"
        if self._cache is None:
            return None
        return tuple(self._cache.identity(sha256) for sha256 in layer.stripe_sha256)


def _identity(path: Path) -> FileIdentity:
    try:
        return file_identity(path.stat())
    except OSError as error:  # gone since it was found
        raise ModelNotFoundError(f"{path}: {error.strerror}") from error
