"""The multi-token-prediction layer: against transformers' own, and what the demo model's predicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
import transformers
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from duckllm.demo import load_questions
from duckllm.errors import CheckpointError
from duckllm.layers.step import SequenceStep
from duckllm.models.causal_lm import CPU, CausalLM, runtime_for
from duckllm.models.mtp import MTPLayer
from duckllm.models.registry import load_config
from duckllm.moe.local import LocalExperts
from duckllm.text import Tokenizer
from duckllm.text.quiet import quiet_transformers
from duckllm.weights.convert import convert
from duckllm.weights.host_tensors import HostTensors
from duckllm.weights.manifest import Manifest
from support.families import Spec, add_mtp_layer, random_tokens, write_model
from support.models import TOLERANCE, build_model, difference
from support.reference import load_reference, ties_by_position

NUM_TOKENS = 32
COMMON: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 128,
    "intermediate_size": 96,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "max_position_embeddings": 256,
}
MLA = COMMON | {
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
}
INDEXER = {"index_n_heads": 16, "index_head_dim": 32, "index_topk": 8}
SPECS = {
    each.name: each
    for each in (
        Spec(
            "deepseek-v3",
            "DeepseekV3ForCausalLM",
            MLA | {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1},
        ),
        Spec("deepseek-v3.2", "DeepseekV32ForCausalLM", MLA | INDEXER | {"n_group": 1, "topk_group": 1}),
        # Its last layer has no indexer, and the layer behind it has one.
        Spec(
            "glm-5",
            "GlmMoeDsaForCausalLM",
            MLA | INDEXER | {"n_group": 1, "topk_group": 1, "indexer_types": ["full", "shared"]},
        ),
        # All layers but the one behind them are dense.
        Spec(
            "glm-4.5",
            "Glm4MoeForCausalLM",
            COMMON
            | {
                "num_key_value_heads": 2,
                "head_dim": 24,
                "use_qk_norm": True,
                "attention_bias": True,
                "first_k_dense_replace": 2,
            },
        ),
    )
}


@dataclass(frozen=True)
class Draft:
    """A model with its MTP layer, and what transformers makes of some tokens."""

    model: CausalLM
    mtp: MTPLayer
    token_ids: torch.Tensor
    expected: torch.Tensor


def load_mtp(folder: Path) -> tuple[CausalLM, MTPLayer]:
    experts = LocalExperts(Manifest.load(folder), max_step_tokens=512)
    model = build_model(folder, experts)
    return model, MTPLayer(model, HostTensors(folder), experts)


def hidden_states(model: CausalLM, tokens: torch.Tensor, step_tokens: int = 512) -> torch.Tensor:
    """The model's, of each token but the last, ``step_tokens`` at a time."""
    caches, states = model.new_kv_cache(len(tokens) - 1), []
    for start, chunk in chunks(tokens[:-1], step_tokens):
        states.append(model.forward(chunk, [SequenceStep.of(0, start, len(chunk))], caches))
    return torch.cat(states)


def draft_logits(
    mtp: MTPLayer, hidden: torch.Tensor, tokens: torch.Tensor, step_tokens: int = 512
) -> torch.Tensor:
    """Of each token but the last, the logits of the token after the next, ``step_tokens`` at a time."""
    cache, logits = mtp.new_kv_cache(len(hidden)), []
    for tensor in cache:
        tensor.fill_(torch.nan)  # whatever is read before it is written shows
    for start, chunk in chunks(tokens[1:], step_tokens):
        step = [SequenceStep.of(0, start, len(chunk))]
        drafted = mtp.forward(hidden[start : start + len(chunk)], chunk, step, cache)
        logits.append(mtp.model.compute_logits(drafted))
    return torch.cat(logits)


def chunks(tokens: torch.Tensor, size: int) -> Iterator[tuple[int, torch.Tensor]]:
    return zip(range(0, len(tokens), size), tokens.split(size), strict=True)


def load_reference_mtp(checkpoint: Path, model: transformers.PreTrainedModel) -> MtpModel:
    """Transformers' MTP layer of a checkpoint, told what it does not know of small or sparse models."""
    config = model.config
    config.name_or_path, config.num_mtp_layers = str(checkpoint), 1
    if getattr(config, "mlp_layer_types", None) is not None:
        config.mtp_mlp_layer_types = ["sparse"]
    if getattr(config, "layer_types", None) is not None:
        config.mtp_layer_types = config.layer_types[:1]
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{config.num_hidden_layers}\."]
    with quiet_transformers():
        mtp = MtpModel.from_pretrained(model)
    # GLM-5's layer hands out its selection too.
    mtp.layers[0].mtp_block.register_forward_hook(
        lambda module, args, output: output[0] if isinstance(output, tuple) else output
    )
    return mtp.eval()


@torch.inference_mode()
def reference_logits(
    model: transformers.PreTrainedModel, mtp: MtpModel, tokens: torch.Tensor
) -> torch.Tensor:
    """As :func:`draft_logits`. Positions are those of the tokens that follow, as in its ``generate``."""
    with ties_by_position():
        states = model(tokens[None, :-1], use_cache=False, output_hidden_states=True).hidden_states[-1]
        positions = torch.arange(1, len(tokens))[None]
        cache = MtpCache(config=mtp.config)
        if getattr(mtp.config, "layer_types", None) is not None:
            mtp.config.layer_types = ["full_attention"]  # for the mask; an indexer's layer takes the same
        drafted = mtp.forward_layer(0, states, positions, cache, input_ids=tokens[None, 1:])
    return model.lm_head(drafted)[0]


@pytest.fixture(scope="module", params=list(SPECS))
def draft(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Draft:
    spec, root = SPECS[request.param], tmp_path_factory.mktemp("mtp")
    seed = crc32(spec.name.encode())
    write_model(root / "checkpoint", spec, seed)
    add_mtp_layer(root / "checkpoint", seed + 1)
    convert(root / "checkpoint", root / "converted")
    reference = load_reference(root / "checkpoint", getattr(transformers, spec.architecture))
    generator = torch.Generator().manual_seed(seed + 2)
    tokens = torch.tensor(random_tokens(reference.config, NUM_TOKENS, generator))
    expected = reference_logits(reference, load_reference_mtp(root / "checkpoint", reference), tokens)
    return Draft(*load_mtp(root / "converted"), tokens, expected)


class Unchanged:
    """Stands for a norm."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def add(self, hidden: torch.Tensor, deltas: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        total = sum(deltas, hidden)
        return total, total


unchanged = Unchanged()


def mistaken(mtp: MTPLayer, mistake: str) -> MTPLayer:
    """A copy that does something wrong: leaves out the norm of this name, or joins the other way round."""
    mtp, projection = copy(mtp), mtp.projection
    if mistake == "hidden state first":
        mtp.projection = lambda x: projection(torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1))
    else:
        assert callable(getattr(mtp, mistake))
        setattr(mtp, mistake, unchanged)
    return mtp


def without_last_norm(model: CausalLM) -> CausalLM:
    model = copy(model)
    model.norm = unchanged
    return model


@pytest.mark.parametrize("step_tokens", [NUM_TOKENS, 7, 1])
def test_logits_equal_transformers(draft: Draft, step_tokens: int) -> None:
    """The whole at once, in chunks and token by token."""
    hidden = hidden_states(draft.model, draft.token_ids, step_tokens)
    got = draft_logits(draft.mtp, hidden, draft.token_ids, step_tokens)
    assert difference(got, draft.expected) <= TOLERANCE


@pytest.mark.parametrize("mistake", ["embedding_norm", "hidden_norm", "norm", "hidden state first"])
def test_mistakes_of_the_layer_show(draft: Draft, mistake: str) -> None:
    hidden = hidden_states(draft.model, draft.token_ids)
    got = draft_logits(mistaken(draft.mtp, mistake), hidden, draft.token_ids)
    assert difference(got, draft.expected) > 100 * TOLERANCE


def test_mistakes_of_the_caller_show(draft: Draft) -> None:
    """Hidden states before the model's last norm; the tokens themselves, not those that follow."""
    raw = hidden_states(without_last_norm(draft.model), draft.token_ids)
    got = draft_logits(draft.mtp, raw, draft.token_ids)
    assert difference(got, draft.expected) > 100 * TOLERANCE
    hidden = hidden_states(draft.model, draft.token_ids)
    got = draft_logits(draft.mtp, hidden, draft.token_ids.roll(1))
    assert difference(got, draft.expected) > 100 * TOLERANCE


def test_contexts_in_one_step_are_apart(draft: Draft) -> None:
    """The first of them lies behind the second in the cache."""
    contexts, model, mtp = draft.token_ids.split((13, 19)), draft.model, draft.mtp
    sizes = [len(tokens) - 1 for tokens in contexts]
    states = [hidden_states(model, tokens) for tokens in contexts]
    behind = np.arange(sizes[1], sum(sizes), dtype=np.int32)
    step = [SequenceStep.of(0, 0, sizes[0], behind), SequenceStep.of(sizes[0], 0, sizes[1])]
    following = torch.cat([tokens[1:] for tokens in contexts])
    drafted = mtp.forward(torch.cat(states), following, step, mtp.new_kv_cache(sum(sizes)))
    together = model.compute_logits(drafted).split(sizes)
    for got, hidden, tokens in zip(together, states, contexts, strict=True):
        assert difference(got, draft_logits(mtp, hidden, tokens)) <= TOLERANCE


def test_the_layer_is_read_when_it_is_asked_for(demo_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of its tensors with the model; then every one of them, and no other."""
    read: list[str] = []
    get = HostTensors.get
    monkeypatch.setattr(HostTensors, "get", lambda self, name: (read.append(name), get(self, name))[1])
    tensors, experts = HostTensors(demo_folder), LocalExperts(Manifest.load(demo_folder))
    model = build_model(demo_folder, experts)
    before = set(read)
    MTPLayer(model, tensors, experts)
    own = {name for name in tensors.names() if name.startswith("model.layers.6.")}
    assert len(own) > 20
    assert before == set(tensors.names()) - own
    assert set(read) - before == own


def test_a_checkpoint_without_the_layer(tmp_path: Path) -> None:
    spec = SPECS["deepseek-v3"]
    write_model(tmp_path / "checkpoint", spec, seed=0)
    convert(tmp_path / "checkpoint", tmp_path / "converted")
    experts = LocalExperts(Manifest.load(tmp_path / "converted"))
    model = build_model(tmp_path / "converted", experts)
    with pytest.raises(CheckpointError, match=r"model\.layers\.2: got none, expected a layer of multi-token"):
        MTPLayer(model, HostTensors(tmp_path / "converted"), experts)


def test_native_layers_have_room_for_the_joined_input(demo_folder: Path) -> None:
    config = load_config(demo_folder)
    runtime = runtime_for(replace(config, hidden_size=5000), CPU)
    assert runtime.native.max_in_features == 10_000


@dataclass(frozen=True)
class Demo:
    """The demo model, and its hidden states before the last norm over conversations of one question."""

    model: CausalLM
    mtp: MTPLayer
    conversations: list[tuple[int, torch.Tensor, torch.Tensor]]  # tokens of the prompt, all tokens, states

    def drafts(
        self, mtp: MTPLayer, norm: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> tuple[float, float]:
        """Of the answers' tokens drafted two tokens before, how many are right, and their cross entropy."""
        logits, targets = [], []
        for num_prompt, tokens, raw in self.conversations:
            drafted = draft_logits(mtp, (norm or self.model.norm)(raw), tokens)
            logits.append(drafted[num_prompt - 1 : -1])
            targets.append(tokens[num_prompt + 1 :])
        every, target = torch.cat(logits), torch.cat(targets)
        assert len(target) > 200
        right = (every.argmax(-1) == target).float().mean()
        return float(right), float(torch.nn.functional.cross_entropy(every, target))


@pytest.fixture(scope="module")
def demo(demo_folder: Path) -> Demo:
    model, mtp = load_mtp(demo_folder)
    tokenizer, conversations = Tokenizer(demo_folder), []
    for question in load_questions()[::30]:
        messages = [{"role": "user", "content": question.question}]
        num_prompt = len(tokenizer.apply_chat_template(messages))
        messages.append({"role": "assistant", "content": question.answer})
        # The last token is the template's, and begins the next answer.
        tokens = torch.tensor(tokenizer.apply_chat_template(messages)[:-1])
        conversations.append((num_prompt, tokens, hidden_states(without_last_norm(model), tokens)))
    return Demo(model, mtp, conversations)


def test_the_demo_models_drafts_are_right(demo: Demo) -> None:
    """Every token was right, of these answers and of those to all 180 questions (5289 tokens)."""
    acceptance, loss = demo.drafts(demo.mtp)
    assert acceptance >= 0.995
    assert loss < 3e-4


@pytest.mark.parametrize(
    ("mistake", "most"), [("hidden state first", 0.1), ("embedding_norm", 0.7), ("hidden_norm", 0.7)]
)
def test_the_demo_model_is_trained_with_this_layer(demo: Demo, mistake: str, most: float) -> None:
    """Measured: 0.008, 0.52, 0.60."""
    assert demo.drafts(mistaken(demo.mtp, mistake))[0] < most


def test_the_demo_model_is_trained_with_the_last_norms(demo: Demo) -> None:
    """Without the model's or the layer's own, few tokens change, but how likely they are does.

    Measured: a cross entropy of 0.028 and 0.012 instead of 0.00003.
    """
    assert demo.drafts(demo.mtp, unchanged)[1] > 3e-3
    assert demo.drafts(mistaken(demo.mtp, "norm"))[1] > 3e-3


@pytest.mark.parametrize("step_tokens", [37, 1])
def test_chunks_of_the_demo_model_equal_the_whole(demo: Demo, step_tokens: int) -> None:
    _, tokens, raw = demo.conversations[0]
    tokens, raw = tokens[:60], raw[:59]
    whole = draft_logits(demo.mtp, demo.model.norm(raw), tokens)
    got = draft_logits(demo.mtp, demo.model.norm(raw), tokens, step_tokens)
    assert difference(got, whole) <= TOLERANCE
