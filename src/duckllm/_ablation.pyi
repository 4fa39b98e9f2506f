"""Variants of the fp9 expert kernels, to be measured beside production's: built on request only."""

import numpy
import numpy.typing

def convert_layout(
    units: numpy.typing.NDArray[numpy.uint8],
    layout: int,
    hidden_size: int,
    out: numpy.typing.NDArray[numpy.uint8],
) -> None: ...

class Ablation:
    def __init__(
        self,
        hidden_size: int,
        num_stripes: int,
        max_experts: int,
        max_rows: int,
        num_threads: int,
        spin_us: int,
        isa: str = "auto",
    ) -> None: ...
    @property
    def isa(self) -> str: ...
    def variants(self) -> list[tuple[str, str, int, bool, str]]: ...
    def tile_rows(self) -> list[int]: ...
    def decode(
        self,
        variant: int,
        units: numpy.typing.NDArray[numpy.uint8],
        x: numpy.typing.NDArray[numpy.float32],
        topk_ids: numpy.typing.NDArray[numpy.int32],
        topk_weights: numpy.typing.NDArray[numpy.float32],
        out: numpy.typing.NDArray[numpy.float32],
    ) -> list[float]: ...
    def tiles(
        self,
        variant: int,
        chunk_rows: int,
        units: numpy.typing.NDArray[numpy.uint8],
        x: numpy.typing.NDArray[numpy.float32],
        topk_ids: numpy.typing.NDArray[numpy.int32],
        topk_weights: numpy.typing.NDArray[numpy.float32],
        out: numpy.typing.NDArray[numpy.float32],
    ) -> list[float]: ...
