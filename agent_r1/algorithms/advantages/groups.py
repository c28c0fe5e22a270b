"""Group-relative advantage estimators: each attempt is compared with the other attempts at the same task.

R (M,) is the return of a trajectory, the sum of its rewards. All tokens of a trajectory get the same advantage.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from agent_r1.algorithms.ops import (
    center,
    center_weighted,
    divide_by_mean,
    divide_by_std,
    has_variance,
    leave_one_out,
    marginal_maximum,
    standardize,
    whiten,
)
from agent_r1.algorithms.types import Advantage, ModelOutputs, Need
from agent_r1.data.batch import TrainingBatch, segment_count

Baseline = Literal["mean", "leave_one_out", "length_weighted"]
Scale = Literal["none", "std", "mean", "batch_std", "with_variance"]

BASELINE_FORMULAS: Mapping[Baseline, str] = {
    "mean": "mean R of the group",
    "leave_one_out": "mean R of the others in the group",
    "length_weighted": "mean R of the group weighted by tokens",
}
SCALE_FORMULAS: Mapping[Scale, str] = {
    "none": "",
    "std": " / (std R of the group + {epsilon:g})",
    "mean": " / mean R of the group",
    "batch_std": " / (std R of the batch + {epsilon:g})",
    "with_variance": " times the batch's trajectories over those in groups with variance",
}


class GroupRelative(Advantage):
    """The group-relative advantage (R - baseline) / scale.

    Algorithms by ``baseline`` and ``scale``:
        mean, std: GRPO (arXiv:2402.03300, section 4.1.2)
        mean, none: Dr.GRPO (arXiv:2503.20783)
        leave_one_out, none: RLOO (arXiv:2402.14740)
        length_weighted, none: OPO (arXiv:2505.23585)
        mean, mean: MaxRL (arXiv:2602.02710)
        mean, batch_std: Lite PPO (arXiv:2508.08221)
        mean, with_variance: GPG (arXiv:2504.02546)
    """

    name: Literal["group_relative"] = "group_relative"
    needs: ClassVar[frozenset[Need]] = frozenset({"group"})

    baseline: Baseline = "mean"
    """Baseline of the return R of an attempt. mean: the mean R of the group. leave_one_out: the mean R of the other
    attempts of the group. length_weighted: the mean R of the group, weighted by the number of tokens of each
    attempt."""

    scale: Scale = "none"
    """Divisor of (R - baseline), with R the return of an attempt. none: no division. std: the standard deviation of R
    in the group. mean: the mean R of the group. batch_std: the standard deviation of R in the batch. with_variance: the
    fraction of the batch's attempts whose group has at least two different returns. The division by this fraction makes
    up for the other groups, in which every advantage is 0."""

    epsilon: float = Field(default=1e-6, ge=0)
    """Small number that is added to each standard deviation before the division."""

    @property
    def formula(self) -> str:
        return f"(R - {BASELINE_FORMULAS[self.baseline]}){SCALE_FORMULAS[self.scale].format(epsilon=self.epsilon)}"

    def compute(self, batch: TrainingBatch, outputs: ModelOutputs) -> Tensor:
        returns, group = batch.returns, batch.trajectory_group  # (M,), (M,)
        match self.baseline:
            case "mean":
                advantage = center(returns, group)  # GRPO, Dr.GRPO
            case "leave_one_out":
                advantage = leave_one_out(returns, group)  # RLOO
            case "length_weighted":  # OPO
                lengths = segment_count(batch.token_trajectory).double()  # (M,)
                advantage = center_weighted(returns, group, lengths)
        match self.scale:
            case "std":
                advantage = divide_by_std(advantage, returns, group, self.epsilon)  # GRPO
            case "mean":
                advantage = divide_by_mean(advantage, returns, group)  # MaxRL
            case "batch_std":  # Lite PPO: one key for the whole batch
                advantage = divide_by_std(advantage, returns, torch.zeros_like(group), self.epsilon)
            case "with_variance":  # GPG: divided by the share of trajectories in groups with variance
                advantage = advantage / has_variance(returns, group).double().mean().clamp(min=1 / len(returns))
        return advantage[batch.token_trajectory]  # (M,) -> (N,)


class BestOfK(Advantage):
    """How much the attempt raises the best return of a set of k attempts of its group, on average over all sets.

    This is PKPO (arXiv:2505.15201, equation 33). If k is the size of the group, the advantage of the best attempt is
    its return minus the second best return, and that of all others is 0 (arXiv:2503.19595; ``grpo_passk`` in verl).
    """

    name: Literal["best_of_k"] = "best_of_k"
    needs: ClassVar[frozenset[Need]] = frozenset({"group"})

    k: int | None = Field(default=None, ge=2)
    """Number k of attempts in a set. If k is none or above the size of the group, the size of the group is used. The
    gain of an attempt in a set is the best return of the set minus the best return of the set's other attempts. The
    gain is 0 if the set does not contain the attempt. The advantage of an attempt is the mean of its gains over all
    sets of k attempts of the group."""

    divide_by_std: bool = False
    """Whether the advantage is divided by the standard deviation of the returns in the group, as in verl."""

    epsilon: float = Field(default=1e-6, ge=0)
    """Small number that is added to each standard deviation before the division."""

    @property
    def formula(self) -> str:
        scale = f" / (std R of the group + {self.epsilon:g})" if self.divide_by_std else ""
        if self.k is None:
            return f"(R - second largest R of the group){scale} for its best attempt, 0 for the others"
        return f"mean over the group's subsets of {self.k} of (max R - max R without the attempt){scale}"

    def compute(self, batch: TrainingBatch, outputs: ModelOutputs) -> Tensor:
        returns, group = batch.returns, batch.trajectory_group  # (M,), (M,)
        advantage = marginal_maximum(returns, group, self.k)
        if self.divide_by_std:
            advantage = divide_by_std(advantage, returns, group, self.epsilon)
        return advantage[batch.token_trajectory]  # (M,) -> (N,)


class WhitenedGroup(Advantage):
    """The advantage A = whiten(R - mean R of the group) of REINFORCE++-baseline (arXiv:2501.03262).

    ``whiten`` scales to mean 0 and standard deviation 1 over the tokens of the batch.
    """

    name: Literal["whitened_group"] = "whitened_group"
    needs: ClassVar[frozenset[Need]] = frozenset({"group"})

    @property
    def formula(self) -> str:
        return "R - mean R of the group, whitened over the tokens of the batch"

    def compute(self, batch: TrainingBatch, outputs: ModelOutputs) -> Tensor:
        advantage = center(batch.returns, batch.trajectory_group)  # (M,)
        return whiten(advantage[batch.token_trajectory])  # a trajectory counts once per token


class SeparateRewards(Advantage):
    """The advantage A = whiten(sum over k of weight_k * standardize(R_k)) of GDPO (arXiv:2601.05242).

    R_k is the sum of the trajectory's rewards with the name k. ``standardize`` scales to mean 0 and standard deviation
    1 over the group, ``whiten`` over all trajectories of the batch.
    """

    name: Literal["separate_rewards"] = "separate_rewards"
    needs: ClassVar[frozenset[Need]] = frozenset({"group"})
    uses_returns: ClassVar[bool] = False

    epsilon: float = Field(default=1e-6, ge=0)
    """Small number that is added to each standard deviation before the division."""

    @property
    def formula(self) -> str:
        return (
            "sum over rewards k of weight_k (R_k - mean R_k of the group) / "
            f"(std R_k of the group + {self.epsilon:g}), whitened over the trajectories of the batch"
        )

    def compute(self, batch: TrainingBatch, outputs: ModelOutputs) -> Tensor:
        total = torch.zeros_like(batch.outcome_rewards)  # (M,)
        for reward in batch.named_rewards:
            # reward.returns include the weight; standardize removes the size of the weight, but keeps its sign
            total += abs(reward.weight) * standardize(reward.returns, batch.trajectory_group, self.epsilon)
        return whiten(total)[batch.token_trajectory]  # (M,) -> (N,)


class AgainstGreedy(Advantage):
    """The advantage A = R - R of the group's greedy attempt: ReMax (arXiv:2310.10505)."""

    name: Literal["against_greedy"] = "against_greedy"
    needs: ClassVar[frozenset[Need]] = frozenset({"greedy"})

    @property
    def formula(self) -> str:
        return "R - R of the greedy attempt at the same task"

    def compute(self, batch: TrainingBatch, outputs: ModelOutputs) -> Tensor:
        return (batch.returns - batch.greedy_return)[batch.token_trajectory]  # (M,) -> (N,)
