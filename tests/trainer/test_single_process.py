"""A trainer's state is saved and restored exactly, and published weights carry their version and checksum."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel
from updating import make_updater, update

from agent_r1.algorithms.registry import build_algorithm
from agent_r1.core.errors import InvalidInput
from agent_r1.model.adapter import add_adapter, trained_weights
from agent_r1.model.config import LoraConfig
from agent_r1.model.weights import cast_parameters, weights_checksum
from agent_r1.trainer.config import ScheduleConfig
from agent_r1.trainer.protocol import TrainerState
from agent_r1.trainer.updater import PolicyUpdater

RATES = {"learning_rate": 1e-2, "critic_learning_rate": 1e-2, "temperature": 0.7}

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # name of the case: algorithm, its settings, settings of the trainer
    "a critic": ("ppo", {}, {"minibatches": 2}),
    "a reference that follows": ("grpo", {"kl.coefficient": 0.1, "kl.sync_steps": 1, "kl.sync_alpha": 0.5}, {}),
    "a coefficient that adapts": ("grpo", {"kl.coefficient": 0.1, "kl.target": 1e-4, "kl.horizon": 20}, {}),
    "a schedule": ("grpo", {}, {"schedule": ScheduleConfig(name="cosine"), "steps": 4}),
    "bfloat16": ("ppo", {}, {"dtype": "bfloat16"}),
    "an adapter": ("ppo", {}, {}),
    "an adapter in bfloat16": ("reinforce++", {}, {"dtype": "bfloat16"}),
}


def make_case(make: Any, case: str) -> tuple[PreTrainedModel, PolicyUpdater]:
    """Return the model that a run begins with, and an updater."""
    name, settings, config = CASES[case]
    model = make.model()
    if "adapter" in case:
        model = add_adapter(
            cast_parameters(model, config.get("dtype", "float32")), LoraConfig(rank=4), seed=0, base="base"
        )
    return model, make_updater(model, build_algorithm(name, settings), **RATES, **config)


def after_two_updates(updater: PolicyUpdater, make: Any) -> tuple[str | None, float]:
    metrics = [update(updater, make.random_groups(0)).metrics for _ in range(2)][-1]
    return updater.publish().version.checksum, metrics.get("kl_coefficient", 0.0)


@pytest.mark.parametrize("case", CASES)
def test_a_restored_updater_continues_bit_by_bit(case: str, make: Any) -> None:
    model, updater = make_case(make, case)
    update(updater, make.random_groups(0))
    saved, weights = updater.state(), {name: tensor.clone() for name, tensor in trained_weights(model).items()}
    json.dumps(saved.scalars)
    assert all(tensor.dtype == torch.float32 for tensor in saved.tensors.values())
    expected = after_two_updates(updater, make)

    def continued(state: TrainerState) -> tuple[str | None, float]:
        _, fresh = make_case(make, case)
        fresh.load_weights(weights)
        fresh.load_state(state)
        return after_two_updates(fresh, make)

    assert continued(saved) == expected
    if case == "a critic":  # control: each part of the state was restored
        for lost in ("exp_avg", "exp_avg_sq", "step"):
            tensors = {key: one * (not key.endswith(lost)) for key, one in saved.tensors.items()}
            assert continued(replace(saved, tensors=tensors)) != expected, lost
        assert continued(replace(saved, scalars={**saved.scalars, "step": 0})) != expected
    if case == "a reference that follows":
        initial = dict(make.model().named_parameters())
        tensors = {
            name: initial[name.removeprefix("reference.")].detach() if name.startswith("reference.") else tensor
            for name, tensor in saved.tensors.items()
        }
        assert continued(replace(saved, tensors=tensors)) != expected


def test_a_state_of_another_model_or_algorithm_is_refused_and_changes_nothing(make: Any) -> None:
    model = make.model()
    state = make_updater(model, "ppo").state()
    with pytest.raises(InvalidInput, match="other weights"):
        make_updater(make.model(seed=1), "ppo").load_state(state)
    with pytest.raises(InvalidInput, match=r"critic\.backbone.* on one side only"):
        make_updater(model, "grpo").load_state(state)
    updater = make_updater(model, "ppo")
    name, tensor = next(iter(state.tensors.items()))
    with pytest.raises(InvalidInput, match="of shape"):
        updater.load_state(replace(state, tensors={**state.tensors, name: tensor[:1]}))
    kept = updater.state().tensors
    assert all(torch.equal(tensor, kept[name]) for name, tensor in state.tensors.items())


def test_a_state_is_refused_if_the_reference_is_not_the_model_that_the_run_began_with(make: Any) -> None:
    model = make.model()
    updater = make_updater(model, "reinforce++", **RATES)
    update(updater, make.random_groups(0))
    with pytest.raises(InvalidInput, match="another reference policy"):
        make_updater(model, "reinforce++").load_state(updater.state())  # its reference would be the trained model
    updater.load_state(updater.state())  # control


def test_published_weights_carry_version_and_checksum_and_a_state_is_a_copy(make: Any) -> None:
    model = make.model()
    updater = make_updater(model, **RATES)
    state, first = updater.state(), updater.publish()
    assert (first.version.number, first.version.step, first.transport) == (0, 0, "shared_memory")
    assert first.version.checksum == weights_checksum(model) and first.handle is model
    report = update(updater, make.random_groups(0))
    second = updater.publish()
    assert second.version == report.version and (second.version.number, second.version.step) == (1, 1)
    assert second.version.checksum == weights_checksum(model) != first.version.checksum
    assert all(tensor.count_nonzero() == 0 for tensor in state.tensors.values())
    assert any(tensor.count_nonzero() > 0 for tensor in updater.state().tensors.values())


@pytest.mark.parametrize(("every", "expected"), [(2, [True, False, True, False]), (0, [False] * 4)])
def test_checksums_are_computed_at_the_steps_that_checksum_every_names(
    every: int, expected: list[bool], make: Any
) -> None:
    model = make.model()
    updater = make_updater(model, checksum_every=every, **RATES)
    versions = [updater.publish().version, *(update(updater, make.random_groups(0)).version for _ in range(3))]
    assert [version.number for version in versions] == [0, 1, 2, 3]
    assert [version.checksum is not None for version in versions] == expected
    assert updater.state().scalars["policy"] == weights_checksum(model)  # a saved state always has one


def test_models_and_temperatures_that_cannot_be_trained_are_refused(make: Any) -> None:
    with pytest.raises(InvalidInput, match="temperature: got 0"):
        make_updater(make.model(), temperature=0.0)
    with pytest.raises(InvalidInput, match="teacher: got none; name a model: distillation learns from one"):
        make_updater(make.model(), "distillation")


def test_dropout_is_switched_off(make: Any) -> None:
    model = make.model().train()
    make_updater(model)
    assert not model.training


def test_a_model_with_sliding_windows_reads_branches_as_separate_paths(make: Any) -> None:
    config = MistralConfig(
        vocab_size=16, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, sliding_window=4,
    )  # fmt: skip
    turns = [make.turn(0, [1], [2]), make.turn(1, [3], [4], parent=0), make.turn(2, [5], [6], parent=0)]
    groups = make.groups(make.trajectory(turns, {"score": 1.0}), make.trajectory(turns[:1], {"score": 0.0}, member=1))
    # tokens: 2, 4 and 4 of the paths and 2 of the other attempt; as a tree it would be 6 and 2
    assert update(make_updater(MistralForCausalLM(config)), groups).metrics["model_tokens"] == 12
    assert update(make_updater(make.model()), groups).metrics["model_tokens"] == 8
