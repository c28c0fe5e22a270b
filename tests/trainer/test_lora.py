"""With LoRA a trainer changes the adapter only, and policy, critic and reference share the frozen weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from learning import with_recorded_logprobs
from torch import Tensor
from transformers import PreTrainedModel
from updating import make_updater, update

from agent_r1.algorithms.registry import build_algorithm
from agent_r1.core.errors import InvalidInput
from agent_r1.model.adapter import add_adapter, trained_weights
from agent_r1.model.config import LoraConfig
from agent_r1.model.weights import cast_parameters

FAST: dict[str, Any] = {"learning_rate": 1e-2, "critic_learning_rate": 1e-2}


def adapted(make: Any, dtype: Any = "float32") -> PreTrainedModel:
    model = cast_parameters(make.model(), dtype)
    return add_adapter(model, LoraConfig(rank=4), seed=0, base="base")


def frozen(model: PreTrainedModel) -> dict[str, Tensor]:
    adapter = trained_weights(model).keys()
    return {name: tensor.clone() for name, tensor in model.state_dict().items() if name not in adapter}


def test_an_updater_changes_only_the_adapter(make: Any) -> None:
    model = adapted(make)
    updater, before = make_updater(model, "ppo", **FAST), frozen(model)
    weights = {name: tensor.clone() for name, tensor in trained_weights(model).items()}
    update(updater, make.random_groups(0))
    assert any(not torch.equal(weights[name], tensor) for name, tensor in trained_weights(model).items())
    assert all(torch.equal(before[name], tensor) for name, tensor in frozen(model).items())


def test_the_state_holds_adapters_and_heads_and_no_frozen_weight(make: Any) -> None:
    names = make_updater(adapted(make), "ppo").state().tensors.keys()
    kept = {name for name in names if not any(part in name for part in (".lora_A.", ".lora_B.", "critic.head."))}
    assert not kept and any(name.startswith("critic.backbone.") for name in names)


def test_the_reference_is_the_policy_with_the_adapter_switched_off(make: Any) -> None:
    groups = with_recorded_logprobs(make.model(), make.random_groups(0), 1.0)
    penalized = build_algorithm("grpo", {"kl.coefficient": 0.1})
    model = adapted(make)
    updater, never_updated = make_updater(model, penalized, **FAST), make_updater(make.model(), penalized, **FAST)
    full = make_updater(make.model(), penalized, **FAST)
    first, expected = (update(one, groups).metrics["kl_reference"] for one in (updater, full))
    assert first == expected == pytest.approx(0, abs=1e-6)
    moved = with_recorded_logprobs(model, groups, 1.0)
    second, expected = (update(one, moved).metrics["kl_reference"] for one in (updater, never_updated))
    assert second == expected and abs(second) > 1e-4  # the policy moved, and the reference did not
    reference = updater._trainer._reference.weights  # type: ignore[attr-defined]
    own = {parameter.data_ptr() for parameter in model.parameters()}
    assert {parameter.data_ptr() for parameter in reference.parameters()} < own


def test_a_critic_learns_with_an_adapter_of_its_own(make: Any) -> None:
    model = adapted(make)
    updater = make_updater(model, "ppo", critic_epochs=2, **FAST)
    before = updater.state().tensors
    update(updater, make.random_groups(0))
    after = updater.state().tensors
    critic = [name for name in before if name.startswith("critic.") and ".lora_B." in name]
    changed = [name for name in critic if not torch.equal(before[name], after[name])]
    own = trained_weights(model)
    pairs = [(after[name], own[name.replace("critic.backbone", "model")]) for name in changed]
    assert pairs and not any(torch.equal(critics, policys) for critics, policys in pairs)


def test_a_critic_over_bfloat16_weights_reads_log_probabilities_in_float32(make: Any) -> None:
    updater = make_updater(adapted(make, "bfloat16"), "ppo", dtype="bfloat16", critic_reads_logprobs=True, **FAST)
    update(updater, make.random_groups(0))
    tensors = updater.state().tensors
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert any("logprob_input" in name for name in tensors)


def test_a_reference_that_follows_the_policy_is_refused(make: Any) -> None:
    following = build_algorithm("grpo", {"kl.coefficient": 0.1, "kl.sync_steps": 2})
    with pytest.raises(InvalidInput, match=r"algorithm\.kl\.sync_steps: got a reference that follows an adapter"):
        make_updater(adapted(make), following)
