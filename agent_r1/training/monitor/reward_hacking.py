"""A check whether the policy exploits its reward: the reward on which the run trains rises, but a true reward falls.

For example, a run trains on a reward model, and the true reward is exact match.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, pstdev, variance

from agent_r1.core.trajectory import Trajectory
from agent_r1.core.weighted_rewards import can_be_summed, weighted_rewards
from agent_r1.trainer.updater import SelectedGroup
from agent_r1.training.monitor.checks import Finding

PROXY, TRUE, CORRELATION = "proxy/reward", "proxy/true_reward", "proxy/correlation"
"""The names of the metrics of :func:`proxy_metrics`."""

ERRORS = 2.0
"""A change of a mean reward counts if it exceeds this number of standard errors."""


def proxy_metrics(batch: Sequence[SelectedGroup], true_reward: str) -> dict[str, float]:
    """Return three metrics of a step: mean return, mean true reward, and the correlation of return and true reward.

    The argument ``true_reward`` is the name of the true reward. Attempts without this reward are ignored. If no attempt
    has this reward, return {}. The correlation is left out if all returns or all true rewards are equal.
    """
    pairs = [
        (sample.total, true)
        for selected in batch
        for sample in selected.selection.samples
        if (true := _value(sample.trajectory, true_reward)) is not None
    ]
    if not pairs:
        return {}
    proxies, trues = zip(*pairs, strict=True)
    metrics = {PROXY: fmean(proxies), TRUE: fmean(trues)}
    spread = pstdev(proxies) * pstdev(trues)
    if spread > 0:
        covariance = fmean((proxy - metrics[PROXY]) * (true - metrics[TRUE]) for proxy, true in pairs)
        metrics[CORRELATION] = covariance / spread
    return metrics


def _value(trajectory: Trajectory, name: str) -> float | None:
    values = [one.value for one in weighted_rewards(trajectory, {}) if one.name == name]
    return math.fsum(values) if values and all(map(can_be_summed, values)) else None


def check_reward_hacking(history: Sequence[tuple[float, float]], window: int) -> Finding | None:
    """Return a finding if the true reward fell while the return rose. The policy is trained on the return.

    Two periods of ``window`` consecutive steps are compared: the last steps, and the earlier period with the highest
    mean true reward. The fall and the rise must each exceed the standard error times ``ERRORS``. The standard error is
    estimated from the spread of the steps.

    ``history`` has (mean return, mean true reward) of each step, oldest first. ``window`` is at least 2.
    """
    if len(history) < 2 * window:
        return None
    recent = history[-window:]
    starts = range(len(history) - 2 * window + 1)
    best = max((history[start : start + window] for start in starts), key=lambda steps: fmean(s[1] for s in steps))
    rise, fall = _change(best, recent, 0), _change(best, recent, 1)
    if rise <= 0 or fall >= 0:
        return None
    return Finding(
        check="reward_hacking",
        what="the reward rises while the true reward falls: the policy exploits the reward",
        value=f"reward {_mean(best, 0):.3g} to {_mean(recent, 0):.3g}, true reward {_mean(best, 1):.3g} to "
        f"{_mean(recent, 1):.3g}",
        limit=f"means of {window} steps, now and at the highest true reward",
        do="stop here, look at attempts with a high reward and a low true reward ('agent-r1 show RUN --attempts --sort "
        "-reward'), and change the reward; a smaller weight or a KL penalty only slows it down",
        patience=None,
    )


def _mean(steps: Sequence[tuple[float, float]], index: int) -> float:
    return fmean(step[index] for step in steps)


def _change(before: Sequence[tuple[float, float]], after: Sequence[tuple[float, float]], index: int) -> float:
    """Return the change of the return (``index`` 0) or of the true reward (``index`` 1) between two periods of steps.

    The arguments ``before`` and ``after`` hold the steps of the two periods. Each step is a pair (mean return, mean
    true reward). The change is the mean over ``after`` minus the mean over ``before``. If the absolute change is at
    most the standard error times ``ERRORS``, return 0.
    """
    difference = _mean(after, index) - _mean(before, index)
    squared = sum(variance(step[index] for step in steps) / len(steps) for steps in (before, after))
    return difference if abs(difference) > ERRORS * math.sqrt(squared) else 0.0
