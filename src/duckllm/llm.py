"""The Python interface of duck-llm: prompts in, replies out, in the shape of vLLM's offline API.

Called by users and by the command line. Checks what they give, lets :mod:`duckllm.assembly` put the parts
together, and turns prompts into requests for the engine.
"""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from duckllm.assembly import (
    CacheLimits,
    asked_slices,
    begin_workers,
    build_engine,
    choose_device,
    drafts,
    plan_memory,
)
from duckllm.assembly_experts import ClusterInfo
from duckllm.cluster import check_cluster
from duckllm.cluster.address import parse_addresses
from duckllm.config import (
    MAX_THREADS,
    MAX_WORKERS,
    ClusterConfig,
    StepConfig,
    as_size,
    count_of,
    show_size,
    threads_in_words,
)
from duckllm.conversation import Conversation
from duckllm.device import Device, check_device, vram_kept
from duckllm.engine.cache_size import DEFAULT_MAX_NUM_SEQS, HostMemory
from duckllm.engine.page_files import check_folder
from duckllm.errors import CheckpointError, ConfigError, InWords, RequestError
from duckllm.models.registry import ModelFolder, check_context, open_model
from duckllm.outputs import EngineMetrics, EngineState, RequestOutput, StreamOutput, WorkerTimes
from duckllm.paths import as_path
from duckllm.sampling_params import SamplingParams
from duckllm.text import Tokenizer
from duckllm.text.chat_format import chat_format
from duckllm.text.messages import as_messages
from duckllm.tracing.writer import DEFAULT_TRACE_BYTES, LEAST_TRACE_BYTES, TraceWriter, check_trace
from duckllm.weights.checkpoint import load_json
from duckllm.weights.recode import available_memory_bytes

if TYPE_CHECKING:
    from duckllm.engine.pool import RequestPool
    from duckllm.engine.request import Request
    from duckllm.models.causal_lm import CausalLM
    from duckllm.models.mtp import MTPLayer

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model ready to answer, with its workers.

    Args:
        model: A converted model folder, a Hugging Face checkpoint folder (converted once, into the model
            cache), a model on the hub (``"org/name"`` or ``"org/name@revision"``), or ``"demo"`` or None
            for the demo model.
        workers: A number of workers to start, or the addresses of running ones (``"a:port,b:port"`` or a
            list); 0 computes the experts in this process. None starts 2 here, or with ``cluster="ray"`` one
            on each node, and with ``cluster="discover"`` takes every node that announces itself.
        max_model_len: Most tokens of prompt and reply together; None for the model's longest context, or what
            the KV cache holds if that is less.
        kv_cache_bytes: Memory of the KV cache, over all requests, as a number or a size such as ``"2GiB"``
            (as the two below it); None for a quarter of the memory that the weights leave free, but one
            context of ``max_model_len`` at least and no more than ``max_num_seqs`` of them. What was computed
            stays in it as long as there is room, and is taken up where another prompt begins alike.
        kv_memory_bytes: Memory for what leaves the KV cache, from where it comes back; 0 for none, as a
            larger KV cache serves as well while it lies in the same memory.
        kv_disk_dir: A folder for pages of the KV cache, which another process goes on from: what a request
            has computed is saved there at its end. It holds what was said; None for none.
        kv_disk_bytes: Most bytes of files in that folder, of which the ones used longest ago go first; None
            for 16 GiB.
        max_num_seqs: Most requests that are computed at a time; others wait.
        device: What computes everything but the experts: ``"cpu"``, ``"cuda"``, or ``"cuda:1"`` for one card
            of several. ``"auto"`` takes the first card where CUDA and Triton are there, its compute
            capability is 8.0 at least, and weights and one context fit into its VRAM; else the CPU.
        host_threads: Threads of the host's own layers; 0 decides by the model and the cores there are. It is
            torch's setting, and so holds for the whole process.
        draft: Whether tokens are guessed ahead, by the layer of multi-token prediction that a checkpoint may
            have, and checked several at once: ``"auto"`` where it is measured to pay, ``"on"``, ``"off"``, or
            ``"stateless"`` to see what a guess without what was before is worth. No token depends on it.
        draft_tokens: Most tokens guessed at once.
        lanes: Whether the host computes one half of a step while the workers compute the other: ``"auto"``
            where it is measured to pay, ``"on"`` or ``"off"``. No token depends on it.
        trace: A file for what happens when, layer by layer and worker by worker, as Chrome trace events
            (docs/tracing.md); None for none.
        trace_bytes: Most bytes of it, as a number or a size, None for 256 MiB; of more, the newest are kept.
        **cluster_options: Any other field of :class:`duckllm.config.ClusterConfig`.

    Raises:
        ConfigError: A value is of the wrong kind or out of range, a card that was asked for cannot be used,
            or memory, or VRAM, does not hold the weights and one context.
        CacheFormatError: ``kv_disk_dir`` holds pages of another model or format.
        ModelError: The model cannot be found or used.
        MissingPackageError: Ray, or zeroconf, is needed and not installed.
        ClusterError: The workers do not start or cannot be reached.
        TypeError: An unknown argument, by name.

    Threading:
        One thread at a time. Several streams may be under way; each step computes for all of them.

    Example:
        >>> with LLM() as llm:
        ...     print(llm.chat([{"role": "user", "content": "Is 1001 prime?"}])[0].outputs[0].text)
        No, 1001 is not prime: 1001 = 7 x 11 x 13.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        workers: int | str | Sequence[str] | None = None,
        max_model_len: int | None = None,
        kv_cache_bytes: int | str | None = None,
        kv_memory_bytes: int | str = 0,
        kv_disk_dir: str | Path | None = None,
        kv_disk_bytes: int | str | None = None,
        max_num_seqs: int = DEFAULT_MAX_NUM_SEQS,
        device: str = "auto",
        host_threads: int = 0,
        draft: str = "auto",
        draft_tokens: int = 1,
        lanes: str = "auto",
        trace: str | Path | None = None,
        trace_bytes: int | str | None = None,
        **cluster_options: Any,
    ) -> None:
        cluster_config = _cluster_config(workers, cluster_options)
        step_config = StepConfig(draft, draft_tokens, lanes)
        in_process = workers == 0
        if in_process and cluster_config.spares:
            raise ConfigError("spares", cluster_config.spares, "0 where there are no workers")
        if in_process and cluster_config.multicast != "off":
            raise ConfigError("multicast", cluster_config.multicast, "off where there are no workers")
        if in_process and cluster_config.kind != "local":
            raise ConfigError("workers", 0, f"at least 1 with cluster {cluster_config.cluster}")
        check_cluster(cluster_config)
        _check_int("host_threads", host_threads, 0, MAX_THREADS)
        if not isinstance(model, str | Path | None):
            raise ConfigError("model", model, "a folder's name, a Path, or None for the demo model")
        if max_model_len is not None:
            _check_int("max_model_len", max_model_len, 2)
        _check_int("max_num_seqs", max_num_seqs, 1)
        check_device(device)
        trace_path, trace_limit = _trace_file(trace, trace_bytes)
        limits = _cache_limits(kv_cache_bytes, kv_memory_bytes, kv_disk_dir, kv_disk_bytes)
        opened = open_model(model, cluster_config.weight_format)
        self.model_hash = opened.manifest.model_hash
        check_context(opened, max_model_len)
        guesses = drafts(opened, step_config)
        self.default_sampling_params = _default_sampling_params(opened.path)
        local = cluster_config.num_workers if cluster_config.kind == "local" else 0

        def plan(on: Device) -> HostMemory:
            asked_slices(opened, cluster_config)
            return plan_memory(
                opened,
                None if in_process else local,
                cluster_config,
                step_config,
                device=on,
                max_model_len=max_model_len,
                cache_limits=limits,
                max_num_seqs=max_num_seqs,
            )

        self.device = choose_device(device, plan)
        if limits.disk_dir is not None:
            dtype = "bfloat16" if self.device.is_cuda else "float32"
            check_folder(limits.disk_dir, self.model_hash, opened.num_layers + guesses, dtype)
        if not self.device.is_cuda and (limits.has_sizes or max_model_len is not None):
            # Else this is decided while workers prepare, and torch is imported: nobody asked for anything.
            plan(self.device)
        stack = ExitStack()
        # Closes the workers when the object goes, and at the interpreter's exit, if nobody did before.
        self._pid = os.getpid()
        self._finalizer = weakref.finalize(self, _close_in, self._pid, stack)
        try:
            cluster = None if in_process else begin_workers(stack, opened, cluster_config, step_config)
            self.tokenizer = Tokenizer(opened.path)
            self._format = chat_format(self.tokenizer)
            with vram_kept(self.device):
                self._engine, self._experts, self._memory = build_engine(
                    stack,
                    opened,
                    cluster,
                    cluster_config,
                    step_config,
                    device=self.device,
                    max_model_len=max_model_len,
                    cache_limits=limits,
                    max_num_seqs=max_num_seqs,
                    host_threads=host_threads,
                    tokenizer=self.tokenizer,
                )
            self._trace: TraceWriter | None = None
            if trace_path is not None:
                self._trace = self._begin_trace(stack, trace_path, trace_limit, opened)
        except BaseException:
            self.close()
            raise
        self.max_model_len, self.max_num_seqs = self._engine.max_model_len, max_num_seqs

    def _begin_trace(self, stack: ExitStack, path: Path, limit_bytes: int, model: ModelFolder) -> TraceWriter:
        info, engine, experts = self.cluster_info(), self._engine, self._experts
        facts = {
            "model": model.path.name,
            "num_experts": model.manifest.num_experts,
            "num_experts_per_tok": model.manifest.num_experts_per_tok,
            "weight_format": info.weight_format,
            "stripes": list(info.stripes),
            "threads": list(info.threads),
            "isas": list(info.isas),
        }
        names = tuple(
            f"{address}, {count_of(stripes, 'stripe')}, {threads_in_words(threads)}"
            for address, stripes, threads in zip(info.addresses, info.stripes, info.threads, strict=False)
        )
        writer = TraceWriter(path, limit_bytes, facts, names)

        def end() -> None:
            experts.trace(None)
            engine.stats.on_step = None

        stack.callback(writer.close)
        writer.on_end = end
        experts.trace(writer.steps)
        engine.stats.on_step = writer.step
        return writer

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the workers that were started here and the connections to others; harmless when repeated.

        Waits until pages that are to be saved are on the disk.
        """
        self._finalizer()

    def cluster_info(self) -> ClusterInfo:
        """What computes the experts now: a worker that was lost may have been replaced.

        Threading: any thread.
        """
        return self._experts.info()

    def worker_times(self) -> WorkerTimes:
        """Where the time of steps at workers goes, and how often workers were lost.

        Threading: any thread, while a reply is computed too.
        """
        return self._experts.times()

    def attend_workers(self) -> None:
        """Notices workers that have gone while nothing was computed, and brings back who is soon there.

        Raises:
            RequestError: This LLM is closed, or another process's.

        Threading: the thread of the steps, between two of them.
        """
        self._check_open()
        self._experts.attend()
        if self._trace is not None:
            self._trace.flush()

    def memory(self) -> HostMemory:
        """What this machine's memory goes to, and a card's, as it was decided before anything was loaded."""
        return self._memory

    def host_model(self) -> tuple[CausalLM, MTPLayer | None]:
        """The model's part on this host, and the layer that guesses, for what looks below requests.

        Threading: the thread of the steps, while no request is under way.
        """
        drafter = self._engine.drafter
        return self._engine.model, None if drafter is None else drafter.layer

    def stats(self) -> EngineMetrics:
        """What was computed so far and how long it took, in all and over the last steps.

        Threading: any thread, while a reply is computed too.
        """
        return self._engine.stats.metrics()

    def state(self) -> EngineState:
        """What is under way at the moment, and how full the KV cache is.

        Threading: any thread, while a reply is computed too.
        """
        return self._engine.state()

    def conversation(self, system: str | None = None, *, keep_thinking: bool = True) -> Conversation:
        """A conversation whose every turn goes on from the tokens of the turns before, as they really were.

        Args:
            system: A system message before it.
            keep_thinking: As for :class:`duckllm.conversation.Conversation`.

        Example:
            >>> conversation = llm.conversation()
            >>> print(conversation.send("What is a duck?").outputs[0].text)
            >>> print(conversation.send("What was my first question?").outputs[0].text)
        """
        return Conversation(self, system, keep_thinking=keep_thinking)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """The replies to prompts, in their order.

        Args:
            prompts: A text, its token ids, or a list of these. Control tokens that a text spells, such as one
                that ends a turn, are those tokens, as in vLLM; in messages for :meth:`chat` they are text.
            sampling_params: For all prompts, or one for each; None for the model's own defaults.

        Raises:
            RequestError: A prompt cannot be honoured, or the LLM is closed.
            ConfigError: The sampling names a token that the model does not have, or structured outputs that
                cannot be kept to.
            WorkerLostError: A worker went away, and neither it nor another came back within
                ``worker_timeout_s``. The next request tries again.
        """
        items = _as_list(prompts)
        params = self._params_for(items, sampling_params)
        texts = [item if isinstance(item, str) else None for item in items]
        token_ids = [self._encode(item) for item in items]
        return self._run_all(texts, token_ids, params)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """The assistant's next message of each conversation.

        Args:
            messages: A conversation, ``[{"role": "user", "content": "..."}, ...]``, or a list of them.
                Earlier calls of tools and their results have the form of OpenAI's API.
            sampling_params: For all conversations, or one for each; None for the model's own defaults.

        Raises:
            RequestError: A conversation cannot be honoured, or the LLM is closed.
            ConfigError: The sampling names a token that the model does not have, or structured outputs that
                cannot be kept to.
            WorkerLostError: A worker went away, and neither it nor another came back within
                ``worker_timeout_s``. The next request tries again.
        """
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            raise RequestError(f"messages: got {type(messages).__name__}, expected a list of messages")
        one = len(messages) == 0 or isinstance(messages[0], Mapping)
        conversations: list[Any] = [messages] if one else list(messages)
        params = self._params_for(conversations, sampling_params)
        token_ids = [self._prompt_of(conversation) for conversation in conversations]
        return self._run_all([None] * len(token_ids), token_ids, params)

    def stream(
        self, prompt: Prompt | Messages, sampling_params: SamplingParams | None = None
    ) -> Iterator[StreamOutput]:
        """A reply as it grows: one output a token, the last one with its ``finish_reason``.

        The prompt is checked here and now; computing begins with the first output asked for. Several replies
        (``n``) take turns, a token each; ``index`` tells to which one an output belongs.

        Args:
            prompt: A text, its token ids, or a conversation.
            sampling_params: None for the model's own defaults.

        Raises:
            RequestError: The prompt cannot be honoured, or the LLM is closed.
            ConfigError: The sampling names a token that the model does not have, or structured outputs that
                cannot be kept to.
            WorkerLostError: A worker went away, and neither it nor another came back within
                ``worker_timeout_s``. The next request tries again.

        Example:
            >>> for output in llm.stream("A duck is", SamplingParams(stop=".", max_tokens=50)):
            ...     print(output.text, end="", flush=True)
        """
        is_conversation = isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
        token_ids = self._prompt_of(prompt) if is_conversation else self._encode(prompt)
        [params] = self._params_for([prompt], sampling_params)
        return self._stream(self.new_requests(token_ids, params))

    def new_requests(self, token_ids: Sequence[int], params: SamplingParams) -> list[Request]:
        """The replies to a prompt, ``params.n`` of them, not yet run, for :meth:`new_pool`.

        Any thread may make them while another computes.

        Raises:
            RequestError: The prompt cannot be honoured, or the LLM is closed.
            ConfigError: The sampling names a token that the model does not have, or structured outputs that
                cannot be kept to.
        """
        self._check_open()
        first = self._engine.new_request(token_ids, params, self.tokenizer)
        others = [
            self._engine.new_request(
                token_ids, params, self.tokenizer, request_id=first.request_id, index=index
            )
            for index in range(1, params.n)
        ]
        return [first, *others]

    def new_pool(self) -> RequestPool:
        """Requests for a caller that drives their steps itself; with no stream beside it."""
        from duckllm.engine.pool import RequestPool

        return RequestPool(self._engine)

    def _stream(self, replies: Sequence[Request]) -> Iterator[StreamOutput]:
        self._check_open()
        try:
            self._begin(replies)
            running = {request: self._engine.run(request) for request in replies}
            while running:
                for request, tokens in list(running.items()):
                    if next(tokens, None) is None:
                        del running[request]
                        continue
                    yield request.given_output()
                    self._check_open()
        finally:
            self._end(replies)

    def _run_all(
        self,
        texts: Sequence[str | None],
        token_ids: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
    ) -> list[RequestOutput]:
        # Every prompt is checked before the first one is computed.
        groups = [self.new_requests(ids, each) for ids, each in zip(token_ids, params, strict=True)]
        requests = [request for replies in groups for request in replies]
        try:
            self._begin(requests)
            for request in requests:
                for _ in self._engine.run(request):
                    pass
        finally:
            self._end(requests)
        return [
            RequestOutput(
                replies[0].request_id,
                prompt,
                replies[0].prompt_token_ids,
                tuple(request.completion() for request in replies),
                True,
                replies[0].metrics(replies[1:]),
                replies[0].prompt_logprobs,
            )
            for prompt, replies in zip(texts, groups, strict=True)
        ]

    def _begin(self, requests: Sequence[Request]) -> None:
        for request in requests:
            request.start_clock()
            self._engine.add(request)

    def _end(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._engine.abort(request)

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise RequestError("this LLM is closed, expected one that is open")
        if os.getpid() != self._pid:
            raise RequestError(
                f"LLM: got a request in process {os.getpid()}, forked from {self._pid}, which made this LLM "
                "and its workers, expected one there: make an LLM in each process"
            )

    def _prompt_of(self, messages: Any) -> list[int]:
        return list(self._format.prompt(as_messages(messages)).token_ids)

    def _encode(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if _is_token_ids(prompt):
            return list(prompt)
        raise RequestError(f"prompt: got {type(prompt).__name__}, expected text or a list of token ids")

    def _params_for(
        self,
        prompts: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[SamplingParams]:
        if sampling_params is None:
            return [self.default_sampling_params] * len(prompts)
        if isinstance(sampling_params, SamplingParams):
            return [sampling_params] * len(prompts)
        given = list(sampling_params) if isinstance(sampling_params, Sequence) else [sampling_params]
        for params in given:
            if not isinstance(params, SamplingParams):
                raise ConfigError("sampling_params", params, "SamplingParams, or a list of them")
        if len(given) != len(prompts):
            raise ConfigError(
                "sampling_params", InWords(f"{len(given)} of them"), f"one for each of {len(prompts)} prompts"
            )
        return given


def _close_in(pid: int, stack: ExitStack) -> None:
    """Closes in the process that opened; a forked child must not end its parent's workers and session."""
    if os.getpid() == pid:
        stack.close()


def _is_token_ids(prompt: object) -> bool:
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, (str, bytes))
        and all(isinstance(token, int) and not isinstance(token, bool) for token in prompt)
    )


def _as_list(prompts: Any) -> list[Any]:
    if isinstance(prompts, str) or (_is_token_ids(prompts) and len(prompts) > 0):
        return [prompts]
    if isinstance(prompts, Sequence) and not isinstance(prompts, bytes):
        return list(prompts)
    raise RequestError(f"prompts: got {type(prompts).__name__}, expected text, token ids, or a list of these")


def _check_int(field: str, value: object, least: int, most: int | None = None) -> None:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or value < least or (most is not None and value > most):  # type: ignore[operator]
        limits = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ConfigError(field, value, f"an integer {limits}")


def _cache_limits(
    cache_bytes: int | str | None,
    memory_bytes: int | str,
    disk_dir: str | Path | None,
    disk_bytes: int | str | None,
) -> CacheLimits:
    """The room for the KV cache, with the memory that is available now, before workers take any of it."""
    given = {"kv_cache_bytes": cache_bytes, "kv_memory_bytes": memory_bytes, "kv_disk_bytes": disk_bytes}
    sizes: dict[str, Any] = {field: as_size(field, value) for field, value in given.items()}
    for field, least in (("kv_cache_bytes", 1), ("kv_memory_bytes", 0), ("kv_disk_bytes", 1)):
        if sizes[field] is not None or field == "kv_memory_bytes":
            _check_int(field, sizes[field], least)
    folder = None
    if disk_dir is not None:
        expected = "a folder's name, a Path, or None for no disk tier"
        folder = as_path("kv_disk_dir", disk_dir, expected, home=True)
    if disk_bytes is not None and disk_dir is None:
        got = show_size(sizes["kv_disk_bytes"])
        raise ConfigError("kv_disk_bytes", got, "a folder for them: it needs kv_disk_dir")
    return CacheLimits(
        available_memory_bytes(),
        sizes["kv_cache_bytes"],
        sizes["kv_memory_bytes"],
        folder,
        sizes["kv_disk_bytes"],
    )


def _trace_file(trace: str | Path | None, limit: int | str | None) -> tuple[Path | None, int]:
    """The trace's file, if there is to be one, and most bytes of it."""
    if trace is None and limit is not None:
        raise ConfigError("trace_bytes", limit, "nothing without a trace")
    num_bytes: Any = as_size("trace_bytes", DEFAULT_TRACE_BYTES if limit is None else limit)
    _check_int("trace_bytes", num_bytes, LEAST_TRACE_BYTES)
    if trace is None:
        return None, num_bytes
    path = as_path("trace", trace, "a file's name, a Path, or None for no trace", home=True)
    check_trace(path)
    return path, num_bytes


def _cluster_config(workers: Any, options: dict[str, Any]) -> ClusterConfig:
    known = {field.name for field in dataclasses.fields(ClusterConfig)} - {"workers", "addresses"}
    unknown = sorted(set(options) - known)
    if unknown:
        names = ["model", "workers", "max_model_len", "kv_cache_bytes", "kv_memory_bytes", "kv_disk_dir"]
        names += ["kv_disk_bytes", "max_num_seqs", "device", "host_threads", "draft", "draft_tokens", "lanes"]
        names += sorted(known)
        raise TypeError(
            f"LLM() got unexpected keyword arguments: {', '.join(unknown)}; known: {', '.join(names)}"
        )
    if isinstance(options.get("shares"), list):
        options = {**options, "shares": tuple(options["shares"])}
    if isinstance(workers, str):
        workers = [address.strip() for address in workers.split(",")]
    if isinstance(workers, Sequence):
        addresses = tuple(workers)
        if not addresses or not all(isinstance(address, str) and address for address in addresses):
            raise ConfigError("workers", list(addresses), "at least one address, name:port")
        parse_addresses(addresses, "workers")
        return ClusterConfig(workers=len(addresses), addresses=addresses, **options)
    if workers is None:
        finds = str(options.get("cluster")).startswith(("ray", "discover"))
        return ClusterConfig(workers=0 if finds else ClusterConfig.workers, **options)
    _check_int("workers", workers, 0, MAX_WORKERS)
    return ClusterConfig(workers=max(1, workers), **options)


def _default_sampling_params(folder: Path) -> SamplingParams:
    path = folder / "generation_config.json"
    try:
        return SamplingParams.from_generation_config(load_json(path) if path.is_file() else {})
    except ConfigError as error:  # not the user's value but the model's
        raise CheckpointError(f"{path}: {error}") from error
