"""Checks that settings, algorithm, policy and tasks fit together. A run is checked before it writes files."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from agent_r1.core.environment import Env, RolloutContext, env_of
from agent_r1.core.errors import InvalidInput, UnsupportedChat, suggest
from agent_r1.core.events import LogEvent
from agent_r1.core.messages import Message
from agent_r1.core.task import Task, hash_tasks
from agent_r1.core.taskset import TaskSet
from agent_r1.core.trajectory import AttemptId
from agent_r1.rollout.context_policy import Append, build_context_policy
from agent_r1.rollout.user_code import isolate
from agent_r1.store.manifest import hash_file
from agent_r1.store.reader import RunReader
from agent_r1.training.config import TasksetConfig, TrainConfig

if TYPE_CHECKING:
    from agent_r1.training.policy import Policy

OPEN_SECONDS = 60.0

CHECKED_PROMPTS = 8

PIXELS_PER_CHARACTER = 200
"""Pixels that count as one character: in Qwen2.5-VL an image token stands for 784, a text token for about four
characters."""

MAX_CHARACTERS_PER_TOKEN = 256
"""The assumed maximum. A longer prompt is too long, and need not be tokenized."""


def check_algorithm_settings(config: TrainConfig) -> None:
    """Raise InvalidInput if the algorithm cannot be used with the other settings."""
    from agent_r1.algorithms.registry import own_classes, own_modules  # imported here, because they import torch
    from agent_r1.algorithms.validation import check_context_rewriting

    algorithm = config.algorithm
    if config.trainer.ranks > 1 and "__main__" in own_modules(algorithm):
        names = ", ".join(cls.__name__ for cls in own_classes(algorithm) if cls.__module__ == "__main__")
        do = f"define {names} in a module of its own, and import it: a rank does not run the script or the notebook"
        raise InvalidInput("trainer.ranks", got=f"{config.trainer.ranks}, and {names} of __main__", do=do)
    if "group" in algorithm.needs and config.group_size < 2:
        do = f"give at least 2: {algorithm.name} compares attempts"
        raise InvalidInput("group_size", got=config.group_size, do=do)
    if not isinstance(build_context_policy(config.context_policy), Append):
        check_context_rewriting(algorithm)
    reuses_samples, is_stale = algorithm.epochs * config.trainer.minibatches > 1, config.max_staleness > 0
    if algorithm.llds is not None and not reuses_samples and not is_stale:
        do = "give trainer.minibatches or algorithm.epochs too: in the first step on a batch, no likelihood has changed"
        raise InvalidInput("algorithm.llds", got=algorithm.llds.coefficient, do=do)
    if not algorithm.loss.uses_ratio:
        # A correction is the weight pi_old / mu (mu: the policy that sampled the tokens), which is fixed during the
        # update. The weight corrects for stale samples. It does not correct for the difference between the current
        # policy and pi_old, which grows with each optimizer step on the same samples.
        do = "name a loss with a ratio (clip, importance_sampling): A log pi is right for one pass over fresh samples"
        if reuses_samples:
            got = (
                f"{algorithm.loss.name} with several optimizer steps per batch (trainer.minibatches, algorithm.epochs)"
            )
            raise InvalidInput(f"algorithm {algorithm.name}", got=got, do=do)
        if is_stale and algorithm.correction is None:
            got = f"{algorithm.loss.name} with stale samples"
            raise InvalidInput(f"algorithm {algorithm.name}", got=got, do=f"set correction, or {do}")


def check_reward_weights(config: TrainConfig, taskset: TaskSet) -> None:
    """Raise InvalidInput if a weight, a schedule or the monitor names a reward that the run does not have."""
    known = (*taskset.rewards, *config.extra_rewards)
    true_reward = [config.monitor.true_reward] if config.monitor.true_reward else []
    settings: dict[str, Iterable[str]] = {
        "reward_weights": config.reward_weights,
        "reward_schedules": config.reward_schedules,
        "monitor.true_reward": true_reward,
    }
    for setting, name in ((setting, name) for setting, names in settings.items() for name in names):
        if taskset.rewards and name not in known:
            do = f"{suggest(name, known)} there are: {', '.join(known)}".strip()
            raise InvalidInput(setting, got=repr(name), do=do)


def check_examples(config: TrainConfig, taskset: TaskSet) -> None:
    """Raise InvalidInput if the run wants examples and has none, or cannot learn from them."""
    if not config.example_coef:
        return
    if config.algorithm.distillation is not None:
        do = f"leave it out: {config.algorithm.name} learns from a teacher"
    elif taskset.solutions is None or taskset.agent is not None or config.agent:
        do = "leave it out: the task set has no solutions that a script could play (docs/environments.md)"
    elif not isinstance(build_context_policy(config.context_policy), Append):
        do = f"leave it out: a solution is whole, and context_policy {config.context_policy.name} shortens histories"
    else:
        task = next((task for task in taskset.tasks("train") if task.env not in taskset.unsolved), None)
        with isolate(lambda reason: InvalidInput(f"solutions of {taskset.name}", got=reason, do="repair them")):
            if task is not None and taskset.solutions(task).gold:
                return
        do = f"leave it out: task {task.id if task else 'list'} has no right solution"
    raise InvalidInput("example_coef", got=config.example_coef, do=do)


def validation_splits(config: TrainConfig, taskset: TaskSet) -> list[str]:
    """Return the validation split as a list; [] if the run has no validation."""
    if config.evaluate_every == 0:
        if config.stop_after:
            do = "give evaluate_every too: without validations it has no effect"
            raise InvalidInput("stop_after", got=config.stop_after, do=do)
        return []
    if taskset.validation is None:
        do = "leave it out, or give tasks with split 'validation': this task set has none"
        raise InvalidInput("evaluate_every", got=config.evaluate_every, do=do)
    return [taskset.validation]


def check_taskset(policy: Policy | None, taskset: TaskSet, splits: Sequence[str]) -> None:
    """Raise InvalidInput if a split does not exist, has no tasks, or has a prompt that ``policy`` cannot read."""
    for split in splits:
        tasks = taskset.tasks(split)
        if not tasks:
            raise InvalidInput(f"tasks of {taskset.name}", got=f"none in the split {split!r}", do="give some")
        if policy is None:  # only models behind an API act, whose tokens are not known
            continue
        if not policy.reads_images:
            _refuse_images(tasks)
        by_env: dict[str, dict[str, Task]] = {}
        for task in tasks:  # a task can occur several times in a mixture
            by_env.setdefault(task.env, {})[task.id] = task
        for own in by_env.values():
            _check_prompts(policy, taskset.env_for_split(split), list(own.values()))


def _refuse_images(tasks: Sequence[Task]) -> None:
    for task in tasks:
        if image := next((image for message in task.messages for image in message.images), None):
            do = "name a model with vision, and leave engine.backend at embedded (--model, --engine.backend)"
            raise InvalidInput(f"task {task.id}", got=f"{image}, and a model or an engine that reads no images", do=do)


def _check_prompts(policy: Policy, env: Env, tasks: Sequence[Task]) -> None:
    from agent_r1.renderers.formats.detect import require_tools

    for task in sorted(tasks, key=_estimated_length)[-CHECKED_PROMPTS:]:
        characters = sum(len(message.text) for message in task.messages)
        if characters > policy.context_length * MAX_CHARACTERS_PER_TOKEN:  # tokenizing the prompt could take minutes
            got = f"a prompt of {characters} characters, but the context has {policy.context_length} tokens"
            raise InvalidInput(f"task {task.id}", got=got, do="shorten it")
        messages = asyncio.run(_opening_messages(env, task))
        if (own := env_of(env, task)) is not env and own.tools:
            try:  # the tools of other environments are checked when the model is loaded
                require_tools(policy.renderer, own.tools)
            except UnsupportedChat as error:
                raise InvalidInput("chat template", got=f"the tools of task {task.id}", do=str(error)) from error
        tokens = len(policy.renderer.render(messages, own.tools).token_ids)
        if tokens >= policy.context_length:
            raise InvalidInput(
                f"task {task.id}",
                got=f"a prompt of {tokens} tokens, but the context has {policy.context_length}",
                do="shorten it, raise --context, or name a model with a longer context",
            )


def _estimated_length(task: Task) -> float:
    pixels = sum(image.width * image.height for message in task.messages for image in message.images)
    return sum(len(message.text) for message in task.messages) + pixels / PIXELS_PER_CHARACTER


async def _opening_messages(env: Env, task: Task) -> tuple[Message, ...]:
    def invalid(reason: str) -> InvalidInput:
        do = f"fix the environment, or the task: it is opened once before a run begins (in {OPEN_SECONDS:g} s)"
        return InvalidInput(f"task {task.id}", got=reason, do=do)

    with isolate(invalid):
        async with asyncio.timeout(OPEN_SECONDS):
            episode = await env.open(task, RolloutContext(AttemptId("check", task.id, 0, 0), 0))
            await episode.close()
            return episode.start


FINGERPRINT, TASKS = "fingerprint", "tasks"
"""Events with a hash of a run's data, such as ``data questions.json sha256 9f86..``, or of its ``TASKS``."""


def data_hashes(config: TasksetConfig, taskset: TaskSet) -> Mapping[str, str]:
    """Return the sha256 hashes of a run's data by name: "tasks", and "data" and "corpus" if they exist."""
    return _hashes(fingerprint_data(config, taskset))


def fingerprint_data(config: TasksetConfig, taskset: TaskSet) -> tuple[LogEvent, ...]:
    """Return the sha256 hashes of the tasks, and of local files or folders ``config.data`` and ``config.corpus``."""
    lines = []
    for name, place in (("data", config.data), ("corpus", config.corpus), *taskset.part_data.items()):
        if place is not None and (path := Path(place)).exists():
            lines.append(f"{name} {path} sha256 {_hash_path(path)}")
    splits = dict.fromkeys(["train", taskset.validation or "train"])
    lines.append(f"{TASKS} sha256 {hash_tasks(task for split in splits for task in taskset.tasks(split))}")
    return tuple(LogEvent(FINGERPRINT, line) for line in lines)


def check_data_unchanged(run: Path, config: TrainConfig, events: Iterable[LogEvent]) -> None:
    """Raise InvalidInput if the data of a resumed run have changed since the run began.

    If ``config`` has a new path, the hashes of the old and the new contents must be known and equal. A new path of a
    TOML file is never accepted, because the files listed in the TOML file have no hashes.
    """
    with closing(RunReader(run)) as reader:
        recorded, own = _hashes(event for event in reader.events() if event.kind == FINGERPRINT), reader.config()
    current = _hashes(events)
    for name, found in current.items():
        expected = recorded.get(name, found)
        if expected != found:
            got = f"others than the run's: sha256 {found[:12]}.., not {expected[:12]}.."
            raise InvalidInput(name, got=got, do="put back what the run began with, or start a new run")
    for name, value in config.model_dump(mode="json", include={"data", "corpus"}).items():
        is_list = str(value).endswith(".toml")  # the TOML file names further files, which have no fingerprint
        if value != own[name] and (is_list or not (name in current and name in recorded)):
            do = f"leave it out: {run} continues with {own[name] or 'none'}, to which it cannot be compared"
            raise InvalidInput(name, got=value, do=do)


def _hashes(events: Iterable[LogEvent]) -> dict[str, str]:
    return {event.detail.split()[0]: event.detail.split()[-1] for event in events}


def _hash_path(path: Path) -> str:
    if path.is_file():
        return hash_file(path)
    files = sorted(one for one in path.rglob("*") if one.is_file() and not one.name.startswith("."))
    lines = [f"{one.relative_to(path).as_posix()} {hash_file(one)}\n" for one in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
