"""Micro-batches: token sequences, padded to one rectangle, that the model processes at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from agent_r1.data.sequences import TokenSequence

MAX_PADDING = 0.1
"""The largest share of a micro-batch that may be padding."""

Block = Sequence[TokenSequence]
"""Sequences that must be in the same micro-batch."""


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """B sequences padded on the right to length T, with n tokens of the batch and s ends of actions among them."""

    ids: Tensor
    """(B, T) token ids."""
    position_ids: Tensor | None
    """(B, T) positions; None for plain causal attention."""
    attention_mask: Tensor | None
    """(B, T, T) bool, true if the first token may see the second; None for plain causal attention."""
    logit_positions: Tensor
    """(n,) indices into the B*T hidden states whose logits predict the tokens of the batch."""
    token_positions: Tensor
    """(n,) indices of these tokens into the B*T tokens."""
    tokens: Tensor
    """(n,) positions of these tokens in the batch. On the batch's device."""
    post_action_states: Tensor
    """(s,) indices into the B*T hidden states of the states after actions."""
    turns: Tensor
    """(s,) numbers of the turns of these actions in the batch. On the batch's device."""
    num_tokens: int
    """Number of tokens without padding."""

    def to(self, device: torch.device) -> MicroBatch:
        """Return the micro-batch with the model's inputs on ``device``."""
        # tokens and turns index columns of the batch, which stays on the CPU
        return replace(
            self,
            ids=self.ids.to(device),
            position_ids=None if self.position_ids is None else self.position_ids.to(device),
            attention_mask=None if self.attention_mask is None else self.attention_mask.to(device),
            logit_positions=self.logit_positions.to(device),
            token_positions=self.token_positions.to(device),
            post_action_states=self.post_action_states.to(device),
        )


def by_sequence(sequences: Sequence[TokenSequence]) -> list[tuple[TokenSequence, ...]]:
    """Return blocks of one sequence each."""
    return [(sequence,) for sequence in sequences]


def by_trajectory(sequences: Sequence[TokenSequence]) -> list[tuple[TokenSequence, ...]]:
    """Return blocks of all sequences of a trajectory, for a loss that needs the whole trajectory at once."""
    blocks: dict[int, list[TokenSequence]] = {}
    for sequence in sequences:
        blocks.setdefault(sequence.trajectory, []).append(sequence)
    return [tuple(block) for block in blocks.values()]


def make_micro_batches(blocks: Sequence[Block], max_tokens: int) -> Iterator[MicroBatch]:
    """Yield all sequences in micro-batches of at most ``max_tokens`` tokens, padding included.

    A block is never divided; one above the limit is a micro-batch of its own. Blocks are added while less than
    ``MAX_PADDING`` of the micro-batch is padding. Longest blocks come first, equal ones in the given order; sequences
    that need a tree attention mask are kept apart from those that do not.
    """
    # sorting is stable, so the order of equal lengths is reproducible
    ranked = sorted(blocks, key=lambda block: (_has_branches(block), -_longest(block)))
    pending: list[TokenSequence] = []
    for block in ranked:
        if pending and not _fits(pending, block, max_tokens):
            yield _collate(pending)
            pending = []
        pending += block
    if pending:
        yield _collate(pending)


def _fits(pending: Block, block: Block, max_tokens: int) -> bool:
    # size of the rectangle with the block, and the tokens in it that are not padding
    padded = (len(pending) + len(block)) * max(_longest(pending), _longest(block))
    num_tokens = sum(map(len, pending)) + sum(map(len, block))
    same_mask = _has_branches(pending) == _has_branches(block)
    return same_mask and padded <= max_tokens and padded - num_tokens < MAX_PADDING * padded


def _longest(sequences: Block) -> int:
    return max(map(len, sequences))


def _has_branches(sequences: Block) -> bool:
    return any(sequence.has_branches for sequence in sequences)


def _collate(sequences: Block) -> MicroBatch:
    ids = pad_sequence([sequence.ids for sequence in sequences], batch_first=True)  # (B, T)
    width = ids.shape[1]  # T
    position_ids = attention_mask = None
    if _has_branches(sequences):
        position_ids = pad_sequence([sequence.position_ids for sequence in sequences], batch_first=True)  # (B, T)
        attention_mask = _tree_mask([sequence.subtree_end for sequence in sequences], width)  # (B, T, T)
    # positions in a sequence become indices into the flattened (B * T,) hidden states
    logit_positions = [row * width + sequence.logit_positions for row, sequence in enumerate(sequences)]
    token_positions = [row * width + sequence.token_positions for row, sequence in enumerate(sequences)]
    post_action_states = [row * width + sequence.post_action_states for row, sequence in enumerate(sequences)]
    return MicroBatch(
        ids=ids,
        position_ids=position_ids,
        attention_mask=attention_mask,
        logit_positions=torch.cat(logit_positions),
        token_positions=torch.cat(token_positions),
        tokens=torch.cat([sequence.tokens for sequence in sequences]),
        post_action_states=torch.cat(post_action_states),
        turns=torch.cat([sequence.turns for sequence in sequences]),
        num_tokens=sum(map(len, sequences)),
    )


def _tree_mask(subtree_ends: Sequence[Tensor], width: int) -> Tensor:
    """Return the tree attention mask: (B, T, T), true if token i may see token j, j <= i < subtree_end of j.

    Padding sees at least itself, so that no row of the attention is empty.
    """
    ends = pad_sequence(list(subtree_ends), batch_first=True, padding_value=width)[:, None, :]  # (B, 1, T)
    position = torch.arange(width)  # (T,)
    return (position[None, None, :] <= position[None, :, None]) & (position[None, :, None] < ends)
