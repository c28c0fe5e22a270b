"""Token sequences, cut into padded micro-batches: what the model is given at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from agent_r1.data.sequences import TokenSequence

PADDING = 0.1
"""The share of a micro-batch that may be padding."""


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Sequences padded on the right to one (B, T): what the model is given at once.

    ``positions`` (B, T) and ``mask`` (B, T, T) are None where plain causal attention is meant.
    ``predictors`` (n,) and ``ends`` (s,) index the B*T hidden states. ``tokens`` (n,) and ``turns`` (s,) index the
    batch's tokens and turns, and stay where the batch is; ``real`` counts the tokens that are not padding.
    """

    ids: Tensor
    positions: Tensor | None
    mask: Tensor | None
    predictors: Tensor
    tokens: Tensor
    ends: Tensor
    turns: Tensor
    real: int

    def to(self, device: torch.device) -> MicroBatch:
        """The same where the models are."""
        return replace(
            self,
            ids=self.ids.to(device),
            positions=None if self.positions is None else self.positions.to(device),
            mask=None if self.mask is None else self.mask.to(device),
            predictors=self.predictors.to(device),
            ends=self.ends.to(device),
        )


def by_sequence(sequences: Sequence[TokenSequence]) -> list[tuple[TokenSequence, ...]]:
    """Blocks of one sequence: each may go with any other."""
    return [(sequence,) for sequence in sequences]


def by_trajectory(sequences: Sequence[TokenSequence]) -> list[tuple[TokenSequence, ...]]:
    """Blocks of all sequences of a trajectory: where a loss is over the whole of it, they must go together."""
    blocks: dict[int, list[TokenSequence]] = {}
    for sequence in sequences:
        blocks.setdefault(sequence.trajectory, []).append(sequence)
    return [tuple(block) for block in blocks.values()]


def micro_batches(blocks: Sequence[Sequence[TokenSequence]], budget: int) -> Iterator[MicroBatch]:
    """All sequences, in micro-batches of at most ``budget`` tokens; a block is never divided.

    Blocks join a micro-batch while less than 10 % of it is padding. A block above the budget goes alone. Longest
    first, then in the order given; those that need a mask apart from those that do not.
    """
    ranked = sorted(blocks, key=lambda block: (_branched(block), -_longest(block)))
    together: list[TokenSequence] = []
    for block in ranked:
        if together and not _fits(together, block, budget):
            yield _collate(together)
            together = []
        together += block
    if together:
        yield _collate(together)


def _fits(together: Sequence[TokenSequence], block: Sequence[TokenSequence], budget: int) -> bool:
    padded = (len(together) + len(block)) * max(_longest(together), _longest(block))
    real = sum(map(len, together)) + sum(map(len, block))
    return _branched(together) == _branched(block) and padded <= budget and padded - real < PADDING * padded


def _longest(sequences: Sequence[TokenSequence]) -> int:
    return max(map(len, sequences))


def _branched(sequences: Sequence[TokenSequence]) -> bool:
    return any(sequence.branched for sequence in sequences)


def _collate(sequences: Sequence[TokenSequence]) -> MicroBatch:
    ids = pad_sequence([sequence.ids for sequence in sequences], batch_first=True)
    width = ids.shape[1]
    masked = _branched(sequences)
    return MicroBatch(
        ids=ids,
        positions=pad_sequence([sequence.depths for sequence in sequences], batch_first=True) if masked else None,
        mask=_tree_mask([sequence.exits for sequence in sequences], width) if masked else None,
        predictors=torch.cat([row * width + sequence.predictors for row, sequence in enumerate(sequences)]),
        tokens=torch.cat([sequence.tokens for sequence in sequences]),
        ends=torch.cat([row * width + sequence.ends for row, sequence in enumerate(sequences)]),
        turns=torch.cat([sequence.turns for sequence in sequences]),
        real=sum(map(len, sequences)),
    )


def _tree_mask(exits: Sequence[Tensor], width: int) -> Tensor:
    """(B, T, T), true where token i may see token j: j <= i < exit of j. Padding sees itself at least."""
    ends = pad_sequence(list(exits), batch_first=True, padding_value=width)[:, None, :]
    place = torch.arange(width)
    return (place[None, None, :] <= place[None, :, None]) & (place[None, :, None] < ends)
