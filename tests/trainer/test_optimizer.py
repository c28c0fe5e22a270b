"""The optimizer is AdamW, clips each module by its own norm, and refuses what is not finite."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from agent_r1.trainer.optimizer import Optimizer, Trained


def modules() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {"policy": nn.Linear(3, 2), "critic": nn.Linear(3, 1)}


def optimizer_of(parts: dict[str, nn.Module], *, decay: float = 0.0, norm: float = 1.0) -> Optimizer:
    rates = {"policy": 0.1, "critic": 0.3}
    return Optimizer({name: Trained(part, rates[name]) for name, part in parts.items()}, (0.9, 0.99), decay, norm)


def backward(parts: dict[str, nn.Module], scale: float = 1.0) -> torch.Tensor:
    x = torch.tensor([[1.0, -2.0, 0.5]])
    loss = scale * sum(part(x).square().sum() for part in parts.values())
    loss.backward()
    return loss


def test_it_is_adamw_with_a_learning_rate_for_each_module() -> None:
    ours, theirs = modules(), modules()
    optimizer = optimizer_of(ours, norm=1e9)
    reference = torch.optim.AdamW(
        [{"params": theirs["policy"].parameters(), "lr": 0.1}, {"params": theirs["critic"].parameters(), "lr": 0.3}],
        betas=(0.9, 0.99),
        weight_decay=0.0,
    )
    for _ in range(3):
        optimizer.step(backward(ours), ours)
        reference.zero_grad()
        backward(theirs)
        reference.step()
    for name in ours:
        for one, other in zip(ours[name].parameters(), theirs[name].parameters(), strict=True):
            assert torch.allclose(one, other, atol=1e-6)


def test_each_module_is_clipped_by_its_own_norm_which_is_reported() -> None:
    parts = modules()
    optimizer = optimizer_of(parts, norm=0.5)
    backward(parts)
    true = {name: math.hypot(*(float(p.grad.norm()) for p in part.parameters())) for name, part in parts.items()}
    norms = optimizer.step(torch.tensor(0.0), parts)
    assert norms == pytest.approx(true) and min(true.values()) > 0.5
    for name in parts:
        first = [moment for key, moment in optimizer.tensors().items() if key.startswith(name) and key.endswith("avg")]
        assert math.hypot(*(float(moment.norm()) for moment in first)) == pytest.approx(0.1 * 0.5, rel=1e-4)


def test_only_matrices_decay() -> None:
    parts = modules()
    optimizer = optimizer_of(parts, decay=0.5)
    before = {name: tensor.clone() for name, tensor in parts["policy"].named_parameters()}
    backward(parts, scale=0.0)
    optimizer.step(torch.tensor(0.0), parts)
    assert torch.allclose(parts["policy"].weight, before["weight"] * (1 - 0.1 * 0.5))
    assert torch.equal(parts["policy"].bias, before["bias"])


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_what_is_not_finite_changes_nothing(where: str) -> None:
    parts = modules()
    optimizer = optimizer_of(parts)
    optimizer.step(backward(parts), parts)
    before = [tensor.clone() for part in parts.values() for tensor in part.parameters()]
    moments = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    loss = backward(parts)
    if where == "gradient":
        parts["critic"].bias.grad[0] = math.inf
    assert optimizer.step(torch.tensor(math.nan) if where == "loss" else loss, parts) is None
    now = [tensor for part in parts.values() for tensor in part.parameters()]
    assert all(torch.equal(one, other) for one, other in zip(before, now, strict=True))
    assert all(torch.equal(tensor, optimizer.tensors()[name]) for name, tensor in moments.items())
    assert all(tensor.grad is None for tensor in now)
    assert optimizer.step(backward(parts), parts) is not None  # control


def test_a_frozen_parameter_stays() -> None:
    parts = modules()
    parts["policy"].bias.requires_grad_(False)
    optimizer = optimizer_of(parts)
    before = parts["policy"].bias.clone()
    optimizer.step(backward(parts), parts)
    assert torch.equal(parts["policy"].bias, before)
    assert "policy.bias.exp_avg" not in optimizer.tensors() and "policy.weight.exp_avg" in optimizer.tensors()


def test_a_module_that_is_not_moving_keeps_its_weights_and_moments() -> None:
    parts = modules()
    optimizer = optimizer_of(parts, decay=0.5)
    optimizer.step(backward(parts), parts)  # now it has momentum, which would carry it on
    weights = [parameter.clone() for parameter in parts["policy"].parameters()]
    moments = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    assert set(optimizer.step(backward(parts), {"critic"}) or ()) == {"critic"}
    assert all(torch.equal(one, other) for one, other in zip(weights, parts["policy"].parameters(), strict=True))
    changed = {name for name, tensor in optimizer.tensors().items() if not torch.equal(tensor, moments[name])}
    assert changed == {name for name in moments if name.startswith("critic")}  # control: the critic did move
    assert all(parameter.grad is None for parameter in parts["policy"].parameters())
