"""Options that would change nothing, as others are there or are not, are refused by name before any work."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from duckllm.cli.main import app
from duckllm.errors import ConfigError

FLOCK = Path(__file__).parents[2] / "examples/flocks/three-pcs.toml"
NO_TRACE, NO_WORKERS, JITTER = "nothing without --trace", "nothing with --workers 0", "nothing with --jitter"
UNUSED = [
    ("chat --prompt a --trace-bytes 5MiB", "trace_bytes: got '5MiB'", NO_TRACE),
    ("serve --trace-bytes 5MiB", "trace_bytes: got '5MiB'", NO_TRACE),
    ("bench decode --trace-bytes 5MiB", "trace_bytes: got '5MiB'", NO_TRACE),
    ("chat --prompt a --workers 0 --wire-dtype bf16", "wire_dtype: got 'bf16'", NO_WORKERS),
    ("serve --workers 0 --no-share-folder", "share_folder: got False", NO_WORKERS),
    ("bench prefill --workers 0 --shares even", "shares: got 'even'", NO_WORKERS),
    ("chat --prompt a --workers 00 --wire-dtype bf16", "wire_dtype: got 'bf16'", NO_WORKERS),
    ("chat --prompt a --workers 0 --lanes on", "lanes: got 'on'", NO_WORKERS),
    ("bench decode --workers 00,0 --lanes on", "lanes: got 'on'", NO_WORKERS),
    ("serve --insecure --api-key duck --port 70000", "insecure: got True", "nothing with an API key"),
    ("plan --token-file T --nodes FLOCK", "token_file: got 'T'", "nothing without w"),
    ("plan --token-file T --workers 2", "token_file: got 'T'", "nothing without workers at addresses"),
    ("plan --presets --format int4", "format: got 'int4'", "nothing with --presets"),
    ("plan --presets --json", "json: got True", "nothing with --presets"),
    ("plan --measure --memory 8", "memory: got '8'", "nothing with --measure"),
    ("plan --measure --device cuda", "device: got 'cuda'", "nothing with --measure"),
    ("plan --round-trip-us 90", "round_trip_us: got '90'", "nothing without --speed"),
    (
        "plan --nodes FLOCK --acceptance 0.8 --draft off",
        "acceptance: got 0.8",
        "nothing with draft off",
    ),
    ("quality --token-file T", "token_file: got 'T'", "nothing without workers at addresses"),
    ("quality --every 10", "every: got 10", "nothing without --suite"),
    ("quality --window 64", "window: got 64", "nothing without --text"),
    ("quality --window 64 --text a.jsonl", "window: got 64", "nothing without --text"),
    ("calibrate -o OUT --window 64", "window: got 64", "nothing without --prompts"),
    ("calibrate -o OUT --prompts a.txt --reply-tokens 9", "reply_tokens: got 9", "nothing with a text"),
    ("doctor --samples 9", "samples: got 9", "nothing without --jitter"),
    ("doctor --jitter --token-file T", "token_file: got 'T'", JITTER),
    ("doctor --jitter --min-workers 3", "min_workers: got 3", JITTER),
    ("trace run.json --layers 3 --json", "layers: got 3", "nothing with --json"),
    ("bench kernel --linear --hot", "hot: got True", "nothing beside --linear"),
    ("bench kernel --linear --shape demo", "shape: got 'demo'", "nothing beside --linear"),
    ("bench kernel --rows 1 --full", "full: got True", "nothing beside --rows"),
    ("bench serve --seed 3", "seed: got 3", "nothing without --random-range-ratio or a --request-rate"),
    ("node-image build OUT --packages FILLED --mirror http://m", "mirror: got 'http://m'", "nothing with "),
    ("bench serve --burstiness 2", "burstiness: got 2.0", "nothing without a --request-rate"),
    (
        "bench serve --dataset-path t --random-input-len 9",
        "random_input_len: got 9",
        "nothing with --dataset",
    ),
    ("bench serve --dataset-path t --seed 3", "seed: got 3", "nothing with a trace's requests"),
]


@pytest.mark.parametrize(("command", "got", "expected"), UNUSED, ids=[each[0] for each in UNUSED])
def test_what_would_change_nothing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, got: str, expected: str
) -> None:
    out, token = tmp_path / "out", tmp_path / "token"
    token.write_text("secret")
    places = {"OUT": out, "T": token, "FLOCK": FLOCK, "FILLED": tmp_path}
    words = [str(places.get(word, word)) for word in command.split()]
    found = CliRunner().invoke(app, words).exception
    assert isinstance(found, ConfigError)
    assert str(found).startswith(got.replace("'T'", repr(str(token))) + ", expected " + expected)
    assert not out.exists()


def test_what_says_the_default_is_not_refused() -> None:
    found = CliRunner().invoke(app, ["doctor", "--jitter", "--samples", "1", "--min-workers", "1"]).exception
    assert isinstance(found, ConfigError)
    assert found.field == "samples"
