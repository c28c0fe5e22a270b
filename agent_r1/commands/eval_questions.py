"""The questions of an evaluation, without the questions that the agent was trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import agent_r1.tasksets
from agent_r1.core.errors import InvalidInput
from agent_r1.core.task import Task
from agent_r1.core.taskset import TaskSet
from agent_r1.tasksets.splits import normalized_text
from agent_r1.training.config import EvalConfig, TrainSettings
from agent_r1.training.progress import Progress


def with_unseen_questions(
    taskset: TaskSet, config: EvalConfig, trained: TrainSettings | None, progress: Progress
) -> TaskSet:
    """Return the task set without the questions that the evaluated model was trained on.

    - If the model was trained on the data file ``config.data``, return the task set unchanged. The evaluation splits of
      this data file hold no training questions.
    - If the model was trained on a different data file, remove the training questions from all splits.
    - If no run trained the model, or if the run or ``config`` has no data file, remove no questions.

    If the model was not trained on ``config.data``, and the task set has a split with all tasks (``taskset.whole``),
    this split becomes the only evaluation split.

    Args:
        trained: the settings of the run that trained the model. None: no run trained the model.
        progress: prints a warning if the training data cannot be read.
    """
    if trained is not None and trained.data is not None and config.data is not None:
        if trained.data.resolve() == config.data.resolve():
            return taskset
        taskset = _exclude(taskset, _training_questions(trained, progress))
    return taskset if taskset.whole is None else replace(taskset, evaluation=(taskset.whole,))


def _exclude(taskset: TaskSet, questions: frozenset[str]) -> TaskSet:
    def tasks(split: str) -> Sequence[Task]:
        kept = [task for task in taskset.tasks(split) if _question(task) not in questions]
        if not kept:
            got = f"{split}, in which the run was trained on every question"
            raise InvalidInput("--data", got=got, do="give questions that it was not trained on")
        return kept

    return replace(taskset, tasks=tasks)


def _training_questions(trained: TrainSettings, progress: Progress) -> frozenset[str]:
    """Return the normalized text of each question that a run was trained on.

    If the training data cannot be read, print a warning and return an empty set.
    """
    try:
        own = agent_r1.tasksets.build(
            trained.taskset, trained.data, trained.corpus, trained.seed, trained.sandbox, trained.encoder
        )
    except InvalidInput as error:
        progress.print_line(f"WARNING: training questions may be among these, as they cannot be read: {error}")
        return frozenset()
    return frozenset(map(_question, own.tasks("train")))


def _question(task: Task) -> str:
    return normalized_text(task.messages[-1].text)
