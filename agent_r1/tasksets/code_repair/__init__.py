"""``code-repair``: the agent repairs a function of MBPP that contains one bug. Hidden tests grade the repair."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agent_r1.core.errors import InvalidInput
from agent_r1.core.task import Task
from agent_r1.core.taskset import TaskSet
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.sandbox.config import SandboxConfig, SandboxLevel
from agent_r1.sandbox.sandbox import Sandbox
from agent_r1.tasksets.code.exam import packages_for
from agent_r1.tasksets.code.problems import Problem, read_problems
from agent_r1.tasksets.code_repair.bugs import plant_bugs
from agent_r1.tasksets.code_repair.examples import CHOOSING, WRITING, examples
from agent_r1.tasksets.code_repair.scorer import RepairScorer, repair_rates
from agent_r1.tasksets.code_repair.settings import Settings, read_settings
from agent_r1.tasksets.code_repair.solutions import solutions_of
from agent_r1.tasksets.code_repair.tool import bug_of, shuffled_try_tool, try_tool
from agent_r1.tasksets.splits import GIVEN_OUT, Splits, all_questions, read_splits

RECIPE: Mapping[str, Any] = {
    "tool_format": "tags",
    "reward_weights.gained": 0.0,
    "reward_weights.first_fixed": 0.0,
}
"""The default settings for training on this task set. Only the reward ``fixed`` has a weight other than 0."""

MAX_OUTPUT = 300
"""The maximum number of characters of a tool result: enough for a failed test, not for a long traceback."""


def build(data: Path | None, corpus: str | Path | None, seed: int, level: SandboxLevel) -> TaskSet:
    """Build the task set. In each task, the agent repairs a function in which a bug was planted.

    ``data`` is a file or data set of functions with tests, in the format of MBPP, or a TOML file of settings.

    Raises InvalidInput if an argument cannot be used, or if no bug can be planted.
    """
    if corpus is not None:
        raise InvalidInput("corpus", got=corpus, do="leave it out: nothing is searched here")
    settings = read_settings(data)
    splits = read_splits(settings.data, seed, read_problems, GIVEN_OUT)
    problems = {name: some for name, some in splits.items() if name != "all"}
    sandbox = Sandbox(SandboxConfig(level=level, packages=packages_for(p.exam for p in all_questions(splits))))
    tasks = _tasks(problems, settings, seed, sandbox)
    bugs = [bug_of(task) for task in tasks["test"] or tasks["train"]]
    tool = shuffled_try_tool(sandbox, bugs) if settings.shuffle_feedback else try_tool(sandbox)
    choosing = settings.proposals > 0
    env = ToolEnv(
        [tool],
        max_turns=settings.turns,
        system=CHOOSING if choosing else WRITING,
        examples=examples(choosing),
        max_output=MAX_OUTPUT,
    )

    def tasks_of(split: str) -> tuple[Task, ...]:
        if not tasks.get(split):
            there = ", ".join(name for name, some in tasks.items() if some)
            raise InvalidInput(f"split of {settings.data}", got=repr(split), do=f"use one that it has: {there}")
        return tasks[split]

    return TaskSet(
        name="code-repair",
        env=env,
        tasks=tasks_of,
        scorers=(RepairScorer(sandbox),),
        rewards=("fixed", "gained", "first_fixed"),
        recipe={"sandbox": level, **RECIPE},
        validation="validation" if tasks["validation"] else None,
        solutions=solutions_of(settings.turns),
        measures=repair_rates,
        sandbox=sandbox.isolation,
    )


def _tasks(splits: Splits[Problem], settings: Settings, seed: int, sandbox: Sandbox) -> Mapping[str, tuple[Task, ...]]:
    """Return the tasks of each split. A task has one bug in one function.

    The order of the tasks is: the first bug of every function, then the second bug of every function, and so on.
    """
    tasks = {}
    for split, problems in splits.items():
        training = split == "train"
        count = settings.bugs if training else 1
        source = str(seed) if training else split
        bugs = plant_bugs(problems, count, settings.lines, settings.proposals, source, sandbox)
        numbered = [(sum(one.problem.id == bug.problem.id for one in bugs[:i]), bug) for i, bug in enumerate(bugs)]
        tasks[split] = tuple(bug.task(split, number) for number, bug in sorted(numbered, key=lambda pair: pair[0]))
    if not any(tasks.values()):
        got = f"no function of at most {settings.lines} lines with a bug that its tests find"
        raise InvalidInput(str(settings.data), got=got, do="give functions with at least two tests, as MBPP has them")
    return tasks
