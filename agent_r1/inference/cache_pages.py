"""The size of the KV cache in pages, and the number of pages that each slot holds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from agent_r1.inference.config import EngineConfig
from agent_r1.inference.kv_cache import LENGTH_MULTIPLE, CacheSlot, round_up
from agent_r1.inference.lazy_memory import has_free_addresses

GIB = 2**30
CPU_SHARE, CPU_LIMIT_GIB = 0.5, 4.0
GPU_SHARE = 0.3

PAGE_TOKENS = LENGTH_MULTIPLE
"""The number of tokens in a page."""


def pages_for(tokens: int) -> int:
    """Return the number of pages for a sequence of ``tokens`` tokens.

    Example:
        >>> pages_for(65)
        2
    """
    return round_up(tokens, PAGE_TOKENS) // PAGE_TOKENS


class CachePages:
    """Counts the pages that each slot of the KV cache holds. All slots together hold at most ``total`` pages."""

    def __init__(self, total: int) -> None:
        self.free = total
        self.held: Counter[CacheSlot] = Counter()

    def take(self, slot: CacheSlot, pages: int) -> bool:
        """Let a slot hold at least ``pages`` pages. If too few pages are free, return False and change nothing."""
        missing = max(0, pages - self.held[slot])
        if missing > self.free:
            return False
        self.free -= missing
        self.held[slot] += missing
        return True

    def drop(self, slot: CacheSlot) -> None:
        self.free += self.held.pop(slot, 0)


@dataclass(frozen=True, slots=True)
class CacheSize:
    """The size of a KV cache. The cache consists of blocks, and a block consists of slots for one sequence each.

    Attributes:
        rows: the number of slots in a block.
        blocks: the maximum number of blocks.
        pages: the maximum number of pages (``PAGE_TOKENS`` tokens each) of all slots together.
        session_pages: the minimum number of pages that a slot takes when a sequence begins.
        capacity: the number of tokens for which a new slot has room. The room grows if a sequence needs more.
    """

    rows: int
    blocks: int
    pages: int
    session_pages: int
    capacity: int


def cache_size(
    config: EngineConfig, context: int, bytes_per_token: int, device: torch.device, *, is_native: bool
) -> CacheSize:
    """Return the size of the KV cache of an embedded engine.

    With the native decoder, a sequence takes only the pages that its tokens need. If no page is free, an unfinished
    sequence is removed, and computed again later. The sequence does not change, because prefill and decode steps give
    bit-equal keys and values.

    With the PyTorch decoder, prefill and decode steps give different bits, so a sequence that is computed again would
    change. Therefore each sequence takes the pages for ``context`` tokens when the sequence starts, and no running
    sequence is removed.

    Args:
        context: the maximum number of tokens of a sequence.
        bytes_per_token: the size of a token's keys and values in all layers.
        is_native: whether the native decoder is used.
    """
    most = pages_for(context + 1)
    pages = kv_cache_bytes(config, device) // (bytes_per_token * PAGE_TOKENS)
    on_cpu = device.type == "cpu"
    is_lazy = on_cpu and has_free_addresses()  # memory is taken when it is written
    capacity = most * PAGE_TOKENS if is_lazy else 2 * PAGE_TOKENS
    if is_native:
        blocks = max(1, pages // config.max_sequences)  # each sequence takes a page or more
        return CacheSize(config.max_sequences, blocks, max(pages, most), 1, capacity)
    slots = max(1, pages // most)  # the number of whole contexts that fit
    blocks = max(1, slots // config.max_sequences)
    # The shape of a decode batch changes the bits of its results. So, on a CPU, the shape does not depend on the
    # memory that is free now: the free memory limits only the number of decode batches.
    gib = config.kv_cache_gib or (CPU_LIMIT_GIB if on_cpu else None)
    fixed = slots if gib is None else max(1, int(gib * GIB) // (bytes_per_token * PAGE_TOKENS * most))
    rows = min(config.max_sequences, fixed)
    pages = rows * blocks * (most + 1)  # one more for each, because a page for each running request stays free
    return CacheSize(rows, blocks, pages, most, capacity)


def kv_cache_bytes(config: EngineConfig, device: torch.device) -> int:
    """Return the maximum size of the KV cache in bytes, from the settings or from the free memory of ``device``."""
    if config.kv_cache_gib is not None:
        return int(config.kv_cache_gib * GIB)
    if device.type == "cuda":
        return int(GPU_SHARE * torch.cuda.mem_get_info(device)[0])
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text("ascii").splitlines())
        available = int(lines["MemAvailable"].split()[0]) * 1024  # given in kB
    except (OSError, KeyError, ValueError):  # not Linux
        return int(CPU_LIMIT_GIB * GIB)
    return min(int(CPU_SHARE * available), int(CPU_LIMIT_GIB * GIB))
