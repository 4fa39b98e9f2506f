"""``duckllm plan`` and workers that run: what they say of their nodes, and a file of nodes made of it.

Called by cli/plan.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from duckllm.cli.bench_common import check_save, writing_whole
from duckllm.cli.common import tell
from duckllm.config import available_cores, count_of, total_memory_bytes
from duckllm.errors import ConfigError
from duckllm.paths import check_replaceable

if TYPE_CHECKING:
    from duckllm.bench.token_ceilings import LinkFacts
    from duckllm.cluster.connect import WorkerInfo
    from duckllm.cluster.survey import RoundTrip
    from duckllm.device import Device
    from duckllm.forecast.write_flock import WrittenComputer
    from duckllm.models.inspection import Inspection

Asked = Sequence[tuple["WorkerInfo", "RoundTrip"]]
_GIB = 1 << 30
_HERE = "this host"  # the host's machine, where workers are on it: no address is called so
_TO_MEASURE = "duckllm bench roofline there measures it"
_REPEATS = 3


def ask_workers(model: Inspection, addresses: tuple[str, ...], token_file: Path | None) -> Asked:
    """What each worker says of its node, and messages as long as a step's request to it and back.

    Raises:
        ConfigError: An address is malformed, or the token's file cannot be read.
        ClusterError: A worker is not available, or refuses.
    """
    from duckllm.cluster.address import parse_address
    from duckllm.cluster.survey import step_message_bytes, survey
    from duckllm.cluster.token import read_token

    num_bytes = step_message_bytes(model.layout.hidden_size, model.layout.num_experts_per_tok)
    parsed = [parse_address(address, "workers") for address in addresses]
    return survey(parsed, read_token(token_file), num_bytes)


def this_machine_gb_per_s() -> float:
    """What a plain read of all cores reaches here."""
    from duckllm.worker.read_speed import read_speed

    return read_speed(available_cores())


def check_new_file(path: Path) -> None:
    """Finds out before anybody is asked whether a file of nodes can be written there.

    Raises:
        ConfigError: There is one already, which somebody may have changed, or it cannot be written.
    """
    if path.suffix == ".json" or check_replaceable("write_nodes", path).exists():
        raise ConfigError("write_nodes", str(path), "the name of a TOML file that is not there yet")
    check_save(path, "write_nodes")


def write_nodes(
    path: Path, asked: Asked, names: Mapping[str, str], device: Device, link_of: Callable[[str], LinkFacts]
) -> None:
    """Writes what is known of the workers' nodes and of this host, and says what is missing.

    Args:
        path: The file.
        asked: What the workers said.
        names: What the nodes at addresses are called, where that is known.
        device: What computes the host's layers.
        link_of: What the system says of the interface that leads to a machine.

    Raises:
        ConfigError: It could not be written.
    """
    text, missing = nodes_text(asked, names, device, link_of)
    with writing_whole("write_nodes", path) as part:
        part.write_text(text, encoding="utf-8")
    lacks = f"; to fill in: {', '.join(missing)}" if missing else ""
    nodes = count_of(len(asked), "node")
    tell(f"{path}: {nodes}; look at its comments, then: duckllm plan MODEL --nodes {path}{lacks}")


def nodes_text(
    asked: Asked, names: Mapping[str, str], device: Device, link_of: Callable[[str], LinkFacts]
) -> tuple[str, list[str]]:
    """The file's text, and the fields that it lacks; arguments as of :func:`write_nodes`."""
    from duckllm import _native
    from duckllm.cluster.address import parse_address
    from duckllm.cluster.connect import THIS_MACHINE
    from duckllm.forecast.flock import ISAS
    from duckllm.forecast.write_flock import WrittenComputer, flock_text, shortened

    places = [parse_address(info.address).name for info, _ in asked]
    links = {place: link_of(place) for place in dict.fromkeys(places)}
    named: dict[str, str] = {THIS_MACHINE: _HERE}
    for number, ((info, _), place) in enumerate(zip(asked, places, strict=True)):
        named.setdefault(info.machine, _machine_name(place, number))
    on = [named[info.machine] for info, _ in asked]
    shared = Counter(on)
    if _HERE in shared:
        shared[_HERE] += 1  # the host itself
    called = [_name(names.get(info.address) or info.name, info.address) for info, _ in asked]
    times_called = Counter(called)
    isa_here = _native.select_isa()
    isas = {_isa(info) for info, _ in asked} & set(_native.available_isas()) | {isa_here}
    gflop_of_core = _gflop_of_core(sorted(isas))
    read_here = this_machine_gb_per_s()
    nodes = []
    for (info, trip), place, name, machine in zip(asked, places, called, on, strict=True):
        rate = links[place].gbit_per_s
        gflop = info.threads * gflop_of_core.get(_isa(info), gflop_of_core[isa_here])
        notes = {
            "gflop_per_s": "an estimate: cores of this host; duckllm bench roofline there measures it",
            "link_gbit_per_s": "no wire on one machine: any number"
            if machine == _HERE
            else "that of this host's interface to it"
            if rate
            else "an assumption: nothing here says it",
        }
        if info.read_gb_per_s is None:
            notes["read_gb_per_s"] = _TO_MEASURE
        values: dict[str, str | float | None] = {
            "name": name if times_called[name] == 1 else f"{name} at {info.address}",
            "cores": info.threads,
            "isa": _isa(info),
            "read_gb_per_s": info.read_gb_per_s,
            "gflop_per_s": gflop,
            "memory_gib": info.memory_bytes / shared[machine] / _GIB,
            "link_gbit_per_s": rate or 1.0,
            "round_trip_us": trip.median_us,
        }
        if _isa(info) not in ISAS:
            values["isa"] = None
            notes["isa"] = f"one of {', '.join(ISAS)}: its worker says {_isa(info)}"
        if shared[machine] > 1:
            notes["memory_gib"] = _part_of(info.memory_bytes, shared[machine])
            values["machine"] = machine
        nodes.append(WrittenComputer(values, notes))
    machines = {
        machine: WrittenComputer({"cores": available_cores(), "read_gb_per_s": read_here})
        if machine == _HERE
        else _shared_machine([info for (info, _), place in zip(asked, on, strict=True) if place == machine])
        for machine, programs in shared.items()
        if programs > 1
    }
    rates = [link.gbit_per_s for link in links.values() if link.gbit_per_s]
    host = _host(
        device, isa_here, read_here, gflop_of_core[isa_here], max(rates, default=None), max(1, shared[_HERE])
    )
    title = "Written by duckllm plan --write-nodes; docs/planning.md says what each field is."
    lacks = [("host", host)]
    lacks += [(shortened(str(node.values["name"])), node) for node in nodes]
    lacks += [(f"machine {name}", machine) for name, machine in machines.items()]
    missing = [f"{whose}'s {name}" for whose, each in lacks for name in each.missing]
    return flock_text(title, host, nodes, machines), missing


def _shared_machine(workers: Sequence[WorkerInfo]) -> WrittenComputer:
    """The machine that these workers share, as far as they say what it is."""
    from duckllm.forecast.write_flock import WrittenComputer

    speeds = [info.read_gb_per_s for info in workers if info.read_gb_per_s is not None]
    values: dict[str, str | float | None] = {
        "cores": sum(info.threads for info in workers),
        "read_gb_per_s": max(speeds, default=None),
    }
    return WrittenComputer(values, {} if speeds else {"read_gb_per_s": _TO_MEASURE})


def _host(
    device: Device,
    isa: str,
    read_gb_per_s: float,
    gflop_of_core: float,
    gbit_per_s: float | None,
    programs: int,
) -> WrittenComputer:
    """This host, on a machine with so many programs of the flock, itself among them."""
    from duckllm.forecast.write_flock import WrittenComputer

    values: dict[str, str | float | None] = {
        "cores": available_cores(),
        "isa": isa,
        "read_gb_per_s": read_gb_per_s,
        "gflop_per_s": available_cores() * gflop_of_core,
        "memory_gib": total_memory_bytes() / programs / _GIB,
        "link_gbit_per_s": gbit_per_s or 1.0,
    }
    notes = {"read_gb_per_s": "measured", "gflop_per_s": "measured"}
    if not gbit_per_s:
        notes["link_gbit_per_s"] = "an assumption: nothing here says it"
    if programs > 1:
        values["machine"] = _HERE
        notes["memory_gib"] = _part_of(total_memory_bytes(), programs)
    if device.is_cuda:
        values["card"] = None
        vram_gib = device.total_bytes / _GIB
        notes["card"] = f"one of duckllm plan --presets, or {{vram_gib = {vram_gib:.0f}, gb_per_s = ...}}"
    return WrittenComputer(values, notes)


def _gflop_of_core(isas: Sequence[str]) -> dict[str, float]:
    """f32 multiply-adds of one core here while all compute, the fastest sample, by instruction set."""
    from duckllm.bench.ceilings import fma_ceilings

    cores = available_cores()
    return {each.isa: each.rate.most / cores for each in fma_ceilings(cores, isas, _REPEATS)}


def _isa(info: WorkerInfo) -> str:
    return info.isa.partition("+")[0]


def _name(name: str, address: str) -> str:
    return name if name and name.isprintable() and len(name) <= 100 else address


def _machine_name(place: str, number: int) -> str:
    """The machine's at an address; a number where a file of nodes would not hold that."""
    from duckllm.forecast.flock import MOST_CHARACTERS

    return place if len(place) <= MOST_CHARACTERS else f"machine {number}"


def _part_of(memory_bytes: int, programs: int) -> str:
    total = memory_bytes / _GIB
    return f"of the machine's {total:.2f}, in equal parts for {programs} programs: move it among them"
