"""The host part on a GPU: the logits of a CPU host, and the same bits however a step is computed."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
import torch

from duckllm.assembly_experts import experts_of_gpu
from duckllm.layers.step import SequenceStep
from duckllm.models.causal_lm import CausalLM, MoEBlock
from duckllm.models.mtp import MTPLayer
from duckllm.models.registry import load_config, load_model
from duckllm.moe.local import LocalExperts
from duckllm.weights.host_tensors import HostTensors
from duckllm.weights.manifest import Manifest
from parity import test_deepseek_v3, test_deepseek_v32, test_glm_moe_dsa, test_gqa_models
from support.choices import followed, recorded
from support.drafting import GROUPED, SPARSE, make_model
from support.families import Case, Spec, make_case
from support.models import all_logits, build_model

pytestmark = pytest.mark.gpu

SPECS: dict[str, Spec] = {
    f"{module.__name__.rpartition('test_')[2]}-{name}": spec
    for module in (test_deepseek_v3, test_deepseek_v32, test_glm_moe_dsa)
    for name, spec in module.SPECS.items()
} | {spec.name: spec for spec in test_gqa_models.SPECS}
# The cache rounds to 8 bits and activations to 11: of logits' standard deviation, some thousandths.
TOLERANCE = 0.02
# Choices of experts and tokens that a CPU host makes, too; the others are between near equals.
LEAST_AGREEMENT = 0.95


def gpu_model(folder: Path, max_tokens: int = 512) -> CausalLM:
    manifest, device = Manifest.load(folder), torch.device("cuda")
    local = LocalExperts(manifest, max_step_tokens=max_tokens)
    sizes = manifest.hidden_size, manifest.num_experts_per_tok
    server = local.server(max_tokens=64, num_threads=2)
    experts = experts_of_gpu(local, server, *sizes, device)
    return load_model(load_config(folder), HostTensors(folder), experts, max_tokens=max_tokens, device=device)


@pytest.fixture(scope="module", params=list(SPECS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("model"), SPECS[request.param])


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The root mean square of what logits differ by, over their standard deviation."""
    assert got.shape == expected.shape
    assert expected.std() > 1, "logits near zero would agree with anything"
    return float((got - expected).square().mean().sqrt() / expected.std())


def test_logits_are_those_of_the_cpu(case: Case) -> None:
    """Whole, which no graph takes, in chunks, and token by token; tests/parity has the CPU's."""
    model, cpu_model = gpu_model(case.folder), build_model(case.folder)
    model.captured = None
    for step_tokens in (len(case.token_ids), 7, 1):
        with recorded() as choices:
            logits = all_logits(model, case.token_ids, step_tokens)
        with followed(choices):
            expected = all_logits(cpu_model, case.token_ids, step_tokens)
        got, agreement = relative(logits, expected), statistics.fmean(choices.agreement or [1.0])
        print(f"cuda, {case.spec.name}, {step_tokens} tokens a step: {got:.2g}, {agreement:.1%} chosen alike")
        assert got <= TOLERANCE, f"{step_tokens} tokens a step"
        assert agreement >= LEAST_AGREEMENT, f"{step_tokens} tokens a step"


def test_a_graph_gives_the_bits_of_its_kernels(case: Case) -> None:
    model = gpu_model(case.folder)
    captured = [all_logits(model, case.token_ids, step_tokens) for step_tokens in (5, 1)]
    model.captured = None
    for logits, step_tokens in zip(captured, (5, 1), strict=True):
        assert torch.equal(logits, all_logits(model, case.token_ids, step_tokens))
    assert torch.equal(*captured), "rows of a step have other bits than alone"


def test_two_lanes_give_the_bits_of_one(case: Case) -> None:
    """Contexts in different lanes, and one context in both."""
    model = gpu_model(case.folder)
    tokens, half = torch.tensor(case.token_ids), len(case.token_ids) // 2

    def run(num_lanes: int) -> torch.Tensor:
        cache = model.new_kv_cache(2 * 128)
        pages = [torch.arange(8).int().numpy() + 8 * context for context in range(2)]
        outputs = []
        for position in range(0, half, 3):
            step = tokens[position : position + 3], tokens[half + position : half + position + 3]
            if num_lanes == 2:
                lanes = [
                    (rows, [SequenceStep.of(0, position, len(rows), pages[context], 16)])
                    for context, rows in enumerate(step)
                ]
            else:
                first, second = map(len, step)
                sequences = [
                    SequenceStep.of(0, position, first, pages[0], 16),
                    SequenceStep.of(first, position, second, pages[1], 16),
                ]
                lanes = [(torch.cat(step), sequences)]
            outputs.append(model.compute_logits(model.forward_lanes(lanes, cache)))
        # The next rows of the first context, of which the second lane sees what the first one stores.
        rows = tokens[:4]
        whole = [(rows, [SequenceStep.of(0, half, 4, pages[0], 16)])]
        cut = [
            (rows[:2], [SequenceStep.of(0, half, 2, pages[0], 16)]),
            (rows[2:], [SequenceStep.of(0, half + 2, 2, pages[0], 16)]),
        ]
        hidden = model.forward_lanes(cut if num_lanes == 2 else whole, cache)
        return torch.cat([*outputs, model.compute_logits(hidden)])

    assert torch.equal(run(1), run(2))


@pytest.mark.parametrize("spec", [SPARSE, GROUPED], ids=["sparse", "grouped"])
def test_drafts_are_those_of_the_cpu(spec: Spec, tmp_path: Path) -> None:
    model, mtp = make_model(tmp_path, spec, max_tokens=128)
    vocab_size = model.config.vocab_size
    tokens = torch.randint(0, vocab_size, (60,), generator=torch.Generator().manual_seed(1))
    on_gpu = gpu_model(tmp_path / "converted", 128)
    experts = next(layer.mlp.experts for layer in on_gpu.layers if isinstance(layer.mlp, MoEBlock))
    gpu_mtp = MTPLayer(on_gpu, HostTensors(tmp_path / "converted"), experts)

    def drafts(model: CausalLM, mtp: MTPLayer) -> torch.Tensor:
        step = [SequenceStep.of(0, 0, len(tokens) - 1)]
        hidden = model.forward(tokens[:-1], step, model.new_kv_cache(128))
        cache = mtp.new_kv_cache(128)
        drafted = [mtp.forward(hidden[:40], tokens[1:41], [SequenceStep.of(0, 0, 40)], cache)]
        for row in range(40, len(tokens) - 1):
            one = [SequenceStep.of(0, row, 1)]
            drafted.append(mtp.forward(hidden[row : row + 1], tokens[row + 1 : row + 2], one, cache))
        return model.compute_logits(torch.cat(drafted))

    captured, on_gpu.captured = drafts(on_gpu, gpu_mtp), None
    with recorded() as choices:
        logits = drafts(on_gpu, gpu_mtp)
    assert torch.equal(captured, logits)
    with followed(choices):
        expected = drafts(model, mtp)
    assert relative(logits, expected) <= TOLERANCE
    assert statistics.fmean(choices.agreement) >= LEAST_AGREEMENT
