"""The training batch: the tokens of one update as flat tensors, and the turn, trajectory and group of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from agent_r1.core.attempt_id import AttemptId
from agent_r1.data.segments import previous_within, segment_first, segment_last, segment_max, segment_sum
from agent_r1.data.sequences import TokenSequence

RewardWeights = Mapping[str, float]
"""Weights by the name of a reward; a reward without a weight has weight 1."""


@dataclass(frozen=True, slots=True, eq=False)
class NamedReward:
    """The weighted sum of the rewards of one name in each trajectory, and the weight."""

    name: str
    weight: float
    returns: Tensor
    """(M,) float64, already multiplied by ``weight``."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainingBatch:
    """N tokens of S turns of M trajectories, ordered by trajectory, turn index and position. On the CPU.

    The tokens are action tokens: advantages and losses cannot touch others, because there are none. So the advantage
    mask and the loss mask of paper 2511.14460 hold by construction. Only an algorithm that trains on observations asks
    for those too (:func:`agent_r1.data.assemble.assemble_batch`); ``action_mask`` then distinguishes them. Turns
    without action tokens are left out. ``sequences`` holds everything that the model reads.

    Example: two trajectories, the first of two turns (2 tokens, 1 token), the second of one (1 token):
        token_turn 0 0 1 2, turn_trajectory 0 0 1, trajectory_group 0 0
    """

    ids: Tensor
    """(N,) int64 token ids."""
    sampler_logprobs: Tensor
    """(N,) float64: log-probabilities recorded by the sampler, at its temperature; NaN for observations."""
    versions: Tensor
    """(N,) int64: version of the weights that sampled the token. An observation has the version of the action before.
    """
    action_mask: Tensor
    """(N,) bool: the token was sampled by the policy."""
    token_rewards: Tensor
    """(N,) float64, weighted: a call's reward on the token that ends the call, a turn's on its last action token, the
    outcome on the trajectory's last action token.

    Rewards are on action tokens only. If the turns ran out, the episode's last token belongs to an observation, and a
    reward on it would be lost.
    """
    token_turn: Tensor
    """(N,) int64 turn of each token; an observation belongs to the turn whose action led to it."""
    turn_trajectory: Tensor
    """(S,) int64 trajectory of each turn."""
    turn_state_ids: Tensor
    """(S,) int64: equal for turns of a group before which the environment's last messages were equal, word for word."""
    turn_used_tool: Tensor
    """(S,) bool: the turn's action got tool results."""
    turn_is_summary: Tensor
    """(S,) bool: the turn summarized the context, and did not act in the environment."""
    trajectory_group: Tensor
    """(M,) int64 group of each trajectory."""
    outcome_rewards: Tensor
    """(M,) float64: weighted rewards of whole trajectories; they are part of ``token_rewards``."""
    greedy_return: Tensor
    """(M,) float64: return of the group's greedy attempt, NaN if there was none."""
    role_baseline: Tensor
    """(M,) float64: running mean return of the trajectory's role before it; 0 if it is not tracked."""
    truncated: Tensor
    """(M,) bool: the episode did not end by itself."""
    loss_excluded: tuple[str | None, ...]
    """For each trajectory None, or the reason why it counts in baselines only and not in the loss."""
    named_rewards: tuple[NamedReward, ...]
    attempts: tuple[AttemptId, ...]
    sequences: tuple[TokenSequence, ...]

    @property
    def token_trajectory(self) -> Tensor:
        """(N,) the trajectory of each token."""
        return self.turn_trajectory[self.token_turn]  # token -> turn -> trajectory

    @property
    def token_group(self) -> Tensor:
        """(N,) the group of each token."""
        return self.trajectory_group[self.token_trajectory]

    @property
    def turn_group(self) -> Tensor:
        """(S,) the group of each turn."""
        return self.trajectory_group[self.turn_trajectory]

    @property
    def previous_turn(self) -> Tensor:
        """(S,) the turn before each one in its trajectory, -1 for the first."""
        return previous_within(self.turn_trajectory)

    @property
    def turn_rewards(self) -> Tensor:
        """(S,) the sum of the rewards of each turn; the last turn's includes the outcome."""
        return segment_sum(self.token_rewards, self.token_turn)

    @property
    def process_rewards(self) -> Tensor:
        """(S,) the sum of the rewards of each turn, without the outcome."""
        # the outcome is on the trajectory's last action token, so in its last turn
        outcome = torch.zeros_like(self.turn_rewards).index_put((self.last_turns,), self.outcome_rewards)
        return self.turn_rewards - outcome

    @property
    def returns(self) -> Tensor:
        """(M,) the return R of each trajectory: the sum of all its rewards."""
        return segment_sum(self.token_rewards, self.token_trajectory)

    @property
    def first_tokens(self) -> Tensor:
        """(S,) the position of each turn's first action token."""
        return segment_first(self.token_turn)

    @property
    def last_tokens(self) -> Tensor:
        """(M,) the position of each trajectory's last action token."""
        positions = torch.where(self.action_mask, torch.arange(len(self.ids)), -1)  # (N,)
        # observations after the last action are not counted: their position is -1 here
        initial = torch.full((len(self.outcome_rewards),), -1)
        return initial.scatter_reduce(0, self.token_trajectory, positions, "amax")

    @property
    def last_turns(self) -> Tensor:
        """(M,) the last turn of each trajectory."""
        return segment_last(self.turn_trajectory)

    @property
    def token_loss_excluded(self) -> Tensor:
        """(N,) bool: the token's trajectory is excluded from the loss."""
        return torch.tensor([reason is not None for reason in self.loss_excluded])[self.token_trajectory]

    def join_summaries(self) -> tuple[TrainingBatch, Tensor]:
        """Return the batch with each summary as a part of the turn that it prepares, and the last turn of each part.

        A summary takes no time in the environment and earns nothing there, so it is one time step with the action that
        follows it. A summary after the last action of a trajectory joins that action. D turns remain of S; the second
        result (D,) holds the last turn of each among the S.

        Example: act, summary, act, act, summary become the turns (act), (summary, act), (act, summary).
        """
        count = len(self.turn_trajectory)
        if not bool(self.turn_is_summary.any()):
            return self, torch.arange(count)
        turns = torch.arange(count)  # (S,)
        # last turn of each trajectory that acted, -1 if none did: (M,)
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
        """Return the batch with its action tokens only, without sequences."""
        if bool(self.action_mask.all()):
            return self  # the common case: no observations in the batch
        return self.tokens(self.action_mask)

    def tokens(self, mask: Tensor) -> TrainingBatch:
        """Return the batch with the n tokens of ``mask`` (N,) only, without sequences."""
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
