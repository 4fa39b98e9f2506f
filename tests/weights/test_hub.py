"""Models by their name on the hub: from the local cache, downloaded, and refused in one sentence."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from fake_hub import COMMIT, REPO, FakeHub, make_cache, running_hub
from huggingface_hub import constants
from random_checkpoint import make_checkpoint
from typer.testing import CliRunner

from duckllm.cli.main import app
from duckllm.errors import (
    CheckpointError,
    ConfigError,
    DiskSpaceError,
    DuckError,
    MissingPackageError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from duckllm.models.registry import open_model
from duckllm.weights.convert import convert
from duckllm.weights.hub import HubModel, _snapshot_download
from duckllm.weights.manifest import Manifest
from duckllm.weights.resolve import find_model, resolve_model

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tiktoken.model", "qwen.tiktoken")
UNWANTED = ("model.bin", "modeling_duck.py", "model.gguf", "README.md", "consolidated.safetensors")
SMALL = {
    "num_hidden_layers": 2,
    "num_nextn_predict_layers": 0,
    "n_routed_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_key_value_heads": 2,
}


def use_endpoint(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """What HF_ENDPOINT does to a process that starts with it."""
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    template = "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + template)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint as it lies on the hub."""
    folder = tmp_path / "source"
    make_checkpoint(folder, **SMALL)
    for name in (*TOKENIZER[1:], "chat_template.jinja", "LICENSE"):
        (folder / name).write_text(name)
    return folder


@pytest.fixture
def hf_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hugging Face cache, and no network."""
    monkeypatch.setenv("DUCKLLM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    use_endpoint(monkeypatch, "http://127.0.0.1:9")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hf"


@pytest.fixture
def hub(source: Path, hf_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub that serves the checkpoint, and files that nobody needs."""
    for name in UNWANTED:
        (source / name).write_text("not wanted")
    (source / "original").mkdir()
    (source / "original/model.safetensors").write_text("not wanted")
    with running_hub(source) as served:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        use_endpoint(monkeypatch, served.endpoint)
        yield served


def refused(name: str, kind: type[DuckError] = ModelNotFoundError) -> str:
    with pytest.raises(kind) as caught:
        resolve_model(name)
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("org/name", HubModel("org/name", None)),
        ("deepseek-ai/DeepSeek-V3.2@refs/pr/1", HubModel("deepseek-ai/DeepSeek-V3.2", "refs/pr/1")),
        ("org/name@v1.0", HubModel("org/name", "v1.0")),
        ("org/name@", None),
        ("name", None),
        ("./name", None),
        ("/org/name", None),
        ("~/name", None),
        ("../name", None),
        ("org/name/more", None),
        ("org/na me", None),
        ("org/name\n", None),
        ("org/..", None),
    ],
)
def test_what_is_a_name_of_the_hub(name: str, expected: HubModel | None) -> None:
    assert HubModel.parse(name) == expected


def test_a_model_in_the_cache_needs_no_network(source: Path, hf_cache: Path, tmp_path: Path) -> None:
    snapshot = make_cache(hf_cache, source)
    place = find_model(REPO)
    assert (place.folder, place.name) == (snapshot, "flock--tiny-duck")
    folder = resolve_model(REPO)
    assert folder.parent == tmp_path / "cache"
    assert folder.name.startswith("flock--tiny-duck-v")
    manifest = Manifest.load(folder)
    assert (manifest.source["hub_id"], manifest.source["revision"]) == (REPO, COMMIT)
    assert manifest.model_hash == convert(source, tmp_path / "dst").model_hash
    for name in (*TOKENIZER, "LICENSE"):
        assert (folder / name).read_bytes() == (source / name).read_bytes()
        assert not (folder / name).is_symlink()
    assert resolve_model(f"{REPO}@main") == resolve_model(f"{REPO}@{COMMIT}") == folder


def test_a_folder_of_that_name_comes_first(source: Path, hf_cache: Path, tmp_path: Path) -> None:
    make_cache(hf_cache, source)
    make_checkpoint(tmp_path / REPO, seed=5, **SMALL)
    manifest = Manifest.load(resolve_model(REPO))
    assert "hub_id" not in manifest.source
    assert manifest.model_hash == convert(tmp_path / REPO, tmp_path / "dst").model_hash


def test_environment_variables_name_the_cache(source: Path, tmp_path: Path) -> None:
    """In a process of its own, as huggingface_hub reads them when it is imported."""
    make_cache(tmp_path / "home/hub", source)
    code = (
        "import sys\n"
        "from duckllm.weights.hub import HubModel\n"
        "assert 'huggingface_hub' not in sys.modules\n"
        "print(HubModel(sys.argv[1], None).find(lambda folder: None))\n"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    command = [sys.executable, "-c", code, REPO]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == str(tmp_path / f"home/hub/models--flock--tiny-duck/snapshots/{COMMIT}")


def test_neither_a_folder_nor_in_the_cache_and_no_network(
    hf_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refused(REPO) == (
        f"{REPO}: neither a folder nor in the Hugging Face cache, {hf_cache}, and HF_HUB_OFFLINE is set; "
        f"fetch it where there is a network: hf download {REPO}"
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert "and the hub cannot be reached; fetch it" in refused(REPO)
    assert "org/-x-: no such folder, and no name of a model on the hub (Repo id must use" in refused(
        "org/-x-"
    )
    (Path(REPO).parent).mkdir()
    Path(REPO).write_text("a file")
    assert refused(REPO) == f"{REPO}: is a file, expected a model's folder"


@pytest.mark.parametrize("lost", ["model-00002-of-00003.safetensors", "config.json", "tokenizer"])
def test_a_part_of_a_model_is_refused_by_name(
    source: Path, hf_cache: Path, tmp_path: Path, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = make_cache(hf_cache, source)
    for name in TOKENIZER if lost == "tokenizer" else (lost,):
        (snapshot / name).resolve().unlink()  # the link stays, and leads nowhere
    message = refused(REPO, CheckpointError)
    assert f"the Hugging Face cache holds a part of it, without {lost}, and the rest cannot be" in message
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert f"without {lost}, and the hub did not give the rest" in refused(REPO, CheckpointError)
    assert not (tmp_path / "cache").exists()


def test_a_download_takes_what_is_needed_and_no_code(
    hub: FakeHub, source: Path, hf_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = resolve_model(REPO)
    wanted = {path.name for path in source.iterdir() if path.is_file()} - {*UNWANTED}
    assert sorted(hub.served) == sorted(wanted)
    assert "Fetching" in capsys.readouterr().err
    assert Manifest.load(folder).source["revision"] == COMMIT
    hub.served.clear()
    assert resolve_model(REPO) == folder
    assert hub.served == []
    assert not [*folder.rglob("*.py"), *hf_cache.rglob("*.py")]


def test_an_inspection_fetches_the_configuration_alone(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(app, ["inspect", REPO, "--json"])
    assert result.exception is None, result.exception
    facts = json.loads(result.stdout)
    assert (facts["kind"], facts["experts"]) == ("configuration", 2)
    assert set(hub.served) == {"config.json"}
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert json.loads(CliRunner().invoke(app, ["inspect", REPO, "--json"]).stdout) == facts
    assert CliRunner().invoke(app, ["plan", REPO, "--json"]).exception is None
    # What needs the whole model says what is missing.
    assert "holds a part of it, without" in refused(REPO, CheckpointError)


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        (
            {"rope_theta": None},
            CheckpointError,
            "config.json: rope_theta: got None, expected",
        ),
        (
            {"architectures": ["LlamaForCausalLM"]},
            UnsupportedModelError,
            "architectures: got 'LlamaForCausalLM'",
        ),
        (
            {"quantization_config": {"quant_method": "quark"}},
            UnsupportedModelError,
            "quant_method: got 'quark'",
        ),
        ({"hidden_act": "gelu"}, UnsupportedModelError, "hidden_act: got 'gelu', expected 'silu'"),
    ],
)
def test_a_model_that_no_host_could_use_is_not_downloaded(
    hub: FakeHub, source: Path, changes: dict, kind: type[DuckError], words: str
) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(kind, match=re.escape(words)):
        open_model(REPO)
    done = CliRunner().invoke(app, ["convert", REPO, "dst"])
    assert type(done.exception) is kind
    assert words in str(done.exception)
    assert set(hub.served) == {"config.json"}


def test_a_download_that_broke_is_completed(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = "model-00003-of-00003.safetensors"
    hub.broken = {broken}
    assert "the hub answered 404" in refused(REPO)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert f"without {broken}, and the rest cannot be downloaded" in refused(REPO, CheckpointError)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    before = set(hub.served)
    assert before
    hub.broken.clear()
    hub.served.clear()
    assert Manifest.load(resolve_model(REPO)).num_experts == 2
    assert broken in hub.served
    assert not before & set(hub.served)


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (404, "RepoNotFound", "no such folder, and no such model on the hub, or a private one, which"),
        (401, "RepoNotFound", "no such folder, and no such model on the hub, or a private one, which"),
        (401, "", "as the hub answered 401; what gives access is: hf auth login"),
        (403, "GatedRepo", "is gated, and this machine has no access to it; accept its terms"),
        (500, "", "the hub cannot be reached"),
    ],
)
def test_what_the_hub_refuses(hub: FakeHub, status: int, code: str, words: str) -> None:
    hub.status, hub.error_code = status, code
    message = refused(REPO)
    assert message.startswith(f"{REPO}: ")
    assert words in message


def test_names_that_the_hub_does_not_know(hub: FakeHub) -> None:
    assert refused(f"{REPO}@v9") == f"{REPO}@v9: the model {REPO} on the hub has no revision 'v9'"
    assert "no such model on the hub" in refused("flock/another")


def test_a_model_without_safetensors(hub: FakeHub, source: Path) -> None:
    for path in source.glob("*.safetensors*"):
        path.unlink()
    assert "got no safetensors files on the hub" in refused(REPO, CheckpointError)


def test_a_full_disk(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_options: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(HubModel, "_in_cache", lambda *_: (None, []))
    monkeypatch.setattr("huggingface_hub.snapshot_download", full)
    assert "no room left on the disk" in refused(REPO, DiskSpaceError)


def test_without_the_package(hf_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "pip install 'duckllm[host]'" in refused(REPO, MissingPackageError)


def test_the_command_line_takes_a_name(hub: FakeHub, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["convert", REPO, str(tmp_path / "dst")])
    assert done.exit_code == 0, done.output
    assert f"fp9 from F8_E4M3 of {REPO} at {COMMIT}, 1 MoE layer," in done.stdout
    assert Manifest.load(tmp_path / "dst").source["hub_id"] == REPO


def test_an_address_that_the_hubs_package_cannot_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unreadable(ModuleType):
        def __getattr__(self, name: str) -> None:
            raise ValueError("Port could not be cast to integer value as 'xx'")

    monkeypatch.setitem(sys.modules, "huggingface_hub", Unreadable("huggingface_hub"))
    monkeypatch.setenv("HF_ENDPOINT", "http://user:secret@127.0.0.1:xx")
    with pytest.raises(ConfigError, match=r"^HF_ENDPOINT: got 'http://127.0.0.1:xx', expected the address"):
        _snapshot_download()
