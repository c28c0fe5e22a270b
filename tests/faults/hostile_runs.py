"""A whole training run of a few small steps with failing parts, and its records."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from fault_case import Case, Control, Outcome, Size

from agent_r1.config import Layer, resolve
from agent_r1.core.environment import Env, Episode, RolloutContext, Transition
from agent_r1.core.errors import AgentR1Error
from agent_r1.core.events import AttemptFate
from agent_r1.core.messages import Action, Message, ToolSpec
from agent_r1.core.task import Task
from agent_r1.core.taskset import TaskSet
from agent_r1.core.trajectory import AttemptId, Trajectory
from agent_r1.store.reader import RunReader
from agent_r1.store.verification import verify
from agent_r1.tasksets import build
from agent_r1.trainer.single_process import SingleProcessTrainer
from agent_r1.training import build as services, run
from agent_r1.training.build import rollout_limits
from agent_r1.training.config import TrainConfig
from agent_r1.training.policy import Policy, load_policy
from agent_r1.training.progress import SilentProgress

SMALL: Mapping[str, Any] = {
    "steps": 3,
    "groups_per_step": 4,
    "group_size": 4,
    "evaluate_n": 1,
    "evaluate_every": 0,
    "pass_k": 0,
    "checkpoint_every": 0,
    "reward_weights.found": 1.0,
    "algorithm": "reinforce++",
}
"""Searches that find a page are rewarded, so that every step has a signal."""

CONTINUED, ENDED = "the run continued to its end", "the run ended"
"""Violations: a run that should have been stopped was not; a run that should have continued was stopped."""

RUN = "run"
"""The name of every run. Attempts of evaluations have other names and get no faults."""

Crash = Callable[[RolloutContext, str], Awaitable[Any]]
"""Called at "open", "step" and "close" of an attempt of the run; it may raise or return the result of the step."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The records of a run. ``held`` is the checksum of the trainer's weights at its end."""

    error: AgentR1Error | None
    trajectories: Mapping[AttemptId, Trajectory]
    fates: Mapping[AttemptId, AttemptFate]
    metrics: tuple[Mapping[str, float], ...]
    checksums: tuple[str, ...]
    warnings: tuple[str, ...]
    violations: tuple[str, ...]
    held: str
    seconds: float

    def violations_if(self, completed: bool) -> Iterator[str]:
        """Yield broken invariants, and a violation if the run did not end as expected."""
        yield from self.violations
        if completed and self.error is not None:
            yield f"{ENDED}: {str(self.error).splitlines()[0]}"
        if not completed and self.error is None:
            yield CONTINUED
        if self.held != self.checksums[-1] and self.error is not None:
            yield "the trainer's weights are not those of the last recorded step"

    def total(self, metric: str) -> int:
        return round(sum(step[metric] for step in self.metrics))


def small_taskset() -> TaskSet:
    """Return TinyWiki with a final table of one cell."""
    return replace(build("tinywiki", None, None, 0), baselines={}, evaluation=("style-a",), retrieval=None)


def policy_of(taskset: TaskSet) -> Policy:
    """Return tiny-base as the small runs use it."""
    return load_policy(resolve(TrainConfig, [Layer("recipe", taskset.recipe)]), taskset)


def train(taskset: TaskSet, seed: int = 0, patches: tuple[Any, ...] = (), **settings: Any) -> RunRecord:
    """Train under ``patches``, without log output, and return the records."""
    trainers: list[SingleProcessTrainer] = []

    def made(*arguments: Any, **keywords: Any) -> SingleProcessTrainer:
        trainers.append(SingleProcessTrainer(*arguments, **keywords))
        return trainers[-1]

    short_retries = patch.object(
        run, "rollout_limits", lambda config: replace(rollout_limits(config), retry_seconds=0.01)
    )
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        for one in (short_retries, patch.object(services, "SingleProcessTrainer", made), *patches):
            stack.enter_context(one)
        stack.enter_context(quiet())
        layer = Layer("faults", {**SMALL, "run": f"{folder}/{RUN}", "seed": seed, **settings})
        config = resolve(TrainConfig, [layer, Layer("recipe", taskset.recipe)])
        began, error = time.perf_counter(), None
        try:
            run.train(config, taskset, SilentProgress())
        except AgentR1Error as raised:
            error = raised
        return read(Path(folder) / RUN, error, str(trainers[0].state().scalars["policy"]), time.perf_counter() - began)


def read(folder: Path, error: AgentR1Error | None, held: str, seconds: float) -> RunRecord:
    with closing(RunReader(folder)) as reader:
        return RunRecord(
            error=error,
            trajectories={trajectory.attempt: trajectory for trajectory in reader.trajectories()},
            fates={fate.attempt: fate for fate in reader.fates()},
            metrics=tuple(step.values for step in reader.metrics()),
            checksums=tuple(version.checksum or "" for version in reader.versions()),
            warnings=tuple(event.detail for event in reader.events() if event.kind == "warning"),
            violations=tuple(verify(folder).violations),
            held=held,
            seconds=seconds,
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the warnings that the faults cause."""
    logger = logging.getLogger("agent_r1")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        logger.setLevel(before)


Once = Callable[..., Outcome]
"""One run with failing parts, by seed; keywords break something on purpose."""


def case(name: str, injected: str, holds: str, once: Once, full: int, short: int, *controls: Control) -> Case:
    """Return a case that repeats ``once`` until enough faults have happened."""
    return Case(name, injected, holds, repeated(once), full, short, controls)


def control(breaks: str, says: str, once: Once, **changes: Any) -> Control:
    """Return a control: ``once`` with something broken on purpose, and words of the violation that must follow."""
    return Control(breaks, says, lambda size: once(size.seed, **changes), 1)


def repeated(once: Once) -> Callable[[Size], Outcome]:
    """Run ``once`` with consecutive seeds until the required number of faults has happened."""

    def run_all(size: Size) -> Outcome:
        total, seed = Outcome(0, ()), size.seed
        while total.fired < size.injections:
            more = once(seed)
            total, seed = total + more, seed + 1
            if not more.fired:
                return total + Outcome(0, ("no fault happened at all",))
        return total

    return run_all


class Hostile:
    """An environment that calls ``crash`` before each operation of the real one."""

    def __init__(self, env: Env, crash: Crash) -> None:
        self._env, self._crash = env, crash
        self.tools: tuple[ToolSpec, ...] = env.tools

    async def open(self, task: Task, context: RolloutContext) -> HostileEpisode:
        await self.act(context, "open")
        return HostileEpisode(self, await self._env.open(task, context), context)

    async def act(self, context: RolloutContext, when: str) -> Any:
        return await self._crash(context, when) if context.id.run == RUN else None


class HostileEpisode:
    def __init__(self, env: Hostile, episode: Episode, context: RolloutContext) -> None:
        self._env, self._episode, self._context = env, episode, context
        self.start: tuple[Message, ...] = episode.start

    async def step(self, action: Action) -> Transition:
        given = await self._env.act(self._context, "step")
        return await self._episode.step(action) if given is None else given

    async def close(self) -> None:
        await self._env.act(self._context, "close")
        await self._episode.close()
