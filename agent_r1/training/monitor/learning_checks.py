"""Health checks of learning. Their findings are warnings, which do not stop a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from agent_r1.training.monitor.checks import Finding

START_STEPS = 5
"""Number of first steps whose mean entropy is compared with later steps."""

WARN_AFTER = 5
"""The monitor warns after this number of consecutive steps with a finding."""


def check_entropy(entropy: float | None, start: Sequence[float], share: float) -> Finding | None:
    """Return a finding if the policy's entropy is too small compared with the start of the run.

    Args:
        entropy: the mean entropy of a step in nats per action token; None if the step has no entropy.
        start: the entropies of the first ``START_STEPS`` steps. With fewer entropies, there is no finding.
        share: the smallest allowed ratio of ``entropy`` to the mean of ``start``.
    """
    if entropy is None or len(start) < START_STEPS or entropy >= share * fmean(start):
        return None
    return Finding(
        check="entropy",
        what="the policy has become almost deterministic, so the attempts of a group hardly differ",
        value=f"entropy {entropy:.3g}",
        limit=f"at least {share:g} of {fmean(start):.3g}, the entropy of the first {START_STEPS} steps",
        do="if the reward is not at its maximum, lower the learning rate, raise algorithm.loss.clip_high, or set "
        "algorithm.entropy_coef",
        patience=None,
        warn_after=WARN_AFTER,
    )


def check_contrast(metrics: Mapping[str, float], share: float) -> Finding | None:
    """Return a finding if more than ``share`` of a step's groups are constant: all attempts have equal rewards."""
    constant = metrics.get("constant_groups")
    if constant is None or math.isnan(constant) or constant <= share:
        return None
    return Finding(
        check="contrast",
        what="almost all groups have attempts with equal rewards, so few groups can teach anything",
        value=f"{constant:.0%} of the groups, mean reward {metrics['reward']:.3g}",
        limit=f"at most {share:.0%}",
        do="use tasks that are solved sometimes, a larger group_size, a higher temperature, or --algorithm dapo, which "
        "refills such groups; if the reward is at its maximum, training is done",
        patience=None,
        warn_after=WARN_AFTER,
    )


def check_validation(em: float, best: float, questions: int, rewards: Sequence[float], since: int) -> Finding | None:
    """Return a finding if the validation score fell while the training reward rose.

    The score fell if ``em`` is below ``best`` by more than two standard errors of the difference of two proportions.
    Let n be the number of steps since the best validation. The reward rose if its mean over the last n steps is above
    its mean over the n steps before these steps.

    Args:
        em, best: the exact match of this validation, and of the best validation.
        questions: the number of validation questions.
        rewards: the mean rewards of the last steps, oldest first.
        since: n, the number of steps since the best validation.
    """
    pooled = (em + best) / 2
    margin = 2 * math.sqrt(2 * pooled * (1 - pooled) / max(questions, 1))
    after = [reward for reward in rewards[len(rewards) - since :] if math.isfinite(reward)]
    before = [reward for reward in rewards[: len(rewards) - since][-since:] if math.isfinite(reward)]
    if since < 1 or em >= best - margin or not before or not after or fmean(after) <= fmean(before):
        return None
    return Finding(
        check="validation",
        what="it falls while the training reward rises: the policy overfits, or exploits a reward",
        value=f"exact match {em:.3g}; mean reward {fmean(before):.3g} before the best step, {fmean(after):.3g} since",
        limit=f"at least {best - margin:.3g}: the best was {best:.3g}, {since} steps ago",
        do="RUN/model will have the best step; take fewer steps or a lower learning rate, and look at attempts with "
        "high rewards",
        patience=None,
    )
