"""What ``duckllm plan`` is asked to predict: its options checked, the flock read or measured.

Called by cli/plan.py; the arithmetic is in :mod:`duckllm.forecast`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from duckllm.cli.common import Waiting
from duckllm.config import parse_whole
from duckllm.errors import ConfigError

if TYPE_CHECKING:
    from duckllm.device import Device
    from duckllm.forecast.coefficients import Coefficients
    from duckllm.forecast.flock import Card, Flock
    from duckllm.forecast.load import ModelLoad
    from duckllm.forecast.report import Forecast
    from duckllm.models.inspection import Inspection
    from duckllm.moe.fit import Node
    from duckllm.plan import ClusterPlan

_MOST_REQUESTS, _MOST_WORKERS_HERE, _ROUNDS = 1024, 64, 3
# What a prediction is of where nothing else is asked for.
DEFAULTS: Mapping[str, Any] = {"context": 1024, "batch": "1,2,8", "wire_dtype": "f32"}
_WIRE_BYTES = {"f32": 4, "bf16": 2}


class Forecasting:
    """The options of a prediction.

    Args:
        path: The file of nodes; None for no prediction, unless it is measured.
        acceptance: Share of guesses that are right; None for none.
        context: Tokens of each request.
        batch: Requests together, as it was written.
        wire_dtype: ``"f32"`` or ``"bf16"``.
        measures: Whether this machine is measured.

    Raises:
        ConfigError: A value is out of range, or has no prediction that it belongs to.
    """

    def __init__(
        self,
        path: Path | None,
        acceptance: float | None,
        context: int,
        batch: str,
        wire_dtype: str,
        measures: bool,
    ) -> None:
        if acceptance is not None and not 0 <= acceptance <= 1:
            raise ConfigError("acceptance", acceptance, "a share, 0 to 1")
        if wire_dtype not in _WIRE_BYTES:
            raise ConfigError("wire_dtype", wire_dtype, "f32 or bf16")
        if path is None and not measures:
            asked = {"acceptance": acceptance, "context": context, "batch": batch, "wire_dtype": wire_dtype}
            for field, value in asked.items():
                if value not in (None, DEFAULTS.get(field)):
                    raise ConfigError(field, value, "nothing without a prediction", "--nodes or --measure")
        self._acceptance, self._context, self._wire = acceptance, context, _WIRE_BYTES[wire_dtype]
        self._batches = _parse_batches(batch)
        self._keep: Sequence[str] | None = None
        self._coefficients: Coefficients | None = None
        self.flock: Flock | None = None
        if path is not None:
            from duckllm.forecast.flock import read_flock

            self.flock = read_flock(path)

    def keep(self, rules: Sequence[str] | None) -> None:
        """Counts layers in other formats, as rules of ``--keep`` say."""
        self._keep = rules

    def at(self, acceptance: float | None) -> Forecasting:
        """The same flock with another share of guesses that are right; None for no guesses."""
        other = copy(self)
        other._acceptance = acceptance
        return other

    def refuse(self, options: Mapping[str, object], device: str) -> None:
        """Refuses what the file of nodes says already.

        Raises:
            ConfigError: An option was given that it says, or a device that its host has not.
        """
        assert self.flock is not None
        if device != "auto" and (device == "cpu") != (self.flock.card is None):
            has = "no card" if self.flock.card is None else "a card"
            raise ConfigError("device", device, f"what the file of --nodes says: a host with {has}")
        for field, value in options.items():
            if value is not None:
                raise ConfigError(field, value, "nothing with --nodes, whose file says it")

    def host(self) -> tuple[Device, int, float]:
        """The host's card, its memory in bytes, and the GB/s that its layers are read at."""
        from duckllm.device import CPU
        from duckllm.engine.cache_size import card_of
        from duckllm.forecast.flock import GIB

        assert self.flock is not None
        host, card = self.flock.host, self.flock.card
        host_bytes = int(host.memory_gib * GIB)
        if card is None:
            return CPU, host_bytes, host.read_gb_per_s
        return card_of(int(card.vram_gib * GIB)), host_bytes, card.gb_per_s

    def nodes(self) -> Sequence[Node]:
        """The nodes as slices are shared out among them."""
        from duckllm.forecast.report import nodes_for

        assert self.flock is not None
        return nodes_for(self.flock)

    def measure(self, model: str | None, found: Inspection, weight_format: str, workers: object) -> None:
        """Measures what software makes of this machine, and the machine, where no file says another.

        Raises:
            ConfigError: It is not a number of workers, or a card computes the host's part.
            DuckError: The model does not run here.
        """
        from duckllm import LLM
        from duckllm.forecast.measure import LONG_CONTEXT, Probes, measured

        if self.flock is not None and self.flock.card is not None:
            raise ConfigError(
                "measure", "a host with a card", "a host whose CPU computes: no card is measured"
            )
        count = 2 if workers is None else workers
        if not isinstance(count, int) or not 1 <= count <= _MOST_WORKERS_HERE:
            raise ConfigError("workers", count, f"a number from 1 to {_MOST_WORKERS_HERE} with --measure")
        if not _has_weights(found):
            raise ConfigError(
                "measure",
                str(model),
                "a model with its weights: it is run",
                "--nodes needs a config.json alone",
            )
        load = self._load(found, on_card=False)
        options: dict[str, Any] = {"host_threads": 1, "threads_per_worker": 1, "device": "cpu"}
        options |= {"draft": "off", "lanes": "off"}
        with ExitStack() as stack, Waiting("Measuring this machine"):
            llm = stack.enter_context(LLM(model, workers=1, weight_format=weight_format, **options))
            small = {each: stack.enter_context(LLM(workers=each, **options)) for each in (1, 3)}
            context = min(LONG_CONTEXT, found.max_position_embeddings // 2)
            probes = Probes(load, llm, (weight_format,), small, long_context=context)
            _, self._coefficients = measured(probes, _ROUNDS)
        if self.flock is None:
            here = probes.flock(count)
            nodes = (replace(each, name=f"{each.name} {number}") for number, each in enumerate(here.nodes, 1))
            self.flock = here.with_nodes(tuple(nodes))

    def _load(self, found: Inspection, *, on_card: bool) -> ModelLoad:
        from duckllm.forecast.load import model_load
        from duckllm.models.registry import load_config

        return model_load(found, load_config(found.folder), on_card=on_card, keep=self._keep)

    def forecast(
        self,
        found: Inspection,
        made: ClusterPlan,
        shares: str | Sequence[float],
        holds: Callable[[Device], bool] | None = None,
    ) -> Forecast | None:
        """What the flock would do with the model; None where none is asked for.

        Args:
            found: The model.
            made: Its slices.
            shares: How they are shared out.
            holds: Whether a card would hold the host's part; None predicts no card.

        Raises:
            ConfigError: The context is longer than the model's, or it has no layer that guesses.
        """
        from duckllm.forecast.coefficients import ON_CARD, ON_CPU
        from duckllm.forecast.report import forecast
        from duckllm.forecast.step import Setting

        if self.flock is None:
            return None
        longest = found.max_position_embeddings
        if not 1 <= self._context <= longest:
            raise ConfigError("context", self._context, f"1 to {longest}, the model's longest context")
        on_card = self.flock.card is not None
        load = self._load(found, on_card=on_card)
        if self._acceptance is not None and not load.has_draft_layer:
            raise ConfigError(
                "acceptance", self._acceptance, "nothing with a model without a layer that guesses"
            )
        setting = Setting(
            made.weight_format,
            context=self._context,
            drafts=int(self._acceptance is not None),
            acceptance=self._acceptance or 0.0,
            x_bytes=self._wire,
            reply_bytes=self._wire,
        )
        coefficients = self._coefficients or (ON_CARD if on_card else ON_CPU)
        return forecast(
            load,
            self.flock,
            made.sizes,
            coefficients,
            setting,
            batches=self._batches,
            shares=shares,
            on_card=None if on_card or self._coefficients or not holds else self._card_for(found, holds),
        )

    def _card_for(self, found: Inspection, holds: Callable[[Device], bool]) -> tuple[Card, ModelLoad] | None:
        """The slowest card known that holds the host's part, and the model's load there."""
        from duckllm.engine.cache_size import card_of
        from duckllm.forecast.flock import GIB, Card
        from duckllm.forecast.presets import CARDS

        for name, each in sorted(CARDS.items(), key=lambda item: (item[1].gb_per_s, item[1].vram_gib)):
            if holds(card_of(int(each.vram_gib * GIB))):
                return Card(name, each.vram_gib, each.gb_per_s), self._load(found, on_card=True)
        return None


def _has_weights(found: Inspection) -> bool:
    """Whether its folder has weights too."""
    return any(found.folder.glob("*.safetensors")) or found.weight_format is not None


def _parse_batches(text: str) -> tuple[int, ...]:
    batches = tuple(parse_whole(part) or 0 for part in text.split(","))
    if not all(1 <= batch <= _MOST_REQUESTS for batch in batches):
        raise ConfigError("batch", text, f"numbers from 1 to {_MOST_REQUESTS}: 1,2,8")
    return batches
