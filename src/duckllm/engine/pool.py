"""Requests that one thread takes on step by step, with what each step adds to every one of them.

For callers that drive the steps themselves, as the server's engine thread does; :meth:`duckllm.LLM.stream`
drives them request by request.
"""

from __future__ import annotations

from collections.abc import Iterable

from duckllm.engine.engine import Engine
from duckllm.engine.request import Request
from duckllm.outputs import StreamOutput


class RequestPool:
    """Requests under way.

    Args:
        engine: Computes them.

    Threading:
        One thread, the one that calls :meth:`step`.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._requests: dict[Request, None] = {}  # in the order they came

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, requests: Iterable[Request]) -> None:
        """Lets the next steps compute them."""
        for request in requests:
            request.start_clock()
            self._requests[request] = None
            self._engine.add(request)

    def abort(self, requests: Iterable[Request]) -> None:
        """Takes them out of the next steps; harmless where they have ended."""
        for request in requests:
            if request in self._requests:
                del self._requests[request]
                self._engine.abort(request)

    def step(self) -> list[tuple[Request, StreamOutput]]:
        """Computes a step; the new tokens of every request, one output a token.

        Requests that end leave the pool.
        After an exception the step may be repeated, once :meth:`drop_failed` has taken out whom it concerns.

        Raises:
            WorkerLostError: A worker went away, and neither it nor another came back in time.
        """
        self._engine.step()
        outputs = []
        for request in list(self._requests):
            while request.num_given_tokens < len(request.token_ids):
                request.num_given_tokens += 1
                outputs.append((request, request.given_output()))
            if request.finish_reason is not None:
                del self._requests[request]
        return outputs

    def drop_failed(self) -> list[Request]:
        """Takes out the requests that the last step's exception concerns: at least one, where there are any.

        It is the one whose reply was being taken on, or else all of which the step computed something.
        """
        failed = [request for request in self._engine.concerned() if request in self._requests]
        failed = failed or list(self._requests)
        self.abort(failed)
        return failed
