"""Fixtures that several parts of the suite share."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

# Here and in processes that tests start, before NumPy and torch read it: tiny models gain nothing from a
# library's second thread, and lose much where others want the cores too.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import duckllm.demo
from duckllm.cluster.token import TOKEN_VARIABLE
from duckllm.weights.cache_folder import CACHE_VARIABLE
from duckllm.weights.manifest import Manifest
from duckllm.weights.resolve import resolve_model
from support.moments import at_step  # noqa: F401 - a fixture
from worker_harness import WorkerProcess, make_model, running_worker

# No test asks the Hugging Face hub: what looks like a model's name is refused without a look at the network.
os.environ["HF_HUB_OFFLINE"] = "1"
VISIBLE_GPUS = os.environ.get("CUDA_VISIBLE_DEVICES")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-questions",
        action="store_true",
        help="answer every question of the demo model through every number of workers (minutes more)",
    )


def pytest_configure() -> None:
    """Lets Ctrl-C be tested where the suite runs in the background too: a shell has it ignored there."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs a GPU where there is none, and hides it from all else, which auto would put there.

    CUDA is started first, so that tests of this process may name it; those of ``auto`` and of processes that
    are started ask for ``visible_gpu``.
    """
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        import torch

        if torch.cuda.is_available():
            torch.cuda.init()
            torch.cuda.device_count()  # is remembered
        else:
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_finish() -> None:
    """Leaves what is there for good, modules and tests, out of every later search for garbage.

    There are so many that each search took a third of a second, and all of them a tenth of the suite's time.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def visible_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs as they are seen outside of tests."""
    if VISIBLE_GPUS is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", VISIBLE_GPUS)


@pytest.fixture(scope="session", autouse=True)
def model_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model cache of the suite's own, for this process and those it starts."""
    folder = tmp_path_factory.mktemp("model-cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(folder))
        patch.delenv(TOKEN_VARIABLE, raising=False)
        yield folder


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the repository."""
    return Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def demo_checkpoint() -> Path:
    """The demo model as it ships in the package: a Hugging Face checkpoint folder."""
    return Path(duckllm.demo.__file__).parent / "checkpoint"


@pytest.fixture(scope="session")
def demo_folder(model_cache: Path) -> Path:
    """The demo model, converted; not to be changed."""
    return resolve_model(None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """A tiny model of random experts, for tests around workers that leave it as it was."""
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """A worker without a model of its own, for tests that leave it as it was."""
    with running_worker(tmp_path_factory.mktemp("worker")) as process:
        yield process
