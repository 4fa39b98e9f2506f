"""``duckllm calibrate``: what it records against plain loops, and the file."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from typer.testing import CliRunner

from duckllm.cli.calibrate import never_chosen
from duckllm.cli.main import app
from duckllm.errors import ConfigError
from duckllm.layers.step import SequenceStep
from duckllm.models.causal_lm import MoEBlock
from duckllm.models.mtp import MTPLayer
from duckllm.moe.executor import PendingStep
from duckllm.moe.local import LocalExperts
from duckllm.quality.calibrate import StoredExperts, calibrate, cut
from duckllm.quality.importance import Importance
from duckllm.quality.texts import Passage
from duckllm.weights.convert import convert
from duckllm.weights.host_tensors import HostTensors
from duckllm.weights.manifest import Manifest
from duckllm.weights.safetensors_file import TensorReader, read_header
from support.families import Spec, add_mtp_layer, write_model
from support.models import build_model

SPEC = Spec(
    "calibrated",
    "DeepseekV3ForCausalLM",
    {
        "vocab_size": 96,
        "hidden_size": 72,
        "intermediate_size": 96,
        "moe_intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "n_routed_experts": 12,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "max_position_embeddings": 128,
    },
)
PASSAGES = [
    Passage((5, 9, 33, 71, 2, 14, 14, 60), 1, 4),
    Passage((80, 3, 4), 1, 1),
    Passage((7, 8, 90, 11, 12), 1, 2),
]
NUM_TOKENS = sum(len(each.token_ids) for each in PASSAGES)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A random checkpoint with a layer that guesses, and its converted form."""
    root = tmp_path_factory.mktemp("calibrated")
    write_model(root / "checkpoint", SPEC, 11)
    add_mtp_layer(root / "checkpoint", 12)
    convert(root / "checkpoint", root / "converted")
    return root / "checkpoint", root / "converted"


@pytest.fixture(scope="module")
def importance(folders: tuple[Path, Path]) -> Importance:
    manifest = Manifest.load(folders[1])
    experts = LocalExperts(manifest, max_step_tokens=64)
    model = build_model(folders[1], experts)
    draft = MTPLayer(model, HostTensors(folders[1]), experts)
    found = Importance(72, 40, 12)
    done: list[float] = []
    calibrate(
        model,
        draft,
        PASSAGES,
        StoredExperts(manifest).gate_up,
        found,
        lambda name, share, total: done.append(share / total),
    )
    assert done == sorted(done)
    assert done[-1] == 1
    for layer in [*model.layers, draft.layer]:
        if isinstance(layer.mlp, MoEBlock):
            assert layer.mlp.experts is experts, "left as it was"
    return found


class Noting:
    """Experts that note each token's input and routing, by layer."""

    def __init__(self, inner: LocalExperts) -> None:
        self.inner = inner
        self.seen: dict[int, list[tuple[Any, list[int], list[float]]]] = defaultdict(list)

    def submit(
        self, layer: int, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, lane: int = 0
    ) -> PendingStep:
        for row, ids, weights in zip(x, topk_ids.tolist(), topk_weights.tolist(), strict=True):
            self.seen[layer].append((row.double().numpy().copy(), ids, weights))
        return self.inner.submit(layer, x, topk_ids, topk_weights, lane)


@pytest.fixture(scope="module")
def seen(folders: tuple[Path, Path]) -> dict[int, list[tuple[Any, list[int], list[float]]]]:
    """Inputs and routings of each passage computed by itself, a token at a time."""
    noting = Noting(LocalExperts(Manifest.load(folders[1]), max_step_tokens=1))
    model = build_model(folders[1], noting)
    draft = MTPLayer(model, HostTensors(folders[1]), noting)
    for passage in PASSAGES:
        cache, own = model.new_kv_cache(16), draft.new_kv_cache(16)
        for place, token in enumerate(passage.token_ids):
            step = [SequenceStep.of(0, place, 1)]
            hidden = model.forward(torch.tensor([token]), step, cache)
            if place + 1 < len(passage.token_ids):
                draft.forward(hidden, torch.tensor([passage.token_ids[place + 1]]), step, own)
    return noting.seen


def matrix(checkpoint: Path, name: str) -> np.ndarray:
    info = read_header(checkpoint / "model.safetensors")[name]
    with TensorReader() as reader:
        raw = reader.read(info)
    return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64).reshape(info.shape)


def test_means_are_those_of_plain_loops(
    folders: tuple[Path, Path], importance: Importance, seen: dict[int, Any]
) -> None:
    tensors = importance.tensors()
    assert sorted(seen) == [1, 2, 3]
    assert sorted(tensors) == sorted(
        f"layers.{n}.{part}" for n in (1, 2, 3) for part in ("hidden", "experts", "counts")
    )
    for layer, rows in seen.items():
        # The layer that guesses sees no token behind a passage's last one.
        assert len(rows) == NUM_TOKENS - (len(PASSAGES) if layer == 3 else 0)
        hidden = np.zeros(72)
        sums: dict[int, np.ndarray] = defaultdict(lambda: np.zeros(40))
        counts = np.zeros(12, int)
        for x, ids, weights in rows:
            hidden += x * x / len(rows)
            for expert, weight in zip(ids, weights, strict=True):
                prefix = f"model.layers.{layer}.mlp.experts.{expert}"
                gate, up = (matrix(folders[0], f"{prefix}.{part}_proj.weight") @ x for part in ("gate", "up"))
                sums[expert] += (weight * gate / (1 + np.exp(-gate)) * up) ** 2
                counts[expert] += 1
        assert 0 in counts, "an expert that nobody chooses is worth a test"
        means = np.stack([sums[expert] / max(1, counts[expert]) for expert in range(12)])
        assert tensors[f"layers.{layer}.counts"].tolist() == counts.tolist()
        np.testing.assert_allclose(tensors[f"layers.{layer}.hidden"], hidden, rtol=2e-4)
        np.testing.assert_allclose(
            tensors[f"layers.{layer}.experts"], means, rtol=2e-3, atol=1e-9 * means.max()
        )
        assert not tensors[f"layers.{layer}.experts"][counts == 0].any()


def test_the_file_has_what_its_page_says(tmp_path: Path, importance: Importance) -> None:
    importance.save(tmp_path / "file", "ab" * 32, NUM_TOKENS)
    with safe_open(tmp_path / "file", "np") as file:
        assert file.metadata() == {
            "format": "duckllm-calibration-1", "config_sha256": "ab" * 32, "num_tokens": str(NUM_TOKENS),
        }  # fmt: skip
        shapes = {name: (file.get_tensor(name).dtype, file.get_tensor(name).shape) for name in file.keys()}  # noqa: SIM118
    for layer in (1, 2, 3):
        assert shapes.pop(f"layers.{layer}.hidden") == (np.float32, (72,))
        assert shapes.pop(f"layers.{layer}.experts") == (np.float32, (12, 40))
        assert shapes.pop(f"layers.{layer}.counts") == (np.int64, (12,))
    assert not shapes


def test_so_many_tokens_and_no_more() -> None:
    passages = [Passage(tuple(range(10)), 1, 1)] * 20
    chosen = cut(passages, 64, 100)
    assert [len(each.token_ids) for each in chosen] == [10, 10, 10, 10, 10, 10, 4]
    assert [len(each.token_ids) for each in cut(passages, 1000, 6)] == [6] * 20
    short = [Passage((1,), 1, 1), *passages[:2]]  # a single token says nothing, those behind it do
    assert [len(each.token_ids) for each in cut(short, 64, 100)] == [10, 10]
    with pytest.raises(ConfigError, match="prompts"):
        cut([Passage((1,), 1, 1)], 64, 100)


def test_the_command_writes_a_file_of_the_demo_model(demo_folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "What is a duck?"}) + "\n")
    path = tmp_path / "demo.safetensors"
    arguments = [
        "calibrate",
        str(demo_folder),
        "--prompts",
        str(prompts),
        "-o",
        str(path),
        "--reply-tokens",
        "9",
    ]
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    with safe_open(path, "np") as file:
        metadata = file.metadata()
        counts = file.get_tensor("layers.3.counts")
    manifest = Manifest.load(demo_folder)
    assert metadata["config_sha256"] == manifest.config_sha256
    assert int(metadata["num_tokens"]) == found["num_tokens"]
    assert counts.sum() == found["num_tokens"] * manifest.num_experts_per_tok
    assert found["layers"] == len(manifest.expert_layers)
    assert found["experts_never_chosen"] > 0
    assert found["bytes"] == path.stat().st_size
    before = path.read_bytes()
    done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception) == f"output: got '{path}', expected the name of a file that is not there yet"
    assert path.read_bytes() == before


def test_experts_that_nobody_chose_are_counted_in_words() -> None:
    assert never_chosen(0, 192) == "each of 192 experts was chosen"
    assert never_chosen(1, 192) == "1 of 192 experts was never chosen"
    assert never_chosen(2, 192) == "2 of 192 experts were never chosen"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (["-o", "/nowhere/at/all"], "output"),
        (["-o", "{tmp}/x", "--tokens", "1"], "tokens"),
        (["-o", "{tmp}/x", "--window", "1"], "window"),
        (["-o", "{tmp}/x", "--reply-tokens", "-1"], "reply_tokens"),
        (["-o", "{tmp}/x", "--prompts", "/nowhere/at/all"], "prompts"),
    ],
)
def test_options_are_refused_by_name(
    demo_folder: Path, tmp_path: Path, options: list[str], field: str
) -> None:
    words = [word.replace("{tmp}", str(tmp_path)) for word in options]
    done = CliRunner().invoke(app, ["calibrate", str(demo_folder), *words])
    assert isinstance(done.exception, ConfigError)
    assert done.exception.field == field
    assert not (tmp_path / "x").exists()
