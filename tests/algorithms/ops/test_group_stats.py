"""Group statistics: by hand, by plain loops, and for constant groups."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations

import pytest
from hypothesis import given, settings, strategies as st
from tensors import close, numbers, units
from torch import Tensor

from agent_r1.algorithms.ops import (
    center,
    center_weighted,
    divide_by_mean,
    divide_by_std,
    group_std,
    has_variance,
    leave_one_out,
    marginal_maximum,
    standardize,
    whiten,
)


def test_by_hand() -> None:
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


EVERY = [
    center,
    leave_one_out,
    lambda x, key: standardize(x, key, 1e-6),
    lambda x, key: standardize(x, key, 0.0),
    lambda x, key: center_weighted(x, key, numbers(3, 1, 2, 1, 1, 1)),
    lambda x, key: divide_by_mean(center(x, key), x, key),
]
BEST = [marginal_maximum, lambda x, key: marginal_maximum(x, key, 2)]


@pytest.mark.parametrize("advantage", EVERY)
def test_a_constant_group_and_a_group_of_one_have_advantage_exactly_zero(
    advantage: Callable[[Tensor, Tensor], Tensor],
) -> None:
    noisy = numbers(0.1 + 0.2, 0.3, 0.3, 7.0, 1.0, 2.0)  # 0.1 + 0.2 is not 0.3 in floating point
    found = advantage(noisy, units(0, 0, 0, 1, 2, 2))
    assert found[:4].tolist() == [0.0, 0.0, 0.0, 0.0]
    assert found[4] == -found[5] != 0  # control: a group with variance has advantages
    assert has_variance(noisy, units(0, 0, 0, 1, 2, 2)).tolist() == [False] * 4 + [True] * 2


@pytest.mark.parametrize("advantage", BEST)
def test_equal_rewards_raise_no_maximum(advantage: Callable[[Tensor, Tensor], Tensor]) -> None:
    found = advantage(numbers(0.1 + 0.2, 0.3, 0.3, 7.0, 1.0, 2.0), units(0, 0, 0, 1, 2, 2))
    assert found.tolist() == [0.0, 0.0, 0.0, 0.0, 0.0, 1.0]


@given(st.lists(st.integers(-3, 3), min_size=2, max_size=6), st.integers(2, 7))
@settings(deadline=None, max_examples=40)
def test_an_attempt_gets_the_mean_rise_of_the_maximum_over_all_subsets(rewards: list[int], k: int) -> None:
    size = min(k, len(rewards))
    subsets = list(combinations(range(len(rewards)), size))
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


def test_scaling_by_a_mean_that_is_not_positive_gives_zero() -> None:
    rewards, group = numbers(-1, 1, 1, 3), units(0, 0, 1, 1)
    assert divide_by_mean(center(rewards, group), rewards, group).tolist() == [0, 0, -0.5, 0.5]


def test_dividing_by_the_standard_deviation_keeps_zeros_and_adds_epsilon() -> None:
    rewards, group = numbers(0, 2, 5, 5), units(0, 0, 1, 1)
    found = divide_by_std(center(rewards, group), rewards, group, 1.0)
    assert close(found, numbers(-1 / (math.sqrt(2) + 1), 1 / (math.sqrt(2) + 1), 0, 0))


REWARDS = st.lists(st.tuples(st.integers(0, 3), st.integers(-3, 3)), min_size=1, max_size=20)


@given(REWARDS)
@settings(max_examples=200, deadline=None)
def test_leave_one_out_is_the_difference_to_the_mean_of_the_others(pairs: list[tuple[int, int]]) -> None:
    found = leave_one_out(numbers(*(reward for _, reward in pairs)), units(*(key for key, _ in pairs)))
    for place, (key, reward) in enumerate(pairs):
        others = [other for j, (group, other) in enumerate(pairs) if group == key and j != place]
        expected = reward - sum(others) / len(others) if others else 0.0
        assert math.isclose(found[place], expected, abs_tol=1e-9)


@given(REWARDS, st.floats(0.1, 10), st.floats(-10, 10))
@settings(max_examples=100, deadline=None)
def test_standardizing_ignores_scale_and_offset_of_rewards(
    pairs: list[tuple[int, int]], scale: float, offset: float
) -> None:
    rewards, key = numbers(*(reward for _, reward in pairs)), units(*(key for key, _ in pairs))
    assert close(standardize(rewards, key, 0.0), standardize(scale * rewards + offset, key, 0.0), 1e-6)


def test_whitening() -> None:
    assert close(whiten(numbers(1, 2, 3)), numbers(-1, 0, 1), 1e-7)
    assert whiten(numbers(5)).tolist() == [0.0] and whiten(numbers(2, 2)).tolist() == [0.0, 0.0]
