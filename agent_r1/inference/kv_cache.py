"""The KV cache: keys and values of many sequences, in blocks of slots.

A block has R rows. Each row is a slot: the place of one sequence. For each layer, a block has one tensor of keys and
one tensor of values. A decode step runs on whole blocks, so all shapes are fixed. Therefore, the results of a sequence
have the same bits whether the sequence is computed alone or in a batch.

A slot has contiguous addresses. On a CPU, a slot takes memory only for tokens that were written
(:func:`lazy_zeros`). vAttention does the same on GPUs (arXiv 2405.04437).

Shapes: R rows of a block, K key-value heads, H attention heads, G = H / K, T new tokens, D head size, L visible tokens
(the columns of keys and values over which the attention is computed).
"""

from __future__ import annotations

import ctypes
import math
import mmap
import resource
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from agent_r1.inference.config import EngineConfig

_LINUX_NORESERVE = 0x4000
"""MAP_NORESERVE of Linux. Without this flag, Linux refuses tensors that are larger than the memory."""

OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")


def has_free_addresses() -> bool:
    """Return whether this process may reserve an address space that is larger than the machine's memory."""
    counts_all = OVERCOMMIT.exists() and OVERCOMMIT.read_text("ascii").strip() == "2"
    return not counts_all and resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return zeros in CPU memory, each page of which is taken on its first write. Raise OSError if addresses lack."""
    size = math.prod(shape) * dtype.itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, size, flags | (_LINUX_NORESERVE if sys.platform == "linux" else 0))
    if sys.platform == "linux":
        with suppress(OSError):  # this kernel has no huge pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)  # a huge page takes 2 MiB for the first byte that is written
    return torch.frombuffer(memory, dtype=dtype).view(*shape)  # keeps ``memory`` open


def give_back(part: Tensor) -> None:
    """Give the memory of ``part`` of a lazy tensor back to the system. Its values become zero, or stay."""
    assert part.is_contiguous()
    begin, end = part.data_ptr(), part.data_ptr() + part.nbytes
    first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if first < last:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)


ATTENTION = "agent_r1_kv_cache"
LENGTH_MULTIPLE = 64
"""Keys and values are padded to a multiple of this number of tokens. The attention ignores the padding."""


def round_up(count: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``count``."""
    return -(-count // multiple) * multiple


VALUE_CHUNK = 256
"""The maximum number of tokens in a chunk of :func:`weighted_values`."""


def weighted_values(weights: Tensor, values: Tensor) -> Tensor:
    """Return the product of attention ``weights`` (.., N, L) and ``values`` (.., L, D): (.., N, D).

    The bits of the result must not depend on the padding, whose weights are 0. But BLAS libraries divide a long sum at
    a place that depends on L. So the sum over L is computed in chunks of ``VALUE_CHUNK`` tokens.
    """
    columns = weights.shape[-1]
    mixed = torch.matmul(weights[..., :VALUE_CHUNK], values[..., :VALUE_CHUNK, :])
    if columns <= VALUE_CHUNK:
        return mixed
    total = mixed.float()
    for start in range(VALUE_CHUNK, columns, VALUE_CHUNK):
        chunk = slice(start, start + VALUE_CHUNK)
        total = total + torch.matmul(weights[..., chunk], values[..., chunk, :])
    return total.to(values.dtype)


def cache_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **_: object,
) -> tuple[Tensor, None]:
    """Return (the attention output of a layer (R, T, H, D), None in place of the attention weights).

    Each key-value head serves G = H / K attention heads (grouped-query attention). These G heads become rows of one
    matrix product, so that ``key`` and ``value`` are not copied for each head.

    Args:
        query: (R, H, T, D).
        key, value: (R, K, L, D).
        attention_mask: (R, 1, T, L), added to the attention scores.
    """
    rows, heads, new, size = query.shape
    kv_heads = key.shape[1]
    grouped = (query * scaling).reshape(rows, kv_heads, heads // kv_heads * new, size)  # (R, K, G * T, D)
    scores = torch.matmul(grouped, key.transpose(2, 3)).view(rows, kv_heads, heads // kv_heads, new, -1)
    if attention_mask is not None:
        scores = scores + attention_mask[:, :, None]  # (R, K, G, T, L) + (R, 1, 1, T, L)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    mixed = weighted_values(weights.view(rows, kv_heads, heads // kv_heads * new, -1), value)  # (R, K, G * T, D)
    return mixed.view(rows, heads, new, size).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, cache_attention)


@dataclass(frozen=True, slots=True)
class CacheSlot:
    """The place of one sequence in the KV cache: the index of a block, and the row in this block."""

    block: int
    row: int


@dataclass(slots=True)
class CacheBlock:
    """The keys and values of R = ``rows`` sequences, each (R, K, capacity, D) for each layer.

    The first ``lengths[i]`` tokens of row i are valid. On a CPU, tokens that were never written take no memory.
    """

    rows: int
    capacity: int
    device: torch.device
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    lengths: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.lengths = torch.zeros(self.rows, dtype=torch.long, device=self.device)

    def layer(self, index: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return (keys, values) of a layer: (R, K, capacity, D) each, allocated as ``like`` by the first call."""
        while len(self.keys) <= index:
            shape = (self.rows, like.shape[1], self.capacity, like.shape[3])
            keys, values = _zeros(shape, like), _zeros(shape, like)  # first both: there may be no memory for one
            self.keys.append(keys)
            self.values.append(values)
        return self.keys[index], self.values[index]

    def reserve(self, tokens: int) -> None:
        """Make room for ``tokens`` tokens in each row. If the capacity grows, it at least doubles."""
        if tokens <= self.capacity:
            return
        capacity = round_up(max(tokens, 2 * self.capacity), LENGTH_MULTIPLE)
        for tensors in (self.keys, self.values):
            for layer, tensor in enumerate(tensors):
                rows, heads, length, size = tensor.shape
                tensors[layer] = _zeros((rows, heads, capacity, size), tensor)
                tensors[layer][:, :, :length] = tensor
        self.capacity = capacity

    def empty(self, row: int) -> None:
        """Remove all keys and values of a row. On a CPU, the memory goes back to the operating system."""
        self.lengths[row] = 0
        if self.device.type == "cpu":
            for tensor in (*self.keys, *self.values):
                give_back(tensor[row])

    @property
    def bytes_per_token(self) -> int:
        return sum(tensor[0, :, 0].nbytes for tensor in (*self.keys, *self.values))


def _zeros(shape: tuple[int, int, int, int], like: Tensor) -> Tensor:
    return lazy_zeros(shape, like.dtype) if like.device.type == "cpu" else like.new_zeros(shape)


class _CacheView:
    """Base class of the caches for a transformers model."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # models only derive positions from this number, and the runner passes positions


class DecodeCache(_CacheView):
    """The cache of a decode step: each row of ``block`` gets one token. Layers read ``visible`` tokens of each row."""

    def __init__(self, block: CacheBlock, visible: int) -> None:
        self._block, self._visible = block, visible
        self._rows = torch.arange(block.rows, device=block.device)

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write one new token per row (R, K, 1, D). Return (keys, values) of the visible tokens: (R, K, L, D) each."""
        keys, values = self._block.layer(layer_idx, key)
        keys[self._rows, :, self._block.lengths] = key[:, :, 0]
        values[self._rows, :, self._block.lengths] = value[:, :, 0]
        return keys[:, :, : self._visible], values[:, :, : self._visible]


class PrefillCache(_CacheView):
    """The cache of a prefill pass, which computes the new tokens of R sequences, padded to T tokens per sequence.

    Sequence i is in the slot ``slots[i]``. The slots can be in different blocks of the KV cache. The earlier tokens of
    sequence i are the first ``cached[i]`` tokens in the slot. A layer gets the earlier tokens of each sequence, padded
    to the length ``context``, followed by the T tokens of the pass. Only the first ``new[i]`` of the T tokens are
    written to the slot. The other tokens are padding.
    """

    def __init__(
        self, blocks: list[CacheBlock], slots: list[CacheSlot], cached: list[int], new: list[int], context: int
    ) -> None:
        self._blocks, self._slots, self._cached, self._new, self._context = blocks, slots, cached, new, context

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write the new tokens (R, K, T, D) to the slots. Return earlier and new keys and values, (R, K, C + T, D)
        each.
        """
        for index, (slot, cached, new) in enumerate(zip(self._slots, self._cached, self._new, strict=True)):
            keys, values = self._blocks[slot.block].layer(layer_idx, key)
            keys[slot.row, :, cached : cached + new] = key[index, :, :new]
            values[slot.row, :, cached : cached + new] = value[index, :, :new]
        if self._context == 0:
            return key, value
        return self._with_context(key, layer_idx, 0), self._with_context(value, layer_idx, 1)

    def _with_context(self, new: Tensor, layer_idx: int, which: int) -> Tensor:
        rows, heads, tokens, size = new.shape
        joined = new.new_zeros((rows, heads, self._context + tokens, size))
        joined[:, :, self._context :] = new
        for index, (slot, cached) in enumerate(zip(self._slots, self._cached, strict=True)):
            source = self._blocks[slot.block].layer(layer_idx, new)[which]
            joined[index, :, :cached] = source[slot.row, :, :cached]
        return joined


GIB = 2**30
CPU_SHARE, CPU_LIMIT_GIB = 0.5, 4.0
GPU_SHARE = 0.3

PAGE_TOKENS = LENGTH_MULTIPLE
"""The number of tokens in a page."""


def pages_for(tokens: int) -> int:
    """Return the number of pages for a sequence of ``tokens`` tokens."""
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
    """The size of a KV cache. The cache consists of blocks, and a block consists of slots for one sequence each."""

    rows: int  # the number of slots in a block
    blocks: int  # the maximum number of blocks
    pages: int  # the maximum number of pages (``PAGE_TOKENS`` tokens each) of all slots together
    session_pages: int  # the minimum number of pages that a slot takes when a sequence begins
    capacity: int  # the number of tokens for which a new slot has room. The room grows if a sequence needs more


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
