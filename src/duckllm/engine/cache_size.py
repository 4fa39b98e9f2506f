"""What a host's memory goes to, decided before anything is loaded: weights, and as much KV cache as is wise.

Called where the parts of an LLM are put together, and by ``duckllm plan``. Works on numbers alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from duckllm.config import show_size
from duckllm.errors import ConfigError, InWords
from duckllm.moe.fit import WORKER_PROCESS_BYTES

if TYPE_CHECKING:
    from duckllm.models.inspection import Inspection

PAGE_TOKENS = 16
GIB = 1 << 30
DEFAULT_MAX_NUM_SEQS = 64
# A host's process before it has loaded anything: a worker's, and PyTorch.
HOST_PROCESS_BYTES = 400_000_000
# Of what weights leave free, the KV cache takes this part unless it is told otherwise ...
_SHARE = 4
# ... and more where that were less than a conversation.
_FEW_TOKENS = 2048


def num_pages(num_tokens: int) -> int:
    """Pages that so many tokens take."""
    return -(-num_tokens // PAGE_TOKENS)


@dataclass(frozen=True)
class HostNeeds:
    """What a host needs beside its KV cache, and what there is.

    Args:
        weight_bytes: Its own weights, loaded.
        expert_bytes: Experts in its memory: all where they are computed here, none where that is elsewhere.
        process_bytes: The processes themselves.
        token_bytes: KV cache of one token.
        longest: The model's longest context, tokens.
        available_bytes: Memory that can be had.
        total_bytes: Memory that the machine has in all.
        tier_bytes: Memory for what leaves the KV cache.
    """

    weight_bytes: int
    expert_bytes: int
    process_bytes: int
    token_bytes: int
    longest: int
    available_bytes: int
    total_bytes: int
    tier_bytes: int = 0

    @property
    def fixed_bytes(self) -> int:
        """All but the KV cache's pool."""
        return self.weight_bytes + self.expert_bytes + self.process_bytes + self.tier_bytes

    @property
    def rest_bytes(self) -> int:
        """What is left for the KV cache and everything else."""
        return max(0, self.available_bytes - self.fixed_bytes)

    def context_bytes(self, max_model_len: int) -> int:
        """KV cache of one context."""
        return num_pages(max_model_len) * PAGE_TOKENS * self.token_bytes


@dataclass(frozen=True)
class HostMemory:
    """What a host's memory goes to.

    Args:
        weight_bytes: The host's own weights.
        expert_bytes: Experts in its memory.
        process_bytes: The processes themselves.
        cache_bytes: The KV cache.
        cache_tokens: Tokens that it holds, over all requests.
        max_model_len: Most tokens of prompt and reply together.
        tier_bytes: Memory for what leaves the KV cache.
        cut: Why a context is shorter than the model's longest though nobody asked for it; empty where it is
            not.
    """

    weight_bytes: int
    expert_bytes: int
    process_bytes: int
    cache_bytes: int
    cache_tokens: int
    max_model_len: int
    tier_bytes: int = 0
    cut: str = ""

    @property
    def need_bytes(self) -> int:
        """All together."""
        return self.weight_bytes + self.expert_bytes + self.process_bytes + self.cache_bytes + self.tier_bytes

    def __str__(self) -> str:
        experts = f" and {show_size(self.expert_bytes)} of experts" if self.expert_bytes else ""
        tier = f", {show_size(self.tier_bytes)} for what leaves it" if self.tier_bytes else ""
        cut = f"; {self.cut}" if self.cut else ""
        return (
            f"{show_size(self.weight_bytes)} of weights{experts}, {show_size(self.cache_bytes)} of KV cache, "
            f"which holds {self.cache_tokens:,} tokens{tier}{cut}"
        )


def host_needs(
    model: Inspection,
    *,
    drafts: bool,
    weight_format: str | None,
    num_workers: int,
    available_bytes: int,
    total_bytes: int,
    tier_bytes: int = 0,
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
    """
    elements = model.cache_elements_per_token + (model.draft_cache_elements if drafts else 0)
    return HostNeeds(
        weight_bytes=sum(part.loaded_bytes for part in model.parts) + (model.draft_bytes if drafts else 0),
        expert_bytes=model.expert_bytes(weight_format, drafts=drafts) if weight_format else 0,
        process_bytes=HOST_PROCESS_BYTES + num_workers * WORKER_PROCESS_BYTES,
        token_bytes=4 * elements,
        longest=model.max_position_embeddings,
        available_bytes=available_bytes,
        total_bytes=total_bytes,
        tier_bytes=tier_bytes,
    )


def plan_host(
    needs: HostNeeds, *, max_model_len: int | None, cache_bytes: int | None, max_num_seqs: int
) -> HostMemory:
    """Sizes the KV cache.

    Without ``cache_bytes`` it takes a quarter of what the rest leaves free, but one context at least and no
    more than ``max_num_seqs`` of them. Without ``max_model_len`` a context is as long as fits in there, up to
    the model's longest.

    Raises:
        ConfigError: A context longer than the model's, or one that does not fit; ``cache_bytes`` of less than
            a context; more of everything together than is available; a memory tier that holds no page.
    """
    page_bytes = PAGE_TOKENS * needs.token_bytes
    if 0 < needs.tier_bytes < page_bytes:
        raise ConfigError(
            "kv_memory_bytes",
            show_size(needs.tier_bytes),
            f"0, or at least {show_size(page_bytes, up=True)}, one page",
        )
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
    why = "the memory there is" if cache_bytes is None else "kv_cache_bytes"
    is_cut = max_model_len is None and length < needs.longest
    if cache_bytes is None:
        most_bytes = min(needs.rest_bytes // _SHARE, max_num_seqs * least_bytes)
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
    )


def _context(needs: HostNeeds, asked: int | None, cache_bytes: int | None) -> int:
    """The longest context, in tokens."""
    if asked is None:
        few_bytes = min(needs.rest_bytes, needs.context_bytes(_FEW_TOKENS))
        room_bytes = max(needs.rest_bytes // _SHARE, few_bytes) if cache_bytes is None else cache_bytes
        room_tokens = room_bytes // (PAGE_TOKENS * needs.token_bytes) * PAGE_TOKENS
        return max(2, min(needs.longest, room_tokens))
    if asked > needs.longest:
        raise ConfigError("max_model_len", asked, f"at most {needs.longest}, the model's longest context")
    if asked * needs.token_bytes > needs.total_bytes:
        raise ConfigError(
            "max_model_len",
            asked,
            f"at most {needs.total_bytes // needs.token_bytes}, what the {show_size(needs.total_bytes)} of "
            f"this machine's memory hold at {show_size(needs.token_bytes)} a token",
        )
    return asked


def _too_little(needs: HostNeeds, cache_bytes: int, what_cache: str) -> ConfigError:
    parts = (
        (needs.weight_bytes, "of weights"),
        (needs.expert_bytes, "of experts"),
        (needs.process_bytes, "for the processes"),
        (needs.tier_bytes, "of kv_memory_bytes"),
        (cache_bytes, what_cache),
    )
    told = ", ".join(f"{show_size(num_bytes)} {what}" for num_bytes, what in parts if num_bytes)
    smaller = "kv_cache_bytes" if what_cache.endswith("kv_cache_bytes") else "max_model_len"
    return ConfigError(
        "memory",
        InWords(f"{show_size(needs.available_bytes)} available"),
        f"at least {show_size(needs.fixed_bytes + cache_bytes, up=True)}: {told}",
        f"a smaller {smaller}, or workers on other machines, need less here",
    )
