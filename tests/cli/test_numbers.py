"""Numbers in options that are read as text: each option takes the same spellings."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from duckllm.bench.grid import parse_input_lens
from duckllm.cli.bench_common import parse_numbers
from duckllm.cli.bench_serve import parse_loads
from duckllm.cli.common import parse_shares, parse_workers
from duckllm.cli.plan_forecast import Forecasting
from duckllm.cli.simulate import parse_slow
from duckllm.config import parse_size
from duckllm.errors import ConfigError

# Full width digits, a sign, a Kelvin for a K, Python's own spellings.
OTHER_SPELLINGS = ("\uff11", "+1", "1_0", "0x1", "1e", "nan", "-1", "\u0661")


@pytest.mark.parametrize("text", OTHER_SPELLINGS)
def test_numbers_are_read_in_one_way(text: str) -> None:
    def batch(text: str) -> object:
        return Forecasting(None, None, 1024, text, "f32", True)

    reads: tuple[Callable[[str], object], ...] = (
        parse_workers,
        parse_shares,
        batch,
        lambda text: parse_numbers("rows", text),
        lambda text: parse_size("memory", text),
        lambda text: parse_loads(text, 1.0, "", has_trace=False),
        lambda text: parse_slow(f"{text}:2", 8),
        lambda text: parse_slow(f"2:{text}", 8),
        lambda text: parse_input_lens(text, 4096),
    )
    for read in reads:
        with pytest.raises(ConfigError):
            read(text)
    with pytest.raises(ConfigError, match="got '1\u212a'"):
        parse_size("memory", "1\u212a")
    assert parse_shares(" 1, 02,.5") == (1.0, 2.0, 0.5)
    assert parse_numbers("rows", "1, 01,2") == (1, 2)
    assert parse_slow("01:1.5", 8) == {1: 1.5}
    assert parse_input_lens("016", 4096) == (16,)
