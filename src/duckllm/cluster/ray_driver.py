"""Ray's driver in a process of its own: ``python -m duckllm.cluster.ray_driver``, spoken to by JSON lines.

Started by :mod:`duckllm.cluster.ray_cluster`. Of its own, because Ray takes handlers of signals, prints to
standard output, and ends its process when it loses its head; none of that may befall the host. Actors belong
to this process: when its input ends, or when it dies, they end.

A request has ``id`` and ``do``, and its reply the same ``id``:

    connect   address                                         -> nothing
    start     count, token, options, limit_s, start_s         -> workers, here
    find      worker, lost, limit_s                           -> address, epoch, node
    any                                                       -> problem, room (or null)
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from collections import Counter
from typing import Any

from duckllm.cluster.ray_actor import WorkerActor

RESOURCE = "duckllm_worker"  # where nodes have it, workers go there alone
SILENCE_S = 10.0  # after which an actor that does not answer is ended, for Ray to start it anew
STOP_TIMEOUT_S = 8.0
OBJECT_STORE_BYTES = 100_000_000  # little more than Ray's least: nothing is kept there
_QUOTED = 300  # characters of what Ray says


class _ProblemError(Exception):
    """What the host is told, in words; ``room`` is how many workers there is room for, if that is it."""

    def __init__(self, words: str, room: int | None = None) -> None:
        super().__init__(words)
        self.room = room


class _Driver:
    """The actors of one cluster."""

    def __init__(self) -> None:
        self._actors: list[Any] = []
        self._nodes: list[str] = []
        self._asked: dict[int, tuple[Any, float]] = {}
        self._group: Any = None
        self._arguments: tuple[Any, ...] = ()

    def start(self, request: dict[str, Any]) -> dict[str, Any]:
        """Finds room and starts every worker."""
        import ray

        self._place(request["count"], request["limit_s"])
        here = str(ray.get_runtime_context().get_node_id())
        self._arguments = request["token"], request["options"], here
        count = self._group.bundle_count
        self._actors = [self._new_actor(index) for index in range(count)]
        deadline = time.monotonic() + request["start_s"]
        self._nodes = _get([actor.node.remote() for actor in self._actors], deadline)
        started = [actor.find.remote("", self._others(index)) for index, actor in enumerate(self._actors)]
        workers = _get(started, deadline)
        for worker in workers:
            if "problem" in worker:
                raise _ProblemError(worker["problem"])
        return {"workers": workers, "here": self._nodes.count(here)}

    def find(self, request: dict[str, Any]) -> dict[str, Any]:
        """Where a lost worker is again, if Ray and its actor have it by then; else what is waited for."""
        import ray
        from ray.exceptions import RayError

        index, now = request["worker"], time.monotonic()
        if index not in self._asked:
            actor = self._actors[index]
            self._asked[index] = actor.find.remote(request["lost"], self._others(index)), now
        reference, asked = self._asked[index]
        ready, _ = ray.wait([reference], timeout=request["limit_s"])
        if not ready:
            if time.monotonic() - asked > SILENCE_S:
                ray.kill(self._actors[index], no_restart=False)
                self._asked[index] = reference, time.monotonic()
            raise _ProblemError(
                f"Ray has not started worker {index} again within {now - asked + request['limit_s']:.1f} s"
            )
        del self._asked[index]
        try:
            found: dict[str, Any] = ray.get(reference)
        except RayError as error:  # it is gone for good
            self._actors[index] = self._new_actor(index)
            raise _ProblemError(_first_sentences(error)) from error
        if "node" in found:
            self._nodes[index] = found["node"]
        return found

    def stop(self) -> None:
        """Ends the workers and their actors, and lets go of Ray, which ends if it was started here."""
        import ray

        if not ray.is_initialized():
            return
        with contextlib.suppress(Exception):  # what is left ends with this process
            stops = [actor.stop.options(max_task_retries=0).remote() for actor in self._actors]
            if stops:
                ray.wait(stops, num_returns=len(stops), timeout=STOP_TIMEOUT_S)
            for actor in self._actors:
                ray.kill(actor)
            if self._group is not None:
                ray.util.remove_placement_group(self._group)
        ray.shutdown()

    def _place(self, count: int, limit_s: float) -> None:
        """Room for that many workers, or for 0 one on each node, spread over nodes as far as they go."""
        import ray

        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        tagged = sum(int(node.get(RESOURCE, 0)) for node in nodes)
        resource = RESOURCE if tagged else "CPU"
        count = count or tagged or sum(node.get("CPU", 0) >= 1 for node in nodes)
        if count == 0:
            raise _ProblemError(f"Ray's {len(nodes)} nodes have neither {RESOURCE} nor a CPU to give", 0)
        self._group = ray.util.placement_group([{resource: 1}] * count, strategy="SPREAD")
        if not self._group.wait(limit_s):
            total = int(sum(node.get(resource, 0) for node in nodes))
            free = int(ray.available_resources().get(resource, 0))
            words = f"of {total} {resource} on {len(nodes)} nodes, {free} were free within {limit_s:g} s"
            raise _ProblemError(words, min(free, count - 1))
        self._resource = resource

    def _new_actor(self, index: int) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        room = {"num_cpus": 1} if self._resource == "CPU" else {"num_cpus": 0, "resources": {RESOURCE: 1}}
        return (
            ray.remote(WorkerActor)
            .options(
                **room,
                max_restarts=-1,
                max_task_retries=-1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=index
                ),
            )
            .remote(*self._arguments)
        )

    def _others(self, index: int) -> dict[str, int]:
        return dict(Counter(self._nodes[:index] + self._nodes[index + 1 :]))


def _connect(request: dict[str, Any]) -> dict[str, Any]:
    """Connects to the Ray at that address; ``"auto"`` is this machine's, or a new one if there is none.

    ``"local"`` is a new one in any case. It ends with this process.
    """
    import ray

    address = request["address"]
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if address != "local":
            try:
                ray.init(address=address, **quiet)
                return {}
            except ConnectionError:
                if address != "auto":
                    raise
        ray.init(address="local", include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, **quiet)
    except (Exception, SystemExit) as error:
        raise _ProblemError(_first_sentences(error)) from error
    return {}


def _get(references: list[Any], deadline: float) -> list[Any]:
    import ray
    from ray.exceptions import GetTimeoutError, RayError

    limit_s = max(1.0, deadline - time.monotonic())
    try:
        return list(ray.get(references, timeout=limit_s))
    except GetTimeoutError as error:
        words = f"its actors did not answer within {limit_s:.0f} s; their logs on the nodes say why"
        raise _ProblemError(words) from error
    except RayError as error:
        raise _ProblemError(_first_sentences(error)) from error


def _first_sentences(error: BaseException) -> str:
    """What an error of Ray's says, in its first sentences."""
    cause = getattr(error, "cause", None) or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    if lines and "creation task" in lines[0]:
        lines = lines[-1:]  # a traceback stands between
    words = " ".join(lines) or type(error).__name__
    if len(words) > _QUOTED:
        words = words[:_QUOTED].rpartition(". ")[0] or words[:_QUOTED]
    return words.removesuffix(".")


def main() -> None:
    """Answers requests until standard input ends."""
    # For a Ray that is started here: it reports nothing to its makers, and it ends no worker when memory is
    # nearly full, which weights are meant to make it.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # Ray prints there
    driver = _Driver()
    verbs = {"connect": _connect, "start": driver.start, "find": driver.find}
    try:
        for line in sys.stdin:
            request = json.loads(line)
            try:
                reply = verbs[request["do"]](request)
            except _ProblemError as problem:
                reply = {"problem": str(problem), "room": problem.room}
            except Exception as error:
                reply = {"problem": f"{type(error).__name__}: {_first_sentences(error)}"}
            replies.write(json.dumps({"id": request["id"], **reply}) + "\n")
            replies.flush()
    finally:
        driver.stop()


if __name__ == "__main__":
    main()
