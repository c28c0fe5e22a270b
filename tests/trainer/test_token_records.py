"""Token records hold what the update computed for each action token, and cost no pass of the models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from learning import with_recorded_logprobs
from updating import update

from agent_r1.algorithms.registry import build_algorithm
from agent_r1.core.events import TokenRecord
from agent_r1.core.trajectory import Group
from agent_r1.trainer.config import TrainerConfig
from agent_r1.trainer.single_process import SingleProcessTrainer
from agent_r1.trainer.updater import PolicyUpdater, Trained, UpdateReport


def report_of(
    make: Any, algorithm: str, groups: Sequence[Group], record: int, *, overlong: bool = False, **config: Any
) -> UpdateReport:
    built = build_algorithm(algorithm, {"filters.overlong": overlong})
    settings = TrainerConfig(**{"learning_rate": 1e-2, "critic_learning_rate": 1e-2, **config})
    trainer = SingleProcessTrainer(make.model(), built, settings, temperature=0.7)
    updater = PolicyUpdater(trainer, built, settings, reward_weights={}, seed=0, steps=100, record_groups=record)
    return update(updater, groups)


@pytest.fixture
def groups(make: Any) -> list[Group]:
    return list(with_recorded_logprobs(make.model(), make.random_groups(0), 0.7))


def recorded_turns(groups: Sequence[Group], records: Sequence[TokenRecord]) -> list[tuple[TokenRecord, Any]]:
    turns = {(t.attempt, turn.index): turn for group in groups for t in group.trajectories for turn in t.turns}
    return [(record, turns[record.attempt, record.turn]) for record in records]


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_each_action_token_has_its_numbers_and_the_log_probability_of_the_old_policy(
    algorithm: str, make: Any, groups: list[Group]
) -> None:
    report = report_of(make, algorithm, groups, record=len(groups))
    assert report.token_records
    for record, turn in recorded_turns(groups, report.token_records):
        columns = [record.logprobs, record.advantages, record.loss_weights, record.entropies]
        assert {len(column) for column in columns} == {len(turn.action_ids)}
        assert record.logprobs == pytest.approx(turn.logprobs, abs=1e-4)
        assert all(0 <= entropy < 10 for entropy in record.entropies)
        assert len(record.values) == (len(turn.action_ids) if algorithm == "ppo" else 0)


def test_advantages_of_an_attempt_add_up_to_its_credit(make: Any, groups: list[Group]) -> None:
    report = report_of(make, "grpo", groups, record=len(groups))
    for outcome in (one for one in report.outcomes if isinstance(one, Trained)):
        own = [record.advantages for record in report.token_records if record.attempt == outcome.attempt]
        assert math.fsum(number for advantages in own for number in advantages) == pytest.approx(outcome.advantage_sum)


def test_records_of_the_first_groups_change_no_weight_and_no_metric(make: Any, groups: list[Group]) -> None:
    without, with_records = (report_of(make, "grpo", groups, n, minibatches=3) for n in (0, 2))
    assert without.token_records == ()
    recorded = {record.attempt for record in with_records.token_records}  # of the first two of three groups
    trained = {one.attempt for one in with_records.outcomes if isinstance(one, Trained)}
    assert recorded == {attempt for attempt in trained if attempt.group_id < 2}
    assert without.version == with_records.version and dict(without.metrics) == dict(with_records.metrics)
