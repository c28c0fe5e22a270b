"""A user's own agent as a world: from Python values, or from a file that defines ``env`` and ``tasks``."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

from agent_r1.core.environment import Env, ExecutesCode, weakest_sandbox
from agent_r1.core.errors import AgentR1Error, InvalidInput
from agent_r1.core.reference_solution import ReferenceSolutions
from agent_r1.core.task import Task
from agent_r1.core.taskset import TaskSet
from agent_r1.envs import ToolEnv
from agent_r1.envs.user_env import UserEnv
from agent_r1.rewards import FunctionScorer
from agent_r1.rewards.scoring import RewardFunction, functions_by_name
from agent_r1.sandbox import find_unconfined_sandbox, sandbox_level
from agent_r1.tasksets.tinywiki.model import TINY_BASE, TINY_BASE_RECIPE

FILE_MODULE = "agent_file"
"""The name a user's file is imported under."""


def make_taskset(
    env: Any,
    tasks: Any,
    name: str,
    model: str,
    rewards: Sequence[RewardFunction] = (),
    solutions: Callable[[Task], ReferenceSolutions] | None = None,
) -> TaskSet:
    """A world of an environment and tasks, which are checked: they come from a user.

    ``model`` is the one asked for. Where that is tiny-base, or none, the settings that fit tiny-base are the recipe.

    Tasks belong to the split they name. The table shows the splits other than ``train``; where all tasks
    are in ``train``, the table is over them, and says so.
    """
    if not isinstance(env, Env):
        got = f"an object of type {type(env).__name__}"
        raise InvalidInput("env", got=got, do="make it a ToolEnv, or give it tools and open()")
    given = (FunctionScorer(functions_by_name(rewards)),) if rewards else ()
    scorers = (*(env.scorers if isinstance(env, ToolEnv | UserEnv) else ()), *given)
    if not scorers:
        raise InvalidInput("env", got="no rewards", do="give rewards=[...]: nothing is learned without")
    listed = _checked(tasks)
    others = tuple(dict.fromkeys(task.split for task in listed if task.split != "train"))
    return TaskSet(
        name=name,
        env=env,
        tasks=lambda split: [task for task in listed if task.split == split],
        scorers=scorers,
        evaluation=others or ("train",),
        recipe={"taskset": name, **(TINY_BASE_RECIPE if model in ("", TINY_BASE) else {})},
        solutions=solutions,
        sandbox=_sandbox_of([env, *scorers], listed),
    )


def _sandbox_of(parts: Sequence[object], tasks: Sequence[Task]) -> str | None:
    """The weakest_sandbox of the sandboxes that code runs in, as environment, scorers and tasks say; what they forget to say of a
    sandbox that holds nothing is known too."""
    said = [sandbox_level(part.sandbox) for part in parts if isinstance(part, ExecutesCode)]
    return weakest_sandbox([*said, *_risks(tasks), find_unconfined_sandbox()])


def _risks(tasks: Sequence[Task]) -> list[str]:
    """What tasks say of going without: somebody's own may call anything else "sandbox", and be held by nothing."""
    declared = (task.data.get("sandbox") for task in tasks if isinstance(task.data, Mapping))
    return [level for level in declared if isinstance(level, str) and level.partition(":")[0] == "none"]


def load_task_file(file: Path, model: str) -> TaskSet:
    """The world that a Python file describes, for the model asked for: by the names ``env`` and ``tasks``,
    ``rewards`` where the environment brings none, and ``solutions`` where it can be checked.

    The file is run like a script in its own folder. Raises InvalidInput, in one line, where it is
    missing, cannot be run, or lacks a name.
    """
    if not file.is_file():
        raise InvalidInput("FILE.py", got=f"{file}, which is not a file", do="give a Python file")
    names = _run(file)
    for name in ("env", "tasks"):
        if name not in names:
            raise InvalidInput(str(file), got=f"no {name}", do="define env (a ToolEnv) and tasks (a list of Task)")
    given = names.get("rewards", ()), names.get("solutions")
    return make_taskset(names["env"], names["tasks"], file.stem, model, *given)


def _checked(tasks: Any) -> tuple[Task, ...]:
    if isinstance(tasks, str) or not isinstance(tasks, Sequence):
        raise InvalidInput("tasks", got=f"an object of type {type(tasks).__name__}", do="make it a list of Task")
    seen: set[str] = set()
    for place, task in enumerate(tasks):
        if not isinstance(task, Task):
            raise InvalidInput(f"tasks[{place}]", got=f"an object of type {type(task).__name__}", do="make it a Task")
        if task.id in seen:
            raise InvalidInput(f"tasks[{place}]", got=f"a second task with id {task.id!r}", do="give each its own id")
        seen.add(task.id)
    if all(task.split != "train" for task in tasks):
        raise InvalidInput("tasks", got="none in the split 'train'", do="give tasks to train on")
    return tuple(tasks)


def _run(file: Path) -> dict[str, Any]:
    loader = SourceFileLoader(FILE_MODULE, str(file))
    spec = spec_from_loader(FILE_MODULE, loader)
    assert spec is not None
    module = sys.modules[FILE_MODULE] = module_from_spec(spec)  # registered: dataclasses look their module up
    sys.path.insert(0, str(file.parent.absolute()))
    try:
        loader.exec_module(module)
    except AgentR1Error:
        raise
    except SyntaxError as error:
        got = f"{error.msg} (line {error.lineno})"
        raise InvalidInput(str(file), got=got, do="mend the file") from error
    except (Exception, SystemExit) as error:  # a script may end itself; a command may not end by it
        got = f"{type(error).__name__}: {error} (line {_line(file, error)})"
        raise InvalidInput(str(file), got=got, do="mend the file") from error
    return vars(module)


def _line(file: Path, error: BaseException) -> int | None:
    """The line of ``file`` that was running when an error arose, there or in what it called."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    return lines[-1] if lines else None
