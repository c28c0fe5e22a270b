"""The outcomes of an update: each attempt was trained, or excluded for a reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agent_r1.core.attempt_id import AttemptId
from agent_r1.core.trajectory import STATUS_POLICY, Group
from agent_r1.data.segments import segment_sum
from agent_r1.data.training_sample import Excluded, describe_status
from agent_r1.trainer.metrics import OptimizerStep
from agent_r1.trainer.protocol import POLICY, PreparedBatch

NOT_FINITE = "the loss or a gradient was not finite"
NO_ADVANTAGE = "advantage 0 on every token"
GREEDY = "greedy attempt, to compare with"
REJECTED = "rejected: sampler and trainer disagree"
MASKED = "no token has a policy loss: all are masked or rejected"


@dataclass(frozen=True, slots=True)
class Trained:
    """The outcome of an attempt that was trained.

    An attempt is trained if an applied optimizer step of the policy used the attempt. If an update trains only the
    critic, a step of the critic counts.

    Attributes:
        advantage_sum: the sum of the advantages of the attempt's tokens.
    """

    attempt: AttemptId
    advantage_sum: float


Outcome = Trained | Excluded
"""What an update did with one attempt."""


def batch_outcomes(prepared: PreparedBatch, steps: Sequence[OptimizerStep], without_loss: str) -> list[Outcome]:
    """Return the outcome of each attempt of the batch.

    An attempt is ``Trained`` if one of its tokens has a policy loss, and an applied optimizer step used the attempt.
    Other attempts are ``Excluded`` with a reason. Only steps of the policy count. If no step trained the policy, as in
    the critic's warm-up, all steps count.

    Args:
        prepared: the batch.
        steps: the optimizer steps of the update.
        without_loss: the reason for attempts in which no token has a policy loss.
    """
    batch, weights = prepared.batch, prepared.weights
    steps = [step for step in steps if POLICY in step.modules] or steps
    used = frozenset[int]().union(*(step.trajectories for step in steps))
    trained = frozenset[int]().union(*(step.trajectories for step in steps if step.optim.applied))
    accepted = segment_sum(weights.importance_weight * batch.action_mask, batch.token_trajectory).tolist()  # (M,)
    advantage_sum = segment_sum(weights.advantage, batch.token_trajectory).tolist()  # (M,)
    outcomes: list[Outcome] = []
    for number, attempt in enumerate(batch.attempts):
        reason = batch.loss_excluded[number]
        if reason is not None:
            outcomes.append(Excluded(attempt, reason))
        elif not accepted[number]:
            outcomes.append(Excluded(attempt, without_loss))
        elif number in trained:
            outcomes.append(Trained(attempt, advantage_sum[number]))
        else:
            outcomes.append(Excluded(attempt, NOT_FINITE if number in used else NO_ADVANTAGE))
    return outcomes


def untrained_outcomes(groups: Sequence[Group]) -> list[Excluded]:
    """Return the outcomes of the attempts that are never trained: greedy attempts, and attempts that were retried."""
    outcomes = []
    for greedy in (group.greedy for group in groups if group.greedy is not None):
        failed = STATUS_POLICY[greedy.status] != "train"
        outcomes.append(Excluded(greedy.attempt, f"{GREEDY}; {describe_status(greedy)}" if failed else GREEDY))
    for retried in (trajectory for group in groups for trajectory in group.retried):
        outcomes.append(Excluded(retried.attempt, f"tried again after {describe_status(retried)}"))
    return outcomes
