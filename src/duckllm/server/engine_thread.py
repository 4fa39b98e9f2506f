"""The thread that loads the model and computes steps, and the event loop's side of it.

Made by :mod:`duckllm.server.app`, used by :mod:`duckllm.server.chat_service`. The event loop submits requests
and takes them back at any moment; the thread looks for these between two steps, hands what a step gave to the
event loop in one piece, and sleeps where there is nothing to compute.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from duckllm.errors import DuckError, EngineError, UnavailableError, UnreadError
from duckllm.outputs import StreamOutput
from duckllm.server.errors import log_fault
from duckllm.server.metrics import ServerMetrics

if TYPE_CHECKING:
    from duckllm.engine.pool import RequestPool
    from duckllm.engine.request import Request
    from duckllm.llm import LLM

# Outputs of a reply that nobody has read, most: far more than a reader who merely is late leaves behind.
MAX_UNREAD_OUTPUTS = 4096
# How often workers are looked after while there is nothing to compute.
ATTEND_EVERY_S = 1.0


@dataclass
class LoadingProgress:
    """How far loading has come; the loading thread writes it, others read.

    Args:
        stage: What is being done, in a few words.
        share: How much of that is done, 0 to 1; None where nobody knows.
    """

    stage: str = "starting"
    share: float | None = None

    def report(self, title: str, share: float) -> None:
        """Notes the first word of a title, as the others may name folders, and how much is done."""
        self.stage, self.share = title.partition(" ")[0].lower(), round(share, 4)


class ReplyStream:
    """The outputs of a prompt's replies as they come, for one reader in the event loop.

    Args:
        requests: The replies.
        cancel: Ends them.
    """

    def __init__(self, requests: Sequence[Request], cancel: Callable[[ReplyStream], None]) -> None:
        self.requests = list(requests)
        self.prompt_token_ids = requests[0].prompt_token_ids
        self._cancel = cancel
        self._outputs: deque[StreamOutput] = deque()
        self._num_open = len(requests)  # replies that have not come to their end
        self._error: Exception | None = None
        self._arrival = asyncio.Event()

    @property
    def is_over(self) -> bool:
        """Whether nothing comes any more beside what came already."""
        return self._error is not None or self._num_open == 0

    def push(self, outputs: Sequence[StreamOutput]) -> None:
        """Adds what a step gave."""
        if self.is_over:
            return
        self._outputs.extend(outputs)
        self._num_open -= sum(output.finish_reason is not None for output in outputs)
        self._arrival.set()
        if len(self._outputs) > MAX_UNREAD_OUTPUTS * len(self.requests):
            self._outputs.clear()
            self.fail(UnreadError())
            self._cancel(self)

    def fail(self, error: Exception) -> None:
        """Ends the stream with an error, behind what came before it."""
        if not self.is_over:
            self._error = error
            self._arrival.set()

    def cancel(self) -> None:
        """Stops its replies within two steps, wherever they are; harmless when they have ended."""
        if not self.is_over:
            self.fail(UnavailableError("the request was cancelled"))
            self._outputs.clear()
            self._cancel(self)

    async def arrived(self) -> list[StreamOutput]:
        """What has come since the last time, something at least; empty where all has been read.

        Raises:
            WorkerLostError: A worker went away, and neither it nor another came back in time.
            DuckError: What else ended the replies.
        """
        while not self._outputs:
            if self._error is not None:
                raise self._error
            if self._num_open == 0:
                return []
            self._arrival.clear()
            await self._arrival.wait()
        outputs = list(self._outputs)
        self._outputs.clear()
        return outputs

    async def __aiter__(self) -> AsyncIterator[StreamOutput]:
        while outputs := await self.arrived():
            for output in outputs:
                yield output


@dataclass(frozen=True)
class _Add:
    stream: ReplyStream


@dataclass(frozen=True)
class _Abort:
    stream: ReplyStream


@dataclass(frozen=True)
class _FailAll:
    error: Exception


class _Stop:
    pass


_Command = _Add | _Abort | _FailAll | _Stop


class EngineThread:
    """A model in a thread of its own.

    Args:
        load: Makes the model, in that thread; says how far it is.
        loop: Where outputs go to.

    Attributes:
        progress: How far loading is.
        llm: The model; None until it is loaded.
        loaded: Done when the model is there; its exception is why it is not.
        ended: Done when the thread has ended; its exception is why it did so by itself.
        metrics: Counts what comes and what fails.
    """

    def __init__(
        self, load: Callable[[LoadingProgress], LLM], loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self._load, self._loop = load, loop or asyncio.get_running_loop()
        self.progress = LoadingProgress()
        self.llm: LLM | None = None
        self.metrics = ServerMetrics()
        self.loaded: asyncio.Future[LLM] = self._loop.create_future()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._commands: SimpleQueue[_Command] = SimpleQueue()
        self._num_open = 0  # replies that were submitted and have not ended
        self._streams: set[ReplyStream] = set()  # those of them that somebody reads
        self._is_stopping = False
        # A daemon: a process that is told to leave while the model is loaded does not wait for that.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def num_open(self) -> int:
        """Replies that were submitted and have not ended."""
        return self._num_open

    def start(self) -> None:
        """Begins to load the model."""
        self._thread.start()

    def submit(self, requests: Sequence[Request]) -> ReplyStream:
        """Has the replies computed. In the event loop.

        Raises:
            UnavailableError: The server is about to stop.
        """
        if self._is_stopping or self.ended.done():
            raise UnavailableError("the server is stopping")
        stream = ReplyStream(requests, self._take_back)
        self._num_open += len(stream.requests)
        self._streams.add(stream)
        self._commands.put(_Add(stream))
        return stream

    def _take_back(self, stream: ReplyStream) -> None:
        self._commands.put(_Abort(stream))

    def fail_all(self, error: Exception) -> None:
        """Ends every reply with an error: for its reader at once, even where a step takes long."""
        self._commands.put(_FailAll(error))
        for stream in self._streams:
            stream.fail(error)
        self._streams.clear()

    async def stop(self, timeout_s: float | None = None) -> bool:
        """Ends what runs, and closes the model and its workers; whether that was done in time.

        Not while the model is loading.
        """
        self._is_stopping = True
        self._commands.put(_Stop())
        await asyncio.wait([self.ended], timeout=timeout_s)
        return self.ended.done()

    def _run(self) -> None:
        try:
            llm = self._load(self.progress)
        except BaseException as error:
            self._tell(self.loaded.set_exception, error)
            return
        self._tell(self._finish_loading, llm)
        try:
            with llm:
                _Steps(llm.new_pool(), self._commands, self._hand_over, llm.attend_workers).run()
        except BaseException as error:
            self._tell(self.ended.set_exception, error)
        else:
            self._tell(self.ended.set_result, None)

    def _finish_loading(self, llm: LLM) -> None:
        self.llm = llm
        self.loaded.set_result(llm)

    def _tell(self, what: Callable[..., None], *arguments: object) -> None:
        """Has the event loop call something; a loop that is closed has nobody left who waits for it."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(what, *arguments)

    def _hand_over(self, batch: Sequence[tuple[ReplyStream, list[StreamOutput] | Exception, int]]) -> None:
        self._tell(self._deliver, batch)

    def _deliver(self, batch: Sequence[tuple[ReplyStream, list[StreamOutput] | Exception, int]]) -> None:
        failed = [(what, num_ended) for _, what, num_ended in batch if isinstance(what, Exception)]
        if failed:
            self.metrics.count_failed(failed[0][0], sum(num_ended for _, num_ended in failed))
        for stream, what, num_ended in batch:
            self._num_open -= num_ended
            if isinstance(what, Exception):
                stream.fail(what)
            else:
                for output in what:
                    self.metrics.count_output(output)
                stream.push(what)
            if stream.is_over:
                self._streams.discard(stream)


class _Steps:
    """The thread's loop, once the model is loaded.

    Args:
        pool: Computes.
        commands: What the event loop wants.
        hand_over: Gives it, for each stream, outputs or the error that ended it, and how many of its replies
            have ended.
        attend: Looks after the workers while there is nothing to compute.
    """

    def __init__(
        self,
        pool: RequestPool,
        commands: SimpleQueue[_Command],
        hand_over: Callable[[Sequence[tuple[ReplyStream, list[StreamOutput] | Exception, int]]], None],
        attend: Callable[[], None],
    ) -> None:
        self._pool, self._commands, self._hand_over, self._attend = pool, commands, hand_over, attend
        self._stream_of: dict[Request, ReplyStream] = {}

    def run(self) -> None:
        """Computes until it is told to stop."""
        try:
            self._run()
        except BaseException as error:
            streams = set(self._stream_of.values())
            self._hand_over([(stream, EngineError(type(error).__name__), 0) for stream in streams])
            raise

    def _run(self) -> None:
        while True:
            try:
                # A step may take long, and nothing of it can be spared: all that was wanted comes before it.
                command = self._commands.get(block=not self._pool, timeout=ATTEND_EVERY_S)
            except Empty:
                if self._pool:
                    self._step()
                else:
                    self._attend()
                continue
            if isinstance(command, _Stop):
                self._end(list(self._stream_of), UnavailableError("the server is stopping"))
                return
            self._obey(command)

    def _obey(self, command: _Command) -> None:
        if isinstance(command, _Add):
            self._stream_of.update(dict.fromkeys(command.stream.requests, command.stream))
            self._pool.add(command.stream.requests)
        elif isinstance(command, _Abort):
            requests = [request for request in command.stream.requests if request in self._stream_of]
            self._end(requests, UnavailableError("the request was cancelled"))
        elif isinstance(command, _FailAll):
            self._end(list(self._stream_of), command.error)

    def _step(self) -> None:
        try:
            outputs = self._pool.step()
        except Exception as error:
            failed = self._pool.drop_failed()
            what = "1 reply" if len(failed) == 1 else f"{len(failed)} replies"
            log_fault(f"{what} failed", error)
            # The other replies to the same prompt are of no use without it.
            streams = {self._stream_of[request] for request in failed}
            requests = [request for request, stream in self._stream_of.items() if stream in streams]
            self._end(requests, error if isinstance(error, DuckError) else EngineError(type(error).__name__))
            return
        batch: dict[ReplyStream, list[StreamOutput]] = {}
        num_ended: dict[ReplyStream, int] = {}
        for request, output in outputs:
            stream = self._stream_of[request]
            batch.setdefault(stream, []).append(output)
            if output.finish_reason is not None:
                del self._stream_of[request]
                num_ended[stream] = num_ended.get(stream, 0) + 1
        if batch:
            self._hand_over([(stream, each, num_ended.get(stream, 0)) for stream, each in batch.items()])

    def _end(self, requests: Sequence[Request], error: Exception) -> None:
        """Takes replies out and tells their streams why."""
        self._pool.abort(requests)
        num_ended: dict[ReplyStream, int] = {}
        for request in requests:
            stream = self._stream_of.pop(request)
            num_ended[stream] = num_ended.get(stream, 0) + 1
        if num_ended:
            self._hand_over([(stream, error, number) for stream, number in num_ended.items()])
