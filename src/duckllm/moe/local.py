"""Routed experts in this process: the same native kernel that workers run, on whole experts.

Called by the models through :class:`duckllm.moe.executor.ExpertExecutor`; the reference for remote experts.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from duckllm import _native
from duckllm.config import LOSSLESS_FORMATS
from duckllm.prefill import check_prefill, select_isa
from duckllm.weights.choice import ExpertSlice, load_layers
from duckllm.weights.formats import LayerFormat, is_lossless
from duckllm.weights.manifest import Manifest
from duckllm.weights.reader import ExpertFile


class LocalExperts:
    """The expert executor of a host without workers. Computes a step when it is waited for.

    Args:
        manifest: The converted model.
        max_step_tokens: Most tokens in one step.
        num_threads: Compute threads, this one included.
        weight_format: Format to compute in; ``"auto"`` takes what is stored, unless that is fp9 or fp8 and
            the other one is measured to be faster (:mod:`duckllm.weights.choice`).
        isa: Kernel to use; ``"auto"`` takes the best.
        prefill: ``"f32"``, or ``"bf16"`` for experts of many rows (csrc/kernels/experts.h).
        activations: ``"int8"``, or ``"f32"``, which rounds none for int8 and 4 bits, slowly.

    Raises:
        CheckpointError: An expert file is missing or truncated.
        WeightHashError: An expert file is not what the manifest says.
        WeightFormatError: The copy in ``weight_format`` does not fit, or a file holds no e4m3 weights.
        ConfigError: DUCK_FORCE_ISA names no instruction set, or one that this CPU lacks; or
            bf16 is asked for where the CPU lacks it.
    """

    def __init__(
        self,
        manifest: Manifest,
        *,
        max_step_tokens: int = 256,
        num_threads: int = 1,
        weight_format: str = "auto",
        isa: str = "auto",
        prefill: str = "f32",
        activations: str = "int8",
    ) -> None:
        if isa == "auto":
            isa = select_isa()
        self._instructions = check_prefill(prefill, isa)
        self._isa, self._prefill, self._manifest = isa, prefill, manifest
        files = {layer: ExpertFile.open(manifest, layer) for layer in manifest.expert_layers}
        for file in files.values():
            file.verify()
        part = ExpertSlice(
            manifest.hidden_size,
            manifest.moe_intermediate_size,
            manifest.num_experts,
            manifest.num_experts_per_tok,
            first_stripe=0,
            num_stripes=manifest.num_stripes,
            num_layers=len(files),
            num_threads=num_threads,
            scale_layout=manifest.scale_layout,
        )
        stored = {layer: file.units for layer, file in files.items()}
        forms = {layer: file.format for layer, file in files.items()}
        loaded = load_layers(part, stored, forms, weight_format)
        self.weight_format, self._units, self._formats = loaded.choice.format, loaded.units, loaded.formats
        self._experts = _native.Experts(
            manifest.hidden_size,
            manifest.moe_intermediate_size,
            manifest.num_experts,
            manifest.num_experts_per_tok,
            0,
            manifest.num_stripes,
            max_step_tokens,
            num_threads,
            0,
            isa,
            prefill=prefill,
            activations=activations,
        )

    @property
    def isa(self) -> str:
        """The instruction set in use, and the bf16 multipliers where prefill uses them."""
        return self._instructions

    def server(self, *, max_tokens: int, num_threads: int, spin_us: int = 0) -> _native.LaneServer:
        """The same experts for an exchange with a GPU, with threads and scratch memory of their own.

        Args:
            max_tokens: Most tokens in one step.
            num_threads: Compute threads, the exchange's included.
            spin_us: How long idle threads wait before they sleep, microseconds.
        """
        layouts = {form.scale_layout for form in self._formats.values() if is_lossless(form.format)}
        return _native.experts_server(
            self._units,
            hidden_size=self._manifest.hidden_size,
            intermediate_size=self._manifest.moe_intermediate_size,
            top_k=self._manifest.num_experts_per_tok,
            max_tokens=max_tokens,
            num_threads=num_threads,
            spin_us=spin_us,
            isa=self._isa,
            format=LOSSLESS_FORMATS[0],
            prefill=self._prefill,
            scale_layout=next(iter(layouts), "block"),
            layer_formats={layer: form.format for layer, form in self._formats.items()},
        )

    @property
    def weight_bytes(self) -> int:
        """Size of the experts in the format that is computed in."""
        return sum(units.nbytes for units in self._units.values())

    def submit(
        self, layer: int, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, lane: int = 0
    ) -> LocalStep:
        """A step, not yet computed. Shapes as :class:`duckllm.moe.executor.ExpertExecutor`."""
        rows = (x.numpy(), topk_ids.numpy(), topk_weights.numpy())
        return LocalStep(self._experts, self._units[layer], *rows, form=self._formats[layer])


class LocalStep:
    """A step that is computed in :meth:`wait`.

    Args:
        form: How the units are stored; None for as the experts were told.
    """

    def __init__(
        self,
        experts: _native.Experts,
        units: npt.NDArray[np.uint8],
        x: npt.NDArray[np.float32],
        topk_ids: npt.NDArray[np.int32],
        topk_weights: npt.NDArray[np.float32],
        form: LayerFormat | None = None,
    ) -> None:
        self._experts, self._units, self._form = experts, units, form
        self._rows = (x, topk_ids, topk_weights)

    def wait(self) -> torch.Tensor:
        """The weighted sum over each token's experts, [T, H] f32."""
        form = self._form
        weight_format, layout = (None, None) if form is None else (form.format, form.scale_layout)
        out = self._experts.run(self._units, *self._rows, format=weight_format, scale_layout=layout)
        return torch.from_numpy(out)
