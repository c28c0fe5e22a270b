"""A batch without a training signal changes no weight, and each attempt that is not trained has a reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from learning import with_recorded_logprobs
from updating import make_updater, update

from agent_r1.algorithms.algorithm import Algorithm, Filters
from agent_r1.algorithms.presets import ALGORITHMS
from agent_r1.algorithms.registry import build_algorithm
from agent_r1.algorithms.types import Advantage
from agent_r1.core.errors import InvalidInput
from agent_r1.core.trajectory import Group, Status
from agent_r1.data.batch import Excluded
from agent_r1.model.weights import weights_checksum
from agent_r1.trainer.updater import REJECTED, PolicyUpdater, UpdateReport


def updater_of(model: Any, algorithm: Algorithm | str) -> PolicyUpdater:
    return make_updater(model, algorithm, temperature=0.7, learning_rate=1e-3)


def update_and_compare(model: Any, updater: PolicyUpdater, groups: Sequence[Group]) -> tuple[bool, UpdateReport]:
    """Return whether the update changed the weights, and its report."""
    before = weights_checksum(model)
    report = update(updater, groups)
    return weights_checksum(model) != before, report


def reasons_of(report: UpdateReport) -> set[str]:
    return {outcome.reason for outcome in report.outcomes if isinstance(outcome, Excluded)}


def test_a_batch_whose_attempts_are_all_rejected_changes_no_weight(make: Any) -> None:
    model = make.model()
    updater = updater_of(model, build_algorithm("grpo", {"rejection.level": "trajectory"}))
    changed, _ = update_and_compare(model, updater, with_recorded_logprobs(model, make.random_groups(0), 0.7))
    assert changed, "now the optimizer has momentum"
    changed, report = update_and_compare(
        model, updater, make.random_groups(1)
    )  # not with_recorded_logprobs by the policy
    assert not changed and report.metrics.get("importance_weight", 0.0) == 0
    assert reasons_of(report) == {REJECTED}


def test_an_attempt_out_of_turns_counts_in_the_baseline_and_is_not_trained(make: Any) -> None:
    turns = make.chain(([1], [2]))
    cut = make.trajectory(turns, {"score": 0.0}, member=1, status=Status.OUT_OF_TURNS, truncated=True)
    group = make.groups(make.trajectory(turns, {"score": 1.0}), cut)
    model = make.model()
    changed, report = update_and_compare(model, updater_of(model, "dapo"), group)
    assert changed, "the successful attempt has an advantage over the truncated one"
    trained, excluded = sorted(report.outcomes, key=lambda outcome: outcome.attempt)
    assert not isinstance(trained, Excluded) and trained.attempt.sort_key == (0, 0, 0)
    assert excluded == Excluded(cut.attempt, "overlong")


@pytest.mark.parametrize("name", ["grpo", "ppo", "vapo", "echo", "rft", "top-k-distillation", "kl-cov", "gspo"])
def test_an_update_whose_attempts_are_all_excluded_changes_nothing(name: str, make: Any) -> None:
    turns = (make.turn(0, [1], [2], logprobs=[-2.0]), make.turn(1, [3, 4], [5], parent=0, logprobs=[-2.0]))
    members = enumerate((0.0, 1.0, 1.0))  # all are too long, with different returns
    long = [make.trajectory(turns, {"score": score}, member=index, truncated=True) for index, score in members]
    algorithm = ALGORITHMS[name].model_copy(update={"filters": Filters(overlong=True), "sft_coef": 0.1})
    model, teacher = make.model(), make.model(seed=1) if "teacher" in algorithm.needs else None
    updater = make_updater(model, algorithm, learning_rate=1e-3, teacher=teacher)
    before = updater.state().tensors  # of the critic and the optimizer
    changed, report = update_and_compare(model, updater, make.groups(*long))
    assert not changed and report.version.number == 0 and reasons_of(report) == {"overlong"}
    after = updater.state().tensors
    assert all(torch.equal(tensor, after[key]) for key, tensor in before.items())


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        (lambda batch: batch.returns, "one number per token"),
        (lambda batch: batch.token_rewards / 0, "a number that is not finite"),
    ],
)
def test_an_invalid_advantage_of_a_user_is_refused_in_one_line(compute: Any, message: str, make: Any) -> None:
    class Mine(Advantage):
        formula = "mine"

        def compute(self, batch: Any, outputs: Any) -> Any:
            return compute(batch)

    updater = updater_of(make.model(), Algorithm(name="mine", advantage=Mine()))
    with pytest.raises(InvalidInput, match=message):
        update(updater, make.random_groups(0))
