"""examples/train-demo: from WordNet's files to a checkpoint that the converter takes."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from duckllm.demo import load_questions
from duckllm.weights import e4m3
from duckllm.weights.convert import convert
from duckllm.weights.reader import ExpertFile
from duckllm.weights.units import unpack_expert_units

FILES = ("wordnet", "questions", "build_data", "model", "episodes", "export", "train")
LICENCE = "  1 This software and database is being provided to you\n"


class Example(NamedTuple):
    wordnet: ModuleType
    questions: ModuleType
    build_data: ModuleType
    model: ModuleType
    episodes: ModuleType
    export: ModuleType
    train: ModuleType


@pytest.fixture(scope="module")
def example() -> Iterator[Example]:
    folder = str(Path(__file__).resolve().parents[2] / "examples" / "train-demo")
    before = {name: sys.modules.pop(name, None) for name in FILES}
    sys.path.insert(0, folder)
    try:
        yield Example(*(importlib.import_module(name) for name in FILES))
    finally:
        sys.path.remove(folder)
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


@pytest.fixture(scope="module")
def wordnet_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three nouns, two verbs, in the database's own format."""
    folder = tmp_path_factory.mktemp("wordnet")
    data = {
        "noun": [
            "00000010 05 n 02 bird 0 fowl_of_the_air 0 003 ~ 00000020 n 0000 ~ 00000030 n 0000 "
            '+ 00000040 v 0101 | a warm-blooded animal with feathers; "the bird sang"; "a bird in hand"  ',
            "00000020 05 n 01 duck 0 001 @ 00000010 n 0000 | a web-footed swimming bird  ",
            "00000030 05 n 01 emu(p) 0 001 @i 00000010 n 0000 | a large flightless bird  ",
        ],
        "verb": [
            "00000040 29 v 01 duck 0 000 01 + 02 00 | to move quickly downwards  ",
            "00000050 29 v 01 duck 1 000 01 + 02 00 | to plunge; or to dive  ",
        ],
        "adj": ["00000060 00 s 01 swift 0 000 | moving very fast  "],
        "adv": ["00000070 02 r 01 fast 0 000 | quickly  "],
    }
    index = {
        "noun": [
            "bird n 1 2 ~ + 1 3 00000010  ",
            "duck n 1 1 @ 1 2 00000020  ",
            "emu n 1 1 @ 1 0 00000030  ",
        ],
        "verb": ["duck v 2 0 2 1 00000040 00000050  "],
        "adj": ["swift a 1 0 1 0 00000060  "],
        "adv": ["fast r 1 0 1 4 00000070  "],
    }
    for kind, parts in (("data", data), ("index", index)):
        for part, lines in parts.items():
            (folder / f"{kind}.{part}").write_text(LICENCE + "\n".join(lines) + "\n", encoding="latin-1")
    return folder


def test_the_database_is_read(example: Example, wordnet_folder: Path) -> None:
    wordnet = example.wordnet.load_wordnet(wordnet_folder)
    assert len(wordnet.synsets) == 7
    bird = wordnet.synsets["n", "00000010"]
    assert bird.words == ["bird", "fowl of the air"]
    assert bird.definition == "a warm-blooded animal with feathers"
    assert bird.examples == ["the bird sang", "a bird in hand"]
    assert bird.pointers[:2] == [("~", ("n", "00000020")), ("~", ("n", "00000030"))]
    assert bird.topic == 5
    assert wordnet.synsets["n", "00000030"].words == ["emu"]
    duck = wordnet.lemmas["duck"]
    assert duck["n"] == example.wordnet.Senses(2, ["00000020"])
    assert duck["v"] == example.wordnet.Senses(1, ["00000040", "00000050"])


def test_questions_and_answers(example: Example, wordnet_folder: Path) -> None:
    pairs = example.questions.all_pairs(example.wordnet.load_wordnet(wordnet_folder))
    answers = {question: pair.answer for pair in pairs for question in pair.questions}
    assert answers["What is a duck?"] == "noun: a web-footed swimming bird\nverb: to move quickly downwards"
    assert answers["Define emu."] == "noun: a large flightless bird"
    assert answers["An emu is a kind of what?"] == "An emu is a kind of bird."
    assert answers["Name some kinds of bird."] == "duck, emu."
    assert answers["Use bird in a sentence."] == "The bird sang."
    assert answers["Give a synonym for bird."] == "fowl of the air"
    assert "Define swift." not in answers, "a word that no tagged text uses"
    assert answers["Is 1001 prime?"] == "No, 1001 is not prime: 1001 = 7 x 11 x 13."
    assert answers["Is 1999 prime?"] == "Yes, 1999 is a prime number."
    assert answers["What are the first 5 primes?"] == "2, 3, 5, 7, 11."
    assert answers["List the primes below 12."] == "2, 3, 5, 7, 11."
    assert answers["12 x 12 = ?"] == "12 x 12 = 144."
    assert answers["What is 99 plus 1?"] == "99 + 1 = 100."


@pytest.fixture(scope="module")
def data(example: Example, wordnet_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    example.build_data.build(wordnet_folder, folder)
    return folder


def test_episodes_are_conversations(example: Example, data: Path) -> None:
    ids, weights = next(iter(example.episodes.Episodes(data, context=400, batch=3, seed=1)))
    assert ids.shape == weights.shape == (3, 401)
    tokenizer = Tokenizer.from_file(str(data / "tokenizer/tokenizer.json"))
    answers = {json.loads(line)[2] for line in (data / "pairs.jsonl").read_text().splitlines()}
    for row, weight in zip(ids.tolist(), weights.tolist(), strict=True):
        assert row[0] == example.episodes.BOS
        turns = tokenizer.decode(row, skip_special_tokens=False).split("<|user|>")[1:-1]
        assert len(turns) > 3
        for turn in turns:
            question, answer = turn.removesuffix("<|bos|>").removesuffix("<|eos|>").split("<|assistant|>")
            assert answer in answers or question.startswith("What was my")
        inside = False
        for token, value in zip(row, weight, strict=True):
            if token == example.episodes.BOS:
                assert value == 0
                continue
            assert value == pytest.approx(1.0 if inside else 0.1)
            inside = token == example.episodes.ASSISTANT or (inside and token != example.episodes.EOS)


def tiny_config(example: Example) -> object:
    return example.model.ModelConfig(
        vocab_size=1024, hidden_size=48, intermediate_size=64, moe_intermediate_size=40, num_hidden_layers=2,
        n_routed_experts=8, num_experts_per_tok=2, num_attention_heads=2, q_lora_rank=24, kv_lora_rank=24,
        index_n_heads=2, index_topk=8,
    )  # fmt: skip


def test_a_few_steps_then_export_then_conversion(
    example: Example, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--steps", "8", "--device", "cpu", "--context", "48", "--batch", "4", "--report-every", "1"]
    arguments = example.train.parse_arguments([str(data), str(tmp_path / "checkpoint"), *words])
    example.train.train(arguments, tiny_config(example))
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert len(lines) == 8
    losses, index_losses = ([float(line[line.index(key) + 1]) for line in lines] for key in ("loss", "index"))
    assert losses[-1] < losses[0]
    assert index_losses[:7] == [0] * 7
    assert index_losses[7] > 0, "the last phase trains the indexer"

    manifest = convert(tmp_path / "checkpoint", tmp_path / "converted", verify=True)
    assert sorted(manifest.expert_layers) == [1, 2]
    assert (manifest.hidden_size, manifest.moe_intermediate_size, manifest.num_experts) == (48, 40, 8)
    assert manifest.source["quantisation_error"] is None
    units = np.array(ExpertFile.open(manifest, 2).units[7])
    expert = unpack_expert_units(units, 40, 48, "fp9")
    with safe_open(tmp_path / "checkpoint/model-00001-of-00001.safetensors", "pt") as file:
        stored = file.get_tensor("model.layers.2.mlp.experts.7.down_proj.weight")
    assert expert.down.tobytes() == stored.view(torch.uint8).numpy().tobytes()


def test_the_course_of_training(example: Example) -> None:
    train, phase = example.train, example.model.Phase
    assert train.phase_of(10, 0.5) == phase()
    assert train.phase_of(10, 0.8) == phase(fake_quantise=True, indexer=True)
    assert train.phase_of(11, 0.8) == phase(fake_quantise=True)
    assert train.phase_of(11, 0.9) == phase(fake_quantise=True, indexer=True, sparse=True)
    assert train.learning_rate(0, 0.0) == pytest.approx(3e-3 / 200)
    assert train.learning_rate(500, 0.05) == 3e-3
    assert train.learning_rate(5000, 1.0) == pytest.approx(6e-5)


def test_quantising_for_export_is_the_formats(example: Example) -> None:
    weight = torch.randn(200, 130, generator=torch.Generator().manual_seed(1))
    values, scales = example.model.quantise_blocks(weight)
    codes, expected, _ = e4m3.quantise_blocks(weight.numpy())
    np.testing.assert_array_equal(scales.numpy(), expected)
    np.testing.assert_array_equal(values.view(torch.uint8).numpy(), codes)
    rounded = example.model.rounded(weight.requires_grad_(), example.model.Phase(fake_quantise=True))
    np.testing.assert_allclose(rounded.detach().numpy(), e4m3.dequantise(codes, expected), atol=1e-6)
    rounded.sum().backward()
    assert torch.equal(weight.grad, torch.ones(200, 130))


def shipped_model(example: Example, checkpoint: Path) -> torch.nn.Module:
    """The training model with the shipped weights."""
    tensors: dict[str, torch.Tensor] = {}
    for path in checkpoint.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    model = example.model.Model(example.model.ModelConfig())
    exported = example.export.checkpoint_tensors(model)
    assert {name: (t.dtype, t.shape) for name, t in exported.items()} == {
        name: (t.dtype, t.shape) for name, t in tensors.items()
    }
    weights = {}
    for name, tensor in tensors.items():
        if name + "_scale_inv" in tensors:
            tensor = example.model.dequantise_blocks(tensor, tensors[name + "_scale_inv"])
        weights[name.removeprefix("model.").replace("layers.6.", "mtp.")] = tensor.float()
    for name in ("enorm", "hnorm", "eh_proj"):
        weights[f"{name}.weight"] = weights.pop(f"mtp.{name}.weight")
    weights["mtp_norm.weight"] = weights.pop("mtp.shared_head.norm.weight")
    state = {}
    for name in model.state_dict():
        stem, _, projection = name.rpartition(".")
        if projection in ("gate_proj", "up_proj", "down_proj"):
            state[name] = torch.stack([weights[f"{stem}.experts.{e}.{projection}.weight"] for e in range(32)])
        elif name.endswith("mlp.gate"):
            state[name] = weights[name + ".weight"]
        elif name.endswith("mlp.e_score_correction_bias"):
            state[name] = weights[f"{stem}.gate.e_score_correction_bias"]
        else:
            state[name] = weights[name]
    model.load_state_dict(state)
    return model


def test_the_shipped_weights_are_this_models(example: Example, demo_checkpoint: Path) -> None:
    """A long conversation, so that the sparse attention decides: nearly every answer token is predicted."""
    model = shipped_model(example, demo_checkpoint)
    tokenizer = Tokenizer.from_file(str(demo_checkpoint / "tokenizer.json"))
    ids, counted = [0], [False]
    for question in [q for q in load_questions() if q.kind != "recall"][:24]:
        asked = [2, *tokenizer.encode(question.question).ids, 3]
        answer = [*tokenizer.encode(question.answer).ids, 1]
        ids += asked + answer
        counted += [False] * len(asked) + [True] * len(answer)
    assert len(ids) > 3 * model.config.index_topk
    phase = example.model.Phase(indexer=True, sparse=True)
    with torch.no_grad():
        hidden, draft = model(torch.tensor([ids]), phase)
        following = model.lm_head(hidden[0, :-1]).argmax(-1)
        second = model.lm_head(draft[0, :-1]).argmax(-1)
    target, mask = torch.tensor(ids), torch.tensor(counted)
    assert (following == target[1:])[mask[1:]].float().mean() > 0.98
    assert (second == target[2:])[mask[2:] & mask[1:-1]].float().mean() > 0.9
