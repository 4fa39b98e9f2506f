"""Gets the other engines: pinned versions from the package index, into an environment of their own.

Called by experts.py and whole_model.py, and by ../transport/round_trip.py. Everything lies under
``$XDG_CACHE_HOME/duckllm-peers`` (``~/.cache`` without one), made at first use and kept; nothing is installed
beside this package.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KT_KERNEL, LLAMA_CPP, NUMPY = "kt-kernel==0.7.2", "llama-cpp-python==0.3.36", "numpy==2.4.6"
GGUF = "gguf==0.19.0"
# What llama-cpp-python's module of C declarations and gguf import.
BINDINGS_NEED = (
    *("typing-extensions==4.16.0", "diskcache==5.6.3", "jinja2==3.1.6", "markupsafe==3.0.4"),
    *("pyyaml==6.0.4", "requests==2.34.2", "tqdm==4.70.1"),
)
AVX2_PARTS = ("AVX", "AVX2", "FMA", "F16C", "BMI2")
AVX512_PARTS = ("AVX512", "AVX512_VBMI", "AVX512_VNNI", "AVX512_BF16", "AVX_VNNI")


def ggml_options(isa: str, cpu_flags: str) -> list[str]:
    """What ggml is built for: its AVX2 paths, or all that this CPU has but AMX.

    Built by GCC 12, the AMX paths of this version end its process by a general protection fault.
    """
    if isa == "avx2":
        parts = AVX2_PARTS
    elif "amx_tile" in cpu_flags:
        parts = (*AVX2_PARTS, *AVX512_PARTS)
    else:
        return ["-DGGML_NATIVE=ON"]
    return ["-DGGML_NATIVE=OFF", *(f"-DGGML_{part}=ON" for part in parts)]


def read_cpu_flags() -> str:
    """The first CPU's flags as the system names them."""
    return next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))


# Parts of the archive, by how their names begin.
LLAMA_FOLDER = "vendor/llama.cpp/"
GGML_SOURCES = (f"{LLAMA_FOLDER}ggml/",)
LLAMA_SOURCES = (
    "llama_cpp/",
    *(
        f"{LLAMA_FOLDER}{part}"
        for part in ("CMakeLists.txt", "LICENSE", "cmake/", "ggml/", "include/", "src/")
    ),
    f"{LLAMA_FOLDER}vendor/",
)
# Of llama.cpp the library alone, with the client and the server of RPC.
LLAMA_OPTIONS = [
    *("-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", "-DGGML_RPC=ON"),
    *(f"-DLLAMA_BUILD_{part}=OFF" for part in ("COMMON", "TESTS", "TOOLS", "EXAMPLES", "SERVER", "APP")),
]
# The archive has neither its tests nor its examples.
GGML_OPTIONS = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_BUILD_TESTS=OFF", "-DGGML_BUILD_EXAMPLES=OFF"]


class PeerUnavailable(Exception):
    """A peer cannot be had on this machine; the message says why."""


@dataclass(frozen=True)
class LlamaCppLibraries:
    """llama.cpp as shared libraries, and llama-cpp-python's declarations of them.

    Args:
        folder: Where the libraries lie.
        bindings: Folder of the package ``llama_cpp``.
    """

    folder: Path
    bindings: Path

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which Python finds both."""
        return {"LLAMA_CPP_LIB_PATH": str(self.folder), "PYTHONPATH": str(self.bindings)}


def cache_folder() -> Path:
    """Where the environment lies, one for each version of Python."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "duckllm-peers" / f"python{sys.version_info.major}.{sys.version_info.minor}"


class PeerEnvironment:
    """The environment of the peers.

    Args:
        folder: Where it is or shall be.
        progress: Told in a line what takes time now.
    """

    def __init__(self, folder: Path, progress: Callable[[str], None]) -> None:
        self._folder, self._progress = folder, progress
        self.python = folder / "venv" / "bin" / "python"

    def prepare(self) -> None:
        """Makes the environment with NumPy in it.

        Raises:
            PeerUnavailable: The index did not give it.
        """
        if not self.python.exists():
            self._progress(f"making an environment for the peers in {self._folder}")
            venv.create(self._folder / "venv", with_pip=True)
        self.install(NUMPY)

    def kt_kernel(self) -> Path:
        """The folder of kt-kernel's extension modules.

        Raises:
            PeerUnavailable: There is no wheel for this machine.
        """
        self.install(KT_KERNEL)
        return next((self._folder / "venv" / "lib").glob("python*/site-packages")) / "kt_kernel"

    def llama_cpp(self, isa: str) -> Path:
        """The folder of ggml's libraries, built from the sources that llama-cpp-python carries.

        Raises:
            PeerUnavailable: No sources, no compiler, or they do not build.
        """
        build = self._folder / f"ggml-{isa}"
        if not (build / "complete").exists():
            sources = self._llama_cpp_sources("ggml-sources", GGML_SOURCES) / LLAMA_FOLDER / "ggml"
            # The archive lacks this template of a file that nothing here reads.
            (sources / "ggml.pc.in").touch()
            self._progress(f"building ggml of {LLAMA_CPP} for {isa} (a minute or two)")
            options = [*GGML_OPTIONS, *ggml_options(isa, read_cpu_flags())]
            self._build(sources, build, options, ["ggml-base", "ggml-cpu"])
        return build / "src"

    def llama_cpp_with_rpc(self) -> LlamaCppLibraries:
        """All of llama.cpp for this CPU, built from the same sources, with RPC; gguf beside it.

        Raises:
            PeerUnavailable: No sources, no compiler, or they do not build.
        """
        for requirement in (*BINDINGS_NEED, GGUF):
            self.install(requirement)
        sources, build = self._llama_cpp_sources("llama-sources", LLAMA_SOURCES), self._folder / "llama"
        if not (build / "complete").exists():
            self._progress(f"building llama.cpp of {LLAMA_CPP} with RPC (ten minutes of one core)")
            options = [*LLAMA_OPTIONS, *ggml_options("native", read_cpu_flags())]
            self._build(sources / LLAMA_FOLDER, build, options, ["llama", "ggml-rpc"])
        return LlamaCppLibraries(build / "bin", sources)

    def _build(self, sources: Path, build: Path, options: list[str], targets: list[str]) -> None:
        cmake = shutil.which("cmake")
        if cmake is None:
            self.install("cmake")
            cmake = str(self.python.with_name("cmake"))
        self._run([cmake, "-S", str(sources), "-B", str(build), *options])
        self._run(["nice", cmake, "--build", str(build), "--parallel", "2", "--target", *targets])
        (build / "complete").touch()

    def _llama_cpp_sources(self, name: str, parts: tuple[str, ...]) -> Path:
        """A folder with some folders of the archive."""
        sources = self._folder / name
        if (sources / "complete").exists():
            return sources
        self._progress(f"fetching the sources of {LLAMA_CPP} (80 MB)")
        only = ["--no-deps", "--no-binary", LLAMA_CPP.partition("==")[0]]
        command = ["download", "--quiet", *only, "--dest", str(sources), LLAMA_CPP]
        self._run([str(self.python), "-m", "pip", *command])
        archive = next(sources.glob("*.tar.gz"))
        with tarfile.open(archive) as tar:
            root = archive.name.removesuffix(".tar.gz")
            wanted = tuple(f"{root}/{part}" for part in parts)
            members = [each for each in tar if each.name.startswith(wanted)]
            # Python before 3.11.4 has no filters.
            safely: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            tar.extractall(sources, members, **safely)
        for folder in (sources / root).iterdir():
            folder.rename(sources / folder.name)
        archive.unlink()
        (sources / "complete").touch()
        return sources

    def install(self, requirement: str) -> None:
        """Installs one pinned package, without what it depends on.

        Raises:
            PeerUnavailable: The index has none for this machine.
        """
        done = self._folder / f"{requirement}.installed"
        if done.exists():
            return
        self._progress(f"installing {requirement}")
        self._run([str(self.python), "-m", "pip", "install", "--quiet", "--no-deps", requirement])
        done.touch()

    def _run(self, command: list[str]) -> None:
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except FileNotFoundError as missing:
            raise PeerUnavailable(f"{missing.filename} is missing") from missing
        except subprocess.CalledProcessError as failed:
            raise PeerUnavailable(
                f"{' '.join(command[:4])}: {last_words(failed.stderr or failed.stdout)}"
            ) from failed


def last_words(output: str) -> str:
    """The last line that speaks of an error, or else the last that is not empty."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["no message"])[-1]
