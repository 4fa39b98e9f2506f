"""What computes: the instruction set, and for a prompt's experts f32, or bf16 multipliers where asked for.

Called where experts are made, here or in workers; csrc/kernels/experts.h states the error of bf16.
"""

from __future__ import annotations

import os

from duckllm import _native
from duckllm.errors import ConfigError


def select_isa() -> str:
    """The instruction set of the kernels.

    Raises:
        ConfigError: DUCK_FORCE_ISA names none, or one that this CPU lacks.
    """
    try:
        return _native.select_isa()
    except ValueError as error:
        known = "one of " + ", ".join(_native.available_isas())
        raise ConfigError("DUCK_FORCE_ISA", os.environ.get("DUCK_FORCE_ISA"), known) from error


def check_prefill(prefill: str, isa: str) -> str:
    """What computes with these settings here, in words: ``"avx512"``, or ``"avx512+amx_bf16"``.

    Args:
        prefill: ``"f32"`` or ``"bf16"``.
        isa: The instruction set of the kernels.

    Raises:
        ConfigError: bf16, on a CPU or with an instruction set that lacks it; or DUCK_FORCE_BF16 names none
            that is there.
    """
    if prefill == "f32":
        return isa
    known = _native.available_bf16()
    if not known:
        raise ConfigError("prefill", prefill, "f32, as this CPU has neither AVX512-BF16 nor AMX-BF16")
    try:
        return f"{isa}+{_native.select_bf16(isa)}"
    except ValueError as error:
        if isa != "avx512":
            expected = f"f32 with the instruction set {isa}, as bf16 needs avx512"
            raise ConfigError("prefill", prefill, expected) from error
        forced = os.environ.get("DUCK_FORCE_BF16")
        raise ConfigError("DUCK_FORCE_BF16", forced, "one of " + ", ".join(known)) from error
