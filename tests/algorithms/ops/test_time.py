"""Credit over time equals plain loops on chains, cases by hand, and on trees the copies of what is shared."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensors import close, numbers, units
from torch import Tensor

from agent_r1.algorithms.ops.returns import discounted_sums, generalized_advantages, leaves_below, next_values
from agent_r1.data.segments import previous_within

LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=5)


def flat(lengths: list[int], seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random rewards, values and values after the last of chains of these lengths; the chain of each element."""
    random = torch.Generator().manual_seed(seed)
    rewards, values, after = torch.randn(3, sum(lengths), generator=random, dtype=torch.float64)
    return rewards, values, after, torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


@given(LENGTHS, st.integers(0, 99), st.sampled_from([0.0, 0.5, 0.97, 1.0]))
@settings(max_examples=100, deadline=None)
def test_discounted_sums_equal_a_loop(lengths: list[int], seed: int, discount: float) -> None:
    x, _, _, unit = flat(lengths, seed)
    expected = x.clone()
    for j in reversed(range(len(x) - 1)):
        if unit[j] == unit[j + 1]:
            expected[j] += discount * expected[j + 1]
    assert close(discounted_sums(x, previous_within(unit), discount), expected)


@given(LENGTHS, st.integers(0, 99), st.sampled_from([0.9, 1.0]), st.sampled_from([0.0, 0.8, 1.0]))
@settings(max_examples=100, deadline=None)
def test_gae_equals_a_loop(lengths: list[int], seed: int, gamma: float, lam: float) -> None:
    rewards, values, after, unit = flat(lengths, seed)
    expected = torch.zeros_like(rewards)
    for j in reversed(range(len(rewards))):
        within = j + 1 < len(rewards) and unit[j] == unit[j + 1]
        following = values[j + 1] if within else after[j]
        expected[j] = rewards[j] + gamma * following - values[j] + (gamma * lam * expected[j + 1] if within else 0)
    assert close(generalized_advantages(rewards, values, after, previous_within(unit), gamma, lam), expected)


def test_a_discount_of_its_own_for_each_chain() -> None:
    x, before = numbers(1, 1, 1, 1), previous_within(units(0, 0, 1, 1))
    assert discounted_sums(x, before, numbers(0.5, 0.5, 0.1, 0.1)).tolist() == [1.5, 1.0, 1.1, 1.0]


def test_gae_by_hand() -> None:
    # two tokens, then one that leads to a state worth 3; gamma 0.5, lambda 0.5
    rewards, values, after = numbers(0, 1, 2), numbers(0.4, 0.6, 0.5), numbers(9, 0, 3)
    found = generalized_advantages(rewards, values, after, previous_within(units(0, 0, 1)), 0.5, 0.5)
    last = 1 - 0.6
    assert close(found, numbers(0 + 0.5 * 0.6 - 0.4 + 0.25 * last, last, 2 + 0.5 * 3 - 0.5))


def test_gae_at_its_limits_is_return_minus_value_and_the_one_step_error() -> None:
    rewards, values, after, unit = flat([4, 3], 0)
    before = previous_within(unit)
    full = generalized_advantages(rewards, values, torch.zeros_like(after), before, 1.0, 1.0)
    assert close(full, discounted_sums(rewards, before, 1.0) - values)
    one_step = generalized_advantages(rewards, values, after, before, 0.9, 0.0)
    assert close(one_step[3], rewards[3] + 0.9 * after[3] - values[3])
    assert close(one_step[0], rewards[0] + 0.9 * values[1] - values[0])


def test_shaping_by_a_potential_that_the_critic_knows_leaves_advantages_unchanged() -> None:
    rewards, values, after, unit = flat([5], 1)
    before, potential = previous_within(unit), torch.randn(6, dtype=torch.float64)
    shaped = generalized_advantages(
        rewards + 0.9 * potential[1:] - potential[:-1],
        values - potential[:-1],
        after - potential[1:],
        before,
        0.9,
        0.7,
    )
    assert close(shaped, generalized_advantages(rewards, values, after, before, 0.9, 0.7))


#      0 - 1 - 2        leaves 2, 4 and 5
#           \- 3 - 4
#       \- 5
TREE = units(-1, 0, 1, 1, 3, 0)


def test_a_tree_by_hand() -> None:
    assert leaves_below(TREE).tolist() == [3, 2, 1, 1, 1, 1]
    # 3: 4 + 5/2; 1: 2 + (3 + 6.5)/2/2; 0: 1 + (2 leaves at 4.375, one at 6)/3/2
    x = numbers(1, 2, 3, 4, 5, 6)
    assert close(discounted_sums(x, TREE, 0.5), numbers(1 + 14.75 / 6, 4.375, 3, 6.5, 5, 6))
    assert close(next_values(x, numbers(0, 0, 7, 0, 8, 9), TREE), numbers((2 * 2 + 6) / 3, 3.5, 7, 5, 8, 9))


def test_on_a_tree_credit_is_that_of_the_paths_unshared() -> None:
    rewards, values, after = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    shared = generalized_advantages(rewards, values, after, TREE, 0.9, 0.7)
    paths = ([0, 1, 2], [0, 1, 3, 4], [0, 5])
    total = torch.zeros(6, dtype=torch.float64)
    for path in paths:
        before = previous_within(torch.zeros(len(path), dtype=torch.int64))
        total[path] += generalized_advantages(rewards[path], values[path], after[path], before, 0.9, 0.7)
    assert close(total, leaves_below(TREE) * shared)
    assert not close(total, shared)  # control
