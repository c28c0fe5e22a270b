"""Whole runs in which steps are refilled if groups have no signal, and groups with a greedy attempt."""

from dataclasses import replace
from itertools import islice

import pytest

from agent_r1.config import Layer, resolve
from agent_r1.store.reader import RunReader
from agent_r1.tasksets import build
from agent_r1.trainer.updater import PolicyUpdater
from agent_r1.training import run
from agent_r1.training.config import TrainConfig
from agent_r1.training.progress import SilentProgress
from agent_r1.training.sampling import group_requests

SMALL = {
    **{"steps": 3, "groups_per_step": 3, "group_size": 2, "seed": 5},
    **{"evaluate_every": 0, "evaluate_n": 1, "pass_k": 0},
}


@pytest.fixture(scope="module")
def taskset():
    return replace(build("tinywiki", None, None, 0), baselines={}, evaluation=("style-a",))


@pytest.fixture
def read(taskset, tmp_path):
    readers = []

    def trained(**changes):
        settings = {**SMALL, "run": str(tmp_path / f"run-{len(readers)}"), **changes}
        config = resolve(TrainConfig, [Layer("test", settings), Layer("recipe", taskset.recipe)])
        readers.append(RunReader(run.train(config, taskset, SilentProgress()).run))
        return readers[-1]

    yield trained
    for reader in readers:
        reader.close()


def fates_by_group(reader):
    """Return, for each step, its groups, and whether an attempt of each was trained."""
    steps = {}
    for fate in reader.fates():
        groups = steps.setdefault(fate.step, {})
        groups[fate.attempt.group_id] = groups.get(fate.attempt.group_id, False) or fate.fate == "trained"
    return [steps[step] for step in sorted(steps)]


def test_a_step_is_refilled_until_enough_groups_have_a_signal(read):
    reader = read(max_staleness=2, steps=5, algorithm={"constant_groups": "drop", "max_refill_rounds": 2})
    steps = fates_by_group(reader)
    for groups in steps:
        assert sum(groups.values()) == 3 or (len(groups) == 9 and sum(groups.values()) < 3)
        assert groups[max(groups)] or len(groups) == 9
    assert any(len(groups) > 3 for groups in steps)
    assert [serial for groups in steps for serial in groups] == list(range(sum(map(len, steps))))
    counts = [(m.values["groups"], m.values["refilled_groups"]) for m in reader.metrics()]
    assert counts == [(len(groups), len(groups) - 3) for groups in steps]
    assert {fate.attempt for fate in reader.fates()} == {event.attempt for event in reader.attempts()}
    assert max(m.values.get("staleness", 0) for m in reader.metrics()) <= 2


def test_an_algorithm_that_needs_a_greedy_attempt_gets_one_per_group(read, monkeypatch):
    groups = []
    select = PolicyUpdater.select
    monkeypatch.setattr(PolicyUpdater, "select", lambda self, group: groups.append(group) or select(self, group))
    reader = read(steps=1, algorithm="remax")
    assert len(groups) == 3 and all(group.greedy.rewards and len(group.trajectories) == 2 for group in groups)
    assert [group.greedy.attempt.sort_key for group in groups] == [(serial, 2, 0) for serial in range(3)]
    assert {t.attempt.sample_index for t in reader.trajectories()} == {0, 1, 2}
    assert len(list(reader.attempts())) == 3 * 3
    fates = {fate.attempt: fate for fate in reader.fates()}
    assert len(fates) == 3 * 3
    assert {fates[group.greedy.attempt].reason for group in groups} == {"greedy attempt, to compare with"}


def test_tasks_repeat_forever_in_a_new_order_each_epoch(taskset):
    tasks = taskset.tasks("train")[:5]
    config = TrainConfig(steps=1, groups_per_step=2, group_size=4, seed=3)
    requests = list(islice(group_requests(tasks, config), 15))
    assert [request.group_id for request in requests] == list(range(15)) and {request.size for request in requests} == {
        4
    }
    epochs = [[request.task.id for request in requests[start : start + 5]] for start in (0, 5, 10)]
    assert all(sorted(epoch) == sorted(task.id for task in tasks) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert requests == list(islice(group_requests(tasks, config), 15))
    for first in (1, 4, 5, 7):
        assert list(islice(group_requests(tasks, config, first), 15 - first)) == requests[first:]


def test_every_step_gets_the_same_mixture_of_kinds(taskset):
    tasks = taskset.tasks("train")[:18]
    numbers = {task.id: number % 3 for number, task in enumerate(tasks)}
    config = TrainConfig(steps=1, groups_per_step=3, group_size=4, seed=3)

    def kind(task):
        return min(numbers[task.id], 1)  # one task in three is of kind 0

    requests = list(islice(group_requests(tasks, config, kind=kind), 36))
    steps = [[kind(request.task) for request in requests[start : start + 3]] for start in range(0, 36, 3)]
    assert all(sorted(step) == [0, 1, 1] for step in steps)
    epochs = [[request.task.id for request in requests[start : start + 18]] for start in (0, 18)]
    assert epochs[0] != epochs[1] and sorted(epochs[0]) == sorted(epochs[1]) == sorted(numbers)
    for first in (1, 18, 20):
        assert list(islice(group_requests(tasks, config, first, kind), 36 - first)) == requests[first:]
