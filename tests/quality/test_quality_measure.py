"""``duckllm quality``: lossless formats are one, a damaged one shows, and numbers are those of the logits."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from duckllm import LLM, SamplingParams
from duckllm.cli.main import app
from duckllm.cli.plan_forecast import Forecasting
from duckllm.cli.quality import _predict
from duckllm.demo.suite import load_suite
from duckllm.errors import ConfigError
from duckllm.models.causal_lm import MoEBlock
from duckllm.models.inspection import inspect_model
from duckllm.moe.executor import ExpertExecutor, PendingStep
from duckllm.quality.divergence import kl_divergence, log_softmax
from duckllm.quality.logits import logits_of
from duckllm.quality.measure import FormatQuality, Measurement, Variant
from duckllm.quality.report import table
from duckllm.quality.texts import Passage, read_passages, shipped_passages, spread
from duckllm.quality.variants import FormatFolders
from duckllm.text import Tokenizer
from duckllm.weights.cache_folder import CACHE_VARIABLE
from duckllm.weights.convert import convert
from duckllm.weights.manifest import Manifest
from support.models import all_logits, build_model

SILENT = 12  # of 32: the demo model knows what it knows by heart

Seen = list[tuple[str, float, float]]


class Damaged:
    """Experts of which those below a number give nothing, in every layer."""

    def __init__(self, inner: ExpertExecutor, num_silent: int) -> None:
        self.inner, self.num_silent = inner, num_silent

    def submit(
        self, layer: int, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, lane: int = 0
    ) -> PendingStep:
        return self.inner.submit(layer, x, topk_ids, topk_weights * (topk_ids >= self.num_silent), lane)


def opener(folder: Path, weight_format: str, damaged: int = 0) -> Callable[[], LLM]:
    def open_llm() -> LLM:
        llm = LLM(folder, workers=0, weight_format=weight_format, device="cpu", draft="on")
        model, draft = llm.host_model()
        assert draft is not None
        for layer in [*model.layers, draft.layer]:
            if damaged and isinstance(layer.mlp, MoEBlock):
                layer.mlp.experts = Damaged(layer.mlp.experts, damaged)
        return llm

    return open_llm


@pytest.fixture(scope="module")
def passages(demo_folder: Path) -> list[Passage]:
    return spread(shipped_passages(Tokenizer(demo_folder), is_demo=True), 150, 0)


@pytest.fixture(scope="module")
def measured(demo_folder: Path, passages: list[Passage]) -> tuple[list[FormatQuality], Seen]:
    seen: Seen = []
    measurement = Measurement(passages, 24, 90, lambda *state: seen.append(state))
    variants = [
        Variant("fp9", opener(demo_folder, "fp9")),
        Variant("fp8", opener(demo_folder, "fp8")),
        Variant("broken", opener(demo_folder, "fp9", damaged=SILENT)),
    ]
    return measurement.run(variants), seen


def test_formats_that_hold_the_same_weights_differ_in_nothing(
    measured: tuple[list[FormatQuality], Seen],
) -> None:
    fp9, fp8, _ = measured[0]
    assert set(fp8.divergence.kl) == {0.0}
    assert all(fp8.divergence.agrees)
    assert fp8.divergence.surprise == fp9.divergence.surprise
    assert (fp8.num_draft_tokens, fp8.num_accepted_tokens) == (fp9.num_draft_tokens, fp9.num_accepted_tokens)
    assert fp9.num_draft_tokens > 20
    assert fp8.expert_bytes < fp9.expert_bytes < 1.13 * fp8.expert_bytes
    assert fp8.suite == fp9.suite == {"dictionary": 1, "primes": 1, "recall": 2}
    assert fp9.tokens_per_s is not None
    assert fp9.tokens_per_s > 0


def test_a_damaged_format_shows(measured: tuple[list[FormatQuality], Seen]) -> None:
    fp9, _, broken = measured[0]
    assert broken.divergence.kl_mean > 1e-3
    assert broken.divergence.kl_p99 >= broken.divergence.kl_mean
    assert broken.divergence.perplexity > fp9.divergence.perplexity
    assert broken.num_right is not None
    assert fp9.num_right is not None


def test_numbers_are_those_of_the_whole_text_computed_at_once(
    demo_folder: Path, passages: list[Passage], measured: tuple[list[FormatQuality], Seen]
) -> None:
    model, broken = build_model(demo_folder), build_model(demo_folder)
    for layer in broken.layers:
        if isinstance(layer.mlp, MoEBlock):
            layer.mlp.experts = Damaged(layer.mlp.experts, SILENT)
    kls: list[float] = []
    surprise = 0.0
    for passage in passages:
        ids = list(passage.token_ids)
        rows = [all_logits(each, ids[:-1], len(ids)).numpy()[passage.first - 1 :] for each in (model, broken)]
        first, second = map(log_softmax, rows)
        kls += kl_divergence(first, second).tolist()
        surprise -= sum(row[token] for row, token in zip(second, ids[passage.first :], strict=True))
    got = measured[0][2].divergence
    assert got.kl == pytest.approx(kls, rel=1e-9, abs=1e-12)
    assert got.perplexity == pytest.approx(np.exp(surprise / len(kls)), rel=1e-9)


def test_replies_that_are_not_written_yet_are_the_references(demo_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('"What is a duck?"\n"Is 91 prime?"\n')
    open_passages = read_passages(path, Tokenizer(demo_folder), window=64)
    measurement = Measurement(open_passages, 6, 0, lambda *state: None)
    variants = [Variant("fp9", opener(demo_folder, "fp9")), Variant("b", opener(demo_folder, "fp9", SILENT))]
    first, broken = measurement.run(variants)
    # Greedy replies: no token is likelier than the next one, which a damaged model is asked for, too.
    with LLM(demo_folder, workers=0, draft="off") as llm:
        params = SamplingParams(temperature=0, max_tokens=6, logprobs=0)
        replies = [each.outputs[0] for each in llm.generate([list(p.prompt) for p in open_passages], params)]
    surprise = [-each.cumulative_logprob for each in replies if each.cumulative_logprob is not None]
    assert first.divergence.num_tokens == sum(len(each.token_ids) for each in replies)
    assert sum(first.divergence.surprise) == pytest.approx(sum(surprise), abs=1e-4)
    assert broken.divergence.num_tokens == first.divergence.num_tokens
    assert broken.divergence.kl_max > 0


def test_progress_goes_from_nothing_to_all(measured: tuple[list[FormatQuality], Seen]) -> None:
    seen = measured[1]
    assert [name for name in dict.fromkeys(name for name, _, _ in seen)] == ["fp9", "fp8", "broken"]
    done = [each for _, each, _ in seen]
    assert done == sorted(done)
    assert done[0] == 0
    assert done[-1] == pytest.approx(seen[0][2])


def test_logits_do_not_depend_on_steps(demo_folder: Path, passages: list[Passage]) -> None:
    model = build_model(demo_folder)
    passage = passages[0]
    whole = list(logits_of(model, passage))
    parts = list(logits_of(model, passage, step_tokens=5))
    assert len(parts) > len(whole)
    assert sum(len(ids) for _, ids in whole) == passage.num_counted
    for one, other in zip(zip(*whole, strict=True), zip(*parts, strict=True), strict=True):
        assert np.concatenate(one).tobytes() == np.concatenate(other).tobytes()
    assert np.concatenate([ids for _, ids in whole]).tolist() == list(passage.token_ids[passage.first :])


def test_a_table_has_a_row_for_each_format(measured: tuple[list[FormatQuality], Seen]) -> None:
    lines = table(measured[0], {"fp9": 10.0, "fp8": 11.25, "broken": None}, measured[0][0].suite or None)  # type: ignore[arg-type]
    assert [line.split()[0] for line in lines] == ["format", "fp9", "fp8", "broken"]
    assert "100.00%" in lines[2]
    assert "4/4" in lines[2]
    assert lines[2].endswith("11.2")
    assert lines[3].endswith("does not fit")
    assert len({line.index("%") for line in lines[1:3]}) == 1
    few = [replace(each, num_draft_tokens=2, num_accepted_tokens=1) for each in measured[0]]
    assert "50.0% of 2 " in table(few, None, type(measured[0][0].suite)())[1]  # type: ignore[misc]
    bare = table(measured[0], None, type(measured[0][0].suite)())  # type: ignore[misc]
    assert "suite" not in bare[0]
    assert "predicted" not in bare[0]


def test_conversations_count_their_replies_and_texts_count_all(demo_folder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer(demo_folder)
    (tmp_path / "a.jsonl").write_text(
        json.dumps("Is 7 prime?")
        + "\n\n"
        + json.dumps({"prompt": "Is 9 prime?"})
        + "\n"
        + json.dumps({"messages": load_suite()[0].chat})
        + "\n"
        + json.dumps({"messages": [*load_suite()[0].chat, {"role": "assistant", "content": "So be it."}]})
    )
    first, second, third, fourth = read_passages(tmp_path / "a.jsonl", tokenizer, window=64)
    assert first.is_open
    assert second.is_open
    assert third.is_open
    assert not fourth.is_open
    assert fourth.prompt == third.token_ids
    assert fourth.token_ids[-1] in tokenizer.eos_token_ids
    assert tokenizer.decode(fourth.token_ids[fourth.first :]) == "So be it."
    assert fourth.num_counted == len(fourth.token_ids) - fourth.first
    assert first.with_reply([5, 6]).num_counted == 2

    text = "A duck is a bird. " * 60
    (tmp_path / "a.txt").write_text(text)
    pieces = read_passages(tmp_path / "a.txt", tokenizer, window=64)
    assert {each.first for each in pieces} == {1}
    assert max(len(each.token_ids) for each in pieces) == 64
    begin = tokenizer.encode(text)[0] == tokenizer.bos_token_id
    assert all((each.token_ids[0] == tokenizer.bos_token_id) == begin for each in pieces)
    joined = [token for each in pieces for token in each.token_ids[int(begin) :]]
    assert joined == tokenizer.encode(text)[int(begin) :][: len(joined)]
    assert len(tokenizer.encode(text)) - len(joined) < 17


def test_passages_come_from_all_over_and_are_not_too_many() -> None:
    passages = [Passage(tuple(range(11)), 1, 1) for _ in range(100)]
    assert len(spread(passages, 1000, 0)) == 100
    assert len(spread(passages, 200, 0)) == 20
    assert len(spread(passages, 5, 0)) == 1
    assert len(spread([Passage((1, 2), 2, 2, is_open=True)] * 10, 64, 32)) == 2


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", "{", "line 1"),
        ("a.jsonl", '"yes"\n{"messages": 3}', "line 2"),
        ("a.jsonl", '{"messages": [{"role": "nobody", "content": "x"}]}', "line 1"),
        ("a.jsonl", '{"messages": [{"role": "assistant", "content": "x"}]}', "line 1"),
        ("a.txt", " \n", "not empty"),
        ("a.txt", b"\xff\xfe", "UTF-8"),
        ("a.txt", None, "can be read"),
    ],
)
def test_files_that_hold_no_text_are_refused_by_name(
    demo_folder: Path, tmp_path: Path, name: str, content: str | bytes | None, expected: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ConfigError, match=expected) as error:
        read_passages(path, Tokenizer(demo_folder), window=64)
    assert error.value.field == "text"


def test_a_file_without_an_end_is_refused_and_not_read_whole(demo_folder: Path) -> None:
    with pytest.raises(ConfigError, match="expected a file of at most 67,108,864 bytes"):
        read_passages(Path("/dev/zero"), Tokenizer(demo_folder), window=64)


def test_a_text_of_no_tokens_is_refused(
    demo_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some tokenizers drop what a text of marks consists of."""
    tokenizer = Tokenizer(demo_folder)
    (tmp_path / "a.txt").write_text("\u200b")
    for ids in ([], [5], [tokenizer.bos_token_id]):
        monkeypatch.setattr(tokenizer, "encode", lambda text, ids=ids: ids)
        with pytest.raises(ConfigError, match="a text of two tokens at least"):
            read_passages(tmp_path / "a.txt", tokenizer, window=64)


def test_lines_end_where_json_ends_them(demo_folder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer(demo_folder)
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps("a\u2028b\x85c", ensure_ascii=False) + "\r\n" + json.dumps("d") + "\n")
    first, second = read_passages(path, tokenizer, window=64)
    assert "a\u2028b\x85c" in tokenizer.decode(first.token_ids)
    assert "d" in tokenizer.decode(second.token_ids)


def test_shipped_prompts_are_questions_of_many_kinds(demo_folder: Path) -> None:
    found = shipped_passages(Tokenizer(demo_folder), is_demo=False)
    assert len(found) == 32
    assert all(each.is_open for each in found)
    assert len({each.token_ids for each in found}) == 32


def test_the_command_prints_one_json_object(demo_folder: Path, tmp_path: Path) -> None:
    nodes = tmp_path / "nodes.toml"
    nodes.write_text('[host]\npreset = "n305"\n[[nodes]]\npreset = "n100"\ncount = 2\n')
    arguments = ["quality", str(demo_folder), "--formats", "fp8", "--tokens", "40", "--reply-tokens", "8"]
    arguments += ["--workers", "2", "--nodes", str(nodes), "--save", str(tmp_path / "x"), "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["reference"] == "fp9"
    assert [each["format"] for each in found["formats"]] == ["fp9", "fp8"]
    for each in found["formats"]:
        assert each["kl_max_nats"] == 0
        assert each["top1_agreement"] == 1
        assert each["predicted_tokens_per_s"] > 0
        assert each["suite"] is None
    files = Manifest.load(demo_folder).expert_layers.values()
    assert found["formats"][0]["expert_bytes"] == pytest.approx(sum(file.bytes for file in files), rel=0.01)
    assert found["formats"][1]["predicted_tokens_per_s"] != found["formats"][0]["predicted_tokens_per_s"]
    assert json.loads((tmp_path / "x").read_text()) == found


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (["--formats", "fp7"], "formats"),
        (["--formats", "fp8", "--keep", "fp8:mtp"], "keep"),
        (["--formats", "fp8", "--importance", "/nowhere/at/all"], "importance"),
        (["--formats", "int8"], "formats"),
        (["--reference", "fp8,fp9"], "reference"),
        (["--reference", "fp7"], "reference"),
        (["--tokens", "0"], "tokens"),
        (["--window", "3"], "window"),
        (["--draft", "auto"], "draft"),
        (["--every", "0"], "every"),
        (["--reply-tokens", "0"], "reply_tokens"),
        (["--text", "/nowhere/at/all"], "text"),
        (["--nodes", "/nowhere/at/all"], "nodes"),
        (["--workers", "-1"], "workers"),
        (["--workers", "1", "--exact"], "exact"),
        (["--save", "/nowhere/at/all"], "save"),
    ],
)
def test_options_are_refused_by_name(demo_folder: Path, options: list[str], field: str) -> None:
    done = CliRunner().invoke(app, ["quality", str(demo_folder), *options])
    assert isinstance(done.exception, ConfigError)
    assert done.exception.field == field


def test_formats_that_round_are_converted_once_and_lose_a_little(
    demo_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """int8 loses less than int4; guesses stay in 8 bits unless that is not wanted; calibration is taken."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    recorded = tmp_path / "recorded"
    runner = CliRunner()
    done = runner.invoke(app, ["calibrate", str(demo_checkpoint), "--tokens", "300", "-o", str(recorded)])
    assert done.exit_code == 0, done.output
    quick = ["quality", str(demo_checkpoint), "--tokens", "150", "--reply-tokens", "2", "--json"]
    found = runner.invoke(app, [*quick, "--formats", "int8,int4", "--exact"])
    assert found.exit_code == 0, found.output
    fp9, int8, exact8, int4, exact4 = json.loads(found.stdout)["formats"]
    assert [each["format"] for each in (fp9, int8, int4)] == ["fp9", "int8", "int4"]
    assert [each["format"] for each in (exact8, exact4)] == ["int8 exact", "int4 exact"]
    for rounded, unrounded in ((int8, exact8), (int4, exact4)):
        assert rounded["kl_mean_nats"] == pytest.approx(unrounded["kl_mean_nats"], rel=0.5)
        assert rounded["kl_mean_nats"] != unrounded["kl_mean_nats"]
        assert rounded["expert_bytes"] == unrounded["expert_bytes"]
    assert 0 < int8["kl_mean_nats"] < 0.1 * int4["kl_mean_nats"]
    assert int4["kl_mean_nats"] < 0.01
    assert int8["top1_agreement"] == int4["top1_agreement"] == 1
    assert 0.5 < int4["expert_bytes"] / fp9["expert_bytes"] < 0.6 < int8["expert_bytes"] / fp9["expert_bytes"]
    assert (int8["layer_formats"], int4["layer_formats"]) == ("int8", "int4, fp8 in layer 6")
    folders = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    assert len(folders) == 3

    options = ["--keep", "none", "--importance", str(recorded)]
    done = runner.invoke(app, [*quick, "--formats", "int4", *options])
    assert done.exit_code == 0, done.output
    bare = json.loads(done.stdout)["formats"][1]
    assert bare["layer_formats"] == "int4"
    assert bare["expert_bytes"] < int4["expert_bytes"]
    assert bare["kl_mean_nats"] not in (0, int4["kl_mean_nats"])
    kept = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    assert len(kept) == 4
    assert folders.items() <= kept.items()

    folder = next(path for path in (tmp_path / "cache").iterdir() if path.name.endswith("-int8"))
    with monkeypatch.context() as patch:  # before anything is opened or converted
        patch.setattr("duckllm.quality.variants.open_model", lambda *arguments: pytest.fail("opened"))
        for option in ("formats", "reference"):
            done = runner.invoke(app, ["quality", str(folder), f"--{option}", "int4"])
            assert isinstance(done.exception, ConfigError)
            assert str(done.exception).startswith(f"{option}: got 'int4', expected int8, as this model is")
            # Nothing is rounded to these: they come from checkpoints that have them.
            for name in ("int3", "int4-zero", "mxfp4"):
                done = runner.invoke(app, ["quality", str(demo_checkpoint), f"--{option}", name])
                assert isinstance(done.exception, ConfigError)
                assert str(done.exception).startswith(
                    f"{option}: got '{name}', expected some of fp9, fp8, int8, int4, int4-bf16, with"
                )
    with pytest.raises(ConfigError, match="keep: got 'none', expected nothing with a converted model"):
        FormatFolders(folder, ("none",)).find(["int8"])
    done = runner.invoke(app, ["quality", str(folder), *quick[2:]])
    assert done.exit_code == 0, done.output
    assert "nothing is compared: int8 alone is measured; the checkpoint that" in done.stderr
    # Mostly fp8, but not all of it: what it holds is compared with nothing that it could be made into.
    mixed = tmp_path / "mixed"
    convert(demo_checkpoint, mixed, weight_format="int4", keep=["fp8:first,last,mtp"])
    assert Manifest.load(mixed).format == "fp8"
    assert (FormatFolders(mixed).reference, FormatFolders(mixed).defaults) == ("fp8", ())
    with pytest.raises(ConfigError, match="fp9"):
        FormatFolders(mixed).find(["fp8", "fp9"])
    [alone] = FormatFolders(mixed).find(["fp8"])
    assert (alone.weight_format, alone.layers) == ("auto", "fp8, int4 in layers 2-4")
    assert alone.name == "fp8+int4"
    shown = runner.invoke(app, ["inspect", str(mixed)]).stdout.splitlines()
    assert [line.split()[0] for line in shown if line.startswith("fp8")] == ["fp8+int4", "fp8,"]

    done = runner.invoke(app, ["calibrate", str(folder), "-o", str(tmp_path / "other")])
    assert isinstance(done.exception, ConfigError)
    assert done.exception.field == "model"


def test_predictions_are_of_the_layers_formats_that_were_measured(
    demo_checkpoint: Path, tmp_path: Path
) -> None:
    """A model in int4 whose layers mostly are fp8 is stored as fp8 with layers in int4."""
    nodes = tmp_path / "nodes.json"
    numbers = {"cores": 4, "read_gb_per_s": 20, "gflop_per_s": 200, "memory_gib": 16, "link_gbit_per_s": 2.5}
    nodes.write_text(json.dumps({"host": numbers, "nodes": [numbers]}))
    asks = Forecasting(nodes, None, 1024, "1", "f32", False)
    asked = SimpleNamespace(name="int4", acceptance=None)
    found = []
    for keep in (["none"], ["fp8:first"], ["fp8:first,last,mtp"], ["fp8:1-4"]):
        convert(demo_checkpoint, tmp_path / keep[0], weight_format="int4", keep=keep)
        found.append(_predict(asks, inspect_model(tmp_path / keep[0]), asked, "auto"))  # type: ignore[arg-type]
    assert None not in found
    assert found == sorted(found, reverse=True)
    assert len(set(found)) == 4
    lossless = convert(demo_checkpoint, tmp_path / "fp9").folder
    asked = SimpleNamespace(name="fp8", acceptance=None)
    fp9, fp8 = (_predict(asks, inspect_model(lossless), asked, each) for each in ("auto", "fp8"))  # type: ignore[arg-type]
    assert fp9 < fp8 < found[-1]  # type: ignore[operator]
