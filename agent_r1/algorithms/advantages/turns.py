"""Turn-level advantage estimators without a critic. Each turn is compared with similar turns of the same group.

r (S,) is the reward of each turn; that of the last turn includes the outcome reward. G (S,) is the discounted return to
go: G_t = r_t + gamma G_{t+1}. Means and standard deviations are over the compared turns.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from agent_r1.algorithms.ops import center, discounted_sums, group_std, has_variance, leave_one_out, standardize
from agent_r1.algorithms.types import Advantage, ModelOutputs, Need, StateValues
from agent_r1.data.batch import TrainingBatch, index_within, segment_count, segment_sum, unique_ids


class TurnRelative(Advantage):
    """Base class of estimators that compare the turns of a group with each other."""

    needs: ClassVar[frozenset[Need]] = frozenset({"group"})

    epsilon: float = Field(default=1e-6, ge=0)
    """Small number that is added to each standard deviation before the division."""


class ProcessRelative(TurnRelative):
    """A_t = sum_{k >= t} (r_k - mean r) / std r over all turns of the group: GRPO with process supervision
    (arXiv:2402.03300, section 4.1.3).
    """

    name: Literal["process_relative"] = "process_relative"

    @property
    def formula(self) -> str:
        return f"sum from the turn on of (r - mean r of the group's turns) / (std r + {self.epsilon:g})"

    def compute(self, batch: TrainingBatch, outputs: ModelOutputs) -> Tensor:
        standardized = standardize(batch.turn_rewards, batch.turn_group, self.epsilon)  # (S,)
        return discounted_sums(standardized, batch.turn_trajectory, 1.0)[batch.token_turn]  # (S,) -> (N,)


class TurnAndOutcome(TurnRelative):
    """The advantage of each turn in MT-GRPO (arXiv:2505.11821, equation 6).

    O is the outcome reward of a trajectory, and P the sum of its process rewards. A(x) = (x - mean x) / std x over the
    trajectories of the group. The advantage is:

    - A(O) + coefficient * A(P) for a turn that used a tool;
    - A(O) for a turn without a tool, if another turn of the trajectory used a tool;
    - A(O + P) for all turns of a trajectory without tool use.
    """

    name: Literal["turn_and_outcome"] = "turn_and_outcome"

    coefficient: float = Field(default=1.0, ge=0)
    """Weight of the advantage of the process rewards. The advantage of the outcome reward has weight 1."""

    @property
    def formula(self) -> str:
        process = f"{self.coefficient:g} A(process rewards) in turns with results of tools"
        return f"A(outcome) + {process}; A standardized in the group"

    def compute(self, batch: TrainingBatch, outputs: ModelOutputs) -> Tensor:
        group, trajectory = batch.trajectory_group, batch.turn_trajectory  # (M,), (S,)
        process_rewards = segment_sum(batch.process_rewards, trajectory)  # (M,)
        outcome = standardize(batch.outcome_rewards, group, self.epsilon)[trajectory]  # (S,)
        process = self.coefficient * standardize(process_rewards, group, self.epsilon)[trajectory]  # (S,)
        combined = standardize(batch.returns, group, self.epsilon)[trajectory]  # (S,)
        any_tool = segment_sum(batch.turn_used_tool.double(), trajectory)[trajectory] > 0  # (S,)
        advantage = torch.where(any_tool, outcome + torch.where(batch.turn_used_tool, process, 0.0), combined)
        return advantage[batch.token_turn]


class SameTurn(TurnRelative):
    """A_t = (G_t - mean G) / std G over the turns with the number t in all trajectories of the group: GTPO
    (arXiv:2511.14846).
    """

    name: Literal["same_turn"] = "same_turn"

    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per turn."""

    @property
    def formula(self) -> str:
        return f"return to go (gamma {self.gamma:g} per turn), standardized over the group's turns of the same number"

    def compute(self, batch: TrainingBatch, outputs: ModelOutputs) -> Tensor:
        returns_to_go = discounted_sums(batch.turn_rewards, batch.turn_trajectory, self.gamma)  # (S,)
        key = unique_ids(batch.turn_group, index_within(batch.turn_trajectory))  # (S,) group and turn number
        return standardize(returns_to_go, key, self.epsilon)[batch.token_turn]  # (S,) -> (N,)


class SameState(TurnRelative):
    """A_t = (R - mean R) + turn_weight * (G_t - mean G): GiGPO (arXiv:2505.10978, equation 8).

    R is the return of the trajectory, and mean R is over the group. mean G is over the group's turns in the same state:
    after the same last messages of the environment.
    """

    name: Literal["same_state"] = "same_state"

    turn_weight: float = Field(default=1.0, ge=0)
    """Weight of the advantage from comparing turns in the same state. The advantage from comparing whole trajectories
    has weight 1."""

    gamma: float = Field(default=0.95, ge=0, le=1)
    """Discount per turn."""

    divide_by_std: bool = False
    """Whether the difference between a return and the mean return is also divided by the standard deviation of the
    returns."""

    average_over: Literal["trajectories", "turns"] = "trajectories"
    """How often a trajectory's return counts in the mean return of the group. trajectories: once. turns: as often as
    the trajectory has turns, as in verl-agent."""

    @property
    def formula(self) -> str:
        scale = " / std" if self.divide_by_std else ""
        counted = "" if self.average_over == "trajectories" else ", each as often as it has turns"
        return (
            f"(R - mean R of the group{counted}){scale} + {self.turn_weight:g} (G - mean G of the group's turns in the "
            f"same state){scale}; G = return to go (gamma {self.gamma:g} per turn)"
        )

    def compute(self, batch: TrainingBatch, outputs: ModelOutputs) -> Tensor:
        if self.average_over == "turns":
            episode = self._relative(batch.returns[batch.turn_trajectory], batch.turn_group)  # (S,)
        else:
            episode = self._relative(batch.returns, batch.trajectory_group)[batch.turn_trajectory]  # (M,) -> (S,)
        returns_to_go = discounted_sums(batch.turn_rewards, batch.turn_trajectory, self.gamma)  # (S,)
        advantage = episode + self.turn_weight * self._relative(returns_to_go, batch.turn_state_ids)
        return advantage[batch.token_turn]

    def _relative(self, x: Tensor, key: Tensor) -> Tensor:
        return standardize(x, key, self.epsilon) if self.divide_by_std else center(x, key)


class SameHistory(TurnRelative):
    """The advantage of HGPO (arXiv:2602.22817): each turn is compared with the turns of its group that have an equal
    history of states.

    Comparison k = 1 .. ``history`` + 1 is between turns with the same last k states: A_k = (G_t - mean G) / std G, with
    the std without Bessel's correction, as in verl-agent. The advantage of turn t is the mean of the A_k, weighted by
    (k + 1)^``alpha``. The weight is 0 if turn t has fewer than k states, or if all compared turns have equal G.
    """

    name: Literal["same_history"] = "same_history"

    history: int = Field(default=2, ge=0)
    """Maximum number of previous states that are compared. With 2, a turn is compared with the turns that start in the
    same state, with the turns that also have the same previous state, and with the turns that also have the same 2
    previous states."""

    alpha: float = Field(default=1.0, ge=0)
    """Exponent in the weight of a comparison. Each turn is compared several times. Comparison 1 is with the turns that
    start in the same state. Comparison k = 2, 3, .. is with the turns that also have the same k - 1 previous states.
    Comparison k has the weight (k + 1)^alpha. With a larger alpha, comparisons of more states count more."""

    gamma: float = Field(default=0.95, ge=0, le=1)
    """Discount per turn."""

    @property
    def formula(self) -> str:
        return (
            f"mean over k = 1..{self.history + 1}, weighted by (k + 1)^{self.alpha:g}, of (G - mean G) / "
            f"(std G + {self.epsilon:g}) among the group's turns with the same last k states; "
            f"G = return to go (gamma {self.gamma:g} per turn)"
        )

    def compute(self, batch: TrainingBatch, outputs: ModelOutputs) -> Tensor:
        returns_to_go = discounted_sums(batch.turn_rewards, batch.turn_trajectory, self.gamma)  # (S,)
        total, weights = torch.zeros_like(returns_to_go), torch.zeros_like(returns_to_go)
        previous = batch.previous_turn  # (S,) -1 for the first turn
        earlier = torch.arange(len(previous))  # (S,) the turn k - 1 turns before each turn, or -1
        key = torch.zeros_like(earlier)  # (S,) turns with the same key have the same last k states
        for k in range(1, self.history + 2):
            state = batch.turn_state_ids[earlier.clamp(min=0)]  # (S,)
            # a turn with fewer than k states gets a key that no other turn has
            key = torch.where(earlier >= 0, unique_ids(key, state), len(key) + torch.arange(len(key)))
            key = unique_ids(key)
            count = segment_count(key)[key]  # (S,)
            weight = (k + 1) ** self.alpha * has_variance(returns_to_go, key).to(returns_to_go)  # (S,)
            # the standard deviation without Bessel's correction
            population_std = group_std(returns_to_go, key) * ((count - 1) / count).sqrt()  # (S,)
            total += weight * center(returns_to_go, key) / (population_std + self.epsilon)
            weights += weight
            earlier = torch.where(earlier >= 0, previous[earlier.clamp(min=0)], -1)
        return (total / weights.clamp(min=1))[batch.token_turn]


class Replayed(Advantage):
    """The advantage A_t = V(s_{t+1}) - V(s_t) of each turn: VinePPO (arXiv:2410.01679, section 4) at the turns of an
    episode.

    V is the expected return of the whole attempt. V(s_t) is the mean return of ``continuations`` attempts that repeat
    the turns before t exactly, and are sampled from there. V of the opening is the mean return of the other attempts of
    the group, and V after the last turn is the return R. So the advantages of the turns of an attempt sum to R minus
    the mean of the others, the advantage of RLOO.
    """

    name: Literal["replayed"] = "replayed"
    needs: ClassVar[frozenset[Need]] = frozenset({"group"})

    continuations: int = Field(default=2, ge=1, le=100)
    """Number of attempts that are sampled from each turn after the first one. An attempt of K turns costs about
    continuations * (K - 1) / 2 further attempts; the metric ``continuation_tokens`` has the sampled tokens."""

    @property
    def formula(self) -> str:
        return f"V(next turn) - V(turn); V = mean return of {self.continuations} continuations from the turn"

    @property
    def continuations_per_turn(self) -> int:
        return self.continuations

    def expected_returns(self, batch: TrainingBatch) -> Tensor:
        """Return V of the state before each turn: (S,)."""
        returns, trajectory, group = batch.returns, batch.turn_trajectory, batch.trajectory_group  # (M,), (S,), (M,)
        others = returns - leave_one_out(returns, group)  # (M,) mean return of the other attempts
        # without others, the first action has no advantage: V of the opening is that of the state after it
        first, last = batch.last_turns - segment_count(trajectory) + 1, batch.last_turns  # (M,)
        after_first = torch.where(first == last, returns, batch.turn_values[(first + 1).clamp(max=last.max())])
        opening = torch.where(segment_count(group)[group] > 1, others, after_first)  # (M,)
        return batch.turn_values.index_put((first,), opening)

    def state_values(self, batch: TrainingBatch) -> StateValues:
        """Return the expected sum of the rewards that follow each state."""
        steps, _ = batch.join_summaries()
        to_go = discounted_sums(steps.turn_rewards, steps.turn_trajectory, 1.0)  # (D,) the rewards from each turn on
        before = steps.returns[steps.turn_trajectory] - to_go  # (D,)
        value = (self.expected_returns(steps) - before)[steps.token_turn]  # (N,)
        return StateValues(value, torch.full_like(batch.turn_values, math.nan))

    def compute(self, batch: TrainingBatch, outputs: ModelOutputs) -> Tensor:
        value = self.expected_returns(batch)  # (S,)
        following = value.roll(-1).index_put((batch.last_turns,), batch.returns)  # (S,)
        return (following - value)[batch.token_turn]  # (S,) -> (N,)
