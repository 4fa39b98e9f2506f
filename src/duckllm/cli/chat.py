"""``duckllm chat``: one question and its answer, or a conversation.

Mounted by cli/main.py. Loads the model, then answers ``--prompt`` (or what is piped in) once, or hands over
to :class:`duckllm.cli.repl.Repl`. Knows no tensors; torch is imported only when the model is loaded.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from duckllm.cli.common import (
    EMPTY_REPLY,
    ChatConversation,
    ChatModel,
    Waiting,
    describe_ending,
    describe_facts,
    describe_layers,
    describe_links,
    describe_shares,
    looks_for_nodes,
    tell,
)
from duckllm.cli.model_options import ModelArgument, ModelOptions, takes_model_options
from duckllm.cli.session import Session
from duckllm.cli.terminal import ReplyWriter, keys_unseen, wrapped
from duckllm.config import is_utf8
from duckllm.errors import ConfigError, InWords
from duckllm.models.registry import usable_folder
from duckllm.moe.fit import words_on_repeats
from duckllm.sampling_params import SamplingParams
from duckllm.weights.manifest import Manifest
from duckllm.weights.resolve import is_demo_name

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


@takes_model_options
def chat(
    *,
    model: ModelArgument = None,
    prompt: Annotated[str | None, typer.Option(help="Ask this, print the answer and leave.")] = None,
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
    session: Annotated[
        str | None,
        typer.Option(
            metavar="<name>",
            help="Keep the conversation under this name, with its KV cache, and go on where it was.",
            show_default=False,
        ),
    ] = None,
    model_options: ModelOptions,
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
    model_options.refuse_unused()
    model_options.arguments()  # refused, if they are, before anything of the session is
    _check_sampling(overrides)
    _check_utf8("system", system or "")
    with ExitStack() as stack:
        kept = None if session is None else stack.enter_context(Session(session))
        if kept is not None and kept.is_kept:
            place = usable_folder(model, model_options.weight_format)
            kept.check(Manifest.load(place).model_hash, system or None)
        folder = model_options.kv_disk_dir
        if kept is not None:
            folder = folder or kept.pages_folder(model_options.draft)
        options = model_options.arguments(folder)
        stack.enter_context(keys_unseen())
        llm = stack.enter_context(_load(model, options, model_options.max_model_len))
        tell(str(llm.memory()))
        info = llm.cluster_info()
        repeats = words_on_repeats(info.isas)
        layers = describe_layers(info, model_options.weight_format)
        for words in (repeats, layers, describe_shares(info.stripes), describe_links(info)):
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
    title = DEMO_TITLE if model is None or is_demo_name(model) else model
    if session is None:
        return title
    num_messages = len(conversation.messages)
    return f"{title}\nsession {session.name}: {num_messages} messages, {len(conversation.token_ids)} tokens"


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


def _check_sampling(overrides: dict[str, Any]) -> None:
    SamplingParams(**overrides)


def _load(model: str | None, options: dict[str, Any], max_model_len: int | None) -> LLM:
    folder = usable_folder(model, options.get("weight_format", "auto"))
    doing = "Looking for nodes, then loading" if looks_for_nodes(options.get("cluster")) else "Loading"
    with Waiting(f"{doing} {model or 'the demo model'}"):
        from duckllm import LLM

        return LLM(folder, max_model_len=max_model_len, **options)
