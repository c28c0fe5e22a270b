"""The generation step: prefill and decode of a transformers causal LM over slots."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agent_r1.core.errors import InvalidInput
from agent_r1.inference.kv_cache import (
    ATTENTION,
    LENGTH_MULTIPLE,
    Block,
    DecodeCache,
    PrefillCache,
    Slot,
    round_up,
)

PREFILL_MULTIPLE = 16
PREFILL_CHUNK = 256
"""Tokens of a sequence that are prefilled at once; longer ones go chunk by chunk."""

PREFILL_TOKENS = 512
"""Tokens of one prefill pass: the number of its rows follows from their length alone."""

PROBE_TOKENS = 24
PROBE_TOLERANCE = 1e-3
"""Largest difference of a logit, relative to the largest one, between slots and a plain forward pass."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens to prefill: ``ids`` follow the ``held`` tokens that ``slot`` already keeps."""

    slot: Slot
    held: int
    ids: tuple[int, ...]

    def chunks(self) -> list[Piece]:
        """The piece in portions, each of which finds the ones before it held."""
        return [
            Piece(self.slot, self.held + start, self.ids[start : start + PREFILL_CHUNK])
            for start in range(0, len(self.ids), PREFILL_CHUNK)
        ]

    @property
    def shape(self) -> tuple[int, int]:
        """(new, context) as padded; a piece's arithmetic depends on these and its own tokens only."""
        return round_up(len(self.ids), PREFILL_MULTIPLE), round_up(self.held, LENGTH_MULTIPLE)


class Decoder:
    """Runs a model over blocks of slots. Not safe for use by several threads at once.

    The model is taken over: its attention is replaced by one that reads slots in place.
    """

    def __init__(self, model: PreTrainedModel, rows: int) -> None:
        self.model = model.eval().requires_grad_(False)
        self.model.set_attn_implementation(ATTENTION)
        self.rows = rows
        self.blocks: list[Block] = []

    @property
    def vocabulary(self) -> int:
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def device(self) -> torch.device:
        return self.model.device

    def add_block(self) -> int:
        """Make room for ``rows`` more sequences; returns the block's index."""
        self.blocks.append(Block(self.rows, 2 * LENGTH_MULTIPLE, self.device))
        return len(self.blocks) - 1

    @torch.inference_mode()
    def set_length(self, slot: Slot, held: int) -> None:
        """Say how many tokens of the slot count from now on; later ones are overwritten."""
        self.blocks[slot.block].lengths[slot.row] = held

    @torch.inference_mode()
    def copy(self, source: Slot, target: Slot, tokens: int) -> None:
        """Give ``target`` the first ``tokens`` keys and values of ``source``."""
        origin, goal = self.blocks[source.block], self.blocks[target.block]
        goal.reserve(tokens + 1)
        for index, (keys, values) in enumerate(zip(origin.keys, origin.values, strict=True)):
            goal_keys, goal_values = goal.layer(index, keys)
            goal_keys[target.row, :, :tokens] = keys[source.row, :, :tokens]
            goal_values[target.row, :, :tokens] = values[source.row, :, :tokens]
        goal.lengths[target.row] = tokens

    @torch.inference_mode()
    def prefill(self, pieces: Sequence[Piece]) -> None:
        """Compute and keep the keys and values of all pieces, equal shapes together."""
        for piece in pieces:
            self.blocks[piece.slot.block].reserve(piece.held + len(piece.ids) + 1)
        chunked = [piece.chunks() for piece in pieces]
        for turn in itertools.zip_longest(*chunked):
            self._prefill_together([piece for piece in turn if piece is not None])

    def _prefill_together(self, pieces: Sequence[Piece]) -> None:
        by_shape: dict[tuple[int, int], list[Piece]] = {}
        for piece in pieces:
            by_shape.setdefault(piece.shape, []).append(piece)
        for (new, context), alike in sorted(by_shape.items()):
            rows = max(1, PREFILL_TOKENS // new)
            for start in range(0, len(alike), rows):
                self._prefill_alike(alike[start : start + rows], rows, new, context)

    def _prefill_alike(self, pieces: Sequence[Piece], rows: int, new: int, context: int) -> None:
        ids = torch.zeros((rows, new), dtype=torch.long)
        held = torch.zeros(rows, dtype=torch.long)
        for index, piece in enumerate(pieces):
            ids[index, : len(piece.ids)] = torch.tensor(piece.ids)
            held[index] = piece.held
        counts = [len(piece.ids) for piece in pieces]
        cache = PrefillCache(
            self.blocks, [piece.slot for piece in pieces], [piece.held for piece in pieces], counts, context
        )
        # Padding may stand past the model's last position; no one looks at it.
        positions = (held[:, None] + torch.arange(new)[None]).clamp(max=int(held.max()) + max(counts) - 1)
        self._forward(ids, positions, self._prefill_mask(held, new, context), cache)
        for piece, count in zip(pieces, counts, strict=True):
            self.set_length(piece.slot, piece.held + count)

    def _prefill_mask(self, held: Tensor, new: int, context: int) -> Tensor:
        """(R, 1, T, context + T): context columns below the row's held count, new columns causally."""
        rows = held.shape[0]
        seen = (torch.arange(context)[None] < held[:, None])[:, None].expand(rows, new, context)
        causal = torch.ones((new, new), dtype=torch.bool).tril()[None].expand(rows, new, new)
        return self._additive(torch.cat([seen, causal], dim=-1))[:, None]

    def _additive(self, visible: Tensor) -> Tensor:
        zeros = torch.zeros(visible.shape, dtype=self.model.dtype)
        return zeros.masked_fill(~visible, float("-inf")).to(self.device)

    def _forward(self, ids: Tensor, positions: Tensor, mask: Tensor, cache: object) -> Tensor:
        return self.model.base_model(
            input_ids=ids.to(self.device),
            position_ids=positions.to(self.device),
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state

    @torch.inference_mode()
    def decode(self, block_index: int, feed: Mapping[int, int]) -> Tensor:
        """Feed one token to each row in ``feed`` {row: token}; returns logits (len(feed), V), fp32, in that order.

        The whole block runs, so that shapes never change; rows not fed compute into space that is overwritten later.
        """
        block = self.blocks[block_index]
        block.reserve(int(block.lengths.max()) + 1)
        ids = torch.zeros(self.rows, dtype=torch.long)
        rows = torch.tensor(list(feed), dtype=torch.long)
        ids[rows] = torch.tensor(list(feed.values()), dtype=torch.long)
        visible = min(round_up(int(block.lengths.max()) + 1, LENGTH_MULTIPLE), block.capacity)
        mask = self._additive(torch.arange(visible)[None] <= block.lengths.cpu()[:, None])[:, None, None]
        hidden = self._forward(ids[:, None], block.lengths[:, None], mask, DecodeCache(block, visible))
        logits = self.model.get_output_embeddings()(hidden[:, 0])
        rows = rows.to(self.device)
        block.lengths[rows] += 1
        return logits[rows].float()


def checked_bytes_per_token(model: PreTrainedModel) -> int:
    """Bytes of keys and values that one token of one sequence takes.

    Found on a short prompt, whose logits must be those of the model's own forward pass: a model that attends
    in a way of its own (sinks, soft-capped scores) is refused with InvalidInput.
    """
    usual = model.config._attn_implementation
    ids = torch.arange(PROBE_TOKENS) % model.config.get_text_config().vocab_size
    with torch.inference_mode():
        plain = model(input_ids=ids[None].to(model.device), use_cache=False).logits[0, -1].float()
    decoder = Decoder(model, 1)
    slot = Slot(decoder.add_block(), 0)
    try:
        decoder.prefill([Piece(slot, 0, tuple(ids[:-1].tolist()))])
        ours = decoder.decode(0, {0: int(ids[-1])})[0]
    except Exception as error:  # as many kinds as there are models that ask more of a cache than ours gives
        raise _unsupported(model, f"{type(error).__name__}: {error}") from error
    finally:
        model.set_attn_implementation(usual)
    if not torch.allclose(ours, plain, rtol=0, atol=PROBE_TOLERANCE * float(plain.abs().max())):
        raise _unsupported(model, f"its logits differ by {float((ours - plain).abs().max()):.2g}")
    return decoder.blocks[0].bytes // decoder.blocks[0].capacity


def _unsupported(model: PreTrainedModel, why: str) -> InvalidInput:
    do = f"use a model with plain causal attention; the embedded engine cannot run this one ({why})"
    return InvalidInput("model", got=type(model).__name__, do=do)
