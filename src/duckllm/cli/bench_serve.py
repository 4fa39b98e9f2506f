"""``duckllm bench serve``: a running server of OpenAI's API under load.

Mounted by cli/bench.py. Parses options into requests and loads; duckllm/bench sends, measures and reports.
Needs no model and no torch: the client may be another machine than the server.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from duckllm.cli.bench_common import (
    CellProgress,
    append_line,
    check_save,
    parse_numbers,
    parse_words,
    print_line,
    writing_whole,
)
from duckllm.cli.common import refuse_unused
from duckllm.cli.terminal import table_console
from duckllm.cluster.address import parse_address
from duckllm.config import parse_decimal
from duckllm.errors import ConfigError, InWords, MissingPackageError

if TYPE_CHECKING:
    from duckllm.bench.load import Load, Wanted
    from duckllm.bench.serving import ServingRun

KEY_VARIABLES = ("DUCKLLM_API_KEY", "OPENAI_API_KEY")
SERVE_EXAMPLES = """\b
Examples:
  duckllm bench serve --max-concurrency 1,4,16 --num-prompts 64
  duckllm bench serve --request-rate 2,4,8 --random-input-len 512 --random-output-len 128 --html load.html
  duckllm bench serve --base-url http://10.0.0.5:8000 --backend openai-chat --dataset-path trace.jsonl
  A line of a trace: {"arrival_s": 0.5, "input_len": 900, "output_len": 120}
"""


def serve(
    base_url: Annotated[
        str, typer.Option(help="The server, without /v1; no report or message has a password that is in it.")
    ] = "http://127.0.0.1:8000",
    backend: Annotated[
        str, typer.Option(help="What is asked: openai (/v1/completions) or openai-chat.")
    ] = "openai",
    model: Annotated[
        str, typer.Option(help="What the server calls the model; empty takes the first that it has.")
    ] = "",
    num_prompts: Annotated[
        int | None,
        typer.Option(help="Requests of each load; by default 100, or all of a trace.", show_default=False),
    ] = None,
    request_rate: Annotated[
        str,
        typer.Option(
            help="Requests that arrive a second, whatever becomes of those before, like 2,4,8, each in turn; "
            "inf sends all at once. Empty takes a trace's arrivals, or inf."
        ),
    ] = "",
    burstiness: Annotated[
        float, typer.Option(help="1 for Poisson arrivals, less for bursts, more for an even flow.")
    ] = 1.0,
    max_concurrency: Annotated[
        str,
        typer.Option(
            help="Most requests under way, like 1,4,16, each in turn; alone, another is sent when one ends."
        ),
    ] = "",
    random_input_len: Annotated[int, typer.Option(help="Tokens of a prompt of random words.")] = 128,
    random_output_len: Annotated[int, typer.Option(help="Tokens of a reply.")] = 128,
    random_range_ratio: Annotated[
        float, typer.Option(help="Lengths between (1 - this) and (1 + this) times those, 0 up to 1.")
    ] = 0.0,
    dataset_path: Annotated[
        Path | None,
        typer.Option(
            help="Take lengths, and arrivals, from this trace: a JSON object a line.",
            show_default=False,
            readable=False,
        ),
    ] = None,
    num_warmups: Annotated[int, typer.Option(help="Requests before each load that are not measured.")] = 1,
    seed: Annotated[int, typer.Option(help="Of random lengths and arrivals; prompts are always new.")] = 0,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos/--no-ignore-eos",
            help="Ask for replies that go on to their full length; not all servers know that.",
        ),
    ] = True,
    extra_body: Annotated[
        str, typer.Option(help='More fields of every request, as JSON: {"temperature": 0.7}.')
    ] = "",
    timeout_s: Annotated[float, typer.Option(help="The longest that a request may take.")] = 600.0,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the server's key (else $DUCKLLM_API_KEY or $OPENAI_API_KEY).", readable=False
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(help="Write a report with pictures into this HTML file.", show_default=False),
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Append the JSON object to this file.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Load a running server, ours or another of OpenAI's API, and measure what its clients see.

    With --request-rate the loop is open: times count from the moment at which a request was due. With
    --max-concurrency alone it is closed. Errors are counted. Needs httpx, the extra [bench].
    """
    try:
        import httpx  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingPackageError("httpx", "bench serve", "bench") from error
    from duckllm.bench.html_report import check_html
    from duckllm.bench.serving_report import print_serving, serving_html
    from duckllm.bench.stream_client import BACKENDS

    if backend not in BACKENDS:
        raise ConfigError("backend", backend, "one of " + ", ".join(BACKENDS))
    check_base_url(base_url)
    if not _is_sendable(model):
        raise ConfigError("model", model, "a name in UTF-8")
    if not 0 < timeout_s < math.inf:
        raise ConfigError("timeout_s", timeout_s, "seconds, more than 0")
    if not 0 <= num_warmups <= 1000:
        raise ConfigError("num_warmups", num_warmups, "a number from 0 to 1000")
    loads = parse_loads(request_rate, burstiness, max_concurrency, has_trace=dataset_path is not None)
    if dataset_path is not None:
        lens: dict[str, float] = {"random_range_ratio": random_range_ratio}
        lens |= {"random_input_len": random_input_len, "random_output_len": random_output_len}
        refuse_unused(serve, lens, "nothing with --dataset-path, whose lengths are taken")
    if not any(load.request_rate not in (None, math.inf) for load in loads):
        refuse_unused(serve, {"burstiness": burstiness}, "nothing without a --request-rate below inf")
        if dataset_path is not None:
            what = "nothing with a trace's requests, unless a --request-rate draws their arrivals"
            refuse_unused(serve, {"seed": seed}, what)
        elif not random_range_ratio:
            what = "nothing without --random-range-ratio or a --request-rate below inf"
            refuse_unused(serve, {"seed": seed}, what)
    lengths = (random_input_len, random_output_len, random_range_ratio)
    wanted, loads = _wanted(dataset_path, num_prompts, lengths, seed, loads)
    if html is not None:
        check_html(html)
        check_save(html, "html")
    if save is not None:
        check_save(save)
    options = {
        "api_key": _key(api_key_file),
        "ignore_eos": ignore_eos,
        "extra_body": _extra(extra_body),
        "timeout_s": timeout_s,
    }
    run = asyncio.run(_run(base_url, backend, model, options, loads, wanted, seed, num_warmups))
    if as_json:
        print_line(run.to_json(), save)
    else:
        print_serving(run, table_console())
        append_line(json.dumps(run.to_json()), save)
    if html is not None:
        with writing_whole("html", html) as part:
            part.write_text(serving_html(run), encoding="utf-8", errors="replace")
    if not any(result.answered for result in run.results):
        raise typer.Exit(1)


async def _run(
    base_url: str,
    backend: str,
    model: str,
    options: dict[str, Any],
    loads: list[Load],
    wanted: list[Wanted],
    seed: int,
    num_warmups: int,
) -> ServingRun:
    from duckllm.bench.serving import measure_serving
    from duckllm.bench.stream_client import StreamClient

    async with StreamClient(base_url, backend, model, **options) as client:
        with CellProgress() as progress:
            return await measure_serving(
                client,
                base_url,
                backend,
                loads,
                wanted,
                seed=seed,
                num_warmups=num_warmups,
                progress=progress,
            )


def check_base_url(text: str) -> None:
    """Finds out before anything is sent whether a text is the address of a server.

    Raises:
        ConfigError: It is not, or its name, its port or its query cannot be one's.
    """
    import httpx

    expected = "the address of a server, like http://127.0.0.1:8000"
    scheme, _, rest = text.partition("://")
    if scheme.lower() not in ("http", "https"):
        raise ConfigError("base_url", text, expected)
    if "?" in rest or "#" in rest:
        hint = "the paths of the API come behind it; a key is given with --api-key-file"
        raise ConfigError("base_url", text, f"{expected}, without a query", hint)
    end = rest.partition("/")[0].rpartition("@")[2]
    has_port = ":" in end.rpartition("]")[2]
    try:
        address = parse_address(end if has_port else f"{end}:80", "base_url")
        httpx.URL(text)
        if ":" not in address.name:
            address.name.encode("idna")  # as the system's look-up does
    except ConfigError:
        raise ConfigError("base_url", text, f"{expected}, with a port from 1 to 65535") from None
    except (httpx.InvalidURL, ValueError) as error:
        hint = str(error) if isinstance(error, httpx.InvalidURL) else ""
        raise ConfigError("base_url", text, expected, hint) from None


def parse_loads(request_rate: str, burstiness: float, max_concurrency: str, *, has_trace: bool) -> list[Load]:
    """Every combination of the rates and the numbers at a time.

    Raises:
        ConfigError: A value is none.
    """
    from duckllm.bench.load import Load

    if not 0 < burstiness < math.inf:
        raise ConfigError("burstiness", burstiness, "a number above 0")
    rates: list[float | None] = []
    for word in parse_words(request_rate):
        rate = math.inf if word == "inf" else parse_decimal(word)
        if not rate:
            raise ConfigError("request_rate", word, "requests a second, or inf; several with commas between")
        rates.append(rate)
    if not rates:
        rates = [None if has_trace else math.inf]
    numbers: list[int | None] = list(parse_numbers("max_concurrency", max_concurrency))
    if 0 in numbers:
        raise ConfigError("max_concurrency", max_concurrency, "numbers of at least 1")
    return [Load(rate, burstiness, number) for rate in rates for number in numbers or [None]]


def _wanted(
    trace: Path | None,
    num_prompts: int | None,
    lengths: tuple[int, int, float],
    seed: int,
    loads: list[Load],
) -> tuple[list[Wanted], list[Load]]:
    """The requests; and the loads, which take a trace's arrivals only where it has some."""
    from duckllm.bench.load import Load, check_seed, random_lengths, read_trace

    check_seed(seed)
    if trace is None:
        return random_lengths(100 if num_prompts is None else num_prompts, *lengths, seed), loads
    if num_prompts is not None and num_prompts < 1:
        raise ConfigError("num_prompts", num_prompts, "a number of at least 1")
    wanted = read_trace(trace, num_prompts)
    if wanted[0].arrival_s is None:
        loads = [
            Load(math.inf, load.burstiness, load.max_concurrency) if load.request_rate is None else load
            for load in loads
        ]
    return wanted, loads


def _is_sendable(values: object) -> bool:
    """Whether a request can hold it: JSON has no infinity, and UTF-8 no half of a pair of surrogates."""
    try:
        json.dumps(values, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return False
    return True


def _extra(text: str) -> dict[str, Any]:
    if not text:
        return {}
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict) or not _is_sendable(values):
        raise ConfigError("extra_body", text, 'a JSON object, like {"temperature": 0.7}')
    return values


def _key(file: Path | None) -> str:
    """The server's key; empty where there is none."""
    if file is None:
        return next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), "")
    from duckllm.cluster.token import read_secret

    key = read_secret("api_key_file", file, "a key").strip()
    if not key.isascii() or not key.isprintable():
        raise ConfigError("api_key_file", InWords("a key of other characters"), "printable ASCII characters")
    return key
