"""What a benchmark of a model goes through: lengths, prompts, settings, and what a step takes at best."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from duckllm.assembly_experts import ClusterInfo
from duckllm.bench import token_ceilings
from duckllm.bench.grid import Cell, GridConfig, Prompts, Setting, label, parse_input_lens
from duckllm.bench.token_ceilings import LinkFacts, StepCeiling, distinct_experts, link_facts, step_ceiling
from duckllm.cli.bench_model import expand_settings, interface_to
from duckllm.cli.main import app
from duckllm.cli.model_options import ModelOptions
from duckllm.errors import ConfigError
from duckllm.models.inspection import Inspection, inspect_model

SHARED = ("shared memory", "shared memory")
TWO_HERE = ClusterInfo(2, "fp9", ("avx2", "avx2"), (4, 4), ("a:1", "b:1"), links=SHARED)


def test_lengths_of_prompts() -> None:
    assert parse_input_lens("", 4000) == (128, 512, 2048, 4000)
    assert parse_input_lens("", 100) == (100,)
    assert parse_input_lens("", 512) == (128, 512)
    assert parse_input_lens(" 7, max,7,128", 128) == (7, 128)
    for wrong in ("0", "129", "1,", "-1", "longest", "1.5"):
        with pytest.raises(ConfigError, match=r"^input_len: "):
            parse_input_lens(wrong, 128)


def test_random_prompts_are_new_in_each_iteration_and_avoid_some_tokens() -> None:
    prompts = Prompts(50, {1, 5}, seed=3)
    first, second = prompts.batch(Cell(400, 2), 0), prompts.batch(Cell(400, 2), 1)
    assert first == Prompts(50, {1, 5}, seed=3).batch(Cell(400, 2), 0)
    assert first != second
    assert first[0] != first[1]
    assert first != Prompts(50, {1, 5}, seed=4).batch(Cell(400, 2), 0)
    assert {len(each) for each in first} == {400}
    assert set(np.ravel(first)) == set(range(50)) - {1, 5}
    assert all(type(token) is int for token in first[0])


def test_a_text_is_cut_into_prompts_and_begins_again_at_its_end() -> None:
    text = [7, 8, 9, 10, 11]
    [prompt, other] = Prompts(50, (), 0, text).batch(Cell(12, 2), 0)
    start = text.index(prompt[0])
    assert prompt == [text[(start + place) % 5] for place in range(12)]
    assert len(other) == 12
    with pytest.raises(ConfigError, match="text_file"):
        Prompts(50, (), 0, [])


@pytest.mark.parametrize("verb", ["decode", "prefill"])
def test_a_list_of_no_batch_is_refused(verb: str) -> None:
    result = CliRunner().invoke(app, ["bench", verb, "--batch-size", " "])
    assert isinstance(result.exception, ConfigError)
    assert result.exception.field == "batch_size"


def test_a_text_without_words_is_no_prompt(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text(" \n")
    result = CliRunner().invoke(app, ["bench", "prefill", "--text-file", str(path)])
    assert isinstance(result.exception, ConfigError)
    assert result.exception.field == "text_file"


def test_where_no_load_fits_the_verb_has_failed(model_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Eight times the last cache takes a while to fill, and nothing is asked about the ceilings.
    monkeypatch.setattr(token_ceilings, "default_size_bytes", lambda caches, available_bytes: 4 << 20)
    sizes = ["--workers", "0", "--batch-size", "999999", "--input-len", "16", "--output-len", "2"]
    result = CliRunner().invoke(app, ["bench", "decode", *sizes])
    assert result.exit_code == 1
    assert "left out" in result.stdout


def test_loads_and_the_tokens_that_they_take() -> None:
    config = GridConfig("decode", (16, 31), 2, (1, 3))
    assert config.cells == (Cell(16, 1), Cell(16, 3), Cell(31, 1), Cell(31, 3))
    # 18 tokens are two pages of 16 and 33 are three, and each request has two to itself.
    assert config.load_tokens == [64, 192, 80, 240]
    for change in (
        {"output_len": 1},
        {"batch_sizes": (0,)},
        {"num_iters": 0},
        {"num_iters_warmup": 0},
        {"seed": -1},
        {"input_lens": (0,)},
    ):
        with pytest.raises(ConfigError, match="expected a number from"):
            replace(config, **change)  # type: ignore[arg-type]


def test_options_that_list_values_give_every_combination() -> None:
    settings = expand_settings(ModelOptions(workers="1,2", draft="off,on", lanes="off", device="cpu"))
    assert [(each.names["workers"], each.names["draft"]) for each in settings] == [
        ("1", "off"), ("1", "on"), ("2", "off"), ("2", "on"),
    ]  # fmt: skip
    assert [each.arguments["workers"] for each in settings] == [1, 1, 2, 2]
    assert settings[3].arguments["draft"] == "on"
    assert label(settings[0], settings) == "1 worker, draft off"
    assert label(settings[3], settings) == "2 workers, draft on"
    [alone] = expand_settings(ModelOptions())
    assert label(alone, [alone]) == "2 workers"
    assert alone.arguments["workers"] is None
    formats = expand_settings(ModelOptions(weight_format="fp9,fp8", wire_dtype="f32,bf16"))
    assert label(formats[3], formats) == "fp8, bf16 on the wire"
    [far] = expand_settings(ModelOptions(workers="10.0.0.1:7411,10.0.0.2:7411"))
    assert far.arguments["workers"] == ("10.0.0.1:7411", "10.0.0.2:7411")
    assert far.uses_addresses
    assert not alone.uses_addresses
    for wrong in ({"workers": "1,x"}, {"lanes": "off,maybe"}, {"draft": ","}, {"weight_format": "fp9,fp7"}):
        with pytest.raises(ConfigError):
            expand_settings(ModelOptions(**wrong))


def test_what_rows_that_choose_at_random_touch() -> None:
    assert distinct_experts(32, 4, 1) == pytest.approx(4)
    assert distinct_experts(32, 4, 2) == pytest.approx(4 + 4 * 28 / 32)
    assert distinct_experts(32, 4, 1e6) == pytest.approx(32)


@pytest.fixture(scope="module")
def demo(demo_folder: Path) -> Inspection:
    return inspect_model(demo_folder)


def ceiling(
    model: Inspection, rows: float = 1.0, info: ClusterInfo = TWO_HERE, **changes: object
) -> StepCeiling:
    options = {
        "logit_rows": rows, "wire_dtype": "f32", "reply_dtype": "f32", "multicast": False, "is_cuda": False,
        "is_bf16": False, "read_gb_per_s": 20.0, "gflop_per_s": 100.0, "worker_gb_per_s": None,
        "link": LinkFacts("shared memory"),
    } | changes  # fmt: skip
    return step_ceiling(model, info, rows, **options)  # type: ignore[arg-type]


def test_the_ceiling_of_a_step_on_this_machine(demo: Inspection) -> None:
    one = ceiling(demo)
    assert one.expert_bytes == pytest.approx(5 * 4 * 8 * 13_888)  # docs/performance.md, section 3
    assert one.memory_s == pytest.approx((one.expert_bytes + one.host_bytes) / 20e9)
    assert one.flop == 2 * demo.active_weights
    assert one.compute_s == pytest.approx(one.flop / 100e9)
    assert one.wire_s is None
    assert one.step_s == one.memory_s
    assert one.bound == "memory"
    # Two workers, five layers; a frame's header of 24 bytes, a request's of 16, a reply's of 40, x of 256,
    # 4 experts.
    assert one.request_bytes == 2 * 5 * (40 + 4 * 256 + 4 * 8)
    assert one.reply_bytes == 2 * 5 * (64 + 4 * 256)


def test_rows_of_a_prompt_leave_the_head_alone(demo: Inspection) -> None:
    [head] = [part for part in demo.parts if part.name == "head"]
    many = ceiling(demo, 100.0, logit_rows=0.25)
    assert many.flop == pytest.approx(
        2 * (100 * (demo.active_weights - head.num_weights) + head.num_weights / 4)
    )
    assert many.host_bytes == ceiling(demo).host_bytes - round(0.75 * head.read_bytes)
    assert many.bound == "arithmetic"
    assert many.step_s == many.compute_s
    assert ceiling(demo, 100.0, is_bf16=True).compute_s is None
    for integers in ("int8", "fp8+int4"):  # whose products no f32 ceiling bounds
        assert ceiling(demo, 100.0, replace(TWO_HERE, weight_format=integers)).compute_s is None
    on_gpu = ceiling(demo, is_cuda=True)
    assert (on_gpu.host_bytes, on_gpu.compute_s) == (0, None)


def test_the_slowest_worker_elsewhere_and_the_link(demo: Inspection) -> None:
    far = replace(TWO_HERE, stripes=(2, 6))
    link = LinkFacts("eth0", 2.5)
    one = ceiling(demo, info=far, worker_gb_per_s=(10.0, 20.0), link=link)
    slowest = max(0.25 * one.expert_bytes / 10e9, 0.75 * one.expert_bytes / 20e9)
    assert one.memory_s == pytest.approx(one.host_bytes / 20e9 + slowest)
    assert one.wire_s == pytest.approx(8 * (one.request_bytes + one.reply_bytes) / 2.5e9)
    assert one.step_s == pytest.approx((one.memory_s or 0) + (one.wire_s or 0))
    assert one.compute_s is None
    once = ceiling(demo, info=far, worker_gb_per_s=(10.0, 20.0), multicast=True, wire_dtype="bf16")
    assert once.request_bytes == 5 * (40 + 2 * 256 + 4 * 8)
    for speeds in ((10.0, None), ()):
        unknown = ceiling(demo, info=far, worker_gb_per_s=speeds)
        assert (unknown.step_s, unknown.memory_s) == (None, None)
    assert unknown.bound == "unknown"


def test_the_way_to_the_workers() -> None:
    asked: list[str] = []

    def interface_of(name: str) -> LinkFacts:
        asked.append(name)
        return LinkFacts("eth1" if name == "c" else "eth0", 10.0)

    assert link_facts(replace(TWO_HERE, num_workers=0), interface_of).gbit_per_s is None
    assert link_facts(TWO_HERE, interface_of) == LinkFacts("shared memory")
    assert asked == []
    by_tcp = replace(TWO_HERE, links=("TCP", "TCP"))
    assert link_facts(by_tcp, interface_of) == LinkFacts("eth0", 10.0)
    assert sorted(asked) == ["a", "b"]
    mixed = replace(by_tcp, addresses=("a:1", "c:1"))
    assert link_facts(mixed, interface_of) == LinkFacts("several: eth0, eth1")
    assert interface_to("127.0.0.1") == LinkFacts("loopback")
    assert interface_to("no.such.host.invalid").words.startswith("an unknown interface")


def test_a_setting_knows_whether_its_workers_run_already() -> None:
    assert Setting({}, {"workers": ("a:1",)}).uses_addresses
    assert not Setting({}, {"workers": 2}).uses_addresses
