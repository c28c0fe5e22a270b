"""An update gives every attempt one fate, moves weights only on finite gradients, and can be repeated bit by bit."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from learning import sampled
from torch import Tensor
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel

from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.policy_losses import Clip
from agent_r1.algorithms.presets import ALGORITHMS
from agent_r1.algorithms.registry import build_algorithm
from agent_r1.algorithms.types import TokenWeights, Metrics, TokenOutputs
from agent_r1.core.errors import InvalidInput
from agent_r1.core.trajectory import Group, Status
from agent_r1.model.checksum import weights_checksum
from agent_r1.trainer.config import TrainerConfig
from agent_r1.trainer.learner import GREEDY, NO_ADVANTAGE, Learner, LearnerState

RATE = {"learning_rate": 1e-2, "critic_learning_rate": 1e-2}


def learner_of(
    model: PreTrainedModel,
    row: Algorithm | str = "grpo",
    *,
    seed: int = 0,
    temperature: float = 0.7,
    epochs: int = 1,
    teacher: PreTrainedModel | None = None,
    **config: Any,
) -> Learner:
    algorithm = build_algorithm(row, {"epochs": epochs}) if isinstance(row, str) else row
    settings = TrainerConfig(**{**RATE, **config})
    return Learner(model, algorithm, settings, temperature=temperature, reward_weights={}, seed=seed, teacher=teacher)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_first_ratio_is_one_and_the_samplers_log_probabilities_are_the_learners(name: str, make: Any) -> None:
    model, teacher = make.model(), make.model(seed=1) if "teacher" in ALGORITHMS[name].needs else None
    row = ALGORITHMS[name] if not ALGORITHMS[name].warmup else build_algorithm(name, {"advantage.warmup": 0})
    groups = sampled(model, make.random_groups(0, greedy=True), 0.7)
    metrics = learner_of(model, row, minibatches=3, micro_tokens=40, teacher=teacher).update(groups).metrics
    assert metrics["first_ratio_deviation"] <= 1e-5 and metrics["logprob_gap"] <= 1e-5
    assert metrics["kl_old"] > 0  # later minibatches did move away
    if isinstance(row.surrogate, Clip):
        assert metrics["clip_fraction"] > 0


def test_another_temperature_is_seen(make: Any) -> None:
    groups = sampled(make.model(), make.random_groups(0), 0.7)
    assert learner_of(make.model(), temperature=0.8).update(groups).metrics["logprob_gap"] > 1e-2


@pytest.mark.parametrize(("epochs", "passes"), [(1, 1), (2, 3)])
def test_only_an_update_of_several_passes_asks_for_old_log_probabilities(epochs: int, passes: int, make: Any) -> None:
    model = make.model()
    learner = learner_of(model, epochs=epochs, micro_tokens=10_000)
    read: list[int] = []
    model.base_model.embed_tokens.register_forward_hook(lambda _, inputs, __: read.append(inputs[0].numel()))
    metrics = learner.update(make.random_groups(0)).metrics
    assert sum(read) == pytest.approx(passes * metrics["model_tokens"] / (1 - metrics["padding"]))


def test_entropy_is_that_of_the_weights_the_update_began_with(make: Any) -> None:
    once, twice = (
        learner_of(make.model(), epochs=epochs).update(make.random_groups(0)).metrics["entropy"] for epochs in (1, 2)
    )
    assert once == twice


def test_minibatches_share_a_batch_without_changing_the_size_of_its_loss(make: Any) -> None:
    still = {"learning_rate": 1e-12, "critic_learning_rate": 1e-12}  # the loss of all minibatches by the same weights
    whole, cut = (
        learner_of(make.model(), "ppo", minibatches=count, **still).update(make.random_groups(0)).metrics
        for count in (1, 3)
    )
    assert whole["value_loss"] == pytest.approx(cut["value_loss"], rel=1e-4) and whole["value_loss"] > 0


def test_every_attempt_has_exactly_one_fate(make: Any) -> None:
    turns = make.chain(([1], [2]))
    groups = make.groups(
        make.trajectory(turns, {"score": 1.0}),
        make.trajectory(turns, {"score": 0.0}, member=1, status=Status.OUT_OF_TURNS, truncated=True),
        make.trajectory(turns, {"score": None}, member=2),
        make.trajectory(turns, {}, member=3, status=Status.ENGINE_FAILED, reason="no answer"),
        make.trajectory(turns, {"score": 1.0}, group=1),
        make.trajectory(turns, {"score": 1.0}, group=1, member=1),
    )
    update = learner_of(make.model()).update(groups)
    fates = {fate.attempt.sort_key: (fate.fate, fate.reason) for fate in update.fates}
    assert len(update.fates) == 6 and {fate.step for fate in update.fates} == {1}
    assert fates == {
        (0, 0, 0): ("trained", None),
        (0, 1, 0): ("trained", None),
        (0, 2, 0): ("dropped", "reward score could not be scored"),
        (0, 3, 0): ("dropped", "engine_failed: no answer"),
        (1, 0, 0): ("dropped", "zero variance"),
        (1, 1, 0): ("dropped", "zero variance"),
    }
    assert (update.step, update.version) == (1, 1)
    assert update.metrics["reward"] == 0.75 and (update.metrics["failed"], update.metrics["filtered"]) == (2, 2)


@pytest.mark.parametrize("groups_are", ["none", "all failed", "all equal"])
def test_an_update_with_nothing_to_learn_from_moves_nothing(groups_are: str, make: Any) -> None:
    status = Status.CANCELLED if groups_are == "all failed" else Status.COMPLETED
    members = [make.trajectory(make.chain(([1], [2])), {"score": 1.0}, member=i, status=status) for i in range(3)]
    model = make.model()
    before, learner = weights_checksum(model), learner_of(model)
    update = learner.update([] if groups_are == "none" else make.groups(*members))
    assert weights_checksum(model) == before and (update.step, update.version) == (1, 0)
    assert len(update.fates) == (0 if groups_are == "none" else 3)
    assert math.isnan(update.metrics["reward"]) == (groups_are != "all equal")
    assert all(tensor.count_nonzero() == 0 for tensor in learner.state().tensors.values())


class Poisoned(Algorithm):
    """A row with a gradient of ``value`` on the tokens whose old log-probability is below -5."""

    value: float

    def loss(self, view: TokenOutputs, credit: TokenWeights) -> tuple[Tensor, Metrics]:
        total, metrics = super().loss(view, credit)
        return total + (self.value * view.logprobs[view.old < -5]).sum(), metrics


def poisoned(row: Algorithm, value: float) -> Algorithm:
    return Poisoned.model_construct(**dict(row), value=value)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_step_that_is_not_finite_is_skipped_and_its_attempts_are_dropped(value: float, make: Any) -> None:
    groups, model = make.random_groups(0), make.model()
    learner = learner_of(model, poisoned(ALGORITHMS["grpo"], value))
    before = (weights_checksum(model), learner.state())
    update = learner.update(groups)
    after = learner.state()
    assert weights_checksum(model) == before[0] and update.version == 0
    assert all(torch.equal(tensor, after.tensors[name]) for name, tensor in before[1].tensors.items())
    assert {(fate.fate, fate.reason) for fate in update.fates} == {("dropped", "the loss or a gradient was not finite")}
    assert update.metrics["skipped_steps"] == 1
    assert all(parameter.grad is None for parameter in model.parameters())
    # control: the same attempts are trained where nothing is wrong
    assert {fate.fate for fate in learner_of(model).update(groups).fates} == {"trained"}


def test_of_several_minibatches_only_those_that_are_finite_are_trained(make: Any) -> None:
    groups, model = make.random_groups(0), make.model()
    update = learner_of(model, poisoned(ALGORITHMS["grpo"], math.nan), minibatches=12).update(groups)
    trained = sum(fate.fate == "trained" for fate in update.fates)
    assert 0 < trained < 12 and trained + update.metrics["skipped_steps"] == 12
    assert update.version == 1 and all(map(math.isfinite, update.metrics.values()))


def after(learner: Learner, groups: list[Group], updates: int = 2) -> tuple[str, Mapping[str, Tensor], list[Any]]:
    reports = [learner.update(groups).metrics for _ in range(updates)]
    return learner.publish().version.checksum, learner.state().tensors, reports


@pytest.mark.parametrize("name", ["grpo", "ppo", "turn-ppo", "gspo", "reinforce++", "echo"])
def test_the_same_updates_give_the_same_bits(name: str, make: Any) -> None:
    groups = make.random_groups(0)
    shuffled = [replace(group, trajectories=group.trajectories[::-1]) for group in reversed(groups)]
    results = [
        after(learner_of(make.model(), name, minibatches=2, epochs=2, micro_tokens=40), order)
        for order in (groups, groups, shuffled)
    ]
    for other in results[1:]:
        assert other[0] == results[0][0] and other[2] == results[0][2]
        assert all(torch.equal(tensor, other[1][key]) for key, tensor in results[0][1].items())
    other_seed = learner_of(make.model(), name, minibatches=2, epochs=2, micro_tokens=40, seed=1)
    assert after(other_seed, groups)[0] != results[0][0]  # control: the seed deals out the minibatches


@pytest.mark.parametrize("name", ["grpo", "ppo", "reinforce++"])
def test_a_restored_learner_goes_on_bit_by_bit(name: str, make: Any) -> None:
    groups, model = make.random_groups(0), make.model()
    learner = learner_of(model, name, minibatches=2)
    learner.update(groups)
    saved, weights = learner.state(), {key: tensor.clone() for key, tensor in model.state_dict().items()}
    json.dumps(saved.scalars)
    whole = after(learner, groups)

    def resumed(state: LearnerState) -> str:
        copy = make.model()  # what the run began with: the reference, where there is one
        fresh = learner_of(copy, name, minibatches=2)
        copy.load_state_dict(weights)
        fresh.restore(state)
        return after(fresh, groups)[0]

    assert resumed(saved) == whole[0]
    for lost in ("exp_avg", "exp_avg_sq", "step", *(["critic.head.weight"] if name == "ppo" else [])):
        damaged = {
            key: torch.zeros_like(tensor) if key.endswith(lost) else tensor for key, tensor in saved.tensors.items()
        }
        if lost != "critic.head.weight":  # the critic's head alone does not reach the policy within one update
            assert resumed(replace(saved, tensors=damaged)) != whole[0]
    assert resumed(replace(saved, scalars={**saved.scalars, "step": 0})) != whole[0]


def test_a_state_that_does_not_belong_here_is_refused_and_changes_nothing(make: Any) -> None:
    model = make.model()
    state = learner_of(model, "ppo").state()
    with pytest.raises(InvalidInput, match="other weights"):
        learner_of(make.model(seed=1), "ppo").restore(state)
    with pytest.raises(InvalidInput, match=r"critic\.backbone.* on one side only"):
        learner_of(model, "grpo").restore(state)
    learner = learner_of(model, "ppo")
    name, tensor = next(iter(state.tensors.items()))
    with pytest.raises(InvalidInput, match="of shape"):
        learner.restore(replace(state, tensors={**state.tensors, name: tensor[:1]}))
    kept = learner.state().tensors
    assert all(torch.equal(tensor, kept[name]) for name, tensor in state.tensors.items())


def test_a_state_is_refused_where_the_reference_is_not_what_the_run_began_with(make: Any) -> None:
    model = make.model()
    learner = learner_of(model, "reinforce++")
    learner.update(make.random_groups(0))
    with pytest.raises(InvalidInput, match="another reference policy"):
        learner_of(model, "reinforce++").restore(learner.state())  # its reference would be the trained model
    learner.restore(learner.state())  # control


def test_a_state_is_a_copy(make: Any) -> None:
    learner = learner_of(make.model())
    state = learner.state()
    learner.update(make.random_groups(0))
    assert all(tensor.count_nonzero() == 0 for tensor in state.tensors.values())
    assert any(tensor.count_nonzero() > 0 for tensor in learner.state().tensors.values())


def test_weights_carry_their_version_and_digest(make: Any) -> None:
    model = make.model()
    learner = learner_of(model)
    first = learner.weights()
    assert (first.version, first.kind, first.version.checksum) == (0, "module", weights_checksum(model)) and first.ref is model
    learner.update(make.random_groups(0))
    second = learner.weights()
    assert (second.version, second.version.checksum) == (1, weights_checksum(model)) and second.version.checksum != first.version.checksum


def test_staleness_counts_updates_since_the_oldest_token(make: Any) -> None:
    learner, groups = learner_of(make.model()), make.random_groups(0)
    assert learner.update(groups).metrics["staleness"] == 0
    assert learner.update(groups).metrics["staleness"] == 1


def test_a_temperature_without_probabilities_is_refused(make: Any) -> None:
    with pytest.raises(InvalidInput, match="temperature: got 0"):
        learner_of(make.model(), temperature=0.0)


def test_dropout_is_switched_off(make: Any) -> None:
    model = make.model().train()
    learner_of(model)
    assert not model.training


def test_a_model_with_sliding_windows_learns_from_branches_by_paths(make: Any) -> None:
    config = MistralConfig(
        vocab_size=16, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, sliding_window=4,
    )  # fmt: skip
    turns = [make.turn(0, [1], [2]), make.turn(1, [3], [4], parent=0), make.turn(2, [5], [6], parent=0)]
    groups = make.groups(make.trajectory(turns, {"score": 1.0}), make.trajectory(turns[:1], {"score": 0.0}, member=1))
    # in tokens: 2, 4 and 4 of the paths and 2 of the other attempt; merged it would be 6 and 2
    assert learner_of(MistralForCausalLM(config)).update(groups).metrics["model_tokens"] == 12
    assert learner_of(make.model()).update(groups).metrics["model_tokens"] == 8


def test_tokens_of_older_weights_are_compared_with_the_policy_that_sampled_them(make: Any) -> None:
    model = make.model()
    learner = learner_of(model)
    groups = sampled(model, make.random_groups(0), 0.7)
    fresh = learner.update(groups).metrics
    stale = learner.update(groups).metrics
    assert (fresh["staleness"], stale["staleness"]) == (0, 1)
    assert fresh["first_ratio_deviation"] == 0
    assert stale["first_ratio_deviation"] > 1e-3
    assert stale["logprob_gap"] > 1e-3


def test_a_group_teaches_where_something_of_it_passes_admission_and_filters(make: Any) -> None:
    def group(*rewards: float, status: Status = Status.COMPLETED) -> Group:
        lived = [
            make.trajectory(make.chain(([1], [2])), {"score": reward}, member=member, status=status)
            for member, reward in enumerate(rewards)
        ]
        return make.groups(*lived)[0]

    compares, whitens = learner_of(make.model(), "grpo"), learner_of(make.model(), "reinforce++")
    assert compares.teaches(group(0.0, 1.0)) and not compares.teaches(group(1.0, 1.0))
    assert whitens.teaches(group(1.0, 1.0))
    for learner in (compares, whitens):
        assert not learner.teaches(group(0.0, 1.0, status=Status.CANCELLED))
        assert not learner.teaches(group(0.0, math.nan) if learner is compares else group(math.nan))


def test_a_greedy_attempt_is_compared_with_and_not_learned_from(make: Any) -> None:
    turns = make.chain(([1], [2]))
    lived = [make.trajectory(turns, {"score": 1.0}, group=group) for group in range(2)]
    greedy = {
        0: make.trajectory(turns, {"score": 0.5}, member=1),
        1: make.trajectory(turns, {}, group=1, member=1, status=Status.ENGINE_FAILED),
    }
    update = learner_of(make.model(), "remax").update(make.groups(*lived, greedy=greedy))
    assert {fate.attempt.sort_key: (fate.fate, fate.reason) for fate in update.fates} == {
        (0, 0, 0): ("trained", None),
        (0, 1, 0): ("dropped", GREEDY),
        (1, 0, 0): ("dropped", "the greedy attempt could not be scored: engine_failed"),
        (1, 1, 0): ("dropped", f"{GREEDY}; engine_failed"),
    }
    assert update.metrics["advantage_std"] == 0 and math.isfinite(update.metrics["policy_loss"])
    assert update.metrics["reward"] == 1.0


def test_where_no_token_has_an_advantage_nothing_moves_and_the_reason_is_said(make: Any) -> None:
    model = make.model()
    learner = learner_of(model, "reinforce")
    learner.update(make.random_groups(0))  # now the optimizer has momentum
    before = weights_checksum(model)
    turns = make.chain(([1], [2]))
    same = make.groups(*(make.trajectory(turns, {"score": 1.0}, member=member) for member in range(3)))
    update = learner.update(same)
    assert {(fate.fate, fate.reason) for fate in update.fates} == {("dropped", NO_ADVANTAGE)}
    assert weights_checksum(model) == before and (update.step, update.version) == (2, 1)


def test_a_row_that_needs_a_teacher_is_refused_without_one(make: Any) -> None:
    with pytest.raises(InvalidInput, match="teacher: got none; name a model: distillation learns from one"):
        learner_of(make.model(), "distillation")


@pytest.mark.parametrize("anchor", ["policy", "sampler"])
def test_the_anchor_is_what_ratios_compare_with(anchor: str, make: Any) -> None:
    groups = make.random_groups(0)  # what was recorded is not what the policy says
    row = build_algorithm("grpo", {"anchor": anchor})
    deviation = learner_of(make.model(), row).update(groups).metrics["first_ratio_deviation"]
    assert (deviation > 0.1) == (anchor == "sampler") and (deviation == 0) == (anchor == "policy")


def test_a_correction_compares_stale_tokens_with_the_policy_before_the_update(make: Any) -> None:
    model = make.model()
    groups = sampled(model, make.random_groups(0), 0.7)
    learner = learner_of(model, build_algorithm("grpo", {"correction.rule": "truncate"}))
    learner.update(groups)
    stale = learner.update(groups).metrics
    assert stale["first_ratio_deviation"] < 1e-5 and stale["logprob_gap"] > 1e-3 and stale["trust"] != 1
