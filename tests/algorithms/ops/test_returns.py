"""Discounted returns and GAE equal plain loops, and values computed by hand."""

from __future__ import annotations

import torch
from hypothesis import given, settings, strategies as st
from tensors import close, numbers, units
from torch import Tensor

from agent_r1.algorithms.ops import discounted_sums, generalized_advantages
from agent_r1.data.batch import segment_last

LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=5)


def random_chains(lengths: list[int], seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return random rewards (N,), values (N,) and final values (units,) of chains of these lengths, and the units."""
    random = torch.Generator().manual_seed(seed)
    rewards, values, after = torch.randn(3, sum(lengths), generator=random, dtype=torch.float64)
    unit = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return rewards, values, after[segment_last(unit)], unit


@given(LENGTHS, st.integers(0, 99), st.sampled_from([0.0, 0.5, 0.97, 1.0]))
@settings(max_examples=100, deadline=None)
def test_discounted_sums_equal_a_loop(lengths: list[int], seed: int, discount: float) -> None:
    x, _, _, unit = random_chains(lengths, seed)
    expected = x.clone()
    for j in reversed(range(len(x) - 1)):
        if unit[j] == unit[j + 1]:
            expected[j] += discount * expected[j + 1]
    assert close(discounted_sums(x, unit, discount), expected)


@given(LENGTHS, st.integers(0, 99), st.sampled_from([0.9, 1.0]), st.sampled_from([0.0, 0.8, 1.0]))
@settings(max_examples=100, deadline=None)
def test_gae_equals_a_loop(lengths: list[int], seed: int, gamma: float, lam: float) -> None:
    rewards, values, final, unit = random_chains(lengths, seed)
    expected = torch.zeros_like(rewards)
    for j in reversed(range(len(rewards))):
        continues = j + 1 < len(rewards) and unit[j] == unit[j + 1]
        next_value = values[j + 1] if continues else final[unit[j]]
        carried = gamma * lam * expected[j + 1] if continues else 0
        expected[j] = rewards[j] + gamma * next_value - values[j] + carried
    assert close(generalized_advantages(rewards, values, final, unit, gamma, lam), expected)


def test_each_chain_can_have_its_own_discount() -> None:
    x, unit = numbers(1, 1, 1, 1), units(0, 0, 1, 1)
    assert discounted_sums(x, unit, numbers(0.5, 0.5, 0.1, 0.1)).tolist() == [1.5, 1.0, 1.1, 1.0]


def test_gae_by_hand() -> None:
    # a chain of two, then a chain of one that leads to a state of value 3; gamma 0.5, lambda 0.5
    rewards, values, final = numbers(0, 1, 2), numbers(0.4, 0.6, 0.5), numbers(0, 3)
    found = generalized_advantages(rewards, values, final, units(0, 0, 1), 0.5, 0.5)
    last = 1 - 0.6
    assert close(found, numbers(0 + 0.5 * 0.6 - 0.4 + 0.25 * last, last, 2 + 0.5 * 3 - 0.5))


def test_gae_at_its_limits_is_return_minus_value_and_the_one_step_error() -> None:
    rewards, values, final, unit = random_chains([4, 3], 0)
    full = generalized_advantages(rewards, values, torch.zeros_like(final), unit, 1.0, 1.0)
    assert close(full, discounted_sums(rewards, unit, 1.0) - values)
    one_step = generalized_advantages(rewards, values, final, unit, 0.9, 0.0)
    assert close(one_step[3], rewards[3] + 0.9 * final[0] - values[3])
    assert close(one_step[0], rewards[0] + 0.9 * values[1] - values[0])


def test_shaping_by_a_potential_that_the_critic_knows_leaves_advantages_unchanged() -> None:
    rewards, values, final, unit = random_chains([5], 1)
    potential = torch.randn(6, dtype=torch.float64)
    shaped = generalized_advantages(
        rewards + 0.9 * potential[1:] - potential[:-1],
        values - potential[:-1],
        final - potential[-1:],
        unit,
        0.9,
        0.7,
    )
    assert close(shaped, generalized_advantages(rewards, values, final, unit, 0.9, 0.7))
