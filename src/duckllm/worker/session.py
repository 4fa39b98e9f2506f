"""One host's visit at a worker: authenticate, hello, prepare, then the native step loop until it ends.

Called by :mod:`duckllm.worker.server`, one thread a connection. Everything that a connection can do wrong
ends here, with an ERROR frame and a closed connection.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from duckllm import _native
from duckllm._native import ErrorCode, FrameType
from duckllm.cluster.auth import authenticate_worker
from duckllm.cluster.frames import ControlChannel, PeerClosedError, error_code, safe_text
from duckllm.cluster.multicast import join_group
from duckllm.cluster.plan import WorkerPlan
from duckllm.cluster.shared_memory import worker_end
from duckllm.errors import DuckError, ProtocolError, WorkerUnavailableError
from duckllm.prefill import check_prefill, select_isa
from duckllm.weights.choice import ExpertSlice, FormatChoice, load_layers
from duckllm.weights.e4m3 import U8
from duckllm.weights.recode import huge_page_bytes, may_reserve
from duckllm.worker.config import WorkerConfig
from duckllm.worker.node import hello_facts
from duckllm.worker.occupancy import Occupancy
from duckllm.worker.scratch import check_scratch
from duckllm.worker.weights import MappedSlice, WorkerWeights

READY_TIMEOUT_S = 10.0


class _OnlyAskedError(Exception):
    """The connection ended without a plan: so a host asks what this worker is. Nothing to log."""


class Sessions:
    """What the connections of one worker share: its weights, its experts, and the one session at a time.

    Args:
        config: The worker's configuration.
        log: Takes one line per event.

    Raises:
        ModelError: ``config.model`` is no converted model.
        ConfigError: ``config.cache_dir`` cannot be used.
        ConfigError: DUCK_FORCE_ISA names no ISA, or one that this CPU lacks; or ``config.prefill`` is bf16
            where it lacks that.
    """

    def __init__(self, config: WorkerConfig, log: Callable[[str], None]) -> None:
        self._config = config
        self._log = _never_raising(log)
        self.instructions = check_prefill(config.prefill, select_isa())
        self.read_gb_per_s = config.speed or None
        self._weights = WorkerWeights(config)
        self._occupancy = Occupancy()
        self._memory = worker_end(config.shared_memory) if config.shared_memory else None
        self._stopping = threading.Event()
        self._prepared: tuple[object, Prepared] | None = None

    def stop(self) -> None:
        """Makes a verification in progress give up."""
        self._stopping.set()

    def serve(self, connection: socket.socket, peer: str) -> None:
        """Serves one connection to its end; never raises. Does not close it."""
        channel = ControlChannel(connection, us="this worker", peer="the host", hears_errors=False)
        try:
            try:
                plan, session, shares_memory = self._receive_plan(channel)
                self._occupancy.take(session, connection)
                self._serve_plan(channel, plan, peer, shares_memory)
            finally:
                self._occupancy.leave(connection)
        except _OnlyAskedError:
            pass
        except PeerClosedError as error:
            self._log(f"{peer}: {error}")
        except TimeoutError as error:
            channel.send_error(ErrorCode.TIMEOUT, str(error))
            self._log(f"{peer}: {error}")
        except OSError as error:
            self._log(f"{peer}: the connection failed: {error.strerror or error}")
        except DuckError as error:
            channel.send_error(error_code(error), str(error))
            self._log(f"{peer}: refused: {safe_text(str(error))}")
        except Exception as error:
            channel.send_error(ErrorCode.INTERNAL, f"the worker failed: {type(error).__name__}")
            self._log(f"{peer}: failed: {traceback.format_exc()}")

    def _receive_plan(self, channel: ControlChannel) -> tuple[WorkerPlan, str, bool]:
        limit_s = self._config.handshake_timeout_s
        try:
            return self._handshake(channel, time.monotonic() + limit_s)
        except TimeoutError:
            raise TimeoutError(f"handshake: got no complete plan within {limit_s:g} s") from None

    def _handshake(self, channel: ControlChannel, deadline: float) -> tuple[WorkerPlan, str, bool]:
        """The plan, the name of the host's session, and whether its steps come through shared memory."""
        try:
            authenticate_worker(channel, self._config.token, deadline=deadline)
            theirs = channel.receive_json(FrameType.HELLO, deadline=deadline)
            return self._answer_hello(channel, theirs, deadline)
        except PeerClosedError as error:
            raise _OnlyAskedError from error

    def _answer_hello(
        self, channel: ControlChannel, theirs: dict[str, object], deadline: float
    ) -> tuple[WorkerPlan, str, bool]:
        """As :meth:`_handshake`, from the host's HELLO on."""
        session = str(theirs.get("session", ""))
        shares_memory = self._memory is not None and theirs.get("shared_memory") is True
        is_busy = self._occupancy.hold(session, channel.connection)
        hello = hello_facts(self._config, self.instructions, self.read_gb_per_s, is_busy=is_busy)
        hello["shared_memory"] = shares_memory
        channel.send_json(FrameType.HELLO, hello, deadline=deadline)
        while True:
            kind, payload = channel.receive_one_of((FrameType.PREPARE, FrameType.PING), deadline=deadline)
            if kind == FrameType.PREPARE:
                return WorkerPlan.from_json(channel.parse_json(kind, payload)), session, shares_memory
            channel.send(FrameType.PING, payload, deadline=deadline)

    def _serve_plan(self, channel: ControlChannel, plan: WorkerPlan, peer: str, shares_memory: bool) -> None:
        experts, verified_stripes, fetched_bytes = self._prepare(plan, channel)
        ready: dict[str, object] = {
            "verified_stripes": verified_stripes,
            "fetched_bytes": fetched_bytes,
            "weight_format": experts.choice.format,
            "own_memory_bytes": experts.memory.own_bytes,
            "huge_page_bytes": experts.memory.huge_page_bytes,
        }
        multicast = self._join(plan, channel, ready)
        memory = self._memory if shares_memory else None
        if memory is not None:
            memory.reset()  # of what an earlier visit left; this host writes once it has READY
        channel.send_json(FrameType.READY, ready, deadline=time.monotonic() + READY_TIMEOUT_S)
        fetched = f", {fetched_bytes:,} bytes fetched from the host now" if fetched_bytes else ""
        self._log(
            f"{peer}: ready, {len(plan.layers)} layers, {plan.num_stripes} of {plan.total_stripes} stripes "
            f"from {plan.first_stripe} on, {verified_stripes} verified now, {experts.choice.reason}, "
            f"{experts.memory}{fetched}"
        )
        reason, message, steps = experts.server.serve(channel.connection.fileno(), memory, multicast)
        self._log(f"{peer}: {reason} after {steps} steps: {message}{_describe_multicast(multicast)}")

    def _join(
        self, plan: WorkerPlan, channel: ControlChannel, ready: dict[str, object]
    ) -> _native.MulticastReceiver | None:
        """Joins the plan's group if there is one; READY says whether that works, and steps do without."""
        if plan.multicast is None:
            return None
        try:
            interface = channel.connection.getsockname()[0]
            multicast, ready["multicast_bytes"] = join_group(plan.multicast, interface, self._config.token)
        except OSError as error:
            ready |= {"multicast_bytes": 0, "multicast_problem": error.strerror or str(error)}
            return None
        return multicast

    def _prepare(self, plan: WorkerPlan, channel: ControlChannel) -> tuple[Prepared, int, int]:
        """The experts of a plan, the number of stripes hashed for it, and of bytes that the host sent.

        The last plan's experts are used again.
        """
        known = replace(plan, folder="", multicast=None)
        identities = self._weights.identities(plan)
        if self._prepared is not None and self._prepared[0] == (known, identities):
            return self._prepared[1], 0, 0
        self._prepared = None  # lets go of the old weights before the new ones come
        self._weights.release()

        def check_stop() -> None:
            if self._stopping.is_set():
                raise WorkerUnavailableError("this worker is stopping")
            _check_still_connected(channel.connection)

        # Files and the cache bound every size but the scratch's, so they come before memory is set aside.
        mapped = self._weights.map(plan)
        check_scratch(plan, self._config.resolved_threads, self._config.prefill)
        self._weights.verify(plan, mapped, check_stop)
        self._weights.fill(plan, mapped, channel, check_stop)
        try:
            experts = self._load(plan, mapped, check_stop)
        except (ValueError, MemoryError) as error:
            raise ProtocolError(f"plan: {error or 'got sizes beyond the memory of this worker'}") from error
        # Shards have their files only now.
        identities = tuple(
            now if layer.layer in mapped.shards else before
            for layer, before, now in zip(
                plan.layers, identities, self._weights.identities(plan), strict=True
            )
        )
        self._prepared = ((known, identities), experts)
        return experts, mapped.verified_stripes, mapped.fetched_bytes

    def _load(self, plan: WorkerPlan, mapped: MappedSlice, check_stop: Callable[[], None]) -> Prepared:
        """The experts of a plan, in the format that this worker, the host or a measurement says."""
        part = ExpertSlice(
            plan.hidden_size,
            plan.intermediate_size,
            plan.num_experts,
            plan.top_k,
            plan.first_stripe,
            plan.num_stripes,
            num_layers=len(plan.layers),
            num_threads=self._config.resolved_threads,
            scale_layout=plan.scale_layout,
        )
        requested = self._config.weight_format
        if requested == "auto":
            requested = plan.weight_format
        # What is in memory of its own already is not copied into such again.
        copy = self._config.copy and not (mapped.in_memory and not mapped.paths)
        stored = {layer.layer: plan.layer_format(layer) for layer in plan.layers}
        loaded = load_layers(part, mapped.units, stored, requested, check_stop, copy=copy)
        server = _native.StepServer(
            hidden_size=plan.hidden_size,
            intermediate_size=plan.intermediate_size,
            num_experts=plan.num_experts,
            top_k=plan.top_k,
            first_stripe=plan.first_stripe,
            num_stripes=plan.num_stripes,
            max_step_tokens=plan.max_step_tokens,
            num_threads=self._config.resolved_threads,
            spin_us=self._config.resolved_spin_us,
            frame_timeout_ms=round(self._config.frame_timeout_s * 1000),
            send_timeout_ms=round(self._config.send_timeout_s * 1000),
            pin_threads=self._config.resolved_pin,
            prefill=self._config.prefill,
        )
        for layer, units in loaded.units.items():
            form = loaded.formats[layer]
            server.add_layer(layer, units, form.format, form.scale_layout)
        return Prepared(server, loaded.choice, _weight_memory(mapped, loaded.units))


@dataclass(frozen=True)
class WeightMemory:
    """Where the units lie that steps read: mapped from ``origin``, the rest in the worker's own memory.

    ``reserved_bytes`` of ``huge_page_bytes`` are reserved pages; None where the system lets nobody reserve.
    """

    origin: str
    own_bytes: int
    huge_page_bytes: int
    reserved_bytes: int | None = None

    def __str__(self) -> str:
        places = [self.origin] if self.origin else []
        if self.own_bytes:
            huge, own = self.huge_page_bytes / 1e6, self.own_bytes / 1e6
            places.append(f"{huge:,.0f} of {own:,.0f} MB of its own memory in huge pages")
            if self.reserved_bytes is not None:
                missing = "" if self.reserved_bytes == self.own_bytes else ": no more lay together"
                places.append(f"{self.reserved_bytes / 1e6:,.0f} MB of them reserved{missing}")
        return ", ".join(places)


@dataclass(frozen=True)
class Prepared:
    """A slice ready for steps, and the format that it is computed in."""

    server: _native.StepServer | _native.SimulatedServer
    choice: FormatChoice
    memory: WeightMemory


def _describe_multicast(multicast: _native.MulticastReceiver | None) -> str:
    """What came by multicast; empty where there was none."""
    if multicast is None:
        return ""
    taken, refused, surplus, asked, steps = multicast.counts
    return (
        f"; {steps} steps by multicast, {taken} datagrams taken, {refused} refused, {surplus} had already, "
        f"{asked} fragments asked for again"
    )


def _weight_memory(mapped: MappedSlice, used: Mapping[int, U8]) -> WeightMemory:
    own = [
        units
        for layer, units in used.items()
        if units is not mapped.units[layer] or (mapped.in_memory and layer in mapped.shards)
    ]
    origin, how = mapped.origin(), "mapped" if len(own) < len(used) else "copied"
    return WeightMemory(
        f"{how} from {origin}" if origin else "",
        sum(units.nbytes for units in own),
        huge_page_bytes(own) if own else 0,
        huge_page_bytes(own, reserved_only=True) if own and may_reserve() else None,
    )


def _never_raising(log: Callable[[str], None]) -> Callable[[str], None]:
    def log_or_lose(line: str) -> None:
        with contextlib.suppress(Exception):
            log(line)

    return log_or_lose


def _check_still_connected(connection: socket.socket) -> None:
    connection.setblocking(False)
    try:
        if connection.recv(1, socket.MSG_PEEK) == b"":
            raise PeerClosedError("the host closed the connection while its plan was prepared")
    except BlockingIOError:
        pass
