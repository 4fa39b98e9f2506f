"""llama.cpp's experts as a peer: started by experts.py with the Python of its own environment.

One layer's expert product as llama.cpp's graph of a mixture of experts has it (two ``ggml_mul_mat_id``,
swiglu, a third, the weighted sum) through ggml's C interface. Weights lie as llama.cpp would put them: in its
repacked layout where it has one for the format and this CPU, in the plain one elsewhere.
"""

from __future__ import annotations

import ctypes
import time
from ctypes import POINTER, c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path

import numpy as np
import numpy.typing as npt
from block_formats import F32, GGML_TYPES, I64, Expert
from peer_side import Job, serve

F32_TYPE, I32_TYPE = 0, 26
# ggml rounds activations to blocks of int8, twice.
TOLERANCE = 3e-2
GRAPH_BYTES = 4 << 20


class InitParams(ctypes.Structure):
    """``struct ggml_init_params``."""

    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


# Result and arguments of the functions that are called; pointers are opaque.
SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "ggml_init": (c_void_p, [InitParams]),
    "ggml_free": (None, [c_void_p]),
    "ggml_new_tensor_2d": (c_void_p, [c_void_p, c_int, c_int64, c_int64]),
    "ggml_new_tensor_3d": (c_void_p, [c_void_p, c_int, c_int64, c_int64, c_int64]),
    "ggml_nbytes": (c_size_t, [c_void_p]),
    "ggml_set_input": (None, [c_void_p]),
    "ggml_set_output": (None, [c_void_p]),
    "ggml_mul_mat_id": (c_void_p, [c_void_p] * 4),
    "ggml_swiglu_split": (c_void_p, [c_void_p] * 3),
    "ggml_mul": (c_void_p, [c_void_p] * 3),
    "ggml_add": (c_void_p, [c_void_p] * 3),
    "ggml_view_2d": (c_void_p, [c_void_p, c_void_p, c_int64, c_int64, c_size_t, c_size_t]),
    "ggml_cont": (c_void_p, [c_void_p] * 2),
    "ggml_new_graph": (c_void_p, [c_void_p]),
    "ggml_build_forward_expand": (None, [c_void_p] * 2),
    "ggml_gallocr_new": (c_void_p, [c_void_p]),
    "ggml_gallocr_alloc_graph": (c_bool, [c_void_p] * 2),
    "ggml_backend_alloc_ctx_tensors_from_buft": (c_void_p, [c_void_p] * 2),
    "ggml_backend_buffer_free": (None, [c_void_p]),
    "ggml_backend_tensor_set": (None, [c_void_p, c_void_p, c_size_t, c_size_t]),
    "ggml_backend_tensor_get": (None, [c_void_p, c_void_p, c_size_t, c_size_t]),
    "ggml_backend_graph_compute": (c_int, [c_void_p] * 2),
    "ggml_backend_get_device": (c_void_p, [c_void_p]),
    "ggml_backend_dev_supports_op": (c_bool, [c_void_p] * 2),
    "ggml_backend_dev_backend_reg": (c_void_p, [c_void_p]),
    "ggml_backend_reg_get_proc_address": (c_void_p, [c_void_p, c_char_p]),
    "ggml_backend_cpu_init": (c_void_p, []),
    "ggml_backend_cpu_buffer_type": (c_void_p, []),
    "ggml_backend_buft_name": (c_char_p, [c_void_p]),
    "ggml_backend_cpu_set_n_threads": (None, [c_void_p, c_int]),
}


class Ggml:
    """The functions of ggml's libraries in a folder."""

    def __init__(self, folder: Path) -> None:
        libraries = [
            ctypes.CDLL(str(folder / name), ctypes.RTLD_GLOBAL)
            for name in ("libggml-base.so", "libggml-cpu.so")
        ]
        for name, (result, arguments) in SIGNATURES.items():
            library = next(each for each in libraries if hasattr(each, name))
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name.removeprefix("ggml_"), function)

    def context(self, size: int = GRAPH_BYTES) -> int:
        """A context for tensors' descriptions without their data."""
        return int(self.init(InitParams(size, None, True)))

    def extra_buffer_types(self, device: int) -> list[int]:
        """The CPU's other layouts of weights, in its order of preference."""
        address = self.backend_reg_get_proc_address(
            self.backend_dev_backend_reg(device), b"ggml_backend_dev_get_extra_bufts"
        )
        if not address:
            return []
        found = ctypes.CFUNCTYPE(POINTER(c_void_p), c_void_p)(address)(device)
        types = []
        while found and found[len(types)]:
            types.append(int(found[len(types)]))
        return types


class LlamaCpp:
    """One layer's experts in ggml."""

    tolerance = TOLERANCE

    def __init__(self, job: Job, experts: list[Expert]) -> None:
        self._job = job
        self._ggml = Ggml(Path(job.library))
        self._backend = self._ggml.backend_cpu_init()
        self._ggml.backend_cpu_set_n_threads(self._backend, job.threads)
        layout = self._place_weights()
        self.description = f"llama.cpp {job.isa}, {layout}"
        for which, tensor in enumerate(self._tensors):
            layer = np.stack(
                [experts[number % len(experts)].stored[which] for number in range(job.num_experts)]
            )
            self._ggml.backend_tensor_set(tensor, layer.ctypes.data, 0, layer.nbytes)
        self._graphs: dict[int, tuple[int, ...]] = {}

    def _place_weights(self) -> str:
        """Makes the three tensors, without data yet; the name of their layout."""
        ggml, job = self._ggml, self._job
        weight_type = GGML_TYPES[job.weight_format]
        device = ggml.backend_get_device(self._backend)
        plain = ggml.backend_cpu_buffer_type()
        for layout in (*ggml.extra_buffer_types(device), plain):
            context = ggml.context()
            sizes = ((job.hidden_size, job.channels),) * 2 + ((job.channels, job.hidden_size),)
            self._tensors = [
                ggml.new_tensor_3d(context, weight_type, *size, job.num_experts) for size in sizes
            ]
            memory = ggml.backend_alloc_ctx_tensors_from_buft(context, layout)
            if layout == plain or all(
                self._can_multiply(device, tensor, size[0])
                for tensor, size in zip(self._tensors, sizes, strict=True)
            ):
                return str(ggml.backend_buft_name(layout).decode())
            ggml.backend_buffer_free(memory)
            ggml.free(context)
        raise MemoryError("no memory for the weights")

    def _can_multiply(self, device: int, tensor: int, width: int) -> bool:
        context = self._ggml.context()
        x = self._ggml.new_tensor_3d(context, F32_TYPE, width, 1, 1)
        ids = self._ggml.new_tensor_2d(context, I32_TYPE, self._job.top_k, 1)
        can = self._ggml.backend_dev_supports_op(device, self._ggml.mul_mat_id(context, tensor, x, ids))
        self._ggml.free(context)
        return bool(can)

    def _graph(self, rows: int) -> tuple[int, ...]:
        """Graph, x, ids, weights and y of steps of so many rows, with their memory."""
        if rows in self._graphs:
            return self._graphs[rows]
        ggml, job = self._ggml, self._job
        context = ggml.context()
        x = ggml.new_tensor_3d(context, F32_TYPE, job.hidden_size, 1, rows)
        ids = ggml.new_tensor_2d(context, I32_TYPE, job.top_k, rows)
        weights = ggml.new_tensor_3d(context, F32_TYPE, 1, job.top_k, rows)
        for given in (x, ids, weights):
            ggml.set_input(given)
        gate, up, down = self._tensors
        up_rows = ggml.mul_mat_id(context, up, x, ids)
        gate_rows = ggml.mul_mat_id(context, gate, x, ids)
        each = ggml.mul_mat_id(context, down, ggml.swiglu_split(context, gate_rows, up_rows), ids)
        each = ggml.mul(context, each, weights)
        row_bytes = 4 * job.hidden_size
        y = None
        for place in range(job.top_k):
            view = ggml.view_2d(
                context, each, job.hidden_size, rows, row_bytes * job.top_k, row_bytes * place
            )
            y = view if y is None else ggml.add(context, y, view)
        if job.top_k == 1:
            y = ggml.cont(context, y)
        ggml.set_output(y)
        graph = ggml.new_graph(context)
        ggml.build_forward_expand(graph, y)
        if not ggml.gallocr_alloc_graph(ggml.gallocr_new(ggml.backend_cpu_buffer_type()), graph):
            raise MemoryError(f"no memory for a graph of {rows} rows")
        self._graphs[rows] = (graph, x, ids, weights, y)
        self._set(x, np.random.default_rng(5).standard_normal((rows, job.hidden_size), np.float32))
        self._set(weights, np.full((rows, job.top_k), 1 / job.top_k, np.float32))
        return self._graphs[rows]

    def _set(self, tensor: int, values: F32 | npt.NDArray[np.int32]) -> None:
        values = np.ascontiguousarray(values)
        self._ggml.backend_tensor_set(tensor, values.ctypes.data, 0, values.nbytes)

    def _compute(self, graph: int) -> float:
        start = time.perf_counter()
        status = self._ggml.backend_graph_compute(self._backend, graph)
        elapsed = time.perf_counter() - start
        if status:
            raise RuntimeError(f"ggml_backend_graph_compute returned {status}")
        return elapsed

    def step(self, x: F32, ids: I64, weights: F32) -> F32:
        """The routed experts' weighted sum."""
        graph, x_tensor, ids_tensor, weights_tensor, y_tensor = self._graph(len(x))
        self._set(x_tensor, x)
        self._set(ids_tensor, ids.astype(np.int32))
        self._set(weights_tensor, weights)
        self._compute(graph)
        y = np.empty_like(x)
        self._ggml.backend_tensor_get(y_tensor, y.ctypes.data, 0, y.nbytes)
        return y

    def timed(self, rows: int, ids: I64) -> float:
        """Seconds of a step."""
        graph, _x, ids_tensor, _weights, _y = self._graph(rows)
        self._set(ids_tensor, ids.astype(np.int32))
        return self._compute(graph)


if __name__ == "__main__":
    serve(LlamaCpp)
