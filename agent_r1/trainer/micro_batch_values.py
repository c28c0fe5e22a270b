"""Selection of the numbers of a batch (values, weights, targets) that belong to a micro-batch.

Shapes: n tokens and s turns in a micro-batch.
"""

from __future__ import annotations

from torch import Tensor

from agent_r1.algorithms.types import StateValues, TokenWeights, ValueTargets
from agent_r1.data.micro_batches import MicroBatch


def state_values_at(values: StateValues, micro: MicroBatch, like: Tensor) -> StateValues:
    """Return the part of ``values`` that belongs to a micro-batch, in the dtype and on the device of ``like``.

    ``values`` has a number for each state of the whole batch. The result has a number for the state before each of the
    n tokens of the micro-batch, and a number for the state after each of its s actions.
    """
    return StateValues(values.before_token[micro.tokens].to(like), values.after_action[micro.turns].to(like))


def scaled_weights(weights: TokenWeights, micro: MicroBatch, scale: float, like: Tensor) -> TokenWeights:
    """Return the :class:`TokenWeights` of a micro-batch's tokens, in the dtype and on the device of ``like``.

    ``loss_weight``, ``sft_weight`` and the weights of the critic's targets are multiplied by ``scale``.
    """

    def gather(column: Tensor) -> Tensor:
        return column[micro.tokens].to(like)

    targets = weights.value_targets
    return TokenWeights(
        advantage=gather(weights.advantage),
        loss_weight=scale * gather(weights.loss_weight),
        importance_weight=gather(weights.importance_weight),
        sft_weight=None if weights.sft_weight is None else scale * gather(weights.sft_weight),
        value_targets=None if targets is None else scaled_targets(targets, micro, scale, like),
        kl_coef=weights.kl_coef,
        drift_weight=None if weights.drift_weight is None else gather(weights.drift_weight),
    )


def scaled_targets(targets: ValueTargets, micro: MicroBatch, scale: float, like: Tensor) -> ValueTargets:
    """Return a micro-batch's value targets in the dtype and on the device of ``like``. All weights are multiplied by
    ``scale``.
    """
    weight = state_values_at(targets.weight, micro, like)
    scaled = StateValues(scale * weight.before_token, scale * weight.after_action)
    return ValueTargets(state_values_at(targets.target, micro, like), scaled)
