"""A check whether the policy exploits its reward: the reward rises while a trusted reward falls.

The reward that a run trains on is a proxy: it can differ from the true reward, which is the reward that the author of
the run wants to maximize. The true reward is measured, but not trained on. Example: a run trains on a reward model, and
the true reward is exact match with weight 0.
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
"""The names of three metrics of a step: mean return, mean true reward, and the correlation of return and true reward.

The true reward is the reward that the setting ``true_reward`` names: it measures what the run is meant for. Attempts
without a true reward are left out.
"""

ERRORS = 2.0
"""A mean reward counts as risen or fallen only if it differs from the mean of earlier steps by more than this number of
standard errors."""


def proxy_metrics(batch: Sequence[SelectedGroup], true_reward: str) -> dict[str, float]:
    """Return three metrics of a step: mean return, mean true reward, and the correlation of return and true reward.

    The true reward is the reward with the name ``true_reward``. Attempts without this reward are left out. If no
    attempt has this reward, the result is {}. The correlation is left out if all attempts have the same return or the
    same true reward.
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
    """Return the sum of an attempt's values of the reward ``name``.

    Return None if the attempt has no value of this reward, or if a value is not finite.
    """
    values = [one.value for one in weighted_rewards(trajectory, {}) if one.name == name]
    return math.fsum(values) if values and all(map(can_be_summed, values)) else None


def check_reward_hacking(history: Sequence[tuple[float, float]], window: int) -> Finding | None:
    """Return a finding if the true reward fell while the reward that is trained on rose; otherwise None.

    The last ``window`` steps are compared with ``window`` earlier consecutive steps: the steps with the highest mean
    true reward. The rise and the fall of the means must each exceed two standard errors, which are estimated from the
    spread of the steps.

    Args:
        history: (mean reward, mean true reward) of each step, the oldest first.
        window: the number of steps in each mean, at least 2.
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
    """Return the change of a mean from the steps ``before`` to the steps ``after``.

    Return 0 if the change is within ``ERRORS`` standard errors. Each step is a pair (reward, true reward). ``index`` is
    0 for the change of the reward, and 1 for the change of the true reward.
    """
    difference = _mean(after, index) - _mean(before, index)
    squared = sum(variance(step[index] for step in steps) / len(steps) for steps in (before, after))
    return difference if abs(difference) > ERRORS * math.sqrt(squared) else 0.0
