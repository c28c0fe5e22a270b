"""Make a task set from a user's Python objects, or from a user's file that defines ``env`` and ``tasks``."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from inspect import isfunction, signature
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, TypeGuard

from agent_r1.core.environment import Env, Environments, ExecutesCode, env_of, named_envs, weakest_sandbox
from agent_r1.core.errors import InvalidInput
from agent_r1.core.task import AgentFunction, Task, check_text
from agent_r1.core.taskset import ReferenceSolutions, TaskSet
from agent_r1.core.trajectory import Scorer
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.envs.user_env import UserEnv
from agent_r1.rewards.scoring import (
    ANSWER_REWARDS,
    EnvScorer,
    FunctionScorer,
    RewardFunction,
    functions_by_name,
    gold_answers,
)
from agent_r1.sandbox.sandbox import find_unconfined_sandbox, sandbox_level
from agent_r1.store.folder import is_run, run_folder
from agent_r1.store.saved_weights import find_folder
from agent_r1.tasksets import TASKSETS, import_errors
from agent_r1.tasksets.tinywiki.model import TINY_BASE_RECIPE, is_tiny_base

VALIDATION = "validation"

FILE_MODULE = "agent_file"


def make_taskset(
    env: Any,
    tasks: Any,
    name: str,
    model: str,
    rewards: Sequence[RewardFunction] = (),
    solutions: Callable[[Task], ReferenceSolutions] | None = None,
) -> TaskSet:
    """Return a task set with a user's environment, or environments by name, and tasks.

    Each split except ``train`` and ``validation`` is a column in the result table of a run. If there are no splits
    except ``train`` and ``validation``, ``train`` is the column. The split ``validation`` determines the best step.
    Several environments have a column for each environment and split, such as "calc/test".
    """
    envs = _check_env(env)
    if isinstance(rewards, str) or not isinstance(rewards, Sequence) or not all(map(callable, rewards)):
        raise InvalidInput("rewards", got=f"an object of type {type(rewards).__name__}", do="give a list of functions")
    shared = (FunctionScorer(functions_by_name(rewards)),) if rewards else ()
    scorers: dict[str, tuple[Scorer, ...]] = {}
    for label, one in named_envs(envs).items():
        scorers[label] = (*(one.scorers if isinstance(one, ToolEnv | UserEnv) else ()), *shared)
        if not scorers[label]:
            what = f"env {label!r}" if label else "env"
            raise InvalidInput(what, got="no rewards", do="give rewards=[...]: training needs them")
    valid_tasks = _validate(tasks, envs)
    with_answers = {label for label, some in scorers.items() if _reads_answers(some)}
    for task in valid_tasks:
        if task.env in with_answers:
            gold_answers(task)
    several = isinstance(envs, Environments)
    tested = dict.fromkeys(task.env_split for task in valid_tasks if task.split not in ("train", VALIDATION))
    trained = dict.fromkeys(task.env_split for task in valid_tasks if task.split == "train")
    return TaskSet(
        name=name,
        env=envs,
        tasks=lambda split: take_turns([task for task in valid_tasks if split in (task.split, task.env_split)]),
        scorers=tuple(
            EnvScorer(label, scorer) if several else scorer for label, some in scorers.items() for scorer in some
        ),
        evaluation=tuple(tested or trained),
        validation=VALIDATION if any(task.split == VALIDATION for task in valid_tasks) else None,
        subset=(lambda task: task.env) if several else None,
        recipe={"taskset": name, **(TINY_BASE_RECIPE if is_tiny_base(find_folder(model, merged=True)) else {})},
        solutions=solutions,
        sandbox=_weakest_sandbox([*named_envs(envs).values(), *chain(*scorers.values())], valid_tasks),
    )


def _check_env(env: Any) -> Env:
    if isinstance(env, Env):
        return env
    if not isinstance(env, Mapping) or not env:
        got = f"an object of type {type(env).__name__}" if not isinstance(env, Mapping) else "no environment"
        do = 'make it a ToolEnv, give it tools and open(), or give several by name: {"calc": env, ..}'
        raise InvalidInput("env", got=got, do=do)
    for name, one in env.items():
        check_env_name(name)
        if not isinstance(one, Env):
            got = f"an object of type {type(one).__name__}"
            raise InvalidInput(f"env {name!r}", got=got, do="make it a ToolEnv, or give it tools and open()")
    return Environments(dict(env))


def check_env_name(name: Any) -> None:
    """Raise InvalidInput if ``name`` cannot be the name of one of several environments."""
    check_text("name of an environment", name)
    if not re.fullmatch(r"[\w.-]+", name):  # names are part of lists of splits, of metrics and of recorded lines
        raise InvalidInput("name of an environment", got=repr(name), do="give letters, digits, '_', '-' and '.' only")


def _reads_answers(scorers: Sequence[Scorer]) -> bool:
    functions = (f for one in scorers if isinstance(one, FunctionScorer) for f in one.functions.values())
    return any(function in ANSWER_REWARDS for function in functions)


def take_turns(tasks: Sequence[Task]) -> list[Task]:
    """Return the tasks such that environments alternate: the first tasks of a split then have some of each."""
    by_env: dict[str, list[Task]] = {}
    for task in tasks:
        by_env.setdefault(task.env, []).append(task)
    return [task for turn in zip_longest(*by_env.values()) for task in turn if task is not None]


def _weakest_sandbox(components: Sequence[object], tasks: Sequence[Task]) -> str | None:
    # None if the policy's code never runs. A ``Sandbox`` object of the level "none", which does not isolate, counts as
    # soon as it exists, because a tool or a reward could use it without a declaration.
    declared = [sandbox_level(component.sandbox) for component in components if isinstance(component, ExecutesCode)]
    return weakest_sandbox([*declared, *_tasks_without_sandbox(tasks), find_unconfined_sandbox()])


def _tasks_without_sandbox(tasks: Sequence[Task]) -> list[str]:
    declared = (task.data.get("sandbox") for task in tasks if isinstance(task.data, Mapping))
    return [level for level in declared if isinstance(level, str) and level.partition(":")[0] == "none"]


def load_task_file(file: Path, model: str, module: str = FILE_MODULE) -> TaskSet:
    """Return the task set of a Python file with ``env``, ``tasks``, and perhaps ``rewards``, ``solutions`` and ``run``.

    ``run(base_url, api_key, task)`` is an agent program, which acts unless ``--agent`` names another one.
    """
    if not os.path.isfile(file):
        is_model = os.path.isdir(file) or is_run(run_folder(str(file)))
        do = f"give --model {file} to use a run or a model, or a Python file" if is_model else "give a Python file"
        if str(file) in TASKSETS or os.path.isfile(file / "__init__.py"):
            do = f"give --taskset {file}, or a Python file"
        raise InvalidInput("FILE.py", got=f"{file}, which is not a file", do=do)
    if file.suffix == ".toml":
        do = f"give --taskset {file} if it is a mixture, --config {file} if it has settings"
        raise InvalidInput("FILE.py", got=str(file), do=do)
    values = import_file(file, module)
    for name in ("env", "tasks"):
        if name not in values:
            raise InvalidInput(str(file), got=f"no {name}", do="define env (a ToolEnv) and tasks (a list of Task)")
    rewards, solutions = values.get("rewards", ()), values.get("solutions")
    taskset = make_taskset(values["env"], values["tasks"], file.stem, model, rewards, solutions)
    run = values.get("run")
    return replace(taskset, file=file, agent=run if _is_agent(run) else None)


def _is_agent(value: object) -> TypeGuard[AgentFunction]:
    # Files also have functions of other kinds with this name, such as subprocess.run.
    parameters = signature(value).parameters.values() if isfunction(value) else ()
    return [p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters] == [True] * 3


def check_agent(name: str, agent: Any) -> AgentFunction | None:
    """Return ``agent``. Raise InvalidInput, which calls it ``name``, if it is neither a function nor None."""
    if agent is not None and not callable(agent):
        do = "give a function (base_url, api_key, task), or FILE.py:NAME of one"
        raise InvalidInput(name, got=f"an object of type {type(agent).__name__}", do=do)
    function: AgentFunction | None = agent
    return function


def check_tasks(name: str, tasks: Any) -> None:
    """Raise InvalidInput, which calls the tasks ``name``, if they are not a list of tasks."""
    if isinstance(tasks, str) or not isinstance(tasks, Sequence):
        raise InvalidInput(name, got=f"an object of type {type(tasks).__name__}", do="make it a list of Task")
    for index, task in enumerate(tasks):
        if not isinstance(task, Task):
            raise InvalidInput(f"{name}[{index}]", got=f"an object of type {type(task).__name__}", do="make it a Task")


def _validate(tasks: Any, envs: Env) -> tuple[Task, ...]:
    check_tasks("tasks", tasks)
    ids: set[str] = set()
    for index, task in enumerate(tasks):
        if task.id in ids:
            raise InvalidInput(f"tasks[{index}]", got=f"a second task with id {task.id!r}", do="give each its own id")
        ids.add(task.id)
        if task.env and not isinstance(envs, Environments):
            do = 'leave it out, or give the environments by name: env = {"calc": env, ..}'
            raise InvalidInput(f"env of task {task.id}", got=f"{task.env!r}, and a single environment", do=do)
        env_of(envs, task)
    if all(task.split == VALIDATION for task in tasks):  # a file of test tasks only can be evaluated
        raise InvalidInput("tasks", got="none in the split 'train'", do="give tasks to train on")
    return tuple(tasks)


def import_file(file: Path, module_name: str) -> dict[str, Any]:
    """Import a Python file under a module name, and return its global names. Raise InvalidInput if the import fails."""
    loader = SourceFileLoader(module_name, str(file))
    spec = spec_from_loader(module_name, loader)
    assert spec is not None
    module = sys.modules[module_name] = module_from_spec(spec)  # dataclasses need their module in sys.modules
    sys.path.insert(0, str(file.parent.absolute()))
    with import_errors(file):
        loader.exec_module(module)
    return vars(module)
