"""Options of every verb that loads a model: workers, device, KV cache, guesses, lanes. Declared once.

Used by the verbs that chat and serve; :func:`takes_model_options` puts them into a verb's command line.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from duckllm.cli.common import looks_for_nodes, parse_shares, parse_workers, refuse_unused
from duckllm.cluster import check_cluster
from duckllm.cluster.token import read_token
from duckllm.config import ClusterConfig, parse_size, show_size
from duckllm.device import check_device
from duckllm.errors import ConfigError
from duckllm.tracing.writer import LEAST_TRACE_BYTES, check_trace

ModelArgument = Annotated[
    str | None,
    typer.Argument(
        help="Model folder, converted or a Hugging Face checkpoint, or a model on the hub, org/name; "
        "demo, the demo model, by default."
    ),
]


# Of verbs that read no weights.
InspectedModel = Annotated[
    str | None,
    typer.Argument(
        help="Converted model, checkpoint folder, a folder with config.json alone, or a model on the "
        "Hugging Face hub: org/name. By default demo, the demo model.",
        show_default=False,
    ),
]


MinWorkers = Annotated[
    int,
    typer.Option(help="With --cluster discover: fewest nodes that there are to be before a plan is made."),
]
DiscoverWait = Annotated[
    float,
    typer.Option(
        help="With --cluster discover: how long nodes are waited for; with enough of them, only until no "
        "more come for 2 s."
    ),
]


@dataclass(frozen=True)
class ModelOptions:
    """What the command line says of a model's workers, device, memory and steps."""

    workers: Annotated[
        str | None,
        typer.Option(
            help="Number of workers to start (0 computes the experts in this process), or addresses of "
            "running ones, a:port,b:port; by default 2 here, with Ray one on each node, and every node that "
            "is discovered.",
            show_default=False,
        ),
    ] = None
    cluster: Annotated[
        str | None,
        typer.Option(
            help="Where workers come from: local (started here), static (the addresses of --workers), ray "
            "(placed and started again by Ray: this machine's, or ray:ADDRESS) or discover (nodes that run "
            "duckllm worker --announce; discover:ADDRESS on one network of this host); by default local, or "
            "static where there are addresses.",
            show_default=False,
        ),
    ] = None
    device: Annotated[
        str,
        typer.Option(
            help="What computes everything but the experts: cpu, cuda (cuda:1 for another card), or auto: a "
            "GPU, where there is one that holds it."
        ),
    ] = "auto"
    max_model_len: Annotated[
        int | None,
        typer.Option(
            help="Most tokens of a conversation, prompt and reply together; by default the model's most, or "
            "what memory holds.",
            show_default=False,
        ),
    ] = None
    kv_cache_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="<size>",
            help="Memory of the KV cache, such as 2GiB; by default decided by the memory there is.",
            show_default=False,
        ),
    ] = None
    kv_memory_bytes: Annotated[
        str,
        typer.Option(metavar="<size>", help="Memory for what leaves the KV cache, from where it comes back."),
    ] = "0"
    kv_disk_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder where what was computed is kept, so that later runs need not compute it again. A "
            "chat with --session has its own.",
            show_default=False,
        ),
    ] = None
    kv_disk_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="<size>", help="Most bytes in that folder; by default 16GiB.", show_default=False
        ),
    ] = None
    draft: Annotated[
        str,
        typer.Option(
            help="Guess tokens ahead with the checkpoint's layer for it: auto (where it is measured to pay), "
            "on, off, or stateless (without what was before, to compare). No answer depends on it."
        ),
    ] = "auto"
    draft_tokens: Annotated[int, typer.Option(help="Most tokens guessed at once.")] = 1
    lanes: Annotated[
        str,
        typer.Option(
            help="Compute one half of a step here while the workers compute the other: auto (where it is "
            "measured to pay), on or off. No answer depends on it."
        ),
    ] = "auto"
    wire_dtype: Annotated[str, typer.Option(help="Activations sent to workers: f32 or bf16.")] = "f32"
    weight_format: Annotated[
        str,
        typer.Option(
            "--format",
            help="Format that experts are computed in: fp9, fp8, or auto (the faster of these two where the "
            "model is stored in one; layers that were rounded stay so); int8 or int4 is what a checkpoint is "
            "converted into where asked for.",
        ),
    ] = "auto"
    prefill: Annotated[
        str,
        typer.Option(
            help="What a prompt's experts are computed with here: f32, or bf16, which rounds activations; "
            "workers at addresses have an option of their own."
        ),
    ] = "f32"
    threads_per_worker: Annotated[
        int, typer.Option(help="Compute threads of each worker started here or by Ray; 0 divides the cores.")
    ] = 0
    shares: Annotated[
        str,
        typer.Option(
            help="How the experts are shared out: auto (by what workers elsewhere say of their speed and "
            "memory), even, or a number for each worker, 1,2,4."
        ),
    ] = "auto"
    share_folder: Annotated[
        bool,
        typer.Option(
            "--share-folder/--no-share-folder",
            help="Whether workers may open this model's folder by its path, where they find it.",
        ),
    ] = True
    spares: Annotated[
        int,
        typer.Option(
            help="Workers that wait to take a lost one's place: so many more are started here, or the last "
            "of the addresses or of the nodes that are discovered."
        ),
    ] = 0
    min_workers: MinWorkers = 1
    discover_wait_s: DiscoverWait = 30.0
    prepare_timeout_s: Annotated[
        float,
        typer.Option(
            help="How long a worker may take to map and verify its weights; what it is sent meanwhile is "
            "waited for as long as bytes move."
        ),
    ] = 600.0
    worker_timeout_s: Annotated[
        float,
        typer.Option(help="How long a reply waits for a lost worker, or another in its place."),
    ] = 30.0
    multicast: Annotated[
        str,
        typer.Option(
            metavar="<group>",
            help="Send requests once for all workers at addresses, by UDP to this group: 239.77.0.1:7400; "
            "off sends to each.",
        ),
    ] = "off"
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="<file>",
            help="Write what happens when, by layer and worker, into this file, for duckllm trace or "
            "https://ui.perfetto.dev.",
            show_default=False,
        ),
    ] = None
    trace_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="<size>",
            help="Most bytes of a trace, by default 256MiB; of more, the newest are kept.",
            show_default=False,
        ),
    ] = None
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the secret that workers elsewhere share (else $DUCKLLM_CLUSTER_TOKEN).",
            readable=False,
        ),
    ] = None

    def arguments(self, kv_disk_dir: Path | None = None) -> dict[str, Any]:
        """The arguments of :class:`duckllm.LLM`, known to be valid before anything is loaded.

        Args:
            kv_disk_dir: The folder to take in place of the option's.

        Raises:
            ConfigError: A value is of the wrong kind or out of range.
            MissingPackageError: Ray, or zeroconf, is needed and not installed.
        """
        check_device(self.device)
        sizes = {name: getattr(self, name) for name in ("kv_cache_bytes", "kv_memory_bytes", "kv_disk_bytes")}
        parsed = {name: None if text is None else parse_size(name, text) for name, text in sizes.items()}
        return {
            **self._cluster_arguments(),
            **parsed,
            "device": self.device,
            "kv_disk_dir": kv_disk_dir or self.kv_disk_dir,
            "draft": self.draft,
            "draft_tokens": self.draft_tokens,
            "lanes": self.lanes,
            **self._trace_arguments(),
        }

    def _trace_arguments(self) -> dict[str, Any]:
        if self.trace is None:
            if self.trace_bytes is not None:
                raise ConfigError("trace_bytes", self.trace_bytes, "nothing without --trace")
            return {"trace": None}
        check_trace(self.trace)
        if self.trace_bytes is None:
            return {"trace": self.trace}
        limit_bytes = parse_size("trace_bytes", self.trace_bytes)
        if limit_bytes < LEAST_TRACE_BYTES:
            raise ConfigError("trace_bytes", self.trace_bytes, f"at least {show_size(LEAST_TRACE_BYTES)}")
        return {"trace": self.trace, "trace_bytes": limit_bytes}

    def refuse_unused(self) -> None:
        """Refuses options of workers where there are none.

        Raises:
            ConfigError: One was given.
        """
        if self.workers is None or parse_workers(self.workers) != 0 or self.cluster not in (None, "local"):
            return
        names = ("wire_dtype", "lanes", "shares", "share_folder", "prepare_timeout_s", "worker_timeout_s")
        given = {name: getattr(self, name) for name in names}
        refuse_unused(ModelOptions, given, "nothing with --workers 0, which starts none")

    def _cluster_arguments(self) -> dict[str, Any]:
        names = (
            *("wire_dtype", "weight_format", "prefill", "threads_per_worker", "share_folder", "spares"),
            *(
                "prepare_timeout_s",
                "worker_timeout_s",
                "cluster",
                "multicast",
                "min_workers",
                "discover_wait_s",
            ),
        )
        options: dict[str, Any] = {name: getattr(self, name) for name in names}
        options |= {"shares": parse_shares(self.shares), "cluster_token": read_token(self.token_file)}
        workers = None if self.workers is None else parse_workers(self.workers)
        finds = looks_for_nodes(self.cluster)
        count = workers if finds and isinstance(workers, int) else 0 if finds else ClusterConfig.workers
        config = ClusterConfig(
            workers=count, addresses=workers if isinstance(workers, tuple) else (), **options
        )
        check_cluster(config)
        if self.token_file is not None and config.kind not in ("static", "discover"):
            expected = "none, as only workers elsewhere need one"
            raise ConfigError("token_file", str(self.token_file), expected)
        return {"workers": workers, **options}


def takes_model_options(verb: Callable[..., None]) -> Callable[..., None]:
    """The verb with an option for each field of :class:`ModelOptions`, in place of its ``model_options``."""
    hints = get_type_hints(ModelOptions, include_extras=True)
    own = inspect.signature(verb, eval_str=True)
    parameters: list[inspect.Parameter] = []
    for parameter in own.parameters.values():
        if parameter.name != "model_options":
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        parameters += [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=hints[field.name],
            )
            for field in fields(ModelOptions)
        ]
    names = {field.name for field in fields(ModelOptions)}

    def run(**values: Any) -> None:
        given = {name: values.pop(name) for name in names}
        verb(**values, model_options=ModelOptions(**given))

    run.__name__, run.__doc__, run.__module__ = verb.__name__, verb.__doc__, verb.__module__
    run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
