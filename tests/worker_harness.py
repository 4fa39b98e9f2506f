"""Tiny converted models, real worker processes and raw frames, for the tests around the wire."""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil

from duckllm import _native
from duckllm._native import FrameType
from duckllm.cluster.address import Address, parse_address
from duckllm.cluster.connect import Connection
from duckllm.cluster.frames import ControlChannel
from duckllm.cluster.plan import WorkerPlan
from duckllm.cluster.token import TOKEN_VARIABLE
from duckllm.moe.placement import plan_workers
from duckllm.transport.transport import Transport
from duckllm.weights import e4m3, formats
from duckllm.weights.manifest import ExpertLayer, Manifest
from duckllm.weights.safetensors_file import build_header

F32 = npt.NDArray[np.float32]
HEADER_BYTES = _native.FRAME_HEADER_BYTES


def make_model(
    folder: Path,
    *,
    hidden_size: int = 72,
    intermediate_size: int = 104,
    num_experts: int = 6,
    top_k: int = 3,
    layers: Sequence[int] = (1, 3),
    seed: int = 0,
    weight_format: str = "fp9",
    scale_layout: str = "block",
) -> Manifest:
    """A converted model that consists of random experts only."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(seed)
    expert_layers = {}
    for layer in layers:
        units = np.stack(
            [
                _random_units(generator, hidden_size, intermediate_size, weight_format, scale_layout)
                for _ in range(num_experts)
            ]
        )
        header = build_header({"units": ("U8", units.shape)}, {}, 4096)
        path = folder / f"experts-{layer:05d}.safetensors"
        path.write_bytes(header + units.tobytes())
        hashes = [hashlib.sha256(units[:, stripe].tobytes()).hexdigest() for stripe in range(units.shape[1])]
        expert_layers[layer] = ExpertLayer(path.name, path.stat().st_size, tuple(hashes))
    (folder / "config.json").write_text("{}")
    manifest = Manifest(
        folder=folder,
        format=weight_format,
        architecture="Random",
        model_type="random",
        source={"seed": seed},
        hidden_size=hidden_size,
        moe_intermediate_size=intermediate_size,
        num_experts=num_experts,
        num_experts_per_tok=top_k,
        num_stripes=formats.num_stripes(intermediate_size),
        unit_bytes=formats.unit_bytes(hidden_size, weight_format, scale_layout),
        config_sha256=hashlib.sha256(b"{}").hexdigest(),
        host_files={},
        expert_layers=expert_layers,
        created_by="tests",
        scale_layout=scale_layout,
    )
    (folder / "duck.json").write_text(json.dumps(manifest.to_json()))
    return manifest


def _random_units(
    generator: np.random.Generator,
    hidden_size: int,
    intermediate_size: int,
    weight_format: str,
    scale_layout: str = "block",
) -> npt.NDArray[np.uint8]:
    def matrix(rows: int, columns: int) -> tuple[npt.NDArray[np.uint8], F32]:
        codes = generator.integers(0, 256, (rows, columns), np.uint8)
        codes[codes & 0x7F == 0x7F] = 0  # NaN
        shape = (rows, 1) if scale_layout == "channel" else e4m3.scale_shape(rows, columns)
        scales = generator.uniform(1e-4, 3e-4, shape).astype(np.float32)
        return codes, scales

    gate, gate_scale = matrix(intermediate_size, hidden_size)
    up, up_scale = matrix(intermediate_size, hidden_size)
    down, down_scale = matrix(hidden_size, intermediate_size)
    return np.asarray(
        _native.pack_expert_units(
            gate,
            up,
            down,
            gate_scale,
            up_scale,
            down_scale,
            format=weight_format,
            scale_layout=scale_layout,
        )
    )


@dataclass(frozen=True)
class Step:
    """The inputs of one step."""

    layer: int
    x: F32
    topk_ids: npt.NDArray[np.int32]
    topk_weights: F32


def make_step(manifest: Manifest, num_tokens: int, *, layer: int | None = None, seed: int = 0) -> Step:
    """Random activations, distinct experts per token, random weights."""
    generator = np.random.default_rng(1000 + seed)
    if layer is None:
        layer = min(manifest.expert_layers)
    ids = np.stack(
        [
            generator.choice(manifest.num_experts, manifest.num_experts_per_tok, replace=False)
            for _ in range(num_tokens)
        ]
    ).astype(np.int32)
    x = generator.standard_normal((num_tokens, manifest.hidden_size)).astype(np.float32)
    weights = generator.uniform(0.1, 1.0, ids.shape).astype(np.float32)
    return Step(layer, x, ids, weights)


def partial_sum(
    manifest: Manifest, first_stripe: int, num_stripes: int, step: Step, x: npt.ArrayLike | None = None
) -> F32:
    """What one worker owes for a step, by the native experts in this process."""
    experts = _native.Experts(
        hidden_size=manifest.hidden_size,
        intermediate_size=manifest.moe_intermediate_size,
        num_experts=manifest.num_experts,
        top_k=manifest.num_experts_per_tok,
        first_stripe=first_stripe,
        num_stripes=num_stripes,
        max_tokens=len(step.x),
        num_threads=1,
        spin_us=0,
        format=manifest.format,
        scale_layout=manifest.scale_layout,
    )
    entry = manifest.expert_layers[step.layer]
    form, shape = manifest.layer_format(step.layer), manifest.units_shape(step.layer)
    offset = entry.bytes - int(np.prod(shape))
    units = np.memmap(manifest.folder / entry.file, np.uint8, mode="r", offset=offset, shape=shape)
    rows = (step.x if x is None else x, step.topk_ids, step.topk_weights)
    return np.asarray(experts.run(units, *rows, format=form.format, scale_layout=form.scale_layout))


def expected_sum(manifest: Manifest, plans: Sequence[WorkerPlan], step: Step) -> F32:
    """The partial sums of every plan's slice, added in worker order."""
    total: F32 | None = None
    for plan in plans:
        part = partial_sum(manifest, plan.first_stripe, plan.num_stripes, step)
        total = part if total is None else total + part
    assert total is not None
    assert np.isfinite(total).all()
    assert np.abs(total).max() > 1e-3  # inputs that tell something
    return total


@dataclass
class WorkerProcess:
    """A running ``python -m duckllm.worker``."""

    process: subprocess.Popen[bytes]
    address: Address
    stderr: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def counts(self) -> tuple[int, int]:
        """Open descriptors and threads."""
        process = psutil.Process(self.pid)
        return process.num_fds(), process.num_threads()

    def rss_bytes(self) -> int:
        return int(psutil.Process(self.pid).memory_info().rss)

    def log(self) -> str:
        return self.stderr.read_text()


@contextmanager
def running_worker(
    folder: Path, *flags: str, token: str | None = None, within: Sequence[str] = (), **variables: str
) -> Iterator[WorkerProcess]:
    """A worker on a free loopback port, stopped in the end by the end of its input.

    ``within`` is a command that runs another.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stderr = folder / f"worker-{os.urandom(4).hex()}.log"
    environment = {
        key: value for key, value in os.environ.items() if key != "DUCKLLM_CLUSTER_TOKEN"
    } | variables
    if token is not None:
        environment[TOKEN_VARIABLE] = token
    command = [
        *within,
        sys.executable,
        "-m",
        "duckllm.worker",
        "--json",
        "--exit-with-stdin",
        "--threads",
        "1",
        *flags,
    ]
    if "--speed" not in flags:
        command += ["--speed", "0"]
    if "--listen" not in flags:
        command += ["--listen", "127.0.0.1:0"]
    with (
        stderr.open("wb") as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line, stderr.read_text()
            yield WorkerProcess(process, parse_address(json.loads(line)["address"]), stderr)
        finally:
            process.stdin.close()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


def stop_process(pid: int, timeout_s: float = 20.0) -> None:
    """Stops a process, and returns once each of its threads stands still, which takes a moment."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + timeout_s
    while not all(_is_stopped(thread) for thread in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(0.01)


def _is_stopped(thread: Path) -> bool:
    return (thread / "stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] == "T"


def plan_for(manifest: Manifest, num_workers: int = 1, **options: object) -> tuple[WorkerPlan, ...]:
    """Plans with small steps."""
    return plan_workers(manifest, num_workers, **{"max_step_tokens": 8, **options})  # type: ignore[arg-type]


def connect(
    address: Address,
    plan: WorkerPlan,
    *,
    token: str | None = None,
    timeout_s: float = 20.0,
    share_folder: bool = True,
) -> Connection:
    """One prepared connection."""
    connection = Connection(address, token, timeout_s)
    try:
        connection.send_plan(plan, share_folder=share_folder)
        connection.wait_ready(timeout_s)
    except BaseException:
        connection.close()
        raise
    return connection


def worker_channel(connection: socket.socket) -> ControlChannel:
    """A worker's end of a connection."""
    return ControlChannel(connection, us="this worker", peer="the host", hears_errors=False)


def open_transport(connections: Sequence[Connection], **options: object) -> Transport:
    """A transport for the connections' own plan."""
    plan = connections[0].plan
    assert plan is not None
    return Transport(
        connections,
        plan.hidden_size,
        plan.top_k,
        max_step_tokens=plan.max_step_tokens,
        wire_dtype=plan.wire_dtype,
        reply_dtype=plan.reply_dtype,
        **{"step_timeout_s": 20.0, **options},  # type: ignore[arg-type]
    )


def check_serves(
    worker: WorkerProcess, manifest: Manifest, *, token: str | None = None, seed: int = 0
) -> None:
    """A real host gets a correct step from the worker."""
    (plan,) = plan_for(manifest)
    step = make_step(manifest, 3, seed=seed)
    with open_transport([connect(worker.address, plan, token=token)]) as transport:
        got = transport.wait(transport.submit(step.layer, step.x, step.topk_ids, step.topk_weights))
    np.testing.assert_array_equal(got, expected_sum(manifest, [plan], step))


def frame(kind: FrameType, payload: bytes = b"", sequence: int = 0) -> bytes:
    """A whole frame."""
    return _native.encode_frame_header(kind, len(payload), sequence) + payload


def step_frame(step: Step, *, sequence: int = 1, lane: int = 0, reply_bf16: bool = False) -> bytes:
    """A whole STEP_REQUEST with x in f32."""
    tokens, top_k = step.topk_ids.shape
    head = _native.encode_step_request_header(step.layer, tokens, top_k, lane, False, reply_bf16)
    body = step.topk_ids.tobytes() + step.topk_weights.tobytes() + step.x.tobytes()
    return frame(FrameType.STEP_REQUEST, head + body, sequence)


def read_exactly(connection: socket.socket, count: int) -> bytes:
    """``count`` bytes, or fewer if the connection ends or is reset first."""
    received = bytearray()
    while len(received) < count:
        try:
            chunk = connection.recv(count - len(received))
        except ConnectionResetError:
            break
        if not chunk:
            break
        received += chunk
    return bytes(received)


def read_frame(connection: socket.socket) -> tuple[FrameType, bytes, int] | None:
    """The next frame (type, payload, sequence); None when the connection ends first."""
    header = read_exactly(connection, HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        return None
    kind, payload_bytes, sequence = _native.decode_frame_header(header)
    return kind, read_exactly(connection, payload_bytes), sequence


def read_error(connection: socket.socket) -> tuple[int, str] | None:
    """(code, sentence) of an ERROR frame, after which the connection must end; None when it just ends."""
    got = read_frame(connection)
    if got is None:
        return None
    kind, payload, _ = got
    assert kind == FrameType.ERROR, kind
    assert read_exactly(connection, 1) == b""
    (code,) = struct.unpack("<I", payload[:4])
    return code, payload[4:].decode()


def raw_socket(address: Address, timeout_s: float = 20.0) -> socket.socket:
    """A connected socket without any protocol."""
    return socket.create_connection((address.name, address.port), timeout_s)


@dataclass
class Relay:
    """Bytes that went through a relay, towards the worker and back; connections are cut at a limit."""

    address: Address
    to_worker: int = 0
    from_worker: int = 0
    cut_after: int | None = None
    on_cut: Callable[[], object] = lambda: None

    @property
    def total(self) -> int:
        return self.to_worker + self.from_worker


@contextmanager
def relay_to(worker: Address) -> Iterator[Relay]:
    """An address behind which the worker is, one connection at a time, and what is counted on the way."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        relay = Relay(Address(*server.getsockname()))

        def serve() -> None:
            while True:
                try:
                    host, _ = server.accept()
                except OSError:
                    return  # the test is over
                with host, raw_socket(worker) as further:
                    _relay(relay, host, further)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield relay
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join(20)
        assert not thread.is_alive()


def _relay(relay: Relay, host: socket.socket, worker: socket.socket) -> None:
    other = {host: worker, worker: host}
    while True:
        for end in select.select([host, worker], [], [], 20)[0]:
            try:
                data = end.recv(1 << 14)
                other[end].sendall(data)
            except OSError:
                return
            if not data:
                return
            if end is host:
                relay.to_worker += len(data)
            else:
                relay.from_worker += len(data)
            if relay.cut_after is not None and relay.to_worker >= relay.cut_after:
                relay.cut_after = None
                relay.on_cut()
                return


@contextmanager
def fake_worker(*answers: bytes) -> Iterator[Address]:
    """An address where each answer is sent after one frame of the host's, until its end."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.settimeout(20)
                for answer in answers:
                    read_frame(connection)
                    connection.sendall(answer)
                while read_frame(connection) is not None:
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        yield Address(*server.getsockname())
        thread.join(20)
        assert not thread.is_alive()
