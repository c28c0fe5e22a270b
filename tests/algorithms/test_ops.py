"""Group statistics, returns, importance ratios and loss weights: by hand, and for all small examples."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from tensors import close, numbers, units
from torch import Tensor

from agent_r1.algorithms.loss_terms import Correction, Rejection
from agent_r1.algorithms.ops import (
    aggregation_weights,
    center,
    center_weighted,
    clamp_log_ratio,
    clipped_value_loss,
    discounted_sums,
    divide_by_mean,
    divide_by_std,
    effective_share,
    generalized_advantages,
    group_std,
    has_variance,
    importance_ratio,
    leave_one_out,
    marginal_maximum,
    standardize,
    whiten,
)


def test_group_statistics_by_hand() -> None:
    rewards, group = numbers(1, 0, 0, 3, 5), units(0, 0, 0, 1, 1)
    assert close(center(rewards, group), numbers(2 / 3, -1 / 3, -1 / 3, -1, 1))
    assert close(leave_one_out(rewards, group), numbers(1, -0.5, -0.5, -2, 2))
    assert close(group_std(rewards, group), numbers(*[math.sqrt(1 / 3)] * 3, *[math.sqrt(2)] * 2))
    halves = math.sqrt(0.5)
    expected = numbers(2 / math.sqrt(3), -1 / math.sqrt(3), -1 / math.sqrt(3), -halves, halves)
    assert close(standardize(rewards, group, 0.0), expected)
    # weighted by lengths 2, 1, 1 the first mean is 2 / 4; by 1 and 3 the second is (3 + 15) / 4
    weighted = center_weighted(rewards, group, numbers(2, 1, 1, 1, 3))
    assert close(weighted, numbers(0.5, -0.5, -0.5, -1.5, 0.5))
    assert close(divide_by_mean(center(rewards, group), rewards, group), numbers(2, -1, -1, -1 / 4, 1 / 4))
    assert divide_by_mean(numbers(-1, 1), numbers(-1, 1), units(0, 0)).tolist() == [0, 0]  # a mean that is not positive
    found = divide_by_std(center(rewards, group), rewards, group, 1.0)[3:]
    assert close(found, numbers(-1 / (math.sqrt(2) + 1), 1 / (math.sqrt(2) + 1)))
    assert close(whiten(numbers(1, 2, 3)), numbers(-1, 0, 1), 1e-7)
    assert whiten(numbers(5)).tolist() == [0.0] and whiten(numbers(2, 2)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    "advantage",
    [
        lambda x, key: standardize(x, key, 0.0),
        lambda x, key: center_weighted(x, key, numbers(3, 1, 2, 1, 1, 1)),
        lambda x, key: divide_by_mean(center(x, key), x, key),
        marginal_maximum,
        lambda x, key: marginal_maximum(x, key, 2),
    ],
)
def test_a_constant_group_and_a_group_of_one_have_advantage_exactly_zero(
    advantage: Callable[[Tensor, Tensor], Tensor],
) -> None:
    noisy = numbers(0.1 + 0.2, 0.3, 0.3, 7.0, 1.0, 2.0)  # 0.1 + 0.2 is not 0.3 in floating point
    found = advantage(noisy, units(0, 0, 0, 1, 2, 2))
    assert found[:4].tolist() == [0.0, 0.0, 0.0, 0.0] and found[5] > 0  # control: a group with variance
    assert has_variance(noisy, units(0, 0, 0, 1, 2, 2)).tolist() == [False] * 4 + [True] * 2


@given(st.lists(st.integers(-3, 3), min_size=2, max_size=6), st.integers(2, 7))
@settings(deadline=None, max_examples=40)
def test_an_attempt_gets_the_mean_rise_of_the_maximum_over_all_subsets(rewards: list[int], k: int) -> None:
    subsets = list(combinations(range(len(rewards)), min(k, len(rewards))))
    expected = [
        math.fsum(
            max(rewards[i] for i in subset) - max(rewards[i] for i in subset if i != member)
            for subset in subsets
            if member in subset
        )
        / len(subsets)
        for member in range(len(rewards))
    ]
    found = marginal_maximum(numbers(*rewards, 5, 9), units(*[0] * len(rewards), 1, 1), k)
    assert close(found, numbers(*expected, 0, 4))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 99), st.sampled_from([0.0, 0.5, 1.0]))
@settings(max_examples=50, deadline=None)
def test_discounted_sums_equal_a_loop(lengths: list[int], seed: int, discount: float) -> None:
    x = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    unit = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    expected = x.clone()
    for j in reversed(range(len(x) - 1)):
        if unit[j] == unit[j + 1]:
            expected[j] += discount * expected[j + 1]
    assert close(discounted_sums(x, unit, discount), expected)


def test_returns_and_gae_by_hand() -> None:
    x, unit = numbers(1, 1, 1, 1), units(0, 0, 1, 1)
    assert discounted_sums(x, unit, numbers(0.5, 0.5, 0.1, 0.1)).tolist() == [1.5, 1.0, 1.1, 1.0]
    # a chain of two, then a chain of one that leads to a state of value 3; gamma 0.5, lambda 0.5
    rewards, values, final = numbers(0, 1, 2), numbers(0.4, 0.6, 0.5), numbers(0, 3)
    found = generalized_advantages(rewards, values, final, units(0, 0, 1), 0.5, 0.5)
    last = 1 - 0.6
    assert close(found, numbers(0 + 0.5 * 0.6 - 0.4 + 0.25 * last, last, 2 + 0.5 * 3 - 0.5))


def test_extreme_ratios_stay_finite() -> None:
    assert importance_ratio(numbers(1e6, -1e6), numbers(0, 0)).isfinite().all()
    assert importance_ratio(numbers(1e6, 1e6), numbers(0, 0), units(0, 0)).isfinite().all()
    assert clamp_log_ratio(numbers(1e6)).exp().isfinite().all()
    assert Correction(rule="window", low=0.0, high=1e9).weight(numbers(1e6), units(0)).isfinite().all()
    assert not numbers(1e6).exp().isfinite().all()  # control


def test_the_ratio_of_a_unit_is_the_geometric_mean_and_has_the_gradient_of_each_token() -> None:
    logprobs = numbers(0.4, 0.8, -1.0).requires_grad_()
    found = importance_ratio(logprobs, numbers(0, 0, 0), units(0, 0, 1))
    assert close(found, numbers(0.6, 0.6, -1.0).exp())
    (gradient,) = torch.autograd.grad(found[0].log(), logprobs)
    assert gradient.tolist() == [1, 0, 0]


def test_the_effective_share_of_weights() -> None:
    assert effective_share(numbers(0.5, 0.5, 0.5)) == effective_share(numbers(2.0)) == 1.0
    assert effective_share(numbers(0, 0, 5, 0)) == 0.25 and effective_share(numbers(0, 0)) == 0.0
    # a gap as that of bfloat16: weights per token keep long trajectories, and products over trajectories do not
    random = torch.Generator().manual_seed(0)
    unit = torch.arange(64).repeat_interleave(2000)  # 64 trajectories of 2000 tokens
    log_ratio = 0.05 * torch.randn(len(unit), generator=random, dtype=torch.float64) - 0.05**2 / 2  # mean ratio 1
    tokens = Correction().weight(log_ratio, torch.arange(len(unit)))
    assert effective_share(tokens) > 0.99 and abs(float(tokens.mean()) - 1) < 0.01
    assert effective_share(Correction().weight(log_ratio, unit)) < 0.5


def test_corrections_and_rejections_by_hand() -> None:
    log_ratio, alone = numbers(0.25, 0.5, 1.0, 2.0, 4.0).log(), torch.arange(5)
    assert close(Correction(high=2.0).weight(log_ratio, alone), numbers(0.25, 0.5, 1, 2, 2))
    assert close(Correction(rule="window", low=0.45, high=2.5).weight(log_ratio, alone), numbers(0, 0.5, 1, 2, 0))
    assert Rejection(low=0.45, high=2.0).accepted(log_ratio, alone).tolist() == [False, True, True, True, False]
    unit = units(0, 0, 1, 1, 1)  # products 0.125 and 8, geometric means sqrt(0.125) and 2
    assert close(Correction(high=10.0).weight(log_ratio, unit), numbers(0.125, 0.125, 8, 8, 8))
    mean = math.sqrt(0.125)
    assert Rejection(low=0.99 * mean, high=1.99).accepted(log_ratio, unit).tolist() == [True] * 2 + [False] * 3
    assert Rejection(low=1.01 * mean, high=2.01).accepted(log_ratio, unit).tolist() == [False] * 2 + [True] * 3
    product = Rejection(statistic="product", low=0.12, high=0.13)
    assert product.accepted(log_ratio, unit).tolist() == [True] * 2 + [False] * 3


def test_loss_weights_of_tokens_of_units_and_over_a_constant() -> None:
    unit = units(0, 0, 0, 2)  # unit 1 has no tokens and does not count
    assert aggregation_weights(unit, "token_mean").tolist() == [0.25] * 4
    for aggregation in ("turn_mean", "trajectory_mean", "group_mean"):
        assert close(aggregation_weights(unit, aggregation), numbers(1 / 6, 1 / 6, 1 / 6, 1 / 2))
    assert aggregation_weights(unit, "constant", 10.0).tolist() == [1 / 20] * 4


def test_the_value_loss_by_hand() -> None:
    values, old, target = numbers(1.0, 1.0, 0.3), numbers(0.0, 0.0, 0.2), numbers(1.0, -1.0, 0.0)
    # clipped to 0.5: 0.5 from 1, and for -1 the unclipped one is worse; within the clip both are equal
    assert close(clipped_value_loss(values, old, target, 0.5), numbers(0.5 * 0.25, 0.5 * 4, 0.5 * 0.09))
