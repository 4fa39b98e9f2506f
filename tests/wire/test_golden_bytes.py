"""The wire format, byte by byte: a change here is a change of the protocol."""

from __future__ import annotations

import numpy as np
import pytest

from duckllm import _native
from duckllm._native import ErrorCode, FrameType

FIXED = {FrameType.AUTH_OPEN: 36, FrameType.AUTH_CHALLENGE: 36, FrameType.AUTH_PROOF: 32, FrameType.CLOSE: 0}
FIXED |= {FrameType.STEP_SENT: 4, FrameType.STEP_OVER: 0}
RANGES = {
    FrameType.HELLO: (2, 4096),
    FrameType.READY: (2, 4096),
    FrameType.PREPARE: (2, 8 << 20),
    FrameType.ERROR: (4, 4096),
    FrameType.STEP_REQUEST: (16, 1 << 30),
    FrameType.STEP_REPLY: (40, 1 << 30),
    FrameType.FETCH: (2, 4 << 20),
    FrameType.SHARD: (17, (1 << 20) + 16),
    FrameType.PING: (0, 1 << 20),
    FrameType.STEP_MISSING: (16, 4096),
    FrameType.STEP_PART: (5, 1 << 30),
}


def test_frame_header() -> None:
    got = _native.encode_frame_header(FrameType.STEP_REQUEST, 0x01020304, 0x1112131415161718)
    assert got == bytes.fromhex("4455434b 0400 0800 04030201 00000000 1817161514131211")
    assert _native.decode_frame_header(got) == (FrameType.STEP_REQUEST, 0x01020304, 0x1112131415161718)


def test_type_numbers() -> None:
    names = (
        "AUTH_OPEN AUTH_CHALLENGE AUTH_PROOF HELLO PREPARE READY ERROR STEP_REQUEST STEP_REPLY CLOSE "
        "FETCH SHARD PING STEP_SENT STEP_MISSING STEP_PART STEP_OVER"
    )
    assert {kind.name: kind.value for kind in FrameType} == {n: i + 1 for i, n in enumerate(names.split())}
    names = (
        "PROTOCOL VERSION AUTHENTICATION BUSY PLAN MODEL_NOT_FOUND CHECKPOINT WEIGHT_FORMAT WEIGHT_HASH "
        "TIMEOUT INTERNAL DISK_SPACE"
    )
    assert {code.name: code.value for code in ErrorCode} == {n: i + 1 for i, n in enumerate(names.split())}


def test_step_request_header() -> None:
    got = _native.encode_step_request_header(0x01020304, 0x05060708, 0x090A, 0x0B0C, True, False)
    assert got == bytes.fromhex("04030201 08070605 0a09 0c0b 01 00 0000")
    got = _native.encode_step_request_header(1, 2, 3, 4, False, True)
    assert got == bytes.fromhex("01000000 02000000 0300 0400 00 01 0000")


def test_step_reply_header() -> None:
    times = (0x1112131415161718, 0x2122232425262728, 0x3132333435363738)
    got = _native.encode_step_reply_header(0x01020304, 0x05060708, 0x090A0B0C, 0x0D0E, True, *times)
    head = "04030201 08070605 0c0b0a09 0e0d 01 00"
    assert got == bytes.fromhex(f"{head} 1817161514131211 2827262524232221 3837363534333231")
    assert _native.decode_step_reply_times(got) == times
    assert _native.decode_step_reply_header(got) == (0x01020304, 0x05060708, 0x090A0B0C, 0x0D0E, True)


def test_error_frame() -> None:
    got = _native.encode_error_frame(ErrorCode.WEIGHT_HASH, "né")
    assert got == bytes.fromhex("4455434b 0400 0700 07000000 00000000 0000000000000000 09000000 6ec3a9")
    assert _native.decode_error_payload(got[24:]) == (9, "né".encode())


@pytest.mark.parametrize("length", [4091, 4092, 4093, 9000])
def test_a_long_error_text_is_cut_between_characters(length: int) -> None:
    text = "x" * (length % 2) + "é" * (length // 2)
    payload = _native.encode_error_frame(ErrorCode.PROTOCOL, text)[24:]
    got = payload[4:].decode()  # raises when a character was split
    assert text.startswith(got)
    assert len(payload) >= min(len(text.encode()), 4091) + 4
    assert len(payload) <= 4096


def test_shard_header() -> None:
    got = _native.encode_shard_header(0x01020304, 0x05060708, 0x1112131415161718)
    assert got == bytes.fromhex("04030201 08070605 1817161514131211")
    assert _native.decode_shard_header(got) == (0x01020304, 0x05060708, 0x1112131415161718)
    assert (_native.SHARD_HEADER_BYTES, _native.MAX_SHARD_PIECE_BYTES) == (16, 1 << 20)
    with pytest.raises(_native.WireError, match="shard header bytes: got 15, expected 16"):
        _native.decode_shard_header(got[:15])


def test_auth_payload() -> None:
    nonce = bytes(range(32))
    got = _native.encode_auth_payload(True, nonce)
    assert got == bytes.fromhex("01000000") + nonce
    assert _native.decode_auth_payload(got) == (True, nonce)
    assert _native.encode_auth_payload(False, nonce)[:4] == bytes(4)


def test_step_missing() -> None:
    got = _native.encode_step_missing(0x0102, 0x03040506, [(1, 2), (0x0A, 0x0B0C)])
    head = "4455434b 0400 0f00 18000000 00000000 0201000000000000"
    payload = bytes.fromhex("06050403 00000000 01000000 02000000 0a000000 0c0b0000")
    assert got == bytes.fromhex(head) + payload
    assert _native.decode_step_missing(payload, 0x0A + 0x0B0C) == (0x03040506, [(1, 2), (0x0A, 0x0B0C)])


@pytest.mark.parametrize(
    ("offset", "value", "sentence"),
    [
        (4, b"\1", "reserved field: got 1, expected 0"),
        (12, b"\0", "missing fragments: got 1, expected ascending ranges"),
        (12, b"\x0a", "missing fragments: got 10, expected ascending ranges"),
        (20, b"\3", "missing fragments: got 13, expected at most 12"),
    ],
)
def test_a_wrong_step_missing_is_refused(offset: int, value: bytes, sentence: str) -> None:
    good = bytes.fromhex("00000000 00000000 01000000 02000000 0a000000 02000000")
    assert _native.decode_step_missing(good, 12) == (0, [(1, 2), (10, 2)])
    with pytest.raises(_native.WireError, match=sentence):
        _native.decode_step_missing(good[:offset] + value + good[offset + 1 :], 12)
    for length in (0, 7, 9, 23):
        with pytest.raises(_native.WireError, match=f"STEP_MISSING payload bytes: got {length}, expected 8"):
            _native.decode_step_missing(good[:length], 12)


def siphash_2_4(key: bytes, message: bytes) -> int:
    """From the authors' paper, with Python's numbers."""
    most = (1 << 64) - 1
    k0, k1 = (int.from_bytes(key[at : at + 8], "little") for at in (0, 8))
    v = [k0 ^ 0x736F6D6570736575, k1 ^ 0x646F72616E646F6D, k0 ^ 0x6C7967656E657261, k1 ^ 0x7465646279746573]

    def mix(a: int, b: int, bits: int, *, halves: bool) -> None:
        v[a] = (v[a] + v[b]) & most
        v[b] = ((v[b] << bits | v[b] >> (64 - bits)) & most) ^ v[a]
        if halves:
            v[a] = (v[a] << 32 | v[a] >> 32) & most

    def rounds(count: int) -> None:
        for _ in range(count):
            mix(0, 1, 13, halves=True)
            mix(2, 3, 16, halves=False)
            mix(0, 3, 21, halves=False)
            mix(2, 1, 17, halves=True)

    padded = message + bytes(7 - len(message) % 8) + bytes([len(message) % 256])
    for at in range(0, len(padded), 8):
        word = int.from_bytes(padded[at : at + 8], "little")
        v[3] ^= word
        rounds(2)
        v[0] ^= word
    v[2] ^= 0xFF
    rounds(4)
    return v[0] ^ v[1] ^ v[2] ^ v[3]


def test_datagrams() -> None:
    key, frame = bytes(range(0x40, 0x50)), bytes(range(150))
    session = _native.MulticastSession(0x1112131415161718, key, 64)
    for index, size in enumerate((64, 64, 22)):
        fields = f"4455434d 0400 {size:02x}00 1817161514131211 0807060504030201 96000000 0{index}000000"
        head, fragment = bytes.fromhex(fields), frame[64 * index : 64 * index + size]
        tag = siphash_2_4(key, head + fragment).to_bytes(8, "little")
        got = session.encode_datagram(0x0102030405060708, frame, index)
        assert got == head + tag + fragment
        assert session.decode_datagram(got) == (0x0102030405060708, 150, index)
        assert session.decode_datagram(got[:-1]) is None
    assert (_native.DATAGRAM_HEADER_BYTES, _native.MULTICAST_KEY_BYTES) == (40, 16)


@pytest.mark.parametrize("kind", list(FrameType))
def test_payload_limits(kind: FrameType) -> None:
    low, high = RANGES.get(kind, (FIXED.get(kind, 0),) * 2)
    assert _native.payload_limits(kind) == (low, high)
    for good in {low, high}:
        assert _native.decode_frame_header(_native.encode_frame_header(kind, good))[1] == good
    for bad in {low - 1, high + 1} - {-1}:
        with pytest.raises(
            _native.WireError, match=f"{kind.name} payload bytes: got {bad}, expected"
        ) as caught:
            _native.decode_frame_header(_native.encode_frame_header(kind, bad))
        assert caught.value.args[0] == ErrorCode.PROTOCOL


GOOD = _native.encode_frame_header(FrameType.CLOSE, 0, 7)


@pytest.mark.parametrize(
    ("offset", "value", "code", "sentence"),
    [
        (0, b"\0", ErrorCode.PROTOCOL, "magic"),
        (3, b"k", ErrorCode.PROTOCOL, "magic"),
        (4, b"\1", ErrorCode.VERSION, "protocol version: got 1, expected 4"),
        (5, b"\1", ErrorCode.VERSION, "protocol version: got 260, expected 4"),
        (6, b"\0", ErrorCode.PROTOCOL, "frame type: got 0"),
        (6, b"\x12", ErrorCode.PROTOCOL, "frame type: got 18"),
        (7, b"\1", ErrorCode.PROTOCOL, "frame type: got 266"),
        (8, b"\1", ErrorCode.PROTOCOL, "CLOSE payload bytes: got 1, expected 0"),
        (12, b"\1", ErrorCode.PROTOCOL, "reserved bytes: got 1, expected 0"),
        (15, b"\1", ErrorCode.PROTOCOL, "reserved bytes"),
    ],
)
def test_a_wrong_header_is_refused(offset: int, value: bytes, code: ErrorCode, sentence: str) -> None:
    assert _native.decode_frame_header(GOOD) == (FrameType.CLOSE, 0, 7)
    with pytest.raises(_native.WireError, match=sentence) as caught:
        _native.decode_frame_header(GOOD[:offset] + value + GOOD[offset + 1 :])
    assert caught.value.args[0] == code


@pytest.mark.parametrize("length", [*range(24), 25, 48])
def test_a_header_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(_native.WireError, match=f"frame header bytes: got {length}, expected 24"):
        _native.decode_frame_header((GOOD * 2)[:length])


def test_reply_header_fields_out_of_range_are_refused() -> None:
    good = _native.encode_step_reply_header(1, 2)
    with pytest.raises(_native.WireError, match="reply dtype: got 2"):
        _native.decode_step_reply_header(good[:14] + b"\2\0" + good[16:])
    with pytest.raises(_native.WireError, match="step status: got 1, expected 0"):
        _native.decode_step_reply_header(good[:15] + b"\1" + good[16:])


def test_every_random_header_is_decoded_or_refused() -> None:
    generator = np.random.default_rng(5)
    for _ in range(2000):
        data = bytearray(GOOD)
        for _ in range(generator.integers(1, 4)):
            data[generator.integers(0, 24)] = generator.integers(0, 256)
        try:
            kind, payload_bytes, _ = _native.decode_frame_header(bytes(data))
        except _native.WireError:
            continue
        low, high = _native.payload_limits(kind)
        assert low <= payload_bytes <= high
        assert bytes(data[:6]) == GOOD[:6]
