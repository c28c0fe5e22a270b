"""A run: begun or resumed, carried out, and compared in the end."""

from __future__ import annotations

import asyncio
import copy
import logging
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.registry import build_row, terms
from agent_r1.config import Layer
from agent_r1.core.errors import Interrupted, InvalidInput
from agent_r1.core.events import LogEvent
from agent_r1.core.taskset import TaskSet
from agent_r1.inference.torch_engine import TorchEngine
from agent_r1.rollout.collector import Collector
from agent_r1.store.folder import create_run, default_run_name, refuse_existing, reopen_run, run_folder
from agent_r1.store.ledger import Ledger, LedgerError
from agent_r1.trainer.learner import Learner
from agent_r1.training.build import (
    Policy,
    check_reuse,
    check_view,
    check_world,
    limits_of,
    open_policy,
    open_teacher,
    with_columns,
)
from agent_r1.training.checkpoint.files import DAMAGED
from agent_r1.training.checkpoint.restore import Start, beginning, restore
from agent_r1.training.config import TrainConfig
from agent_r1.training.data_fingerprint import check_inputs, events_of
from agent_r1.training.evaluate import BASE, Method, greedy, methods_of, pass_at, table_of
from agent_r1.training.loop import Parts, loop
from agent_r1.training.memory_estimate import check_memory, room_of
from agent_r1.training.report import PassAtK, Progress, TrainReport
from agent_r1.training.resume import resumed
from agent_r1.training.shutdown import Halt, Halting, heeding

log = logging.getLogger(__name__)

PASS_QUESTIONS = 50
"""At most so many questions per split for the base model's pass@k."""


@dataclass(frozen=True, slots=True)
class Ready:
    """What was checked and built before anything of a run is written."""

    policy: Policy
    row: Algorithm
    learner: Learner
    engine: TorchEngine


def train(config: TrainConfig, world: TaskSet, progress: Progress) -> TrainReport:
    """Train, then compare. Raises InvalidInput, with nothing written, where the input cannot be used, and RunStopped
    where the run could only go wrong.

    Asked to stop by SIGINT or SIGTERM it saves its last step and raises Interrupted, a KeyboardInterrupt.
    """
    world = with_columns(world, config.splits)
    folder = run_folder(config.run or default_run_name(config.task, config.algorithm, datetime.now()))
    refuse_existing(folder)
    ready, inputs = _ready(config, world), events_of(config, world)
    ledger = create_run(folder, _resolved(config, ready.row))
    try:
        start = beginning(ready.learner)
        start = replace(start, events=(*start.events, *inputs))
        return _carry_out(config, world, ready, start, ledger, folder, progress)
    finally:
        ledger.close()


def resume(config: TrainConfig, world: TaskSet, progress: Progress) -> TrainReport:
    """Go on with the run that ``config.run`` names, in a new lineage, then compare.

    ``config`` is what :func:`agent_r1.training.resume.resumed` gives. Raises InvalidInput, with nothing written, where
    the world, the model, a file of tasks or a checkpoint is not the run's, or another process is writing it.
    """
    if world.name != config.task:
        do = f"resume with the task that the run was started with, {config.task!r}"
        raise InvalidInput("task", got=repr(world.name), do=do)
    world = with_columns(world, config.splits)
    folder = run_folder(config.run)
    ledger = reopen_run(folder)  # locked before anything large is loaded
    try:
        inputs = events_of(config, world)
        check_inputs(folder, config, inputs)
        ready = _ready(config, world)
        resumed([Layer("what was read before the run was locked", config.model_dump(mode="json"))])
        start = restore(folder, ready.policy, ready.learner)
        start = replace(start, events=(*start.events, *inputs))
        ledger.open_lineage(start.position.step, _resolved(config, ready.row))
        return _carry_out(config, world, ready, start, ledger, folder, progress)
    finally:
        ledger.close()


def _ready(config: TrainConfig, world: TaskSet) -> Ready:
    """Everything that can be refused."""
    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    row = build_row(config.algorithm, config.row)
    if "group" in row.needs and config.group_size < 2:
        raise InvalidInput("group_size", got=config.group_size, do=f"give at least 2: {row.name} compares attempts")
    check_reuse(config, row)
    check_view(config, row)
    policy = open_policy(config, world)
    check_world(policy, world, ["train", *world.evaluation, *_validation(config, world)])
    check_memory(policy.model, row, policy.context, room_of(policy.model.device))
    learner = Learner(
        policy.model,
        row,
        config.trainer,
        temperature=config.temperature,
        reward_weights=config.reward_weights,
        seed=config.seed,
        teacher=open_teacher(config, row, policy),
    )
    return Ready(policy, row, learner, TorchEngine(copy.deepcopy(policy.model), policy.context))


def _resolved(config: TrainConfig, row: Algorithm) -> dict[str, Any]:
    """The configuration with every term of the algorithm, as it is stored with the run."""
    return config.model_copy(update={"row": dict(terms(row))}).model_dump(mode="json")


def _carry_out(
    config: TrainConfig, world: TaskSet, ready: Ready, start: Start, ledger: Ledger, folder: Path, progress: Progress
) -> TrainReport:
    policy, row, learner, engine = ready.policy, ready.row, ready.learner, ready.engine
    progress.say(f"run: {folder}")
    if world.sandbox is not None:
        start = replace(start, events=(*start.events, LogEvent("sandbox", world.sandbox)))
    agent = policy.agent(engine, config, config.temperature)
    collector = Collector(
        agent,
        world.env,
        world.scorers,
        ledger,
        ledger.run,
        limits_of(config),
        greedy(agent) if "greedy" in row.needs else None,
    )
    parts = Parts(config, world, policy, row, learner, engine, agent, collector, ledger, folder, start, progress)
    for event in start.events:
        if isinstance(event, LogEvent):
            told = log.warning if event.kind == DAMAGED else progress.say
            told(f"{event.kind}: {event.detail}")
    try:
        return asyncio.run(_run(parts))
    finally:
        progress.end()


def _validation(config: TrainConfig, world: TaskSet) -> list[str]:
    """The split to validate on, where that is asked for."""
    if config.evaluate_every == 0:
        return []
    if world.validation is None:
        do = "leave it out: this task has no validation split"
        raise InvalidInput("evaluate_every", got=config.evaluate_every, do=do)
    return [world.validation]


async def _run(parts: Parts) -> TrainReport:
    """Train, save, compare; the run's last event says how it ended."""
    with heeding(parts.progress) as halt:
        try:
            return await _train_and_compare(parts, halt)
        except Halting:
            assert halt.signal is not None
            said = signal.Signals(halt.signal).name
            await parts.ledger.record(LogEvent("stopped", said))
            raise Interrupted(halt.signal, f"stopped by {said}{_caveat(parts)}", parts.folder) from None
        except BaseException as error:
            with suppress(LedgerError):  # it may be what failed
                await parts.ledger.record(LogEvent("stopped", f"{type(error).__name__}: {error}"))
            raise
        finally:
            await parts.engine.close()


async def _train_and_compare(parts: Parts, halt: Halt) -> TrainReport:
    began = time.perf_counter()
    parts.progress.begin(parts.config.steps, parts.start.position.step)
    await loop(parts, halt)
    parts.progress.end()
    seconds = time.perf_counter() - began
    with halt.section():
        report = await _compare(parts, seconds)
    await parts.ledger.record(LogEvent("completed", f"{parts.config.steps} steps in {seconds:.1f} s"))
    return report


def _caveat(parts: Parts) -> str:
    return "" if parts.config.checkpoint_every > 0 else " with checkpoint_every 0, so that it will begin anew"


async def _compare(parts: Parts, seconds: float) -> TrainReport:
    """The table of methods, and the base model's pass@k. The base model is loaded anew."""
    config, world = parts.config, parts.world
    base_engine = TorchEngine(open_policy(config, world).model, parts.policy.context)
    base = parts.policy.agent(base_engine, config, 1.0)
    try:
        methods = methods_of(world, base, parts.agent)
        table = await table_of(methods, world, config.evaluate_n, limits_of(config), parts.progress)
        passed = await _pass_at_k(parts, Method(BASE, base, world.env))
    finally:
        await base_engine.close()
    return TrainReport(parts.folder, config.steps, seconds, table, passed, parts.start.position.step)


async def _pass_at_k(parts: Parts, method: Method) -> PassAtK | None:
    config, k = parts.config, parts.config.pass_k
    if k == 0:
        return None
    size = config.pass_attempts or k
    return await pass_at(method, parts.world, PASS_QUESTIONS, k, size, limits_of(config), parts.progress)
