"""The algebra equals cases computed by hand, plain loops, and known identities."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agent_r1.learn.algebra import (
    centre,
    clipped_surrogate,
    clipped_value_loss,
    deviation,
    discounted_sums,
    dual_clip,
    generalised_advantages,
    kl_k1,
    kl_k2,
    kl_k3,
    leave_one_out,
    log_ratio,
    segment_mean,
    segment_sum,
    standardise,
    token_mean,
    unit_mean,
    varies,
    whiten,
)


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def units(*values: int) -> Tensor:
    return torch.tensor(values)


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-9) -> bool:
    return torch.allclose(found, expected, rtol=tolerance, atol=tolerance)


def test_segments() -> None:
    x, unit = numbers(1, 2, 3, 10), units(0, 2, 2, 0)
    assert segment_sum(x, unit).tolist() == [11, 0, 5]
    assert segment_mean(x, unit).tolist() == [5.5, 0, 2.5]


def test_relative_advantages_by_hand() -> None:
    rewards, group = numbers(1, 0, 0, 3, 5), units(0, 0, 0, 1, 1)
    assert close(centre(rewards, group), numbers(2 / 3, -1 / 3, -1 / 3, -1, 1))
    assert close(leave_one_out(rewards, group), numbers(1, -0.5, -0.5, -2, 2))
    assert close(deviation(rewards, group), numbers(*[math.sqrt(1 / 3)] * 3, *[math.sqrt(2)] * 2))
    halves = math.sqrt(0.5)
    expected = numbers(2 / math.sqrt(3), -1 / math.sqrt(3), -1 / math.sqrt(3), -halves, halves)
    assert close(standardise(rewards, group, 0.0), expected)


@pytest.mark.parametrize("advantage", [centre, leave_one_out, lambda x, key: standardise(x, key, 1e-6)])
def test_a_group_without_variance_and_a_group_of_one_get_exactly_nothing(
    advantage: Callable[[Tensor, Tensor], Tensor],
) -> None:
    noisy = numbers(0.1 + 0.2, 0.3, 0.3, 7.0, 1.0, 2.0)  # 0.1 + 0.2 is not 0.3 in floating point
    found = advantage(noisy, units(0, 0, 0, 1, 2, 2))
    assert found[:4].tolist() == [0.0, 0.0, 0.0, 0.0]
    assert found[4] == -found[5] != 0  # control: a group with variance gets something
    assert varies(noisy, units(0, 0, 0, 1, 2, 2)).tolist() == [False] * 4 + [True] * 2


REWARDS = st.lists(st.tuples(st.integers(0, 3), st.integers(-3, 3)), min_size=1, max_size=20)


@given(REWARDS)
@settings(max_examples=200, deadline=None)
def test_leave_one_out_is_the_distance_to_the_mean_of_the_others(pairs: list[tuple[int, int]]) -> None:
    found = leave_one_out(numbers(*(reward for _, reward in pairs)), units(*(key for key, _ in pairs)))
    for place, (key, reward) in enumerate(pairs):
        others = [other for j, (group, other) in enumerate(pairs) if group == key and j != place]
        expected = reward - sum(others) / len(others) if others else 0.0
        assert math.isclose(found[place], expected, abs_tol=1e-9)


@given(REWARDS, st.floats(0.1, 10), st.floats(-10, 10))
@settings(max_examples=100, deadline=None)
def test_standardising_ignores_scale_and_offset_of_rewards(
    pairs: list[tuple[int, int]], scale: float, offset: float
) -> None:
    rewards, key = numbers(*(reward for _, reward in pairs)), units(*(key for key, _ in pairs))
    assert close(standardise(rewards, key, 0.0), standardise(scale * rewards + offset, key, 0.0), 1e-6)


def test_whitening() -> None:
    assert close(whiten(numbers(1, 2, 3)), numbers(-1, 0, 1), 1e-7)
    assert whiten(numbers(5)).tolist() == [0.0] and whiten(numbers(2, 2)).tolist() == [0.0, 0.0]


LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=5)


def flat(lengths: list[int], seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random rewards, values and end values of units of these lengths, and the unit of each element."""
    random = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    draw = torch.randn(2 * total + len(lengths), generator=random, dtype=torch.float64)
    unit = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return draw[:total], draw[total : 2 * total], draw[2 * total :], unit


@given(LENGTHS, st.integers(0, 99), st.sampled_from([0.0, 0.5, 0.97, 1.0]))
@settings(max_examples=100, deadline=None)
def test_discounted_sums_equal_a_loop(lengths: list[int], seed: int, discount: float) -> None:
    x, _, _, unit = flat(lengths, seed)
    expected = x.clone()
    for j in reversed(range(len(x) - 1)):
        if unit[j] == unit[j + 1]:
            expected[j] += discount * expected[j + 1]
    assert close(discounted_sums(x, unit, discount), expected)


@given(LENGTHS, st.integers(0, 99), st.sampled_from([0.9, 1.0]), st.sampled_from([0.0, 0.8, 1.0]))
@settings(max_examples=100, deadline=None)
def test_gae_equals_a_loop(lengths: list[int], seed: int, gamma: float, lam: float) -> None:
    rewards, values, after, unit = flat(lengths, seed)
    expected = torch.zeros_like(rewards)
    for j in reversed(range(len(rewards))):
        within = j + 1 < len(rewards) and unit[j] == unit[j + 1]
        following = values[j + 1] if within else after[unit[j]]
        expected[j] = rewards[j] + gamma * following - values[j] + (gamma * lam * expected[j + 1] if within else 0)
    assert close(generalised_advantages(rewards, values, after, unit, gamma, lam), expected)


def test_gae_by_hand() -> None:
    # two tokens, then one; gamma 0.5, lambda 0.5
    rewards, values = numbers(0, 1, 2), numbers(0.4, 0.6, 0.5)
    found = generalised_advantages(rewards, values, numbers(0, 3), units(0, 0, 1), 0.5, 0.5)
    last = 1 - 0.6
    assert close(found, numbers(0 + 0.5 * 0.6 - 0.4 + 0.25 * last, last, 2 + 0.5 * 3 - 0.5))


def test_gae_at_its_limits_is_return_minus_value_and_the_one_step_error() -> None:
    rewards, values, after, unit = flat([4, 3], 0)
    ends = torch.zeros(2, dtype=torch.float64)
    full = generalised_advantages(rewards, values, ends, unit, 1.0, 1.0)
    assert close(full, discounted_sums(rewards, unit, 1.0) - values)
    one_step = generalised_advantages(rewards, values, after, unit, 0.9, 0.0)
    assert close(one_step[3], rewards[3] + 0.9 * after[0] - values[3])
    assert close(one_step[0], rewards[0] + 0.9 * values[1] - values[0])


def test_shaping_by_a_potential_that_the_critic_knows_leaves_advantages_unchanged() -> None:
    rewards, values, after, unit = flat([5], 1)
    potential = torch.randn(6, dtype=torch.float64)
    shaped = generalised_advantages(
        rewards + 0.9 * potential[1:] - potential[:-1], values - potential[:-1], after - potential[-1:], unit, 0.9, 0.7
    )
    assert close(shaped, generalised_advantages(rewards, values, after, unit, 0.9, 0.7))


def test_clipping_by_hand() -> None:
    ratio, advantage = numbers(1.5, 1.5, 0.5, 0.5, 1.0), numbers(1, -1, 1, -1, 2)
    found = clipped_surrogate(ratio, advantage, 0.2, 0.3)
    assert close(found, numbers(-1.3, 1.5, -0.5, 0.8, -2.0))


def test_dual_clip_acts_only_where_the_advantage_is_negative_and_the_ratio_large() -> None:
    ratio, advantage = numbers(5.0, 5.0, 2.0), numbers(-1, 1, -1)
    loss = clipped_surrogate(ratio, advantage, 0.2, 0.2)
    assert loss.tolist() == [5.0, -1.2, 2.0]
    assert dual_clip(loss, advantage, 3.0).tolist() == [3.0, -1.2, 2.0]


def test_on_policy_the_clipped_surrogate_has_the_policy_gradient() -> None:
    logprobs = torch.randn(7, dtype=torch.float64).requires_grad_()
    advantage = torch.randn(7, dtype=torch.float64)
    ratio = log_ratio(logprobs, logprobs.detach()).exp()
    (found,) = torch.autograd.grad(clipped_surrogate(ratio, advantage, 0.2, 0.2).sum(), logprobs)
    assert close(found, -advantage)


def test_a_ratio_that_ran_away_stays_finite() -> None:
    assert log_ratio(numbers(1e6, -1e6), numbers(0, 0)).exp().isfinite().all()


def test_value_loss_by_hand() -> None:
    values, old, target = numbers(1.0, 1.0, 0.3), numbers(0.0, 0.0, 0.2), numbers(1.0, -1.0, 0.0)
    # clipped to 0.5: 0.5 against 1, and against -1 the unclipped one is worse; within the clip both are equal
    assert close(clipped_value_loss(values, old, target, 0.5), numbers(0.5 * 0.25, 0.5 * 4, 0.5 * 0.09))


def test_weights_sum_to_one_over_tokens_and_over_units() -> None:
    unit = units(0, 0, 0, 1)
    assert token_mean(unit).tolist() == [0.25] * 4
    assert close(unit_mean(unit), numbers(1 / 6, 1 / 6, 1 / 6, 1 / 2))


def exact(estimator: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Over all tokens: the estimator's expectation, its expected gradient, KL(p||q), the gradient of that."""
    logits = numbers(0.3, -0.5, 1.0).requires_grad_()
    q = numbers(0.1, 0.4, -0.2).log_softmax(0)
    p = logits.log_softmax(0)
    kl = (p.exp() * (p - q)).sum()
    value = (p.exp().detach() * estimator(p, q)).sum()
    (gradient,) = torch.autograd.grad(value, logits, retain_graph=True)
    return value, gradient, kl, torch.autograd.grad(kl, logits)[0]


def test_kl_estimators_in_exact_expectation() -> None:
    for unbiased in (kl_k1, kl_k3):
        value, _, kl, _ = exact(unbiased)
        assert close(value, kl)
    _, gradient, _, expected = exact(kl_k2)
    assert close(gradient, expected)
    assert close(exact(kl_k1)[1], torch.zeros(3, dtype=torch.float64))
    _, gradient, _, _ = exact(kl_k3)
    assert not close(gradient, expected)  # it is that of KL(q||p): softmax(logits) - q
    assert close(gradient, numbers(0.3, -0.5, 1.0).softmax(0) - numbers(0.1, 0.4, -0.2).softmax(0))
    p, q, _, _ = flat([50], 0)
    assert (kl_k3(p, q) >= 0).all()
