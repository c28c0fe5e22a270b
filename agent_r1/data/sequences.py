"""Packing: the conversion of a trajectory to token sequences for the model.

If every turn continues the turn before, the trajectory becomes one causal sequence. If several turns continue one turn,
the turns form a tree. The tree becomes one sequence in depth-first order, which holds common tokens only once. An
attention mask then lets each token attend only to the tokens on its path in the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from agent_r1.core.inference import PromptMedia
from agent_r1.core.trajectory import Trajectory, Turn


@dataclass(frozen=True, slots=True, eq=False)
class TokenSequence:
    """T tokens that the model reads as one sequence.

    n of the T tokens are called predicted tokens: the model's logits are used only for these tokens. Predicted tokens
    are action tokens, and with some algorithms also observation tokens. s is the number of actions that consist of
    predicted tokens.

    Example: prompt 5 6, action 7, then two branches: observation 3 with action 8, and observation 4 with action 9:
        ids                 5 6 7 3 8 4 9   (T)
        position_ids        0 1 2 3 4 3 4   (T) number of earlier tokens to which the token attends
        subtree_end         7 7 7 5 5 7 7   (T) index after the last token that attends to the token
        token_positions     2 4 6           (n) indices of the predicted tokens 7 8 9 in the sequence
        logit_positions     1 3 5           (n) indices in the sequence at which the logits predict 7 8 9
        tokens              0 1 2           (n) indices of 7 8 9 in the training batch
        post_action_states  2 4 6           (s) index of each action's last token in the sequence
        turns               0 1 2           (s) index of each action's turn among all turns of the training batch
    """

    trajectory: int
    """Index of the trajectory in the training batch."""
    ids: Tensor
    """(T,) token ids."""
    position_ids: Tensor
    """(T,) position of each token: the number of earlier tokens to which the token attends."""
    subtree_end: Tensor
    """(T,) index e for each token j: exactly the tokens j .. e - 1 attend to token j."""
    logit_positions: Tensor
    """(n,) indices in the sequence. The logits at the k-th index predict the k-th predicted token."""
    token_positions: Tensor
    """(n,) index of each predicted token in the sequence."""
    tokens: Tensor
    """(n,) index of each predicted token among the tokens of the training batch."""
    post_action_states: Tensor
    """(s,) index of each action's last token in the sequence. s is the number of actions."""
    turns: Tensor
    """(s,) index of each action's turn among all turns of the training batch. s is the number of actions."""
    has_branches: bool
    """Whether the sequence is a tree with branches, which needs a tree attention mask."""
    media: tuple[PromptMedia, ...] = ()
    """The images in the sequence, at their placeholder tokens."""

    def __len__(self) -> int:
        return len(self.ids)

    def without_first(self, count: int) -> TokenSequence:
        """Return the sequence without its first ``count`` tokens, a prefix that the model reads in a separate pass.

        In the result, every token attends to the whole prefix. So call this method only if every remaining token of the
        original sequence also attends to the whole prefix.
        """
        return replace(
            self,
            ids=self.ids[count:],
            position_ids=self.position_ids[count:],
            subtree_end=self.subtree_end[count:] - count,
            logit_positions=self.logit_positions - count,
            token_positions=self.token_positions - count,
            post_action_states=self.post_action_states - count,
            media=tuple(one.moved(-count) for one in self.media),
        )


Block = Sequence[TokenSequence]
"""Token sequences that must be in the same micro-batch."""


@dataclass(frozen=True, slots=True)
class TurnPlace:
    """Where the tokens of one turn are in the training batch.

    Attributes:
        turn: the index of the turn.
        action: the index of the turn's first action token.
        observation: the index of the first token of the observation before the turn; None if the observation is not in
            the batch.
    """

    turn: int
    action: int
    observation: int | None = None


Prediction = tuple[int, int, int]
"""Three indices (i, j, k) for a predicted token. The logits at index i of the sequence predict the token. The token
itself has the index j in the sequence, and the index k in the training batch."""

Packing = Callable[[Trajectory, int, Sequence[TurnPlace]], list[TokenSequence]]
"""A function that returns the token sequences of a trajectory. It takes the trajectory, the index of the trajectory in
the batch, and the place of each turn in the batch."""


def pack_prefix_tree(trajectory: Trajectory, number: int, places: Sequence[TurnPlace]) -> list[TokenSequence]:
    """Return one token sequence for each tree of turns in the trajectory.

    A tree consists of a first turn and all turns that continue it, directly or through other turns. The common tokens
    of the turns are in the sequence only once. A tree without action tokens is left out.

    ``number`` is the index of the trajectory in the batch.
    """
    children: dict[int | None, list[int]] = {}
    for index, turn in enumerate(trajectory.turns):
        children.setdefault(turn.parent, []).append(index)
    sequences: list[TokenSequence] = []
    for root in children.get(None, []):
        order, stack = list[int](), [root]  # order: the turns of the tree in depth-first order
        while stack:
            order.append(stack.pop())
            stack += reversed(children.get(order[-1], []))  # reversed, so that the first child is on top of the stack
        sequences.append(_pack_tree(trajectory.turns, order, number, places))
    return [sequence for sequence in sequences if len(sequence.tokens)]


def pack_per_turn(trajectory: Trajectory, number: int, places: Sequence[TurnPlace]) -> list[TokenSequence]:
    """Return one causal token sequence per turn with action tokens: the whole prompt of the turn, then the action.

    ``number`` is the index of the trajectory in the batch.
    """
    return [
        _pack_turn(trajectory, turn, number, place)
        for turn, place in zip(trajectory.turns, places, strict=True)
        if turn.action_ids
    ]


def pack_causal(trajectory: Trajectory, number: int, places: Sequence[TurnPlace]) -> list[TokenSequence]:
    """Return causal token sequences, for models that ignore a custom attention mask.

    A trajectory has branches if several turns continue the same turn. Without branches, each chain of turns becomes one
    sequence. With branches, each turn with action tokens becomes a separate sequence (:func:`pack_per_turn`).

    ``number`` is the index of the trajectory in the batch.
    """
    sequences = pack_prefix_tree(trajectory, number, places)
    has_branches = any(sequence.has_branches for sequence in sequences)
    return pack_per_turn(trajectory, number, places) if has_branches else sequences


def with_length_limit(packing: Packing, max_tokens: Callable[[], int]) -> Packing:
    """Return a packing function like ``packing``, but with a maximum length for sequences with branches.

    If a sequence with branches has more than ``max_tokens()`` tokens, the trajectory is packed by :func:`pack_per_turn`
    instead. This does not change the loss or the gradient.
    """

    def pack(trajectory: Trajectory, number: int, places: Sequence[TurnPlace]) -> list[TokenSequence]:
        sequences = packing(trajectory, number, places)
        too_long = any(sequence.has_branches and len(sequence) > max_tokens() for sequence in sequences)
        return pack_per_turn(trajectory, number, places) if too_long else sequences

    return pack


def _pack_tree(turns: Sequence[Turn], order: Sequence[int], number: int, places: Sequence[TurnPlace]) -> TokenSequence:
    """Return the token sequence of a tree of turns. ``order`` holds the indices of the turns in depth-first order."""
    ids: list[int] = []
    position_ids: list[int] = []
    media: list[PromptMedia] = []
    predicted: list[Prediction] = []
    action_ends: list[tuple[int, int]] = []  # (position of an action's last token, number of its turn in the batch)
    path_end: dict[int, int] = {}  # turn -> position in the sequence of the last token on its path
    lengths = [len(turns[index].new_ids) + len(turns[index].action_ids) for index in order]
    for index in order:
        turn, place = turns[index], places[index]
        before = -1 if turn.parent is None else path_end[turn.parent]
        depth = position_ids[before] + 1 if before >= 0 else 0  # turns with the same parent begin at the same position
        action_start = len(ids) + len(turn.new_ids)
        if place.observation is not None:
            predicted += _predictions(before, len(ids), len(turn.new_ids), place.observation)
        media += (one.moved(len(ids)) for one in turn.media)
        ids += turn.new_ids + turn.action_ids
        position_ids += range(depth, depth + len(turn.new_ids) + len(turn.action_ids))
        if turn.action_ids:
            # the last token of the prompt predicts the first action token; if the turn has no new tokens, this last
            # token is in the parent turn
            previous = action_start - 1 if turn.new_ids else before
            predicted += _predictions(previous, action_start, len(turn.action_ids), place.action)
            action_ends.append((len(ids) - 1, place.turn))
        path_end[index] = len(ids) - 1 if turn.new_ids or turn.action_ids else before
    # Each token gets the end of the subtree of its turn: the position after the last token of the turn's descendants.
    turn_end: dict[int, int] = {}
    stop = len(ids)
    for index, length in zip(reversed(order), reversed(lengths), strict=True):
        # In this direction, the last descendant of a turn comes before all other descendants of the turn.
        turn_end.setdefault(index, stop)
        parent = turns[index].parent
        if parent is not None:
            turn_end.setdefault(parent, turn_end[index])
        stop -= length
    subtree_end = [turn_end[index] for index, length in zip(order, lengths, strict=True) for _ in range(length)]
    rows = torch.tensor(predicted, dtype=torch.int64).reshape(len(predicted), 3)  # (n, 3)
    ends = torch.tensor(action_ends, dtype=torch.int64).reshape(len(action_ends), 2)  # (s, 2)
    return TokenSequence(
        trajectory=number,
        ids=torch.tensor(ids),
        position_ids=torch.tensor(position_ids),
        subtree_end=torch.tensor(subtree_end),
        logit_positions=rows[:, 0],
        token_positions=rows[:, 1],
        tokens=rows[:, 2],
        post_action_states=ends[:, 0],
        turns=ends[:, 1],
        has_branches=any(end != len(ids) for end in subtree_end),
        media=tuple(media),
    )


def _pack_turn(trajectory: Trajectory, turn: Turn, number: int, place: TurnPlace) -> TokenSequence:
    prompt, action = trajectory.prompt_ids(turn), turn.action_ids
    length = len(prompt) + len(action)
    predicted = _predictions(len(prompt) - 1, len(prompt), len(action), place.action)
    if place.observation is not None:
        start = len(prompt) - len(turn.new_ids)
        predicted = _predictions(start - 1, start, len(turn.new_ids), place.observation) + predicted
    rows = torch.tensor(predicted, dtype=torch.int64).reshape(len(predicted), 3)  # (n, 3)
    return TokenSequence(
        trajectory=number,
        ids=torch.tensor([*prompt, *action]),
        position_ids=torch.arange(length),
        subtree_end=torch.full((length,), length),  # plain causal attention
        logit_positions=rows[:, 0],
        token_positions=rows[:, 1],
        tokens=rows[:, 2],
        post_action_states=torch.tensor([length - 1]),  # the last token of the action
        turns=torch.tensor([place.turn]),
        has_branches=False,
        media=trajectory.prompt_media(turn),
    )


def _predictions(before: int, start: int, count: int, batch_position: int) -> list[Prediction]:
    """Return a ``Prediction`` for each of ``count`` consecutive tokens of a sequence.

    The first of these tokens has the index ``start`` in the sequence and the index ``batch_position`` in the batch.
    ``before`` is the index of the logits that predict the first token.

    Example:
        _predictions(1, 2, 3, 0) is [(1, 2, 0), (2, 3, 1), (3, 4, 2)]
    """
    # the logits at position t - 1 predict token t
    logit_positions = (before, *range(start, start + count - 1))
    places = zip(
        logit_positions, range(start, start + count), range(batch_position, batch_position + count), strict=True
    )
    return list(places) if count else []
