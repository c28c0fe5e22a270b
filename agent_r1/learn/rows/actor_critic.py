"""Algorithms with a critic: PPO with token-level GAE."""

from __future__ import annotations

from functools import partial

import torch
from pydantic import Field
from torch import Tensor

from agent_r1.learn.algebra import clipped_value_loss, generalised_advantages, whiten
from agent_r1.learn.batch import Batch
from agent_r1.learn.row import Credit, Metrics, Row, Signals, TokenView
from agent_r1.learn.rows.clipped import ClippedTerms, clipped_loss


class PpoTerms(ClippedTerms):
    """Terms of PPO.

    Running out of turns or tokens is an ending like any other: the limit is part of the task. The critic's
    loss needs no coefficient: it has a model and a learning rate of its own.
    """

    gamma: float = Field(default=1.0, ge=0, le=1)
    lam: float = Field(default=1.0, ge=0, le=1)
    value_clip: float = Field(default=0.5, gt=0)

    def row(self) -> Row:
        credit = f"GAE over action tokens (gamma {self.gamma:g}, lambda {self.lam:g}), whitened over the batch"
        return Row(
            name="ppo",
            paper="1707.06347",
            objective=f"{self.objective(credit)}; V within {self.value_clip:g} of V_old regresses on A + V_old",
            terms=self,
            credit=partial(ppo_credit, terms=self),
            loss=partial(ppo_loss, terms=self),
            needs=frozenset({"critic"}),
        )


def ppo_credit(batch: Batch, signals: Signals, terms: PpoTerms) -> Credit:
    """GAE over the trajectory's action tokens as one chain, in order of turns, whatever stood between them."""
    values = _present(signals.values)
    after = torch.zeros(len(batch.attempts), dtype=values.dtype)
    advantage = generalised_advantages(
        batch.token_rewards, values, after, batch.token_trajectory, terms.gamma, terms.lam
    )
    return Credit(whiten(advantage), terms.weight(batch.token_trajectory), value_target=advantage + values)


def ppo_loss(view: TokenView, credit: Credit, terms: PpoTerms) -> tuple[Tensor, Metrics]:
    """The policy's clipped loss plus the critic's."""
    loss, metrics = clipped_loss(view, credit, terms)
    values, old, target = _present(view.values), _present(view.old_values), _present(credit.value_target)
    value_loss = (credit.weight * clipped_value_loss(values, old, target, terms.value_clip)).sum()
    return loss + value_loss, {**metrics, "value_loss": value_loss.detach()}


def _present(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise TypeError("PPO needs a critic's values")
    return tensor
