"""An algorithm as data: an advantage estimator, a policy loss and optional terms.

:meth:`Algorithm.compute_token_weights` runs once per batch, before the update. :meth:`Algorithm.compute_loss` runs once
per micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field, SerializeAsAny
from torch import Tensor

from agent_r1.algorithms.advantages.critics import WithCritic
from agent_r1.algorithms.loss_terms import (
    Correction,
    Distillation,
    Kl,
    KlCov,
    Masks,
    OffPolicyMask,
    Rejection,
    TokenMask,
    mismatch,
    with_kl_penalty,
)
from agent_r1.algorithms.ops import (
    RETURN_TOLERANCE,
    Aggregation,
    aggregation_weights,
    clipped_value_loss,
    importance_ratio,
    kl_k3,
    mean_weights,
)
from agent_r1.algorithms.policy_losses import Clip, PolicyLoss
from agent_r1.algorithms.shaping import Filters, RewardShaping, drop_constant_groups
from agent_r1.algorithms.types import (
    Advantage,
    Component,
    Level,
    Metrics,
    ModelOutputs,
    Need,
    StateValues,
    TokenOutputs,
    TokenWeights,
    ValueTargets,
)
from agent_r1.core.errors import InvalidInput
from agent_r1.data.batch import TokenScope, TrainingBatch
from agent_r1.data.training_sample import Selection


class Algorithm(Component):
    """An advantage estimator, a policy loss and optional terms.

    :func:`agent_r1.algorithms.validation.check_algorithm` checks that the components fit together.

    Example:
        Algorithm(name="dapo", paper="2503.14476", advantage=GroupRelative(scale="std"), loss=Clip(clip_high=0.28))
    """

    name: str

    paper: str = ""
    """The arXiv number of the paper that describes the algorithm."""

    deviations: str = ""
    """How this implementation differs from the paper."""

    advantage: SerializeAsAny[Advantage]
    """The advantage estimator."""

    loss: SerializeAsAny[PolicyLoss] = Clip()
    """The policy loss."""

    ratio_level: Level = "token"
    """The unit (token, turn or trajectory) whose tokens share one importance ratio. The ratio of a turn or trajectory
    is the geometric mean over its tokens (GSPO)."""

    ratio_denominator: Literal["old_policy", "sampler"] = "old_policy"
    """Denominator of the importance ratio. sampler: the sampler's policy. old_policy: the policy before the update, or
    the sampler's policy if the batch has tokens from older weights and ``correction`` is not set."""

    aggregation: Aggregation = "token_mean"
    """How the losses of tokens are averaged. token_mean: all tokens have equal weight. turn_mean: all turns have equal
    weight. trajectory_mean: all trajectories have equal weight. group_mean: all groups have equal weight. constant: the
    sum over all tokens, divided by the number of trajectories and by the setting ``length``."""

    length: float | None = Field(default=None, gt=0)
    """Number of tokens in the denominator of the aggregation "constant". Other aggregations do not use it."""

    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""

    sft_coef: float = Field(default=0.0, ge=0)
    """Weight of an imitation loss: the mean of -log pi over action tokens of trajectories with a return above 0 (VAPO,
    arXiv:2504.05118, section 4.3)."""

    observation_nll_coef: float = Field(default=0.0, ge=0)
    """Weight of a loss for predicting the environment: the mean of -log pi over observation tokens (ECHO)."""

    kl: Kl | None = None
    distillation: Distillation | None = None
    correction: Correction | None = None
    rejection: Rejection | None = None
    shaping: RewardShaping = RewardShaping()
    filters: Filters = Filters()
    masks: Masks = Masks()

    token_mask: SerializeAsAny[TokenMask | None] = None
    """The rule that chooses which tokens have a policy loss. none: all tokens."""

    off_policy_mask: OffPolicyMask | None = None
    kl_cov: KlCov | None = None

    constant_groups: Literal["keep", "drop"] = "keep"
    """Treatment of groups whose returns are all equal. keep: they count in the denominators of the loss, as in GRPO.
    drop: they are removed before the denominators are computed (dynamic sampling of DAPO, arXiv:2503.14476, section
    3.2). Returns are compared without reward shaping and KL penalty."""

    max_refill_rounds: int = Field(default=0, ge=0)
    """Limit on the number of new groups that replace filtered groups in one step: ``max_refill_rounds`` *
    ``groups_per_step`` (DAPO, arXiv:2503.14476, section 3.2). 0: no group is replaced."""

    epochs: int = Field(default=1, ge=1)
    """Number of passes over the whole batch in one update."""

    @property
    def needs(self) -> frozenset[Need]:
        """What a run must provide for the algorithm, such as "critic" for a value model."""
        models: dict[Need, Component | None] = {"reference": self.kl, "teacher": self.distillation}
        return self.advantage.needs | {model for model, term in models.items() if term is not None}

    @property
    def token_scope(self) -> TokenScope:
        """The tokens that a training batch needs: only actions ("actions"), or also observations ("all")."""
        return "actions" if self.masks == Masks() and not self.observation_nll_coef else "all"

    @property
    def corrects_mismatch(self) -> bool:
        """Whether the algorithm compares the policies of trainer and sampler.

        If so, a forward pass before the update is needed.
        """
        masks = self.token_mask is not None and self.token_mask.compares_sampler
        return self.correction is not None or self.rejection is not None or masks

    @property
    def needs_whole_trajectories(self) -> bool:
        """Whether all tokens of a trajectory must be in the same micro-batch."""
        return self.ratio_level == "trajectory" or self.off_policy_mask is not None

    @property
    def warmup(self) -> int:
        """Number of updates at the start of the run in which only the critic is trained."""
        return self.advantage.warmup if isinstance(self.advantage, WithCritic) else 0

    @property
    def syncs_reference(self) -> bool:
        """Whether the reference policy changes during a run."""
        return self.kl is not None and self.kl.sync_steps > 0

    def select(self, selection: Selection, version: int) -> Selection:
        """Return ``selection`` without the samples that the settings ``filters`` and ``constant_groups`` remove.

        The removed samples are in ``excluded`` of the result.

        ``version`` is the version of the current weights.
        """
        varied = drop_constant_groups(selection) if self.constant_groups == "drop" else selection
        return self.filters.apply(varied, version)

    def ratio_unit(self, batch: TrainingBatch) -> Tensor | None:
        """Return the index of each token's unit (turn or trajectory): (N,); None if each token has its own ratio.

        All tokens of a unit share one importance ratio.
        """
        if self.ratio_level == "token":
            return None
        return batch.token_turn if self.ratio_level == "turn" else batch.token_trajectory

    def compute_token_weights(self, batch: TrainingBatch, outputs: ModelOutputs, kl_coef: float = 0.0) -> TokenWeights:
        """Return the advantages and the loss weights of the N tokens of a batch of whole groups.

        ``outputs`` are the models' outputs before the update, and ``kl_coef`` is the current coefficient of the KL
        penalty.
        """
        advantage, targets = self._compute_advantages(batch, outputs, kl_coef)  # (N,)
        # Loss mask: the action tokens of the trajectories that the loss includes. The other trajectories count in
        # baselines only.
        included = torch.tensor([reason is None for reason in batch.loss_excluded])  # (M,)
        trained = included[batch.token_trajectory]  # (N,)
        loss_mask = trained & batch.action_mask if self.masks.loss else trained  # (N,)
        accepted = torch.ones_like(loss_mask)  # (N,) observations are always accepted: the policy did not sample them
        if self.rejection is not None and outputs.old_logprobs is not None:
            log_ratio, unit = mismatch(batch, outputs.old_logprobs, self.rejection.level)  # of the action tokens
            accepted = accepted.masked_scatter(batch.action_mask, self.rejection.accepted(log_ratio, unit))
            loss_mask = loss_mask & accepted if self.rejection.denominator == "accepted" else loss_mask
        # Loss weight: tokens outside the loss mask have weight 0.
        loss_weight = torch.zeros(len(batch.ids), dtype=torch.float64)  # (N,)
        if bool(loss_mask.any()):
            unit = batch.token_turn if self.aggregation == "turn_mean" else batch.token_trajectory
            unit = batch.token_group if self.aggregation == "group_mean" else unit
            loss_weight[loss_mask] = aggregation_weights(unit[loss_mask], self.aggregation, self.length)
        # Importance weight: the correction of the mismatch with the sampler; 0 on tokens that a rule masks.
        importance_weight = accepted.double()  # (N,)
        if self.correction is not None and outputs.old_logprobs is not None:
            importance_weight = importance_weight * self.correction_weights(batch, outputs.old_logprobs)
        drift_weight = None
        if (self.token_mask is not None or self.kl_cov is not None) and bool(loss_mask.any()):
            kept, drift_weight = self._apply_token_rules(batch, outputs, advantage, loss_mask)  # (N,)
            importance_weight = importance_weight * kept
        # Supervised terms: -log pi of successful trajectories, and of observations.
        sft_weight = None
        if self.sft_coef or self.observation_nll_coef:
            # successful, observed: (N,) bool
            successful = (batch.returns > RETURN_TOLERANCE)[batch.token_trajectory] & batch.action_mask & trained
            observed = ~batch.action_mask & trained
            sft_weight = self.sft_coef * mean_weights(successful) + self.observation_nll_coef * mean_weights(observed)

        if targets is not None:
            # The critic has no targets in trajectories that are excluded from the loss.
            before = targets.weight.before_token * trained  # (N,)
            after = targets.weight.after_action * included[batch.turn_trajectory]  # (S,)
            targets = replace(targets, weight=StateValues(before, after))
        return TokenWeights(
            advantage=advantage,
            loss_weight=loss_weight,
            importance_weight=importance_weight,
            sft_weight=sft_weight,
            value_targets=targets,
            kl_coef=kl_coef,
            drift_weight=drift_weight,
        )

    def compute_loss(self, tokens: TokenOutputs, weights: TokenWeights) -> tuple[Tensor, Metrics]:
        """Return (loss, metrics) of a micro-batch of n tokens. The loss of a batch is the sum over its micro-batches.

        Each token t has these weights (see :class:`agent_r1.algorithms.types.TokenWeights`): w is ``loss_weight``, s is
        ``sft_weight``, d is ``drift_weight``, and c is ``importance_weight``. If ``off_policy_mask`` masks the token, c
        is 0. A is the advantage of the token, and r its importance ratio. pi is the current policy, and pi_old is the
        policy in the denominator of the importance ratio. H is the entropy of pi, KL the divergence from the reference
        policy, and D the divergence from the teacher. The loss is

            L = sum_t w_t c_t PolicyLoss(r_t, A_t) - entropy_coef sum_t w_t H_t + kl_coef sum_t w_t KL_t
                + distillation_coef sum_t w_t D_t - sum_t s_t log pi_t
                + sum_t w_t d_t |log(pi_t / pi_old_t)| + value loss.
        """
        ratio = importance_ratio(tokens.logprobs, tokens.old_logprobs, tokens.ratio_unit)  # (n,) r = pi / pi_old
        weight = weights.loss_weight * weights.importance_weight  # (n,)
        if self.off_policy_mask is not None:
            weight = weight * self.off_policy_mask.kept(weights.advantage, tokens)
        losses = self.loss.compute(ratio, weights.advantage, tokens)  # (n,)
        _check_shape(f"loss {self.loss.name or type(self.loss).__name__}", losses, ratio.shape)
        policy_loss = (weight * losses).sum()
        clipped = self.loss.clipped_mask(ratio, weights.advantage, tokens)  # (n,)
        metrics = {
            "policy_loss": policy_loss.detach(),
            "clip_fraction": (weight * clipped).sum().detach(),
            "kl_old": (weights.loss_weight * kl_k3(tokens.old_logprobs, tokens.logprobs)).sum().detach(),
        }
        loss = policy_loss
        # The terms below have no importance weight, because the terms are not policy gradients.
        if self.entropy_coef:
            loss = loss - self.entropy_coef * (weights.loss_weight * tokens.entropy).sum()
        if self.kl is not None and self.kl.placement == "loss" and tokens.reference_logprobs is not None:
            token_ratio = importance_ratio(tokens.logprobs, tokens.old_logprobs)  # (n,)
            kl = self.kl.divergence(tokens.logprobs, tokens.reference_logprobs, token_ratio)  # (n,)
            loss = loss + weights.kl_coef * (weights.loss_weight * kl).sum()
        if self.distillation is not None:
            divergence = self.distillation.divergence(tokens)  # (n,)
            distillation_loss = self.distillation.coefficient * (weights.loss_weight * divergence).sum()
            loss, metrics["distillation_loss"] = loss + distillation_loss, distillation_loss.detach()
        if weights.drift_weight is not None:
            drift = (tokens.logprobs - tokens.old_logprobs).abs()  # (n,)
            loss = loss + (weights.loss_weight * weights.drift_weight * drift).sum()
        if weights.sft_weight is not None:
            sft_loss = -(weights.sft_weight * tokens.logprobs).sum()
            loss, metrics["sft_loss"] = loss + sft_loss, sft_loss.detach()
        if tokens.values is not None and tokens.old_values is not None and weights.value_targets is not None:
            value_loss = self.compute_value_loss(tokens.values, tokens.old_values, weights.value_targets)
            loss, metrics["value_loss"] = loss + value_loss, value_loss.detach()
        return loss, metrics

    def policy_gradient_mask(self, weights: TokenWeights) -> Tensor:
        """Return for each token whether it has a nonzero weight in any term of the policy's loss: (N,) bool."""
        in_loss = weights.loss_weight != 0  # (N,)
        mask = in_loss & (weights.importance_weight != 0)
        if not self.loss.regularizes:
            mask &= weights.advantage != 0
        kl_in_loss = self.kl is not None and self.kl.placement == "loss" and bool(weights.kl_coef)
        if self.entropy_coef or kl_in_loss or self.distillation is not None:
            mask |= in_loss
        if weights.drift_weight is not None:
            mask |= in_loss & (weights.drift_weight != 0)
        if weights.sft_weight is not None:
            mask |= weights.sft_weight != 0
        return mask

    def correction_weights(self, batch: TrainingBatch, old_logprobs: Tensor) -> Tensor:
        """Return the importance weight that ``correction`` gives to each token: (N,). ``correction`` must not be None.

        Observations have weight 1.
        """
        assert self.correction is not None
        weight = torch.ones(len(batch.ids), dtype=torch.float64)
        log_ratio, unit = mismatch(batch, old_logprobs, self.correction.level)
        return weight.masked_scatter(batch.action_mask, self.correction.weight(log_ratio, unit))

    def _compute_advantages(
        self, batch: TrainingBatch, outputs: ModelOutputs, kl_coef: float
    ) -> tuple[Tensor, ValueTargets | None]:
        """Return (advantage of each token (N,), targets of the critic or None).

        Usually the estimator gets only the action tokens. Then observation tokens have advantage 0 and no target. If
        ``masks.advantage`` or ``masks.loss`` is off, the estimator gets all tokens.
        """
        # Time steps for the advantage: a summary turn and the turn after it are one time step. Ratios and aggregation
        # still use the S turns.
        steps, last_turns = batch.join_summaries()  # (D,) the last turn of each time step
        # Rewards: apply the shaping, and subtract the KL penalty if it is in the reward.
        rewarded = self.shaping.apply(steps)
        if self.kl is not None and self.kl.placement == "reward":
            rewarded = with_kl_penalty(rewarded, outputs.reference_logprobs, kl_coef)
        # After actions, the estimator needs only the critic's values at the end of each time step: (S,) -> (D,).
        values = outputs.values and replace(outputs.values, after_action=outputs.values.after_action[last_turns])
        outputs = replace(outputs, values=values)
        compact = self.masks.loss and self.masks.advantage and not bool(batch.action_mask.all())
        if not self.masks.loss:  # observations count as actions
            seen, seen_outputs = replace(rewarded, action_mask=torch.ones_like(batch.action_mask)), outputs
        elif compact:
            seen, seen_outputs = rewarded.actions(), outputs.select(batch.action_mask)
        else:
            seen, seen_outputs = rewarded, outputs
        advantage = self.advantage.compute(seen, seen_outputs)
        field = f"advantage {self.advantage.name or type(self.advantage).__name__}"
        _check_shape(field, advantage, seen.ids.shape)
        if not bool(advantage.isfinite().all()):
            raise InvalidInput(field, got="a number that is not finite", do="return finite advantages")
        advantage = advantage.double()
        critic = self.advantage if isinstance(self.advantage, WithCritic) else None
        targets = None if critic is None else critic.value_targets(seen, seen_outputs)
        if compact:
            advantage = _scatter(advantage, batch.action_mask)
            targets = targets and ValueTargets(
                replace(targets.target, before_token=_scatter(targets.target.before_token, batch.action_mask)),
                replace(targets.weight, before_token=_scatter(targets.weight.before_token, batch.action_mask)),
            )
        return advantage, targets and _scatter_turns(targets, last_turns, len(batch.turn_trajectory))

    def _apply_token_rules(
        self, batch: TrainingBatch, outputs: ModelOutputs, advantage: Tensor, loss_mask: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return a pair of tensors, each (N,): whether each token is kept, and the penalty weight of each token.

        The first tensor (bool) is False for the tokens that the setting ``token_mask`` masks. The second tensor holds
        the weights of the setting ``kl_cov``. The second tensor is None if ``kl_cov`` is not set.

        ``loss_mask`` (N,) must select at least one token. A token that ``loss_mask`` does not select is always kept,
        and has the penalty weight 0.
        """
        seen, seen_outputs, seen_advantage = batch.tokens(loss_mask), outputs.select(loss_mask), advantage[loss_mask]
        kept, drift_weight = torch.ones_like(loss_mask), None
        if self.token_mask is not None:
            kept = kept.masked_scatter(loss_mask, self.token_mask.kept(seen, seen_outputs, seen_advantage))
        if self.kl_cov is not None:
            drift_weight = _scatter(self.kl_cov.weight(seen, seen_outputs, seen_advantage), loss_mask)
        return kept, drift_weight

    def compute_value_loss(self, values: StateValues, old_values: StateValues, targets: ValueTargets) -> Tensor:
        """Return the critic's loss, a scalar."""
        assert isinstance(self.advantage, WithCritic)
        clip, target, weight = self.advantage.value_clip, targets.target, targets.weight
        before = clipped_value_loss(values.before_token, old_values.before_token, target.before_token, clip)  # (n,)
        after = clipped_value_loss(values.after_action, old_values.after_action, target.after_action, clip)  # (s,)
        return (weight.before_token * before).sum() + (weight.after_action * after).sum()


def _check_shape(field: str, numbers: Tensor, shape: torch.Size) -> None:
    if isinstance(numbers, Tensor) and numbers.shape == shape:
        return
    is_tensor = isinstance(numbers, Tensor)
    got = f"numbers of shape {tuple(numbers.shape)}" if is_tensor else f"an object of type {type(numbers).__name__}"
    raise InvalidInput(field, got=got, do=f"return one number per token, not an average: {tuple(shape)}")


def _scatter_turns(targets: ValueTargets, turns: Tensor, count: int) -> ValueTargets:
    """Return a copy of ``targets`` whose tensors ``after_action`` have one element per turn, not one per time step.

    A time step is one turn, or several turns that :meth:`TrainingBatch.join_summaries` joined. There are D time steps,
    and S = ``count`` turns. ``turns`` (D,) is the index of the last turn of each time step.

    Only ``targets.target.after_action`` and ``targets.weight.after_action`` change: from shape (D,) to shape (S,). The
    last turn of each time step gets the target and the weight of the time step. All other turns get target 0 and
    weight 0.
    """

    def scatter(values: StateValues) -> StateValues:
        after = values.after_action.new_zeros(count).index_put((turns,), values.after_action)  # (S,)
        return replace(values, after_action=after)

    return ValueTargets(scatter(targets.target), scatter(targets.weight))


def _scatter(x: Tensor, mask: Tensor) -> Tensor:
    """Return a tensor (N,) that holds the n elements of ``x``, in their order, at the n true places of ``mask``.

    All other elements of the result are 0.
    """
    return torch.zeros(len(mask), dtype=x.dtype).masked_scatter(mask, x)


RATIO_LEVELS: Mapping[Level, str] = {
    "token": "",
    "turn": ", geometric mean over the turn",
    "trajectory": ", geometric mean over the trajectory",
}


def objective(algorithm: Algorithm) -> str:
    """Return the objective of the algorithm in one line, with clauses separated by semicolons."""
    return "; ".join(clauses(algorithm))


def clauses(algorithm: Algorithm) -> Iterator[str]:
    """Yield the clauses of the objective as text, such as "A = R - mean R of the group"."""
    aggregated = algorithm.aggregation.replace("_", " ")
    if algorithm.length is not None:
        aggregated = f"sum over tokens / ({algorithm.length:g} * trajectories)"
    yield f"maximize the {aggregated} of {algorithm.loss.formula}"
    if algorithm.loss.uses_ratio:
        denominator = "pi_old" if algorithm.ratio_denominator == "old_policy" else "mu"
        yield f"r = pi / {denominator}{RATIO_LEVELS[algorithm.ratio_level]}"
    yield f"A = {algorithm.advantage.formula}"
    if algorithm.shaping.formula:
        yield algorithm.shaping.formula
    masks = (algorithm.token_mask, algorithm.off_policy_mask, algorithm.kl_cov)
    terms = (algorithm.kl, algorithm.distillation, algorithm.correction, algorithm.rejection, *masks)
    yield from (term.formula for term in terms if term is not None)
    added = (
        (algorithm.entropy_coef, "the entropy"),
        (algorithm.sft_coef, "the token mean of log pi of trajectories with R > 0"),
        (algorithm.observation_nll_coef, "the token mean of log pi of observations"),
    )
    yield from (f"plus {coefficient:g} {term}" for coefficient, term in added if coefficient)
    if isinstance(algorithm.advantage, WithCritic):
        yield from _critic_clauses(algorithm.advantage)
    if algorithm.filters.formula:
        yield f"left out: {algorithm.filters.formula}"
    if algorithm.constant_groups == "drop":
        yield "groups whose returns are all equal are dropped before the denominators"
    if algorithm.max_refill_rounds:
        yield f"up to {algorithm.max_refill_rounds} rounds of further groups in their place"
    yield from (f"{name} mask off" for name, is_on in algorithm.masks if not is_on)
    if algorithm.epochs > 1:
        yield f"{algorithm.epochs} epochs"


def _critic_clauses(advantage: WithCritic) -> Iterator[str]:
    yield f"V within {advantage.value_clip:g} of V_old regresses on A + V_old"
    if advantage.bootstrap:
        yield "if an episode was truncated, V of its last state follows"
    if advantage.warmup:
        yield f"only the critic for {advantage.warmup} updates"
