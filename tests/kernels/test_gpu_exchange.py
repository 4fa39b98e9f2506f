"""Captured graphs whose experts the host computes: the bits of others, and no GPU that waits for ever."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from duckllm import _native  # noqa: E402
from duckllm.kernels import exchange as kernels  # noqa: E402
from duckllm.moe.device_experts import DeviceExperts, Mailboxes  # noqa: E402
from duckllm.transport.exchange import Program  # noqa: E402

DEVICE = torch.device("cuda")
LANES, LAYERS, EXPERTS, STRIPES = 2, 4, 5, 2


class NativeExperts:
    """An executor of CPU tensors: whole experts in this process, made here."""

    def __init__(self, hidden_size: int, top_k: int, max_tokens: int) -> None:
        generator = np.random.default_rng(0)
        sizes = {"hidden_size": hidden_size, "intermediate_size": 16 * STRIPES, "top_k": top_k}
        self.units = {layer: self._units(generator, hidden_size) for layer in range(LAYERS)}
        self._experts = _native.Experts(
            **sizes, num_experts=EXPERTS, first_stripe=0, num_stripes=STRIPES, max_tokens=max_tokens,
            num_threads=1, spin_us=0,
        )  # fmt: skip
        self.server = _native.experts_server(
            self.units, **sizes, max_tokens=max_tokens, num_threads=2, spin_us=0, isa="auto", format="fp9",
            prefill="f32", scale_layout="block",
        )  # fmt: skip

    @staticmethod
    def _units(generator: np.random.Generator, hidden_size: int) -> np.ndarray:
        def matrix(rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
            codes = generator.integers(0, 0x7F, (rows, columns), np.uint8)
            return codes, np.full((-(-rows // 128), -(-columns // 128)), 1e-3, np.float32)

        def expert() -> np.ndarray:
            (gate, gate_scale), (up, up_scale) = (matrix(16 * STRIPES, hidden_size) for _ in range(2))
            down, down_scale = matrix(hidden_size, 16 * STRIPES)
            return _native.pack_expert_units(gate, up, down, gate_scale, up_scale, down_scale)

        return np.stack([expert() for _ in range(EXPERTS)])

    def submit(self, layer: int, x, ids, weights, lane: int = 0):  # type: ignore[no-untyped-def]
        assert x.is_pinned()
        y = self._experts.run(self.units[layer], x.numpy(), ids.numpy(), weights.numpy())
        return type("Step", (), {"wait": lambda self: torch.from_numpy(y)})()


def inputs(rows: Sequence[int], hidden_size: int, top_k: int) -> list:
    """(layer, lane, x, ids, weights) of each layer's lanes."""
    generator = torch.Generator().manual_seed(1)
    steps = []
    for layer in range(LAYERS):
        for lane, count in enumerate(rows):
            x = torch.randn(count, hidden_size, generator=generator)
            ids = torch.rand(count, EXPERTS, generator=generator).argsort(1)[:, :top_k].int().contiguous()
            weights = torch.rand(count, top_k, generator=generator)
            steps.append((layer, lane, x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE)))
    return steps


def capture(experts: DeviceExperts, steps: list) -> tuple[Program, Callable, list]:  # type: ignore[type-arg]
    """A graph of all steps, each lane's collected before its next one is published."""
    graph, sums = torch.cuda.CUDAGraph(), {}
    with torch.cuda.graph(graph), experts.record() as program:
        pending = {}
        for index, (layer, lane, x, ids, weights) in enumerate(steps):
            if lane in pending:
                before, step = pending.pop(lane)
                sums[before] = step.wait()
            pending[lane] = index, experts.submit(layer, x, ids, weights, lane)
        for before, step in pending.values():
            sums[before] = step.wait()
    return program, graph.replay, [sums[index] for index in range(len(steps))]


def make(
    server: _native.LaneServer, executor: object, hidden_size: int, top_k: int, max_tokens: int = 64,
    timeout_s: float = 20.0, **options: float,
) -> DeviceExperts:  # fmt: skip
    boxes = Mailboxes.new(LANES, max_tokens, hidden_size, top_k, DEVICE)
    exchange = boxes.exchange(server, **options)
    return DeviceExperts(executor, boxes, exchange, kernels, timeout_s=timeout_s)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("hidden_size", "top_k", "rows"),
    [(72, 3, (3, 2)), (7168, 2, (1, 2)), (33, 1, (1, 64)), (2048, 5, (64, 17))],
)
def test_captured_steps_have_the_bits_of_others(hidden_size: int, top_k: int, rows: tuple[int, int]) -> None:
    native = NativeExperts(hidden_size, top_k, 64)
    experts = make(native.server, native, hidden_size, top_k)
    steps = inputs(rows, hidden_size, top_k)
    expected = [experts.submit(*step[:1], *step[2:], step[1]).wait() for step in steps]
    assert len({each.sum().item() for each in expected}) == len(expected)
    program, replay, sums = capture(experts, steps)
    assert [each[:4] for each in program.steps()] == [(s[0], s[1], *s[3].shape) for s in steps]
    for num_tokens in (rows, (1, rows[1]), (rows[0], 0), rows):
        for each in sums:
            each.fill_(torch.nan)
        experts.run(program, num_tokens, replay)
        for (_, lane, *_), got, wanted in zip(steps, sums, expected, strict=True):
            counted = num_tokens[lane]
            assert torch.equal(got[:counted], wanted[:counted])
            assert (got[counted:] == 0).all()


def echo(delay_us: int = 0, **options: float) -> tuple[DeviceExperts, list]:
    steps = inputs((2, 1), 7168, 4)
    server = _native.echo_server(delay_us=delay_us, zeros=False)
    return make(server, None, 7168, 4, **options), steps


def test_an_echo_returns_what_was_sent_in_every_replay() -> None:
    experts, steps = echo()
    program, replay, sums = capture(experts, steps)
    for number in range(200):
        for step in steps:
            step[2].add_(number)
        experts.run(program, (2, 1), replay)
        for step, got in zip(steps, sums, strict=True):
            assert torch.equal(got, step[2])


def test_ctrl_c_frees_the_gpu_and_the_next_program_works() -> None:
    experts, steps = echo(delay_us=10**12)
    program, replay, sums = capture(experts, steps)
    for _ in range(2):
        thread = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            experts.run(program, (2, 1), replay)
        thread.join()
        assert torch.cuda.current_stream().query()  # the GPU is through
        assert not any(each.any() for each in sums)


def test_the_time_out_frees_the_gpu() -> None:
    experts, steps = echo(delay_us=10**12, timeout_s=0.05)
    program, replay, sums = capture(experts, steps)
    with pytest.raises(RuntimeError, match="the GPU waited too long for the answer to a step"):
        experts.run(program, (2, 1), replay)
    assert torch.cuda.current_stream().query()
    assert not any(each.any() for each in sums)
