"""The pure functions that algorithms are made of: over flat tensors, for any unit of credit.

A ``unit`` (or ``key``) names for each element of a flat tensor what it belongs to: the turn, the
trajectory or the group of a token, the group of a trajectory. Units are numbered from 0.
Everything here sees action tokens (or turns, or trajectories) only: there are no others to skip.
"""

from __future__ import annotations

import torch
from torch import Tensor

CONSTANT = 1e-6
"""A group whose standard deviation is not above this has no variance: float noise must not become an advantage."""

LARGEST_LOG_RATIO = 20.0
"""Log-ratios are clamped to this before they are exponentiated."""


# -- segments ------------------------------------------------------------------------------------


def segment_sum(x: Tensor, unit: Tensor) -> Tensor:
    """The sum of each unit's elements: (N,) -> (units,)."""
    return x.new_zeros(len(torch.bincount(unit))).index_add(0, unit, x)


def segment_mean(x: Tensor, unit: Tensor) -> Tensor:
    """The mean of each unit's elements: (N,) -> (units,); 0 for a unit that has none."""
    return segment_sum(x, unit) / torch.bincount(unit).clamp(min=1)


# -- advantages relative to a group ----------------------------------------------------------------


def deviation(x: Tensor, key: Tensor) -> Tensor:
    """Per element, the sample standard deviation (Bessel) of its group; 0 in a group of one."""
    centred = x - segment_mean(x, key)[key]
    return (segment_sum(centred.square(), key) / (torch.bincount(key) - 1).clamp(min=1)).sqrt()[key]


def varies(x: Tensor, key: Tensor) -> Tensor:
    """Per element, whether its group has any variance; false in a group of one."""
    return deviation(x, key) > CONSTANT


def centre(x: Tensor, key: Tensor) -> Tensor:
    """x - mean of its group; exactly 0 in a group without variance."""
    return torch.where(varies(x, key), x - segment_mean(x, key)[key], 0.0)


def standardise(x: Tensor, key: Tensor, epsilon: float) -> Tensor:
    """(x - mean) / (standard deviation + epsilon) of its group; exactly 0 in a group without variance.

    GRPO's advantage (2402.03300, section 4.1.2).
    """
    return torch.where(varies(x, key), centre(x, key) / (deviation(x, key) + epsilon), 0.0)


def leave_one_out(x: Tensor, key: Tensor) -> Tensor:
    """x - mean of the others in its group; exactly 0 in a group without variance. RLOO's advantage (2402.14740)."""
    count = torch.bincount(key)[key]
    return centre(x, key) * count / (count - 1).clamp(min=1)


def whiten(x: Tensor, epsilon: float = 1e-8) -> Tensor:
    """Mean 0 and standard deviation 1 (Bessel) over all elements; 0 where all are equal."""
    return standardise(x, torch.zeros_like(x, dtype=torch.int64), epsilon)


# -- credit over time --------------------------------------------------------------------------------


def discounted_sums(x: Tensor, unit: Tensor, discount: float) -> Tensor:
    """y_j = x_j + discount * y_{j+1} within each unit; the elements of a unit are adjacent, in order of time.

    By doubling: after k rounds y_j holds the terms j .. j + 2^k - 1, so there are log2(length) rounds.
    """
    total = x.clone()
    longest = int(torch.bincount(unit).max())
    reach = 1
    while reach < longest:
        later = discount**reach * total[reach:]
        total[:-reach] += torch.where(unit[reach:] == unit[:-reach], later, 0.0)
        reach *= 2
    return total


def generalised_advantages(
    rewards: Tensor, values: Tensor, after: Tensor, unit: Tensor, gamma: float, lam: float
) -> Tensor:
    """GAE (1506.02438, equation 16) over each unit's elements: (N,) -> (N,).

    ``after`` (units,) is the value of the state each unit ends in: 0 at an ending, a critic's value
    where the episode was cut.
    """
    following = values.roll(-1)
    last = torch.bincount(unit).cumsum(0) - 1
    following[last] = after
    return discounted_sums(rewards + gamma * following - values, unit, gamma * lam)


# -- policy loss -------------------------------------------------------------------------------------


def log_ratio(logprobs: Tensor, old: Tensor) -> Tensor:
    """log(pi / pi_old) of each token, clamped so that its exponential stays finite."""
    return (logprobs - old).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


def clipped_surrogate(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """-min(r A, clip(r, 1-low, 1+high) A): PPO's loss per token (1707.06347, equation 7)."""
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high))


def dual_clip(loss: Tensor, advantage: Tensor, bound: float) -> Tensor:
    """At most -bound * A where A < 0, however far the ratio ran away (1912.09729, equation 5)."""
    return torch.where(advantage < 0, torch.minimum(loss, -advantage * bound), loss)


def clipped_value_loss(values: Tensor, old: Tensor, target: Tensor, clip: float) -> Tensor:
    """0.5 * max((V - G)^2, (V_clipped - G)^2), V_clipped within ``clip`` of the old value."""
    near = old + (values - old).clamp(-clip, clip)
    return 0.5 * torch.maximum((values - target).square(), (near - target).square())


# -- weights of tokens in the loss ---------------------------------------------------------------------


def token_mean(unit: Tensor) -> Tensor:
    """Every token weighs the same: 1 / N."""
    return torch.full(unit.shape, 1 / len(unit), dtype=torch.float64)


def unit_mean(unit: Tensor) -> Tensor:
    """Every unit weighs the same, and within it every token: 1 / (units * tokens of the unit)."""
    count = torch.bincount(unit)
    return 1 / (count.count_nonzero() * count[unit]).double()


# -- divergence ----------------------------------------------------------------------------------------


def kl_k1(logprobs: Tensor, other: Tensor) -> Tensor:
    """log(pi/q) of tokens drawn from pi: unbiased for KL(pi||q); its own gradient is 0 in expectation."""
    return logprobs - other


def kl_k2(logprobs: Tensor, other: Tensor) -> Tensor:
    """log(pi/q)^2 / 2: biased, but its gradient is that of KL(pi||q) in expectation."""
    return (logprobs - other).square() / 2


def kl_k3(logprobs: Tensor, other: Tensor) -> Tensor:
    """q/pi - 1 - log(q/pi) of tokens drawn from pi: unbiased for KL(pi||q) and never negative.

    Its gradient is that of KL(q||pi). All three: joschu.net/blog/kl-approx.html.
    """
    difference = log_ratio(other, logprobs)
    return difference.exp() - 1 - difference
