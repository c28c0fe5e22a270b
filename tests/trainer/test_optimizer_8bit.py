"""The 8-bit optimizer takes the steps of AdamW, keeps moments in 8 bits, and resumes exactly."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from agent_r1.core.errors import InvalidInput
from agent_r1.trainer.config import OptimizerName, TrainerConfig
from agent_r1.trainer.optimizer import Optimizer, overwrite

pytestmark = pytest.mark.usefixtures("torchao")


def new_module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 8))  # only the first matrix has 4,096 weights or more


def optimizer_of(module: nn.Module, name: OptimizerName) -> Optimizer:
    return Optimizer({"policy": module}, TrainerConfig(learning_rate=1e-2, weight_decay=0.01, optimizer=name))


def take_steps(optimizer: Optimizer, module: nn.Module, steps: range, factor: float = 1.0) -> None:
    for step in steps:
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step))
        loss = (module(x) - x[:, :8]).square().mean()
        loss.backward()
        assert optimizer.step(loss, ["policy"], factor).applied


def change(module: nn.Module, start: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([(tensor - start[name]).flatten() for name, tensor in module.state_dict().items()])


def test_it_changes_the_weights_as_adamw_does() -> None:
    start = {name: tensor.clone() for name, tensor in new_module().state_dict().items()}
    changes = {}
    for name in ("adamw", "adamw-8bit"):
        module = new_module()
        take_steps(optimizer_of(module, name), module, range(10))
        changes[name] = change(module, start)
    one, other = changes["adamw"], changes["adamw-8bit"]
    assert torch.cosine_similarity(one, other, dim=0) > 0.99 and not torch.equal(one, other)
    assert 0.95 < other.norm() / one.norm() < 1.05


def test_making_it_changes_no_weight_and_counts_no_step() -> None:
    module, start = new_module(), new_module().state_dict()
    optimizer = optimizer_of(module, "adamw-8bit")
    assert float(change(module, start).abs().max()) == 0.0
    assert all(parameter.grad is None for parameter in module.parameters())
    assert all(float(tensor) == 0 for name, tensor in optimizer.tensors().items() if name.endswith(".step"))


def test_large_matrices_have_moments_of_one_byte_each() -> None:
    tensors = optimizer_of(new_module(), "adamw-8bit").tensors()
    large = {name: tensor for name, tensor in tensors.items() if "0.weight.exp_avg" in name and "qmap" not in name}
    assert sum(tensor.nbytes for tensor in large.values()) == 2 * (8192 + 8192 // 256 * 4)
    assert tensors["policy.1.weight.exp_avg"].dtype == torch.float32


def test_from_a_saved_state_it_continues_with_the_same_bits() -> None:
    whole, first = new_module(), new_module()
    take_steps(optimizer_of(whole, "adamw-8bit"), whole, range(6))
    optimizer = optimizer_of(first, "adamw-8bit")
    take_steps(optimizer, first, range(3))
    saved = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    second = new_module()
    second.load_state_dict(first.state_dict())
    resumed = optimizer_of(second, "adamw-8bit")
    overwrite(resumed.tensors(), saved)
    take_steps(resumed, second, range(3, 6))
    assert all(torch.equal(whole.state_dict()[name], tensor) for name, tensor in second.state_dict().items())


def test_without_its_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_r1.core.errors.find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match=r"pip install 'agent-r1\[8bit\]'"):
        optimizer_of(new_module(), "adamw-8bit")
