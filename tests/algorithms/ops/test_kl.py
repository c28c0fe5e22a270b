"""The KL estimators in exact expectation: their value and their gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tensors import close, numbers
from torch import Tensor

from agent_r1.algorithms.ops import kl_k1, kl_k2, kl_k3, kl_k3_plus, kl_k3_unbiased

LOGITS, OTHER = numbers(0.3, -0.5, 1.0), numbers(0.1, 0.4, -0.2)


def exact(estimator: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the estimator's exact expectation, its expected gradient, KL(p||q) and the gradient of KL(p||q)."""
    logits = LOGITS.clone().requires_grad_()
    q, p = OTHER.log_softmax(0), logits.log_softmax(0)
    kl = (p.exp() * (p - q)).sum()
    value = (p.exp().detach() * estimator(p, q)).sum()
    (gradient,) = torch.autograd.grad(value, logits, retain_graph=True)
    return value.detach(), gradient, kl.detach(), torch.autograd.grad(kl, logits)[0]


def unbiased(p: Tensor, q: Tensor) -> Tensor:
    return kl_k3_unbiased(p, q, (p - p.detach()).exp())


@pytest.mark.parametrize("estimator", [kl_k1, kl_k3, kl_k3_plus, unbiased])
def test_the_value_is_the_divergence(estimator: Callable[[Tensor, Tensor], Tensor]) -> None:
    value, _, kl, _ = exact(estimator)
    assert close(value, kl)
    assert not close(exact(kl_k2)[0], kl)  # control: k2 is biased


@pytest.mark.parametrize("estimator", [kl_k2, kl_k3_plus, unbiased])
def test_these_have_the_gradient_of_the_divergence(estimator: Callable[[Tensor, Tensor], Tensor]) -> None:
    _, gradient, _, expected = exact(estimator)
    assert close(gradient, expected)


def test_k1_has_no_gradient_and_k3_that_of_the_forward_divergence() -> None:
    assert close(exact(kl_k1)[1], torch.zeros(3, dtype=torch.float64))
    _, gradient, _, expected = exact(kl_k3)
    assert not close(gradient, expected)  # it is that of KL(q||p): softmax(logits) - q
    assert close(gradient, LOGITS.softmax(0) - OTHER.softmax(0))


def test_k3_is_never_negative() -> None:
    p, q = torch.randn(2, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert (kl_k3(p, q) >= 0).all() and (kl_k3_plus(p, q) >= 0).all()
    assert (kl_k1(p, q) < 0).any()  # control
