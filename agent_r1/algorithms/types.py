"""Types for the data that models, algorithm and trainer exchange.

    TrainingBatch -> ModelOutputs -> Algorithm.compute_token_weights -> TokenWeights
    MicroBatch    -> TokenOutputs -> Algorithm.compute_loss          -> loss, Metrics

A batch has N tokens, S turns and M trajectories. A micro-batch has n tokens and s turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

Metrics = Mapping[str, Tensor]
"""The values of metrics by name, as scalars without gradient. The value for a batch is the sum over its
micro-batches."""


@dataclass(frozen=True, slots=True, eq=False)
class StateValues:
    """One number for each state that a critic sees: a value, a target, or a loss weight.

    There are two kinds of states: before each token, and after the action of each turn. Values after an action are
    needed only for bootstrapping: if an episode was truncated, the value after its last action estimates the rewards
    that are missing.
    """

    before_token: Tensor
    """(N,) one number for the state before each token."""
    after_action: Tensor
    """(S,) one number for the state after the action of each turn."""


@dataclass(frozen=True, slots=True, eq=False)
class TopTokens:
    """The k tokens that a model finds most likely at the position of each of the N tokens of a batch.

    The tensors are on the CPU.
    """

    ids: Tensor
    """(N, k) int64: the ids of the k most likely tokens at the position of each token."""
    logprobs: Tensor
    """(N, k) float64: the log-probabilities of the k most likely tokens at the position of each token."""

    def select(self, mask: Tensor) -> TopTokens:
        """Return only the rows of the tokens for which ``mask`` (N,) is true."""
        return TopTokens(self.ids[mask], self.logprobs[mask])


@dataclass(frozen=True, slots=True, eq=False)
class ModelOutputs:
    """The outputs of the models for the N tokens of a batch, before the update: float64 tensors on the CPU.

    An output that was not computed is None.
    """

    old_logprobs: Tensor | None = None
    """(N,) log-probability that the policy before the update gives to each token."""
    values: StateValues | None = None
    """The critic's values of all states of the batch."""
    reference_logprobs: Tensor | None = None
    """(N,) log-probability that the reference policy gives to each token."""
    teacher_logprobs: Tensor | None = None
    """(N,) log-probability that the teacher gives to each token."""
    entropy: Tensor | None = None
    """(N,) entropy of the policy before the update at each token, in nats."""
    teacher_top: TopTokens | None = None
    """The teacher's most likely tokens at the position of each token, for the algorithm's ``distillation``."""

    def select(self, mask: Tensor) -> ModelOutputs:
        """Return the outputs for the tokens that ``mask`` (N,) selects.

        ``values.after_action`` (S,) has one number per turn and not per token, so all its numbers are kept.
        """
        old, reference, teacher, entropy = (
            None if column is None else column[mask]
            for column in (self.old_logprobs, self.reference_logprobs, self.teacher_logprobs, self.entropy)
        )
        values = self.values and replace(self.values, before_token=self.values.before_token[mask])
        return ModelOutputs(
            old, values, reference, teacher, entropy, self.teacher_top and self.teacher_top.select(mask)
        )


@dataclass(frozen=True, slots=True, eq=False)
class ValueTargets:
    """The targets of the critic (the values that it should predict), and their weights in the value loss.

    A state without a target has weight 0.
    """

    target: StateValues
    weight: StateValues


@dataclass(frozen=True, slots=True, eq=False)
class TokenWeights:
    """The weights of the N tokens of a batch in the loss: float64 tensors on the CPU.

    The weights are already divided by the denominators of the whole batch. So the loss of a batch is the sum of the
    losses of its micro-batches, for every division into micro-batches.
    """

    advantage: Tensor
    """(N,) the advantage of each token."""
    loss_weight: Tensor
    """(N,) weight of each token in the aggregated loss; 0 for a token that is not trained on."""
    importance_weight: Tensor
    """(N,) factor on the policy loss that corrects the mismatch between sampler and trainer: 1 without a correction; 0
    for a token that ``rejection`` or ``token_mask`` masks."""
    sft_weight: Tensor | None = None
    """(N,) for each token, the weight of the term -log pi in the loss. This term imitates successful trajectories and
    predicts observations. None if the algorithm has no such term."""
    value_targets: ValueTargets | None = None
    """The targets of the critic; None without a critic."""
    kl_coef: float = 0.0
    """The current coefficient of the KL penalty."""
    drift_weight: Tensor | None = None
    """(N,) for each token, the weight of the term |log(pi / pi_old)| in the loss. The loss weight of the token is
    already included. None without KL-Cov."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenOutputs:
    """The outputs of the models for the n tokens of a micro-batch, during the update.

    ``logprobs``, ``entropy``, ``values`` and ``top_logprobs`` have a gradient.
    """

    logprobs: Tensor
    """(n,) log-probability that the current policy pi gives to each token."""
    entropy: Tensor
    """(n,) entropy of the current policy at each token, in nats."""
    old_logprobs: Tensor
    """(n,) log of the denominator of the importance ratio."""
    ratio_unit: Tensor | None = None
    """(n,) int64: the id of the unit to which each token belongs. All tokens of a unit share one importance ratio.

    A unit is all action tokens, or all observation tokens, of one turn or of one trajectory. So observations do not
    change the mean ratio of the actions. None if each token has its own ratio.
    """
    reference_logprobs: Tensor | None = None
    """(n,) log-probability that the reference policy gives to each token. None if the algorithm needs no reference."""
    values: StateValues | None = None
    """The values of the critic: (n,) before the tokens, and (s,) after the actions. None without a critic."""
    old_values: StateValues | None = None
    """The values that the critic had before the update: (n,) before the tokens, and (s,) after the actions."""
    sampler_logprobs: Tensor | None = None
    """(n,) log-probabilities that the sampler recorded. An observation token has log pi instead, without gradient."""
    trajectory: Tensor | None = None
    """(n,) int64: the number of the set of tokens over which ``off_policy_mask`` averages; None without this mask.

    Each trajectory has two sets: its action tokens and its observation tokens. All tokens of a trajectory are in the
    micro-batch.
    """
    top_logprobs: Tensor | None = None
    """(n, k) log pi of the k tokens that the teacher finds most likely; None without ``distillation``."""
    teacher_top_logprobs: Tensor | None = None
    """(n, k) log-probabilities that the teacher gives to its k most likely tokens; None without ``distillation``."""
