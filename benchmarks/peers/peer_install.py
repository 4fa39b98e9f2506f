"""Gets the other engines: pinned versions from the package index, into an environment of their own.

Called by experts.py, and by ../transport/round_trip.py. Everything lies under
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
from pathlib import Path

KT_KERNEL, LLAMA_CPP, NUMPY = "kt-kernel==0.7.2", "llama-cpp-python==0.3.36", "numpy==2.4.6"
# What "avx2" means to ggml's build; without it the compiler takes what this CPU has.
GGML_AVX2 = ["-DGGML_NATIVE=OFF"] + [f"-DGGML_{name}=ON" for name in ("AVX", "AVX2", "FMA", "F16C", "BMI2")]

# The archive has neither its tests nor its examples.
GGML_OPTIONS = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_BUILD_TESTS=OFF", "-DGGML_BUILD_EXAMPLES=OFF"]


class PeerUnavailable(Exception):
    """A peer cannot be had on this machine; the message says why."""


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
        if (build / "complete").exists():
            return build / "src"
        cmake = shutil.which("cmake")
        if cmake is None:
            self.install("cmake")
            cmake = str(self.python.with_name("cmake"))
        sources = self._llama_cpp_sources()
        self._progress(f"building ggml of {LLAMA_CPP} for {isa} (a minute or two)")
        options = GGML_AVX2 if isa == "avx2" else ["-DGGML_NATIVE=ON"]
        self._run([cmake, "-S", str(sources), "-B", str(build), *GGML_OPTIONS, *options])
        targets = ["--target", "ggml-base", "ggml-cpu"]
        self._run(["nice", cmake, "--build", str(build), "--parallel", "2", *targets])
        (build / "complete").touch()
        return build / "src"

    def _llama_cpp_sources(self) -> Path:
        sources = self._folder / "ggml-sources"
        inner = Path("vendor") / "llama.cpp" / "ggml"
        if (sources / "complete").exists():
            return sources / inner
        self._progress(f"fetching the sources of {LLAMA_CPP} (80 MB)")
        name = LLAMA_CPP.partition("==")[0]
        download = [
            "download",
            "--quiet",
            "--no-deps",
            "--no-binary",
            name,
            "--dest",
            str(sources),
            LLAMA_CPP,
        ]
        self._run([str(self.python), "-m", "pip", *download])
        archive = next(sources.glob("*.tar.gz"))
        with tarfile.open(archive) as tar:
            root = archive.name.removesuffix(".tar.gz")
            wanted = f"{root}/{inner.as_posix()}/"
            tar.extractall(sources, [each for each in tar if each.name.startswith(wanted)], filter="data")
        (sources / root / "vendor").rename(sources / "vendor")
        # The archive lacks this template of a file that nothing here reads.
        (sources / inner / "ggml.pc.in").touch()
        (sources / "complete").touch()
        return sources / inner

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
