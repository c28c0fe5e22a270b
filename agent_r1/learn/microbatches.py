"""Token sequences, cut into padded micro-batches: what the model is given at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from agent_r1.learn.sequences import TokenSequence

PADDING = 0.1
"""The share of a micro-batch that may be padding."""


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Sequences padded on the right to one (B, T): what the model is given at once.

    ``positions`` (B, T) and ``mask`` (B, T, T) are None where plain causal attention is meant.
    ``predictors`` (n,) index the B*T hidden states, ``tokens`` (n,) the batch's action tokens, and
    stays where the batch is; ``real`` counts the tokens that are not padding.
    """

    ids: Tensor
    positions: Tensor | None
    mask: Tensor | None
    predictors: Tensor
    tokens: Tensor
    real: int

    def to(self, device: torch.device) -> MicroBatch:
        """The same where the models are."""
        return replace(
            self,
            ids=self.ids.to(device),
            positions=None if self.positions is None else self.positions.to(device),
            mask=None if self.mask is None else self.mask.to(device),
            predictors=self.predictors.to(device),
        )


def micro_batches(sequences: Sequence[TokenSequence], budget: int) -> Iterator[MicroBatch]:
    """All sequences, in micro-batches of at most ``budget`` tokens, each with less than 10 % padding.

    A sequence above the budget goes alone. Longest first, then in the order given; sequences that
    need a mask apart from those that do not.
    """
    ranked = sorted(sequences, key=lambda sequence: (sequence.branched, -len(sequence)))
    start = real = 0
    for place, sequence in enumerate(ranked):
        if place > start and not _fits(ranked[start], sequence, place + 1 - start, real + len(sequence), budget):
            yield _collate(ranked[start:place])
            start, real = place, 0
        real += len(sequence)
    if ranked:
        yield _collate(ranked[start:])


def _fits(longest: TokenSequence, added: TokenSequence, count: int, real: int, budget: int) -> bool:
    padded = count * len(longest)
    return added.branched == longest.branched and padded <= budget and padded - real < PADDING * padded


def _collate(sequences: Sequence[TokenSequence]) -> MicroBatch:
    ids = pad_sequence([sequence.ids for sequence in sequences], batch_first=True)
    width = ids.shape[1]
    masked = sequences[0].branched
    return MicroBatch(
        ids=ids,
        positions=pad_sequence([sequence.depths for sequence in sequences], batch_first=True) if masked else None,
        mask=_tree_mask([sequence.exits for sequence in sequences], width) if masked else None,
        predictors=torch.cat([row * width + sequence.predictors for row, sequence in enumerate(sequences)]),
        tokens=torch.cat([sequence.tokens for sequence in sequences]),
        real=sum(map(len, sequences)),
    )


def _tree_mask(exits: Sequence[Tensor], width: int) -> Tensor:
    """(B, T, T), true where token i may see token j: j <= i < exit of j. Padding sees itself at least."""
    ends = pad_sequence(list(exits), batch_first=True, padding_value=width)[:, None, :]
    place = torch.arange(width)
    return (place[None, None, :] <= place[None, :, None]) & (place[None, :, None] < ends)
