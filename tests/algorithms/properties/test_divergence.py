"""P10: where each estimate of a KL divergence pulls, in exact expectation over a small distribution."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import strategies as st
from learning import close
from searching import holds, rejected
from torch import Tensor

from agent_r1.algorithms.loss_terms import Estimator, Kl

Divergence = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(log pi, log ref, log pi - log pi_old) of each token -> the estimate at each."""

LOGITS = st.lists(st.integers(-8, 8).map(lambda quarters: quarters / 4), min_size=4, max_size=4)


def ours(estimator: Estimator) -> Divergence:
    return Kl(estimator=estimator).divergence


def expected(
    divergence: Divergence, logits: list[float], reference: list[float], old: list[float]
) -> tuple[Tensor, ...]:
    """Over tokens drawn from pi_old: the estimate's expectation, and its gradient by pi's logits; then log pi, log ref
    and those logits."""
    parameters = torch.tensor(logits).double().requires_grad_()
    policy = parameters.log_softmax(0)
    other, sampler = (torch.tensor(numbers).double().log_softmax(0) for numbers in (reference, old))
    total = (sampler.exp() * divergence(policy, other, policy - sampler)).sum()
    return total.detach(), torch.autograd.grad(total, parameters, retain_graph=True)[0], policy, other, parameters


def reverse(policy: Tensor, other: Tensor) -> Tensor:
    """KL(pi || ref)."""
    return (policy.exp() * (policy - other)).sum()


def forward(policy: Tensor, other: Tensor) -> Tensor:
    """KL(ref || pi)."""
    return (other.exp() * (other - policy)).sum()


def it_pulls_to_the_reference(divergence: Divergence, logits: list[float], reference: list[float]) -> None:
    _, gradient, policy, other, parameters = expected(divergence, logits, reference, logits)
    assert close(gradient, torch.autograd.grad(reverse(policy, other), parameters)[0])


def it_does_not_pull(divergence: Divergence, logits: list[float], reference: list[float]) -> None:
    assert expected(divergence, logits, reference, logits)[1].abs().max() < 1e-12


def it_pulls_the_reference_over(divergence: Divergence, logits: list[float], reference: list[float]) -> None:
    _, gradient, policy, other, parameters = expected(divergence, logits, reference, logits)
    assert close(gradient, torch.autograd.grad(forward(policy, other), parameters)[0])


def it_is_right_for_tokens_of_an_older_policy(divergence: Divergence, *logits: list[float]) -> None:
    value, gradient, policy, other, parameters = expected(divergence, *logits)
    assert close(value, reverse(policy, other).detach())
    assert close(gradient, torch.autograd.grad(reverse(policy, other), parameters)[0])


def it_is_the_divergence(divergence: Divergence, logits: list[float], reference: list[float]) -> None:
    value, _, policy, other, _ = expected(divergence, logits, reference, logits)
    assert close(value, reverse(policy, other).detach())


@pytest.mark.parametrize("estimator", ["k2", "k3_plus", "k3_unbiased"])
def test_these_pull_to_the_reference(estimator: Estimator) -> None:
    holds(it_pulls_to_the_reference, ours(estimator), LOGITS, LOGITS)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_as_a_loss_are_seen_not_to(estimator: Estimator) -> None:
    rejected(it_pulls_to_the_reference, ours(estimator), LOGITS, LOGITS)


def test_k1_pulls_nowhere_and_k3_as_the_forward_divergence_does() -> None:
    holds(it_does_not_pull, ours("k1"), LOGITS, LOGITS)
    rejected(it_does_not_pull, ours("k2"), LOGITS, LOGITS)
    holds(it_pulls_the_reference_over, ours("k3"), LOGITS, LOGITS)
    rejected(it_pulls_the_reference_over, ours("k3_plus"), LOGITS, LOGITS)


@pytest.mark.parametrize("estimator", ["k1", "k3", "k3_plus", "k3_unbiased"])
def test_these_are_unbiased(estimator: Estimator) -> None:
    holds(it_is_the_divergence, ours(estimator), LOGITS, LOGITS)


def test_k2_is_seen_to_be_biased() -> None:
    rejected(it_is_the_divergence, ours("k2"), LOGITS, LOGITS)


def test_off_policy_only_the_weighted_one_is_right() -> None:
    holds(it_is_right_for_tokens_of_an_older_policy, ours("k3_unbiased"), LOGITS, LOGITS, LOGITS)
    others: tuple[Estimator, ...] = ("k1", "k2", "k3", "k3_plus")
    for estimator in others:
        rejected(it_is_right_for_tokens_of_an_older_policy, ours(estimator), LOGITS, LOGITS, LOGITS)
