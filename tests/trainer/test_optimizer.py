"""The optimizer is AdamW, clips each module by its own gradient norm, and refuses non-finite gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from agent_r1.trainer.config import TrainerConfig
from agent_r1.trainer.optimizer import Optimizer


def two_modules() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {"policy": nn.Linear(3, 2), "critic": nn.Linear(3, 1)}


def optimizer_of(modules: dict[str, nn.Module], *, decay: float = 0.0, norm: float = 1.0) -> Optimizer:
    rates = {"learning_rate": 0.1, "critic_learning_rate": 0.3}
    return Optimizer(modules, TrainerConfig(**rates, betas=(0.9, 0.99), weight_decay=decay, max_grad_norm=norm))


def backward(modules: dict[str, nn.Module], scale: float = 1.0) -> torch.Tensor:
    x = torch.tensor([[1.0, -2.0, 0.5]])
    loss = scale * sum(module(x).square().sum() for module in modules.values())
    loss.backward()
    return loss


def test_it_is_adamw_with_a_learning_rate_for_each_module() -> None:
    ours, theirs = two_modules(), two_modules()
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
    modules = two_modules()
    optimizer = optimizer_of(modules, norm=0.5)
    backward(modules)
    true = {name: math.hypot(*(float(p.grad.norm()) for p in module.parameters())) for name, module in modules.items()}
    stats = optimizer.step(torch.tensor(0.0), modules)
    assert stats.applied and stats.gradient_norms == pytest.approx(true) and min(true.values()) > 0.5
    for name in modules:
        first = [moment for key, moment in optimizer.tensors().items() if key.startswith(name) and key.endswith("avg")]
        assert math.hypot(*(float(moment.norm()) for moment in first)) == pytest.approx(0.1 * 0.5, rel=1e-4)


def test_only_matrices_decay() -> None:
    modules = two_modules()
    optimizer = optimizer_of(modules, decay=0.5)
    before = {name: tensor.clone() for name, tensor in modules["policy"].named_parameters()}
    backward(modules, scale=0.0)
    optimizer.step(torch.tensor(0.0), modules)
    assert torch.allclose(modules["policy"].weight, before["weight"] * (1 - 0.1 * 0.5))
    assert torch.equal(modules["policy"].bias, before["bias"])


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_non_finite_loss_or_gradient_changes_nothing(where: str) -> None:
    modules = two_modules()
    optimizer = optimizer_of(modules)
    optimizer.step(backward(modules), modules)
    before = [tensor.clone() for module in modules.values() for tensor in module.parameters()]
    moments = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    loss = backward(modules)
    if where == "gradient":
        modules["critic"].bias.grad[0] = math.inf
    assert not optimizer.step(torch.tensor(math.nan) if where == "loss" else loss, modules).applied
    now = [tensor for module in modules.values() for tensor in module.parameters()]
    assert all(torch.equal(one, other) for one, other in zip(before, now, strict=True))
    assert all(torch.equal(tensor, optimizer.tensors()[name]) for name, tensor in moments.items())
    assert all(tensor.grad is None for tensor in now)
    assert optimizer.step(backward(modules), modules).applied  # control


def test_a_frozen_parameter_is_not_trained() -> None:
    modules = two_modules()
    modules["policy"].bias.requires_grad_(False)
    optimizer = optimizer_of(modules)
    before = modules["policy"].bias.clone()
    optimizer.step(backward(modules), modules)
    assert torch.equal(modules["policy"].bias, before)
    assert "policy.bias.exp_avg" not in optimizer.tensors() and "policy.weight.exp_avg" in optimizer.tensors()


def test_a_module_that_is_not_trained_in_a_step_keeps_its_weights_and_moments() -> None:
    modules = two_modules()
    optimizer = optimizer_of(modules, decay=0.5)
    optimizer.step(backward(modules), modules)  # now it has momentum, which would move it on
    weights = [parameter.clone() for parameter in modules["policy"].parameters()]
    moments = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    assert set(optimizer.step(backward(modules), {"critic"}).gradient_norms) == {"critic"}
    assert all(torch.equal(one, other) for one, other in zip(weights, modules["policy"].parameters(), strict=True))
    changed = {name for name, tensor in optimizer.tensors().items() if not torch.equal(tensor, moments[name])}
    assert changed == {name for name in moments if name.startswith("critic")}  # control: the critic was trained
    assert all(parameter.grad is None for parameter in modules["policy"].parameters())
