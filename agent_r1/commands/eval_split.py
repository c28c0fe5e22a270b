"""A table is measured on questions that the agent was not trained on, however its files are called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import agent_r1.tasksets
from agent_r1.core.errors import InvalidInput
from agent_r1.core.task import Task
from agent_r1.core.taskset import TaskSet
from agent_r1.tasksets.splits import words_of
from agent_r1.training.config import EvalConfig, TrainConfig
from agent_r1.training.report import Progress


def unseen(world: TaskSet, asked: EvalConfig, trained: TrainConfig | None, progress: Progress) -> TaskSet:
    """The world, as an agent is evaluated in it: ``trained`` is the configuration of its run, None where it has none.

    On the data of its own run that is the split it was kept from. Other data are taken whole where they bring no test
    part of their own, and without the questions that the run was trained on.
    """
    if trained is not None and trained.data is not None and asked.data is not None:
        if trained.data.resolve() == asked.data.resolve():
            return world
        world = replace(world, tasks=_without(world, _trained_on(trained, progress)))
    return world if world.whole is None else replace(world, evaluation=(world.whole,))


def _without(world: TaskSet, seen: frozenset[str]) -> Callable[[str], Sequence[Task]]:
    def of(split: str) -> Sequence[Task]:
        kept = [task for task in world.tasks(split) if _words(task) not in seen]
        if not kept:
            got = f"{split}, whose questions the run was all trained on"
            raise InvalidInput("--data", got=got, do="give questions that it has not seen")
        return kept

    return of


def _trained_on(trained: TrainConfig, progress: Progress) -> frozenset[str]:
    try:
        own = agent_r1.tasksets.build(trained.task, trained.data, trained.corpus, trained.seed, trained.sandbox)
    except InvalidInput as error:
        progress.say(f"WARNING: what the run was trained on may be among these questions, as it is not known: {error}")
        return frozenset()
    return frozenset(map(_words, own.tasks("train")))


def _words(task: Task) -> str:
    return words_of(task.messages[-1].text)
