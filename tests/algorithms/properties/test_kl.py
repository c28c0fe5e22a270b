"""P10: the gradient of each KL estimator, in exact expectation over a small distribution."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import strategies as st
from learning import close
from searching import holds, rejected
from torch import Tensor

from agent_r1.algorithms.loss_terms import Kl, KlEstimator

Divergence = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(log pi, log ref, pi / pi_old) of each token -> the estimate at each token."""

LOGITS = st.lists(st.integers(-8, 8).map(lambda quarters: quarters / 4), min_size=4, max_size=4)


def ours(estimator: KlEstimator) -> Divergence:
    return Kl(estimator=estimator).divergence


def expectation(
    divergence: Divergence, logits: list[float], reference: list[float], old: list[float]
) -> tuple[Tensor, ...]:
    """Return, over tokens sampled from pi_old, the estimate's expectation and its gradient by pi's logits; then log pi,
    log ref and those logits."""
    parameters = torch.tensor(logits).double().requires_grad_()
    policy = parameters.log_softmax(0)
    other, sampler = (torch.tensor(numbers).double().log_softmax(0) for numbers in (reference, old))
    total = (sampler.exp() * divergence(policy, other, (policy - sampler).exp())).sum()
    return total.detach(), torch.autograd.grad(total, parameters, retain_graph=True)[0], policy, other, parameters


def reverse_kl(policy: Tensor, other: Tensor) -> Tensor:
    """Return KL(pi || ref)."""
    return (policy.exp() * (policy - other)).sum()


def forward_kl(policy: Tensor, other: Tensor) -> Tensor:
    """Return KL(ref || pi)."""
    return (other.exp() * (other - policy)).sum()


def has_gradient_of_reverse_kl(divergence: Divergence, logits: list[float], reference: list[float]) -> None:
    _, gradient, policy, other, parameters = expectation(divergence, logits, reference, logits)
    assert close(gradient, torch.autograd.grad(reverse_kl(policy, other), parameters)[0])


def has_no_gradient(divergence: Divergence, logits: list[float], reference: list[float]) -> None:
    assert expectation(divergence, logits, reference, logits)[1].abs().max() < 1e-12


def has_gradient_of_forward_kl(divergence: Divergence, logits: list[float], reference: list[float]) -> None:
    _, gradient, policy, other, parameters = expectation(divergence, logits, reference, logits)
    assert close(gradient, torch.autograd.grad(forward_kl(policy, other), parameters)[0])


def is_right_for_tokens_of_an_older_policy(divergence: Divergence, *logits: list[float]) -> None:
    value, gradient, policy, other, parameters = expectation(divergence, *logits)
    assert close(value, reverse_kl(policy, other).detach())
    assert close(gradient, torch.autograd.grad(reverse_kl(policy, other), parameters)[0])


def is_unbiased(divergence: Divergence, logits: list[float], reference: list[float]) -> None:
    value, _, policy, other, _ = expectation(divergence, logits, reference, logits)
    assert close(value, reverse_kl(policy, other).detach())


ESTIMATORS: tuple[KlEstimator, ...] = ("k1", "k2", "k3", "k3_plus", "k3_unbiased")


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_on_policy_values_and_gradients(estimator: KlEstimator) -> None:
    right = holds if estimator in ("k2", "k3_plus", "k3_unbiased") else rejected
    right(has_gradient_of_reverse_kl, ours(estimator), LOGITS, LOGITS)
    right = rejected if estimator == "k2" else holds
    right(is_unbiased, ours(estimator), LOGITS, LOGITS)
    policy, other = torch.randn(2, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    is_positive = bool((ours(estimator)(policy, other, torch.ones(50)) >= 0).all())
    assert is_positive == (estimator != "k1")


def test_k1_has_no_gradient_and_k3_that_of_the_forward_divergence() -> None:
    holds(has_no_gradient, ours("k1"), LOGITS, LOGITS)
    holds(has_gradient_of_forward_kl, ours("k3"), LOGITS, LOGITS)
    rejected(has_gradient_of_forward_kl, ours("k3_plus"), LOGITS, LOGITS)


def test_off_policy_only_the_weighted_estimator_is_right() -> None:
    holds(is_right_for_tokens_of_an_older_policy, ours("k3_unbiased"), LOGITS, LOGITS, LOGITS)
    for estimator in ESTIMATORS[:4]:
        rejected(is_right_for_tokens_of_an_older_policy, ours(estimator), LOGITS, LOGITS, LOGITS)
