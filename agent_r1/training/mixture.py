"""Mixtures: one run on several task sets, each with its own environment and scorers, described by a TOML file.

Each table of the file is a part: a task set by its name, or a file that defines ``env`` and ``tasks``. Of the training
tasks, a part has its ``share``. A part of share 0 is only evaluated. Relative paths begin at the folder of the file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from math import ceil, floor
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

import agent_r1.tasksets
from agent_r1.config import read_toml
from agent_r1.core.environment import Env, Environments, weakest_sandbox
from agent_r1.core.errors import InvalidInput
from agent_r1.core.redaction import flatten
from agent_r1.core.task import Task
from agent_r1.core.taskset import ReferenceSolutions, TaskSet
from agent_r1.core.trajectory import Scorer, Scores, Trajectory
from agent_r1.rewards.scoring import EnvScorer, FunctionScorer
from agent_r1.sandbox.config import SandboxLevel
from agent_r1.tasksets.files import locate_data
from agent_r1.training.user_task import FILE_MODULE, VALIDATION, check_env_name, load_task_file, take_turns

MAX_EPOCH = 5_000_000
"""The largest number of tasks in an epoch of a mixture."""

WEIGHTS = "reward_weights."


class Part(BaseModel):
    """A part of a mixture. The fields except ``share`` are those of ``agent_r1.tasksets.build``."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    taskset: str
    share: float = Field(default=1.0, ge=0)
    data: Path | None = None
    corpus: str | None = None
    encoder: str = ""
    sandbox: SandboxLevel | None = None


def load_mixture(file: Path, seed: int, model: str) -> TaskSet:
    """Return the mixture that ``file`` describes as one task set. Its splits are "train", "validation" and PART/SPLIT.

    Raise InvalidInput if the file is malformed, or if a part cannot be built.
    """
    described = _read(file)
    parts = {name: _build(file, name, part, seed, model) for name, part in described.items()}
    shares = {name: Fraction(part.share) for name, part in described.items() if part.share > 0}
    trained = {name: parts[name] for name in shares}
    validated = {name: own.validation for name, own in trained.items() if own.validation is not None}

    @lru_cache
    def tasks(split: str) -> Sequence[Task]:
        name, _, own = split.partition("/")
        if split == "train":
            return mix({name: _tasks_of(name, part, "train") for name, part in trained.items()}, shares)
        if split == VALIDATION and validated:
            return take_turns([task for name, own in validated.items() for task in _tasks_of(name, parts[name], own)])
        if name not in parts or not own:
            there = ("train", *([VALIDATION] if validated else []), *evaluation)
            raise InvalidInput(f"split of {file}", got=repr(split), do=f"use one that it has: {', '.join(there)}")
        return _tasks_of(name, parts[name], own)

    def measures(trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
        found: dict[str, float] = {}
        for name, own in parts.items():
            some = [trajectory for trajectory in trajectories if trajectory.task_id.startswith(f"{name}/")]
            if own.measures is not None and some:
                found |= {f"{name}/{measure}": value for measure, value in own.measures(some).items()}
        return found

    def retrieval(split: str) -> Mapping[str, float]:
        name, _, own = split.partition("/")
        measure = parts[name].retrieval if name in parts else None
        return {} if measure is None else measure(own)

    def solutions(task: Task) -> ReferenceSolutions:
        own = parts[task.env].solutions
        return ReferenceSolutions((), (), {}) if own is None else own(_as_own(task))

    def kind(task: Task) -> int:
        own = parts[task.env].kind
        return 0 if own is None else own(_as_own(task))

    unsolved = tuple(name for name, own in parts.items() if own.solutions is None)
    evaluation = tuple(f"{name}/{split}" for name, own in parts.items() for split in own.evaluation)
    envs = {name: own.env for name, own in parts.items()}
    for name, own in parts.items():
        envs |= {f"{name}/{split}": env for split, env in own.variants.items()}
    recipe, disputed = _recipe(file, trained)
    baselines: dict[str, dict[str, Env]] = {}
    for name, own in parts.items():
        for method, env in own.baselines.items():
            baselines.setdefault(method, {})[name] = env
    return TaskSet(
        name=str(file),
        env=Environments(envs),
        tasks=tasks,
        scorers=tuple(EnvScorer(name, _OwnTasks(one)) for name, own in parts.items() for one in own.scorers),
        baselines={method: Environments(by_name) for method, by_name in baselines.items()},
        recipe=recipe,
        disputed=disputed,
        evaluation=evaluation,
        validation=VALIDATION if validated else None,
        retrieval=retrieval if any(own.retrieval for own in parts.values()) else None,
        solutions=None if len(unsolved) == len(parts) else solutions,
        unsolved=unsolved,
        kind=kind,
        subset=lambda task: task.env,
        measures=measures if any(own.measures for own in parts.values()) else None,
        sandbox=weakest_sandbox(own.sandbox for own in parts.values()),
        rewards=tuple(dict.fromkeys(name for own in parts.values() for name in _rewards(own))),
        part_data={
            f"{name}.{kind}": _located(file, source)
            for name, part in described.items()
            for kind, source in (("data", part.data), ("corpus", part.corpus))
            if source is not None
        },
    )


@dataclass(frozen=True, slots=True)
class _OwnTasks:
    # The scorer of a part, which can know its tasks by their ids.
    scorer: Scorer

    async def score(self, group: Sequence[Trajectory], task: Task) -> tuple[Scores, ...]:
        return await self.scorer.score(group, _as_own(task))


def _as_own(task: Task) -> Task:
    return replace(task, id=task.id.removeprefix(f"{task.env}/"), env="")


def mix(tasks: Mapping[str, Sequence[Task]], shares: Mapping[str, Fraction]) -> tuple[Task, ...]:
    """Return the training tasks of one epoch, in which each part has its share to within one task.

    Every task occurs. The tasks of parts that are small for their share are repeated in turn.
    """
    for name, own in tasks.items():
        if not own:
            raise InvalidInput(f"tasks of {name}", got="none to train on", do="give it some, or share = 0")
    weights = {name: share / sum(shares.values()) for name, share in shares.items()}
    size = max(ceil(len(own) / weights[name]) for name, own in tasks.items())
    if size > MAX_EPOCH:
        name = min(weights, key=lambda name: weights[name] / len(tasks[name]))
        got = f"a share with which an epoch has {size:,} tasks (at most {MAX_EPOCH:,})"
        raise InvalidInput(f"share of {name}", got=got, do="raise it, or give the part fewer tasks")
    counts = {name: floor(weight * size) for name, weight in weights.items()}
    by_remainder = sorted(weights, key=lambda name: counts[name] - weights[name] * size)
    for name in by_remainder[: size - sum(counts.values())]:  # the method of largest remainders
        counts[name] += 1
    return tuple(own[index % len(own)] for name, own in tasks.items() for index in range(counts[name]))


def _read(file: Path) -> Mapping[str, Part]:
    try:
        parts = TypeAdapter(dict[str, Part]).validate_python(read_toml(file).values)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        do = f"give a table [NAME] for each part, with {', '.join(Part.model_fields)}"
        raise InvalidInput(f"{file}, {'.'.join(map(str, fault['loc']))}", got=fault["msg"], do=do) from error
    for name in parts:
        check_env_name(name)
    if not any(part.share > 0 for part in parts.values()):
        raise InvalidInput(f"{file}, share", got="0 for every part", do="train on at least one part")
    return parts


def _located(file: Path, source: str | Path) -> Path:
    return Path(source) if "://" in str(source) else locate_data(file, Path(source))


def _build(file: Path, name: str, part: Part, seed: int, model: str) -> TaskSet:
    taskset = part.taskset
    if taskset.endswith(".toml"):
        raise InvalidInput(f"{file}, {name}", got=f"{taskset}, a mixture", do="give each of its parts here")
    if taskset not in agent_r1.tasksets.TASKSETS and agent_r1.tasksets.is_available(taskset):
        taskset = os.path.join(file.parent, taskset)
    sources = (part.data, part.corpus, part.encoder or None, part.sandbox)
    if taskset.endswith(".py") and not agent_r1.tasksets.has_build(Path(taskset)):
        if any(source is not None for source in sources):
            do = f"leave out data, corpus, encoder and sandbox: {taskset} defines its own tasks"
            raise InvalidInput(f"{file}, {name}", got="more than taskset and share", do=do)
        own = load_task_file(Path(taskset), model, f"{FILE_MODULE}_{name}")
    else:
        data = None if part.data is None else _located(file, part.data)
        corpus = part.corpus if part.corpus is None or "://" in part.corpus else _located(file, part.corpus)
        own = agent_r1.tasksets.build(taskset, data, corpus, seed, part.sandbox, part.encoder)
    if isinstance(own.env, Environments):
        raise InvalidInput(f"{file}, {name}", got=f"{taskset} with several environments", do="give each its own part")
    if own.agent is not None:
        raise InvalidInput(f"{file}, {name}", got=f"{taskset} with an agent program", do="leave run out of the file")
    return own


def _tasks_of(name: str, part: TaskSet, split: str) -> tuple[Task, ...]:
    return tuple(replace(task, id=f"{name}/{task.id}", env=name) for task in part.tasks(split))


def _rewards(part: TaskSet) -> list[str]:
    functions = (name for one in part.scorers if isinstance(one, FunctionScorer) for name in one.functions)
    return list(dict.fromkeys((*part.rewards, *(() if part.rewards else functions))))


def _recipe(file: Path, trained: Mapping[str, TaskSet]) -> tuple[Mapping[str, Any], Mapping[str, str]]:
    # The default settings that all trained parts have, with the values of the first one, and the weights of all
    # rewards; and the settings of which the parts have different values.
    recipes = {name: dict(flatten(own.recipe)) for name, own in trained.items()}
    first, *others = recipes.values()
    shared = {key: value for key, value in first.items() if all(key in one for one in others)}
    differing = {key for key, value in shared.items() if any(one[key] != value for one in others)}
    weights: dict[str, tuple[str, float]] = {}
    for name, own in trained.items():
        for reward in _rewards(own):
            weight = recipes[name].get(f"{WEIGHTS}{reward}", 1.0)
            other, known = weights.setdefault(reward, (name, weight))
            if known != weight:
                got = f"weight {known:g} in {other} and {weight:g} in {name}"
                raise InvalidInput(f"{file}, reward {reward!r}", got=got, do="give it another name in one of them")
    left_out = {key for key in shared if key.startswith(WEIGHTS) or key == "taskset"}
    left_out |= differing & Part.model_fields.keys()  # each part keeps its sandbox and its data
    kept = {key: value for key, value in shared.items() if key not in left_out}
    disputed = {
        key: ", ".join(f"{name} {recipe[key]}" for name, recipe in recipes.items()) for key in kept if key in differing
    }
    return kept | {f"{WEIGHTS}{reward}": value for reward, (_, value) in weights.items() if value != 1.0}, disputed
