"""Computers and cards that people have, as data, each figure with its source.

Read by :mod:`duckllm.forecast.flock` where a file of nodes names one. A figure that nobody here has measured
says so: a file's own figures, or ``duckllm bench roofline`` on the machine, are better.
"""

from __future__ import annotations

from dataclasses import dataclass

_READ_SHARE = "85 % of the paper's figure, an estimate"


@dataclass(frozen=True)
class ComputerPreset:
    """What a kind of computer can do.

    Args:
        title: For people.
        cores: Cores that compute.
        read_gb_per_s: What a plain read of all cores reaches, GB/s.
        gflop_per_s: f32 multiply-adds of all cores, 10^9 floating-point operations a second.
        isa: The instruction set that its kernels use.
        memory_gib: Memory that such a machine usually has, GiB.
        link_gbit_per_s: Speed of its network port, Gbit/s.
        sources: Where each figure is from, by field.
        refused: Why duckllm does not run on it; empty where it does.
    """

    title: str
    cores: int
    read_gb_per_s: float
    gflop_per_s: float
    isa: str
    memory_gib: float
    link_gbit_per_s: float
    sources: dict[str, str]
    refused: str = ""


@dataclass(frozen=True)
class CardPreset:
    """What a graphics card has.

    Args:
        vram_gib: VRAM, GiB.
        gb_per_s: The paper's memory bandwidth, GB/s.
        source: Where the figures are from.
    """

    vram_gib: float
    gb_per_s: float
    source: str


COMPUTERS = {
    "n100": ComputerPreset(
        "Intel N100, one memory channel",
        cores=4,
        read_gb_per_s=35.0,
        gflop_per_s=217.6,
        isa="avx2",
        memory_gib=16,
        link_gbit_per_s=2.5,
        sources={
            "read_gb_per_s": "published by the author of the 32-node installation: 17 GB/s by one core, "
            "35 by four; one channel of DDR5-4800 is 38.4 on paper, of DDR4-3200 25.6",
            "gflop_per_s": "the same author: 4 cores x 3.4 GHz x 16",
            "memory_gib": "Intel's most; boards with more are sold",
            "link_gbit_per_s": "usual on boards with this CPU; some have 1",
        },
    ),
    "n305": ComputerPreset(
        "Intel Core i3-N305, one memory channel",
        cores=8,
        read_gb_per_s=35.0,
        gflop_per_s=486.0,
        isa="avx2",
        memory_gib=16,
        link_gbit_per_s=2.5,
        sources={
            "read_gb_per_s": "taken from the N100, which has the same memory controller; not measured",
            "gflop_per_s": "8 cores x 3.8 GHz x 16, on paper: with all cores it clocks lower",
            "memory_gib": "Intel's most",
            "link_gbit_per_s": "usual on boards with this CPU",
        },
    ),
    "ryzen-desktop": ComputerPreset(
        "AMD Ryzen 7000 or 9000 of one die, two channels of DDR5-6000",
        cores=8,
        read_gb_per_s=62.0,
        gflop_per_s=2100.0,
        isa="avx512",
        memory_gib=64,
        link_gbit_per_s=2.5,
        sources={
            "read_gb_per_s": "AIDA64's read of a 9800X3D with DDR5-6000, a reader's post at Tom's Hardware; "
            "96 on paper, less by the link between dies",
            "gflop_per_s": "8 times one core of an EPYC (Zen 5) as measured here (266); a Zen 4 has half",
            "memory_gib": "two modules of 32",
            "link_gbit_per_s": "usual on boards for it",
        },
    ),
    "epyc": ComputerPreset(
        "AMD EPYC 9005, one socket, twelve channels of DDR5-6000",
        cores=64,
        read_gb_per_s=490.0,
        gflop_per_s=17000.0,
        isa="avx512",
        memory_gib=384,
        link_gbit_per_s=25.0,
        sources={
            "read_gb_per_s": f"{_READ_SHARE}: 12 x 48 GB/s; not measured",
            "gflop_per_s": "64 times one core of an EPYC (Zen 5) as measured here (266); not measured",
            "memory_gib": "twelve modules of 32",
            "link_gbit_per_s": "an assumption",
        },
    ),
    "epyc-2-vcpu": ComputerPreset(
        "2 vCPU of an AMD EPYC (Zen 5), a rented machine",
        cores=2,
        read_gb_per_s=79.7,
        gflop_per_s=524.6,
        isa="avx512",
        memory_gib=16,
        link_gbit_per_s=10.0,
        sources={
            "read_gb_per_s": "measured, docs/performance.md, section 5; 50 to 54 in other hours",
            "gflop_per_s": "measured, the same",
            "memory_gib": "an assumption",
            "link_gbit_per_s": "an assumption",
        },
    ),
    "raspberry-pi-5": ComputerPreset(
        "Raspberry Pi 5",
        cores=4,
        read_gb_per_s=14.5,
        gflop_per_s=76.8,
        isa="neon",
        memory_gib=16,
        link_gbit_per_s=1.0,
        sources={
            "read_gb_per_s": f"{_READ_SHARE}: 32 bits of LPDDR4X-4267, 17.1 GB/s; not measured",
            "gflop_per_s": "4 cores x 2.4 GHz x 8, on paper: one 128-bit multiply-add a cycle",
            "memory_gib": "the largest model",
            "link_gbit_per_s": "its port",
        },
        refused="its CPU is an ARM, for which there are no kernels",
    ),
}

CARDS = {
    "rtx-5090": CardPreset(32, 1792.0, "NVIDIA: 512 bits of GDDR7 at 28 Gbit/s"),
    "rtx-4090": CardPreset(24, 1008.0, "NVIDIA: 384 bits of GDDR6X at 21 Gbit/s"),
    "rtx-3090": CardPreset(24, 936.0, "NVIDIA: 384 bits of GDDR6X at 19.5 Gbit/s"),
    "h200": CardPreset(141, 4800.0, "NVIDIA: HBM3e; copies reach 4254 here (docs/log.md)"),
}
