"""Captured steps without a GPU: a thread writes and reads the flags as its kernels do, over real workers."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from duckllm import _native
from duckllm.cluster.local import LocalCluster
from duckllm.config import ClusterConfig
from duckllm.errors import WorkerLostError, WorkerUnavailableError
from duckllm.moe.device_experts import DeviceExperts, Mailboxes
from duckllm.moe.dispatch import RemoteExperts
from duckllm.moe.executor import ExpertExecutor
from duckllm.moe.local import LocalExperts
from duckllm.transport.exchange import REPLY_LINES, Exchange, LaneArrays, Program
from duckllm.transport.flock import Flock
from duckllm.weights.manifest import Manifest
from worker_harness import Step, make_model, make_step, open_transport, plan_for

CPU = torch.device("cpu")
LANES, ROWS, LAYERS = 2, (3, 2), (1, 3, 1, 3)


class FakeGpu:
    """Kernels that, while a stream is captured, become a list, and a replay of it by a thread."""

    def __init__(self) -> None:
        self.is_capturing = False
        self.before: Callable[[int], None] = lambda index: None  # a step is published
        self.num_replays = 0
        self._graph: list[Callable[[], None]] = []
        self._thread: threading.Thread | None = None
        self._errors: list[BaseException] = []

    def _launch(self, kernel: Callable[[], None]) -> None:
        assert self.is_capturing
        self._graph.append(kernel)

    def begin(self, boxes: Mailboxes) -> None:
        self._launch(lambda: boxes.state.copy_(boxes.control[0, : len(boxes.state)]))  # type: ignore[arg-type, return-value]

    def publish(
        self,
        boxes: Mailboxes,
        lane: int,
        index: int,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
    ) -> int:
        def kernel() -> None:
            self.before(index)
            num_tokens = min(int(boxes.state[1 + lane]), len(x))
            box = boxes.lanes[lane]
            box.x[:num_tokens] = x[:num_tokens]
            for sent, each in ((box.topk_ids, ids), (box.topk_weights, weights)):
                sent.view(-1)[: num_tokens * ids.shape[1]] = each[:num_tokens].reshape(-1)
            for flag in range(len(x)):
                boxes.requests(lane)[flag] = int(boxes.state[0]) + index + 1

        self._launch(kernel)
        return len(x)

    def collect(
        self,
        boxes: Mailboxes,
        lane: int,
        index: int,
        num_rows: int,
        *,
        timeout_s: float,
    ) -> torch.Tensor:
        delta = torch.full((num_rows, boxes.lanes[lane].y.shape[1]), torch.nan)

        def kernel() -> None:
            num_tokens = min(int(boxes.state[1 + lane]), num_rows)
            delta[:] = 0
            number, until = int(boxes.state[0]) + index + 1, time.monotonic() + timeout_s
            reply = boxes.replies(lane)[index % REPLY_LINES]
            while int(reply[0]) != number:
                if int(reply[1]) != 0:
                    return
                if time.monotonic() > until:
                    for each in range(len(boxes.lanes)):
                        boxes.replies(each)[:, 1] = _native.EXCHANGE_TIMED_OUT
                time.sleep(0.0002)
            delta[:num_tokens] += boxes.lanes[lane].y[:num_tokens]

        self._launch(kernel)
        return delta

    def replay(self) -> None:
        def run() -> None:
            try:
                for kernel in self._graph:
                    kernel()
            except BaseException as error:
                self._errors.append(error)

        self.synchronize()
        self.num_replays += 1
        self._thread = threading.Thread(target=run)
        self._thread.start()

    def synchronize(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        assert not self._errors


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    gpu = FakeGpu()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: gpu.is_capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: gpu)
    yield gpu
    gpu.synchronize()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def steps(model: Manifest) -> list[tuple[int, Step]]:
    """(lane, step) in the order of publishing: each layer, of every lane."""
    return [
        (lane, make_step(model, ROWS[lane], layer=layer, seed=10 * number + lane))
        for number, layer in enumerate(LAYERS)
        for lane in range(LANES)
    ]


def tensors(step: Step) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.from_numpy(step.x), torch.from_numpy(step.topk_ids), torch.from_numpy(step.topk_weights)


def make_boxes(model: Manifest) -> Mailboxes:
    return Mailboxes.new(LANES, 4, model.hidden_size, model.num_experts_per_tok, CPU)


def capture(
    gpu: FakeGpu, experts: DeviceExperts, steps: list[tuple[int, Step]]
) -> tuple[Program, list[torch.Tensor]]:
    """A graph in which each lane's step is collected when the lane's next one, or the end, comes."""
    gpu.is_capturing = True
    with experts.record() as program:
        pending, sums = {}, {}
        for index, (lane, step) in enumerate(steps):
            if lane in pending:
                before, taken = pending.pop(lane)
                sums[before] = taken.wait()
            pending[lane] = index, experts.submit(step.layer, *tensors(step), lane)
        for before, taken in pending.values():
            sums[before] = taken.wait()
    gpu.is_capturing = False
    return program, [sums[index] for index in range(len(steps))]


def check(
    sums: list[torch.Tensor],
    expected: list[torch.Tensor],
    steps: list[tuple[int, Step]],
    num_tokens: tuple[int, ...],
) -> None:
    for got, wanted, (lane, _) in zip(sums, expected, steps, strict=True):
        assert torch.equal(got[: num_tokens[lane]], wanted[: num_tokens[lane]])
        assert not got[num_tokens[lane] :].any()


def sums_of(executor: ExpertExecutor, steps: list[tuple[int, Step]]) -> list[torch.Tensor]:
    return [executor.submit(step.layer, *tensors(step), lane).wait() for lane, step in steps]


@contextmanager
def device_experts(
    gpu: FakeGpu, model: Manifest, silence_s: float = 20.0, timeout_s: float = 20.0
) -> Iterator[tuple[DeviceExperts, RemoteExperts, Flock, LocalCluster]]:
    """Two workers, for captured steps and for others."""
    with (
        LocalCluster(ClusterConfig(workers=2, threads_per_worker=1)) as cluster,
        open_transport(cluster.connect(plan_for(model, 2))) as transport,
    ):
        flock = Flock(transport, cluster, silence_s, timeout_s)
        remote, boxes = RemoteExperts(flock), make_boxes(model)
        exchange = boxes.exchange(transport.server(), flock=flock, transport=transport, spin_us=50)
        yield DeviceExperts(remote, boxes, exchange, gpu), remote, flock, cluster


def test_workers_give_the_bits_of_steps_that_are_not_captured(
    gpu: FakeGpu, model: Manifest, steps: list[tuple[int, Step]]
) -> None:
    with device_experts(gpu, model) as (experts, remote, flock, _):
        expected = sums_of(remote, steps)
        program, sums = capture(gpu, experts, steps)
        assert [step[:4] for step in program.steps()] == [
            (step.layer, lane, ROWS[lane], model.num_experts_per_tok) for lane, step in steps
        ]
        for num_tokens in (ROWS, (1, 2), (2, 1), (3, 0)):
            experts.run(program, num_tokens, gpu.replay)
            gpu.synchronize()
            check(sums, expected, steps, num_tokens)
        assert gpu.num_replays == 4
        assert flock.times().layers == (1, 3)
        # Of each layer two steps of two lanes: not captured, and in each run; one lane was empty in the last.
        assert flock.times().num_steps == (18, 18)


def test_a_worker_killed_within_a_program_changes_no_bit(
    gpu: FakeGpu, model: Manifest, steps: list[tuple[int, Step]]
) -> None:
    with device_experts(gpu, model) as (experts, remote, flock, cluster):
        expected = sums_of(remote, steps)
        program, sums = capture(gpu, experts, steps)
        for index in (0, 3, 7):
            gpu.num_replays = 0

            def kill(now: int, at: int = index) -> None:
                if now == at and gpu.num_replays == 1:
                    os.kill(cluster.pids[at % 2], signal.SIGKILL)

            gpu.before = kill
            experts.run(program, ROWS, gpu.replay)
            gpu.synchronize()
            assert gpu.num_replays == 2
            check(sums, expected, steps, ROWS)
        assert flock.times().num_losses == flock.times().num_replacements == (1, 2)


def test_a_worker_that_is_silent_is_replaced(
    gpu: FakeGpu, model: Manifest, steps: list[tuple[int, Step]]
) -> None:
    with device_experts(gpu, model, silence_s=0.5) as (experts, remote, flock, cluster):
        expected = sums_of(remote, steps)
        program, sums = capture(gpu, experts, steps)

        def stop(index: int) -> None:
            if index == 2 and gpu.num_replays == 1:
                os.kill(cluster.pids[1], signal.SIGSTOP)

        gpu.before = stop
        experts.run(program, ROWS, gpu.replay)
        gpu.synchronize()
        check(sums, expected, steps, ROWS)
        assert (gpu.num_replays, flock.times().num_losses) == (2, (0, 1))


def test_who_does_not_come_back_fails_the_program_and_none_after_it(
    gpu: FakeGpu, model: Manifest, steps: list[tuple[int, Step]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with device_experts(gpu, model) as (experts, remote, _, cluster):
        expected = sums_of(remote, steps)
        program, sums = capture(gpu, experts, steps)

        def refuse(*_: object, **__: object) -> None:
            raise WorkerUnavailableError("gone fishing")

        with monkeypatch.context() as patch:
            patch.setattr(cluster, "replace", refuse)
            os.kill(cluster.pids[0], signal.SIGKILL)
            for _ in range(2):
                with pytest.raises(WorkerLostError, match="nothing took its place in time: gone fishing"):
                    experts.run(program, ROWS, gpu.replay)
                assert gpu._thread is None  # it was waited for
        experts.run(program, ROWS, gpu.replay)
        gpu.synchronize()
        check(sums, expected, steps, ROWS)


def test_ctrl_c_frees_the_gpu_and_the_next_program_works(
    gpu: FakeGpu, model: Manifest, steps: list[tuple[int, Step]]
) -> None:
    with device_experts(gpu, model) as (experts, remote, flock, cluster):
        expected = sums_of(remote, steps)
        program, sums = capture(gpu, experts, steps)

        def interrupt(index: int) -> None:
            if index == 3:
                os.kill(cluster.pids[1], signal.SIGSTOP)
                os.kill(os.getpid(), signal.SIGINT)

        gpu.before = interrupt
        with pytest.raises(KeyboardInterrupt):
            experts.run(program, ROWS, gpu.replay)
        assert gpu._thread is None
        os.kill(cluster.pids[1], signal.SIGCONT)
        gpu.before = lambda index: None
        experts.run(program, ROWS, gpu.replay)
        gpu.synchronize()
        check(sums, expected, steps, ROWS)
        assert flock.times().num_losses == (0, 0)


def test_experts_in_this_process(gpu: FakeGpu, model: Manifest, steps: list[tuple[int, Step]]) -> None:
    local = LocalExperts(model)
    boxes = make_boxes(model)
    exchange = boxes.exchange(local.server(max_tokens=4, num_threads=2), spin_us=50)
    experts = DeviceExperts(local, boxes, exchange, gpu)
    program, sums = capture(gpu, experts, steps)
    experts.run(program, ROWS, gpu.replay)
    gpu.synchronize()
    check(sums, sums_of(local, steps), steps, ROWS)
    assert exchange.num_answered == len(steps)


def echo_experts(
    gpu: FakeGpu, model: Manifest, delay_us: int = 0, timeout_s: float = 20.0, **options: float
) -> DeviceExperts:
    boxes = make_boxes(model)
    exchange = boxes.exchange(_native.echo_server(delay_us=delay_us, zeros=False), spin_us=50, **options)
    return DeviceExperts(LocalExperts(model), boxes, exchange, gpu, timeout_s=timeout_s)


def test_a_replay_that_fails_leaves_nothing(
    gpu: FakeGpu, model: Manifest, steps: list[tuple[int, Step]]
) -> None:
    experts = echo_experts(gpu, model)
    program, sums = capture(gpu, experts, steps)
    with pytest.raises(ZeroDivisionError):
        experts.run(program, ROWS, lambda: print(1 // 0))
    experts.run(program, ROWS, gpu.replay)
    gpu.synchronize()
    check(sums, [torch.from_numpy(step.x) for _, step in steps], steps, ROWS)


def test_a_gpu_that_waits_too_long_or_publishes_nothing(
    gpu: FakeGpu, model: Manifest, steps: list[tuple[int, Step]]
) -> None:
    experts = echo_experts(gpu, model, delay_us=10**12, timeout_s=0.02)
    program, _ = capture(gpu, experts, steps)
    with pytest.raises(RuntimeError, match="the GPU waited too long for the answer to a step"):
        experts.run(program, ROWS, gpu.replay)
    experts = echo_experts(gpu, model, gpu_timeout_s=0.02)
    with pytest.raises(RuntimeError, match="the GPU published no step within 20 ms"):
        experts.run(program, ROWS, lambda: None)


def test_what_makes_no_sense_is_refused(gpu: FakeGpu, model: Manifest, steps: list[tuple[int, Step]]) -> None:
    experts = echo_experts(gpu, model)
    gpu.is_capturing = True
    with pytest.raises(RuntimeError, match=r"a captured step outside of record\(\)"):
        experts.submit(1, *tensors(steps[0][1]))
    gpu.is_capturing = False
    program = Program()
    program.append(1, 2, 1, 1, 1)
    with pytest.raises(ValueError, match="step lane: got 2, expected 0 to 1"):
        experts.run(program, ROWS, gpu.replay)
    assert gpu.num_replays == 0
    with pytest.raises(ValueError, match="num_tokens: got 3, expected 2 numbers, one a lane"):
        experts.run(Program(), (1, 1, 1), gpu.replay)
    experts.run(Program(), (1, 1), lambda: None)  # a graph without experts
    experts.run(Program(), (1,), lambda: None)  # and with one lane
    control = np.zeros((2, 32), np.int32)
    lane = LaneArrays(
        np.zeros((2, 8), np.float32),
        np.zeros((2, 2), np.int32),
        np.zeros((2, 2), np.float32),
        np.zeros((2, 8), np.float32),
    )
    with pytest.raises(ValueError, match=r"control: got shape \[2, 32\], expected shape \[18, 32\]"):
        Exchange(control, [lane], _native.echo_server())
    units = {1: np.zeros((2, 1, 7), np.uint8)}
    with pytest.raises(ValueError, match=r"units: got shape \[2, 1, 7\], expected shape \[2, 1, \d+\]"):
        _native.experts_server(
            units, hidden_size=8, intermediate_size=16, top_k=1, max_tokens=1, num_threads=1, spin_us=0,
            isa="scalar", format="fp9", prefill="f32", scale_layout="block",
        )  # fmt: skip
