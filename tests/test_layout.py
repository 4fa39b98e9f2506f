"""The shape of the repository: who imports whom, what has a docstring, and how long files are."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

# ARCHITECTURE.md, section 3: imports point down this list only.
ORDER = [
    "__main__", "cli", "server", "doctor", "simulate", "forecast", "bench", "quality", "llm",
    "conversation", "plan", "tracing", "assembly", "assembly_experts", "engine", "models", "layers",
    "kernels", "moe", "transport", "node_image", "worker", "cluster", "weights", "demo", "text",
    "outputs", "sampling_params", "device", "config", "prefill", "paths", "errors",
]  # fmt: skip
LEAVES = {
    "text",
    "outputs",
    "sampling_params",
    "config",
    "paths",
    "errors",
}  # these import only leaves of a later line
NATIVE = "_native"
ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "duckllm"
MODULES = sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_parts(path: Path) -> set[str]:
    """First names below duckllm that a module imports, inside functions too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = (
                [f"duckllm.{alias.name}" for alias in node.names]
                if node.module == "duckllm"
                else [node.module]
            )
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found.update(name.split(".")[1] for name in names if name.startswith("duckllm."))
    return found


def test_every_module_belongs_to_a_part_of_the_list() -> None:
    assert {part_of(path) for path in MODULES} - {"__init__"} == set(ORDER)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down_the_list(path: Path) -> None:
    part = part_of(path)
    if part == "__init__":
        return  # the package's face names what it exports, lazily
    imported = imported_parts(path) & set(ORDER)
    upwards = {name for name in imported if ORDER.index(name) < ORDER.index(part)}
    if part == "cli":
        upwards.discard("cli")
    assert not upwards, f"{path.relative_to(ROOT)} imports {sorted(upwards)}, which stand above {part}"
    if part in LEAVES:
        assert imported <= LEAVES


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_module_says_what_it_is(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert docstring, path
    assert docstring.splitlines()[0].rstrip().endswith((".", ";", ":", ",")), docstring.splitlines()[0]


def run_without(modules: Sequence[str], code: str) -> None:
    """Runs ``code`` in an interpreter where importing any of ``modules`` fails."""
    block = f"import sys; sys.modules.update(dict.fromkeys({list(modules)!r}))\n"
    done = subprocess.run([sys.executable, "-c", block + code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


HOSTS_PACKAGES = (
    "torch",
    "transformers",
    "safetensors",
    "prompt_toolkit",
    "jinja2",
    "llguidance",
    "ray",
    "fastapi",
    "zeroconf",
)


def test_a_worker_needs_none_of_the_hosts_packages() -> None:
    """None of them is there; which one was wanted is in the error."""
    run_without(
        HOSTS_PACKAGES,
        "import duckllm, duckllm.worker.__main__, duckllm.worker.session, duckllm.cli.main\n"
        "import duckllm.cluster.local, duckllm.cluster.static, duckllm.moe.placement\n"
        "import duckllm.cluster.ray_cluster, duckllm.cluster.ray_driver, duckllm.cluster.discovery_cluster\n",
    )


def test_importing_the_package_is_light_and_changes_nothing() -> None:
    run_without(
        ("numpy",),
        "import os, signal, threading\n"
        "before = dict(os.environ), signal.getsignal(signal.SIGINT), threading.active_count()\n"
        "import duckllm\n"
        "assert duckllm.__version__\n"
        "assert before == (dict(os.environ), signal.getsignal(signal.SIGINT), threading.active_count())\n",
    )


def test_files_stay_readable() -> None:
    """Files aim at 400 lines; one over 800 has to be split."""
    for pattern in ("src/**/*.py", "csrc/**/*.cpp", "csrc/**/*.h", "tests/**/*.py"):
        for path in ROOT.glob(pattern):
            assert len(path.read_text(encoding="utf-8").splitlines()) <= 800, path


def test_test_modules_have_names_of_their_own() -> None:
    """Test folders are no packages, so two modules of one name would hide each other."""
    names = [
        path.name for path in ROOT.glob("tests/**/*.py") if path.name not in ("conftest.py", "__init__.py")
    ]
    assert sorted(names) == sorted(set(names))
