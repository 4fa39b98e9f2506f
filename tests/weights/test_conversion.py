"""What the converter writes, compared with the checkpoint it read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from random_checkpoint import RandomCheckpoint, make_checkpoint
from safetensors import safe_open

from duckllm.errors import ConfigError
from duckllm.weights import e4m3
from duckllm.weights.checkpoint import Checkpoint
from duckllm.weights.convert import convert
from duckllm.weights.manifest import Manifest
from duckllm.weights.reader import ExpertFile
from duckllm.weights.safetensors_file import read_header
from duckllm.weights.units import ExpertWeights, unpack_expert_units

PROJECTIONS = ("gate", "up", "down")


def decoded(manifest: Manifest, layer: int, expert: int) -> ExpertWeights:
    units = np.array(ExpertFile.open(manifest, layer).units[expert])
    return unpack_expert_units(units, manifest.moe_intermediate_size, manifest.hidden_size, manifest.format)


def assert_same_experts(made: RandomCheckpoint, manifest: Manifest, suffix: str) -> None:
    checked = 0
    for layer in manifest.expert_layers:
        for expert in range(manifest.num_experts):
            got = decoded(manifest, layer, expert)
            for projection in PROJECTIONS:
                stem = f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj."
                assert getattr(got, projection).tobytes() == made.tensors[stem + "weight"][2]
                scales = getattr(got, f"{projection}_scales")
                stored = made.array(stem + suffix)
                if stored.dtype == np.uint16:
                    stored = (stored.astype(np.uint32) << 16).view(np.float32)
                np.testing.assert_array_equal(scales, stored.astype(np.float32))
                checked += 1
    assert checked == 3 * manifest.num_experts * len(manifest.expert_layers) > 0


@pytest.mark.parametrize("weight_format", ["fp9", "fp8"])
@pytest.mark.parametrize(
    ("intermediate", "hidden"), [(40, 72), (200, 136), (16, 32), (1, 1), (129, 257), (576, 7168)]
)
def test_fp8_experts_come_back_bit_for_bit(
    tmp_path: Path, intermediate: int, hidden: int, weight_format: str
) -> None:
    few = {
        "num_hidden_layers": 2,
        "num_nextn_predict_layers": 0,
        "n_routed_experts": 1,
        "num_experts_per_tok": 1,
    }
    few = few if hidden == 7168 else {}
    made = make_checkpoint(tmp_path / "src", moe_intermediate_size=intermediate, hidden_size=hidden, **few)
    manifest = convert(tmp_path / "src", tmp_path / "dst", weight_format=weight_format, verify=True)
    assert manifest.format == weight_format
    assert manifest.num_stripes == -(-intermediate // 16)
    records = 3 * -(-hidden // 32) * {"fp9": 576, "fp8": 512}[weight_format]
    assert manifest.unit_bytes == -(-12 * -(-hidden // 128) // 64) * 64 + records
    assert_same_experts(made, manifest, "weight_scale_inv")
    assert manifest.source["quantisation_error"] is None


@pytest.mark.parametrize("scale_suffix", ["weight_scale_inv", "scale"])
@pytest.mark.parametrize("scale_dtype", ["F32", "BF16", "F16"])
def test_both_scale_names_in_every_exact_type(tmp_path: Path, scale_suffix: str, scale_dtype: str) -> None:
    made = make_checkpoint(tmp_path / "src", scale_suffix=scale_suffix, scale_dtype=scale_dtype)
    assert_same_experts(made, convert(tmp_path / "src", tmp_path / "dst"), scale_suffix)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_wide_sources_are_rounded_block_by_block(tmp_path: Path, dtype: str) -> None:
    made = make_checkpoint(tmp_path / "src", dtype=dtype, moe_intermediate_size=200, hidden_size=136)
    manifest = convert(tmp_path / "src", tmp_path / "dst", verify=True)
    squares = errors = flushed = 0.0
    for layer in manifest.expert_layers:
        for expert in range(manifest.num_experts):
            got = decoded(manifest, layer, expert)
            for projection in PROJECTIONS:
                weights = made.array(f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight")
                if dtype == "BF16":
                    weights = (weights.astype(np.uint32) << 16).view(np.float32)
                weights = weights.astype(np.float32)
                codes, scales, _ = e4m3.quantise_blocks(weights)
                assert getattr(got, projection).tobytes() == codes.tobytes()
                assert getattr(got, f"{projection}_scales").tobytes() == scales.tobytes()
                value = e4m3.dequantise(codes, scales).astype(np.float64)
                errors += np.sum((value - weights) ** 2)
                squares += np.sum(weights.astype(np.float64) ** 2)
                flushed += np.count_nonzero((value == 0) & (weights != 0))
    report = manifest.source["quantisation_error"]
    assert report["rms_relative"] == pytest.approx((errors / squares) ** 0.5, rel=1e-4)
    assert 0.02 < report["rms_relative"] < 0.03
    assert report["flushed"] == flushed
    assert report["weights"] == 3 * 3 * 4 * 200 * 136


def test_host_tensors_are_copied_byte_for_byte_into_a_file_a_layer(tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path / "src")
    manifest = convert(tmp_path / "src", tmp_path / "dst")
    assert sorted(manifest.host_files) == [f"host-0000{n}.safetensors" for n in range(4)] + [
        "host-other.safetensors"
    ]
    seen = {}
    for file in manifest.host_files:
        for name, info in read_header(tmp_path / "dst" / file).items():
            assert file == (
                "host-other" if "layers" not in name else f"host-{int(name.split('.')[2]):05d}"
            ) + (".safetensors")
            data = info.path.read_bytes()[info.offset : info.offset + info.num_bytes]
            seen[name] = (info.dtype, info.shape, data)
        with safe_open(tmp_path / "dst" / file, "np") as opened:
            assert set(opened.keys()) <= set(seen)
    assert seen == {name: entry for name, entry in made.tensors.items() if ".experts." not in name}


def test_the_folder_and_its_hashes(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "src")
    manifest = convert(tmp_path / "src", tmp_path / "dst")
    assert manifest == Manifest.load(tmp_path / "dst")
    names = {path.name for path in (tmp_path / "dst").iterdir()}
    experts = {f"experts-0000{n}.safetensors" for n in (1, 2, 3)}
    assert names == {"duck.json", "config.json", "tokenizer.json", *manifest.host_files, *experts}
    assert (tmp_path / "dst/config.json").read_bytes() == (tmp_path / "src/config.json").read_bytes()
    for name, entry in manifest.host_files.items():
        data = (tmp_path / "dst" / name).read_bytes()
        assert (hashlib.sha256(data).hexdigest(), len(data)) == (entry.sha256, entry.bytes)
    for layer, entry in manifest.expert_layers.items():
        file = ExpertFile.open(manifest, layer)
        assert file.data_offset % 4096 == 0
        assert file.path.stat().st_size == entry.bytes == file.data_offset + file.units.size
        stripe = b"".join(file.units[expert, 2].tobytes() for expert in range(4))
        assert entry.stripe_sha256[2] == hashlib.sha256(stripe).hexdigest()
    content = json.loads((tmp_path / "dst/duck.json").read_text())
    for key in ("model_hash", "created_by", "source"):
        del content[key]
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    assert manifest.model_hash == hashlib.sha256(canonical).hexdigest()


def test_one_file_and_many_shards_give_the_same_model(tmp_path: Path) -> None:
    hashes = set()
    for shards in (1, 2, 7):
        make_checkpoint(tmp_path / f"src{shards}", shards=shards)
        hashes.add(convert(tmp_path / f"src{shards}", tmp_path / f"dst{shards}").model_hash)
    assert len(hashes) == 1


def test_another_weight_gives_another_hash(tmp_path: Path) -> None:
    def flip(tensors: dict) -> None:
        dtype, shape, data = tensors["model.layers.2.mlp.experts.3.up_proj.weight"]
        tensors["model.layers.2.mlp.experts.3.up_proj.weight"] = (
            dtype,
            shape,
            bytes([data[0] ^ 1]) + data[1:],
        )

    make_checkpoint(tmp_path / "a")
    make_checkpoint(tmp_path / "b", edit=flip)
    a, b = convert(tmp_path / "a", tmp_path / "da"), convert(tmp_path / "b", tmp_path / "db")
    assert a.model_hash != b.model_hash
    assert a.host_files == b.host_files
    differing = [n for n in a.expert_layers if a.expert_layers[n] != b.expert_layers[n]]
    assert differing == [2]


def test_checkpoints_without_the_mtp_layer(tmp_path: Path) -> None:
    def drop(tensors: dict) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.3.")]:
            del tensors[name]

    make_checkpoint(tmp_path / "src", edit=drop)
    assert sorted(convert(tmp_path / "src", tmp_path / "dst").expert_layers) == [1, 2]


def test_layer_kinds_named_one_by_one(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "src", mlp_layer_types=["sparse", "dense", "sparse"])
    assert sorted(convert(tmp_path / "src", tmp_path / "dst").expert_layers) == [0, 2, 3]


def test_a_checkpoint_that_transformers_saved(tmp_path: Path) -> None:
    import torch
    from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 40, "n_routed_experts": 4}
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
    }
    rest = {"q_lora_rank": 32, "kv_lora_rank": 32, "v_head_dim": 16, "index_head_dim": 32, "index_n_heads": 2}
    groups = {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
    settings = DeepseekV32Config(vocab_size=64, num_hidden_layers=3, **sizes, **heads, **rest, **groups)
    model = DeepseekV32ForCausalLM(settings).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "src")
    manifest = convert(tmp_path / "src", tmp_path / "dst", verify=True)
    assert sorted(manifest.expert_layers) == [1, 2]
    got = decoded(manifest, 2, 3)
    value = e4m3.dequantise(got.down, got.down_scales)
    expected = model.model.layers[2].mlp.experts.down_proj[3].float().detach().numpy()
    assert np.sqrt(np.mean((value - expected) ** 2) / np.mean(expected**2)) < 0.03


def test_the_demo_model_comes_back_bit_for_bit(tmp_path: Path, demo_checkpoint: Path) -> None:
    manifest = convert(demo_checkpoint, tmp_path / "demo", verify=True)
    assert sorted(manifest.expert_layers) == [1, 2, 3, 4, 5, 6]
    assert (manifest.num_experts, manifest.num_experts_per_tok, manifest.num_stripes) == (32, 4, 8)
    source = Checkpoint.open(demo_checkpoint).tensors
    info = source["model.layers.6.mlp.experts.31.down_proj.weight"]
    data = info.path.read_bytes()[info.offset : info.offset + info.num_bytes]
    assert decoded(manifest, 6, 31).down.tobytes() == data


def test_progress_counts_every_byte_once(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "src")
    calls: list[tuple[str, int, int]] = []
    manifest = convert(tmp_path / "src", tmp_path / "dst", progress=lambda *call: calls.append(call))
    total = sum(entry.bytes for entry in manifest.host_files.values())
    total += sum(entry.bytes for entry in manifest.expert_layers.values())
    assert calls[-1][1:] == (total, total)
    done = [call[1] for call in calls]
    assert done == sorted(done)
    assert {call[2] for call in calls} == {total}


@pytest.mark.parametrize("dtype", ["F8_E4M3", "BF16"])
def test_both_formats_hold_the_same_weights_and_host_files(tmp_path: Path, dtype: str) -> None:
    make_checkpoint(tmp_path / "src", dtype=dtype)
    nine = convert(tmp_path / "src", tmp_path / "fp9")
    eight = convert(tmp_path / "src", tmp_path / "fp8", weight_format="fp8", verify=True)
    assert nine.format == "fp9"  # the default
    assert nine.host_files == eight.host_files
    assert nine.source == eight.source
    assert nine.model_hash != eight.model_hash
    for layer in nine.expert_layers:
        for expert in range(nine.num_experts):
            one, other = decoded(nine, layer, expert), decoded(eight, layer, expert)
            for name in ("gate", "up", "down", "gate_scales", "up_scales", "down_scales"):
                assert getattr(one, name).tobytes() == getattr(other, name).tobytes(), name
    assert sum(len(set(decoded(nine, 1, expert).gate.flat)) for expert in range(4)) > 400


def test_a_conversion_of_the_other_format_is_left_alone(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "src")
    convert(tmp_path / "src", tmp_path / "dst", weight_format="fp8")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "dst").iterdir()}
    with pytest.raises(ConfigError, match="it holds one in fp8"):
        convert(tmp_path / "src", tmp_path / "dst")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "dst").iterdir()} == before


def test_converting_again_changes_nothing(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "src")
    first = convert(tmp_path / "src", tmp_path / "dst")
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "dst").iterdir()}
    assert convert(tmp_path / "src", tmp_path / "dst") == first
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "dst").iterdir()} == before


def test_a_tokenizer_that_changed_is_copied_again(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "src")
    first = convert(tmp_path / "src", tmp_path / "dst")
    (tmp_path / "src/tokenizer.json").write_text('{"new": 1}')
    (tmp_path / "src/chat_template.jinja").write_text("{{ new }}")
    before = (tmp_path / "dst/host-00000.safetensors").stat().st_mtime_ns
    assert convert(tmp_path / "src", tmp_path / "dst") == first
    assert (tmp_path / "dst/tokenizer.json").read_text() == '{"new": 1}'
    assert (tmp_path / "dst/chat_template.jinja").read_text() == "{{ new }}"
    assert (tmp_path / "dst/host-00000.safetensors").stat().st_mtime_ns == before


def other_model(dst: Path) -> None:
    make_checkpoint(dst.parent / "other", seed=9)
    convert(dst.parent / "other", dst)


def other_part(dst: Path) -> None:
    dst.mkdir()
    (dst / ".duck-progress.json").write_text(
        json.dumps({"fingerprint": "x", "format": "fp9", "files": {}, "errors": {}})
    )


def other_files(dst: Path) -> None:
    dst.mkdir()
    (dst / "thesis.txt").write_text("keep me")


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (other_model, "another model"),
        (other_part, "a part of another model"),
        (other_files, "it holds other files"),
        (lambda dst: dst.write_text("a file"), "expected a folder"),
    ],
)
def test_a_destination_with_something_else_is_left_alone(
    tmp_path: Path, prepare: Callable[[Path], None], reason: str
) -> None:
    make_checkpoint(tmp_path / "src")
    dst = tmp_path / "dst"
    prepare(dst)
    before = {path: path.stat().st_mtime_ns for path in [dst, *dst.glob("*")]}
    with pytest.raises(ConfigError, match=reason):
        convert(tmp_path / "src", dst)
    assert {path: path.stat().st_mtime_ns for path in [dst, *dst.glob("*")]} == before


@pytest.mark.parametrize("place", [".", "inside", "inside/deep", "../src"])
def test_a_destination_in_the_source_is_refused(tmp_path: Path, place: str) -> None:
    make_checkpoint(tmp_path / "src")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match=r"dst: got .* expected a folder outside the source"):
        convert(tmp_path / "src", tmp_path / "src" / place)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "src")
    with pytest.raises(ConfigError, match="format: got 'fp4', expected one of auto, fp9, fp8, int8, int4"):
        convert(tmp_path / "src", tmp_path / "dst", weight_format="fp4")
    assert not (tmp_path / "dst").exists()
