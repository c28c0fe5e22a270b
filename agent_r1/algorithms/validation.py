"""Checks whether the components of an algorithm fit together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from agent_r1.algorithms.advantages.critics import WithCritic
from agent_r1.algorithms.advantages.groups import GroupRelative
from agent_r1.algorithms.advantages.returns import Success, Zero
from agent_r1.algorithms.algorithm import Algorithm, RewardShaping
from agent_r1.algorithms.loss_terms import ClipCov, Correction, Kl
from agent_r1.algorithms.types import Level
from agent_r1.core.errors import InvalidInput
from agent_r1.core.inference import Dtype

COARSENESS: tuple[Level, ...] = ("token", "turn", "trajectory")


def check_context_rewriting(algorithm: Algorithm) -> None:
    """Raise InvalidInput if ``algorithm`` trains on observations, for runs whose context policy rewrites the context.

    An observation responds to the text before it. After a rewrite, the model would read it after a different text.
    """
    if algorithm.token_scope == "all":
        do = "use --context_policy.name append, or an algorithm that trains on actions only"
        got = "a context policy that rewrites, and observations to train on"
        raise InvalidInput(f"algorithm {algorithm.name}", got=got, do=do)


def check_algorithm(algorithm: Algorithm) -> None:
    """Raise InvalidInput, with the first reason, if the components of ``algorithm`` do not fit together."""
    if reason := next(incompatibilities(algorithm), None):
        raise InvalidInput(f"algorithm {algorithm.name}", got="components that do not fit", do=reason)


def incompatibilities(algorithm: Algorithm) -> Iterator[str]:
    """Yield a message for each problem: components that do not fit together, or a setting without effect."""
    yield from _ratio(algorithm)
    yield from _masks(algorithm)
    yield from _token_rules(algorithm)
    yield from _kl(algorithm)
    yield from _groups(algorithm)
    yield from _rewards(algorithm)
    yield from _without_effect(algorithm)
    if "critic" in algorithm.needs and not isinstance(algorithm.advantage, WithCritic):
        yield "an advantage that needs a critic extends WithCritic, which holds the critic's settings"
    if (algorithm.aggregation == "constant") != (algorithm.length is not None):
        yield "length is given with aggregation 'constant', and only with it"


def _ratio(algorithm: Algorithm) -> Iterator[str]:
    name = algorithm.loss.name or type(algorithm.loss).__name__
    level, denominator = algorithm.ratio_level, algorithm.ratio_denominator
    if level not in algorithm.loss.levels:
        levels = " or ".join(level for level in COARSENESS if level in algorithm.loss.levels)
        yield f"loss {name} is defined for the ratio of a {levels}, not of a {level}"
    if not algorithm.loss.uses_ratio and denominator == "sampler":
        yield f"ratio_denominator sampler has no effect: loss {name} has no ratio"
    rejection = algorithm.rejection
    if rejection is not None and COARSENESS.index(rejection.level) < COARSENESS.index(level):
        yield f"rejection.level {rejection.level} would split the units of ratio_level {level}: make it as coarse"
    if algorithm.correction is not None and denominator == "sampler":
        yield "ratio_denominator sampler already corrects the mismatch of sampler and trainer: drop the correction"


def _masks(algorithm: Algorithm) -> Iterator[str]:
    masks, over_time = algorithm.masks, algorithm.advantage.over_time
    if not masks.advantage and not over_time:
        yield "masks.advantage has no effect: this advantage is equal on all tokens of a turn"
    if not masks.loss and masks.advantage and over_time:
        yield "masks.loss cannot be off alone: observations would have no advantage (switch masks.advantage off too)"
    samples = algorithm.ratio_denominator == "sampler" or algorithm.corrects_mismatch
    if not masks.loss and (samples or "teacher" in algorithm.needs):
        yield "masks.loss cannot be off here: observations were not sampled, so there is nothing to compare with"
    if not masks.loss and algorithm.observation_nll_coef:
        yield "observation_nll_coef and masks.loss off are two ways of training on observations: choose one"


def _token_rules(algorithm: Algorithm) -> Iterator[str]:
    rules = {
        "token_mask": algorithm.token_mask,
        "off_policy_mask": algorithm.off_policy_mask,
        "kl_cov": algorithm.kl_cov,
        "llds": algorithm.llds,
    }
    given = [name for name, rule in rules.items() if rule is not None]
    if given and not algorithm.masks.loss:
        yield f"{given[0]} is a rule for actions: leave masks.loss on"
    mask = algorithm.token_mask
    if isinstance(mask, ClipCov) and mask.low >= mask.high:
        yield f"no covariance is between token_mask.low {mask.low:g} and token_mask.high {mask.high:g}"
    if algorithm.kl_cov is not None and not algorithm.loss.uses_ratio:
        yield f"kl_cov needs the policy before the update: loss {algorithm.loss.name} has no ratio to it"
    if algorithm.kl_cov is not None and algorithm.ratio_denominator == "sampler":
        yield "kl_cov penalizes the distance from pi_old: give ratio_denominator old_policy"


def _kl(algorithm: Algorithm) -> Iterator[str]:
    if algorithm.kl is None:
        return
    if algorithm.kl.placement == "reward" and algorithm.kl.estimator != "k1":
        yield "a KL in the reward is k1: give kl.estimator k1"
    if algorithm.kl.placement == "loss" and algorithm.kl.estimator == "k1":
        yield "k1 has no gradient in expectation: give another kl.estimator, or kl.placement reward"


def _groups(algorithm: Algorithm) -> Iterator[str]:
    filters, shaping = algorithm.filters, algorithm.shaping
    kl_in_reward = algorithm.kl is not None and algorithm.kl.placement == "reward"
    if "group" not in algorithm.needs:
        if algorithm.constant_groups == "drop" or filters.top_variance is not None:
            yield "this advantage compares no groups: set constant_groups to keep, and filters.top_variance to none"
        if shaping.length or shaping.turns:
            yield "this advantage compares no groups: leave out shaping.length and shaping.turns"
    scaled = isinstance(algorithm.advantage, GroupRelative) and algorithm.advantage.scale == "with_variance"
    if scaled and algorithm.constant_groups == "drop":
        yield "advantage.scale with_variance counts the groups that constant_groups drop removes: leave out one of them"
    if filters.greedy and "greedy" not in algorithm.needs:
        yield "filters.greedy needs a greedy attempt, which this advantage does not use"
    if "greedy" in algorithm.needs and not filters.greedy:
        yield "attempts without a greedy one to compare with have no advantage: set filters.greedy"
    removes = algorithm.constant_groups == "drop" or filters.greedy
    removes |= filters.success is not None or filters.staleness is not None
    if algorithm.max_refill_rounds and not removes:
        yield "max_refill_rounds has no effect if nothing removes whole groups, as constant_groups drop does"
    if (shaping != RewardShaping() or kl_in_reward) and "role_baseline" in algorithm.needs:
        yield "the baseline of a role is over rewards as they are: leave out shaping and a KL in the reward"
    if (shaping != RewardShaping() or kl_in_reward) and "greedy" in algorithm.needs:
        yield "the greedy attempt's reward is neither shaped nor penalized: leave out shaping and a KL in the reward"
    if algorithm.advantage.continuations_per_turn:
        if shaping != RewardShaping() or kl_in_reward:
            yield "returns of continuations are neither shaped nor penalized: leave out shaping and a KL in the reward"
        if algorithm.constant_groups == "drop" or filters.top_variance is not None:
            yield "turns of a group of equal returns differ: set constant_groups to keep, and top_variance to none"
    if (shaping != RewardShaping() or kl_in_reward) and isinstance(algorithm.advantage, Success):
        yield "a success is a return above a threshold, as it is: leave out shaping and a KL in the reward"


def _rewards(algorithm: Algorithm) -> Iterator[str]:
    if algorithm.advantage.uses_returns:
        return
    name = algorithm.advantage.name
    if algorithm.shaping != RewardShaping():
        yield f"shaping has no effect: advantage {name} does not use the sum of rewards"
    if algorithm.kl is not None and algorithm.kl.placement == "reward":
        yield f"a KL in the reward has no effect: advantage {name} does not use the sum of rewards"


def _without_effect(algorithm: Algorithm) -> Iterator[str]:
    correction, rejection, kl = algorithm.correction, algorithm.rejection, algorithm.kl
    if correction is not None and correction.rule == "truncate" and correction.low != Correction().low:
        yield "correction.low has no effect if ratios are truncated: give correction.rule window"
    for field, window in (("correction", correction), ("rejection", rejection)):
        if window is not None and window.low >= window.high:
            yield f"nothing is between {field}.low {window.low:g} and {field}.high {window.high:g}"
    if kl is not None and kl.target is None and kl.horizon != Kl().horizon:
        yield "kl.horizon has no effect without kl.target"
    if kl is not None and kl.bound is not None and kl.estimator in ("k1", "k2"):
        yield f"kl.bound has no effect: it bounds k3, and kl.estimator is {kl.estimator}"
    if kl is not None and not kl.sync_steps and kl.sync_alpha != Kl().sync_alpha:
        yield "kl.sync_alpha has no effect without kl.sync_steps"
    overlong = algorithm.shaping.overlong
    if overlong is not None and overlong.cache_tokens >= overlong.max_tokens:
        limits = f"cache_tokens {overlong.cache_tokens}, max_tokens {overlong.max_tokens}"
        yield f"shaping.overlong leaves no length without penalty: give fewer cache_tokens than max_tokens ({limits})"
    advantage = algorithm.advantage
    kl_in_loss = kl is not None and kl.placement == "loss"
    if isinstance(advantage, Zero) and not (
        kl_in_loss or algorithm.distillation or algorithm.sft_coef or algorithm.observation_nll_coef
    ):
        yield "advantage zero trains nothing alone: give distillation.top_k, sft_coef, observation_nll_coef or kl"
    if isinstance(advantage, Success) and algorithm.filters.success not in (None, advantage.threshold):
        yield "filters.success and advantage.threshold both define success: give them the same number"


def with_correction(algorithm: Algorithm, trainer: Dtype, engine: Dtype, given: Iterable[str]) -> Algorithm:
    """Return ``algorithm``, with a correction unless trainer and engine both compute in float32.

    No correction is added if ``algorithm`` has or cannot have one, or if ``given`` names a setting of it.
    """
    if trainer == engine == "float32" or algorithm.correction is not None or isinstance(algorithm.advantage, Zero):
        return algorithm
    corrected = algorithm.model_copy(update={"correction": Correction()})
    unwanted = any(key.startswith("algorithm.correction") for key in given)
    return algorithm if unwanted or any(incompatibilities(corrected)) else corrected
