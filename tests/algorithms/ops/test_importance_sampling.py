"""Importance ratios of tokens and of units, by hand."""

from __future__ import annotations

import math

import torch
from tensors import close, numbers, units

from agent_r1.algorithms.loss_terms import Correction, Rejection
from agent_r1.algorithms.ops import clamp_log_ratio, effective_share, importance_ratio

LOG_RATIOS = numbers(0.25, 0.5, 1.0, 2.0, 4.0).log()
ALONE = units(0, 1, 2, 3, 4)


def test_extreme_ratios_stay_finite() -> None:
    assert importance_ratio(numbers(1e6, -1e6), numbers(0, 0)).isfinite().all()
    assert importance_ratio(numbers(1e6, 1e6), numbers(0, 0), units(0, 0)).isfinite().all()
    assert clamp_log_ratio(numbers(1e6)).exp().isfinite().all()
    assert not numbers(1e6).exp().isfinite().all()  # control


def test_the_ratio_of_a_unit_is_the_geometric_mean_and_has_the_gradient_of_each_token() -> None:
    logprobs = numbers(0.4, 0.8, -1.0).requires_grad_()
    found = importance_ratio(logprobs, numbers(0, 0, 0), units(0, 0, 1))
    assert close(found, numbers(0.6, 0.6, -1.0).exp())
    (gradient,) = torch.autograd.grad(found[0].log(), logprobs)
    assert gradient.tolist() == [1, 0, 0]


def test_the_effective_share_of_weights_by_hand() -> None:
    assert effective_share(numbers(0.5, 0.5, 0.5)) == effective_share(numbers(2.0)) == 1.0
    assert effective_share(numbers(0, 0, 5, 0)) == 0.25
    assert math.isclose(effective_share(numbers(1, 2, 3)), 36 / 42)
    assert effective_share(numbers(0, 0)) == 0.0


def test_weights_per_token_keep_long_trajectories_and_products_over_trajectories_do_not() -> None:
    random = torch.Generator().manual_seed(0)
    unit = torch.arange(64).repeat_interleave(2000)  # 64 trajectories of 2000 tokens
    noise = 0.05 * torch.randn(len(unit), generator=random, dtype=torch.float64)  # a gap as that of bfloat16
    log_ratio = noise - 0.05**2 / 2  # the mean ratio of the sampler's tokens is 1
    tokens = Correction().weight(log_ratio, torch.arange(len(unit)))
    assert effective_share(tokens) > 0.99 and abs(float(tokens.mean()) - 1) < 0.01
    products = Correction().weight(log_ratio, unit)
    assert effective_share(products) < 0.5 and float(products.mean()) < 0.5


def test_truncation_window_and_rejection_by_hand() -> None:
    assert close(Correction(high=2.0).weight(LOG_RATIOS, ALONE), numbers(0.25, 0.5, 1, 2, 2))
    assert close(Correction(rule="window", low=0.45, high=2.5).weight(LOG_RATIOS, ALONE), numbers(0, 0.5, 1, 2, 0))
    accepted = Rejection(low=0.45, high=2.5).accepted(LOG_RATIOS, ALONE)
    assert accepted.tolist() == [False, True, True, True, False]


def test_a_correction_takes_the_product_of_a_unit_and_a_rejection_its_mean_or_product() -> None:
    unit = units(0, 0, 1, 1, 1)  # products 0.125 and 8, geometric means sqrt(0.125) and 2
    assert close(Correction(high=10.0).weight(LOG_RATIOS, unit), numbers(0.125, 0.125, 8, 8, 8))
    mean = math.sqrt(0.125)
    assert Rejection(low=0.99 * mean, high=1.99).accepted(LOG_RATIOS, unit).tolist() == [True] * 2 + [False] * 3
    assert Rejection(low=1.01 * mean, high=2.01).accepted(LOG_RATIOS, unit).tolist() == [False] * 2 + [True] * 3
    product = Rejection(statistic="product", low=0.12, high=0.13)
    assert product.accepted(LOG_RATIOS, unit).tolist() == [True] * 2 + [False] * 3


def test_equal_policies_have_weight_one_and_extreme_ones_a_finite_weight() -> None:
    equal, window = numbers(0, 0), Correction(rule="window", low=0.5, high=5.0)
    for correction in (Correction(high=2.0), window):
        assert correction.weight(equal, units(0, 1)).tolist() == [1, 1]
    assert Correction(rule="window", low=0.0, high=1e9).weight(numbers(1e6), units(0)).isfinite().all()
