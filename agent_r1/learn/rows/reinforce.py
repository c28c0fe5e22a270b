"""Algorithms that compare returns over the whole batch: REINFORCE++."""

from __future__ import annotations

from functools import partial

from pydantic import Field

from agent_r1.learn.algebra import discounted_sums, whiten
from agent_r1.learn.batch import Batch
from agent_r1.learn.row import Credit, Row, Signals
from agent_r1.learn.rows.clipped import ClippedTerms, clipped_loss


class ReinforcePlusPlusTerms(ClippedTerms):
    """Terms of REINFORCE++. ``gamma`` discounts per action token. There is no penalty towards a reference model."""

    gamma: float = Field(default=1.0, ge=0, le=1)

    def row(self) -> Row:
        return Row(
            name="reinforce++",
            paper="2501.03262",
            objective=self.objective(
                f"return to go (gamma {self.gamma:g}), whitened over the action tokens (no KL term)"
            ),
            terms=self,
            credit=partial(reinforce_plus_plus_credit, terms=self),
            loss=partial(clipped_loss, terms=self),
        )


def reinforce_plus_plus_credit(batch: Batch, signals: Signals, terms: ReinforcePlusPlusTerms) -> Credit:
    """The discounted return from each token on, whitened over all tokens of the batch."""
    to_go = discounted_sums(batch.token_rewards, batch.token_trajectory, terms.gamma)
    return Credit(whiten(to_go), terms.weight(batch.token_trajectory))
