"""llama.cpp's RPC server with the CPU of this machine: started by whole_model.py in the peers' environment.

    python rpc_server.py LIBRARIES ADDRESS THREADS

llama-cpp-python carries no ``rpc-server`` program; this calls what that program calls.
"""

from __future__ import annotations

import ctypes
import sys
from ctypes import c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path

CPU_DEVICE = 0  # GGML_BACKEND_DEVICE_TYPE_CPU


def main() -> None:
    folder, address, threads = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    libraries = {
        name: ctypes.CDLL(str(folder / f"lib{name}.so"), ctypes.RTLD_GLOBAL)
        for name in ("ggml-base", "ggml-cpu", "ggml-rpc", "ggml")
    }
    device_of = libraries["ggml"].ggml_backend_dev_by_type
    device_of.restype, device_of.argtypes = c_void_p, [c_int]
    devices = (c_void_p * 1)(device_of(CPU_DEVICE))
    start = libraries["ggml-rpc"].ggml_backend_rpc_start_server
    start.restype, start.argtypes = None, [c_char_p, c_char_p, c_size_t, c_size_t, c_void_p]
    start(address.encode(), None, threads, 1, devices)
    sys.exit("the RPC server ended")


if __name__ == "__main__":
    main()
