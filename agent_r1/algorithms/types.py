"""The values that travel between the models, an algorithm and the trainer.

    TrainingBatch -> ModelOutputs -> Algorithm.compute_token_weights -> TokenWeights
    MicroBatch    -> TokenOutputs -> Algorithm.compute_loss          -> loss, Metrics

N tokens, S turns and M trajectories of a batch; n tokens and s turns of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

Metrics = Mapping[str, Tensor]
"""Detached scalars by name. Each is a micro-batch's share of the value, so the values of all micro-batches add up."""


@dataclass(frozen=True, slots=True, eq=False)
class StateValues:
    """One number for each state that a critic sees: a value, a target, or a loss weight.

    Advantages are computed at the states before tokens. The states after actions are needed only to bootstrap
    truncated episodes: the value before the last token cannot be its own target.
    """

    before_token: Tensor
    """(N,) for the state before each token."""
    after_action: Tensor
    """(S,) for the state that each turn's action leads to."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelOutputs:
    """Model outputs for the N tokens of a batch, before the update. float64 on the CPU; None if not computed."""

    old_logprobs: Tensor | None = None
    """(N,) log-probabilities under the policy before the update."""
    values: StateValues | None = None
    """The critic's values."""
    reference_logprobs: Tensor | None = None
    """(N,) log-probabilities under the reference policy."""
    teacher_logprobs: Tensor | None = None
    """(N,) log-probabilities under the teacher policy."""
    entropy: Tensor | None = None
    """(N,) entropy of the policy before the update at each token."""

    def select(self, mask: Tensor) -> ModelOutputs:
        """Return the outputs for the tokens of ``mask`` (N,). Values after actions are kept."""
        old, reference, teacher, entropy = (
            None if column is None else column[mask]
            for column in (self.old_logprobs, self.reference_logprobs, self.teacher_logprobs, self.entropy)
        )
        values = self.values and replace(self.values, before_token=self.values.before_token[mask])
        return ModelOutputs(old, values, reference, teacher, entropy)


@dataclass(frozen=True, slots=True, eq=False)
class ValueTargets:
    """Regression targets of the critic, and the weight of each state in the value loss (0: no target)."""

    target: StateValues
    weight: StateValues


@dataclass(frozen=True, slots=True, eq=False)
class TokenWeights:
    """The weights of the N tokens in the loss. float64 on the CPU.

    Denominators are computed over the whole batch. The loss of a batch is therefore the plain sum over its
    micro-batches, whichever way it is divided.
    """

    advantage: Tensor
    """(N,) the advantage A."""
    loss_weight: Tensor
    """(N,) the token's weight in the aggregated loss; 0 if the loss mask excludes it."""
    importance_weight: Tensor
    """(N,) factor on the policy loss that corrects the mismatch between sampler and trainer; 1 without correction, 0 if
    a rejection or the token mask leaves the token out."""
    sft_weight: Tensor | None = None
    """(N,) weight of -log pi of the token (imitation of successes, prediction of observations); None if unused."""
    value_targets: ValueTargets | None = None
    """Targets of the critic; None without one."""
    kl_coef: float = 0.0
    """The present coefficient of the KL penalty."""
    drift_weight: Tensor | None = None
    """(N,) weight of |log(pi / pi_old)| at the token, times its loss weight (KL-Cov); None if unused."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenOutputs:
    """Model outputs for the n tokens of a micro-batch, during the update. ``logprobs``, ``entropy`` and ``values``
    carry gradient."""

    logprobs: Tensor
    """(n,) log pi of each token."""
    entropy: Tensor
    """(n,) entropy of pi at each token."""
    old_logprobs: Tensor
    """(n,) the denominator of the importance ratio, as log-probabilities."""
    ratio_unit: Tensor | None = None
    """(n,) int64: the turn or trajectory whose tokens share one importance ratio; None if each token has its own.

    Actions and observations must be in different units: observations would dilute the mean ratio of the actions.
    """
    reference_logprobs: Tensor | None = None
    """(n,) log-probabilities under the reference policy."""
    values: StateValues | None = None
    """The critic's values, (n,) and (s,)."""
    old_values: StateValues | None = None
    """The critic's values before the update, (n,) and (s,)."""
    sampler_logprobs: Tensor | None = None
    """(n,) log-probabilities recorded by the sampler; those of pi for observations."""
    trajectory: Tensor | None = None
    """(n,) int64: the trajectory of each token, a different number for its observations. All its tokens are here if the
    algorithm trains on whole trajectories."""
