"""duckllm inspect and duckllm plan, as commands."""

from __future__ import annotations

import json
import re
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from duckllm import assembly
from duckllm.cli import main as main_module
from duckllm.cli.main import app
from duckllm.config import total_memory_bytes
from duckllm.device import Device
from duckllm.errors import AuthenticationError, ConfigError, InWords, PlacementError
from duckllm.forecast.flock import GIB, read_flock
from duckllm.models.inspection import inspect_model
from duckllm.weights.convert import convert
from duckllm.weights.formats import LayerFormat
from support.four_bit import awq, compressed_config, gptq, mxfp4
from worker_harness import running_worker

ROOT = Path(__file__).parents[2]


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_inspect_tells_everything_as_json(demo_folder: Path) -> None:
    facts = json.loads(run("inspect", demo_folder, "--json"))
    assert facts["architecture"] == "DeepseekV32ForCausalLM"
    assert (facts["kind"], facts["format"], facts["stripes"]) == ("converted", "fp9", 8)
    assert list(facts["experts_by_format"]) == ["fp9"]
    sizes = facts["experts_by_format"]["fp9"]["bytes_by_nodes"]
    assert list(sizes) == ["1", "2", "4", "8"]
    assert sorted(sizes.values(), reverse=True) == list(sizes.values())
    assert facts["host"]["embedding"]["bytes_per_token"] == 0
    assert facts["kv_cache_bytes_per_token"] == 4 * 6 * (64 + 16 + 32)
    assert facts["gpu_kv_cache_bytes_per_token"] == 2 * 6 * (64 + 16 + 32)
    assert facts["host"]["embedding"]["gpu_bytes"] == 0
    assert facts["host"]["head"]["gpu_bytes"] == facts["host"]["head"]["loaded_bytes"] > 0
    assert 0 < facts["host"]["attention"]["gpu_bytes"] < facts["host"]["attention"]["loaded_bytes"]


def test_inspect_tells_people_the_same(demo_folder: Path, demo_checkpoint: Path) -> None:
    text = run("inspect", demo_folder)
    assert "6 layers and 1 of multi-token prediction, 5 with 32 experts, 4 for each token" in text
    assert "converted model, experts in fp9" in text
    rows = re.findall(r"^(embedding|attention|dense MLP|together) +([0-9.]+) M", text, re.MULTILINE)
    assert [name for name, _ in rows] == ["embedding", "attention", "dense MLP", "together"]
    assert "KV cache 2.63 KiB a token, on a GPU 1.31 KiB\n" in text
    assert re.search(r"^fp9 +\d+\.\d\d MiB +\d+\.\d\d MiB +(\d+\.\d\d MiB *){4}$", text, re.MULTILINE)
    assert re.search(r"^router +0\.\d M +\d+\.\d\d [KM]iB ", text, re.MULTILINE)
    assert "checkpoint, experts in F8_E4M3" in run("inspect", demo_checkpoint)


def test_without_a_name_it_is_the_demo_model() -> None:
    assert json.loads(run("inspect", "--json"))["num_weights"] > 20e6
    assert json.loads(run("plan", "--json"))["workers"][0]["stripes"] == 8


def test_plan_finds_the_fewest_nodes(demo_folder: Path) -> None:
    facts = json.loads(run("plan", demo_folder, "--memory", "16", "--json"))
    assert facts["fits"] is True
    assert [worker["stripes"] for worker in facts["workers"]] == [8]
    assert (facts["format"], facts["max_model_len"]) == ("fp9", 4096)


def test_plan_gives_faster_nodes_more(demo_folder: Path) -> None:
    arguments = ("plan", demo_folder, "--memory", "2,4GB", "--speed", "10,30", "--format", "fp8")
    facts = json.loads(run(*arguments, "--json"))
    assert [worker["stripes"] for worker in facts["workers"]] == [2, 6]
    assert [worker["share"] for worker in facts["workers"]] == [0.25, 0.75]
    assert facts["step_us"] == facts["workers"][0]["step_us"] > 0
    for shares, stripes in (("even", [4, 4]), ("3,1", [6, 2])):
        facts = json.loads(run(*arguments, "--shares", shares, "--json"))
        assert [worker["stripes"] for worker in facts["workers"]] == stripes
    assert facts["format"] == "fp8"
    assert [worker["have_bytes"] >> 30 for worker in facts["workers"]] == [1, 3]
    text = run("plan", demo_folder, "--workers", "3", "--memory", "4")
    assert re.search(r"^0 to 1 +3 ", text, re.MULTILINE)
    assert re.search(r"^2 +2 ", text, re.MULTILINE)


def test_plan_says_how_fast_and_what_repeats(demo_folder: Path) -> None:
    options = ("--speed", "20", "--isa", "avx512,avx2", "--round-trip-us", "100")
    text = run("plan", demo_folder, *options)
    assert re.search(r"^0 +4 +50.0 % .* 20.0 GB/s  avx512 +111.1 us$", text, re.MULTILINE)
    assert (
        "at most 1800.0 tokens a second of one answer: 5 layers of 111.1 us, without the host's own" in text
    )
    assert (
        "avx2 and avx512, which round differently: an answer repeats bit for bit only with the same" in text
    )
    text = run("plan", demo_folder, "--speed", "20", "--isa", "avx2", "--host-speed", "30")
    assert "without round trips, and the host's own weights, 6." in text
    assert "round differently" not in text


def test_plan_asks_running_workers(demo_folder: Path, tmp_path: Path) -> None:
    with (
        running_worker(tmp_path, "--speed", "12.5", token="t") as first,
        running_worker(
            tmp_path, "--speed", "37.5", "--no-cache", token="t", DUCK_FORCE_ISA="scalar"
        ) as second,
    ):
        (tmp_path / "token").write_text("t")
        (tmp_path / "token").chmod(0o600)
        addresses = f"{first.address},{second.address}"
        rest = ("--workers", addresses, "--token-file", tmp_path / "token", "--host-speed", "20", "--json")
        facts = json.loads(run("plan", demo_folder, *rest))
        written = tmp_path / "nodes.toml"
        said = run("plan", demo_folder, *rest[:-1], "--write-nodes", written)
        with pytest.raises(
            ConfigError, match=r"write_nodes: got .*nodes\.toml', expected the name of a TOML"
        ):
            run("plan", demo_folder, *rest, "--write-nodes", written)
        with pytest.raises(AuthenticationError, match="this worker has one and the host has none"):
            run("plan", demo_folder, "--workers", addresses)
    flock = read_flock(written)
    assert [(each.read_gb_per_s, each.isa, each.machine) for each in flock.nodes] == [
        (12.5, facts["workers"][0]["isa"].partition("+")[0], "this host"),
        (37.5, "scalar", "this host"),
    ]
    assert [each.name.partition(" at ")[2] for each in flock.nodes] == [
        str(first.address),
        str(second.address),
    ]
    parts = [each.memory_gib for each in (flock.host, *flock.nodes)]
    assert parts == [round(total_memory_bytes() / 3 / GIB, 2)] * 3
    planned = json.loads(run("plan", demo_folder, "--nodes", written, "--json"))
    assert [row["node"] for row in planned["workers"]] == [node.name for node in flock.nodes]
    assert "forecast" in planned
    rows = facts["workers"]
    assert [(row["stripes"], row["read_gb_per_s"]) for row in rows] == [(2, 6.25), (6, 18.75)]
    assert [row["node"] for row in rows] == [str(first.address), str(second.address)]
    assert rows[1]["isa"] == "scalar"
    assert [row["keeps_weights"] for row in rows] == [True, False]
    [line] = [line for line in said.splitlines() if line.startswith("no disk keeps weights")]
    assert f"at {second.address}: " in line
    assert str(first.address) not in line
    sent = re.search(r"start of its worker, ([0-9.]+) MiB in all", line)
    assert sent is not None
    assert float(sent[1]) == pytest.approx(rows[1]["weight_bytes"] / 2**20, abs=0.01)
    assert 0 < rows[0]["have_bytes"] < psutil.virtual_memory().total
    for row in rows:
        assert row["step_us"] > row["round_trip_us"] > 1


def test_plan_sizes_the_hosts_cache_as_a_start_does(demo_folder: Path) -> None:
    arguments = ("plan", demo_folder, "--max-model-len", "1024")
    open_host = json.loads(run(*arguments, "--json"))
    assert (open_host["host"]["kv_cache_tokens"], open_host["host"]["have_bytes"]) == (1024, None)
    assert open_host["drafts"] is True
    facts = json.loads(run(*arguments, "--host-memory", "3", "--json"))
    assert facts["host"]["kv_cache_tokens"] == 64 * 1024
    assert facts["host"]["kv_cache_bytes"] == 64 * 1024 * 4 * 7 * (64 + 16 + 32)
    assert facts["host"]["have_bytes"] == 2 << 30
    text = run(*arguments, "--host-memory", "3", "--draft", "off")
    assert "MiB of KV cache for 65536 tokens, the process itself; it has 2.00 GiB" in text


def test_plan_counts_a_cards_vram(demo_folder: Path) -> None:
    arguments = ("plan", demo_folder, "--max-model-len", "1024", "--vram", "2", "--host-speed", "2000")
    facts = json.loads(run(*arguments, "--json"))["host"]
    vram = facts["vram"]
    assert facts["device"] == "a GPU of 2.00 GiB"
    took = re.search(r"own weights, ([\d.]+) MiB, take ([\d.]+) us of a token; --speed ", run(*arguments))
    assert took is not None
    assert float(took[1]) == pytest.approx(facts["bytes_per_token"] / 2**20, abs=0.01)
    assert float(took[2]) == pytest.approx(facts["bytes_per_token"] / 2e6, abs=0.05)
    assert (vram["total_bytes"], vram["have_bytes"]) == (2 << 30, (2 << 30) - 3 * (1 << 28))
    assert facts["kv_cache_tokens"] == 64 * 1024
    assert vram["kv_cache_bytes"] == 64 * 1024 * 2 * 7 * (64 + 16 + 32)
    parts = [vram[name] for name in ("weight_bytes", "workspace_bytes", "kv_cache_bytes")]
    assert vram["need_bytes"] == sum(parts)
    assert facts["need_bytes"] < 1_450_000_000  # in CPU memory: the embedding and the process
    text = run(*arguments, "--device", "cuda", "--speed", "20")
    rows = re.findall(
        r"^(weights|KV cache for 65536 tokens|graphs and workspaces|together|free before)  ", text, re.M
    )
    assert rows == [
        "weights",
        "KV cache for 65536 tokens",
        "graphs and workspaces",
        "together",
        "free before",
    ]
    assert "VRAM of a GPU of 2.00 GiB\n" in text
    assert re.search(r"^free before +1\.25 GiB$", text, re.MULTILINE)
    assert re.search(r"^host: 1\.3\d GiB: \d\.\d\d MiB of weights, the process itself$", text, re.MULTILINE)


def test_operations_show_what_plan_says_of_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    [(command, shown)] = re.findall(r"    duckllm (plan .* --vram 32)\n\n((?:(?:    .*)?\n)+)", page)
    monkeypatch.chdir(ROOT)
    assert run(*command.split()).endswith("\n\n" + re.sub(r"^    ", "", shown, flags=re.M).strip() + "\n")


def test_plan_takes_a_card_of_this_machine_where_it_holds_the_model(
    demo_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 2 << 30
    monkeypatch.setattr(
        assembly, "find_device", lambda asked: Device("cuda:0", f"card of {asked}", free, 3 << 30)
    )
    for asked in ("auto", "cuda", "cuda:0"):
        facts = json.loads(run("plan", demo_folder, "--device", asked, "--json"))["host"]
        assert (facts["device"], facts["vram"]["have_bytes"]) == (f"card of {asked}", free)
    free = 1 << 29
    facts = json.loads(run("plan", demo_folder, "--json"))["host"]
    assert (facts["device"], facts["vram"]) == ("CPU", None)
    with pytest.raises(
        ConfigError, match=r"VRAM: got 512\.00 MiB free on card of cuda, expected at least 5\d\d\."
    ):
        run("plan", demo_folder, "--device", "cuda")


def test_plan_that_does_not_fit_shows_its_table_and_is_refused(demo_folder: Path) -> None:
    result = CliRunner().invoke(app, ["plan", str(demo_folder), "--workers", "2", "--memory", "1.01"])
    assert isinstance(result.exception, ConfigError)
    assert "too little" in result.stdout
    assert (
        "memory: got 20.48 MiB on 2 of 2 nodes (0, 1), expected at least 119.73 MiB there, or more nodes"
        in str(result.exception)
    )
    assert "hold 0 of 8 stripes; a node that holds none must be left out" in str(result.exception)


def test_a_start_that_does_not_fit_shows_the_table_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = PlacementError("memory", InWords("too little"), "more", table="node  stripes\na:1   \x1b[2J4")

    def refuse(**options: object) -> None:
        raise error

    monkeypatch.setattr(main_module, "app", refuse)
    with pytest.raises(SystemExit) as caught:
        main_module.main()
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert said.splitlines()[0] == "node  stripes"
    assert said.endswith("\nduckllm: memory: got too little, expected more\n")
    assert "\x1b" not in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory", "many"], "memory: got 'many', expected GiB of a node, or of each"),
        (["--memory", "0"], "memory: got '0'"),
        (["--memory", "16,"], "memory: got '16,'"),
        (
            ["--memory", "16,16", "--workers", "3"],
            "workers: got 3, expected 2, as memory lists",
        ),
        (["--workers", "0"], "workers: got 0, expected a number from 1 to 1024"),
        (["--speed", "0"], "speed: got '0', expected GB/s of a node, or of each"),
        (["--speed", "9,x"], "speed: got '9,x'"),
        (["--speed", "9,9", "--memory", "4,4,4"], "workers: got 3, expected 2, as speed lists as many nodes"),
        (["--isa", "sse"], "isa: got 'sse', expected of a node, or of each: scalar, avx2, avx512"),
        (["--shares", "some"], "shares: got 'some', expected auto, even, or a number for each worker: 1,2,4"),
        (["--workers", "2", "--shares", "1,2,3"], "shares: got [1.0, 2.0, 3.0], expected 2 numbers above 0"),
        (
            ["--workers", "a:1", "--memory", "4"],
            "memory: got '4', expected nothing with workers at addresses",
        ),
        (["--host-speed", "0"], "host_speed: got 0.0, expected GB/s of the host, from 0.001 to"),
        (["--workers", "9"], "workers: got 9, expected 1 to 8"),
        (["--workers", "999999999999"], "workers: got '999999999999', expected a number of at least 0, or"),
        (["--max-step-tokens", "65537"], "max_step_tokens: got 65537, expected a number from 1 to 65536"),
        (["--format", "int5"], "format: got 'int5', expected one of fp9, fp8, int8, int4"),
        (["--format", "fp9", "--keep", "fp9:first"], "keep: got 'fp9:first', expected a rule that changes a"),
        (["--format", "fp8", "--keep", "none"], "keep: got 'none', expected a rule that changes a layer's"),
        (["--format", "int4", "--keep", "fp8:x"], "keep: got 'x', expected first, last, mtp, or numbers"),
        (["--max-model-len", "9999"], "max_model_len: got 9999, expected 1 to 4096, the model's longest"),
        (["--host-memory", "much"], "host_memory: got 'much', expected GiB"),
        (["--host-memory", "4,4"], "host_memory: got '4,4', expected GiB of one host"),
        (["--host-memory", "1.2"], "host_memory: got 204.80 MiB available, expected at least 405."),
        (["--device", "gpu"], "device: got 'gpu', expected auto, cpu, cuda, or a card of several: cuda:1"),
        (["--device", "cpu", "--vram", "8"], "vram: got '8', expected nothing with device cpu"),
        (["--vram", "8,8"], "vram: got '8,8', expected GiB of one card"),
        (["--vram", "0.5"], "VRAM: got 0 bytes free on a GPU of 512.00 MiB, expected at least 5"),
        (["--draft", "on"], "draft: got 'on', expected auto or off"),
        (["--max-step-tokens", "0"], "max_step_tokens: got 0"),
    ],
)
def test_a_wrong_option_is_refused_by_name(demo_folder: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run("plan", demo_folder, *arguments)
    assert message in str(caught.value)


def test_plan_predicts_from_a_file_of_nodes(demo_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "flock.toml"
    file.write_text(
        '[host]\npreset = "n100"\nlink_gbit_per_s = 10\n'
        '[[nodes]]\npreset = "n100"\ncount = 2\nround_trip_us = 70\n'
    )
    arguments = ("plan", demo_folder, "--nodes", file, "--acceptance", "0.5", "--batch", "1,4", "--json")
    facts = json.loads(run(*arguments, "--context", "256", "--wire-dtype", "bf16"))
    forecast = facts["forecast"]
    assert [worker["read_gb_per_s"] for worker in facts["workers"]] == [35.0, 35.0]
    ways = {(each["way"], each["batch"]): each for each in forecast["predictions"]}
    assert {way for way, _ in ways} == {"plain", "lanes", "guesses", "guesses, lanes"}
    assert {(each["context"], each["x_bytes"], each["reply_bytes"]) for each in ways.values()} == {
        (256, 2, 2)
    }
    assert ways["guesses", 1]["drafts"] == 1
    assert ways["plain", 4]["tokens_per_s"] > ways["plain", 1]["tokens_per_s"]
    base = forecast["base"]
    assert base["tokens_per_s"] == max(each["tokens_per_s"] for way, each in ways.items() if way[1] == 1)
    assert sum(base["parts_us"].values()) == pytest.approx(base["step_us"])
    assert base["parts_us"]["hand-over"] == pytest.approx(5 * (70 - 8) * (2 if base["lanes"] else 1))
    changes = {each["change"]: each for each in forecast["what_if"]}
    assert changes["nodes' links of 10 Gbit/s"]["times"] >= 1
    assert changes["a host that reads 1.5 times as fast"]["times"] > 1
    assert changes["experts in fp8"]["times"] == pytest.approx(
        changes["experts in fp8"]["tokens_per_s"] / base["tokens_per_s"]
    )
    assert "docs/performance.md" in forecast["sources"]["expert_share"]
    text = run(*arguments[:-1])
    assert f"{ways['plain', 4]['tokens_per_s']:.0f}"[:2] in text
    assert re.search(r"^what if +tok/s +times$", text, re.MULTILINE)
    assert re.search(r"^the bottleneck: \w", text, re.MULTILINE)


def test_a_prediction_says_what_does_not_fit(tmp_path: Path) -> None:
    file = tmp_path / "flock.toml"
    file.write_text('[host]\npreset = "epyc"\n[[nodes]]\npreset = "n100"\ncount = 2\nmemory_gib = 17\n')
    config = ROOT / "examples/configs/Qwen3-30B-A3B"
    facts = json.loads(run("plan", config, "--nodes", file, "--format", "fp8", "--json"))
    changes = {each["change"]: each["tokens_per_s"] for each in facts["forecast"]["what_if"]}
    assert changes["experts in fp9"] is not None
    file.write_text(file.read_text().replace("17", "15"))
    facts = json.loads(run("plan", config, "--nodes", file, "--format", "fp8", "--json"))
    changes = {each["change"]: each["tokens_per_s"] for each in facts["forecast"]["what_if"]}
    assert changes["experts in fp9"] is None
    assert changes["twice the nodes"] > 0
    with pytest.raises(ConfigError, match=r"^memory: "):
        run("plan", config, "--nodes", file, "--format", "fp9")


def test_a_card_in_the_host_is_predicted_as_if_it_were_there(tmp_path: Path) -> None:
    def predicted(name: str, card: str) -> tuple[dict[str, float], float]:
        file = tmp_path / "flock.toml"
        host = f'[host]\npreset = "ryzen-desktop"\n{card}\n'
        file.write_text(host + '[[nodes]]\npreset = "n100"\nmemory_gib = 64\ncount = 12\n')
        found = json.loads(run("plan", ROOT / "examples/configs" / name, "--nodes", file, "--json"))[
            "forecast"
        ]
        changes = {each["change"]: each["tokens_per_s"] for each in found["what_if"]}
        return changes, found["base"]["tokens_per_s"]

    changes, without = predicted("Qwen3-30B-A3B", "")
    others, there = predicted("Qwen3-30B-A3B", 'card = "rtx-3090"')
    assert changes["a card in the host: rtx-3090"] == pytest.approx(there)
    assert there > 1.2 * without
    assert not [words for words in others if words.startswith("a card in")]
    # The slowest that holds the host's part is taken, here none of 24 GiB.
    changes, _ = predicted("GLM-4.6", "")
    assert [words for words in changes if words.startswith("a card in")] == ["a card in the host: h200"]


def test_measuring_needs_weights(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"measure: got .*Qwen3-30B-A3B', expected a model with its weights"
    ):
        run("plan", ROOT / "examples/configs/Qwen3-30B-A3B", "--measure")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (("--speed", "3"), "speed"),
        (("--workers", "2"), "workers"),
        (("--host-memory", "2"), "host_memory"),
        (("--vram", "2"), "vram"),
        (("--acceptance", "1.5"), "acceptance"),
        (("--batch", "0"), "batch"),
        (("--batch", "1,x"), "batch"),
        (("--context", "9999999"), "context"),
        (("--wire-dtype", "f16"), "wire_dtype"),
        (("--device", "cuda"), "device"),
    ],
)
def test_a_prediction_refuses_what_contradicts_it(
    demo_folder: Path, tmp_path: Path, options: tuple[str, ...], field: str
) -> None:
    file = tmp_path / "flock.toml"
    file.write_text('[host]\npreset = "n100"\n[[nodes]]\npreset = "n100"\n')
    with pytest.raises(ConfigError) as caught:
        run("plan", demo_folder, "--nodes", file, *options)
    assert caught.value.field == field


def test_guesses_need_a_prediction_and_a_layer_that_guesses(demo_folder: Path, tmp_path: Path) -> None:
    for option, value in (
        ("acceptance", "0.5"),
        ("context", "64"),
        ("batch", "4"),
        ("wire-dtype", "bf16"),
    ):
        with pytest.raises(ConfigError, match="nothing without a prediction"):
            run("plan", demo_folder, f"--{option}", value)
    card = tmp_path / "card.toml"
    card.write_text('[host]\npreset = "epyc"\ncard = "h200"\n[[nodes]]\npreset = "epyc"\n')
    with pytest.raises(ConfigError, match="a host with a card"):
        run("plan", demo_folder, "--nodes", card, "--device", "cpu")
    file = tmp_path / "flock.toml"
    file.write_text('[host]\npreset = "epyc"\n[[nodes]]\npreset = "epyc"\n')
    with pytest.raises(ConfigError, match="acceptance"):
        run("plan", ROOT / "examples/configs/Qwen3-30B-A3B", "--nodes", file, "--acceptance", "0.5")


def test_presets_are_printed_with_their_sources() -> None:
    text = run("plan", "--presets")
    assert "raspberry-pi-5: Raspberry Pi 5; not supported: its CPU is an ARM" in text
    assert re.search(r"^    35 GB/s read: published by", text, re.MULTILINE)
    assert re.search(r"^rtx-5090: 32 GiB of VRAM, 1792 GB/s", text, re.MULTILINE)


def test_plans_of_4_bits_count_each_layer_in_its_format(demo_checkpoint: Path) -> None:
    model = inspect_model(demo_checkpoint)
    unit = {name: LayerFormat.of(name, "block").unit_bytes(256) for name in ("fp8", "int8", "int4")}
    ways = {
        (): {"int4": 5, "fp8": 1},
        ("--draft", "off"): {"int4": 5},
        ("--keep", "fp8:first,last,mtp", "--keep", "int8:3"): {"int4": 2, "fp8": 3, "int8": 1},
        ("--keep", "none"): {"int4": 6},
    }
    for options, counted in ways.items():
        facts = json.loads(run("plan", demo_checkpoint, "--format", "int4", *options, "--json"))
        assert facts["layer_formats"] == counted
        size = sum(unit[name] * count for name, count in counted.items()) * 32 * model.num_stripes
        assert sum(worker["weight_bytes"] for worker in facts["workers"]) == size
    assert json.loads(run("plan", demo_checkpoint, "--json"))["format"] == "fp9"
    read = json.loads(run("plan", demo_checkpoint, "--format", "int4", "--json"))["expert_bytes_per_token"]
    assert read == 5 * unit["int4"] * 4 * model.num_stripes


def test_a_converted_model_is_counted_as_it_is(tmp_path: Path, demo_checkpoint: Path) -> None:
    convert(demo_checkpoint, tmp_path / "demo", weight_format="int4", keep=["fp8:first,mtp"])
    folder = tmp_path / "demo"
    facts = json.loads(run("inspect", folder, "--json"))
    assert (facts["format"], facts["layer_formats"]) == ("int4", "int4, fp8 in layers 1 and 6")
    assert "converted model, experts in int4, fp8 in layers 1 and 6" in run("inspect", folder)
    assert json.loads(run("plan", folder, "--json"))["layer_formats"] == {"int4": 4, "fp8": 2}
    facts = json.loads(run("plan", folder, "--format", "fp9", "--json"))
    assert facts["layer_formats"] == {"int4": 4, "fp9": 2}  # of which a worker makes a copy
    listed = json.loads(run("inspect", demo_checkpoint, "--json"))["experts_by_format"]
    assert list(listed) == ["fp9", "fp8", "int8", "int4"]


def test_without_a_format_all_are_shown_on_the_same_nodes(demo_checkpoint: Path) -> None:
    options = ("plan", demo_checkpoint, "--workers", 2, "--speed", 10)
    rows = {row["format"]: row for row in json.loads(run(*options, "--json"))["formats"]}
    assert list(rows) == ["fp9", "fp8", "int8", "int4"]
    for name, row in rows.items():
        alone = json.loads(run(*options, "--format", name, "--json"))
        assert "formats" not in alone
        assert row["bytes_per_token"] == alone["expert_bytes_per_token"]
        assert row["need_bytes"] == max(worker["need_bytes"] for worker in alone["workers"])
        assert row["tokens_per_s"] == pytest.approx(alone["ceiling_tokens_per_s"])
    assert rows["int4"]["expert_bytes"] < 0.6 * rows["fp9"]["expert_bytes"]
    text = run(*options)
    assert text.startswith(f"{demo_checkpoint}: experts in fp9; ")
    assert re.search(r"\nint4 +11\.77 MiB +1\.09 MiB +2 +\S+ MiB +[\d.]+ tok/s\n", text)
    assert "experts in int4, fp8 in layer 6; " in run(*options, "--format", "int4")
    kept = run(*options, "--format", "int4", "--keep", "fp8:first")
    assert "experts in int4, fp8 in layers 1 and 6; " in kept


def test_what_does_not_fit_shows_the_formats_that_do() -> None:
    configs = ROOT / "examples/configs"
    where = ["plan", str(configs / "GLM-4.5-Air"), "--workers", "4", "--memory", "16"]
    result = CliRunner().invoke(app, [*where, "--format", "fp8"])
    assert isinstance(result.exception, ConfigError)
    ends = {line.split()[0]: line.endswith("too little memory") for line in result.stdout.splitlines()[-6:-2]}
    assert ends == {"fp9": True, "fp8": True, "int8": True, "int4": False}
    result = CliRunner().invoke(app, ["plan", str(configs / "Kimi-K2-Instruct"), "--memory", "8"])
    assert isinstance(result.exception, ConfigError)
    assert "fp9           no number of such nodes holds it\n" in result.stdout


@pytest.mark.parametrize(
    ("quantised", "dtype", "expected"),
    [
        (compressed_config(), "bfloat16", "int4-bf16"),
        (compressed_config(symmetric=False), "float16", "int4-zero"),
        (gptq(32).config, "bfloat16", "int4"),
        (gptq(32, symmetric=False).config, "float16", "int4-zero"),
        (awq(32).config, "bfloat16", "int4-zero"),
        (mxfp4().config, "bfloat16", "mxfp4"),
    ],
)
def test_a_configuration_of_4_bits_is_planned_in_them(
    tmp_path: Path, quantised: dict, dtype: str, expected: str
) -> None:
    config = json.loads((ROOT / "examples/configs/Kimi-K2-Instruct/config.json").read_text())
    config |= {"quantization_config": quantised, "torch_dtype": dtype}
    (tmp_path / "config.json").write_text(json.dumps(config))
    planned = json.loads(run("plan", tmp_path, "--memory", 64, "--json"))
    assert (planned["format"], planned["layers"], "formats" in planned) == (expected, expected, False)
    assert list(json.loads(run("inspect", tmp_path, "--json"))["experts_by_format"]) == [expected]


def test_inspect_plan_and_a_conversion_count_the_same_experts(demo_checkpoint: Path, tmp_path: Path) -> None:
    facts = json.loads(run("inspect", demo_checkpoint, "--json"))["experts_by_format"]
    for name in ("fp9", "int4"):
        manifest = convert(demo_checkpoint, tmp_path / name, weight_format=name)
        bytes_of_files = sum(entry.bytes for entry in manifest.expert_layers.values())
        assert facts[name]["bytes"] == pytest.approx(bytes_of_files, rel=0.003)  # headers of the files
    assert "\nint4, fp8 in layer 6\n" in run("inspect", demo_checkpoint)
