"""The expert kernels over a grid of shapes, experts, rows and formats, each beside its ceilings.

Called by ``duckllm bench kernel``. Every cell is verified against float64 and then measured in turns with
two plain reads: the loops of ceilings.py on memory of their own, and the units themselves by the kernel's
threads. The higher of the two is the ceiling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from statistics import median

from duckllm import _native
from duckllm.bench.ceilings import (
    FEWEST_REPEATS,
    MemoryCeilings,
    default_size_bytes,
    fma_ceilings,
)
from duckllm.bench.expert_step import MOST_STEPS, ExpertStep, RandomExperts, SliceShape, gb_per_s
from duckllm.bench.machine import Caches, available_memory_bytes, read_caches
from duckllm.bench.memory import U8
from duckllm.config import LOSSLESS_FORMATS, PREFILLS, WEIGHT_FORMATS, available_cores
from duckllm.errors import ConfigError, InWords
from duckllm.prefill import check_prefill
from duckllm.worker.other_load import LoadMeter, OtherLoad

SHAPES = {
    "deepseek-32": SliceShape("DeepSeek-V3.2 cut 32 ways", 7168, 4),
    "deepseek-8": SliceShape("DeepSeek-V3.2 cut 8 ways", 7168, 16),
    "deepseek": SliceShape("DeepSeek-V3.2 whole", 7168, 128),
    "qwen3": SliceShape("Qwen3-30B-A3B whole", 2048, 48, num_experts=128),
    "qwen3-12": SliceShape("Qwen3-30B-A3B cut 12 ways", 2048, 4, num_experts=128),
    "demo": SliceShape("demo model", 256, 8, top_k=4, num_experts=32),
}
EXPERTS = (4, 8, 12, 16, 20)
ROWS = (1, 2, 4, 8, 32, 128, 512)
DEFAULT_FORMATS = (*LOSSLESS_FORMATS, "int8", "int4")
# Without --full: one row with every number of experts, and every number of rows with this one.
DEFAULT_EXPERTS = 8
DEFAULT_ROWS = ROWS[:-1]
# ... where a step is not more work than this.
DEFAULT_MOST_FLOP = 12e9
# Rows that choose experts of their own, as those of a prompt do, are a prompt's when there are many.
FEWEST_OWN_ROWS = 32
MOST_ROWS, MOST_EXPERTS, MOST_REPEATS = 4096, 64, 10_000
SAME, OWN = "same", "own"  # routings: which experts the rows of a step choose
MEMORY_RESERVE_BYTES = 256 << 20


@dataclass(frozen=True)
class KernelConfig:
    """What to measure; empty tuples mean the default grid, or all of it with ``full``.

    Args:
        shape: Names of ``SHAPES``.
        experts: Experts that a row chooses.
        rows: Rows of a step.
        format: Weight formats.
        threads: Threads of kernels and ceilings; 0 means all cores.
        isa: Instruction set, or ``"auto"``.
        repeats: Rounds of each cell; every round has up to five steps.
        hot: Every step takes the same experts, instead of experts that are in no cache.
        full: The whole grid.
        prefill: What experts of more than 8 rows are computed with, f32 or bf16.

    Raises:
        ConfigError: A field is out of range.
    """

    shape: tuple[str, ...] = ()
    experts: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    format: tuple[str, ...] = ()
    threads: int = 0
    isa: str = "auto"
    repeats: int = FEWEST_REPEATS
    hot: bool = False
    full: bool = False
    prefill: str = "f32"

    def __post_init__(self) -> None:
        for field_name, values, known in (
            ("shape", self.shape, tuple(SHAPES)),
            ("format", self.format, WEIGHT_FORMATS),
            ("isa", (self.isa,), ("auto", *_native.available_isas())),
            ("prefill", (self.prefill,), PREFILLS),
        ):
            for value in values:
                if value not in known:
                    raise ConfigError(field_name, value, "one of " + ", ".join(known))
        for field_name, numbers, most in (
            ("experts", self.experts, MOST_EXPERTS),
            ("rows", self.rows, MOST_ROWS),
        ):
            for number in numbers:
                if not 1 <= number <= most:
                    raise ConfigError(field_name, number, f"1 to {most}")
        cores = available_cores()
        if not 0 <= self.threads <= cores:
            raise ConfigError("threads", self.threads, f"1 to {cores}, the cores that this process may use")
        if not FEWEST_REPEATS <= self.repeats <= MOST_REPEATS:
            raise ConfigError("repeats", self.repeats, f"{FEWEST_REPEATS} to {MOST_REPEATS}")
        check_prefill(self.prefill, _native.select_isa() if self.isa == "auto" else self.isa)


@dataclass(frozen=True)
class Cell:
    """One measurement of the grid: so many rows that each choose so many experts, with a routing."""

    shape: str
    format: str
    experts: int
    rows: int
    routing: str

    @property
    def flop(self) -> int:
        """Operations of a step: a multiplication and an addition for each weight, row and expert."""
        return 2 * SHAPES[self.shape].expert_weights * self.experts * self.rows


@dataclass(frozen=True)
class KernelLine:
    """What was measured of a cell; rates in 10^9 per second, from medians unless it says otherwise.

    Args:
        cell: Which.
        isa: Instruction set.
        error: Largest error against float64 over the largest output.
        step_s: Median time of a step; ``least_s`` and ``most_s`` the fastest and the slowest.
        step_bytes: Bytes of the units that a step reads, the median where steps differ.
        gb_per_s: The rate of reading them.
        gparam_per_s: Weights a second.
        gflop_per_s: Operations a second.
        units_gb_per_s: A plain read of the same units by the kernel's threads.
        loops_gb_per_s: A plain read by the best of the ceilings' loops.
        fastest_of_ceiling: The share of the ceiling by the fastest sample of each.
        of_fma: The share of the multiply-add peak of the same run, in f32; None of formats whose weights are
            multiplied as integers, which that peak does not bound.
        prefill: f32, or the bf16 multipliers of experts of more than 8 rows.
        integer: The integer multipliers of formats that multiply integers; empty of others.
    """

    cell: Cell
    isa: str
    error: float
    step_s: float
    least_s: float
    most_s: float
    step_bytes: float
    gb_per_s: float
    gparam_per_s: float
    gflop_per_s: float
    units_gb_per_s: float
    loops_gb_per_s: float
    fastest_of_ceiling: float
    of_fma: float | None = None
    prefill: str = "f32"
    integer: str = ""

    @property
    def read_gb_per_s(self) -> float:
        """The read ceiling: the higher of the two plain reads."""
        return max(self.units_gb_per_s, self.loops_gb_per_s)

    @property
    def of_ceiling(self) -> float:
        """The share of the read ceiling that the kernel's reading reaches."""
        return self.gb_per_s / self.read_gb_per_s


@dataclass(frozen=True)
class KernelRun:
    """Everything that was measured."""

    config: KernelConfig
    threads: int
    size_bytes: int
    caches: Caches
    fma_gflop_per_s: float = 0.0
    lines: list[KernelLine] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    other_load: OtherLoad = field(default=OtherLoad(0.0, 0.0))


def cells_of(config: KernelConfig, shape: str) -> list[Cell]:
    """The cells of a shape, cheap ones first; one of a single expert goes with each format."""
    chosen = bool(config.experts or config.rows)
    experts, rows = config.experts or EXPERTS, config.rows or (ROWS if config.full else DEFAULT_ROWS)
    cells = []
    for weight_format in config.format or DEFAULT_FORMATS:
        for num_rows in rows:
            for num_experts in experts:
                crossed = num_rows == 1 or num_experts == DEFAULT_EXPERTS
                if not (config.full or chosen or crossed):
                    continue
                for routing in (SAME, OWN):
                    fits = num_experts <= SHAPES[shape].num_experts and num_rows >= FEWEST_OWN_ROWS
                    cell = Cell(shape, weight_format, num_experts, num_rows, routing)
                    light = config.full or chosen or cell.flop <= DEFAULT_MOST_FLOP
                    if light and (routing == SAME or fits):
                        cells.append(cell)
        if 1 in rows and 1 not in experts:
            cells.append(Cell(shape, weight_format, 1, 1, SAME))
    return cells


def pool_experts(cells: Iterable[Cell], size_bytes: int) -> int:
    """Experts that the cells of one shape and format need in memory; whole layers for the routing own."""
    cells = list(cells)
    shape = SHAPES[cells[0].shape]
    wanted = max(-(-size_bytes // shape.expert_bytes(cells[0].format)), *(cell.experts for cell in cells), 1)
    if any(cell.routing == OWN for cell in cells):
        return -(-wanted // shape.num_experts) * shape.num_experts
    return wanted


def need_bytes(cells: Iterable[Cell], size_bytes: int) -> int:
    """Memory for the cells of one shape: units, what the ceilings read, and the reference."""
    cells = list(cells)
    shape = SHAPES[cells[0].shape]
    units = max(
        pool_experts(mine, size_bytes) * shape.expert_bytes(mine[0].format) for mine in _by_format(cells)
    )
    return units + size_bytes + 32 * shape.expert_weights + MEMORY_RESERVE_BYTES


def _by_format(cells: Iterable[Cell]) -> list[list[Cell]]:
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        found.setdefault(cell.format, []).append(cell)
    return list(found.values())


def plan_grid(config: KernelConfig, size_bytes: int) -> tuple[list[list[Cell]], list[str]]:
    """The cells by shape, and which shapes were left out because the memory does not hold them.

    Raises:
        ConfigError: A shape that was asked for by name needs more memory than there is.
    """
    grid, notes = [], []
    have = available_memory_bytes()
    for name in config.shape or SHAPES:
        cells = cells_of(config, name)
        if not cells:
            continue
        need = need_bytes(cells, size_bytes)
        if need <= have:
            grid.append(cells)
            continue
        words = f"{name}, which needs {need / 1e9:.1f} GB of memory"
        if name in config.shape:
            raise ConfigError("shape", InWords(words), f"at most the {have / 1e9:.1f} GB that are available")
        notes.append(f"LEFT OUT: {words}; {have / 1e9:.1f} GB are available.")
    return grid, notes


def estimated_s(cell: Cell, repeats: int) -> float:
    """A guess of how long a cell takes, for the progress bar."""
    shape = SHAPES[cell.shape]
    touched = cell.experts if cell.routing == SAME else min(shape.num_experts, cell.experts * cell.rows)
    step_s = max(touched * shape.expert_bytes(cell.format) / 20e9, cell.flop / 100e9)
    return repeats * (0.01 + 2 * step_s * (1 + min(MOST_STEPS, max(1, 2e-3 / step_s))))


def measure_kernels(
    config: KernelConfig,
    progress: Callable[[str, float, float], None] = lambda name, done, total: None,
    size_bytes: int = 0,
) -> KernelRun:
    """Verifies and measures the grid.

    Args:
        config: What to measure.
        progress: Called with a name, the work done and all of it, before each cell.
        size_bytes: Footprint of cold measurements; 0 means eight times the last-level cache.

    Raises:
        ConfigError: The memory does not hold a shape that was asked for.
    """
    caches = read_caches()
    size_bytes = size_bytes or default_size_bytes(caches, available_memory_bytes())
    threads = config.threads or available_cores()
    isa = _native.select_isa() if config.isa == "auto" else config.isa
    grid, notes = plan_grid(config, size_bytes)
    meter = LoadMeter()
    before = _fma_peak(threads, isa, config.repeats)
    ceilings = MemoryCeilings(threads, size_bytes, isa, huge_pages=True)
    ceilings.verify()
    run = KernelRun(config, threads, size_bytes, caches, notes=notes)
    total = sum(estimated_s(cell, config.repeats) for cells in grid for cell in cells)
    done = 0.0
    for cells in grid:
        random = RandomExperts(SHAPES[cells[0].shape])
        for mine in _by_format(cells):
            units = random.fill(pool_experts(mine, size_bytes), mine[0].format, huge_pages=True)
            for cell in mine:
                progress(f"{cell.shape} {cell.format} {cell.experts}x{cell.rows}", done, total)
                run.lines.append(measure_cell(cell, random, units, ceilings, config, threads))
                done += estimated_s(cell, config.repeats)
    peak = max(before, _fma_peak(threads, isa, config.repeats))
    lines = [
        replace(line, of_fma=line.gflop_per_s / peak) if line.cell.format in LOSSLESS_FORMATS else line
        for line in run.lines
    ]
    return replace(run, lines=lines, fma_gflop_per_s=peak, other_load=meter.read())


def _fma_peak(threads: int, isa: str, repeats: int) -> float:
    [ceiling] = fma_ceilings(threads, [isa], repeats)
    return ceiling.rate.median


def measure_cell(
    cell: Cell, random: RandomExperts, units: U8, ceilings: MemoryCeilings, config: KernelConfig, threads: int
) -> KernelLine:
    """One cell: verified, then measured in turns with its ceilings."""
    shape = random.shape
    step = ExpertStep(
        random,
        units,
        num_tokens=cell.rows,
        top_k=cell.experts,
        threads=threads,
        isa=config.isa,
        weight_format=cell.format,
        layer_experts=shape.num_experts if cell.routing == OWN else None,
        hot=config.hot,
        prefill=config.prefill,
    )
    error = step.verify()
    if config.hot:
        footprint = max(4096 * threads, min(ceilings.used_bytes, cell.experts * units[0].nbytes))
        loops = ceilings.hot("read", "hot", footprint, config.repeats)
        for _ in range(config.repeats):
            step.sample()
    else:
        loops = ceilings.cold("read", config.repeats, step.sample)
    rate = gb_per_s(step.step_bytes, step.seconds)
    fastest = max(size / s for size, s in zip(step.step_bytes, step.seconds, strict=True)) / 1e9
    fastest_read = max(size / s for size, s in zip(step.read_bytes, step.read_seconds, strict=True)) / 1e9
    step_s = median(step.seconds)
    return KernelLine(
        cell=cell,
        isa=step.experts.isa,
        prefill=step.experts.prefill,
        integer="" if cell.format in LOSSLESS_FORMATS else step.experts.integer,
        error=error,
        step_s=step_s,
        least_s=min(step.seconds),
        most_s=max(step.seconds),
        step_bytes=median(step.step_bytes),
        gb_per_s=rate,
        gparam_per_s=rate / units[0].nbytes * shape.expert_weights,
        gflop_per_s=cell.flop / step_s / 1e9,
        units_gb_per_s=gb_per_s(step.read_bytes, step.read_seconds),
        loops_gb_per_s=loops.rate.median,
        fastest_of_ceiling=fastest / max(fastest_read, loops.rate.most),
    )


def derived(lines: Iterable[KernelLine]) -> Iterator[dict[str, object]]:
    """What follows from the lines: by shape and format, as far as the cells that it takes are there.

    Yields:
        ``error``: the largest of all lines; ``t2_over_t1``: time of 2 rows over that of 1, by number of
        experts; ``gparam_per_s_4`` and ``_20`` experts, 1 row, and ``few_over_many``; ``fixed_us``: the time
        of one expert's step that is not its bytes at the ceiling.
    """
    found: dict[tuple[str, str], dict[tuple[int, int], KernelLine]] = {}
    errors: dict[tuple[str, str], float] = {}
    for line in lines:
        place = line.cell.shape, line.cell.format
        errors[place] = max(line.error, errors.get(place, 0.0))
        mine = found.setdefault(place, {})
        if line.cell.routing == SAME:
            mine[line.cell.experts, line.cell.rows] = line
    for (shape, weight_format), mine in found.items():
        error = float(f"{errors[shape, weight_format]:.2e}")
        values: dict[str, object] = {"shape": shape, "format": weight_format, "error": error}
        pairs = {
            str(experts): round(mine[experts, 2].step_s / line.step_s, 4)
            for (experts, rows), line in mine.items()
            if rows == 1 and (experts, 2) in mine
        }
        if pairs:
            values["t2_over_t1"] = pairs
        if (4, 1) in mine and (20, 1) in mine:
            few, many = mine[4, 1].gparam_per_s, mine[20, 1].gparam_per_s
            values |= {"gparam_per_s_4": round(few, 3), "gparam_per_s_20": round(many, 3)}
            values["few_over_many"] = round(few / many, 4)
        if (1, 1) in mine:
            one = mine[1, 1]
            values["fixed_us"] = round(1e6 * (one.step_s - one.step_bytes / one.read_gb_per_s / 1e9), 2)
        yield values
