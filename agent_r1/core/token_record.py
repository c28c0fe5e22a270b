"""Token records: numbers that an update computed for each action token."""

from __future__ import annotations

from dataclasses import dataclass

from agent_r1.core.attempt_id import AttemptId


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """The numbers that one update computed for the action tokens of one turn.

    Each tuple has one number per token, in the order of ``Turn.action_ids``.

    Attributes:
        turn: the index of the turn in its trajectory.
        logprobs: the log-probability under the trainer's weights before the update, at the sampler's temperature. NaN
            if not known, for example if the weights had already changed when the trainer first read the token.
        loss_weights: the weight in the policy loss, multiplied by the importance weight. 0 if the loss mask, or the
            algorithm's ``token_mask`` or ``rejection``, excludes the token.
        entropies: the entropy of the policy at the token, in nats, in the update's first forward pass over the token.
        values: the critic's value of the state before the token; () without a critic.

    Example:
        TokenRecord(attempt, turn=0, logprobs=(-0.3, -0.1), advantages=(0.7, 0.7), loss_weights=(0.01, 0.01),
                    entropies=(0.9, 0.2))
    """

    attempt: AttemptId
    turn: int
    logprobs: tuple[float, ...]
    advantages: tuple[float, ...]
    loss_weights: tuple[float, ...]
    entropies: tuple[float, ...]
    values: tuple[float, ...] = ()
