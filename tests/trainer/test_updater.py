"""An update gives each attempt one outcome, changes weights only by finite gradients, and repeats bit by bit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from learning import with_recorded_logprobs
from torch import Tensor
from transformers import PreTrainedModel
from updating import make_updater, update

from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.policy_losses import Clip
from agent_r1.algorithms.presets import ALGORITHMS
from agent_r1.algorithms.registry import build_algorithm
from agent_r1.algorithms.types import Metrics, TokenOutputs, TokenWeights
from agent_r1.core.trajectory import Group, Status
from agent_r1.data.batch import Excluded
from agent_r1.model.weights import weights_checksum
from agent_r1.trainer.updater import GREEDY, NO_ADVANTAGE, NOT_FINITE, PolicyUpdater, UpdateReport


def updater_of(
    model: PreTrainedModel, algorithm: Algorithm | str = "grpo", *, epochs: int = 1, **options: Any
) -> PolicyUpdater:
    if isinstance(algorithm, str):
        algorithm = build_algorithm(algorithm, {"epochs": epochs})
    defaults = {"learning_rate": 1e-2, "critic_learning_rate": 1e-2, "temperature": 0.7}
    return make_updater(model, algorithm, **{**defaults, **options})


def outcomes_of(report: UpdateReport) -> dict[tuple[int, int, int], str | None]:
    """Return the reason for which each attempt was excluded by (group, member, retry), None if it was trained."""
    outcomes = {one.attempt.sort_key: one.reason if isinstance(one, Excluded) else None for one in report.outcomes}
    assert len(outcomes) == len(report.outcomes), "an attempt has two outcomes"
    return outcomes


@pytest.mark.parametrize(
    "name",
    ["ppo", "steppo", "gspo", "dppo", "echo", "remax"],
)
def test_the_first_ratio_is_one_and_trainer_and_sampler_agree_on_log_probabilities(name: str, make: Any) -> None:
    model, teacher = make.model(), make.model(seed=1) if "teacher" in ALGORITHMS[name].needs else None
    algorithm = ALGORITHMS[name] if not ALGORITHMS[name].warmup else build_algorithm(name, {"advantage.warmup": 0})
    groups = with_recorded_logprobs(model, make.random_groups(0, greedy=True), 0.7)
    metrics = update(updater_of(model, algorithm, minibatches=3, micro_tokens=40, teacher=teacher), groups).metrics
    assert metrics["first_ratio_deviation"] <= 1e-5 and metrics["logprob_gap"] <= 1e-5
    assert metrics["kl_old"] > 0  # control: the policy changed before later minibatches
    if isinstance(algorithm.loss, Clip):
        assert metrics["clip_fraction"] > 0


@pytest.mark.parametrize(("epochs", "passes"), [(1, 1), (2, 3)])
def test_only_an_update_of_several_passes_computes_old_log_probabilities(epochs: int, passes: int, make: Any) -> None:
    model = make.model()
    updater = updater_of(model, epochs=epochs, micro_tokens=10_000)
    read: list[int] = []
    model.base_model.embed_tokens.register_forward_hook(lambda _, inputs, __: read.append(inputs[0].numel()))
    metrics = update(updater, make.random_groups(0)).metrics
    assert sum(read) == pytest.approx(passes * metrics["model_tokens"] / (1 - metrics["padding"]))


def test_each_attempt_has_exactly_one_outcome(make: Any) -> None:
    turns = make.chain(([1], [2]))
    groups = make.groups(
        make.trajectory(turns, {"score": 1.0}),
        make.trajectory(turns, {"score": 0.0}, member=1, status=Status.OUT_OF_TURNS, truncated=True),
        make.trajectory(turns, {"score": None}, member=2),
        make.trajectory(turns, {}, member=3, status=Status.ENGINE_FAILED, reason="no answer"),
        make.trajectory(turns, {"score": 1.0}, group=1),
        make.trajectory(turns, {"score": 1.0}, group=1, member=1),
    )
    report = update(updater_of(make.model()), groups)
    assert outcomes_of(report) == {
        (0, 0, 0): None,
        (0, 1, 0): None,
        (0, 2, 0): "reward score could not be scored",
        (0, 3, 0): "engine_failed: no answer",
        (1, 0, 0): NO_ADVANTAGE,
        (1, 1, 0): NO_ADVANTAGE,
    }
    assert (report.step, report.version.number) == (1, 1)
    assert report.metrics["reward"] == 0.75 and (report.metrics["failed"], report.metrics["filtered"]) == (2, 0)


@pytest.mark.parametrize("groups_are", ["none", "all failed", "all equal"])
def test_an_update_with_nothing_to_train_changes_no_weight(groups_are: str, make: Any) -> None:
    status = Status.CANCELLED if groups_are == "all failed" else Status.COMPLETED
    members = [make.trajectory(make.chain(([1], [2])), {"score": 1.0}, member=i, status=status) for i in range(3)]
    model = make.model()
    before, updater = weights_checksum(model), updater_of(model)
    report = update(updater, [] if groups_are == "none" else make.groups(*members))
    assert weights_checksum(model) == before and (report.step, report.version.number) == (1, 0)
    assert len(report.outcomes) == (0 if groups_are == "none" else 3)
    assert math.isnan(report.metrics["reward"]) == (groups_are != "all equal")
    assert all(tensor.count_nonzero() == 0 for tensor in updater.state().tensors.values())


class Poisoned(Algorithm):
    """An algorithm with a gradient of ``value`` on the tokens whose old log-probability is below -5."""

    value: float

    def compute_loss(self, tokens: TokenOutputs, weights: TokenWeights) -> tuple[Tensor, Metrics]:
        loss, metrics = super().compute_loss(tokens, weights)
        return loss + (self.value * tokens.logprobs[tokens.old_logprobs < -5]).sum(), metrics


def poisoned(algorithm: Algorithm, value: float) -> Algorithm:
    return Poisoned.model_construct(**dict(algorithm), value=value)


def test_a_step_that_is_not_finite_is_skipped_and_its_attempts_are_excluded(make: Any) -> None:
    groups, model = make.random_groups(0, groups=1), make.model()
    updater = updater_of(model, poisoned(ALGORITHMS["grpo"], math.inf))
    before = (weights_checksum(model), updater.state())
    report = update(updater, groups)
    assert weights_checksum(model) == before[0] and report.version.number == 0
    after = updater.state().tensors
    assert all(torch.equal(tensor, after[name]) for name, tensor in before[1].tensors.items())
    assert set(outcomes_of(report).values()) == {NOT_FINITE}
    assert report.metrics["skipped_steps"] == 1
    assert all(parameter.grad is None for parameter in model.parameters())
    # control: the same attempts are trained if the gradient is finite
    assert set(outcomes_of(update(updater_of(model), groups)).values()) == {None}


@pytest.mark.parametrize("critic_epochs", [None, 1])
def test_a_policy_whose_steps_are_all_skipped_gets_no_new_version(critic_epochs: int | None, make: Any) -> None:
    model = make.model()
    with torch.no_grad():
        model.lm_head.weight[3, 0] = math.nan  # the critic has no output layer, so its steps are finite
    report = update(updater_of(model, "ppo", critic_epochs=critic_epochs), make.random_groups(0))
    assert report.version.number == 0 and set(outcomes_of(report).values()) == {NOT_FINITE}


def test_attempts_are_trained_if_only_steps_of_the_critic_are_skipped(make: Any) -> None:
    class BrokenCritic(Algorithm):
        def compute_value_loss(self, *inputs: Any) -> Tensor:
            return super().compute_value_loss(*inputs) * math.nan

    algorithm = BrokenCritic.model_construct(**dict(ALGORITHMS["ppo"]))
    report = update(updater_of(make.model(), algorithm, critic_epochs=1), make.random_groups(0))
    assert report.metrics["skipped_steps"] == 1
    assert report.version.number == 1 and set(outcomes_of(report).values()) == {None}


def result_of(updater: PolicyUpdater, groups: list[Group]) -> tuple[str | None, Mapping[str, Tensor], list[Any]]:
    """Return the checksum of the weights, the optimizer state and the metrics after two updates."""
    reports = [update(updater, groups).metrics for _ in range(2)]
    return updater.publish().version.checksum, updater.state().tensors, reports


@pytest.mark.parametrize("name", ["ppo", "gspo", "echo"])
def test_the_same_updates_give_the_same_bits(name: str, make: Any) -> None:
    groups = make.random_groups(0)
    shuffled = [replace(group, trajectories=group.trajectories[::-1]) for group in reversed(groups)]
    results = [
        result_of(updater_of(make.model(), name, minibatches=2, epochs=2, micro_tokens=40), order)
        for order in (groups, groups, shuffled)
    ]
    for other in results[1:]:
        assert other[0] == results[0][0] and other[2] == results[0][2]
        assert all(torch.equal(tensor, other[1][key]) for key, tensor in results[0][1].items())
    other_seed = updater_of(make.model(), name, minibatches=2, epochs=2, micro_tokens=40, seed=1)
    assert result_of(other_seed, groups)[0] != results[0][0]  # control: the seed decides the minibatches


def test_stale_tokens_are_compared_with_the_policy_that_sampled_them(make: Any) -> None:
    model = make.model()
    updater = updater_of(model)
    groups = with_recorded_logprobs(model, make.random_groups(0), 0.7)
    fresh = update(updater, groups).metrics
    stale = update(updater, groups).metrics
    assert (fresh["staleness"], stale["staleness"]) == (0, 1)
    assert fresh["first_ratio_deviation"] == 0
    assert stale["first_ratio_deviation"] > 1e-3
    assert stale["logprob_gap"] > 1e-3


def test_a_group_has_signal_if_an_attempt_is_trainable_and_passes_the_filters(make: Any) -> None:
    def group(*rewards: float, status: Status = Status.COMPLETED) -> Group:
        trajectories = [
            make.trajectory(make.chain(([1], [2])), {"score": reward}, member=member, status=status)
            for member, reward in enumerate(rewards)
        ]
        return make.groups(*trajectories)[0]

    relative, absolute = updater_of(make.model(), "dapo"), updater_of(make.model(), "reinforce++")
    assert relative.select(group(0.0, 1.0)).has_signal and not relative.select(group(1.0, 1.0)).has_signal
    assert absolute.select(group(1.0, 1.0)).has_signal
    for updater in (relative, absolute):
        assert not updater.select(group(0.0, 1.0, status=Status.CANCELLED)).has_signal
        assert not updater.select(group(0.0, math.nan) if updater is relative else group(math.nan)).has_signal


def test_a_greedy_attempt_is_compared_with_and_not_trained(make: Any) -> None:
    turns = make.chain(([1], [2]))
    attempts = [make.trajectory(turns, {"score": 1.0}, group=group) for group in range(2)]
    greedy = {
        0: make.trajectory(turns, {"score": 0.5}, member=1),
        1: make.trajectory(turns, {}, group=1, member=1, status=Status.ENGINE_FAILED),
    }
    report = update(updater_of(make.model(), "remax"), make.groups(*attempts, greedy=greedy))
    assert outcomes_of(report) == {
        (0, 0, 0): None,
        (0, 1, 0): GREEDY,
        (1, 0, 0): "the greedy attempt could not be scored: engine_failed",
        (1, 1, 0): f"{GREEDY}; engine_failed",
    }
    assert report.metrics["advantage_std"] == 0 and math.isfinite(report.metrics["policy_loss"])
    assert report.metrics["reward"] == 1.0


def test_attempts_that_were_tried_again_are_excluded_with_the_reason_of_the_failure(make: Any) -> None:
    groups = make.random_groups(0)
    lost = groups[0].trajectories[0]
    failed = replace(lost, status=Status.ENVIRONMENT_FAILED, reason="OSError: gone")
    again = replace(lost, attempt=replace(lost.attempt, retry=1))
    groups[0] = replace(groups[0], trajectories=(again, *groups[0].trajectories[1:]), retried=(failed,))
    outcomes = outcomes_of(update(updater_of(make.model()), groups))
    assert len(outcomes) == sum(len(group.trajectories) for group in groups) + 1
    assert outcomes[lost.attempt.sort_key] == "tried again after environment_failed: OSError: gone"


def test_with_a_correction_stale_tokens_are_compared_with_the_policy_before_the_update(make: Any) -> None:
    model = make.model()
    groups = with_recorded_logprobs(model, make.random_groups(0), 0.7)
    updater = updater_of(model, build_algorithm("grpo", {"correction.rule": "truncate"}))
    update(updater, groups)
    stale = update(updater, groups).metrics
    assert stale["first_ratio_deviation"] < 1e-5 and stale["logprob_gap"] > 1e-3 and stale["importance_weight"] != 1
