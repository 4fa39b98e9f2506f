"""Tensors that are missing, misnamed or none of the model's: all named at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from random_checkpoint import make_checkpoint

from duckllm.errors import CheckpointError
from duckllm.weights.convert import convert
from duckllm.weights.safetensors_file import read_header

TWO = bytes(4)
NO_WEIGHT = "scale(s) or packed weight(s) that belong to no quantised weight"


def refused(tmp_path: Path, edit: Callable[[dict], object], **options: object) -> str:
    make_checkpoint(tmp_path / "src", edit=edit, **options)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError) as caught:
        convert(tmp_path / "src", tmp_path / "dst")
    message = str(caught.value)
    assert "\n" not in message
    assert not (tmp_path / "dst").exists()
    return message.removeprefix(f"{tmp_path / 'src'}: ")


def test_everything_is_named_in_one_sentence(tmp_path: Path) -> None:
    expert = "model.layers.2.mlp.experts.1."

    def edit(tensors: dict) -> None:
        tensors["model.layers.0.self_attn.q_a_norm.weight"] = tensors.pop(
            "model.layers.0.self_attn.q_a_layernorm.weight"
        )
        tensors[expert + "gate_projection.weight"] = tensors.pop(expert + "gate_proj.weight")
        del tensors[expert + "gate_proj.weight_scale_inv"]
        del tensors["model.layers.1.mlp.gate.weight"]
        tensors["model.vision.patches.weight"] = ("BF16", (2,), TWO)
        tensors["model.norm.weight"] = ("I16", (72,), bytes(144))
        tensors["model.layers.0.mlp.up_proj.weight_scale_inv"] = ("F32", (2, 1), bytes(8))
        tensors["lm_head.weight"] = ("BF16", (39, 72), bytes(39 * 144))

    assert refused(tmp_path, edit) == (
        "3 missing tensor(s): model.layers.0.self_attn.q_a_layernorm.weight, model.layers.1.mlp.gate.weight, "
        f"{expert}gate_proj.weight; "
        "model.norm.weight: got dtype I16, expected F8_E4M3, BF16, F16 or F32; "
        "lm_head.weight: got shape [39, 72], expected [40, 72]; "
        "model.layers.0.mlp.up_proj.weight_scale_inv: got shape [2, 1], expected [1, 1] "
        "(one scale per block of 128 x 128) for 80 x 72 weights; "
        "3 unknown tensor(s): model.layers.0.self_attn.q_a_norm.weight "
        "(did you mean model.layers.0.self_attn.q_a_layernorm.weight?), "
        f"{expert}gate_projection.weight (did you mean {expert}gate_proj.weight?), "
        "model.vision.patches.weight"
    )


def test_hints_stay_in_their_layer(tmp_path: Path) -> None:
    def edit(tensors: dict) -> None:
        del tensors["model.layers.1.input_layernorm.weight"]
        tensors["model.layers.2.input_layernorms.weight"] = ("BF16", (72,), bytes(144))

    message = refused(tmp_path, edit)
    assert message.endswith("1 unknown tensor(s): model.layers.2.input_layernorms.weight")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.layers.9.input_layernorm.weight", "tensor(s) of a layer that config.json has not"),
        ("model.layers.9.embed_tokens.bias", "tensor(s) of a layer that config.json has not"),
        ("model.layers.1.mlp.experts.4.up_proj.weight", "tensor(s) of an expert that config.json has not"),
        ("model.layers.0.self_attn.o_proj.weight_zero_point", NO_WEIGHT),
        ("model.layers.0.self_attn.o_proj.qweight", NO_WEIGHT),
        ("model.embed_tokens.weight_scale", NO_WEIGHT),
    ],
)
def test_what_kind_of_unknown_it_is(tmp_path: Path, name: str, words: str) -> None:
    assert refused(tmp_path, lambda t: t.update({name: ("BF16", (2,), TWO)})) == f"1 {words}: {name}"


def test_more_than_a_hundred(tmp_path: Path) -> None:
    added = {f"extra.{number}.weight": ("BF16", (2,), TWO) for number in range(150)}
    message = refused(tmp_path, lambda t: t.update(added))
    assert message.startswith("150 unknown tensor(s): extra.0.weight, ")
    assert message.endswith("extra.99.weight and 50 more")


def test_misnamed_weights_show_before_their_scales(tmp_path: Path) -> None:
    """However many there are."""

    def edit(tensors: dict) -> None:
        for name in [name for name in tensors if ".experts." in name]:
            tensors[name.replace("_proj", "_projection")] = tensors.pop(name)

    sizes = {"n_routed_experts": 20, "num_hidden_layers": 4}
    message = refused(tmp_path, edit, **sizes)
    name = "model.layers.1.mlp.experts.0.gate_proj"
    assert message.startswith(f"240 missing tensor(s): {name}.weight, ")
    assert f"; 240 unknown tensor(s): {name}ection.weight (did you mean {name}.weight?), " in message
    assert f"; 240 {NO_WEIGHT}: {name}ection.weight_scale_inv, " in message
    assert message.endswith(" and 140 more")


def test_what_does_no_harm_is_left_out(tmp_path: Path) -> None:
    """Positions that are computed here, and the MTP layer's copies of the embeddings and the head."""
    names = [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.rotary_emb.inv_freq",
        "model.layers.3.embed_tokens.weight",
        "model.layers.3.shared_head.head.weight",
    ]
    added = {name: ("BF16", (2,), TWO) for name in names}
    make_checkpoint(tmp_path / "with", edit=lambda t: t.update(added))
    make_checkpoint(tmp_path / "without")
    found = convert(tmp_path / "with", tmp_path / "dst-with", verify=True)
    assert found.model_hash == convert(tmp_path / "without", tmp_path / "dst-without").model_hash
    for file in found.host_files:
        assert not set(names) & set(read_header(tmp_path / "dst-with" / file))


def test_the_indexer_of_a_layer_that_shares_a_selection_is_left_out(tmp_path: Path) -> None:
    """Only where the layer has no use for it, and only an indexer."""
    name = "model.layers.1.self_attn.indexer.wk.weight"
    glm = {"architectures": ["GlmMoeDsaForCausalLM"], "indexer_types": ["full", "shared", "full"]}

    def edit(tensors: dict) -> None:
        assert name not in tensors
        tensors[name] = ("BF16", (2,), TWO)

    make_checkpoint(tmp_path / "with", edit=edit, **glm)
    found = convert(tmp_path / "with", tmp_path / "to")
    assert not any(name in read_header(tmp_path / "to" / file) for file in found.host_files)
    odd = name.replace("wk", "other")
    for layer, options in ((2, glm), (1, {})):
        other = odd.replace("layers.1", f"layers.{layer}")
        message = refused(tmp_path, lambda t, n=other: t.update({n: ("BF16", (2,), TWO)}), **options)
        assert message == f"1 unknown tensor(s): {other}"


def test_copies_of_the_embeddings_are_harmless_in_mtp_layers_only(tmp_path: Path) -> None:
    name = "model.layers.2.embed_tokens.weight"
    message = refused(tmp_path, lambda t: t.update({name: ("BF16", (2,), TWO)}))
    assert message == f"1 unknown tensor(s): {name}"


def test_tied_embeddings(tmp_path: Path) -> None:
    """The head may be missing, or there once more; another one would be ignored without a word."""

    def with_head(tensors: dict) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    def other_head(tensors: dict) -> None:
        dtype, shape, data = tensors["model.embed_tokens.weight"]
        tensors["lm_head.weight"] = (dtype, shape, data[:-1] + bytes([data[-1] ^ 1]))

    hashes = set()
    for name, edit in (("without", None), ("with", with_head)):
        make_checkpoint(tmp_path / name, edit=edit, tie_word_embeddings=True)
        manifest = convert(tmp_path / name, tmp_path / f"dst-{name}", verify=True)
        hashes.add(manifest.model_hash)
        assert list(read_header(tmp_path / f"dst-{name}/host-other.safetensors")) == [
            "model.embed_tokens.weight",
            "model.norm.weight",
        ]
    assert len(hashes) == 1
    message = refused(tmp_path, other_head, tie_word_embeddings=True)
    assert message == (
        "1 tensor(s) other than model.embed_tokens.weight, expected the same by tie_word_embeddings: "
        "lm_head.weight"
    )


def test_an_untied_head_must_be_there(tmp_path: Path) -> None:
    message = refused(tmp_path, lambda t: t.pop("lm_head.weight"), tie_word_embeddings=False)
    assert message == "1 missing tensor(s): lm_head.weight"


def test_files_of_every_tokenizer_are_copied(tmp_path: Path) -> None:
    kept = (
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "tekken.json",
        "tiktoken.model",
        "qwen.tiktoken",
        "NOTICE",
    )
    make_checkpoint(tmp_path / "src")
    for name in (*kept, "modeling_duck.py", "tokenization_duck.py", "notes.txt", "pytorch_model.bin"):
        (tmp_path / "src" / name).write_text(json.dumps(name))
    convert(tmp_path / "src", tmp_path / "dst")
    others = {path.name for path in (tmp_path / "dst").iterdir() if not path.name.endswith(".safetensors")}
    assert others == {"config.json", "tokenizer.json", "duck.json", *kept}
