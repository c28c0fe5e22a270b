"""Estimators that compare the attempts at one task with each other. R is what a whole trajectory earned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from agent_r1.algorithms.advantages.advantage import Advantage, on_tokens
from agent_r1.algorithms.component import Need
from agent_r1.algorithms.ops.group_stats import (
    center,
    center_weighted,
    leave_one_out,
    over_deviation,
    over_mean,
    standardize,
    whiten,
)
from agent_r1.algorithms.signals import Estimate, ModelOutputs
from agent_r1.data.batch import TrainingBatch
from agent_r1.data.segments import segment_count

Baseline = Literal["mean", "others", "lengths"]
Scale = Literal["none", "deviation", "mean", "batch"]

BASELINES: Mapping[Baseline, str] = {
    "mean": "mean R of the group",
    "others": "mean R of the others in the group",
    "lengths": "mean R of the group weighted by tokens",
}
SCALES: Mapping[Scale, str] = {
    "none": "",
    "deviation": " / (std R of the group + {epsilon:g})",
    "mean": " / mean R of the group",
    "batch": " / (std R of the batch + {epsilon:g})",
}


class GroupRelative(Advantage):
    """R minus a baseline of the group, scaled: GRPO, Dr.GRPO, RLOO, OPO, MaxRL, LitePPO."""

    kind = "group_relative"
    needs: ClassVar[frozenset[Need]] = frozenset({"group"})

    baseline: Baseline = "mean"
    """What R is compared with: the group's mean, the mean of the others, the mean weighted by tokens."""

    scale: Scale = "none"
    """What the difference is divided by: nothing, the group's standard deviation, its mean, the batch's deviation."""

    epsilon: float = Field(default=1e-6, ge=0)
    """Added to a standard deviation."""

    @property
    def formula(self) -> str:
        return f"(R - {BASELINES[self.baseline]}){SCALES[self.scale].format(epsilon=self.epsilon)}"

    def estimate(self, batch: TrainingBatch, signals: ModelOutputs) -> Estimate:
        returns, group = batch.returns, batch.trajectory_group
        advantage = self._centred(returns, group, batch)
        scales: Mapping[Scale, Callable[[], Tensor]] = {
            "none": lambda: advantage,
            "deviation": lambda: over_deviation(advantage, returns, group, self.epsilon),
            "mean": lambda: over_mean(advantage, returns, group),
            "batch": lambda: over_deviation(advantage, returns, torch.zeros_like(group), self.epsilon),
        }
        return on_tokens(scales[self.scale](), batch)

    def _centred(self, returns: Tensor, group: Tensor, batch: TrainingBatch) -> Tensor:
        if self.baseline == "lengths":
            return center_weighted(returns, group, segment_count(batch.token_trajectory).double())
        return center(returns, group) if self.baseline == "mean" else leave_one_out(returns, group)


class WhitenedGroup(Advantage):
    """R minus the group's mean, whitened over the batch's tokens: REINFORCE++-baseline (2501.03262)."""

    kind = "whitened_group"
    needs: ClassVar[frozenset[Need]] = frozenset({"group"})

    @property
    def formula(self) -> str:
        return "R - mean R of the group, whitened over the tokens of the batch"

    def estimate(self, batch: TrainingBatch, signals: ModelOutputs) -> Estimate:
        return Estimate(whiten(center(batch.returns, batch.trajectory_group)[batch.token_trajectory]))


class SeparateRewards(Advantage):
    """Each reward standardised by itself in the group, summed by weight, whitened over the batch: GDPO (2601.05242).

    Summed first, different rewards can cancel, and one of large variance hides the others.
    """

    kind = "separate_rewards"
    needs: ClassVar[frozenset[Need]] = frozenset({"group"})
    of_sums: ClassVar[bool] = False

    epsilon: float = Field(default=1e-6, ge=0)
    """Added to a standard deviation."""

    @property
    def formula(self) -> str:
        return (
            "sum over rewards k of weight_k (R_k - mean R_k of the group) / "
            f"(std R_k of the group + {self.epsilon:g}), whitened over the trajectories of the batch"
        )

    def estimate(self, batch: TrainingBatch, signals: ModelOutputs) -> Estimate:
        total = torch.zeros_like(batch.outcomes)
        for named in batch.named:
            # the weight's sign is in the returns already
            total += abs(named.weight) * standardize(named.returns, batch.trajectory_group, self.epsilon)
        return on_tokens(whiten(total), batch)


class AgainstGreedy(Advantage):
    """R minus what the greedy attempt at the task earned: ReMax (2310.10505)."""

    kind = "against_greedy"
    needs: ClassVar[frozenset[Need]] = frozenset({"greedy"})

    @property
    def formula(self) -> str:
        return "R - R of the greedy attempt at the same task"

    def estimate(self, batch: TrainingBatch, signals: ModelOutputs) -> Estimate:
        return on_tokens(batch.returns - batch.greedy, batch)
