"""Keys and values of many sequences, kept in blocks of slots.

A block has a fixed number of rows, one sequence per row, and one tensor per layer; a decode step runs
on whole blocks. Fixed shapes make a row's arithmetic independent of what the other rows hold: a
sequence gets the same bits alone as in company (tests/rollout/test_torch_engine.py shows it).

Legend: R rows of a block, K key-value heads, H heads, G = H / K, T new tokens, L visible tokens, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

ATTENTION = "agent_r1_slots"
LENGTH_MULTIPLE = 64


def round_up(count: int, multiple: int) -> int:
    """The smallest multiple that is >= count.

    Example:
        >>> round_up(65, 64)
        128
    """
    return -(-count // multiple) * multiple


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention of query (R, H, T, D) over key and value (R, K, L, D), which may be strided views.

    ``attention_mask`` (R, 1, T, L) is added to the scores. Heads that share keys are stacked as rows of
    one product, so keys are never copied per head, unlike in the library's default.
    """
    rows, heads, new, size = query.shape
    shared = key.shape[1]
    stacked = (query * scaling).reshape(rows, shared, heads // shared * new, size)
    scores = torch.matmul(stacked, key.transpose(2, 3)).view(rows, shared, heads // shared, new, -1)
    if attention_mask is not None:
        scores = scores + attention_mask[:, :, None]
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    mixed = torch.matmul(weights.view(rows, shared, heads // shared * new, -1), value)
    return mixed.view(rows, heads, new, size).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, slot_attention)


@dataclass(frozen=True, slots=True)
class Slot:
    """One row of one block."""

    block: int
    row: int


@dataclass(slots=True)
class Block:
    """``rows`` sequences: ``keys[layer]``, ``values[layer]`` (R, K, capacity, D); ``lengths`` (R,) held tokens."""

    rows: int
    capacity: int
    device: torch.device
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    lengths: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.lengths = torch.zeros(self.rows, dtype=torch.long, device=self.device)

    def layer(self, index: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of a layer, made on first use in the shape that the model's own keys have."""
        while len(self.keys) <= index:
            shape = (self.rows, like.shape[1], self.capacity, like.shape[3])
            self.keys.append(like.new_zeros(shape))
            self.values.append(like.new_zeros(shape))
        return self.keys[index], self.values[index]

    def reserve(self, tokens: int) -> None:
        """Make room for ``tokens`` per row, at least doubling when it grows."""
        if tokens <= self.capacity:
            return
        grown = round_up(max(tokens, 2 * self.capacity), LENGTH_MULTIPLE)
        self.keys = [_widened(tensor, grown) for tensor in self.keys]
        self.values = [_widened(tensor, grown) for tensor in self.values]
        self.capacity = grown

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))


def _widened(tensor: Tensor, capacity: int) -> Tensor:
    rows, heads, held, size = tensor.shape
    wide = tensor.new_zeros((rows, heads, capacity, size))
    wide[:, :, :held] = tensor
    return wide


class _SlotCache:
    """What models ask of transformers' cache in a forward pass, besides ``update``: positions are given to them."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


class DecodeCache(_SlotCache):
    """One new token per row of a block: written at the row's length, then the first ``visible`` tokens are seen."""

    def __init__(self, block: Block, visible: int) -> None:
        self._block, self._visible = block, visible
        self._rows = torch.arange(block.rows, device=block.device)

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        keys, values = self._block.layer(layer_idx, key)
        keys[self._rows, :, self._block.lengths] = key[:, :, 0]
        values[self._rows, :, self._block.lengths] = value[:, :, 0]
        return keys[:, :, : self._visible], values[:, :, : self._visible]


class PrefillCache(_SlotCache):
    """T new tokens for sequences of several blocks: context copied from the slots, new keys written back to them."""

    def __init__(self, blocks: list[Block], slots: list[Slot], held: list[int], new: list[int], context: int) -> None:
        self._blocks, self._slots, self._held, self._new, self._context = blocks, slots, held, new, context

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        for index, (slot, held, new) in enumerate(zip(self._slots, self._held, self._new, strict=True)):
            keys, values = self._blocks[slot.block].layer(layer_idx, key)
            keys[slot.row, :, held : held + new] = key[index, :, :new]
            values[slot.row, :, held : held + new] = value[index, :, :new]
        if self._context == 0:
            return key, value
        return self._with_context(key, layer_idx, 0), self._with_context(value, layer_idx, 1)

    def _with_context(self, new: Tensor, layer_idx: int, which: int) -> Tensor:
        """(R, K, context + T, D): what the slots held before, zero-padded, then the new tokens."""
        rows, heads, tokens, size = new.shape
        joined = new.new_zeros((rows, heads, self._context + tokens, size))
        joined[:, :, self._context :] = new
        for index, (slot, held) in enumerate(zip(self._slots, self._held, strict=True)):
            source = self._blocks[slot.block].layer(layer_idx, new)[which]
            joined[index, :, :held] = source[slot.row, :, :held]
        return joined
