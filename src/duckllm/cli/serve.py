"""``duckllm serve``: a model behind OpenAI's and other APIs.

Mounted by cli/main.py. Checks what it is given and binds the port; the rest is :mod:`duckllm.server.app`'s.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from duckllm.cli.common import (
    describe_layers,
    describe_shares,
    describe_workers,
    looks_for_nodes,
    refuse_unused,
    tell,
)
from duckllm.cli.model_options import ModelArgument, ModelOptions, takes_model_options
from duckllm.cluster.token import read_secret

if TYPE_CHECKING:
    from duckllm import LLM
    from duckllm.server.engine_thread import LoadingProgress

KEY_VARIABLE = "DUCKLLM_API_KEY"
EXAMPLES = """\b
Examples:
  duckllm serve
  duckllm serve /models/mine --workers 3 --port 8080
  duckllm serve /models/mine --workers 10.0.0.11:7411,10.0.0.12:7411 --token-file token
  duckllm serve /models/mine --host 0.0.0.0 --api-key-file key
  curl http://127.0.0.1:8000/v1/chat/completions -H "content-type: application/json" \\
    -d '{"messages": [{"role": "user", "content": "What is a duck?"}]}'
"""


@takes_model_options
def serve(
    *,
    model: ModelArgument = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; beyond loopback there must be an API key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="<key>",
            help="Key that requests must have; may be repeated. Who may list this machine's processes sees "
            "it: better in $DUCKLLM_API_KEY, or in a file.",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="File with such keys, one a line.", readable=False),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Serve anybody who can reach --host, without a key.")
    ] = False,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="<origin>",
            help="Origin of pages that browsers may let ask here, https://example.org, or * for any; may be "
            "repeated.",
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="<name>",
            help="What clients call the model; may be repeated for more names. By default the name of its "
            "folder, or as on the hub.",
            show_default=False,
        ),
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Most replies that are computed at a time.")] = 64,
    max_waiting: Annotated[
        int, typer.Option(help="Most replies that wait beside those; more are refused with 429.")
    ] = 128,
    shutdown_timeout_s: Annotated[
        float,
        typer.Option(
            help="How long SIGTERM or Ctrl-C lets replies come to their end; a second one does not."
        ),
    ] = 30.0,
    model_options: ModelOptions,
) -> None:
    """Serve a model to clients of OpenAI's API, and others, until stopped.

    /health tells whether the model is loaded. API keys may also be in $DUCKLLM_API_KEY, where no list of
    processes shows them.
    """
    from duckllm.server.app import ServerConfig
    from duckllm.server.app import serve as run

    keys = _keys(api_key or [], api_key_file)
    if keys:
        refuse_unused(serve, {"insecure": insecure}, "nothing with an API key, without which none is served")
    config = ServerConfig(
        host=host,
        port=port,
        api_keys=keys,
        is_insecure=insecure,
        cors_origins=tuple(cors_origin or ()),
        model_names=tuple(served_model_name or [_name(model)]),
        max_waiting=max_waiting,
        shutdown_timeout_s=shutdown_timeout_s,
    )
    model_options.refuse_unused()
    options = model_options.arguments()

    def load(progress: LoadingProgress) -> LLM:
        from duckllm.models.registry import usable_folder
        from duckllm.weights.console import on_progress

        on_progress.append(progress.report)
        progress.stage = "finding the model"
        folder = usable_folder(model, options.get("weight_format", "auto"))
        doing = "looking for nodes" if looks_for_nodes(model_options.cluster) else "starting workers"
        progress.stage = f"{doing} and reading weights"
        progress.share = None
        from duckllm import LLM

        return LLM(folder, max_model_len=model_options.max_model_len, max_num_seqs=max_num_seqs, **options)

    def on_listening(url: str) -> None:
        tell(f"loading {config.model_names[0]}; {url}/health says how far it is")

    def on_ready(url: str, llm: LLM) -> None:
        tell(str(llm.memory()))
        info = llm.cluster_info()
        for words in (describe_layers(info, model_options.weight_format), describe_shares(info.stripes)):
            if words:
                tell(words)
        print(f"Serving {config.model_names[0]} at {url}, {describe_workers(info)}", flush=True)

    run(config, load, on_listening, on_ready)


def _name(model: str | None) -> str:
    """What clients call a model by default."""
    if model is None:
        return "demo"
    name = Path(model).resolve().name if Path(model).exists() else model
    return "".join(each if "!" <= each <= "~" else "-" for each in name) or "model"


def _keys(given: list[str], file: Path | None) -> tuple[str, ...]:
    """The keys of the command line, the environment and a file.

    Raises:
        ConfigError: The file cannot be read or holds no key, or a key is none.
    """
    from duckllm.server.security import check_key

    keys = [check_key("api_key", key) for key in given]
    if key := os.environ.get(KEY_VARIABLE):
        keys.append(check_key(KEY_VARIABLE, key))
    if file is not None:
        lines = read_secret("api_key_file", file, "a key").splitlines()
        keys += [check_key("api_key_file", line.strip()) for line in lines if line.strip()]
    return tuple(keys)
