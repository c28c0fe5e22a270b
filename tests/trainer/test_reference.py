"""The reference of a KL penalty stays the policy before training, or moves towards the policy every few steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from updating import make_updater, update

from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.registry import build_algorithm
from agent_r1.trainer.updater import PolicyUpdater


def penalized(**sync: Any) -> Algorithm:
    return build_algorithm("grpo", {"kl.coefficient": 0.1, **{f"kl.sync_{key}": value for key, value in sync.items()}})


def reference_of(updater: PolicyUpdater) -> dict[str, Tensor]:
    """Return the reference's weights, as the state holds them."""
    tensors = updater.state().tensors
    return {name.removeprefix("reference."): tensor for name, tensor in tensors.items() if name.startswith("reference")}


def mixture(alpha: float, policy: dict[str, Tensor], reference: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: alpha * policy[name] + (1 - alpha) * tensor for name, tensor in reference.items()}


def weights_of(model: Any) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_few_steps_the_reference_moves_towards_the_policy(dtype: str, make: Any) -> None:
    model = make.model()
    updater = make_updater(model, penalized(steps=2, alpha=0.25), learning_rate=1e-2, dtype=dtype)
    initial, synced = weights_of(model), []
    for _ in range(4):
        synced.append(update(updater, make.random_groups(0)).metrics["reference_synced"])
        if len(synced) == 1:
            assert all(torch.equal(initial[name], tensor) for name, tensor in reference_of(updater).items())
        if len(synced) == 2:
            expected = mixture(0.25, weights_of(model), initial)
    expected = mixture(0.25, weights_of(model), expected)
    assert synced == [0, 1, 0, 1]
    found = reference_of(updater)
    assert found.keys() == initial.keys() and all(torch.allclose(found[name], expected[name]) for name in found)


def test_with_alpha_one_the_reference_becomes_the_policy(make: Any) -> None:
    updater = make_updater(make.model(), penalized(steps=1, alpha=1.0), learning_rate=1e-2)
    for _ in range(2):
        metrics = update(updater, make.random_groups(0)).metrics
    groups = make.random_groups(0)
    batch_kl = metrics["kl_reference"]
    fixed = make_updater(make.model(), penalized(), learning_rate=1e-2)
    for _ in range(2):
        metrics = update(fixed, groups).metrics
    assert metrics["kl_reference"] != batch_kl  # the reference before training is another one
    assert "reference_synced" not in metrics and not reference_of(fixed)
