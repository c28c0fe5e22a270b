"""Algorithms that compare the attempts at one task with each other: GRPO, RLOO."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from pydantic import Field

from agent_r1.learn.algebra import leave_one_out, standardise, varies
from agent_r1.learn.batch import Batch
from agent_r1.learn.row import Credit, Row, Signals
from agent_r1.learn.rows.clipped import ClippedTerms, clipped_loss
from agent_r1.learn.samples import Sample


def zero_variance(samples: Sequence[Sample]) -> list[str | None]:
    """Drop the groups whose attempts all earned the same (a group of one included): their advantages are 0."""
    totals = torch.tensor([sample.total for sample in samples], dtype=torch.float64)
    groups = torch.tensor([sample.group for sample in samples], dtype=torch.int64)
    return [None if useful else "zero variance" for useful in varies(totals, groups).tolist()]


class GrpoTerms(ClippedTerms):
    """Terms of GRPO. ``epsilon`` is added to the group's standard deviation."""

    epsilon: float = Field(default=1e-6, ge=0)

    def row(self) -> Row:
        return Row(
            name="grpo",
            paper="2402.03300",
            objective=self.objective(f"(R - mean R of the group) / (std R of the group + {self.epsilon:g})"),
            terms=self,
            credit=partial(grpo_credit, terms=self),
            loss=partial(clipped_loss, terms=self),
            needs=frozenset({"group"}),
            filters=(zero_variance,),
        )


class RlooTerms(ClippedTerms):
    """Terms of RLOO."""

    def row(self) -> Row:
        return Row(
            name="rloo",
            paper="2402.14740",
            objective=self.objective("R - mean R of the others in the group"),
            terms=self,
            credit=partial(rloo_credit, terms=self),
            loss=partial(clipped_loss, terms=self),
            needs=frozenset({"group"}),
            filters=(zero_variance,),
        )


def grpo_credit(batch: Batch, signals: Signals, terms: GrpoTerms) -> Credit:
    """Each trajectory's return, standardised within its group, on all its tokens."""
    advantage = standardise(batch.returns, batch.trajectory_group, terms.epsilon)
    return Credit(advantage[batch.token_trajectory], terms.weight(batch.token_trajectory))


def rloo_credit(batch: Batch, signals: Signals, terms: RlooTerms) -> Credit:
    """Each trajectory's return minus the mean of the others', on all its tokens."""
    advantage = leave_one_out(batch.returns, batch.trajectory_group)
    return Credit(advantage[batch.token_trajectory], terms.weight(batch.token_trajectory))
