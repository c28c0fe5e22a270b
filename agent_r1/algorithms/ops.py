"""Pure functions over flat tensors: the mathematics that several algorithms share.

Elements, such as tokens, belong to units, such as turns or groups. The parameter ``unit`` or ``key`` (N,) holds the
index of each element's unit, counted from 0. Remove masked elements before the call.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from agent_r1.data.batch import segment_count, segment_last, segment_mean, segment_sum

Aggregation = Literal["token_mean", "turn_mean", "trajectory_mean", "group_mean", "constant"]

# Group statistics: baselines and scales of advantages. ``x`` are returns; elements with the same ``key`` are compared.

MIN_STD = 1e-6
"""Up to this standard deviation, the elements of a group count as equal: rounding errors become no advantages."""


def group_std(x: Tensor, key: Tensor) -> Tensor:
    """Return the sample standard deviation (Bessel) of ``x`` (N,) in each element's group: (N,). Alone, it is 0."""
    deviations = x - segment_mean(x, key)[key]  # (N,)
    return (segment_sum(deviations.square(), key) / (segment_count(key) - 1).clamp(min=1)).sqrt()[key]


def has_variance(x: Tensor, key: Tensor) -> Tensor:
    """Return for each element whether the standard deviation of ``x`` in its group is above ``MIN_STD``: (N,) bool."""
    return group_std(x, key) > MIN_STD


def center(x: Tensor, key: Tensor) -> Tensor:
    """Return each element of ``x`` (N,) minus the mean of its group, as in Dr.GRPO (arXiv:2503.20783).

    In a group of equal elements, the result is exactly 0, as in the functions below.
    """
    return torch.where(has_variance(x, key), x - segment_mean(x, key)[key], 0.0)


def leave_one_out(x: Tensor, key: Tensor) -> Tensor:
    """Return each element of ``x`` (N,) minus the mean of all other elements of its group: RLOO (arXiv:2402.14740)."""
    # x - mean of the other elements = (x - mean of the group) * count / (count - 1)
    count = segment_count(key)[key]  # (N,)
    return center(x, key) * count / (count - 1).clamp(min=1)


def center_weighted(x: Tensor, key: Tensor, weight: Tensor) -> Tensor:
    """Return each element of ``x`` (N,) minus the mean of its group, weighted by ``weight`` (N,).

    With the lengths of trajectories as weights, this is the advantage of OPO (arXiv:2505.23585).
    """
    mean = segment_sum(weight * x, key) / segment_sum(weight, key)  # (groups,)
    return torch.where(has_variance(x, key), x - mean[key], 0.0)


def divide_by_std(advantage: Tensor, x: Tensor, key: Tensor, epsilon: float) -> Tensor:
    """Return advantage / (std of ``x`` in the element's group + epsilon): (N,). An advantage of 0 stays 0."""
    return torch.where(advantage != 0, advantage / (group_std(x, key) + epsilon), 0.0)


def divide_by_mean(advantage: Tensor, x: Tensor, key: Tensor) -> Tensor:
    """Return advantage / (mean of ``x`` in the group of each element): (N,), as in MaxRL (arXiv:2602.02710).

    If the mean is tiny or negative (at most ``MIN_STD``), the result is 0.
    """
    mean = segment_mean(x, key)[key]  # (N,)
    return torch.where(mean > MIN_STD, advantage / mean.clamp(min=MIN_STD), 0.0)


def standardize(x: Tensor, key: Tensor, epsilon: float) -> Tensor:
    """Return (x - mean x) / (std x + epsilon) over the group of each element: (N,).

    This is the advantage of GRPO (arXiv:2402.03300, section 4.1.2).
    """
    return divide_by_std(center(x, key), x, key, epsilon)


def whiten(x: Tensor) -> Tensor:
    """Return (x - mean x) / (std x + 1e-8) over all N elements of ``x``: (N,). If all are equal, the result is 0."""
    return standardize(x, torch.zeros_like(x, dtype=torch.int64), 1e-8)


def marginal_maximum(x: Tensor, key: Tensor, k: int | None = None) -> Tensor:
    """Return how much each element raises the maximum of a subset of its group, on average: (N,).

    Let S run over all subsets of the group that have k elements and contain element i:

        A_i = sum over S of (max S - max of S without i) / (number of all subsets of k elements of the group)

    This is PKPO with the baseline of k - 1 elements (arXiv:2505.15201, equation 33). If k is the size of the group
    (default and maximum), A_i of the best element is its lead over the second best, and all other A_i are 0
    (arXiv:2503.19595): [3, 1, 0] gives [2, 0, 0].
    """
    advantage = torch.zeros_like(x)
    for unit in key.unique():
        places = (key == unit).nonzero().squeeze(1)  # (n,) the positions of the elements of the group
        ordered, order = x[places].sort()  # (n,) ascending
        n = len(ordered)
        size = min(k or n, n)
        if size < 2:
            continue  # the group has one element
        # In ascending order, let element i be the best of a subset, and element j < i the second best. The other
        # size - 2 elements of the subset are below element j. There are j elements below element j.
        subsets = torch.tensor([math.comb(j, size - 2) for j in range(n)], dtype=x.dtype)  # (n,)
        lead = (ordered[:, None] - ordered[None, :]).tril()  # (n, n) x_i - x_j for j < i
        advantage[places[order]] = lead @ subsets / math.comb(n, size)
    return torch.where(has_variance(x, key), advantage, 0.0)


# Discounted returns and GAE. The elements of a unit are contiguous and in the order of time.

RETURN_TOLERANCE = 1e-9  # below a threshold that a return still reaches, so that rounding errors do not decide


def reaches(returns: Tensor, threshold: float) -> Tensor:
    return returns > threshold - RETURN_TOLERANCE


def discounted_sums(x: Tensor, unit: Tensor, discount: float | Tensor) -> Tensor:
    """Return y_t = x_t + discount * y_{t+1} for each element of ``x``: (N,). After the last element of a unit, y is 0.

    ``discount`` is one number or (N,), equal for all elements of a unit.
    """
    # Doubling: after k rounds, total_t is the discounted sum of the elements t .. t + 2^k - 1, and factor is
    # discount^(2^k). The loop has log2(length of the longest unit) rounds. A loop over time would have one round per
    # element.
    total = x.clone()
    factor = torch.as_tensor(discount, dtype=x.dtype).expand(len(x))
    remaining = segment_last(unit)[unit] - torch.arange(len(x))  # (N,) number of later elements of the unit
    reach = 1
    while bool((remaining >= reach).any()):
        earlier = (remaining >= reach).nonzero().squeeze(1)
        later = earlier + reach
        total = total.index_add(0, earlier, factor[later] * total[later])  # the sum of twice as many elements
        factor = factor.square()
        reach *= 2
    return total


def generalized_advantages(
    rewards: Tensor, values: Tensor, final_values: Tensor, unit: Tensor, gamma: float, lam: float | Tensor
) -> Tensor:
    """Return the generalized advantage estimate A_t (GAE) of each element: (N,) (arXiv:1506.02438, equation 16).

    Within a unit (a turn or a trajectory):

        delta_t = r_t + gamma V_{t+1} - V_t
        A_t     = delta_t + gamma lambda A_{t+1}

    Args:
        values: (N,) V_t, the value of the state before each element.
        final_values: (units,) the value after the last element of each unit: 0 if the episode terminated, the critic's
            value if the episode was truncated.
        lam: lambda, one number or (N,), equal for all elements of a unit.
    """
    next_values = values.roll(-1).index_put((segment_last(unit),), final_values)  # (N,) V_{t+1}
    deltas = rewards + gamma * next_values - values  # (N,) delta_t
    return discounted_sums(deltas, unit, gamma * lam)


# Importance ratios between two policies.

MAX_LOG_RATIO = 20.0
"""Bound of the absolute value of a log-ratio before exp is applied, so that every ratio is finite."""


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def effective_share(weight: Tensor) -> float:
    """Return the effective sample size (sum w)^2 / sum w^2 of importance weights (n,), divided by n (Kish, 1965)."""
    squares = float(weight.square().sum())
    return float(weight.sum()) ** 2 / (len(weight) * squares) if squares else 0.0


def importance_ratio(logprobs: Tensor, old_logprobs: Tensor, unit: Tensor | None = None) -> Tensor:
    """Return the importance ratio r of each token: (n,), with gradient through ``logprobs``.

    Without ``unit``, r = pi / pi_old. With ``unit``, the index (n,) of each token's turn or trajectory, r is the
    geometric mean s of pi / pi_old over all tokens of the unit (GSPO, arXiv:2507.18071, equation 7). The gradient at a
    token flows only through its own probability: r = sg(s) * pi / sg(pi), with the stop-gradient sg (GSPO-token,
    equation 14).
    """
    if unit is None:
        return clamp_log_ratio(logprobs - old_logprobs).exp()
    mean = clamp_log_ratio(segment_mean((logprobs - old_logprobs).detach(), unit))  # (units,) log of the geometric mean
    return (mean[unit] + logprobs - logprobs.detach()).exp()


# Estimators of KL(pi || q) from log pi and log q (``other``), (n,) each, of tokens that were sampled from pi. The names
# k1, k2 and k3 are from joschu.net/blog/kl-approx.html. In a loss, only the gradient of an estimator matters.


def kl_k1(logprobs: Tensor, other: Tensor) -> Tensor:
    """Return k1 = log(pi / q): (n,). It is unbiased, and its expected gradient is 0."""
    return logprobs - other


def kl_k2(logprobs: Tensor, other: Tensor) -> Tensor:
    """Return k2 = log(pi / q)^2 / 2: (n,). It is biased, and its expected gradient is that of KL(pi || q)."""
    return (logprobs - other).square() / 2


def kl_k3(logprobs: Tensor, other: Tensor, bound: float | None = None) -> Tensor:
    """Return k3 = q / pi - 1 - log(q / pi): (n,). It is unbiased and never negative.

    Its expected gradient is that of the reverse divergence KL(q || pi). A value above ``bound`` is replaced by
    ``bound``, and has no gradient.
    """
    difference = clamp_log_ratio(other - logprobs)  # log(q / pi)
    k3 = difference.exp() - 1 - difference
    return k3 if bound is None else k3.clamp(max=bound)


def kl_k3_plus(logprobs: Tensor, other: Tensor, bound: float | None = None) -> Tensor:
    """Return the value of k3 with the gradient of k2: (n,). ``bound`` limits only the value."""
    k2 = kl_k2(logprobs, other)
    # k2 - sg(k2) is 0, and has the gradient of k2
    return kl_k3(logprobs, other, bound).detach() + k2 - k2.detach()


def kl_k3_unbiased(logprobs: Tensor, other: Tensor, ratio: Tensor, bound: float | None = None) -> Tensor:
    """Return pi / pi_old * k3: (n,) (DeepSeek-V3.2, arXiv:2512.02556). ``ratio`` (n,) is pi / pi_old.

    Value and gradient are unbiased for tokens that were sampled from pi_old.
    """
    return ratio * kl_k3(logprobs, other, bound)


# Aggregation of token losses, and the loss of a critic.


def aggregation_weights(unit: Tensor, aggregation: Aggregation, length: float | None = None) -> Tensor:
    """Return the loss weight of each of n tokens: (n,) float64.

    ``unit`` (n,) is the index of each token's turn, trajectory or group. Units without tokens are not counted:
        token_mean: 1 / n
        turn_mean, trajectory_mean, group_mean: 1 / (number of units * number of tokens of the unit)
        constant: 1 / (number of units * length), as in Dr.GRPO (arXiv:2503.20783)
    """
    if aggregation == "token_mean":
        return torch.full(unit.shape, 1 / len(unit), dtype=torch.float64)
    count = segment_count(unit)  # (units,) tokens of each unit
    units = count.count_nonzero()  # units without tokens in the loss are not counted
    if aggregation == "constant":
        return torch.full(unit.shape, 1 / (int(units) * (length or 1.0)), dtype=torch.float64)
    return 1 / (units * count[unit]).double()


def mean_weights(mask: Tensor) -> Tensor:
    """Return 1 / n for each of the n tokens that ``mask`` (N,) selects, and 0 for all other tokens: (N,) float64."""
    return mask.double() / max(int(mask.sum()), 1)


def clipped_value_loss(values: Tensor, old_values: Tensor, target: Tensor, clip: float) -> Tensor:
    """Return PPO's value loss of each state: 0.5 * max((V - G)^2, (V_clipped - G)^2), with the target G."""
    clipped = old_values + (values - old_values).clamp(-clip, clip)
    return 0.5 * torch.maximum((values - target).square(), (clipped - target).square())
