"""``duckllm chat``: one question and its answer, or a conversation.

Mounted by cli/main.py. Loads the model, then answers ``--prompt`` (or what is piped in) once, or hands over
to :class:`duckllm.cli.repl.Repl`. Knows no tensors; torch is imported only when the model is loaded.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from duckllm.cli.common import (
    EMPTY_REPLY,
    ChatConversation,
    ChatModel,
    Waiting,
    describe_ending,
    describe_facts,
    describe_links,
    describe_shares,
    parse_shares,
    parse_workers,
    tell,
)
from duckllm.cli.session import Session
from duckllm.cli.terminal import ReplyWriter, keys_unseen, wrapped
from duckllm.cluster import check_cluster
from duckllm.cluster.token import read_token
from duckllm.config import ClusterConfig, is_utf8, parse_size
from duckllm.errors import ConfigError, InWords
from duckllm.sampling_params import SamplingParams
from duckllm.weights.manifest import Manifest
from duckllm.weights.resolve import resolve_model

if TYPE_CHECKING:
    from duckllm import LLM
    from duckllm.conversation import Conversation
    from duckllm.outputs import StreamOutput

# Far above the longest context of any model, at four bytes a token.
MAX_STDIN_BYTES = 16 << 20
DEMO_TITLE = (
    "demo model: a small dictionary. Try: What is a swan?  Is 1001 prime?  What was my first question?"
)
EXAMPLES = """\b
Examples:
  duckllm chat --prompt "What is a duck?"
  duckllm chat /models/mine --workers 3 --temperature 0.7
  duckllm chat --workers 10.0.0.11:7411,10.0.0.12:7411 --token-file token
  duckllm chat /models/mine --cluster ray
  echo "Is 1001 prime?" | duckllm chat --json
  duckllm chat --session ducks --kv-disk-bytes 4GiB
"""


def chat(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Model folder, converted or a Hugging Face checkpoint, or a model on the hub, org/name; "
            "the demo model by default."
        ),
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="Ask this, print the answer and leave.")] = None,
    workers: Annotated[
        str | None,
        typer.Option(
            help="Number of workers to start (0 computes the experts in this process), or addresses of "
            "running ones, a:port,b:port; by default 2 here, or with Ray one on each node.",
            show_default=False,
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="Where workers come from: local (started here), static (the addresses of --workers) or ray "
            "(placed and started again by Ray: this machine's, or ray:ADDRESS); by default local, or static "
            "where there are addresses.",
            show_default=False,
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system message before the conversation.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 takes the likeliest token.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Choose from this many tokens; 0 from all.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Choose from tokens of this total probability.")] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Least probability of a token, as a share of the likeliest one's.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1 against repeating what was said, below 1 for it.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Makes sampled answers repeatable.")] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="<str>", help="End an answer where it has this text, which is not shown; may be repeated."
        ),
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of an answer.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Most tokens of a conversation.")] = None,
    session: Annotated[
        str | None,
        typer.Option(
            metavar="<name>",
            help="Keep the conversation under this name, with its KV cache, and go on where it was.",
            show_default=False,
        ),
    ] = None,
    kv_cache_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="<size>",
            help="Memory of the KV cache, such as 2GiB; by default decided by the memory there is.",
            show_default=False,
        ),
    ] = None,
    kv_memory_bytes: Annotated[
        str,
        typer.Option(metavar="<size>", help="Memory for what leaves the KV cache, from where it comes back."),
    ] = "0",
    kv_disk_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder for what was computed, which later runs go on from; a session has its own.",
            show_default=False,
        ),
    ] = None,
    kv_disk_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="<size>", help="Most bytes in that folder; by default 16GiB.", show_default=False
        ),
    ] = None,
    draft: Annotated[
        str,
        typer.Option(
            help="Guess tokens ahead with the checkpoint's layer for it: auto (where it is measured to pay), "
            "on, off, or stateless (without what was before, to compare). No answer depends on it."
        ),
    ] = "auto",
    draft_tokens: Annotated[int, typer.Option(help="Most tokens guessed at once.")] = 1,
    lanes: Annotated[
        str,
        typer.Option(
            help="Compute one half of a step here while the workers compute the other: auto (where it is "
            "measured to pay), on or off. No answer depends on it."
        ),
    ] = "auto",
    wire_dtype: Annotated[str, typer.Option(help="Activations sent to workers: f32 or bf16.")] = "f32",
    weight_format: Annotated[
        str,
        typer.Option("--format", help="Format that experts are computed in: fp9, fp8 or auto (the faster)."),
    ] = "auto",
    prefill: Annotated[
        str,
        typer.Option(
            help="What a prompt's experts are computed with here: f32, or bf16, which rounds activations; "
            "workers at addresses have an option of their own."
        ),
    ] = "f32",
    threads_per_worker: Annotated[
        int, typer.Option(help="Compute threads of each worker started here or by Ray; 0 divides the cores.")
    ] = 0,
    shares: Annotated[
        str,
        typer.Option(
            help="How the experts are shared out: auto (by what workers elsewhere say of their speed and "
            "memory), even, or a number for each worker, 1,2,4."
        ),
    ] = "auto",
    share_folder: Annotated[
        bool,
        typer.Option(
            "--share-folder/--no-share-folder",
            help="Whether workers may open this model's folder by its path, where they find it.",
        ),
    ] = True,
    spares: Annotated[
        int,
        typer.Option(
            help="Workers that wait to take a lost one's place: so many more are started here, or the last "
            "of the addresses."
        ),
    ] = 0,
    token_file: Annotated[
        Path | None,
        typer.Option(help="File with the secret that the workers at addresses share.", readable=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as one JSON object.")] = False,
) -> None:
    """Talk to a model whose routed experts run on worker processes.

    Without --prompt, and with nothing piped in, a conversation begins: Ctrl-C stops a reply, Ctrl-D leaves.
    """
    changes: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    changes |= {"repetition_penalty": repetition_penalty, "seed": seed, "max_tokens": max_tokens}
    changes["stop"] = stop or None
    overrides = {field: value for field, value in changes.items() if value is not None}
    question = _question(prompt, as_json)
    options: dict[str, Any] = {"wire_dtype": wire_dtype, "weight_format": weight_format, "prefill": prefill}
    options |= {"threads_per_worker": threads_per_worker, "share_folder": share_folder, "spares": spares}
    options |= {"shares": parse_shares(shares), "cluster": cluster}
    options = _cluster_options(workers, options, token_file)
    _check_sampling(overrides)
    _check_utf8("system", system or "")
    with ExitStack() as stack:
        kept = None if session is None else stack.enter_context(Session(session))
        if kept is not None and kept.is_kept:
            kept.check(Manifest.load(resolve_model(model)).model_hash, system or None)
        folder = kv_disk_dir if kept is None else kv_disk_dir or kept.pages_folder(draft)
        options |= _cache_options(kv_cache_bytes, kv_memory_bytes, folder, kv_disk_bytes)
        options |= {"draft": draft, "draft_tokens": draft_tokens, "lanes": lanes}
        stack.enter_context(keys_unseen())
        llm = stack.enter_context(_load(model, options, max_model_len))
        tell(str(llm.memory()))
        info = llm.cluster_info()
        for words in (describe_shares(info.stripes), describe_links(info)):
            if words:
                tell(words)
        params = dataclasses.replace(llm.default_sampling_params, **overrides)
        conversation = llm.conversation(system or None) if kept is None else kept.open(llm, system or None)

        def keep() -> None:
            if kept is not None:
                kept.save(conversation)

        if question is None:
            from duckllm.cli.repl import Repl

            title = _title(model, kept, conversation)
            name = "" if kept is None else kept.name
            repl = Repl(llm, params, conversation, title=title, session=name, after_turn=keep)
            raise typer.Exit(repl.run())
        try:
            answer(llm, conversation, question, params, sys.stdout, as_json=as_json)
        finally:
            keep()


def answer(
    model: ChatModel,
    conversation: ChatConversation,
    question: str,
    params: SamplingParams,
    out: TextIO,
    *,
    as_json: bool = False,
) -> None:
    """Prints the reply as it comes and the line of facts, or everything at the end as one JSON object.

    Raises:
        typer.Exit: Ctrl-C stopped the reply; its line of facts says so.
    """
    text = ""
    last: StreamOutput | None = None
    try:
        with ReplyWriter(out) as writer:
            for last in conversation.stream(question, params):
                text += last.text
                if not as_json:
                    writer.write(last.text)
            is_empty = writer.is_empty
    except KeyboardInterrupt:
        if last is None or as_json:
            raise
        out.write(f"{wrapped(describe_facts(model.cluster_info(), last.metrics, 'stopped'), out)}\n")
        raise typer.Exit(130) from None
    assert last is not None
    info, metrics = model.cluster_info(), last.metrics
    if not as_json:
        if is_empty:
            out.write(f"{EMPTY_REPLY}\n")
        out.write(f"{wrapped(describe_facts(info, metrics, describe_ending(last, params)), out)}\n")
        return
    facts = {
        "text": text,
        "finish_reason": last.finish_reason,
        "stop_reason": last.stop_reason,
        "num_workers": info.num_workers,
        "weight_format": info.weight_format,
        "isas": list(info.isas),
        **dataclasses.asdict(metrics),
        "num_cached_tokens": metrics.num_cached_tokens,
    }
    out.write(json.dumps(facts, ensure_ascii=False) + "\n")


def _title(model: str | None, session: Session | None, conversation: Conversation) -> str:
    """What a conversation says of its model and of itself first."""
    title = model if model is not None else DEMO_TITLE
    if session is None:
        return title
    num_messages = len(conversation.messages)
    return f"{title}\nsession {session.name}: {num_messages} messages, {len(conversation.token_ids)} tokens"


def _cache_options(
    cache_bytes: str | None, memory_bytes: str, disk_dir: Path | None, disk_bytes: str | None
) -> dict[str, Any]:
    """The arguments of LLM about the KV cache."""
    sizes = {"kv_cache_bytes": cache_bytes, "kv_memory_bytes": memory_bytes, "kv_disk_bytes": disk_bytes}
    parsed = {field: None if text is None else parse_size(field, text) for field, text in sizes.items()}
    return {**parsed, "kv_disk_dir": disk_dir}


def _question(prompt: str | None, as_json: bool) -> str | None:
    """The one question to answer, or None for a conversation."""
    if prompt is None and sys.stdin is not None and sys.stdin.isatty():
        if as_json:
            raise ConfigError("json", True, "a question with it: --prompt TEXT, or text piped in")
        return None
    if prompt is not None:
        text = prompt
    else:
        try:
            text = _read_stdin().decode()
        except UnicodeDecodeError as error:
            raise ConfigError(
                "stdin", InWords(f"byte {error.object[error.start]:#04x}"), "UTF-8 text"
            ) from error
    text = text.strip()
    if not text:
        raise ConfigError("prompt", InWords("an empty text"), "a question")
    _check_utf8("prompt", text)
    return text


def _check_utf8(field: str, text: str) -> None:
    """Bytes of an argument that are not UTF-8 arrive as what no text holds."""
    if not is_utf8(text):
        raise ConfigError(field, InWords("bytes that are not UTF-8"), "valid text")


def _read_stdin() -> bytes:
    """What is piped in, up to a limit: an endless pipe must not fill the memory."""
    data = sys.stdin.buffer.read(MAX_STDIN_BYTES + 1) if sys.stdin is not None else b""
    if len(data) > MAX_STDIN_BYTES:
        raise ConfigError(
            "stdin", InWords(f"more than {MAX_STDIN_BYTES} bytes"), "a question of at most that"
        )
    return data


def _cluster_options(workers: str | None, options: dict[str, Any], token_file: Path | None) -> dict[str, Any]:
    """The arguments of LLM about workers, known to be valid before anything is loaded."""
    options = {**options, "cluster_token": read_token(token_file)}
    parsed = None if workers is None else parse_workers(workers)
    config = ClusterConfig(addresses=parsed if isinstance(parsed, tuple) else (), **options)
    check_cluster(config)
    if token_file is not None and config.kind != "static":
        raise ConfigError("token_file", str(token_file), "none, as only workers at addresses need one")
    return {"workers": parsed, **options}


def _check_sampling(overrides: dict[str, Any]) -> None:
    SamplingParams(**overrides)


def _load(model: str | None, options: dict[str, Any], max_model_len: int | None) -> LLM:
    folder = resolve_model(model)
    with Waiting(f"Loading {model or 'the demo model'}"):
        from duckllm import LLM

        return LLM(folder, max_model_len=max_model_len, **options)
