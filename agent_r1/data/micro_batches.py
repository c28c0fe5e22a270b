"""Micro-batches: token sequences, padded to equal length, that the model processes in one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from agent_r1.core.inference import PromptMedia
from agent_r1.data.sequences import Block, PrefixSharing, TokenSequence

MAX_PADDING = 0.1
"""The share of padding tokens in a micro-batch of several blocks is below this limit."""


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """B token sequences, padded on the right to T tokens each.

    n is the number of predicted tokens. s is the number of actions. In the micro-batch, token t of row b and the
    hidden state at this token have the index b * T + t.
    """

    ids: Tensor
    """(B, T) token ids."""
    position_ids: Tensor | None
    """(B, T) position of each token: the number of earlier tokens to which the token attends, including the tokens of
    the common prefix. If the field is None, attention is causal."""
    subtree_end: Tensor | None
    """(B, T) index e for each token j of a row: exactly the tokens j .. e - 1 of the row attend to token j. If the
    field is None, attention is causal."""
    logit_positions: Tensor
    """(n,) for each predicted token: the index of the hidden state from which the token is predicted."""
    token_positions: Tensor
    """(n,) index of each predicted token in the micro-batch."""
    tokens: Tensor
    """(n,) index of each predicted token in the training batch. Always on the CPU."""
    post_action_states: Tensor
    """(s,) index of the hidden state at the last token of each action."""
    turns: Tensor
    """(s,) index of each action's turn in the training batch. Always on the CPU."""
    num_tokens: int
    """Number of tokens in the micro-batch, without padding."""
    prefix: int = 0
    """Length S of the common prefix of all sequences. The prefix is not in the micro-batch: an earlier pass computes
    its keys and values. ``position_ids`` count from the first token of the prefix. ``subtree_end`` counts from the
    first token after the prefix."""

    media: tuple[tuple[PromptMedia, ...], ...] = ()
    """For each of the B sequences, its images. () if there are no images at all."""

    @property
    def padded_size(self) -> int:
        """Number of tokens with keys and values in memory, including padding: rows * (``prefix`` + tokens per row)."""
        return self.ids.shape[0] * (self.prefix + self.ids.shape[1])

    def to(self, device: torch.device) -> MicroBatch:
        """Return a copy whose model inputs are on ``device``. ``tokens`` and ``turns`` stay on the CPU."""
        # tokens and turns are indices into columns of the training batch, which is always on the CPU
        return replace(
            self,
            ids=self.ids.to(device),
            position_ids=None if self.position_ids is None else self.position_ids.to(device),
            subtree_end=None if self.subtree_end is None else self.subtree_end.to(device),
            logit_positions=self.logit_positions.to(device),
            token_positions=self.token_positions.to(device),
            post_action_states=self.post_action_states.to(device),
        )

    def gather(self, column: Tensor, like: Tensor) -> Tensor:
        """Return the elements of ``column`` (N, ..) at the n predicted tokens: (n, ..)."""
        return column[self.tokens].to(like)


def by_sequence(sequences: Sequence[TokenSequence]) -> list[tuple[TokenSequence, ...]]:
    """Return one block per sequence, so that sequences of a trajectory can be in different micro-batches."""
    return [(sequence,) for sequence in sequences]


def by_trajectory(sequences: Sequence[TokenSequence]) -> list[tuple[TokenSequence, ...]]:
    """Return one block per trajectory, so that all sequences of a trajectory are in one micro-batch."""
    blocks: dict[int, list[TokenSequence]] = {}
    for sequence in sequences:
        blocks.setdefault(sequence.trajectory, []).append(sequence)
    return [tuple(block) for block in blocks.values()]


@dataclass(frozen=True, slots=True, eq=False)
class PassPlan:
    """The plan by which models read sequences: first the tokens ``prefix`` (S,), and then ``micro_batches``.

    ``prefix`` is the common beginning of all sequences, and is not in the micro-batches. S can be 0.
    """

    prefix: Tensor
    micro_batches: Iterator[MicroBatch]


def plan_passes(blocks: Sequence[Block], max_tokens: int, sharing: PrefixSharing | None) -> PassPlan:
    """Return the plan for reading all sequences of ``blocks`` in micro-batches of at most ``max_tokens`` tokens.

    A block is never divided: a block with more than ``max_tokens`` tokens becomes a micro-batch of its own. If
    ``sharing`` is given, common prefixes are computed only once.
    """
    prefix = torch.zeros(0, dtype=torch.int64)
    if sharing is not None and blocks:
        prefix, blocks = sharing.share(blocks, max_tokens)
    make = make_single_rows if sharing is not None and sharing.by_parts else make_micro_batches
    return PassPlan(prefix, make(blocks, max_tokens, len(prefix)))


def make_micro_batches(blocks: Sequence[Block], max_tokens: int, prefix: int = 0) -> Iterator[MicroBatch]:
    """Yield micro-batches that contain all sequences of ``blocks``. All sequences of a block are in one micro-batch.

    :attr:`MicroBatch.padded_size` is at most ``max_tokens``, unless the micro-batch consists of a single block. The
    share of padding in a micro-batch of several blocks stays below ``MAX_PADDING``. Blocks with branches
    (``TokenSequence.has_branches``) never share a micro-batch with blocks without branches.

    ``prefix`` is the length of the common prefix, which the sequences do not contain (:attr:`MicroBatch.prefix`).
    """
    # sorting is stable, so blocks of equal length remain in the given order
    ranked = sorted(blocks, key=lambda block: (_has_branches(block), -_longest(block)))
    for sequences in _fill(ranked, lambda pending, block: _fits(pending, block, max_tokens, prefix)):
        ids = pad_sequence([sequence.ids for sequence in sequences], batch_first=True)  # (B, T)
        width = ids.shape[1]  # T
        position_ids = subtree_end = None
        if _has_branches(sequences):
            position_ids = pad_sequence([sequence.position_ids for sequence in sequences], batch_first=True)  # (B, T)
            # padding attends to padding only, and no token of a sequence attends to it
            ends = [sequence.subtree_end for sequence in sequences]
            subtree_end = pad_sequence(ends, batch_first=True, padding_value=width)  # (B, T)
        rows = list(enumerate(sequences))  # positions in row b become indices into the flattened (B * T,) hidden states
        yield MicroBatch(
            ids=ids,
            position_ids=position_ids,
            subtree_end=subtree_end,
            logit_positions=torch.cat([row * width + sequence.logit_positions for row, sequence in rows]),
            token_positions=torch.cat([row * width + sequence.token_positions for row, sequence in rows]),
            tokens=torch.cat([sequence.tokens for sequence in sequences]),
            post_action_states=torch.cat([row * width + sequence.post_action_states for row, sequence in rows]),
            turns=torch.cat([sequence.turns for sequence in sequences]),
            num_tokens=sum(map(len, sequences)),
            prefix=prefix,
            media=tuple(sequence.media for sequence in sequences) if any(one.media for one in sequences) else (),
        )


def make_single_rows(blocks: Sequence[Block], max_tokens: int, prefix: int = 0) -> Iterator[MicroBatch]:
    """Yield micro-batches of one row each, which contain all sequences of ``blocks``.

    All sequences of a block are in one row. The sequences stand in the row one after the other, without padding.
    :attr:`MicroBatch.padded_size` is at most ``max_tokens``, unless the row consists of a single block.

    ``prefix`` is the length of the common prefix, which the sequences do not contain (:attr:`MicroBatch.prefix`). A
    token attends only to its own sequence and to the common prefix.
    """
    ranked = sorted(blocks, key=lambda block: -sum(map(len, block)))
    for sequences in _fill(ranked, lambda pending, block: prefix + sum(map(len, (*pending, *block))) <= max_tokens):
        starts = accumulate(map(len, sequences), initial=0)
        placed = list(
            zip(sequences, starts, strict=False)
        )  # each sequence with the index of its first token in the row
        media = tuple(one.moved(start) for sequence, start in placed for one in sequence.media)
        yield MicroBatch(
            ids=torch.cat([sequence.ids for sequence in sequences])[None],
            position_ids=torch.cat([sequence.position_ids for sequence in sequences])[None],
            subtree_end=torch.cat([start + sequence.subtree_end for sequence, start in placed])[None],
            logit_positions=torch.cat([start + sequence.logit_positions for sequence, start in placed]),
            token_positions=torch.cat([start + sequence.token_positions for sequence, start in placed]),
            tokens=torch.cat([sequence.tokens for sequence in sequences]),
            post_action_states=torch.cat([start + sequence.post_action_states for sequence, start in placed]),
            turns=torch.cat([sequence.turns for sequence in sequences]),
            num_tokens=sum(map(len, sequences)),
            prefix=prefix,
            media=(media,) if media else (),
        )


def _fill(blocks: Sequence[Block], fits: Callable[[Block, Block], bool]) -> Iterator[Block]:
    pending: list[TokenSequence] = []
    for block in blocks:
        if pending and not fits(pending, block):
            yield pending
            pending = []
        pending += block
    if pending:
        yield pending


def _fits(pending: Block, block: Block, max_tokens: int, prefix: int) -> bool:
    # number of tokens of the micro-batch after the block is added: with padding, and without padding
    rows = len(pending) + len(block)
    padded = rows * max(_longest(pending), _longest(block))
    num_tokens = sum(map(len, pending)) + sum(map(len, block))
    same_mask = _has_branches(pending) == _has_branches(block)
    return same_mask and padded + rows * prefix <= max_tokens and padded - num_tokens < MAX_PADDING * padded


def _longest(sequences: Block) -> int:
    return max(map(len, sequences))


def _has_branches(sequences: Block) -> bool:
    return any(sequence.has_branches for sequence in sequences)
