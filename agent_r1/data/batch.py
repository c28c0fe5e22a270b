"""The training batch: the tokens of one update as flat tensors, with the turn, trajectory and group of each token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from agent_r1.core.attempt_id import AttemptId
from agent_r1.data.segments import previous_within, segment_first, segment_last, segment_max, segment_sum
from agent_r1.data.sequences import TokenSequence

RewardWeights = Mapping[str, float]
"""Weights by the name of a reward. A reward without a weight has weight 1."""


@dataclass(frozen=True, slots=True, eq=False)
class NamedReward:
    """All rewards of a batch with one name: the name, their weight, and their weighted sum for each trajectory."""

    name: str
    weight: float
    returns: Tensor
    """(M,) float64: the sum of the rewards of this name in each trajectory, multiplied by ``weight``."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainingBatch:
    """N tokens of S turns of M trajectories, ordered by trajectory, turn index and position.

    All tensors are on the CPU.

    Usually the batch holds action tokens only, and ``action_mask`` is true for all of them. If an algorithm trains on
    observations, the batch also holds observation tokens, for which ``action_mask`` is false. Turns without action
    tokens are not in the batch. ``sequences`` holds all tokens that the model reads, including prompts.

    Example: the first trajectory has two turns (2 tokens and 1 token), the second trajectory has one turn (1 token):
        token_turn 0 0 1 2, turn_trajectory 0 0 1, trajectory_group 0 0
    """

    ids: Tensor
    """(N,) int64 token ids."""
    sampler_logprobs: Tensor
    """(N,) float64: log-probabilities recorded by the sampler, at its temperature; NaN for observations."""
    versions: Tensor
    """(N,) int64: version of the weights that sampled each token. An observation token has the version of the last
    action token before it."""
    action_mask: Tensor
    """(N,) bool: whether the policy sampled the token."""
    token_rewards: Tensor
    """(N,) float64: the weighted rewards of each token.

    The reward of a call is on the token that ends the call. The reward of a turn is on the last action token of the
    turn. The outcome reward is on the last action token of the trajectory. Observation tokens have no rewards.
    """
    token_turn: Tensor
    """(N,) int64 turn of each token. An observation belongs to the turn of the action before the observation."""
    turn_trajectory: Tensor
    """(S,) int64 trajectory of each turn."""
    turn_state_ids: Tensor
    """(S,) int64 state of each turn. Two turns of a group have the same state if the last messages of the environment
    before these turns are equal, word for word."""
    turn_used_tool: Tensor
    """(S,) bool: whether the turn has tool results."""
    turn_is_summary: Tensor
    """(S,) bool: whether the turn is a summary of the context, and not an action in the environment."""
    trajectory_group: Tensor
    """(M,) int64 group of each trajectory."""
    outcome_rewards: Tensor
    """(M,) float64: weighted outcome reward of each trajectory. ``token_rewards`` includes the outcome rewards."""
    greedy_return: Tensor
    """(M,) float64: return of the greedy attempt of the group; NaN if the group has no greedy attempt with a return."""
    role_baseline: Tensor
    """(M,) float64: running mean of the earlier returns of the trajectory's role; 0 if the advantage estimator is not
    ``AgainstRole``."""
    truncated: Tensor
    """(M,) bool: whether the episode was cut off, for example because turns or tokens ran out."""
    loss_excluded: tuple[str | None, ...]
    """For each trajectory, the reason why the loss excludes the trajectory, or None. Excluded trajectories still count
    in baselines."""
    named_rewards: tuple[NamedReward, ...]
    attempts: tuple[AttemptId, ...]
    sequences: tuple[TokenSequence, ...]

    @property
    def token_trajectory(self) -> Tensor:
        """The number of the trajectory of each token: (N,)."""
        return self.turn_trajectory[self.token_turn]  # token -> turn -> trajectory

    @property
    def token_group(self) -> Tensor:
        """The number of the group of each token: (N,)."""
        return self.trajectory_group[self.token_trajectory]

    @property
    def turn_group(self) -> Tensor:
        """The number of the group of each turn: (S,)."""
        return self.trajectory_group[self.turn_trajectory]

    @property
    def previous_turn(self) -> Tensor:
        """The number of the previous turn in the same trajectory, for each turn: (S,). It is -1 for a first turn."""
        return previous_within(self.turn_trajectory)

    @property
    def turn_rewards(self) -> Tensor:
        """The sum of the rewards of each turn: (S,).

        The sum of the last turn of a trajectory includes the outcome reward.
        """
        return segment_sum(self.token_rewards, self.token_turn)

    @property
    def process_rewards(self) -> Tensor:
        """The sum of the rewards of each turn, without the outcome reward: (S,)."""
        # the outcome reward is on the last action token of the trajectory, and so in the last turn
        outcome = torch.zeros_like(self.turn_rewards).index_put((self.last_turns,), self.outcome_rewards)
        return self.turn_rewards - outcome

    @property
    def returns(self) -> Tensor:
        """The return R of each trajectory, which is the sum of all its rewards: (M,)."""
        return segment_sum(self.token_rewards, self.token_trajectory)

    @property
    def first_tokens(self) -> Tensor:
        """The position in the batch of the first action token of each turn: (S,)."""
        return segment_first(self.token_turn)

    @property
    def last_tokens(self) -> Tensor:
        """The position in the batch of the last action token of each trajectory: (M,)."""
        positions = torch.where(self.action_mask, torch.arange(len(self.ids)), -1)  # (N,)
        # observation tokens have position -1 here, so the maximum is the position of an action token
        initial = torch.full((len(self.outcome_rewards),), -1)
        return initial.scatter_reduce(0, self.token_trajectory, positions, "amax")

    @property
    def last_turns(self) -> Tensor:
        """The number of the last turn of each trajectory: (M,)."""
        return segment_last(self.turn_trajectory)

    def join_summaries(self) -> tuple[TrainingBatch, Tensor]:
        """Return (the batch with joined turns, the last turn of each joined turn).

        A summary of the context does nothing in the environment. So a summary turn and the next acting turn become one
        joined turn. If no acting turn follows a summary, the summary is joined with the acting turn before it.

        S turns become D joined turns. The second result (D,) holds the number of the last turn of each joined turn.
        This number counts the S turns of the original batch.

        Example: the turns act, summary, act, act, summary become (act), (summary, act), (act, summary). The second
        result is 0 2 4.
        """
        count = len(self.turn_trajectory)
        if not bool(self.turn_is_summary.any()):
            return self, torch.arange(count)
        turns = torch.arange(count)  # (S,)
        # the last turn of each trajectory that is not a summary; -1 if all turns are summaries: (M,)
        acted = segment_max(torch.where(self.turn_is_summary, 0, turns + 1), self.turn_trajectory) - 1
        previous = self.previous_turn  # (S,)
        after_action = ~self.turn_is_summary[previous.clamp(min=0)] & (turns <= acted[self.turn_trajectory])  # (S,)
        begins = (previous < 0) | after_action  # (S,) whether a turn begins a new time step
        joined, first = begins.cumsum(0) - 1, begins.nonzero().squeeze(1)  # (S,), (D,)
        batch = replace(
            self,
            token_turn=joined[self.token_turn],
            turn_trajectory=self.turn_trajectory[first],
            turn_state_ids=self.turn_state_ids[first],  # a summary does not change the state
            turn_used_tool=segment_sum(self.turn_used_tool.double(), joined) > 0,
            turn_is_summary=torch.zeros_like(first, dtype=torch.bool),
        )
        return batch, segment_last(joined)

    def actions(self) -> TrainingBatch:
        """Return the batch with only its action tokens, and without ``sequences``."""
        if bool(self.action_mask.all()):
            return self  # the usual case: the batch has no observations
        return self.tokens(self.action_mask)

    def tokens(self, mask: Tensor) -> TrainingBatch:
        """Return the batch with only the n tokens of ``mask`` (N,), and without ``sequences``."""
        positions = mask.nonzero().squeeze(1)  # (n,)
        return replace(
            self,
            ids=self.ids[positions],
            sampler_logprobs=self.sampler_logprobs[positions],
            versions=self.versions[positions],
            action_mask=self.action_mask[positions],
            token_rewards=self.token_rewards[positions],
            token_turn=self.token_turn[positions],
            sequences=(),
        )
