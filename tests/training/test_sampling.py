"""Adaptive sampling: which tasks are drawn after which outcomes, and that a resumed run draws the same ones."""

from collections import Counter
from contextlib import closing
from dataclasses import replace
from itertools import chain, islice

import pytest
from pydantic import TypeAdapter
from resuming import resume

from agent_r1.config import Layer
from agent_r1.core.errors import InvalidInput
from agent_r1.core.task import Task
from agent_r1.core.trajectory import AttemptId, Group, Status, Trajectory
from agent_r1.data.batch import Selection, TrainingSample
from agent_r1.store.reader import RunReader
from agent_r1.store.verification import verify
from agent_r1.tasksets import build
from agent_r1.trainer.updater import SelectedGroup
from agent_r1.training.checkpoint_files import TrainProgress
from agent_r1.training.config import TrainConfig, resolve_config
from agent_r1.training.progress import SilentProgress
from agent_r1.training.run import train
from agent_r1.training.sampling import AdaptiveSampler, group_requests

SIZE = 4
CONFIG = TrainConfig(steps=1, groups_per_step=SIZE, group_size=2, seed=3)


@pytest.fixture(scope="module")
def taskset():
    return build("tinywiki")


def kind(task):
    return task.data["kind"]


def tasks_of(*kinds, number=24):
    return [Task(str(index), "?", {"kind": kinds[index % len(kinds)]}) for index in range(number)]


def outcome(group_id, task, differs):
    def sample(reward):
        trajectory = Trajectory(AttemptId("run", task.id, group_id, int(reward)), task.id, (), Status.COMPLETED)
        return TrainingSample(trajectory, 0, (), reward, ())

    samples = (sample(0.0), sample(1.0 if differs else 0.0))
    group = Group(group_id, task, tuple(one.trajectory for one in samples))
    return SelectedGroup(group, Selection(samples, ()), differs)


def step(sampler, number, differs, groups=SIZE):
    """Let the sampler take a step, whose groups differ as ``differs(task)`` says. Return the tasks."""
    requests = list(islice(sampler.requests((number - 1) * groups), groups))
    batch = [outcome(one.group_id, one.task, differs(one.task)) for one in requests]
    sampler.on_step_end(number, batch[::-1])  # in whichever order they end
    return [one.task for one in requests]


def test_unknown_tasks_are_drawn_in_the_order_of_uniform_sampling():
    tasks = tasks_of(0)
    sampler = AdaptiveSampler(tasks, CONFIG, kind)
    drawn = step(sampler, 1, lambda task: True)
    order = [request.task.id for request in islice(group_requests(tasks, CONFIG, kind=kind), len(tasks))]
    places = [order.index(task.id) for task in drawn]
    assert places == sorted(places) and len(set(places)) == SIZE


def test_what_is_always_equal_is_skipped_and_comes_back():
    tasks = tasks_of(0, 1, 2)  # only groups at tasks of kind 1 differ
    sampler = AdaptiveSampler(tasks, CONFIG, kind)
    drawn = [[kind(task) for task in step(sampler, number, lambda task: kind(task) == 1)] for number in range(1, 81)]
    early, late = Counter(chain(*drawn[:4])), Counter(chain(*drawn[-40:]))
    assert early[1] < 0.8 * sum(early.values())
    assert late[1] > 0.7 * sum(late.values())
    assert late[0] and late[2], "dead and solved tasks are tried again"


def test_within_a_kind_the_tasks_that_differ_are_preferred():
    tasks = tasks_of(0)
    sampler = AdaptiveSampler(tasks, CONFIG, kind)
    drawn = [step(sampler, number, lambda task: int(task.id) % 2) for number in range(1, 81)]
    counts = Counter(int(task.id) % 2 for one in drawn[-40:] for task in one)
    assert counts[1] > 1.6 * counts[0] > 0
    assert len({task.id for one in drawn[-40:] for task in one if int(task.id) % 2}) == len(tasks) // 2, "all of them"


def test_with_many_tasks_those_that_differ_are_preferred_too():
    tasks = tasks_of(0, number=2000)
    sampler = AdaptiveSampler(tasks, CONFIG, kind)
    shares = []
    for number in range(1, 501):
        drawn = step(sampler, number, lambda task: int(task.id) % 10 < 3, groups=16)
        shares.append(sum(int(task.id) % 10 < 3 for task in drawn) / 16)
    first, last = shares[:100], shares[-100:]
    assert abs(sum(first) / 100 - 0.3) < 0.05, "control: in the first pass nothing is known"
    assert sum(last) / 100 > 0.42


def test_nothing_is_preferred_without_outcomes_that_differ():
    # control: a sampler that favored a kind for another reason than its outcomes would be seen here
    sampler = AdaptiveSampler(tasks_of(0, 1, 2), CONFIG, kind)
    counts = Counter(kind(task) for number in range(1, 81) for task in step(sampler, number, lambda task: True))
    assert max(counts.values()) < 1.3 * min(counts.values())


def test_a_restored_state_draws_the_same_tasks():
    tasks = tasks_of(0, 1)
    sampler = AdaptiveSampler(tasks, CONFIG, kind)
    for number in range(1, 6):
        step(sampler, number, lambda task: kind(task) == 1)
    adapter = TypeAdapter(TrainProgress)
    saved = adapter.dump_json(TrainProgress(5, 5 * SIZE, sampling=sampler.state))
    restored = AdaptiveSampler(tasks, CONFIG, kind, adapter.validate_json(saved).sampling)
    for number in range(6, 9):
        assert step(restored, number, lambda task: True) == step(sampler, number, lambda task: True)


@pytest.mark.parametrize("stopped", [2, 4])
def test_a_run_resumes_with_the_same_tasks(stopped, whole, tmp_path):
    run = whole(sampling="adaptive")
    folder = run.stopped(stopped, tmp_path)
    assert resume(run.taskset, folder) == run.result
    assert verify(folder).violations == ()
    assert run.result != whole().result, "control: other tasks than those of uniform sampling"


EXAMPLES = {"example_coef": 0.5, "groups_per_step": 4, "group_size": 2, "evaluate_n": 0, "pass_k": 0, "steps": 2}


def run_with_examples(taskset, folder, **settings):
    layers = [Layer("test", {**EXAMPLES, "run": str(folder), **settings})]
    train(resolve_config(TrainConfig, layers, taskset), taskset, SilentProgress())
    assert verify(folder).violations == ()
    return folder


def test_a_group_without_success_gets_an_example(taskset, tmp_path):
    with closing(RunReader(run_with_examples(taskset, tmp_path / "run"))) as reader:
        own = list(reader.trajectories())
        assert len(own) == 2 * 4 * 2, "examples are no attempts"
        dead = [
            {one.attempt.group_id for one in own if one.attempt.group_id // 4 == step}
            - {one.attempt.group_id for one in own if one.rewards["em"] == 1}
            for step in range(2)
        ]
        assert list(reader.curve("examples").values()) == [len(groups) for groups in dead] and all(dead)
        assert min(reader.curve("example_loss").values()) > 0
        em = [one.rewards["em"] for one in own if one.attempt.group_id < 4]
        assert reader.curve("em")[1] == sum(em) / len(em)


def test_a_solution_that_is_wrong_or_fails_is_not_imitated(taskset, tmp_path, caplog):
    def wrong(task):
        return replace(taskset.solutions(task), gold=taskset.solutions(task).wrong)

    def failing(task):
        if task.id == taskset.tasks("train")[0].id:
            return taskset.solutions(task)  # the one that is looked at before the run begins
        raise KeyError("no solution here")

    for name, solutions, says in (("wrong", wrong, "it earned"), ("failing", failing, "no solution here")):
        caplog.clear()
        folder = run_with_examples(replace(taskset, solutions=solutions), tmp_path / name, steps=1)
        with closing(RunReader(folder)) as reader:
            assert "examples" not in reader.metric_names()
        assert any(says in record.getMessage() for record in caplog.records)
    caplog.clear()
    run_with_examples(taskset, tmp_path / "short", steps=1, context=70)
    assert any("tokens, but the context has 70" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(("settings", "says"), [({"algorithm": "top-k-distillation"}, "teacher"), ({}, "no solutions")])
def test_examples_that_cannot_be_are_refused(settings, says, taskset, tmp_path):
    bare = replace(taskset, solutions=taskset.solutions if settings else None)
    layers = [Layer("test", {"example_coef": 0.5, "run": str(tmp_path / "run"), **settings})]
    with pytest.raises(InvalidInput, match=says):
        train(resolve_config(TrainConfig, layers, bare), bare, SilentProgress())
