"""The comparison with other engines: its formats, its tables, its processes; no engine and no network."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "peers"
MODULES = (
    "block_formats",
    "peer_install",
    "peer_process",
    "peer_side",
    "comparison",
    "kt_kernel_peer",
    "llama_cpp_peer",
    "experts",
)


@pytest.fixture(scope="module")
def peers() -> Iterator[dict[str, ModuleType]]:
    sys.path.insert(0, str(FOLDER))
    try:
        yield {name: __import__(name) for name in MODULES}
    finally:
        sys.path.remove(str(FOLDER))
        for name in MODULES:
            sys.modules.pop(name, None)


def comparison(peers: dict[str, ModuleType], **changes: object) -> object:
    arguments = {
        "way": peers["comparison"].Way("llama.cpp", "Q8_0", 2),
        "description": "llama.cpp avx512, CPU",
        "rows": 1,
        "error": 0.01234,
        "weights_per_row": 30_000_000,
        "bits": 8.5,
        "seconds": (2e-3, 1e-3, 3e-3),
        "ours": {"fp9": (1e-3, 1e-3, 4e-3), "fp8": (8e-4, 5e-4, 9e-4)},
        "read_gb_per_s": 40.0,
    }
    return peers["comparison"].Comparison(**(arguments | changes))


def test_rates_and_ratios_follow_from_times(peers: dict[str, ModuleType]) -> None:
    decode = comparison(peers)
    assert decode.gb_per_s == pytest.approx(15.9375)
    assert decode.as_json() == {
        "peer": "llama.cpp",
        "weight_format": "Q8_0",
        "threads": 2,
        "description": "llama.cpp avx512, CPU",
        "rows": 1,
        "error": 0.0123,
        "samples": 3,
        "gparam_per_s": 15.0,
        "fastest_gparam_per_s": 30.0,
        "gb_per_s": 15.938,
        "of_ceiling": 0.3984,
        "ours": {
            "fp9": {"gparam_per_s": 30.0, "fastest_gparam_per_s": 30.0},
            "fp8": {"gparam_per_s": 37.5, "fastest_gparam_per_s": 60.0},
        },
        "read_gb_per_s": 40.0,
        "ours_over_theirs": 2.5,
        "fastest_ours_over_theirs": 2.0,
    }
    prefill = comparison(peers, rows=512).as_json()
    assert prefill["gflop_per_s"] == pytest.approx(2 * 512 * 15.0)
    assert "gb_per_s" not in prefill


def test_the_table_has_decode_then_prefill_then_refusals(peers: dict[str, ModuleType]) -> None:
    names = peers["comparison"]
    refusal = names.Refusal(names.Way("kt-kernel", "FP8", 1), "channels in 128s, not 64")
    lines = names.table([refusal, comparison(peers, rows=512), comparison(peers)])
    assert lines[0] == names.DECODE_HEADER
    assert " ".join(lines[1].split()) == (
        "llama.cpp avx512, CPU Q8_0 2 15.0 ( 30.0) 15.9 40% 2.50 (2.00) fp9 30.0, fp8 37.5"
    )
    assert lines[2] == names.PREFILL_HEADER
    assert lines[3].split()[4:9] == ["2", "512", "15360.0", "(30720.0)", "2.50"]
    assert lines[4].endswith("FP8      1  does not run: channels in 128s, not 64")
    assert len(lines) == 5
    assert refusal.as_json() == {
        "peer": "kt-kernel",
        "weight_format": "FP8",
        "threads": 1,
        "refused": "channels in 128s, not 64",
    }


def test_the_summary_takes_the_nearest_rival(peers: dict[str, ModuleType]) -> None:
    names = peers["comparison"]
    four_bit = comparison(peers, way=names.Way("llama.cpp", "Q4_0", 2), seconds=(5e-4,))
    one_thread = comparison(
        peers, way=names.Way("kt-kernel", "FP8", 1), seconds=(1e-3,), ours={"fp8": (9e-4,), "fp9": (1e-3,)}
    )
    prefill = comparison(peers, way=four_bit.way, rows=512, seconds=(4e-4,))
    found = names.summary([comparison(peers), four_bit, one_thread, prefill])
    assert found == {
        "decode_8_bit": {
            "same_threads": {**vars(one_thread.way), "ours_over_theirs": 1.111},
            "same_machine": {**vars(one_thread.way), "ours_over_theirs": 1.25},
        },
        "decode_4_bit": {
            "same_threads": {**vars(four_bit.way), "ours_over_theirs": 0.625},
            "same_machine": {**vars(four_bit.way), "ours_over_theirs": 0.625},
        },
        "prefill_512": {
            "same_threads": {**vars(four_bit.way), "ours_over_theirs": 0.5},
            "same_machine": {**vars(four_bit.way), "ours_over_theirs": 0.5},
        },
    }


def q4_k_value(block: bytes, number: int) -> float:
    """One weight of a Q4_K block, written as ggml's get_scale_min_k4 has it."""
    scale, least = np.frombuffer(block[:4], np.float16).astype(np.float64)
    packed, group = block[4:16], number // 32
    if group < 4:
        six, minimum = packed[group] & 63, packed[group + 4] & 63
    else:
        six = (packed[group + 4] & 15) | ((packed[group - 4] >> 6) << 4)
        minimum = (packed[group + 4] >> 4) | ((packed[group] >> 6) << 4)
    byte = block[16 + number // 64 * 32 + number % 32]
    nibble = byte & 15 if number % 64 < 32 else byte >> 4
    return float(scale * six * nibble - least * minimum)


def test_blocks_mean_what_ggml_says(peers: dict[str, ModuleType]) -> None:
    formats = peers["block_formats"]
    stored, values = formats.random_blocks("Q4_K", 2, 512, np.random.default_rng(1))
    assert stored.shape == (2, 288)
    for number in range(256):
        assert values[1, 256 + number] == pytest.approx(
            q4_k_value(stored[1, 144:].tobytes(), number), abs=1e-6
        )
    stored, values = formats.random_blocks("Q8_0", 1, 64, np.random.default_rng(1))
    scale = float(stored[0, 34:36].view(np.float16)[0])
    assert values[0, 32:] == pytest.approx(stored[0, 36:].view(np.int8) * scale)
    stored, values = formats.random_blocks("Q4_0", 1, 32, np.random.default_rng(1))
    scale = float(stored[0, :2].view(np.float16)[0])
    assert values[0, 3] == pytest.approx(((stored[0, 5] & 15) - 8.0) * scale)
    assert values[0, 19] == pytest.approx(((stored[0, 5] >> 4) - 8.0) * scale)
    with pytest.raises(ValueError, match="Q4_K has blocks of 256 weights: a row of 64 has a part of one"):
        formats.random_blocks("Q4_K", 1, 64, np.random.default_rng(1))


@pytest.mark.parametrize("weight_format", ["FP8", "INT8", "BF16", "Q8_0", "Q4_0", "Q4_K"])
def test_random_experts_are_of_about_unit_gain(peers: dict[str, ModuleType], weight_format: str) -> None:
    formats = peers["block_formats"]
    expert = formats.random_expert(weight_format, 256, 256, seed=1)
    x = np.random.default_rng(2).standard_normal((3, 256)).astype(np.float32)
    y = formats.expert_output(expert, x)
    assert y.shape == (3, 256)
    assert 0.05 < y.std() < 5
    gate, up, down = (each.astype(np.float64) for each in expert.values)
    g, u = gate @ x[1], up @ x[1]
    np.testing.assert_allclose(y[1], down @ (g / (1 + np.exp(-g)) * u), rtol=1e-6, atol=1e-9)


def test_e4m3_and_bf16_values(peers: dict[str, ModuleType]) -> None:
    formats = peers["block_formats"]
    values = formats.e4m3_values()
    assert values[[0x00, 0x01, 0x08, 0x38, 0x7E, 0xB8]].tolist() == [0, 2**-9, 2**-6, 1, 448, -1]
    assert np.isnan(values[[0x7F, 0xFF]]).all()
    exact = np.array([1.0, -3.5, 2.0**-20], np.float32)
    assert formats.from_bf16(formats.to_bf16(exact)).tolist() == exact.tolist()
    assert formats.to_bf16(np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8], np.float32)).tolist() == [0x3F80, 0x3F82]


class Fake:
    """Computes exactly, but for a part that is left out."""

    def __init__(self, experts: list[object], formats: ModuleType, missing: float = 0.0) -> None:
        self.description, self.tolerance = "a fake", 1e-3
        self._experts, self._formats, self._missing = experts, formats, missing
        self.calls: list[tuple[int, list[int]]] = []

    def step(self, x: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
        y = np.zeros(x.shape)
        for row in range(len(x)):
            for expert, weight in zip(ids[row], weights[row], strict=True):
                number = expert % len(self._experts)
                y[row] += weight * self._formats.expert_output(self._experts[number], x[row : row + 1])[0]
        return (1 - self._missing) * y

    def timed(self, rows: int, ids: np.ndarray) -> float:
        self.calls.append((rows, ids[0].tolist()))
        return 1e-3


def test_a_peer_is_verified_and_answers_with_cold_steps(peers: dict[str, ModuleType]) -> None:
    side, formats = peers["peer_side"], peers["block_formats"]
    job = side.Job("BF16", 64, 32, 6, 2, 1, "avx512", 3, "")
    experts = job.experts()
    assert side.relative_error(job, Fake(experts, formats), experts) < 1e-6
    assert side.relative_error(job, Fake(experts, formats, 0.5), experts) == pytest.approx(0.5)

    engine, said = Fake(experts, formats), []
    side.answer(['{"rows": 1}', '{"rows": 3}'], engine, side.Routing(6, 2), said.append)
    assert said == [{"rows": 1, "seconds": [1e-3] * 4}, {"rows": 3, "seconds": [1e-3] * 4}]
    # One that wakes and two that tell the time, one that wakes and four that count.
    assert [ids for _, ids in engine.calls[:8]] == [[0, 1], [2, 3], [4, 5]] * 2 + [[0, 1], [2, 3]]
    assert [rows for rows, _ in engine.calls[8:]] == [1, 3, 3, 1, 3, 3, 3, 3]


PEER = """
import json, sys
print(json.dumps({"description": "a fake", "error": 0.01}), flush=True)
for line in sys.stdin:
    if json.loads(line)["rows"] == 13:
        sys.exit("error: no thirteen")
    print(json.dumps({"rows": 1, "seconds": [0.5]}), flush=True)
"""


def test_a_process_is_stopped_between_samples(peers: dict[str, ModuleType], tmp_path: Path) -> None:
    log = tmp_path / "log"
    with peers["peer_process"].PeerProcess([sys.executable, "-c", PEER], {}, log) as peer:
        assert (peer.description, peer.error) == ("a fake", 0.01)
        assert peer.sample(1) == [0.5]
        assert state_of(peer) == "T"
        assert peer.sample(2) == [0.5]
        with pytest.raises(
            peers["peer_install"].PeerUnavailable, match=r"^it ended with 1: error: no thirteen$"
        ):
            peer.sample(13)


def state_of(peer: object) -> str:
    number = peer._process.pid
    while True:  # a signal takes effect when its target next runs
        state = Path(f"/proc/{number}/stat").read_text().rsplit(")", 1)[1].split()[0]
        if state in "TZ":
            return state


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ('print(\'{"refused": "wants channels in 128s"}\')', "wants channels in 128s"),
        (f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})", "it died of SIGKILL"),
        ("raise SystemExit('no such library')", "it ended with 1: no such library"),
    ],
)
def test_a_peer_that_cannot_run_says_why(
    peers: dict[str, ModuleType], tmp_path: Path, program: str, reason: str
) -> None:
    with pytest.raises(peers["peer_install"].PeerUnavailable, match=f"^{reason}$"):
        peers["peer_process"].PeerProcess([sys.executable, "-c", program], {}, tmp_path / "log")


def test_a_failed_installation_says_why(peers: dict[str, ModuleType], tmp_path: Path) -> None:
    install = peers["peer_install"]
    environment = install.PeerEnvironment(tmp_path, lambda line: None)
    with pytest.raises(install.PeerUnavailable, match=r"python is missing$"):
        environment.kt_kernel()
    assert install.last_words("an ERROR: this\nsee the log\n\n") == "an ERROR: this"
    assert install.last_words("one\ntwo\n") == "two"
    assert install.last_words("") == "no message"


def test_kt_kernels_build_is_chosen_as_its_package_does(peers: dict[str, ModuleType]) -> None:
    variant_of = peers["kt_kernel_peer"].variant_of
    assert variant_of("avx2", {"avx512_bf16", "avx512_vbmi"}) == "avx2"
    assert variant_of("avx512", {"avx512_bf16", "avx512_vbmi", "avx512_vnni"}) == "avx512_bf16"
    assert variant_of("avx512", {"avx512_vbmi", "avx512_vnni"}) == "avx512_vbmi"
    assert variant_of("avx512", {"avx512_vnni"}) == "avx512_vnni"
    assert variant_of("avx512", set()) == "avx512_base"


def test_each_format_runs_with_all_threads_and_one_less(peers: dict[str, ModuleType]) -> None:
    experts, way = peers["experts"], peers["comparison"].Way
    assert list(experts.ways(["kt-kernel", "llama.cpp"], ["Q8_0"], 2)) == [
        way("kt-kernel", "Q8_0", 2),
        way("kt-kernel", "Q8_0", 1),
        way("llama.cpp", "Q8_0", 2),
        way("llama.cpp", "Q8_0", 1),
    ]
    assert len(list(experts.ways(["kt-kernel"], None, 1))) == 6
    assert experts.formats_beside("RAWINT4", 1) == experts.formats_beside("Q4_K", 512) == ("int4",)
    assert experts.formats_beside("FP8", 1) == ("fp9", "fp8", "int8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--threads", "0"], "--threads is 0: expected 1 or more"),
        (["--repeats", "-1"], "--repeats is -1: expected 1 or more"),
        (["--rows", "1", "0"], "--rows has 0: expected 1 or more"),
        (["--format", "Q9"], "--format is 'Q9': expected one of BF16, FP8, INT8, Q4_0, Q4_K, Q8_0, RAWINT4"),
    ],
)
def test_wrong_arguments_are_named(
    peers: dict[str, ModuleType], capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit):
        peers["experts"].parse_arguments(arguments)
    assert message in capsys.readouterr().err


def test_a_job_is_one_json_object(peers: dict[str, ModuleType]) -> None:
    job = peers["peer_side"].Job("FP8", 2048, 768, 128, 8, 2, "avx2", 512, "/somewhere")
    assert peers["peer_side"].Job.of(json.dumps(vars(job))) == job
