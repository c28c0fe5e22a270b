"""A table is measured on questions that the agent was not trained on, however its files are called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import agent_r1.tasks
from agent_r1.core.errors import InvalidInput
from agent_r1.core.task import Task
from agent_r1.core.world import World
from agent_r1.tasks.splits import words_of
from agent_r1.train.config import EvalConfig, TrainConfig
from agent_r1.train.report import Progress


def unseen(world: World, asked: EvalConfig, trained: TrainConfig | None, progress: Progress) -> World:
    """The world, as an agent is evaluated in it: ``trained`` is the configuration of its run, None where it has none.

    On the data of its own run that is the split it was kept from. Other data are taken whole where they bring no test
    part of their own, and without the questions that the run was trained on.
    """
    if trained is not None and trained.data is not None and asked.data is not None:
        if trained.data.resolve() == asked.data.resolve():
            return world
        world = replace(world, tasks=_without(world, _trained_on(trained, progress)))
    return world if world.whole is None else replace(world, evaluation=(world.whole,))


def _without(world: World, seen: frozenset[str]) -> Callable[[str], Sequence[Task]]:
    def of(split: str) -> Sequence[Task]:
        kept = [task for task in world.tasks(split) if _words(task) not in seen]
        if not kept:
            got = f"{split}, whose questions the run was all trained on"
            raise InvalidInput("--data", got=got, do="give questions that it has not seen")
        return kept

    return of


def _trained_on(trained: TrainConfig, progress: Progress) -> frozenset[str]:
    try:
        own = agent_r1.tasks.build(trained.task, trained.data, trained.corpus, trained.seed, trained.sandbox)
    except InvalidInput as error:
        progress.say(f"WARNING: what the run was trained on may be among these questions, as it is not known: {error}")
        return frozenset()
    return frozenset(map(_words, own.tasks("train")))


def _words(task: Task) -> str:
    return words_of(task.messages[-1].text)
