"""A trajectory as token sequences for the model.

An episode that appends is one plain causal sequence. Where turns branch, the tree is laid out
depth first in one sequence, and a mask lets each token see its own path only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agent_r1.core.trajectory import Trajectory, Turn


@dataclass(frozen=True, slots=True, eq=False)
class TokenSequence:
    """T tokens that the model reads at once, of which n are followed by a token of the batch.

    ``depths`` (T,): the position of each token on its own path. ``exits`` (T,): token j is seen by the
    tokens j .. exits[j]-1, its descendants. ``predictors`` (n,): where in the sequence the hidden
    state stands that predicts a token of the batch; ``tokens`` (n,): that token's place in it.
    ``ends`` (s,): where the last token of an action stands; ``turns`` (s,): that turn's number in the batch.

    Example: prompt 5 6, action 7, then two branches of one action token each, 8 and 9 (observation 3 and 4):
        ids 5 6 7 3 8 4 9, depths 0 1 2 3 4 3 4, exits 7 7 7 5 5 7 7, predictors 1 3 5, tokens 0 1 2,
        ends 2 4 6, turns 0 1 2
    """

    trajectory: int
    ids: Tensor
    depths: Tensor
    exits: Tensor
    predictors: Tensor
    tokens: Tensor
    ends: Tensor
    turns: Tensor
    branched: bool

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class TurnPlace:
    """Where a turn stands in the batch: its number there, and the places of its first action token and, where what
    it observed is in the batch too, of the first token of its ``new_ids``."""

    turn: int
    action: int
    observation: int | None = None


Packing = Callable[[Trajectory, int, Sequence[TurnPlace]], list[TokenSequence]]
"""(trajectory, its number in the batch, the place of each of its turns) -> its sequences."""


def pack_prefix_tree(trajectory: Trajectory, number: int, places: Sequence[TurnPlace]) -> list[TokenSequence]:
    """One sequence per root of the turn tree that leads to an action: every shared prefix is computed once."""
    children: dict[int | None, list[int]] = {}
    for index, turn in enumerate(trajectory.turns):
        children.setdefault(turn.parent, []).append(index)
    trees = [_depth_first(root, children) for root in children.get(None, [])]
    laid = [_lay_out(trajectory.turns, tree, number, places) for tree in trees]
    return [sequence for sequence in laid if len(sequence.tokens)]


def pack_per_turn(trajectory: Trajectory, number: int, places: Sequence[TurnPlace]) -> list[TokenSequence]:
    """One causal sequence per turn that acts: all it saw, and its action. Prefixes are computed again and again."""
    return [
        _path(trajectory, turn, number, place)
        for turn, place in zip(trajectory.turns, places, strict=True)
        if turn.action_ids
    ]


def pack_causal(trajectory: Trajectory, number: int, places: Sequence[TurnPlace]) -> list[TokenSequence]:
    """:func:`pack_prefix_tree` where no turns branch, else :func:`pack_per_turn`: for models that obey no mask."""
    merged = pack_prefix_tree(trajectory, number, places)
    branched = any(sequence.branched for sequence in merged)
    return pack_per_turn(trajectory, number, places) if branched else merged


def within(layout: Packing, tokens: Callable[[], int]) -> Packing:
    """``layout``, but a trajectory of which a tree would be longer than ``tokens()`` is laid out path by path.

    Loss and gradient are the same; no sequence is then longer than what the policy saw and said at one time.
    """

    def split(trajectory: Trajectory, number: int, places: Sequence[TurnPlace]) -> list[TokenSequence]:
        merged = layout(trajectory, number, places)
        too_long = any(sequence.branched and len(sequence) > tokens() for sequence in merged)
        return pack_per_turn(trajectory, number, places) if too_long else merged

    return split


def _depth_first(root: int, children: dict[int | None, list[int]]) -> list[int]:
    """The turns below ``root``, each after its parent and its earlier siblings' descendants."""
    order, stack = [], [root]
    while stack:
        index = stack.pop()
        order.append(index)
        stack += reversed(children.get(index, []))
    return order


def _lay_out(turns: Sequence[Turn], order: Sequence[int], number: int, places: Sequence[TurnPlace]) -> TokenSequence:
    ids: list[int] = []
    depths: list[int] = []
    wanted: list[tuple[int, int]] = []  # (predictor, batch place of the token it predicts)
    ends: list[tuple[int, int]] = []  # (where an action ends, number of the turn in the batch)
    last: dict[int, int] = {}  # turn -> where in the sequence its path's newest token stands
    for index in order:
        turn, place = turns[index], places[index]
        before = -1 if turn.parent is None else last[turn.parent]
        depth = depths[before] + 1 if before >= 0 else 0
        state = len(ids) + len(turn.new_ids)  # where the action begins
        if place.observation is not None:
            wanted += _predicted(before, len(ids), len(turn.new_ids), place.observation)
        ids += turn.new_ids + turn.action_ids
        depths += range(depth, depth + len(turn.new_ids) + len(turn.action_ids))
        if turn.action_ids:
            wanted += _predicted(state - 1 if turn.new_ids else before, state, len(turn.action_ids), place.action)
            ends.append((len(ids) - 1, place.turn))
        last[index] = len(ids) - 1 if turn.new_ids or turn.action_ids else before
    exits = _exits(turns, order)
    return TokenSequence(
        trajectory=number,
        ids=torch.tensor(ids),
        depths=torch.tensor(depths),
        exits=torch.tensor(exits),
        predictors=_column(wanted, 0),
        tokens=_column(wanted, 1),
        ends=_column(ends, 0),
        turns=_column(ends, 1),
        branched=any(end != len(ids) for end in exits),
    )


def _predicted(before: int, start: int, count: int, place: int) -> list[tuple[int, int]]:
    """(predictor, place in the batch) of ``count`` tokens that stand at ``start`` and follow the one at ``before``."""
    predictors = (before, *range(start, start + count - 1))
    return list(zip(predictors, range(place, place + count), strict=True)) if count else []


def _column(pairs: Sequence[tuple[int, int]], column: int) -> Tensor:
    return torch.tensor([pair[column] for pair in pairs], dtype=torch.int64)


def _exits(turns: Sequence[Turn], order: Sequence[int]) -> list[int]:
    """For each token in the layout, the place after the last descendant of its turn."""
    lengths = [len(turns[index].new_ids) + len(turns[index].action_ids) for index in order]
    ends: dict[int, int] = {}
    stop = sum(lengths)
    for index, length in zip(reversed(order), reversed(lengths), strict=True):
        # depth first: the first visit to a parent, seen from the back, comes from its last descendant
        ends.setdefault(index, stop)
        parent = turns[index].parent
        if parent is not None:
            ends.setdefault(parent, ends[index])
        stop -= length
    return [ends[index] for index, length in zip(order, lengths, strict=True) for _ in range(length)]


def _path(trajectory: Trajectory, turn: Turn, number: int, place: TurnPlace) -> TokenSequence:
    prompt, action = trajectory.prompt_ids(turn), turn.action_ids
    length = len(prompt) + len(action)
    wanted = _predicted(len(prompt) - 1, len(prompt), len(action), place.action)
    if place.observation is not None:
        start = len(prompt) - len(turn.new_ids)
        wanted = _predicted(start - 1, start, len(turn.new_ids), place.observation) + wanted
    return TokenSequence(
        trajectory=number,
        ids=torch.tensor([*prompt, *action]),
        depths=torch.arange(length),
        exits=torch.full((length,), length),
        predictors=_column(wanted, 0),
        tokens=_column(wanted, 1),
        ends=torch.tensor([length - 1]),
        turns=torch.tensor([place.turn]),
        branched=False,
    )
