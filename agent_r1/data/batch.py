"""The batch of one update: its tokens, flat, and who they belong to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from agent_r1.core.attempt_id import AttemptId
from agent_r1.data.segments import previous_within, segment_first, segment_last, segment_sum
from agent_r1.data.sequences import TokenSequence


@dataclass(frozen=True, slots=True, eq=False)
class NamedReturns:
    """What each trajectory earned under one reward's name, (M,) float64, times that reward's ``weight``."""

    name: str
    weight: float
    returns: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class TrainingBatch:
    """N tokens of S turns of M trajectories, ordered by trajectory, turn index, position. On the CPU.

    They are the action tokens: there are no others, so credit and loss cannot touch any, and the advantage mask and
    the loss mask of paper 2511.14460 hold by construction. Only an algorithm that looks at observations asks for those
    too (:func:`agent_r1.data.assemble.assemble`); ``chosen`` then tells them apart. Turns without action tokens are
    left out. What else reaches the model stands in ``sequences``.

    Example: two trajectories, the first of two turns (2 tokens, 1 token), the second of one (1 token):
        token_turn 0 0 1 2, turn_trajectory 0 0 1, trajectory_group 0 0
    """

    ids: Tensor
    """(N,) int64."""
    sampler_logprobs: Tensor
    """(N,) float64: what the sampler recorded, at its temperature; NaN where no policy chose the token."""
    versions: Tensor
    """(N,) int64: the version of the weights each token was sampled from; of an observation, the action's before it."""
    chosen: Tensor
    """(N,) bool: the policy chose the token."""
    token_rewards: Tensor
    """(N,) float64, weighted: a call's reward on the token with which the call ends, a turn's on its last action
    token, the outcome on the trajectory's last action token.

    On action tokens only: where turns ran out, the episode's last token is an observation's, and a reward put there
    would be lost.
    """
    token_turn: Tensor
    """(N,) int64; an observation belongs to the turn whose action led to it."""
    turn_trajectory: Tensor
    """(S,) int64."""
    turn_states: Tensor
    """(S,) int64: turns of a group in which the world had just said the same, word for word, have the same number."""
    turn_results: Tensor
    """(S,) bool: the turn's action got results of tools."""
    trajectory_group: Tensor
    """(M,) int64."""
    outcomes: Tensor
    """(M,) float64: rewards for the whole trajectory, weighted; ``token_rewards`` holds them too."""
    greedy: Tensor
    """(M,) float64: what the group's greedy attempt earned, NaN where there was none."""
    truncated: Tensor
    """(M,) bool: the episode did not end by itself."""
    muted: tuple[str | None, ...]
    """For each trajectory why it is compared with and not learned from; None: it is learned from."""
    named: tuple[NamedReturns, ...]
    attempts: tuple[AttemptId, ...]
    sequences: tuple[TokenSequence, ...]

    @property
    def token_trajectory(self) -> Tensor:
        """(N,) the trajectory of each token."""
        return self.turn_trajectory[self.token_turn]

    @property
    def token_group(self) -> Tensor:
        """(N,) the group of each token."""
        return self.trajectory_group[self.token_trajectory]

    @property
    def turn_group(self) -> Tensor:
        """(S,) the group of each turn."""
        return self.trajectory_group[self.turn_trajectory]

    @property
    def token_before(self) -> Tensor:
        """(N,) the token before each in its trajectory, -1 for the first: time, whatever context each was chosen in."""
        return previous_within(self.token_trajectory)

    @property
    def turn_before(self) -> Tensor:
        """(S,) the turn before each in its trajectory, -1 for the first."""
        return previous_within(self.turn_trajectory)

    @property
    def turn_rewards(self) -> Tensor:
        """(S,) everything earned in each turn, the outcome in the last."""
        return segment_sum(self.token_rewards, self.token_turn)

    @property
    def process_rewards(self) -> Tensor:
        """(S,) what each turn earned besides the outcome."""
        outcome = torch.zeros_like(self.turn_rewards).index_put((self.last_turns,), self.outcomes)
        return self.turn_rewards - outcome

    @property
    def returns(self) -> Tensor:
        """(M,) everything each trajectory earned."""
        return segment_sum(self.token_rewards, self.token_trajectory)

    @property
    def first_tokens(self) -> Tensor:
        """(S,) the place of each turn's first action token."""
        return segment_first(self.token_turn)

    @property
    def last_tokens(self) -> Tensor:
        """(M,) the place of each trajectory's last action token."""
        places = torch.where(self.chosen, torch.arange(len(self.ids)), -1)
        highest = torch.full((len(self.outcomes),), -1)
        return highest.scatter_reduce(0, self.token_trajectory, places, "amax")

    @property
    def last_turns(self) -> Tensor:
        """(M,) the number of each trajectory's last turn."""
        return segment_last(self.turn_trajectory)

    @property
    def token_muted(self) -> Tensor:
        """(N,) bool: nothing is learned from the token's trajectory."""
        return torch.tensor([reason is not None for reason in self.muted])[self.token_trajectory]

    def actions(self) -> TrainingBatch:
        """The same, with action tokens only."""
        if bool(self.chosen.all()):
            return self
        places = self.chosen.nonzero().squeeze(1)
        return replace(
            self,
            ids=self.ids[places],
            sampler_logprobs=self.sampler_logprobs[places],
            versions=self.versions[places],
            chosen=self.chosen[places],
            token_rewards=self.token_rewards[places],
            token_turn=self.token_turn[places],
            sequences=(),
        )


RewardWeights = Mapping[str, float]
"""Weights by the name of a reward; one that is not named weighs 1."""
