"""A whole model in llama.cpp as a peer: started by whole_model.py with the Python of its own environment.

One JSON object a line, as peer_side.py has it: first the engine's description and the error of its logits,
or why it cannot run; then for each ``{"rows": T}`` of the standard input the seconds of a token of a reply
(T = 1), or of a prompt of T tokens. The model's layers are computed here, or all of them by RPC servers.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import time
from ctypes import c_char_p, c_size_t, c_void_p
from dataclasses import dataclass
from pathlib import Path

import llama_cpp.llama_cpp as llama
import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
ALL_LAYERS = 999


@dataclass(frozen=True)
class Job:
    """What is to be loaded and measured.

    Args:
        gguf: The model.
        libraries: Folder of llama.cpp's libraries.
        threads: Compute threads of this process.
        servers: Addresses of RPC servers that hold all layers, in equal parts; none: this process does.
        reference: File of ``tokens`` and of the float32 ``logits`` behind each of them.
        tolerance: Largest error of the logits in the L2 norm, over theirs.
        context: Most tokens.
        prompt: Tokens before a reply.
        reply: Tokens of a reply.
        vocab_size: V.
    """

    gguf: str
    libraries: str
    threads: int
    servers: list[str]
    reference: str
    tolerance: float
    context: int
    prompt: int
    reply: int
    vocab_size: int


def rpc_devices(folder: Path, servers: list[str]) -> list[int]:
    """Registers servers, each with one device, and gives these."""
    base, registry, rpc = (
        ctypes.CDLL(str(folder / f"lib{name}.so")) for name in ("ggml-base", "ggml", "ggml-rpc")
    )
    rpc.ggml_backend_rpc_add_server.restype, rpc.ggml_backend_rpc_add_server.argtypes = c_void_p, [c_char_p]
    base.ggml_backend_reg_dev_get.restype, base.ggml_backend_reg_dev_get.argtypes = (
        c_void_p,
        [c_void_p, c_size_t],
    )
    registry.ggml_backend_register.restype, registry.ggml_backend_register.argtypes = None, [c_void_p]
    devices = []
    for server in servers:
        added = rpc.ggml_backend_rpc_add_server(server.encode())
        if not added:
            raise RuntimeError(f"no RPC server at {server}")
        registry.ggml_backend_register(added)
        devices.append(base.ggml_backend_reg_dev_get(added, 0))
    return devices


class WholeLlama:
    """A model of llama.cpp, loaded.

    Args:
        job: What of and how.
    """

    def __init__(self, job: Job) -> None:
        self._job, self._rng = job, np.random.default_rng(11)
        llama.llama_backend_init()
        params = llama.llama_model_default_params()
        params.n_gpu_layers = 0
        if job.servers:
            devices = rpc_devices(Path(job.libraries), job.servers)
            self._devices = (c_void_p * (len(devices) + 1))(*devices, None)
            self._split = (ctypes.c_float * llama.llama_max_devices())(*[1.0] * len(devices))
            params.devices = ctypes.cast(self._devices, c_void_p)
            params.tensor_split = self._split
            params.n_gpu_layers = ALL_LAYERS
        self._model = llama.llama_model_load_from_file(job.gguf.encode(), params)
        if not self._model:
            raise RuntimeError("llama.cpp did not load the model")
        options = llama.llama_context_default_params()
        options.n_ctx = options.n_batch = options.n_ubatch = job.context
        options.n_threads = options.n_threads_batch = job.threads
        self._context = llama.llama_init_from_model(self._model, options)
        if not self._context:
            raise RuntimeError("llama.cpp made no context")
        self._batch = llama.llama_batch_init(job.context, 0, 1)

    def _forget(self) -> None:
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)

    def _compute(self, tokens: npt.NDArray[np.int64], start: int, every: bool = False) -> F32:
        """Logits behind the last token, or behind each: [V] or [T, V]."""
        batch, count = self._batch, len(tokens)
        batch.n_tokens = count
        for place, token in enumerate(tokens.tolist()):
            batch.token[place], batch.pos[place] = token, start + place
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
            batch.logits[place] = every or place == count - 1
        status = llama.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        rows = count if every else 1
        logits = np.ctypeslib.as_array(llama.llama_get_logits(self._context), (rows, self._job.vocab_size))
        return logits.copy() if every else logits[0]

    def error(self, tokens: npt.NDArray[np.int64], expected: F32) -> tuple[float, float]:
        """Of the logits, in the L2 norm over theirs; and the share of likeliest tokens that are the same."""
        self._forget()
        logits = self._compute(tokens, 0, every=True)
        same = float((logits.argmax(-1) == expected.argmax(-1)).mean())
        return float(np.linalg.norm(logits - expected) / np.linalg.norm(expected)), same

    def seconds(self, rows: int) -> float:
        """Of a prompt of so many tokens; of a token of a reply for 1."""
        self._forget()
        length = self._job.prompt if rows == 1 else rows
        prompt = self._rng.integers(0, self._job.vocab_size, length)
        start = time.perf_counter()
        logits = self._compute(prompt, 0)
        token = logits.argmax()
        if rows > 1:
            return time.perf_counter() - start
        start = time.perf_counter()
        for place in range(self._job.reply):
            token = self._compute(np.array([token]), length + place).argmax()
        return (time.perf_counter() - start) / self._job.reply


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("job", type=json.loads)
    job = Job(**parser.parse_args().job)
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(message: dict[str, object]) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    try:
        engine = WholeLlama(job)
        with np.load(job.reference) as reference:
            error, same = engine.error(reference["tokens"], reference["logits"])
    except Exception as problem:  # whatever it is, it is why this peer has no numbers
        say({"refused": f"{type(problem).__name__}: {problem}".split("\n", 1)[0]})
        return
    if not error <= job.tolerance:
        say({"refused": f"its logits are {error:.1e} off float32, expected at most {job.tolerance:.0e}"})
        return
    where = f"{len(job.servers)} RPC servers" if job.servers else "one process"
    say({"description": f"llama.cpp Q8_0, {where}, {same:.0%} of likeliest tokens the same", "error": error})
    for line in sys.stdin:
        say({"seconds": [engine.seconds(int(json.loads(line)["rows"]))]})


if __name__ == "__main__":
    main()
