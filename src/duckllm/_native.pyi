"""
Native parts of duck-llm: kernels of experts and dense layers, attention, row-wise operations, wire format, transport, the worker's step loop and a stand-in below it, and the loops that measure a machine's ceilings.
"""

import enum
from collections.abc import Sequence
from typing import Annotated

import numpy
import numpy.typing
from numpy.typing import NDArray

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

def available_bf16() -> list[str]:
    """
    Names of the bf16 multipliers that prefill='bf16' can use here, avx512_bf16 and amx_bf16, from the
    slowest to the best.
    """

def select_bf16(isa: str) -> str:
    """
    Name of the bf16 multipliers that prefill='bf16' uses with an instruction set: the best, or those that
    DUCK_FORCE_BF16 names.

    Raises:
        ValueError: there are none, another ISA than avx512, or the variable names none that is there.
    """

def available_integer(isa: str) -> list[str]:
    """
    Names of the integer multipliers that go with an instruction set here, from the slowest to the best:
    scalar, avx2, avx_vnni, avx512_vnni_256, avx512_vnni, amx_int8. DUCK_FORCE_INTEGER names one to use.
    """

def unit_bytes(hidden_size: int, format: str = "fp9", scale_layout: str = "block") -> int:
    """
    Bytes of one unit (expert, stripe) in a format, scales by block, channel or group.

    Raises:
        ValueError: another format or layout, or a size out of range.
    """

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
    format: str = "fp9",
    scale_layout: str = "block",
) -> numpy.typing.NDArray[numpy.uint8]:
    """
    Packs one e4m3 expert into units of the format fp9 or fp8, or one of int8 codes into int8 ones, scales
    by block or channel.

    Shapes:
        gate, up: [I, H] uint8; down: [H, I] uint8
        gate_scale, up_scale: [ceil(I/128), ceil(H/128)] f32; down_scale: [ceil(H/128), ceil(I/128)] f32
            in the layout channel gate_scale, up_scale: [I, 1] f32; down_scale: [H, 1] f32
        out, result: [ceil(I/16), unit_bytes(H, format, scale_layout)] uint8

    Raises:
        ValueError: a wrong shape or type, or NaN bytes (with their count); in int8 bytes 0.

    Reference:
        duckllm.weights.units, byte for byte
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
        duckllm.weights.e4m3, byte for byte
    """

class Experts:
    """
    The routed-expert function of one slice of stripes, with its threads and scratch memory.

    One run at a time. csrc/kernels/experts.h states the order of summation, the error bound and
    the valid ranges; a row's result depends neither on the other rows nor on the threads. With
    pin_threads each thread stays on a core of its own, the caller's while it computes. With prefill
    bf16, experts of more than 8 rows of a step take x and activations rounded to bf16; experts.h states
    the error, and that a row's result then also depends on whether its expert has more than 8 rows.
    Weights in int8, int4 or mxfp4 are multiplied with x and activations rounded to bytes by groups, or
    with activations='f32' as they are, which is slow and there to judge the rounding.

    Raises:
        ValueError: sizes or names that make no sense; bf16 where the CPU or the ISA lacks it.
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
        format: str = "fp9",
        pin_threads: bool = False,
        prefill: str = "f32",
        scale_layout: str = "block",
        activations: str = "int8",
    ) -> None: ...
    def run(
        self,
        units: numpy.typing.NDArray[numpy.uint8],
        x: numpy.typing.NDArray[numpy.float32] | numpy.typing.NDArray[numpy.uint16],
        topk_ids: numpy.typing.NDArray[numpy.int32],
        topk_weights: numpy.typing.NDArray[numpy.float32],
        units_first_stripe: int = 0,
        out: numpy.typing.NDArray[numpy.float32] | None = None,
        format: str | None = None,
        scale_layout: str | None = None,
    ) -> numpy.typing.NDArray[numpy.float32]:
        """
        The weighted sum of the rows' experts, restricted to the slice: partial sums [T, H] f32.

        Shapes:
            units: [E, any, unit_bytes(H, format, scale_layout)] uint8, the stripes from units_first_stripe on; may be a memory map
            x: [T, H] f32, or bf16 as uint16; topk_ids: [T, K] int32; topk_weights: [T, K] f32
            out, result: [T, H] f32

        format, scale_layout: of these units, where they are not the constructor's.

        Raises:
            ValueError: a wrong shape or type, T over max_tokens, K over top_k, an id outside 0..E-1;
                out is then untouched.

        Threading:
            Releases the interpreter; one run at a time per object, and in the process that made
            it: others are refused with RuntimeError.

        Reference:
            tests/kernels/expert_reference.py, float64, with the bound of experts.h
        """

    def read_units(
        self,
        units: numpy.typing.NDArray[numpy.uint8],
        topk_ids: numpy.typing.NDArray[numpy.int32],
        units_first_stripe: int = 0,
        format: str | None = None,
        scale_layout: str | None = None,
    ) -> int:
        """
        Reads the units that run would read for these ids, each once, on the same threads, and computes
        nothing: the ceiling to measure run against. The exclusive or of their 64-bit words.
        """

    def time_steps(
        self,
        units: numpy.typing.NDArray[numpy.uint8],
        x: numpy.typing.NDArray[numpy.float32],
        topk_ids: numpy.typing.NDArray[numpy.int32],
        topk_weights: numpy.typing.NDArray[numpy.float32],
        out: numpy.typing.NDArray[numpy.float32],
        compute: bool = True,
    ) -> list[float]:
        """
        Runs one step after another, as run does or, without compute, as read_units does: the seconds of
        each.

        Shapes:
            units: [E, S, unit_bytes(H, format, scale_layout)] uint8, from stripe 0 on; x: [T, H] f32
            topk_ids: [N, T, K] int32, a step each; topk_weights: [T, K] f32
            out: [T, H] f32, the last step's sums

        Raises:
            ValueError: as run does.
        """

    @property
    def isa(self) -> str: ...
    @property
    def prefill(self) -> str:
        """f32, or the name of the bf16 multipliers: available_bf16()."""

    @property
    def integer(self) -> str:
        """
        Name of the multipliers of int8, int4 and mxfp4: of available_integer().
        """

    @property
    def num_threads(self) -> int: ...

def linear_bytes(out_features: int, in_features: int, format: str) -> int:
    """
    Bytes of a packed weight [N, K] in the format bf16, f32, fp8 or fp9, its scales not counted.

    Raises:
        ValueError: another format, or a size out of range.
    """

def pack_linear(
    weight: numpy.typing.NDArray[numpy.uint8]
    | numpy.typing.NDArray[numpy.uint16]
    | numpy.typing.NDArray[numpy.float32],
    format: str,
) -> numpy.typing.NDArray[numpy.uint8]:
    """
    Packs a dense weight for LinearRuntime.

    Shapes:
        weight: [N, K], e4m3 as uint8 for fp8 and fp9, bfloat16 as uint16 for bf16, float32 for f32
        result: [linear_bytes(N, K, format)] uint8

    Raises:
        ValueError: a wrong shape or type, or NaN bytes of e4m3 (with their count).
    """

class LinearRuntime:
    """
    What dense linear layers share: threads and scratch memory.

    One run at a time. csrc/kernels/linear.h states the order of summation, the error bound and the
    valid ranges; a row's result depends neither on the other rows nor on the threads.

    max_rows: rows that the scratch memory holds; more of them are taken by turns.
    max_in_features: the largest in_features.
    """

    def __init__(
        self, max_rows: int, max_in_features: int, num_threads: int, spin_us: int, isa: str = "auto"
    ) -> None: ...
    def run(
        self,
        packed: numpy.typing.NDArray[numpy.uint8],
        scales: numpy.typing.NDArray[numpy.float32] | None,
        out_features: int,
        in_features: int,
        format: str,
        x: numpy.typing.NDArray[numpy.float32] | numpy.typing.NDArray[numpy.uint16],
        out: numpy.typing.NDArray[numpy.float32] | None = None,
    ) -> numpy.typing.NDArray[numpy.float32]:
        """
        y = x W^T, [T, N] f32.

        Shapes:
            packed: of pack_linear; scales: [ceil(N/128), ceil(K/128)] f32, None for bf16 and f32
            x: [T, K] f32, or bf16 as uint16; out, result: [T, N] f32

        Raises:
            ValueError: a wrong shape or type, or K over max_in_features; out is then untouched.

        Threading:
            Releases the interpreter; one run at a time per object, and in the process that made
            it: others are refused with RuntimeError.

        Reference:
            tests/linear/linear_reference.py, float64, with the bound of linear.h
        """

    @property
    def isa(self) -> str: ...
    @property
    def num_threads(self) -> int: ...
    @property
    def max_in_features(self) -> int: ...

def quantise_int8_blocks(
    weights: numpy.typing.NDArray[numpy.float32],
) -> tuple[
    numpy.typing.NDArray[numpy.uint8], numpy.typing.NDArray[numpy.float32], tuple[float, float, float, int]
]:
    """
    Quantises f32 weights to bytes q + 128 with one scale, amax / 127, per 128x128 block.

    Shapes:
        weights: [R, C] f32
        result: ([R, C] uint8, [ceil(R/128), ceil(C/128)] f32, sums: squared error, squared source,
            largest error over its block's largest weight, weights that became 0)

    Raises:
        ValueError: a weight is not finite (with their count).

    Reference:
        duckllm.weights.rounding, byte for byte
    """

def quantise_int4_groups(
    weights: numpy.typing.NDArray[numpy.float32],
    group_size: int,
    scale_type: str = "f16",
    importance: numpy.typing.NDArray[numpy.float32] | None = None,
    isa: str = "auto",
) -> tuple[
    numpy.typing.NDArray[numpy.uint8], numpy.typing.NDArray[numpy.uint16], tuple[float, float, float, int]
]:
    """
    Quantises f32 weights to codes q + 8 with a 16-bit scale per group along the columns, searched for
    the least squared error, weighted by the importance of columns; csrc/kernels/quantise.h says how.

    Shapes:
        weights: [R, C] f32; importance: [C] f32
        result: ([R, C] uint8, [R, ceil(C/group_size)] uint16, sums as of quantise_int8_blocks)

    Raises:
        ValueError: a weight is not finite (with their count), or an argument is out of range.

    Reference:
        duckllm.weights.rounding, byte for byte
    """

def pack_grouped_units(
    codes: list[numpy.typing.NDArray[numpy.uint8]],
    scale_words: list[numpy.typing.NDArray[numpy.uint16]],
    zeros: list[numpy.typing.NDArray[numpy.uint8] | None],
    group_sizes: list[int],
    format: str,
) -> numpy.typing.NDArray[numpy.uint8]:
    """
    Packs one expert of 4-bit codes, its gate, up and down, into units of a format of groups.

    Shapes:
        codes: [I, H], [I, H], [H, I] uint8, 0 to 15; scale_words, zeros: [rows, groups]
        result: [ceil(I/16), unit_bytes(H, format, 'group')] uint8

    Raises:
        ValueError: a wrong shape, type or size of groups, or zero points that the format has not.

    Reference:
        duckllm.weights.grouped, byte for byte
    """

class StepContexts:
    """
    The rows of a step by the contexts that they belong to, and where these lie.

    Shapes:
        rows: [contexts, 4] int64: start, num_tokens, first, page_tokens
        pages: [all of their pages, up to the step's last token] int32

    Raises:
        ValueError: a number out of range, too few pages or too many.
    """

    def __init__(
        self, rows: numpy.typing.NDArray[numpy.int64], pages: numpy.typing.NDArray[numpy.int32]
    ) -> None: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def longest(self) -> int:
        """Positions that the longest context has, up to the last of the step."""

class Attention:
    """
    Attention over a paged cache, on the threads of a LinearRuntime.

    csrc/attention/attention.h states the order of operations and the error bound; a row's result depends
    neither on the other rows, nor on the threads, nor on where pages lie.
    """

    def __init__(self, runtime: LinearRuntime) -> None: ...
    def store(
        self,
        step: StepContexts,
        values: numpy.typing.NDArray[numpy.float32],
        cache: numpy.typing.NDArray[numpy.float32],
    ) -> None:
        """
        Puts the step's rows where their positions lie in the cache.

        Shapes:
            values: [T, width]; cache: [slots, width]

        Raises:
            ValueError: a wrong shape or type, or a page beyond the cache.
        """

    def attend(
        self,
        step: StepContexts,
        q: numpy.typing.NDArray[numpy.float32],
        keys: numpy.typing.NDArray[numpy.float32],
        values: numpy.typing.NDArray[numpy.float32],
        num_kv_heads: int,
        value_dim: int,
        scale: float,
        window: int,
        selection: numpy.typing.NDArray[numpy.int32] | None,
    ) -> numpy.typing.NDArray[numpy.float32]:
        """
        Softmax attention of each row to its context, or to the positions that are selected for it.

        window: positions that a row attends to, itself included; 0 for all.

        Shapes:
            q: [T, heads, D]; keys: [slots, kv_heads * D]; values: [slots, kv_heads * value_dim], or the
            keys again: of one kv head, the first value_dim numbers
            selection: [T, topk] of select; result: [T, heads, value_dim]

        Raises:
            ValueError: a wrong shape or type, or a page or position outside.

        Threading:
            Releases the interpreter; one computation at a time per LinearRuntime, and in the
            process that made it: others are refused with RuntimeError.

        Reference:
            tests/attention/attention_reference.py, float64, with the bound of attention.h
        """

    def select(
        self,
        step: StepContexts,
        q: numpy.typing.NDArray[numpy.float32],
        weights: numpy.typing.NDArray[numpy.float32],
        keys: numpy.typing.NDArray[numpy.float32],
        topk: int,
    ) -> numpy.typing.NDArray[numpy.int32]:
        """
        The positions of each row's topk best scores, sum over heads of weight * max(0, q . k), ascending;
        of equal scores the lowest positions. -1 comes first where a row sees no more than topk.

        Shapes:
            q: [T, heads, D]; weights: [T, heads]; keys: [slots, D]; result: [T, topk]

        Raises:
            ValueError: a wrong shape or type, or a page beyond the cache.

        Threading:
            Releases the interpreter; one computation at a time per LinearRuntime, and in the
            process that made it: others are refused with RuntimeError.
        """

    def multiply_heads(
        self,
        x: numpy.typing.NDArray[numpy.float32],
        w: numpy.typing.NDArray[numpy.float32],
        outputs: int,
        out: numpy.typing.NDArray[numpy.float32],
    ) -> None:
        """
        out[t, h] = x[t, h] W[h]; the last dimension of x and out lies side by side, others anyhow.

        Shapes:
            x: [T, heads, K]; w: [heads, ceil(N / 32), K, 32], zero beyond N; out: [T, heads, N]

        Raises:
            ValueError: a wrong shape or type.

        Threading:
            Releases the interpreter; one computation at a time per LinearRuntime, and in the
            process that made it: others are refused with RuntimeError.
        """

def rotate(
    x: numpy.typing.NDArray[numpy.float32],
    cos: numpy.typing.NDArray[numpy.float32],
    sin: numpy.typing.NDArray[numpy.float32],
    interleaved: bool,
    out: numpy.typing.NDArray[numpy.float32],
) -> None:
    """
    Pairs of numbers turned: (a cos - b sin, b cos + a sin). Pairs are neighbours, or lie in the two
    halves; out has the first numbers of all pairs, then the second ones. out may be x.

    Shapes:
        x, out: [T, D] or [T, heads, D], the last dimension side by side; cos, sin: [T, D / 2]

    Raises:
        ValueError: a wrong shape or type.
    """

def select_topk(scores: numpy.typing.NDArray[numpy.float32], topk: int) -> numpy.typing.NDArray[numpy.int32]:
    """
    The positions of the topk largest scores of each row, ascending; of equal ones the lowest.

    Shapes:
        scores: [T, S]; result: [T, topk]

    Raises:
        ValueError: a wrong shape or type, or topk not in 1 to S.
    """

def rms_norm(
    x: numpy.typing.NDArray[numpy.float32],
    weight: numpy.typing.NDArray[numpy.float32],
    eps: float,
    isa: str = "auto",
) -> numpy.typing.NDArray[numpy.float32]:
    """
    x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    Shapes:
        x: [size], [T, size] or [T, heads, size] f32, rows of any distance
        weight: [size] f32; result: of x, contiguous

    Raises:
        ValueError: a wrong shape or type, rows that are not contiguous, or an eps below 0.

    Threading:
        Releases the interpreter.

    Reference:
        tests/rowwise, float64, with the bound of csrc/rowwise/row_kernels.h
    """

def layer_norm(
    x: numpy.typing.NDArray[numpy.float32],
    weight: numpy.typing.NDArray[numpy.float32],
    bias: numpy.typing.NDArray[numpy.float32],
    eps: float,
    isa: str = "auto",
) -> numpy.typing.NDArray[numpy.float32]:
    """
    (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias over the last dimension.

    Shapes:
        x: [size], [T, size] or [T, heads, size] f32, rows of any distance
        weight, bias: [size] f32; result: of x, contiguous

    Raises:
        ValueError: a wrong shape or type, rows that are not contiguous, or an eps below 0.

    Threading:
        Releases the interpreter.

    Reference:
        tests/rowwise, float64, with the bound of csrc/rowwise/row_kernels.h
    """

def silu_mul(
    gate_up: numpy.typing.NDArray[numpy.float32], isa: str = "auto"
) -> numpy.typing.NDArray[numpy.float32]:
    """
    silu(gate) * up, the two side by side.

    Shapes:
        gate_up: [T, 2 I] f32; result: [T, I] f32

    Raises:
        ValueError: a wrong shape or type.

    Threading:
        Releases the interpreter.

    Reference:
        tests/rowwise, float64, with the bound of csrc/rowwise/row_kernels.h
    """

def scale_by_sigmoid(
    values: numpy.typing.NDArray[numpy.float32],
    logits: numpy.typing.NDArray[numpy.float32],
    isa: str = "auto",
) -> None:
    """
    Multiplies each row of values by the sigmoid of its logit, in place.

    Shapes:
        values: [T, H] f32; logits: [T, 1] f32

    Raises:
        ValueError: a wrong shape or type; values are then untouched.

    Threading:
        Releases the interpreter.
    """

def route_by_sigmoid(
    logits: numpy.typing.NDArray[numpy.float32],
    correction_bias: numpy.typing.NDArray[numpy.float32],
    top_k: int,
    num_groups: int,
    topk_group: int,
    normalize: bool,
    scaling_factor: float,
    isa: str = "auto",
) -> tuple[numpy.typing.NDArray[numpy.int32], numpy.typing.NDArray[numpy.float32]]:
    """
    topk_ids and topk_weights by sigmoid scores, as csrc/rowwise/route.h says.

    Shapes:
        logits: [T, E] f32; topk_ids: [T, K] int32; topk_weights: [T, K] f32

    Raises:
        ValueError: a wrong shape or type, or a number out of range.

    Threading:
        Releases the interpreter.

    Reference:
        tests/moe/test_router.py and tests/rowwise have scalar twins
    """

def route_by_softmax(
    logits: numpy.typing.NDArray[numpy.float32], top_k: int, normalize: bool, isa: str = "auto"
) -> tuple[numpy.typing.NDArray[numpy.int32], numpy.typing.NDArray[numpy.float32]]:
    """
    topk_ids and topk_weights by a softmax over all experts.

    Shapes:
        logits: [T, E] f32; topk_ids: [T, K] int32; topk_weights: [T, K] f32

    Raises:
        ValueError: a wrong shape or type, or a number out of range.

    Threading:
        Releases the interpreter.

    Reference:
        tests/moe/test_router.py and tests/rowwise have scalar twins
    """

PROTOCOL_VERSION: int = 4

FRAME_HEADER_BYTES: int = 24

STEP_REQUEST_HEADER_BYTES: int = 16

STEP_REPLY_HEADER_BYTES: int = 40

NONCE_BYTES: int = 32

SHARD_HEADER_BYTES: int = 16

MAX_SHARD_PIECE_BYTES: int = 1048576

MAX_PING_BYTES: int = 1048576

class FrameType(enum.Enum):
    """Types of frames, see docs/wire-format.md."""

    AUTH_OPEN = 1

    AUTH_CHALLENGE = 2

    AUTH_PROOF = 3

    HELLO = 4

    PREPARE = 5

    READY = 6

    ERROR = 7

    STEP_REQUEST = 8

    STEP_REPLY = 9

    CLOSE = 10

    FETCH = 11

    SHARD = 12

    PING = 13

    STEP_SENT = 14

    STEP_MISSING = 15

    STEP_PART = 16

    STEP_OVER = 17

class ErrorCode(enum.Enum):
    """What an ERROR frame is about."""

    PROTOCOL = 1

    VERSION = 2

    AUTHENTICATION = 3

    BUSY = 4

    PLAN = 5

    MODEL_NOT_FOUND = 6

    CHECKPOINT = 7

    WEIGHT_FORMAT = 8

    WEIGHT_HASH = 9

    TIMEOUT = 10

    INTERNAL = 11

    DISK_SPACE = 12

class WireError(ValueError):
    """
    Bytes that do not follow the wire format; args are the ErrorCode and a sentence.
    """

def payload_limits(type: FrameType) -> tuple[int, int]:
    """The smallest and largest payload of a frame type, bytes."""

def encode_frame_header(type: FrameType, payload_bytes: int, sequence: int = 0) -> bytes:
    """The 24 bytes before a payload."""

def decode_frame_header(data: bytes) -> tuple[FrameType, int, int]:
    """(type, payload_bytes, sequence); raises WireError."""

def encode_step_request_header(
    layer: int, num_tokens: int, top_k: int, lane: int = 0, x_bf16: bool = False, reply_bf16: bool = False
) -> bytes:
    """The first 16 payload bytes of a STEP_REQUEST."""

def decode_step_reply_header(data: bytes) -> tuple[int, int, int, int, bool]:
    """(layer, num_tokens, compute_us, lane, reply_bf16); raises WireError."""

def encode_step_reply_header(
    layer: int,
    num_tokens: int,
    compute_us: int = 0,
    lane: int = 0,
    reply_bf16: bool = False,
    idle_since_ns: int = 0,
    started_ns: int = 0,
    finished_ns: int = 0,
) -> bytes:
    """The first 40 payload bytes of a STEP_REPLY."""

def decode_step_reply_times(data: bytes) -> tuple[int, int, int]:
    """
    (idle_since_ns, started_ns, finished_ns) of the worker's clock; raises WireError.
    """

def encode_error_frame(code: ErrorCode, text: str) -> bytes:
    """A whole ERROR frame, header included."""

def decode_error_payload(data: bytes) -> tuple[int, bytes]:
    """(code as a number, text as UTF-8 bytes); raises WireError."""

def encode_shard_header(layer: int, stripe: int, offset: int) -> bytes:
    """The first 16 payload bytes of a SHARD."""

def decode_shard_header(data: bytes) -> tuple[int, int, int]:
    """(layer, stripe, offset); raises WireError."""

def encode_auth_payload(has_token: bool, nonce: bytes) -> bytes:
    """The payload of AUTH_OPEN and AUTH_CHALLENGE."""

def decode_auth_payload(data: bytes) -> tuple[bool, bytes]:
    """(has_token, nonce); raises WireError."""

def set_connection_options(socket: int) -> None:
    """
    Sets what steps need of a TCP connection, as far as this kernel lets it.
    """

def describe_connection(socket: int) -> str:
    """What of that is active, and what could not be set, in words."""

DATAGRAM_HEADER_BYTES: int = 40

MULTICAST_KEY_BYTES: int = 16

MIN_FRAGMENT_BYTES: int = 64

MAX_FRAGMENT_BYTES: int = 65467

class MulticastSession:
    """What both ends know of the datagrams of step requests by multicast."""

    def __init__(self, session: int, key: bytes, fragment_bytes: int) -> None: ...
    def encode_datagram(self, sequence: int, frame: bytes, index: int) -> bytes:
        """A whole datagram: its header and one fragment of the frame."""

    def decode_datagram(self, data: bytes) -> tuple[int, int, int] | None:
        """
        (sequence, frame_bytes, index), or None for what is not of this session.
        """

def encode_step_missing(sequence: int, received: int, ranges: Sequence[tuple[int, int]]) -> bytes:
    """A whole STEP_MISSING frame; ranges are (first fragment, count)."""

def decode_step_missing(data: bytes, num_fragments: int) -> tuple[int, list[tuple[int, int]]]:
    """(received, ranges) of a payload; raises WireError."""

SHARED_MEMORY_BYTES: int = 33558528

class SharedMemory:
    """One end of the memory that a host and a worker on its machine share."""

    def __init__(self, *, is_host: bool, memory_fd: int, my_bell_fd: int, their_bell_fd: int) -> None:
        """
        Maps a memfd of SHARED_MEMORY_BYTES, sealed against shrinking; the bells are eventfds, of which copies are kept. RuntimeError where it cannot be mapped, ValueError where it does not fit.
        """

    def reset(self) -> None:
        """Empties it. Only while neither end uses it."""

class TransportError(RuntimeError):
    """
    A worker is lost; args are its index, the layer (or None) and the reason.
    """

class LayerTimes:
    """Means over a layer's last steps, one a worker, microseconds."""

    @property
    def layer(self) -> int: ...
    @property
    def num_steps(self) -> int: ...
    @property
    def tokens(self) -> float: ...
    @property
    def compute_us(self) -> list[float]: ...
    @property
    def round_trip_us(self) -> list[float]: ...
    @property
    def wait_us(self) -> list[float]: ...

class StepTrace:
    """Moments of steps, kept until they are drained as trace events."""

    def __init__(self, capacity_bytes: int) -> None: ...
    @property
    def pending_bytes(self) -> int:
        """Bytes of records that wait to be drained."""

    @property
    def capacity_bytes(self) -> int:
        """Room for such bytes."""

    @property
    def num_dropped(self) -> int:
        """Steps that there was no room for, so far."""

    def record_engine(
        self,
        end_ns: int,
        seconds: float,
        prompt_tokens: int,
        decode_tokens: int,
        new_tokens: int,
        attention_s: float,
        dense_s: float,
        dispatch_s: float,
        wait_s: float,
        combine_s: float,
        head_s: float,
        sampling_s: float,
        device_s: float,
        draft_s: float,
    ) -> int:
        """
        Notes a step of the engine and the seconds of its parts; bytes that wait to be drained then.
        """

    def drain(self, origin_ns: int) -> bytes:
        """
        Trace events in JSON, each with a comma and a line break before it; microseconds from origin_ns on.
        """

class Transport:
    """Steps to every worker, partial sums back, added in worker order."""

    def __init__(
        self,
        sockets: Sequence[int],
        *,
        memories: Sequence[SharedMemory | None] = [],
        hidden_size: int,
        top_k: int,
        max_step_tokens: int,
        x_bf16: bool = False,
        reply_bf16: bool = False,
        step_timeout_ms: int = 30000,
        submit_timeout_ms: int = 400,
        spin_us: int = 0,
        multicast_socket: int = -1,
        multicast_session: MulticastSession | None = None,
        multicast_group: str = "",
        multicast_bytes: Sequence[int] = [],
    ) -> None: ...
    def submit(
        self,
        layer: int,
        x: Annotated[
            NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu", writable=False)
        ],
        topk_ids: Annotated[
            NDArray[numpy.int32], dict(shape=(None, None), order="C", device="cpu", writable=False)
        ],
        topk_weights: Annotated[
            NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu", writable=False)
        ],
        lane: int = 0,
    ) -> int:
        """
        Sends x [T, H] f32, topk_ids [T, K] i32, topk_weights [T, K] f32 to every worker that is not lost; returns a ticket.
        """

    def wait(
        self,
        ticket: int,
        out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu")],
    ) -> None:
        """Writes the sum of the workers' replies into out [T, H] f32."""

    def wait_some(self, ticket: int, ms: int) -> list[int]:
        """
        Waits for a step at most this long; the workers that have not answered it by then.
        """

    def drop(self, worker: int, reason: str) -> None:
        """Closes the connection of a worker that is known to be lost."""

    def look(self) -> None:
        """
        Takes what has come while no step is waited for; who has closed its connection is lost.
        """

    def lost(self) -> list[int]:
        """The workers that are lost, ascending."""

    def replace(
        self, worker: int, socket: int, memory: SharedMemory | None = None, multicast_bytes: int = 0
    ) -> None:
        """
        Gives a worker's place to another connection, and sends it what is in flight.
        """

    def describe(self) -> list[str]:
        """How each worker is spoken with, in words."""

    def multicast_counts(self) -> tuple[int, list[int], list[bool]]:
        """
        (datagrams sent, fragments that each worker asked for again, whether it is reached).
        """

    def take_unreached(self) -> list[int]:
        """Workers that multicast was found not to reach since the last call."""

    def give_up(self) -> None:
        """Gives every step in flight up."""

    def ticket_tokens(self, ticket: int) -> int:
        """T of a step in flight."""

    def last_compute_us(self) -> list[int]:
        """Each worker's own time for the step last waited for, microseconds."""

    def step_times(self) -> list[LayerTimes]:
        """
        Means over each layer's last steps; does not wait for a step that is under way.
        """

    def measure_host_time(self, on: bool) -> None:
        """
        Measures from now on what the host's own work costs, from zero; or stops to.
        """

    def host_time(self) -> list[tuple[int, int, int]]:
        """
        (CPU ns, wall ns, times) of packing, sending, sleeping, receiving, combining since then.
        """

    def set_trace(self, trace: StepTrace | None) -> None:
        """Notes every step from now on; None ends it."""

    def close(self) -> None: ...
    @property
    def closed(self) -> bool: ...

EXCHANGE_LINE_WORDS: int = 32

EXCHANGE_REPLY_LINES: int = 16

EXCHANGE_TIMED_OUT: int = 2

class Program:
    """The steps of a captured graph, in the order of publishing."""

    def __init__(self) -> None: ...
    def append(self, layer: int, lane: int, num_rows: int, top_k: int, num_flags: int) -> None:
        """
        Adds a step: num_rows rows of top_k experts, published by num_flags programs.
        """

    def steps(self) -> list[tuple[int, int, int, int, int]]:
        """(layer, lane, num_rows, top_k, num_flags) of each step."""

    def __len__(self) -> int: ...

class LaneServer:
    """Who computes the steps that an exchange takes from a GPU."""

def transport_server(transport: Transport) -> LaneServer:
    """The workers of a transport."""

def experts_server(
    units: dict[int, numpy.typing.NDArray[numpy.uint8]],
    *,
    hidden_size: int,
    intermediate_size: int,
    top_k: int,
    max_tokens: int,
    num_threads: int,
    spin_us: int,
    isa: str,
    format: str,
    prefill: str,
    scale_layout: str,
    layer_formats: dict[int, str] = {},
) -> LaneServer:
    """
    Whole experts in this process, with threads of their own.

    Shapes:
        units: [E, ceil(I/16), unit_bytes(H, format, scale_layout)] uint8 of each layer

    layer_formats: of the layers whose format is not `format`.

    Raises:
        ValueError: sizes or names that make no sense.
    """

def echo_server(*, delay_us: int = 0, zeros: bool = True) -> LaneServer:
    """Nobody: zeros, or the activations themselves, after a delay."""

class Exchange:
    """
    Serves the steps that a GPU publishes in pinned memory while a captured graph runs.
    """

    def __init__(
        self,
        control: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order="C", device="cpu")],
        lanes: Sequence[
            tuple[
                Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu")],
                Annotated[NDArray[numpy.int32], dict(shape=(None, None), order="C", device="cpu")],
                Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu")],
                Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu")],
            ]
        ],
        server: LaneServer,
        *,
        spin_us: int,
        gpu_timeout_ms: int,
    ) -> None:
        """
        control: [1 + (1 + EXCHANGE_REPLY_LINES) * lanes, EXCHANGE_LINE_WORDS] int32; lanes: x [M, H] f32, topk_ids [M, K] int32,
        topk_weights [M, K] f32, y [M, H] f32 of each.
        """

    def start(self, program: Program, num_tokens: Sequence[int]) -> None:
        """
        Begins to serve a program, whose graph is replayed next. num_tokens: of each lane.
        """

    def finish(self, stall_ms: int) -> bool:
        """
        Waits for the program's end; False where nothing happened for stall_ms.
        """

    def abort(self) -> None:
        """
        Ends the program under way, if there is one, and frees the GPU from waiting.
        """

    def late(self) -> list[int]:
        """The workers that the program waits for."""

    @property
    def num_answered(self) -> int:
        """Steps answered since the exchange was made."""

class MulticastReceiver:
    """Takes step requests by multicast over a UDP socket that it owns."""

    def __init__(self, fd: int, session: MulticastSession) -> None: ...
    @property
    def counts(self) -> tuple[int, int, int, int, int]:
        """
        Datagrams taken, refused and had already, fragments asked for again, steps put together.
        """

class StepServer:
    """The experts of a slice behind one connection at a time."""

    def __init__(
        self,
        *,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        first_stripe: int,
        num_stripes: int,
        max_step_tokens: int,
        num_threads: int,
        spin_us: int = 0,
        frame_timeout_ms: int = 30000,
        send_timeout_ms: int = 60000,
        isa: str = "auto",
        format: str = "fp9",
        pin_threads: bool = False,
        prefill: str = "f32",
        scale_layout: str = "block",
    ) -> None: ...
    def add_layer(
        self,
        layer: int,
        units: Annotated[NDArray[numpy.uint8], dict(shape=(None, None, None), device="cpu", writable=False)],
        format: str | None = None,
        scale_layout: str | None = None,
    ) -> None:
        """
        Takes the slice's units [E, S, unit_bytes] u8 of a layer, each unit contiguous; kept alive, not copied.
        Without a format of its own a layer has the constructor's.
        """

    def serve(
        self, fd: int, memory: SharedMemory | None = None, multicast: MulticastReceiver | None = None
    ) -> tuple[str, str, int]:
        """
        Serves steps until the connection ends: (reason, message, steps_served), where reason is closed, lost, malformed or timeout. Steps go through the memory if there is any, and may come by multicast. Does not close fd.
        """

    @property
    def isa(self) -> str: ...
    @property
    def integer(self) -> str:
        """Name of the multipliers of int8, int4 and mxfp4."""

    @property
    def prefill(self) -> str:
        """f32, or the name of the bf16 multipliers."""

class SimulatedNetwork:
    """The host's port, which all simulated workers share."""

    def __init__(self, host_bytes_per_us: float) -> None:
        """0 bytes a microsecond: it takes no time."""

    def submitted(self, step: int) -> None:
        """Says that the step of this number is handed over now."""

class SimulatedServer:
    """A stand-in for experts behind one connection at a time."""

    def __init__(
        self,
        *,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        first_stripe: int,
        num_stripes: int,
        max_step_tokens: int,
        layers: Sequence[int],
        network: SimulatedNetwork,
        fixed_us: float,
        expert_us: float,
        row_us: float,
        link_bytes_per_us: float,
        delay_us: float,
        request_row_bytes: int,
        reply_row_bytes: int,
    ) -> None: ...
    def serve(
        self, fd: int, memory: SharedMemory | None = None, multicast: MulticastReceiver | None = None
    ) -> tuple[str, str, int]:
        """As StepServer.serve()."""

def recode_units(
    units: numpy.typing.NDArray[numpy.uint8],
    out: numpy.typing.NDArray[numpy.uint8],
    hidden_size: int,
    from_format: str,
    to_format: str,
    scale_layout: str = "block",
) -> None:
    """
    Writes units of one format in another, without loss and with the same scales.

    Shapes:
        units: [E, S, unit_bytes(H, from_format, scale_layout)] uint8, each unit contiguous;
            may be a memory map
        out: [E, S, unit_bytes(H, to_format, scale_layout)] uint8, likewise; must not overlap

    Raises:
        ValueError: a wrong shape or format, or bytes that no finite e4m3 value is stored as.

    Threading:
        Releases the interpreter; threads may share out the experts.

    Reference:
        duckllm.weights.units, byte for byte
    """

def flush_from_caches(units: numpy.typing.NDArray[numpy.uint8]) -> None:
    """
    Makes units be in no cache of this machine, so that the next step reads them from memory.

    Shapes:
        units: [E, S, bytes] uint8, each unit contiguous; may be a memory map
    """

class CeilingLoops:
    """
    Loops that only read, write, copy or multiply and add, timed on threads of their own: the ceilings
    that everything else is measured against. csrc/bench/ceilings.h says what is in a time.

    Shapes:
        data, to, from_: [N] uint8, contiguous, aligned to 64 bytes, N a multiple of granule_bytes

    Units:
        times in seconds; passes over the same memory, the warm ones before the clock starts

    Raises:
        ValueError: an unknown variant or ISA, no pass, memory of another length or alignment.

    Threading:
        Releases the interpreter; one call at a time per object.
    """

    def __init__(self, num_threads: int, isa: str = "auto") -> None: ...
    @staticmethod
    def variants(op: str) -> list[str]:
        """Names of the variants of ``read``, ``fill`` or ``copy``."""

    @property
    def num_threads(self) -> int: ...
    @property
    def isa(self) -> str: ...
    @property
    def granule_bytes(self) -> int: ...
    @property
    def fma_lanes(self) -> int: ...
    @property
    def flop_per_step(self) -> int: ...
    def randomise(self, data: numpy.typing.NDArray[numpy.uint8], seed: int) -> None:
        """
        Writes words that depend on their index and the seed; each thread touches its own part first.
        """

    def read(
        self, variant: str, data: numpy.typing.NDArray[numpy.uint8], passes: int = 1, warm_passes: int = 0
    ) -> tuple[float, int]:
        """Seconds, and the exclusive or of the 64-bit words."""

    def fill(
        self,
        variant: str,
        data: numpy.typing.NDArray[numpy.uint8],
        value: int,
        passes: int = 1,
        warm_passes: int = 0,
    ) -> float:
        """Seconds to write ``value`` to every byte."""

    def copy(
        self,
        variant: str,
        to: numpy.typing.NDArray[numpy.uint8],
        from_: numpy.typing.NDArray[numpy.uint8],
        passes: int = 1,
        warm_passes: int = 0,
    ) -> float:
        """Seconds to copy; the two must not overlap."""

    def fma(self, steps: int) -> tuple[float, float]:
        """
        Seconds for ``steps`` (at most 2^22) of flop_per_step f32 operations each, and the sum of the
        lanes of a thread: with n = fma_lanes exactly n * (n - 1) / 2 + n * steps.
        """
