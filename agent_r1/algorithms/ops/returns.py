"""Credit over time, on a tree: ``before`` (N,) names the element before each, -1 where there is none.

A chain is the tree of one child each. A node that several branches share is computed as if each branch had a
copy of it: with every leaf counting the same, what follows it is the mean over the leaves below.
An element stands after the one before it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def leaves_below(before: Tensor) -> Tensor:
    """(N,) float64: how many leaves stand at or below each element. It is the loss weight of a shared element."""
    leaf = torch.ones(len(before), dtype=torch.float64)
    leaf[before[before >= 0]] = 0.0
    return _sums_below(leaf, before, 1.0)


def discounted_sums(x: Tensor, before: Tensor, discount: float | Tensor) -> Tensor:
    """y_j = x_j + discount * (mean over the leaves below of y of the next): (N,) -> (N,).

    On a chain: x_j + discount * x_{j+1} + discount^2 * x_{j+2} + .. Where ``discount`` is a tensor (N,), it is
    the same for all elements that hang together.
    """
    if not _branches(before):
        return _sums_below(x, before, discount)
    leaves = leaves_below(before).to(x)
    return _sums_below(leaves * x, before, discount) / leaves


def next_values(values: Tensor, after: Tensor, before: Tensor) -> Tensor:
    """The value of what follows each element: (N,) -> (N,).

    Where several follow, their mean over leaves; where none does, ``after`` (N,), the value of the state
    that the element leads to: 0 at an ending, a critic's where an episode was cut.
    """
    follows = before >= 0
    leaves = leaves_below(before).to(values)
    following = torch.zeros_like(values).index_add(0, before[follows], (leaves * values)[follows])
    is_leaf = torch.ones_like(follows).index_fill(0, before[follows], False)
    return torch.where(is_leaf, after, following / leaves)


def generalized_advantages(
    rewards: Tensor, values: Tensor, after: Tensor, before: Tensor, gamma: float, lam: float | Tensor
) -> Tensor:
    """GAE (1506.02438, equation 16): (N,) each -> (N,). ``after`` is used at leaves, see :func:`next_values`."""
    errors = rewards + gamma * next_values(values, after, before) - values
    return discounted_sums(errors, before, gamma * lam)


def _branches(before: Tensor) -> bool:
    return bool((torch.bincount(before[before >= 0], minlength=1) > 1).any())


def _sums_below(x: Tensor, before: Tensor, discount: float | Tensor) -> Tensor:
    """y_j = sum over the elements i at or below j of discount^distance * x_i, by doubling: log2(depth) rounds.

    After k rounds ``total`` holds what is nearer than 2^k, ``ancestor`` is the element 2^k before, and ``factor`` what
    discounts that distance.
    """
    total, ancestor = x.clone(), before
    factor = torch.as_tensor(discount, dtype=x.dtype).expand(len(x))
    while bool((ancestor >= 0).any()):
        below = (ancestor >= 0).nonzero().squeeze(1)
        total = total.index_add(0, ancestor[below], factor[below] * total[below])
        ancestor = torch.where(ancestor >= 0, ancestor[ancestor.clamp(min=0)], -1)
        factor = factor.square()
    return total
