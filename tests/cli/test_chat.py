from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_model import FakeInfo, FakeModel
from rich.console import Console

from duckllm.cli import chat as verb
from duckllm.cli.common import Waiting, describe_facts, describe_links, describe_workers, parse_workers
from duckllm.cli.main import app, main
from duckllm.config import parse_size
from duckllm.errors import ConfigError, InWords
from duckllm.outputs import CachedTokens, RequestMetrics
from duckllm.sampling_params import SamplingParams
from duckllm.weights.console import ConsoleProgress, on_bar
from duckllm.weights.manifest import Manifest

MEMORY = (
    "duckllm: 1.00 GiB of weights, 0.50 GiB of KV cache, which holds 10 tokens\n"
    "duckllm: Nodes compute with avx2 and scalar, which round differently: an answer repeats bit for bit "
    "only with the same nodes in the same order and the same stripes on each.\n"
)
CACHE = {"kv_cache_bytes": None, "kv_memory_bytes": 0, "kv_disk_dir": None, "kv_disk_bytes": None}
TRACE = {"trace": None}


class Outcome:
    """What ``duckllm`` with some arguments printed, its exit code, and how it loaded the model."""

    def __init__(self) -> None:
        self.model = FakeModel()
        self.loaded: list[tuple[Any, ...]] = []
        self.code = self.out = self.err = None

    def load(self, *arguments: Any) -> FakeModel:
        self.loaded.append(arguments)
        return self.model


@pytest.fixture
def duckllm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: str, stdin: bytes | None = None) -> Outcome:
        outcome = Outcome()
        monkeypatch.setattr(verb, "_load", outcome.load)
        monkeypatch.setattr(sys, "argv", ["duckllm", *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin or b"")))
        with pytest.raises(SystemExit) as request:
            main()
        outcome.code = request.value.code or 0
        outcome.out, outcome.err = capsys.readouterr()
        return outcome

    return run


def test_a_prompt_is_answered_and_the_facts_follow(duckllm: Any) -> None:
    done = duckllm("chat", "--prompt", "What is a duck?", "--system", "be brief")
    assert done.code == 0
    assert done.out == (
        "heard 'What is a duck?'\n"
        "[2 workers, fp9, avx2+scalar, 2 tokens, 12.5 tok/s, first token after 0.25 s]\n"
    )
    assert done.err == MEMORY
    assert done.model.conversations == [
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "What is a duck?"}]
    ]


def test_json_is_one_object_with_the_same_facts(duckllm: Any) -> None:
    done = duckllm("chat", "--prompt", "é", "--json")
    assert json.loads(done.out) == {
        "text": "heard 'é'",
        "finish_reason": "stop",
        "stop_reason": None,
        "num_workers": 2,
        "weight_format": "fp9",
        "isas": ["avx2", "scalar"],
        "num_prompt_tokens": 7,
        "num_generated_tokens": 2,
        "time_to_first_token_s": 0.25,
        "decode_tokens_per_s": 12.5,
        "num_draft_tokens": 0,
        "num_accepted_tokens": 0,
        "prefill_tokens_per_s": None,
        "inter_token_p50_s": None,
        "inter_token_p99_s": None,
        "cached_tokens": {"device": 0, "memory": 0, "disk": 0},
        "num_cached_tokens": 0,
    }
    assert done.out.count("\n") == 1


def test_what_is_piped_in_is_one_message(duckllm: Any) -> None:
    done = duckllm("chat", stdin="one\ntwo é\n\nthree\n".encode())
    assert done.model.conversations == [[{"role": "user", "content": "one\ntwo é\n\nthree"}]]


def test_options_reach_the_model(duckllm: Any, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    token.chmod(0o600)
    arguments = "/m --prompt x --workers a:1,b:2,c:3 --wire-dtype bf16 --max-model-len 99"
    arguments += " --device cuda:1 --format fp8 --draft stateless --draft-tokens 3 --lanes off"
    arguments += " --spares 1 --no-share-folder --shares 1,3 --cluster static --multicast 239.77.0.1:7400"
    arguments += (
        f" --prepare-timeout-s 900 --worker-timeout-s 120.5 --trace {tmp_path}/t.json --trace-bytes 5MiB"
    )
    sampling = "--temperature 0.5 --top-k 4 --top-p 0.75 --min-p 0.25 --seed 6 --max-tokens 8"
    sampling += " --repetition-penalty 1.25 --stop one --stop two,three"
    done = duckllm("chat", *arguments.split(), *sampling.split(), "--token-file", str(token))
    options = {
        "wire_dtype": "bf16",
        "weight_format": "fp8",
        "prefill": "f32",
        "threads_per_worker": 0,
        "share_folder": False,
        "shares": (1.0, 3.0),
        "spares": 1,
        "prepare_timeout_s": 900.0,
        "worker_timeout_s": 120.5,
        "cluster": "static",
        "multicast": "239.77.0.1:7400",
        "min_workers": 1,
        "discover_wait_s": 30.0,
        "cluster_token": "secret",
        **CACHE,
        "device": "cuda:1",
        "draft": "stateless",
        "draft_tokens": 3,
        "lanes": "off",
        "trace": tmp_path / "t.json",
        "trace_bytes": 5 << 20,
    }
    assert done.loaded == [("/m", {"workers": ("a:1", "b:2", "c:3"), **options}, 99)]
    assert done.model.params == [
        SamplingParams(
            temperature=0.5,
            top_k=4,
            top_p=0.75,
            min_p=0.25,
            repetition_penalty=1.25,
            seed=6,
            stop=["one", "two,three"],
            max_tokens=8,
        )
    ]


def test_options_of_workers_here_reach_the_model(duckllm: Any) -> None:
    done = duckllm(
        *["chat", "--prompt", "x", "--workers", "3", "--threads-per-worker", "3", "--prefill", "bf16"]
    )
    [(_, options, _)] = done.loaded
    expected = {"workers": 3, "threads_per_worker": 3, "prefill": "bf16"}
    assert {name: options[name] for name in expected} == expected


@pytest.mark.parametrize(("option", "value"), [("threads-per-worker", "3"), ("prefill", "bf16")])
def test_options_of_workers_here_are_refused_with_workers_elsewhere(
    duckllm: Any, option: str, value: str
) -> None:
    done = duckllm("chat", "--prompt", "x", "--workers", "a:1", f"--{option}", value)
    assert (done.code, done.loaded) == (2, [])
    field, got = option.replace("-", "_"), int(value) if value.isdigit() else value
    assert done.err == (
        f"duckllm: {field}: got {got!r}, expected nothing with workers elsewhere, whose own options say so\n"
    )


def test_uneven_shares_are_told(duckllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeModel, "cluster_info", lambda self: FakeInfo(stripes=(1, 2, 5)))
    assert duckllm("chat", "--prompt", "x").err == f"{MEMORY}duckllm: stripes of each worker: 1, 2, 5 of 8\n"


@pytest.mark.parametrize(
    ("asked", "more"),
    [
        ("auto", ""),
        ("int4", ""),
        ("fp8", ": --format fp8 is for layers stored in fp9 or fp8, others stay as they were rounded"),
    ],
)
def test_layers_in_several_formats_are_told(
    duckllm: Any, monkeypatch: pytest.MonkeyPatch, asked: str, more: str
) -> None:
    info = FakeInfo(weight_format="fp8+int4", layer_formats="fp8, int4 in layers 2-4")
    monkeypatch.setattr(FakeModel, "cluster_info", lambda self: info)
    done = duckllm("chat", "--prompt", "x", "--format", asked)
    said = f"duckllm: experts are computed in fp8, int4 in layers 2-4{more}\n"
    assert " ".join(done.err.split()) == " ".join(f"{MEMORY}{said}".split())


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"links": ("shared memory", "TCP, cubic", "TCP, cubic")}, "2 workers by TCP, cubic"),
        ({"links": ("TCP, reno", "TCP, cubic")}, "1 worker by TCP, reno; 1 worker by TCP, cubic"),
        ({"own_memory_bytes": (4 << 20, 2 << 20), "huge_page_bytes": (4 << 20, 0)}, ""),
        (
            {"own_memory_bytes": (4 << 20, 2 << 20), "huge_page_bytes": (1 << 20, 1 << 20)},
            "4.00 MiB of weights in small pages, as the system gave no huge ones "
            "(duckllm doctor there says why)",
        ),
    ],
)
def test_how_workers_are_spoken_with_is_told(facts: dict[str, Any], words: str) -> None:
    assert describe_links(FakeInfo(**facts)) == words


def test_the_way_to_workers_is_told_at_the_start(duckllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    info = FakeInfo(links=("TCP, reno (cubic could not be set)",) * 2)
    monkeypatch.setattr(FakeModel, "cluster_info", lambda self: info)
    said = "duckllm: 2 workers by TCP, reno (cubic could not be set)\n"
    assert duckllm("chat", "--prompt", "x").err == f"{MEMORY}{said}"


def test_what_is_not_given_is_the_models_own(duckllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DUCKLLM_CLUSTER_TOKEN", raising=False)
    monkeypatch.setattr(FakeModel, "default_sampling_params", SamplingParams(temperature=0.25, top_k=9))
    done = duckllm("chat", "--prompt", "x", "--max-tokens", "5")
    options = {"wire_dtype": "f32", "weight_format": "auto", "prefill": "f32"}
    options |= {
        "threads_per_worker": 0,
        "share_folder": True,
        "spares": 0,
        "prepare_timeout_s": 600.0,
        "worker_timeout_s": 30.0,
        "shares": "auto",
        "cluster": None,
        "multicast": "off",
        "min_workers": 1,
        "discover_wait_s": 30.0,
        "cluster_token": None,
        **CACHE,
    }
    options |= {"device": "auto", "draft": "auto", "draft_tokens": 1, "lanes": "auto", **TRACE}
    assert done.loaded == [(None, {"workers": None, **options}, None)]
    assert done.model.params == [SamplingParams(temperature=0.25, top_k=9, max_tokens=5)]


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        (["--prompt", "  "], None, "prompt: got an empty text, expected a question\n"),
        ([], b"\n \n", "prompt: got an empty text, expected a question\n"),
        (["--prompt", "a\udcff"], None, "prompt: got bytes that are not UTF-8, expected valid text"),
        (["--prompt", "a", "--system", "\udcff"], None, "system: got bytes that are not UTF-8, expected"),
        ([], b"ab\xff", "stdin: got byte 0xff, expected UTF-8 text"),
        (["--prompt", "x", "--temperature", "-1"], None, "temperature: got -1.0"),
        (["--prompt", "x", "--top-k", "-7"], None, "top_k: got -7"),
        (["--prompt", "x", "--top-p", "0"], None, "top_p: got 0.0"),
        (["--prompt", "x", "--top-k", str(2**31)], None, "top_k: got 2147483648, expected an integer from 0"),
        (["--prompt", "x", "--max-tokens", "9" * 40], None, "max_tokens: got 9999"),
        (["--prompt", "x", "--min-p", "2"], None, "min_p: got 2.0"),
        (["--prompt", "x", "--seed", "-1"], None, "seed: got -1"),
        (["--prompt", "x", "--repetition-penalty", "0"], None, "repetition_penalty: got 0.0, expected a num"),
        (["--prompt", "x", "--stop", "a", "--stop", ""], None, "stop: got '', expected a string that is not"),
        (["--prompt", "x", "--stop", "\udcff"], None, "stop: got text that UTF-8 cannot hold, expected "),
        (["--prompt", "x", "--max-tokens", "0"], None, "max_tokens: got 0"),
        (["--prompt", "x", "--workers", "-2"], None, "workers: got '-2'"),
        (["--prompt", "x", "--workers", "a:b"], None, "workers: got 'a:b'"),
        (["--prompt", "x", "--format", "fp7"], None, "weight_format: got 'fp7', expected one of auto, fp9"),
        (["--prompt", "x", "--wire-dtype", "f64"], None, "wire_dtype: got 'f64', expected one of f32, bf16"),
        (["--prompt", "x", "--threads-per-worker", "-1"], None, "threads_per_worker: got -1"),
        (
            ["--prompt", "x", "--kv-cache-bytes", "much"],
            None,
            "kv_cache_bytes: got 'much', expected a size: 2",
        ),
        (["--prompt", "x", "--kv-memory-bytes", "-1"], None, "kv_memory_bytes: got '-1', expected a size"),
        (["--prompt", "x", "--kv-disk-bytes", "1 EiB"], None, "kv_disk_bytes: got '1 EiB', expected a size"),
        (["--prompt", "x", "--session", "../x"], None, "session: got '../x', expected up to 64 letters"),
        (["--prompt", "x", "--session", ".x"], None, "session: got '.x'"),
        (["--prompt", "x", "--token-file", "/nowhere/token"], None, "token_file: got '/nowhere/token'"),
        (
            ["--prompt", "x", "--token-file", "TOKEN"],
            None,
            "token_file: got 'TOKEN', expected none, as only workers elsewhere need one",
        ),
    ],
)
def test_a_wrong_value_is_one_sentence_before_anything_is_loaded(
    duckllm: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    stdin: bytes | None,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("TOKEN").write_text("secret")
    Path("TOKEN").chmod(0o600)
    done = duckllm("chat", *arguments, stdin=stdin)
    assert done.code == 2
    assert done.err.startswith(f"duckllm: {message}")
    assert done.err.count("\n") == 1
    assert done.out == ""
    assert done.loaded == []


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"model_hash": "b" * 64}, [], "session ducks is another model's (folder {folder}); another name"),
        ({"messages": 3}, [], "{folder}/conversation.json: messages: got int"),
        ({}, ["--system", "other"], "system: got 'other', expected 'be brief', with which session ducks"),
        ({"messages": []}, ["--system", "other"], "system: got 'other', expected none, with which session"),
    ],
)
def test_a_session_that_cannot_go_on_is_refused_before_anything_is_loaded(
    duckllm: Any,
    demo_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
    options: list[str],
    message: str,
) -> None:
    monkeypatch.setenv("DUCKLLM_SESSION_DIR", str(tmp_path))
    kept = {"format_version": 1, "model_hash": Manifest.load(demo_folder).model_hash, "keep_thinking": True}
    kept |= {"messages": [{"role": "system", "content": "be brief"}], "token_ids": []}
    (tmp_path / "ducks").mkdir()
    (tmp_path / "ducks" / "conversation.json").write_text(json.dumps({**kept, **change}))
    done = duckllm("chat", str(demo_folder), "--prompt", "x", "--session", "ducks", *options)
    assert done.err.startswith(f"duckllm: {message.format(folder=tmp_path / 'ducks')}")
    assert done.loaded == []


def test_what_is_piped_in_has_a_limit(duckllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verb, "MAX_STDIN_BYTES", 8)
    assert duckllm("chat", stdin=b"12345678").out.startswith("heard '12345678'")
    done = duckllm("chat", stdin=b"123456789")
    assert done.code == 2
    assert done.err == "duckllm: stdin: got more than 8 bytes, expected a question of at most that\n"
    assert done.loaded == []


@pytest.mark.parametrize(
    "arguments",
    [["chat", "--quack"], ["quack"], ["chat", "--top-k", "x"], ["chat", "a", "b"], ["convert"], ["--quack"]],
)
def test_wrong_usage_exits_with_2(duckllm: Any, arguments: list[str]) -> None:
    done = duckllm(*arguments)
    assert done.code == 2
    assert "Usage: " in done.err
    assert "Error: " in done.err
    assert "Traceback" not in done.err


def test_a_lost_worker_is_one_sentence(duckllm: Any) -> None:
    done = duckllm("chat", "--prompt", "lose")
    assert done.code == 1
    assert done.err == MEMORY + "duckllm: worker 127.0.0.1:1 is lost at layer 3: it went away\n"


def test_a_worker_lost_in_the_middle_leaves_the_line_first(duckllm: Any) -> None:
    done = duckllm("chat", "--prompt", "lose later")
    assert (done.code, done.out) == (1, "some words\n")
    assert done.err.startswith(MEMORY + "duckllm: worker 127.0.0.1:1 is lost")


@pytest.mark.parametrize(
    ("options", "ending"),
    [(["--max-tokens", "2"], "cut at max_tokens=2"), ([], "cut at the context's end (9 tokens)")],
)
def test_a_cut_reply_says_what_cut_it(duckllm: Any, options: list[str], ending: str) -> None:
    done = duckllm("chat", "--prompt", "long", *options)
    assert done.out.endswith(f", first token after 0.25 s, {ending}]\n")


def test_ctrl_c_within_a_reply_shows_its_facts(duckllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = FakeModel._stream

    def interrupted(model: FakeModel, heard: str) -> Any:
        yield next(whole(model, heard))
        raise KeyboardInterrupt

    monkeypatch.setattr(FakeModel, "_stream", interrupted)
    done = duckllm("chat", "--prompt", "x")
    assert done.code == 130
    assert done.out == (
        "heard \n[2 workers, fp9, avx2+scalar, 1 token, 12.5 tok/s, first token after 0.25 s, stopped]\n"
    )
    assert done.err == MEMORY


def test_ctrl_c_is_quiet(duckllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(FakeModel, "stream", interrupt)
    done = duckllm("chat", "--prompt", "x")
    assert (done.code, done.out, done.err) == (130, "", MEMORY)


def test_version_and_help(duckllm: Any) -> None:
    assert duckllm("--version").out.startswith("duckllm 0.")
    for command in ("chat", "convert", "worker"):
        assert f"  {command} " in duckllm("--help").out
        shown = duckllm(command, "--help")
        assert shown.code == 0
        assert "  Examples:\n    duckllm " in shown.out


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("12345", 12345),
        ("12B", 12),
        ("2GiB", 2 << 30),
        ("2g", 2 << 30),
        ("1.5 GiB", 3 << 29),
        ("800MB", 800_000_000),
        ("3kB", 3000),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes_are_bytes(text: str, expected: int) -> None:
    assert parse_size("field", text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("3", 3), ("0", 0), ("00", 0), (" 012 ", 12), ("a:1", ("a:1",)), ("a:1, [::1]:2", ("a:1", "[::1]:2"))],
)
def test_workers_are_a_number_or_addresses(text: str, expected: object) -> None:
    assert parse_workers(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-1",
        "--5",
        "-",
        "9" * 5000,
        "a" * 5000 + ":x",
        "two",
        "a:1,",
        "a:1,b",
        "a:99999",
        "1.5",
        "a:1;b:2",
        "a:1,b:1,A:1",
        "+1",
        "1_0",
        "\uff11",
        ",".join(f"a:{port}" for port in range(1, 1026)),
    ],
)
def test_workers_that_are_neither(text: str) -> None:
    with pytest.raises(ConfigError, match="workers: got ") as caught:
        parse_workers(text)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("x" * 238, "'" + "x" * 238 + "'"),
        ("x" * 239, "'" + "x" * 117 + "..." + "x" * 117 + "'"),
        (10**5000, "a value of too many digits"),
        (InWords("w" * 100), "w" * 100),
    ],
    ids=["fits", "one-more", "digits", "words"],
)
def test_an_error_shows_the_ends_of_a_long_value(value: object, shown: str) -> None:
    assert str(ConfigError("field", value, "less")) == f"field: got {shown}, expected less"


def test_the_spinner_shows_a_name_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither rich's markup nor what a terminal obeys is in it."""
    monkeypatch.setenv("TERM", "xterm")
    err = io.StringIO()
    err.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", err)
    with Waiting("Loading /[/b][red]m\x1b[2J", after_s=1000) as waiting:
        waiting._show()
    assert "Loading /[/b][red]m[2J" in err.getvalue()


def test_a_spinner_makes_room_for_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    err = io.StringIO()
    monkeypatch.setattr(err, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", err)
    with Waiting("Loading", after_s=1000) as waiting:
        waiting._show()
        assert waiting._status is not None
        assert waiting._status._live.is_started
        with ConsoleProgress("Sending", Console(file=io.StringIO(), force_terminal=True)) as progress:
            progress("2 workers", 1, 2)
            assert not waiting._status._live.is_started
            waiting._show()  # not again
            assert not waiting._status._live.is_started
    assert on_bar == []


def test_facts_say_how_much_of_a_prompt_was_cached() -> None:
    metrics = RequestMetrics(402, 1, 0.5, None, cached_tokens=CachedTokens(device=64, memory=4, disk=320))
    assert describe_facts(FakeInfo(1, "fp9", ("avx512",)), metrics) == (
        "[1 worker, fp9, avx512, 1 token, first token after 0.50 s, 388 of 402 prompt tokens cached]"
    )


def test_facts_leave_out_what_is_unknown() -> None:
    one_token = RequestMetrics(3, 1, 0.5, None)
    assert describe_facts(FakeInfo(1, "fp9", ("avx512",)), one_token) == (
        "[1 worker, fp9, avx512, 1 token, first token after 0.50 s]"
    )
    assert describe_workers(FakeInfo(0, "fp9", ("avx2",))) == "no workers, fp9, avx2"


def test_facts_count_the_guesses() -> None:
    guessed = RequestMetrics(3, 9, 0.5, 20.0, num_draft_tokens=5, num_accepted_tokens=4)
    assert describe_facts(FakeInfo(1, "fp8", ("avx2",)), guessed, "stopped") == (
        "[1 worker, fp8, avx2, 9 tokens, 20.0 tok/s, first token after 0.50 s, 4 of 5 guesses right, stopped]"
    )


def test_every_verb_is_mounted() -> None:
    names = [command.name for command in app.registered_commands]
    first = ["chat", "serve", "convert", "inspect", "plan"]
    assert names == [*first, "quality", "calibrate", "simulate", "doctor", "trace", "worker"]
