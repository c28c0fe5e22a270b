"""The door in Python: ``agent_r1.train(env, tasks, model=...)``."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from rich.console import Console

from agent_r1.config import Layer
from agent_r1.core.environment import Env
from agent_r1.core.errors import InvalidInput
from agent_r1.core.task import Task
from agent_r1.rewards.scoring import RewardFunction
from agent_r1.tasksets.tinywiki.model import TINY_BASE
from agent_r1.training import run
from agent_r1.training.config import TrainConfig, resolve_config
from agent_r1.training.progress import Progress, make_progress
from agent_r1.training.resume import resolve_resume_config
from agent_r1.training.tables import TrainReport
from agent_r1.training.user_task import make_taskset


def train(
    env: Env,
    tasks: Sequence[Task],
    *,
    model: str | None = None,
    algorithm: str | None = None,
    rewards: Sequence[RewardFunction] = (),
    progress: Progress | None = None,
    resume: bool = False,
    **settings: Any,
) -> TrainReport:
    """Train an agent in ``env`` on ``tasks``; this is ``agent_r1.train``.

    ``model`` is tiny-base and ``algorithm`` grpo where they are not named. ``rewards`` are for an environment that
    brings none, as a ToolEnv may. ``resume`` goes on with the run that ``run`` names, by the settings it has; the few
    that may change are :data:`agent_r1.training.resume.CHANGEABLE`.

    ``settings`` are those of :class:`~agent_r1.training.config.TrainConfig`, tables as mappings:
    ``steps=20, trainer={"learning_rate": 1e-5}``. Progress goes to stderr where nothing else is given.
    Raises InvalidInput where something cannot be used, or an event loop runs in this thread, as in a notebook:
    ``await asyncio.to_thread(agent_r1.train, ..)`` trains there.
    """
    refuse_loop()
    taskset = make_taskset(env, tasks, "custom", model or TINY_BASE, rewards)
    named = {key: value for key, value in (("model", model), ("algorithm", algorithm)) if value is not None}
    layers = [Layer("agent_r1.train", {**named, **settings})]
    shown = progress or make_progress(Console(stderr=True))
    if resume:
        return run.resume(resolve_resume_config(layers), taskset, shown)
    return run.train(resolve_config(TrainConfig, layers, taskset), taskset, shown)


def refuse_loop() -> None:
    """Raise InvalidInput in a thread whose event loop is running: it would stand still until the run has ended."""
    with suppress(RuntimeError):
        asyncio.get_running_loop()
        do = "call it in another thread: await asyncio.to_thread(agent_r1.train, ..)"
        raise InvalidInput("agent_r1.train", got="a thread whose event loop is running", do=do)
