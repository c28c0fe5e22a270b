"""Scores from logits: equal to torch's own operations, whatever the size of a part."""

import pytest
import torch
from torch import Tensor, nn

from agent_r1.model import forward as module
from agent_r1.model.forward import softmax_scores

Results = tuple[Tensor, Tensor, Tensor]
"""Log-probabilities, entropies, and the gradient of the logits."""


def case(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits (7, 11), targets (7, 3), and factors on the scores in a loss."""
    torch.manual_seed(0)
    logits = 3 * torch.randn(7, 11, dtype=dtype)
    return logits, torch.randint(0, 11, (7, 3)), torch.randn(7, 3, dtype=dtype), torch.randn(7, dtype=dtype)


def ours(dtype: torch.dtype, temperature: float, entropy_factor: float) -> Results:
    logits, targets, factors, entropy_factors = case(dtype)
    leaf = logits.clone().requires_grad_()
    scores = softmax_scores(nn.Identity(), leaf * 1, targets, temperature, entropy_gradient=entropy_factor != 0)
    loss = (scores.logprobs * factors).sum() + entropy_factor * (scores.entropy * entropy_factors).sum()
    return scores.logprobs, scores.entropy, torch.autograd.grad(loss, leaf)[0]


def expected(dtype: torch.dtype, temperature: float, entropy_factor: float) -> Results:
    logits, targets, factors, entropy_factors = case(dtype)
    leaf = logits.clone().requires_grad_()
    table = (leaf / temperature).log_softmax(-1)
    logprobs, entropy = table.gather(-1, targets), -(table.exp() * table).sum(-1)
    loss = (logprobs * factors).sum() + entropy_factor * (entropy * entropy_factors).sum()
    return logprobs, entropy, torch.autograd.grad(loss, leaf)[0]


@pytest.mark.parametrize("part_logits", [1 << 18, 24, 1])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("entropy_factor", [0.0, 0.3])
def test_scores_and_gradients_equal_those_of_plain_operations(
    part_logits: int, temperature: float, entropy_factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PART_LOGITS", part_logits)
    arguments = (torch.float64, temperature, entropy_factor)
    for found, wanted in zip(ours(*arguments), expected(*arguments), strict=True):
        assert torch.allclose(found, wanted, atol=1e-12)


def test_without_a_gradient_of_the_entropy_the_bits_are_those_of_plain_operations() -> None:
    for found, wanted in zip(ours(torch.float32, 0.7, 0.0), expected(torch.float32, 0.7, 0.0), strict=True):
        assert torch.equal(found, wanted)


def test_a_second_backward_pass_is_refused() -> None:
    logits, targets, _, _ = case(torch.float64)
    leaf = logits.requires_grad_()
    total = softmax_scores(nn.Identity(), leaf * 1, targets, 1.0, entropy_gradient=False).logprobs.sum()
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()
