"""The comparison of whole models: its checkpoint, its float32 logits, its GGUF, its sums; no other engine."""

from __future__ import annotations

import json
import math
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from duckllm.weights.convert import convert
from duckllm.weights.host_tensors import HostTensors
from duckllm.weights.manifest import Manifest

FOLDERS = [str(Path(__file__).parents[2] / "benchmarks" / name) for name in ("peers", "gpu")]
MODULES = ("peer_install", "whole_checkpoint", "gguf_writer", "whole_report", "whole_ours", "whole_model")
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}
LAYERS, VOCAB, Q8_0 = 2, 8192, 8


def quantize(values: np.ndarray, kind: int) -> np.ndarray:
    """Stands for gguf's: blocks of 32 as a scale in float16 and 32 codes of int8, by ggml's description."""
    assert kind == Q8_0
    blocks = values.reshape(-1, 32)
    scales = np.abs(blocks).max(1, keepdims=True) / 127
    codes = np.round(blocks / np.where(scales == 0, 1, scales)).astype(np.int8)
    packed = np.concatenate([scales.astype(np.float16).view(np.uint8), codes.view(np.uint8)], 1)
    return packed.reshape(*values.shape[:-1], -1)


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    kinds = SimpleNamespace(Q8_0=Q8_0)
    stand_in = SimpleNamespace(
        GGMLQuantizationType=kinds,
        GGML_QUANT_SIZES={Q8_0: (32, 34)},
        quants=SimpleNamespace(quantize=quantize),
        TokenType=SimpleNamespace(UNKNOWN=2, CONTROL=3, BYTE=6, NORMAL=1),
    )
    sys.modules["gguf"] = stand_in  # type: ignore[assignment]
    sys.path[:0] = FOLDERS[:1]
    before = set(sys.path)
    try:
        yield {name: __import__(name) for name in MODULES}
    finally:
        sys.path[:] = [each for each in sys.path if each in before and each not in FOLDERS]
        for name in (*MODULES, "gguf", "random_model", "peer_process"):
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def checkpoint(modules: dict[str, ModuleType], tmp_path_factory: pytest.TempPathFactory) -> Path:
    making = modules["whole_checkpoint"]
    folder: Path = tmp_path_factory.mktemp("whole") / "checkpoint"
    making.write_checkpoint(folder, making.shape_of(CONFIG, LAYERS, VOCAB), lambda line: None)
    return folder


@pytest.fixture(scope="module")
def converted(checkpoint: Path) -> Path:
    folder = checkpoint.parent / "ours"
    convert(checkpoint, folder, weight_format="fp8", verify=True)
    return folder


def test_our_reply_is_verified_against_float32(
    modules: dict[str, ModuleType], checkpoint: Path, converted: Path, tmp_path: Path
) -> None:
    whole, float_model = modules["whole_ours"], modules["whole_checkpoint"].FloatModel(checkpoint)
    whole.VOCAB_SIZE, whole.CONTEXT, whole.PREFILL = VOCAB, 128, 64
    given = np.arange(3, 3 + whole.GIVEN)
    with whole.Ours(converted, {"workers": 0}) as ours:
        tokens = np.concatenate([given, ours.greedy(given.tolist(), 1)[0]])
        logits = float_model.logits(torch.from_numpy(tokens)).numpy()
        assert logits.shape == (whole.GIVEN + whole.VERIFIED, VOCAB)
        assert logits.std() > 0.5
        np.savez(tmp_path / "right.npz", tokens=tokens, logits=logits)
        assert ours.error(tmp_path / "right.npz") < 2e-5
        best = logits[-2].argmax()
        logits[-2, best] += 1e-2  # of the reply's last token
        np.savez(tmp_path / "off.npz", tokens=tokens, logits=logits)
        with pytest.raises(SystemExit, match=r"our log probabilities are (1\.0e-02|9\.9e-03) off float32"):
            ours.error(tmp_path / "off.npz")
        logits[-2, best] -= 100
        np.savez(tmp_path / "wrong.npz", tokens=tokens, logits=logits)
        with pytest.raises(SystemExit, match="our reply is not float32's"):
            ours.error(tmp_path / "wrong.npz")
        assert ours.seconds(1) > 0
        assert ours.seconds(64) > 0
    convert(checkpoint, tmp_path / "int8", weight_format="int8")
    with whole.Ours(tmp_path / "int8", {"workers": 0}) as ours:
        error = ours.rounding_error(tmp_path / "right.npz", 0.1)
        assert error > 1e-4
        with pytest.raises(SystemExit, match=r"our log probabilities are 0\.\d+ of their spread off"):
            ours.rounding_error(tmp_path / "right.npz", error / 2)


def test_scales_and_experts_differ(modules: dict[str, ModuleType], checkpoint: Path) -> None:
    model = modules["whole_checkpoint"].FloatModel(checkpoint)
    at = "model.layers.1.mlp.experts.{}.gate_proj.weight"
    first, second = model._weight(at.format(0)), model._weight(at.format(1))
    assert (first != second).float().mean() > 0.9
    scales = model._stored(f"{at.format(0)}_scale_inv")
    assert scales.shape == (2, 2)
    assert len(scales.unique()) == 4


class Recorder:
    """Stands for gguf's writer."""

    def __init__(self) -> None:
        self.announced: list[tuple[str, tuple[int, ...], int]] = []
        self.written: list[np.ndarray] = []
        self.fields: dict[str, object] = {}

    def add_tensor_info(self, name: str, shape: object, dtype: object, size: int, kind: int = 0) -> None:
        self.announced.append((name, tuple(shape), size))  # type: ignore[arg-type]
        assert (kind == Q8_0) == (dtype == np.uint8)

    def write_tensor_data(self, tensor: np.ndarray) -> None:
        self.written.append(tensor)

    def __getattr__(self, name: str) -> object:
        return lambda value: self.fields.__setitem__(name.removeprefix("add_"), value)


def test_the_gguf_has_the_same_weights(modules: dict[str, ModuleType], checkpoint: Path) -> None:
    gguf_writer, model = modules["gguf_writer"], modules["whole_checkpoint"].FloatModel(checkpoint)
    recorder, stored = Recorder(), gguf_writer.Checkpoint(checkpoint)
    gguf_writer.describe(recorder, stored.config)
    assert recorder.fields["expert_used_count"] == 2
    assert len(recorder.fields["token_list"]) == len(set(recorder.fields["token_list"])) == VOCAB
    assert len(recorder.fields["token_types"]) == VOCAB
    gguf_writer.GgufTensors(stored, recorder).write(lambda done, count: None)
    assert [each.shape for each in recorder.written] == [shape for _, shape, _ in recorder.announced]
    assert [each.nbytes for each in recorder.written] == [size for _, _, size in recorder.announced]
    written = {name: each for (name, _, _), each in zip(recorder.announced, recorder.written, strict=True)}
    assert len(written) == 3 + LAYERS * 12
    norm = model._weight("model.layers.1.self_attn.q_norm.weight").numpy()
    assert np.array_equal(written["blk.1.attn_q_norm.weight"], norm)
    assert np.array_equal(
        written["blk.0.ffn_gate_inp.weight"], model._weight("model.layers.0.mlp.gate.weight").numpy()
    )
    for name, source in (
        ("output.weight", "lm_head.weight"),
        ("blk.1.attn_v.weight", "model.layers.1.self_attn.v_proj.weight"),
        ("blk.1.ffn_down_exps.weight", "model.layers.1.mlp.experts.{}.down_proj.weight"),
        ("blk.0.ffn_up_exps.weight", "model.layers.0.mlp.experts.{}.up_proj.weight"),
    ):
        experts = range(6) if "{}" in source else [0]
        exact = torch.stack([model._weight(source.format(expert)) for expert in experts]).numpy()
        blocks = written[name].reshape(-1, 34)
        scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
        values = (scales * blocks[:, 2:].view(np.int8)).reshape(exact.shape)
        assert np.abs(values - exact).max() <= 0.005 * np.abs(exact).max()


def test_codes_are_torchs(modules: dict[str, ModuleType]) -> None:
    expected = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(modules["gguf_writer"].e4m3_values(), expected, equal_nan=True)


def test_bytes_of_a_token_are_those_of_the_files(modules: dict[str, ModuleType], converted: Path) -> None:
    config = json.loads((converted / "config.json").read_text())
    size = modules["whole_report"].Bytes.of(config)
    tensors, manifest = HostTensors(converted), Manifest.load(converted)
    host = sum(
        math.prod(tensors.shape(name)) * tensors.get(name).element_size()
        for name in tensors.names()
        if "norm" not in name and "embed" not in name
    )
    experts = LAYERS * manifest.num_experts_per_tok * manifest.num_stripes * manifest.unit_bytes
    assert size.ours == pytest.approx(host + experts, rel=1e-3)  # scales of narrow matrices are whole blocks
    weights = LAYERS * (3 * 2 * 256 * 192 + 2 * 256 * 64 * (4 + 2)) + VOCAB * 256
    assert size.theirs == weights * 34 / 32 + LAYERS * 4 * 6 * 256
    int4 = modules["whole_report"].Bytes.of(config, "int4").ours
    blocks = LAYERS * manifest.num_experts_per_tok * manifest.num_stripes * (256 // 32)
    assert int4 - size.ours == blocks * (576 + 320) - experts


def setting(modules: dict[str, ModuleType], what: str) -> object:
    made = modules["whole_report"].Setting("2 workers", True, what, "llama.cpp Q8_0", 1.234e-5, 0.02345)
    made.ours, made.theirs = [0.01, 0.02, 0.04], [0.03, 0.06, 0.05]
    return made


def test_rates_and_ratios_follow_from_times(modules: dict[str, ModuleType]) -> None:
    report = modules["whole_report"]
    allowed = report.Allowed.of(report.Bytes(400_000_000, 500_000_000), 80.0, 25.0)
    assert report.line_of(setting(modules, "decode"), allowed) == {
        "name": "2 workers",
        "what": "decode",
        "peer": "llama.cpp Q8_0",
        "our_error": 1.23e-5,
        "their_error": 0.0234,
        "ours": {
            "tokens_per_s": 50.0,
            "slowest_tokens_per_s": 25.0,
            "fastest_tokens_per_s": 100.0,
            "allowed_tokens_per_s": 200.0,
            "of_ceiling": 0.25,
        },
        "theirs": {
            "tokens_per_s": 20.0,
            "slowest_tokens_per_s": 16.67,
            "fastest_tokens_per_s": 33.33,
            "allowed_tokens_per_s": 50.0,
            "of_ceiling": 0.4,
        },
        "ours_over_theirs": 2.5,
        "fastest_ours_over_theirs": 3.0,
    }
    assert "of_ceiling" not in report.line_of(setting(modules, "prefill"), allowed)["ours"]
    lines = report.table([setting(modules, "decode"), setting(modules, "prefill")], [allowed, allowed])
    assert " ".join(lines[2].split()) == "2 workers decode 50.0 ( 100.0) 25% 20.0 ( 33.3) 40% 2.50 (3.00)"
    assert " ".join(lines[3].split()) == "2 workers prefill 50.0 ( 100.0) 20.0 ( 33.3) 2.50 (3.00)"
    assert len(lines) == 5


def test_a_server_that_ends_is_named(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    whole, install = modules["whole_model"], modules["peer_install"]
    nothing = install.LlamaCppLibraries(tmp_path, tmp_path)
    with (
        pytest.raises(install.PeerUnavailable, match=r"^the RPC server ended with 1$"),
        whole.rpc_servers(Path(sys.executable), nothing, 2, tmp_path / "log"),
    ):
        raise AssertionError("nothing to be served")
    assert "libggml-base.so" in (tmp_path / "log").read_text()


def test_sources_are_the_parts_of_the_archive(
    modules: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install = modules["peer_install"]
    name = install.LLAMA_CPP.replace("==", "-").replace("-python", "_python").replace("llama-", "llama_")

    def download(self: object, command: list[str]) -> None:
        folder = Path(command[command.index("--dest") + 1])
        root = folder.parent / name
        for part in (
            "llama_cpp/llama_cpp.py",
            "vendor/llama.cpp/src/llama.cpp",
            "vendor/llama.cpp/app/main.cpp",
        ):
            (root / part).parent.mkdir(parents=True)
            (root / part).write_text(part)
        folder.mkdir()
        with tarfile.open(folder / f"{name}.tar.gz", "w:gz") as tar:
            tar.add(root, name)

    monkeypatch.setattr(install.PeerEnvironment, "_run", download)
    environment = install.PeerEnvironment(tmp_path / "peers", lambda line: None)
    (tmp_path / "peers").mkdir()
    sources = environment._llama_cpp_sources("llama-sources", install.LLAMA_SOURCES)
    files = sorted(str(each.relative_to(sources)) for each in sources.rglob("*") if each.is_file())
    assert files == ["complete", "llama_cpp/llama_cpp.py", "vendor/llama.cpp/src/llama.cpp"]
    monkeypatch.undo()
    assert environment._llama_cpp_sources("llama-sources", install.LLAMA_SOURCES) == sources


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "--rounds is 0: expected 1 to 1000"),
        (["--layers", "49"], "--layers is 49: expected 1 to 48"),
        (["--threads", "0"], "--threads is 0: expected 1 to "),
    ],
)
def test_wrong_arguments_are_named(
    modules: dict[str, ModuleType],
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        modules["whole_model"].parse_arguments(arguments)
    assert message in capsys.readouterr().err
