"""The batch of one update: its action tokens, flat, and who they belong to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor

from agent_r1.core.attempt import Attempt
from agent_r1.core.trajectory import Turn
from agent_r1.learn.samples import Sample
from agent_r1.learn.sequences import Layout, TokenSequence


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """N action tokens of S turns of M trajectories, ordered by trajectory, turn index, position. On the CPU.

    There are no other tokens in it, so credit and loss cannot touch any: the advantage mask and the
    loss mask of paper 2511.14460 hold by construction. Turns without action tokens are left out.
    What does reach the model beside action tokens stands in ``sequences``.

    Example: two trajectories, the first of two turns (2 tokens, 1 token), the second of one (1 token):
        token_turn 0 0 1 2, turn_trajectory 0 0 1, trajectory_group 0 0
    """

    ids: Tensor
    """(N,) int64."""
    sampler_logprobs: Tensor
    """(N,) float64: what the sampler recorded, at its temperature."""
    versions: Tensor
    """(N,) int64: the version of the weights each token was sampled from."""
    token_turn: Tensor
    """(N,) int64."""
    turn_trajectory: Tensor
    """(S,) int64."""
    trajectory_group: Tensor
    """(M,) int64."""
    turn_rewards: Tensor
    """(S,) float64: process rewards, weighted."""
    outcomes: Tensor
    """(M,) float64: rewards for the whole trajectory, weighted."""
    truncated: Tensor
    """(M,) bool: the episode did not end by itself."""
    attempts: tuple[Attempt, ...]
    sequences: tuple[TokenSequence, ...]

    @property
    def token_trajectory(self) -> Tensor:
        """(N,) the trajectory of each token."""
        return self.turn_trajectory[self.token_turn]

    @property
    def returns(self) -> Tensor:
        """(M,) everything each trajectory earned."""
        return self.outcomes.index_add(0, self.turn_trajectory, self.turn_rewards)

    @property
    def last_tokens(self) -> Tensor:
        """(M,) the place of each trajectory's last action token."""
        return _last(self.token_trajectory, len(self.outcomes))

    @property
    def token_rewards(self) -> Tensor:
        """(N,) each turn's reward on its last action token, the outcome on the trajectory's last action token.

        On action tokens only: where turns ran out, the episode's last token is an observation's,
        and a reward put there would be lost.
        """
        rewards = torch.zeros(len(self.ids), dtype=torch.float64)
        rewards[_last(self.token_turn, len(self.turn_rewards))] = self.turn_rewards
        return rewards.index_add(0, self.last_tokens, self.outcomes)


def _last(unit: Tensor, units: int) -> Tensor:
    """The place of each unit's last element; elements are ordered by unit and no unit is empty."""
    return torch.bincount(unit, minlength=units).cumsum(0) - 1


def assemble(samples: Sequence[Sample], layout: Layout) -> Batch:
    """The batch of these samples (at least one), with their sequences laid out by ``layout``."""
    turns = [[turn for turn in sample.trajectory.turns if turn.action_ids] for sample in samples]
    acting = list(chain.from_iterable(turns))
    lengths = torch.tensor([len(turn.action_ids) for turn in acting])
    return Batch(
        ids=torch.tensor([token for turn in acting for token in turn.action_ids]),
        sampler_logprobs=torch.tensor([value for turn in acting for value in turn.logprobs], dtype=torch.float64),
        versions=torch.tensor([version for turn in acting for version in _versions(turn)]),
        token_turn=torch.repeat_interleave(torch.arange(len(acting)), lengths),
        turn_trajectory=torch.repeat_interleave(torch.arange(len(samples)), torch.tensor([*map(len, turns)])),
        trajectory_group=torch.tensor([sample.group for sample in samples]),
        turn_rewards=torch.tensor([*chain(*map(_acting_rewards, samples))], dtype=torch.float64),
        outcomes=torch.tensor([sample.outcome for sample in samples], dtype=torch.float64),
        truncated=torch.tensor([sample.trajectory.truncated for sample in samples]),
        attempts=tuple(sample.trajectory.attempt for sample in samples),
        sequences=_sequences(samples, layout),
    )


def _versions(turn: Turn) -> list[int]:
    """The version of the weights behind each action token."""
    ends = [*(span.start for span in turn.spans[1:]), len(turn.action_ids)]
    return [span.version for span, end in zip(turn.spans, ends, strict=True) for _ in range(span.start, end)]


def _acting_rewards(sample: Sample) -> list[float]:
    """One reward per turn with action tokens; that of a turn without goes to the last before it that has some."""
    rewards: list[float] = []
    waiting = 0.0
    for turn, reward in zip(sample.trajectory.turns, sample.turn_rewards, strict=True):
        if turn.action_ids:
            rewards.append(reward + waiting)
            waiting = 0.0
        elif rewards:
            rewards[-1] += reward
        else:
            waiting += reward
    return rewards


def _sequences(samples: Sequence[Sample], layout: Layout) -> tuple[TokenSequence, ...]:
    found: list[TokenSequence] = []
    place = 0
    for number, sample in enumerate(samples):
        starts = list(accumulate((len(turn.action_ids) for turn in sample.trajectory.turns), initial=place))
        place = starts.pop()
        found += layout(sample.trajectory, number, starts)
    return tuple(found)
