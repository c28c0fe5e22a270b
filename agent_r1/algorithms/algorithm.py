"""An algorithm as data: an advantage estimator, a policy loss and optional terms.

:meth:`Algorithm.compute_token_weights` runs once per batch, :meth:`Algorithm.compute_loss` once per micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    Llds,
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
    discounted_sums,
    group_std,
    has_variance,
    importance_ratio,
    kl_k3,
    mean_weights,
    reaches,
)
from agent_r1.algorithms.policy_losses import Clip, PolicyLoss
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
from agent_r1.core.trajectory import Turn
from agent_r1.data.batch import (
    Excluded,
    Selection,
    TokenScope,
    TrainingBatch,
    TrainingSample,
    segment_count,
    segment_first,
    segment_max,
    segment_mean,
)

CONSTANT = "all returns of its group are equal"


class Filters(Component):
    """Rules that exclude attempts from training. A filter is off if its value is None or false.

    ``overlong`` and ``empty_turn`` exclude an attempt from the loss only, not from its group's baseline. All others
    remove attempts from the batch, one after another in the order of the fields.
    """

    staleness: int | None = Field(default=None, ge=0)
    """Remove attempts with a token that was sampled more than this number of updates ago. none: off."""

    greedy: bool = False
    """Remove a whole group if it has no greedy attempt, or if its greedy attempt could not be scored."""

    overlong: bool = False
    """Exclude an attempt from the loss if it reached the limit of turns or tokens (overlong filtering of DAPO,
    arXiv:2503.14476, section 3.4)."""

    empty_turn: bool = False
    """Exclude an attempt from the loss if it has an empty turn (SimpleTIR, arXiv:2509.02479). A turn is empty if all
    its calls are unreadable, or if it has no calls and its text is empty or cut off."""

    success: float | None = None
    """Remove attempts whose return is below this number. none: off."""

    top_variance: float | None = Field(default=None, gt=0, le=1)
    """Keep only this share of the groups: the groups with the largest variance of returns (StarPO-S, arXiv:2504.20073).
    none: off."""

    def apply(self, selection: Selection, version: int) -> Selection:
        """Return the selection without the samples that a filter removes. The current weights have ``version``."""
        if self.staleness is not None:
            ages = [version - sample.version for sample in selection.samples]
            stale = [f"stale: sampled {age} updates ago" if age > self.staleness else None for age in ages]
            selection = _without(selection, stale)
        if self.greedy:
            failures = [
                None if sample.greedy_return is not None else sample.greedy_failure or "there is none"
                for sample in selection.samples
            ]
            reasons = [failure and f"the greedy attempt could not be scored: {failure}" for failure in failures]
            selection = _without(selection, reasons)
        if self.success is not None:
            successes = reaches(_returns(selection.samples)[0], self.success).tolist()
            selection = _without(selection, [None if success else "unsuccessful" for success in successes])
        if self.top_variance is not None:
            selection = _without(selection, top_variance(selection.samples, self.top_variance))
        return selection

    def loss_excluded(self, samples: Sequence[TrainingSample]) -> list[str | None]:

        def reason(sample: TrainingSample) -> str | None:
            if self.overlong and sample.trajectory.truncated:
                return "overlong"
            return "empty turn" if self.empty_turn and any(map(_is_empty, sample.trajectory.turns)) else None

        return list(map(reason, samples))

    @property
    def formula(self) -> str:
        words = {
            "staleness": f"older than {self.staleness} updates",
            "greedy": "without greedy attempt",
            "overlong": "out of turns or tokens (still in the baseline)",
            "empty_turn": "with an empty turn (still in the baseline)",
            "success": f"return below {self.success}",
            "top_variance": f"group not among the {self.top_variance} of most variance",
        }
        return "; ".join(words[name] for name, value in self if value is not None and value is not False)


class SoftOverlong(Component):
    """A penalty for long trajectories: the soft overlong punishment of DAPO (arXiv:2503.14476, equation 13).

    |y| is the number of action tokens of a trajectory, L_max is ``max_tokens``, and L_cache is ``cache_tokens``:

        R_length = 0                                  if |y| <= L_max - L_cache
                   ((L_max - L_cache) - |y|) / L_cache  if L_max - L_cache < |y| <= L_max
                   -1                                 if |y| > L_max

    R_length * ``penalty`` is added to the outcome reward. The defaults are from the paper.
    """

    max_tokens: int = Field(default=20480, ge=1)
    """A trajectory with this number of action tokens or more gets the full penalty."""

    cache_tokens: int = Field(default=4096, ge=1)
    """Number of action tokens over which the penalty grows linearly from 0 to the full penalty. The growth ends at
    ``max_tokens`` action tokens."""

    penalty: float = Field(default=1.0, gt=0)
    """The full penalty, a positive number that is subtracted from the outcome reward."""

    @property
    def formula(self) -> str:
        start = self.max_tokens - self.cache_tokens
        return f"R less {self.penalty:g} clip((|y| - {start}) / {self.cache_tokens}, 0, 1) for its |y| action tokens"

    def penalties(self, lengths: Tensor) -> Tensor:
        """Return the penalty (0 or negative) of each trajectory: (M,). ``lengths`` (M,) are in action tokens."""
        over = lengths - (self.max_tokens - self.cache_tokens)
        return -self.penalty * (over / self.cache_tokens).clamp(0, 1)


class RewardShaping(Component):
    """Changes of rewards before the advantages are computed."""

    length: float = Field(default=0.0, ge=0)
    """Weight w of the penalty for long trajectories, which is subtracted from the outcome reward. The penalty is w *
    max(0, mean return of the group) * (number of action tokens of the trajectory / largest number of action tokens of
    any trajectory in the group)."""

    turns: float = Field(default=0.0, ge=0)
    """Weight w of the penalty for turns, which is subtracted from the outcome reward. The penalty is w * max(0, mean
    return of the group) * (number of turns of the trajectory / largest number of turns of any trajectory in the
    group)."""

    process_scale: Literal["none", "largest"] = "none"
    """How process rewards are scaled. none: no scaling. largest: division by the largest absolute return to go in the
    batch (arXiv:2511.14460). The return to go of a token is the sum of the process rewards from this token to the end
    of the trajectory."""

    overlong: SoftOverlong | None = None

    @property
    def formula(self) -> str:
        """A description of how the rewards are changed."""
        penalties = [f"{share:g} {unit}" for share, unit in ((self.length, "length"), (self.turns, "turns")) if share]
        penalty = (
            f"R less mean R of the group (if above 0) times ({' + '.join(penalties)}, each over the group's largest)"
        )
        scaled = "process rewards over their largest sum from a turn on"
        overlong = [] if self.overlong is None else [self.overlong.formula]
        parts = [*([scaled] if self.process_scale == "largest" else []), *([penalty] if penalties else []), *overlong]
        return "; ".join(parts)

    def apply(self, batch: TrainingBatch) -> TrainingBatch:
        if self.process_scale == "largest":
            # process rewards are the token rewards without the outcome rewards: (N,)
            outcome = torch.zeros_like(batch.token_rewards).index_add(0, batch.last_tokens, batch.outcome_rewards)
            process = batch.token_rewards - outcome  # (N,)
            largest = discounted_sums(process, batch.token_trajectory, 1.0).abs().max()
            batch = replace(batch, token_rewards=outcome + process / (largest + 1e-6))
        if not self.length and not self.turns and self.overlong is None:
            return batch
        lengths = segment_count(batch.actions().token_trajectory).double()  # (M,)
        penalty = torch.zeros_like(lengths) if self.overlong is None else self.overlong.penalties(lengths)  # (M,)
        if self.length or self.turns:
            penalty = penalty + self._relative_penalties(batch, lengths)
        # the penalty is a part of the outcome reward
        rewards = batch.token_rewards.index_add(0, batch.last_tokens, penalty)  # (N,)
        return replace(batch, token_rewards=rewards, outcome_rewards=batch.outcome_rewards + penalty)

    def _relative_penalties(self, batch: TrainingBatch, lengths: Tensor) -> Tensor:
        # (M,) the penalties of ``length`` and ``turns``, 0 or negative; ``lengths`` (M,) are in action tokens
        group = batch.trajectory_group
        turns = segment_count(batch.turn_trajectory).double()  # (M,)
        # the penalty as a share of the mean return of the group: (M,)
        share = self.length * lengths / segment_max(lengths, group)[group]
        share = share + self.turns * turns / segment_max(turns, group)[group]
        return -segment_mean(batch.returns, group).clamp(min=0)[group] * share  # no penalty if the mean is negative


def drop_constant_groups(selection: Selection) -> Selection:
    """Return the selection without groups of one sample, and without groups whose returns are all equal."""
    returns, groups = _returns(selection.samples)
    return _without(selection, [None if varies else CONSTANT for varies in has_variance(returns, groups).tolist()])


def _without(selection: Selection, reasons: Sequence[str | None]) -> Selection:
    # ``reasons`` holds for each sample the reason to exclude it, or None
    judged = list(zip(selection.samples, reasons, strict=True))
    removed = [Excluded(sample.trajectory.attempt, reason) for sample, reason in judged if reason is not None]
    kept = tuple(sample for sample, reason in judged if reason is None)
    return Selection(kept, (*selection.excluded, *removed))


def _is_empty(turn: Turn) -> bool:
    message = turn.action.message
    if message.calls:
        return all(call.error is not None for call in message.calls)
    return turn.finish_reason == "length" or not message.text.strip()


def top_variance(samples: Sequence[TrainingSample], share: float) -> list[str | None]:
    """Return for each sample why its group is not in the ``share`` of most variance (at least one group), or None."""
    if not samples:
        return []
    returns, groups = _returns(samples)
    present, place = torch.unique(groups, return_inverse=True)  # (groups,), (samples,)
    first = segment_first(place)  # (groups,) the first sample of each group; samples are ordered by group
    ranked = group_std(returns, groups)[first].argsort(descending=True, stable=True)
    kept = set(present[ranked[: max(1, round(share * len(present)))]].tolist())
    return [None if sample.group in kept else "little variance" for sample in samples]


def _returns(samples: Sequence[TrainingSample]) -> tuple[Tensor, Tensor]:
    returns = torch.tensor([sample.total for sample in samples], dtype=torch.float64)
    return returns, torch.tensor([sample.group for sample in samples], dtype=torch.int64)


class Algorithm(Component):
    """An advantage estimator, a policy loss and optional terms. See :mod:`agent_r1.algorithms.validation`."""

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
    llds: Llds | None = None

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
        """Whether trainer and sampler are compared, which needs a forward pass before the update."""
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
        """Return ``selection``, of which ``filters`` and ``constant_groups`` move samples to ``excluded``."""
        varied = drop_constant_groups(selection) if self.constant_groups == "drop" else selection
        return self.filters.apply(varied, version)

    def ratio_unit(self, batch: TrainingBatch) -> Tensor | None:
        """Return the index (N,) of the turn or trajectory whose tokens share one importance ratio; None for tokens."""
        if self.ratio_level == "token":
            return None
        return batch.token_turn if self.ratio_level == "turn" else batch.token_trajectory

    def compute_token_weights(self, batch: TrainingBatch, outputs: ModelOutputs, kl_coef: float = 0.0) -> TokenWeights:
        """Return the advantages and the loss weights of the N tokens of a batch of whole groups.

        ``outputs`` are the models' outputs before the update. ``kl_coef`` is the coefficient of the KL penalty.
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

        Token t has the weights w (``loss_weight``), c (``importance_weight``, 0 if ``off_policy_mask`` masks it), s
        (``sft_weight``) and d (``drift_weight``), the advantage A and the importance ratio r = pi / pi_old. H is the
        entropy of pi, KL the divergence from the reference policy, and D the divergence from the teacher.

            L = sum_t w_t c_t PolicyLoss(r_t, A_t) - entropy_coef sum_t w_t H_t + kl_coef sum_t w_t KL_t
                + distillation_coef sum_t w_t D_t - sum_t s_t log pi_t
                + sum_t w_t d_t |log(pi_t / pi_old_t)| + llds_coef sum_t w_t LLDS_t + value loss
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
        if self.llds is not None:
            llds_loss = (
                self.llds.coefficient * (weights.loss_weight * self.llds.penalty(weights.advantage, tokens)).sum()
            )
            loss, metrics["llds_loss"] = loss + llds_loss, llds_loss.detach()
        if weights.sft_weight is not None:
            sft_loss = -(weights.sft_weight * tokens.logprobs).sum()
            loss, metrics["sft_loss"] = loss + sft_loss, sft_loss.detach()
        if tokens.values is not None and tokens.old_values is not None and weights.value_targets is not None:
            value_loss = self.compute_value_loss(tokens.values, tokens.old_values, weights.value_targets)
            loss, metrics["value_loss"] = loss + value_loss, value_loss.detach()
        return loss, metrics

    def policy_gradient_mask(self, weights: TokenWeights) -> Tensor:
        """Return for each token whether it has a gradient in any term of the policy's loss: (N,) bool."""
        in_loss = weights.loss_weight != 0  # (N,)
        mask = in_loss & (weights.importance_weight != 0)
        if not self.loss.regularizes:
            mask &= weights.advantage != 0
        kl_in_loss = self.kl is not None and self.kl.placement == "loss" and bool(weights.kl_coef)
        if self.entropy_coef or kl_in_loss or self.distillation is not None or self.llds is not None:
            mask |= in_loss
        if weights.drift_weight is not None:
            mask |= in_loss & (weights.drift_weight != 0)
        if weights.sft_weight is not None:
            mask |= weights.sft_weight != 0
        return mask

    def correction_weights(self, batch: TrainingBatch, old_logprobs: Tensor) -> Tensor:
        """Return the importance weight that ``correction`` gives to each token: (N,); 1 for observations."""
        assert self.correction is not None
        weight = torch.ones(len(batch.ids), dtype=torch.float64)
        log_ratio, unit = mismatch(batch, old_logprobs, self.correction.level)
        return weight.masked_scatter(batch.action_mask, self.correction.weight(log_ratio, unit))

    def _compute_advantages(
        self, batch: TrainingBatch, outputs: ModelOutputs, kl_coef: float
    ) -> tuple[Tensor, ValueTargets | None]:
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
        # Usually the estimator sees only the action tokens, and observations have advantage 0 and no target.
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
        targets = self.advantage.value_targets(seen, seen_outputs) if isinstance(self.advantage, WithCritic) else None

        def expand(values: StateValues) -> StateValues:  # to all N tokens and S turns
            before = _scatter(values.before_token, batch.action_mask) if compact else values.before_token
            # only the last turn of a time step has a target
            after = values.after_action.new_zeros(len(batch.turn_trajectory))  # (S,)
            return StateValues(before, after.index_put((last_turns,), values.after_action))

        return (
            _scatter(advantage, batch.action_mask) if compact else advantage,
            targets and ValueTargets(expand(targets.target), expand(targets.weight)),
        )

    def _apply_token_rules(
        self, batch: TrainingBatch, outputs: ModelOutputs, advantage: Tensor, loss_mask: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        # (N,) whether ``token_mask`` keeps each token, and (N,) the weights of ``kl_cov``. The rules see only the
        # tokens of the loss mask, and keep all others.
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


def _scatter(x: Tensor, mask: Tensor) -> Tensor:
    # (n,) -> (N,): the elements of x at the true places of ``mask``, and 0 elsewhere
    return torch.zeros(len(mask), dtype=x.dtype).masked_scatter(mask, x)


def objective(algorithm: Algorithm) -> str:
    return "; ".join(clauses(algorithm))


def clauses(algorithm: Algorithm) -> Iterator[str]:
    """Yield the clauses of the objective as text, such as "A = R - mean R of the group"."""
    aggregated = algorithm.aggregation.replace("_", " ")
    if algorithm.length is not None:
        aggregated = f"sum over tokens / ({algorithm.length:g} * trajectories)"
    yield f"maximize the {aggregated} of {algorithm.loss.formula}"
    if algorithm.loss.uses_ratio:
        denominator = "pi_old" if algorithm.ratio_denominator == "old_policy" else "mu"
        unit = "" if algorithm.ratio_level == "token" else f", geometric mean over the {algorithm.ratio_level}"
        yield f"r = pi / {denominator}{unit}"
    yield f"A = {algorithm.advantage.formula}"
    if algorithm.shaping.formula:
        yield algorithm.shaping.formula
    masks = (algorithm.token_mask, algorithm.off_policy_mask, algorithm.kl_cov, algorithm.llds)
    terms = (algorithm.kl, algorithm.distillation, algorithm.correction, algorithm.rejection, *masks)
    yield from (term.formula for term in terms if term is not None)
    added = (
        (algorithm.entropy_coef, "the entropy"),
        (algorithm.sft_coef, "the token mean of log pi of trajectories with R > 0"),
        (algorithm.observation_nll_coef, "the token mean of log pi of observations"),
    )
    yield from (f"plus {coefficient:g} {term}" for coefficient, term in added if coefficient)
    if isinstance(algorithm.advantage, WithCritic):
        yield f"V within {algorithm.advantage.value_clip:g} of V_old regresses on A + V_old"
        if algorithm.advantage.bootstrap:
            yield "if an episode was truncated, V of its last state follows"
        if algorithm.advantage.warmup:
            yield f"only the critic for {algorithm.advantage.warmup} updates"
    if algorithm.filters.formula:
        yield f"left out: {algorithm.filters.formula}"
    if algorithm.constant_groups == "drop":
        yield "groups whose returns are all equal are dropped before the denominators"
    if algorithm.max_refill_rounds:
        yield f"up to {algorithm.max_refill_rounds} rounds of further groups in their place"
    yield from (f"{name} mask off" for name, is_on in algorithm.masks if not is_on)
    if algorithm.epochs > 1:
        yield f"{algorithm.epochs} epochs"
