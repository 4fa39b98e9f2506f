"""Plans before anything is loaded: shares, what is counted, what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from duckllm.engine.cache_size import GIB, GPU_PROCESS_BYTES, HOST_PROCESS_BYTES, card_of
from duckllm.errors import ConfigError
from duckllm.models.inspection import Inspection, inspect_model
from duckllm.moe.fit import WORKER_PROCESS_BYTES, Node
from duckllm.plan import SYSTEM_BYTES, ClusterPlan, fewest_nodes, plan_cluster, plan_on

ROOT = Path(__file__).parents[1]
STRIPES = 8  # of the demo model
REST = {"weight_format": "fp9", "max_model_len": 100, "max_step_tokens": 16}


@pytest.fixture(scope="module")
def model(demo_folder: Path) -> Inspection:
    return inspect_model(demo_folder)


def plan(model: Inspection, *sizes: float) -> ClusterPlan:
    return plan_cluster(model, [int(size) for size in sizes], **REST)


def test_slices_cover_every_stripe_once(model: Inspection) -> None:
    made = plan(model, *[4 * GIB] * 3)
    assert [node.num_stripes for node in made.nodes] == [3, 3, 2]
    assert sum(node.weight_bytes for node in made.nodes) == model.expert_bytes("fp9")
    assert [node.weight_bytes * STRIPES for node in made.nodes] == [
        node.num_stripes * model.expert_bytes("fp9") for node in made.nodes
    ]


def test_what_a_node_has_no_memory_for_goes_to_others(model: Inspection) -> None:
    room = plan(model, 4 * GIB).sizes.need_bytes(2)
    made = plan(model, SYSTEM_BYTES + room, SYSTEM_BYTES + 3 * GIB)
    assert [node.num_stripes for node in made.nodes] == [2, 6]
    assert [node.have_bytes for node in made.nodes] == [room, 3 * GIB]
    assert made.fits
    assert [node.num_stripes for node in plan(model, SYSTEM_BYTES + GIB, 4 * GIB).nodes] == [4, 4]


def test_the_ceiling_is_the_slowest_nodes_and_the_hosts(model: Inspection) -> None:
    nodes = [Node("a", None, 10.0, "avx2", 50.0), Node("b", None, 40.0, "avx512", 20.0)]
    made = plan_on(model, nodes, **REST, host_gb_per_s=20.0)
    assert [node.num_stripes for node in made.nodes] == [1, 7]
    unit_bytes, top_k = 13_888, 4  # docs/performance.md, section 3
    times = [1 * top_k * unit_bytes / 10e3 + 50.0, 7 * top_k * unit_bytes / 40e3 + 20.0]
    assert [node.step_us for node in made.nodes] == pytest.approx(times)
    assert made.step_us == pytest.approx(max(times))
    assert made.host_read_bytes == sum(part.read_bytes for part in model.parts)
    assert made.host_us == pytest.approx(made.host_read_bytes / 20e3)
    assert made.ceiling_tokens_per_s == pytest.approx(1e6 / (made.host_us + 5 * max(times)))
    alone = plan_on(model, nodes, **REST)
    assert alone.ceiling_tokens_per_s == pytest.approx(1e6 / (5 * max(times)))
    assert plan_on(model, [*nodes, Node("c")], **REST).ceiling_tokens_per_s is None


def test_what_a_worker_needs_is_all_counted(model: Inspection) -> None:
    [node] = plan(model, 4 * GIB).nodes
    buffers = node.buffer_bytes - WORKER_PROCESS_BYTES - node.weight_bytes // 512
    assert 0 < buffers < 4_000_000
    longer = plan_cluster(model, [4 * GIB], **{**REST, "max_step_tokens": 32}).nodes[0]
    assert longer.buffer_bytes > node.buffer_bytes
    assert node.need_bytes == node.weight_bytes + node.buffer_bytes


def test_it_fits_to_the_byte(model: Inspection) -> None:
    need = plan(model, 4 * GIB).nodes[0].need_bytes
    assert plan(model, SYSTEM_BYTES + need).fits
    assert not plan(model, SYSTEM_BYTES + need - 1).fits


def test_the_host_holds_weights_and_cache(model: Inspection) -> None:
    made = plan(model, 4 * GIB)
    host = made.host.memory
    assert host.cache_tokens == 112  # whole pages
    assert host.cache_bytes == 112 * 4 * model.cache_elements_per_token
    assert host.weight_bytes == sum(part.loaded_bytes for part in model.parts)
    assert host.need_bytes == host.cache_bytes + host.weight_bytes + HOST_PROCESS_BYTES
    assert made.host.have_bytes is None


def test_a_hosts_cache_is_what_it_takes_at_the_start(model: Inspection) -> None:
    rest = {"model": model, "memory_bytes": [4 * GIB], **REST}
    made = plan_cluster(**rest, host_bytes=2 * GIB).host
    free = GIB - made.memory.weight_bytes - HOST_PROCESS_BYTES
    assert made.have_bytes == GIB
    assert made.memory.cache_tokens == 64 * 112  # as many contexts as requests
    made = plan_cluster(**{**rest, "max_model_len": 4096}, host_bytes=2 * GIB).host
    assert 0 <= free // 4 - made.memory.cache_bytes < 16 * 4 * model.cache_elements_per_token
    with pytest.raises(ConfigError, match=r"host_memory: got 256\.00 MiB available, expected at least 3"):
        plan_cluster(**rest, host_bytes=GIB + GIB // 4)


def deepseek_weights() -> int:
    """DeepSeek-V3.2's host part on a GPU, layer for layer, from its published shapes."""

    def fp8(out: int, width: int) -> int:
        return out * width + 4 * -(-out // 128) * -(-width // 128)

    h, heads, experts = 7168, 128, 256
    indexer = fp8(64 * 128, 1536) + fp8(128, h) + 2 * 64 * h + 4 * 2 * 128  # the key norm has a bias
    attention = fp8(1536, h) + fp8(heads * 192, 1536) + fp8(512 + 64, h) + fp8(heads * 256, 512)
    attention += fp8(h, heads * 128) + 4 * (1536 + 512) + indexer + 4 * 2 * h  # and the layer's two norms
    moe = 2 * fp8(2048, h) + fp8(h, 2048) + 2 * experts * h + 4 * experts
    dense = 2 * fp8(18432, h) + fp8(h, 18432)
    drafting = attention + moe + fp8(h, 2 * h) + 4 * 3 * h
    return 61 * attention + 58 * moe + 3 * dense + 4 * h + 2 * 129280 * h + drafting


def test_deepseek_v32_on_a_card_of_32_gib() -> None:
    model = inspect_model(ROOT / "examples" / "configs" / "DeepSeek-V3.2")
    rest = {"weight_format": "fp8", "max_model_len": 131072, "max_step_tokens": 256, "drafts": True}
    made = plan_cluster(model, [64 * GIB] * 11, **rest, device=card_of(32 * GIB))
    memory = made.host.memory
    assert memory.weight_bytes == deepseek_weights() == 18_462_839_424
    assert memory.embedding_bytes == 2 * 129280 * 7168
    token_bytes = 2 * 62 * (512 + 64 + 128)
    free = 32 * GIB - 3 * GIB // 4 - memory.weight_bytes - memory.workspace_bytes
    assert memory.cache_tokens == int(free * 0.9) // (16 * token_bytes) * 16 == 139_936
    assert memory.cache_bytes == memory.cache_tokens * token_bytes
    assert memory.max_model_len == 131072
    assert memory.vram_bytes <= 32 * GIB - 3 * GIB // 4
    assert memory.need_bytes == memory.embedding_bytes + HOST_PROCESS_BYTES + GPU_PROCESS_BYTES
    # What a token reads is read from VRAM, all but the layer that drafts.
    plain = plan_cluster(model, [64 * GIB] * 11, **{**rest, "drafts": False}, device=card_of(32 * GIB))
    assert made.host_read_bytes == plain.host.memory.weight_bytes
    with pytest.raises(ConfigError, match=r"VRAM: got 15\.25 GiB free on a GPU of 16\.00 GiB, expected at"):
        plan_cluster(model, [64 * GIB] * 11, **rest, device=card_of(16 * GIB))


def test_a_head_that_is_the_embedding_is_on_the_card(tmp_path: Path) -> None:
    config = json.loads((ROOT / "examples" / "configs" / "Qwen3-30B-A3B" / "config.json").read_text())
    parts = {}
    for is_tied in (False, True):
        (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": is_tied}))
        parts[is_tied] = {part.name: part for part in inspect_model(tmp_path).parts}
    table = 2 * 151936 * 2048
    assert (parts[False]["embedding"].gpu_bytes, parts[False]["head"].gpu_bytes) == (0, table)
    assert parts[True]["embedding"].gpu_bytes == table
    assert "head" not in parts[True]


def test_the_layer_that_drafts_is_counted_everywhere(model: Inspection) -> None:
    plain, drafting = (plan_cluster(model, [4 * GIB], **REST, drafts=drafts) for drafts in (False, True))
    assert drafting.nodes[0].weight_bytes * 5 == plain.nodes[0].weight_bytes * 6
    assert drafting.host.memory.weight_bytes - plain.host.memory.weight_bytes == model.draft_bytes > 0
    assert drafting.host.memory.cache_bytes * 6 == plain.host.memory.cache_bytes * 7


def test_the_fewest_nodes_are_found(model: Inspection) -> None:
    for nodes in (1, 2, 3, 4, 8):
        size = SYSTEM_BYTES + max(node.need_bytes for node in plan(model, *[4 * GIB] * nodes).nodes)
        made = fewest_nodes(model, size, **REST)
        assert len(made.nodes) == nodes
        assert made.fits
    with pytest.raises(ConfigError, match=r"memory: got 1\.05 GiB a node, expected .* one stripe of every"):
        fewest_nodes(model, size - 1, **REST)


def test_more_nodes_than_stripes_are_refused(model: Inspection) -> None:
    with pytest.raises(ConfigError, match="workers: got 9, expected 1 to 8"):
        plan(model, *[4 * GIB] * 9)


# The README's table, row by row: model, weights and active ones, bytes of a token, host, four sizes of nodes.
ROW = re.compile(r"^\| (\S+) \| ([\d.]+), ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| (.+) \|$", re.MULTILINE)
ROWS = ROW.findall((ROOT / "README.md").read_text(encoding="utf-8"))


def test_the_readmes_table_has_every_configuration() -> None:
    folders = {path.parent.name for path in (ROOT / "examples" / "configs").glob("*/config.json")}
    assert {row[0] for row in ROWS} == folders


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_the_readmes_table_is_what_plan_says(row: tuple[str, ...]) -> None:
    name, weights, active, read, host, nodes = row
    model = inspect_model(ROOT / "examples" / "configs" / name)
    assert f"{model.num_weights / 1e9:.1f}" == weights
    assert f"{model.active_weights / 1e9:.1f}" == active
    for text, gib in zip(nodes.split(" | "), (8, 16, 32, 64), strict=True):
        try:
            made = fewest_nodes(
                model,
                gib * GIB,
                weight_format="fp8",
                max_model_len=8192,
                max_step_tokens=256,
                drafts=model.num_mtp_layers > 0,
            )
        except ConfigError:
            assert text == "-"
            continue
        assert text == f"{len(made.nodes)} ({made.nodes[0].need_bytes / GIB:.1f})"
    assert f"{made.read_bytes / GIB:.2f}" == read
    assert f"{made.host.memory.need_bytes / GIB:.1f}" == host
