"""Supervised fine-tuning: a run that imitates transcripts. It is saved, resumed and verified as any other run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

from agent_r1.config import Layer, resolve
from agent_r1.core.environment import RolloutContext
from agent_r1.core.errors import InvalidInput
from agent_r1.core.messages import Message
from agent_r1.core.task import Task
from agent_r1.core.taskset import TaskSet
from agent_r1.core.trajectory import AttemptId, Status, Trajectory
from agent_r1.rollout.scripted import ScriptedAgent
from agent_r1.store.folder import default_run_name
from agent_r1.store.reader import AttemptFilter, RunReader, read_tools
from agent_r1.tasksets import TRANSCRIPTS
from agent_r1.tasksets.transcripts import (
    TRAIN,
    VALIDATION,
    Transcript,
    Transcripts,
    parse_tool,
    transcripts_of,
)
from agent_r1.training.check import play_solutions
from agent_r1.training.config import TrainConfig
from agent_r1.training.policy import Policy

EPOCHS, BATCH = 3.0, 16
"""The defaults: passes over the transcripts, and transcripts per optimizer step."""

PAGE = 2000


OF_ATTEMPTS = frozenset(
    (
        *("algorithm", "teacher", "group_size", "temperature", "sampling", "example_coef", "max_staleness"),
        *("reward_weights", "extra_rewards", "reward_schedules", "shuffle_rewards", "agent", "splits"),
        *("pass_k", "pass_attempts", "context_policy", "gateway", "environment"),
    )
)
"""The settings that only a run with attempts has. A configuration file for such a run fits transcripts, too."""


def sft_layers(layers: Sequence[Layer], taskset: TaskSet, epochs: float) -> list[Layer]:
    """Return the settings of a run that imitates the transcripts of ``taskset``. ``layers`` are what the user gave.

    The settings in OF_ATTEMPTS are ignored in files, and refused in the first layer.
    """
    for key, value in layers[0].values.items():
        if key.partition(".")[0] in OF_ATTEMPTS:
            raise InvalidInput(key, got=value, do="leave it out: a run on transcripts makes no attempts")
    layers = [replace(one, values=without(one.values, OF_ATTEMPTS)) for one in layers]
    given = resolve(TrainConfig, layers, build=False)
    run = given.run or default_run_name("sft", Path(given.model).name or "run", datetime.now())
    own = {"run": run, "taskset": TRANSCRIPTS}
    number = len(taskset.tasks(TRAIN))
    batch = given.groups_per_step if "groups_per_step" in given.model_fields_set else min(BATCH, number)
    per_epoch = -(-number // batch)
    steps = max(1, round(epochs * number / batch))
    defaults: dict[str, Any] = {"groups_per_step": batch, "steps": steps}
    if taskset.validation is not None:
        defaults["evaluate_every"] = min(per_epoch, steps)
    return [Layer("sft", own), *layers, Layer("defaults of sft", defaults)]


def without(values: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return the settings in a layer without those that begin with one of ``names``."""
    return {key: value for key, value in values.items() if key.partition(".")[0] not in names}


def check_transcripts(policy: Policy, config: TrainConfig, env: Transcripts) -> None:
    """Raise InvalidInput if the chat template would write a transcript otherwise, or if one is too long."""
    if not config.algorithm.sft_coef or config.group_size != 1:
        got = f"{config.algorithm.name} with group_size {config.group_size}"
        raise InvalidInput("algorithm", got=got, do="leave both out: agent-r1 sft imitates transcripts one by one")
    faults = asyncio.run(_find_faults(policy, env))
    if faults:
        (name, reason), others = faults[0], f" (and {len(faults) - 1} more with a fault)" * (len(faults) > 1)
        do = "repair or remove it: the model would learn something else than the transcript says"
        raise InvalidInput(f"{name}{others}", got=reason, do=do)


async def _find_faults(policy: Policy, env: Transcripts) -> list[tuple[str, str]]:
    found = []
    agent = ScriptedAgent(env, lambda attempt: env.responder(attempt.task), policy.renderer)
    for name, transcript in env.by_task.items():
        context = RolloutContext(AttemptId("check", name, 0, 0), 0)
        (trajectory,) = await agent.run(Task(name, transcript.opening), context)
        if fault := find_fault(policy, trajectory, [answer for answer, _ in transcript.turns]):
            found.append((name, fault))
    return found


def find_fault(policy: Policy, trajectory: Trajectory, answers: Sequence[Message] = ()) -> str | None:
    """Return why a model cannot learn what a script wrote; None if it can.

    ``answers`` are the messages that the script gave; () if they are not known.
    """
    if trajectory.status is not Status.COMPLETED:
        return trajectory.reason or str(trajectory.status)
    longest = max(len(trajectory.prompt_ids(turn)) + len(turn.action_ids) for turn in trajectory.turns)
    if longest > policy.context_length:
        return f"{longest} tokens, but the context has {policy.context_length} (--context)"
    for number, turn in enumerate(trajectory.turns):
        # a policy stops at the first end token
        is_cut = not set(turn.action_ids[:-1]).isdisjoint(policy.renderer.stop_token_ids)
        if is_cut or (answers and not policy.renderer.reads_back(turn.action.message, answers[number])):
            return f"answer {number}, which the chat template writes as {turn.action.text[:200]!r}"
    return None


def attempts_of_run(run: Path, min_reward: float) -> list[Transcript]:
    """Return the different attempts of a run whose return is at least ``min_reward``.

    Attempts that were cut off, or that have a call that cannot be read, are left out.
    """
    found: dict[str, Transcript] = {}
    with closing(RunReader(run)) as reader:
        tools = [parse_tool(tool) for tool in read_tools(reader)]
        for offset in count(0, PAGE):
            page = reader.list_attempts(AttemptFilter(min_reward=min_reward), limit=PAGE, offset=offset)
            for summary in page:
                trajectory = reader.trajectory(summary.attempt)
                if trajectory is None or trajectory.truncated:
                    continue
                if any(call.error for turn in trajectory.turns for call in turn.action.message.calls):
                    continue
                for transcript in transcripts_of(reader.with_images(trajectory), tools):
                    found.setdefault(json.dumps(transcript.to_openai(), sort_keys=True), transcript)
            if len(page) < PAGE:
                break
    if not found:
        do = "lower --min_reward, or name another run"
        raise InvalidInput("--from", got=f"{run}, without an attempt whose reward is {min_reward:g} or more", do=do)
    return list(found.values())


def solutions_of(taskset: TaskSet, number: int) -> list[Transcript]:
    """Return the solutions of the first ``number`` training tasks, and of a tenth as many validation tasks.

    They are played in the environment of the task set, so that the tools answer as they answer the policy.
    """
    if taskset.solutions is None:
        do = "give a task set that has some: see docs/environments.md"
        raise InvalidInput("--from_solutions", got=f"{taskset.name}, which has no solutions", do=do)
    wanted = {TRAIN: number} | ({} if taskset.validation is None else {taskset.validation: max(1, number // 10)})
    found: list[Transcript] = []
    for split, most in wanted.items():
        env = taskset.env_for_split(split)
        tasks = [task for task in taskset.tasks(split) if task.env not in taskset.unsolved][:most]
        trajectories = asyncio.run(play_solutions(taskset, split, tasks))
        for trajectory in trajectories:
            found += transcripts_of(trajectory, env.tools, TRAIN if split == TRAIN else VALIDATION)
    return found
