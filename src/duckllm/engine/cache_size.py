"""What a host's memory goes to, decided before anything is loaded: weights, and as much KV cache as is wise.

Called where the parts of an LLM are put together, and by ``duckllm plan``. Works on numbers alone. With a GPU
there are two budgets: what its layers read and write, the KV cache with it, is in VRAM; the embedding, of
which a step reads a row for each token, experts, processes and what leaves the KV cache are in CPU memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from duckllm.config import show_size
from duckllm.device import CPU, Device
from duckllm.errors import ConfigError, InWords
from duckllm.moe.fit import WORKER_PROCESS_BYTES

if TYPE_CHECKING:
    from duckllm.models.inspection import Inspection

PAGE_TOKENS = 16
GIB = 1 << 30
DEFAULT_MAX_NUM_SEQS = 64
# A host's process before it has loaded anything: a worker's, and PyTorch.
HOST_PROCESS_BYTES = 400_000_000
# What CUDA's libraries and Triton's compiler add to it; an estimate.
GPU_PROCESS_BYTES = 1_000_000_000
# Of what weights leave free, the KV cache takes this part unless it is told otherwise; of VRAM, which nothing
# else here wants, it takes all but what is left to estimates that are wrong and to gaps between allocations.
_SHARE = 1 / 4
_GPU_SHARE = 9 / 10
# Bytes of a number in the KV cache: f32 on a CPU, bf16 on a GPU.
_CACHE_BYTES, _GPU_CACHE_BYTES = 4, 2
# What the driver and CUDA take of a card before anything is loaded. A card that is here says what is left.
_CONTEXT_BYTES = 3 * GIB // 4
# Kernels, and captured graphs: some dozens of nodes a layer, for each number of rows.
_GRAPH_BYTES = GIB // 2
# PyTorch rounds tensors of more than 10 MiB up to 2 MiB: of DeepSeek-V3.2's, of 40 MiB on average, a 40th.
_GAPS = 40
# Most rows of a step that a GPU computes from a captured graph; longer steps are prompts.
_GRAPH_ROWS = 64
# It takes more where that were less than a conversation.
_FEW_TOKENS = 2048


def num_pages(num_tokens: int) -> int:
    """Pages that so many tokens take."""
    return -(-num_tokens // PAGE_TOKENS)


@dataclass(frozen=True)
class HostNeeds:
    """What a host needs beside its KV cache, and what there is.

    Args:
        weight_bytes: Its own weights, loaded, where its layers compute.
        expert_bytes: Experts in its memory: all where they are computed here, none where that is elsewhere.
        process_bytes: The processes themselves.
        token_bytes: KV cache of one token.
        longest: The model's longest context, tokens.
        available_bytes: Memory that can be had.
        total_bytes: Memory that the machine has in all.
        tier_bytes: Memory for what leaves the KV cache.
        device: What computes its layers, with the VRAM that there is.
        embedding_bytes: With a GPU, what of the weights is in CPU memory.
        workspace_bytes: With a GPU, captured graphs, and what a step's numbers take.
    """

    weight_bytes: int
    expert_bytes: int
    process_bytes: int
    token_bytes: int
    longest: int
    available_bytes: int
    total_bytes: int
    tier_bytes: int = 0
    device: Device = CPU
    embedding_bytes: int = 0
    workspace_bytes: int = 0

    @property
    def cpu_bytes(self) -> int:
        """CPU memory; without a GPU all but the KV cache's pool."""
        weight_bytes = self.embedding_bytes if self.device.is_cuda else self.weight_bytes
        return weight_bytes + self.expert_bytes + self.process_bytes + self.tier_bytes

    @property
    def fixed_bytes(self) -> int:
        """All but the KV cache's pool of the memory that the pool is in."""
        return self.weight_bytes + self.workspace_bytes if self.device.is_cuda else self.cpu_bytes

    @property
    def rest_bytes(self) -> int:
        """What is left of that memory for the KV cache and everything else."""
        have_bytes = self.device.free_bytes if self.device.is_cuda else self.available_bytes
        return max(0, have_bytes - self.fixed_bytes)

    @property
    def share_bytes(self) -> int:
        """What of it the KV cache takes unless it is told otherwise."""
        return int(self.rest_bytes * (_GPU_SHARE if self.device.is_cuda else _SHARE))

    def context_bytes(self, max_model_len: int) -> int:
        """KV cache of one context."""
        return num_pages(max_model_len) * PAGE_TOKENS * self.token_bytes


@dataclass(frozen=True)
class HostMemory:
    """What a host's memory goes to.

    Args:
        weight_bytes: The host's own weights, where its layers compute.
        expert_bytes: Experts in its memory.
        process_bytes: The processes themselves.
        cache_bytes: The KV cache.
        cache_tokens: Tokens that it holds, over all requests.
        max_model_len: Most tokens of prompt and reply together.
        tier_bytes: Memory for what leaves the KV cache.
        cut: Why a context is shorter than the model's longest though nobody asked for it; empty where it is
            not.
        device: What computes the host's layers: with a GPU, weights and KV cache are in its VRAM.
        embedding_bytes: With a GPU, what of the weights is in CPU memory.
        workspace_bytes: With a GPU, captured graphs, and what a step's numbers take, as it is estimated.
    """

    weight_bytes: int
    expert_bytes: int
    process_bytes: int
    cache_bytes: int
    cache_tokens: int
    max_model_len: int
    tier_bytes: int = 0
    cut: str = ""
    device: Device = CPU
    embedding_bytes: int = 0
    workspace_bytes: int = 0

    @property
    def need_bytes(self) -> int:
        """CPU memory, all together."""
        on_device = 0 if self.device.is_cuda else self.weight_bytes + self.cache_bytes
        return on_device + self.embedding_bytes + self.expert_bytes + self.process_bytes + self.tier_bytes

    @property
    def vram_bytes(self) -> int:
        """VRAM, all together; 0 without a GPU."""
        return self.weight_bytes + self.workspace_bytes + self.cache_bytes if self.device.is_cuda else 0

    def __str__(self) -> str:
        experts = f" and {show_size(self.expert_bytes)} of experts" if self.expert_bytes else ""
        tier = f", {show_size(self.tier_bytes)} for what leaves it" if self.tier_bytes else ""
        cut = f"; {self.cut}" if self.cut else ""
        weights = f"host on {self.device}: {show_size(self.weight_bytes)} of weights"
        cache = f"{show_size(self.cache_bytes)} of KV cache, which holds {self.cache_tokens:,} tokens"
        if not self.device.is_cuda:
            return f"{weights}{experts}, {cache}{tier}{cut}"
        return (
            f"{weights}, {show_size(self.workspace_bytes)} for graphs and workspaces, {cache}; in CPU memory "
            f"{show_size(self.embedding_bytes)} of weights{experts}{tier}{cut}"
        )


def card_of(vram_bytes: int) -> Device:
    """A card of so much VRAM that is not here: what CUDA itself takes of it is left out."""
    free_bytes = max(0, vram_bytes - _CONTEXT_BYTES)
    return Device("cuda", f"a GPU of {show_size(vram_bytes)}", free_bytes, vram_bytes)


def host_needs(
    model: Inspection,
    *,
    drafts: bool,
    weight_format: str | None,
    num_workers: int,
    available_bytes: int,
    total_bytes: int,
    tier_bytes: int = 0,
    device: Device = CPU,
    max_step_tokens: int = 0,
) -> HostNeeds:
    """What a host needs of a model, from the headers of its files or its configuration alone.

    Args:
        model: The model.
        drafts: Whether tokens are guessed ahead, by a layer more.
        weight_format: Format of the experts in this machine's memory; None where they are elsewhere.
        num_workers: Worker processes on this machine.
        available_bytes: Memory that can be had.
        total_bytes: Memory that the machine has in all.
        tier_bytes: Memory for what leaves the KV cache.
        device: What computes the host's layers.
        max_step_tokens: Most tokens in one step, of which a GPU's workspaces depend.
    """
    elements = model.cache_elements_per_token + (model.draft_cache_elements if drafts else 0)
    weight_bytes = sum(part.loaded_bytes for part in model.parts) + (model.draft_bytes if drafts else 0)
    process_bytes = HOST_PROCESS_BYTES + num_workers * WORKER_PROCESS_BYTES
    embedding_bytes = workspace_bytes = 0
    if device.is_cuda:
        process_bytes += GPU_PROCESS_BYTES
        weight_bytes = sum(part.gpu_bytes for part in model.parts) + (model.draft_gpu_bytes if drafts else 0)
        embedding_bytes = sum(part.loaded_bytes for part in model.parts if part.name == "embedding")
        workspace_bytes = _workspace_bytes(model, max_step_tokens) + weight_bytes // _GAPS
    return HostNeeds(
        weight_bytes=weight_bytes,
        expert_bytes=model.expert_bytes(weight_format, drafts=drafts) if weight_format else 0,
        process_bytes=process_bytes,
        token_bytes=(_GPU_CACHE_BYTES if device.is_cuda else _CACHE_BYTES) * elements,
        longest=model.max_position_embeddings,
        available_bytes=available_bytes,
        total_bytes=total_bytes,
        tier_bytes=tier_bytes,
        device=device,
        embedding_bytes=embedding_bytes,
        workspace_bytes=workspace_bytes,
    )


def _workspace_bytes(model: Inspection, max_step_tokens: int) -> int:
    """What a GPU holds beside weights and KV cache: an estimate, and rather too much.

    All numbers of a token's way through a layer count at once, though many are gone before others come: for
    the longest step, and again for the memory that captured graphs keep. With them count the logits of as
    many rows as a graph has and the copy that is sampled from, rotations of every position, and an indexer's
    scores of all positions, for the same rows.
    """
    rows = max(max_step_tokens, _GRAPH_ROWS) + _GRAPH_ROWS
    a_position = model.rotary_elements + (_GRAPH_ROWS if model.has_indexer else 0)
    numbers = rows * model.step_elements + model.max_position_embeddings * a_position
    numbers += 2 * _GRAPH_ROWS * model.vocab_size
    return _GRAPH_BYTES + 4 * numbers


def plan_host(
    needs: HostNeeds, *, max_model_len: int | None, cache_bytes: int | None, max_num_seqs: int
) -> HostMemory:
    """Sizes the KV cache.

    Without ``cache_bytes`` it takes a quarter of what the rest leaves free, or of VRAM nine tenths, but one
    context at least and no more than ``max_num_seqs`` of them. Without ``max_model_len`` a context is as long
    as fits in there, up to the model's longest.

    Raises:
        ConfigError: A context longer than the model's, or one that does not fit; ``cache_bytes`` of less than
            a context; more of everything together than is available, of memory or of VRAM, which is then the
            error's field; a memory tier that holds no page.
    """
    page_bytes = PAGE_TOKENS * needs.token_bytes
    if 0 < needs.tier_bytes < page_bytes:
        raise ConfigError(
            "kv_memory_bytes",
            show_size(needs.tier_bytes),
            f"0, or at least {show_size(page_bytes, up=True)}, one page",
        )
    if needs.device.is_cuda and needs.cpu_bytes > needs.available_bytes:
        raise _too_little_memory(needs, 0, "")
    length = _context(needs, max_model_len, cache_bytes)
    least_bytes = needs.context_bytes(length)
    if cache_bytes is not None and cache_bytes < least_bytes:
        least = show_size(least_bytes, up=True)
        raise ConfigError(
            "kv_cache_bytes", show_size(cache_bytes), f"at least {least}, for one context of {length} tokens"
        )
    if cache_bytes is not None and cache_bytes > needs.rest_bytes:
        raise _too_little(needs, cache_bytes, "of kv_cache_bytes")
    if least_bytes > needs.rest_bytes:
        raise _too_little(needs, least_bytes, f"of KV cache for one context of {length} tokens")
    there = "VRAM" if needs.device.is_cuda else "memory"
    why = f"the {there} there is" if cache_bytes is None else "kv_cache_bytes"
    is_cut = max_model_len is None and length < needs.longest
    if cache_bytes is None:
        most_bytes = min(needs.share_bytes, max_num_seqs * least_bytes)
        cache_bytes = max(least_bytes, most_bytes)
    pages = cache_bytes // page_bytes
    return HostMemory(
        needs.weight_bytes,
        needs.expert_bytes,
        needs.process_bytes,
        pages * page_bytes,
        pages * PAGE_TOKENS,
        length,
        needs.tier_bytes,
        f"context cut from {needs.longest} to {length} tokens by {why}" if is_cut else "",
        needs.device,
        needs.embedding_bytes,
        needs.workspace_bytes,
    )


def _context(needs: HostNeeds, asked: int | None, cache_bytes: int | None) -> int:
    """The longest context, in tokens."""
    if asked is None:
        few_bytes = min(needs.rest_bytes, needs.context_bytes(_FEW_TOKENS))
        room_bytes = max(needs.share_bytes, few_bytes) if cache_bytes is None else cache_bytes
        room_tokens = room_bytes // (PAGE_TOKENS * needs.token_bytes) * PAGE_TOKENS
        return max(2, min(needs.longest, room_tokens))
    if asked > needs.longest:
        raise ConfigError("max_model_len", asked, f"at most {needs.longest}, the model's longest context")
    is_cuda = needs.device.is_cuda
    total_bytes = needs.device.total_bytes if is_cuda else needs.total_bytes
    whose = "VRAM" if is_cuda else "this machine's memory"
    if asked * needs.token_bytes > total_bytes:
        raise ConfigError(
            "max_model_len",
            asked,
            f"at most {total_bytes // needs.token_bytes}, what the {show_size(total_bytes)} of {whose} hold "
            f"at {show_size(needs.token_bytes)} a token",
        )
    return asked


def _too_little(needs: HostNeeds, cache_bytes: int, what_cache: str) -> ConfigError:
    """What is said where the memory that the KV cache is in holds too little."""
    if not needs.device.is_cuda:
        return _too_little_memory(needs, cache_bytes, what_cache)
    parts = (
        (needs.weight_bytes, "of weights"),
        (needs.workspace_bytes, "for graphs and workspaces"),
        (cache_bytes, what_cache),
    )
    helps = "a card with more of it"
    if needs.weight_bytes + _GRAPH_BYTES < needs.device.free_bytes:
        helps = f"a smaller {_smaller(what_cache)} or max_step_tokens, which need less"
    return ConfigError(
        "VRAM",
        InWords(f"{show_size(needs.device.free_bytes)} free on {needs.device.title}"),
        f"at least {show_size(needs.fixed_bytes + cache_bytes, up=True)}: {_told(parts)}",
        f"{helps}, or device cpu, which needs none",
    )


def _too_little_memory(needs: HostNeeds, cache_bytes: int, what_cache: str) -> ConfigError:
    parts = (
        (needs.embedding_bytes if needs.device.is_cuda else needs.weight_bytes, "of weights"),
        (needs.expert_bytes, "of experts"),
        (needs.process_bytes, "for the processes"),
        (needs.tier_bytes, "of kv_memory_bytes"),
        (cache_bytes, what_cache),
    )
    smaller, fixed_bytes = _smaller(what_cache), needs.cpu_bytes
    if needs.device.is_cuda:
        smaller, fixed_bytes = "kv_memory_bytes", needs.cpu_bytes - needs.tier_bytes
    helps = []  # what of it can help at all
    if fixed_bytes < needs.available_bytes:
        helps.append(f"a smaller {smaller}")
    if needs.expert_bytes and fixed_bytes - needs.expert_bytes < needs.available_bytes:
        helps.append("workers on other machines")
    if helps:
        needs_less = "needs less" if helps == [f"a smaller {smaller}"] else "need less"
        hint = f"{', or '.join(helps)}{',' if len(helps) > 1 else ''} {needs_less} here"
    else:
        hint = "the host needs a larger memory" + ("" if needs.device.is_cuda else ", or a GPU for its part")
    return ConfigError(
        "memory",
        InWords(f"{show_size(needs.available_bytes)} available"),
        f"at least {show_size(needs.cpu_bytes + cache_bytes, up=True)}: {_told(parts)}",
        hint,
    )


def _told(parts: Iterable[tuple[int, str]]) -> str:
    return ", ".join(f"{show_size(num_bytes)} {what}" for num_bytes, what in parts if num_bytes)


def _smaller(what_cache: str) -> str:
    return "kv_cache_bytes" if what_cache.endswith("kv_cache_bytes") else "max_model_len"
