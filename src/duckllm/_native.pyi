"""
Native parts of duck-llm: expert kernels, wire format, transport and the worker's step loop.
"""

import numpy
import numpy.typing

def select_isa() -> str:
    """
    Name of the instruction set that the kernels use: the best that this machine can run, or the one that
    DUCK_FORCE_ISA names.

    Raises:
        ValueError: DUCK_FORCE_ISA names none, or one that this machine lacks.
    """

def available_isas() -> list[str]:
    """
    Names of the instruction sets that this machine can run, from the slowest to the best.
    """

def unit_bytes(hidden_size: int) -> int:
    """Bytes of one unit (expert, stripe) in the fp9 format."""

def count_nan_e4m3(bytes: numpy.typing.NDArray[numpy.uint8]) -> int:
    """
    How many of the bytes are e4m3 NaN (0x7f, 0xff).

    Shapes:
        bytes: any, uint8, contiguous
    """

def pack_expert_units(
    gate: numpy.typing.NDArray[numpy.uint8],
    up: numpy.typing.NDArray[numpy.uint8],
    down: numpy.typing.NDArray[numpy.uint8],
    gate_scale: numpy.typing.NDArray[numpy.float32],
    up_scale: numpy.typing.NDArray[numpy.float32],
    down_scale: numpy.typing.NDArray[numpy.float32],
    out: numpy.typing.NDArray[numpy.uint8] | None = None,
) -> numpy.typing.NDArray[numpy.uint8]:
    """
    Packs one e4m3 expert into fp9 units.

    Shapes:
        gate, up: [I, H] uint8; down: [H, I] uint8
        gate_scale, up_scale: [ceil(I/128), ceil(H/128)] f32; down_scale: [ceil(H/128), ceil(I/128)] f32
        out, result: [ceil(I/16), unit_bytes(H)] uint8

    Raises:
        ValueError: a wrong shape or type, or NaN bytes (with their count).

    Reference:
        duckllm.weights.fp9, byte for byte
    """

def quantize_e4m3_blocks(
    weights: numpy.typing.NDArray[numpy.float32],
) -> tuple[numpy.typing.NDArray[numpy.uint8], numpy.typing.NDArray[numpy.float32]]:
    """
    Quantises f32 weights to e4m3 with one scale, amax / 448, per 128x128 block.

    Shapes:
        weights: [R, C] f32; result: ([R, C] uint8, [ceil(R/128), ceil(C/128)] f32)

    Raises:
        ValueError: a weight is not finite (with their count).

    Reference:
        duckllm.weights.fp9, byte for byte
    """

class Experts:
    """
    The routed-expert function of one slice of stripes, with its threads and scratch memory.

    One run at a time. csrc/kernels/experts.h states the order of summation, the error bound and
    the valid ranges; a row's result depends neither on the other rows nor on the threads.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        first_stripe: int,
        num_stripes: int,
        max_tokens: int,
        num_threads: int,
        spin_us: int,
        isa: str = "auto",
    ) -> None: ...
    def run(
        self,
        units: numpy.typing.NDArray[numpy.uint8],
        x: numpy.typing.NDArray[numpy.float32] | numpy.typing.NDArray[numpy.uint16],
        topk_ids: numpy.typing.NDArray[numpy.int32],
        topk_weights: numpy.typing.NDArray[numpy.float32],
        units_first_stripe: int = 0,
        out: numpy.typing.NDArray[numpy.float32] | None = None,
    ) -> numpy.typing.NDArray[numpy.float32]:
        """
        The weighted sum of the rows' experts, restricted to the slice: partial sums [T, H] f32.

        Shapes:
            units: [E, any, unit_bytes(H)] uint8, the stripes from units_first_stripe on; may be a memory map
            x: [T, H] f32, or bf16 as uint16; topk_ids: [T, K] int32; topk_weights: [T, K] f32
            out, result: [T, H] f32

        Raises:
            ValueError: a wrong shape or type, T over max_tokens, K over top_k, an id outside 0..E-1;
                out is then untouched.

        Threading:
            Releases the interpreter; one run at a time per object.

        Reference:
            tests/kernels/expert_reference.py, float64, with the bound of experts.h
        """

    @property
    def isa(self) -> str: ...
    @property
    def num_threads(self) -> int: ...
