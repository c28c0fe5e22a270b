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

import torch

from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.config import Layer
from agent_r1.core.errors import Interrupted, InvalidInput
from agent_r1.core.events import LogEvent
from agent_r1.core.taskset import TaskSet
from agent_r1.inference.torch_engine import TorchEngine
from agent_r1.rollout.agent_loop import AgentLoop
from agent_r1.rollout.collector import Collector
from agent_r1.store.folder import create_run, default_run_name, reopen_run, require_new_run, run_folder
from agent_r1.store.writer import RunWriteError, RunWriter
from agent_r1.trainer.single_process import SingleProcessTrainer
from agent_r1.trainer.updater import PolicyUpdater
from agent_r1.training.build import (
    Policy,
    check_reuse,
    check_taskset,
    check_view,
    limits_of,
    open_policy,
    open_teacher,
    with_columns,
)
from agent_r1.training.checkpoint.files import CORRUPT
from agent_r1.training.checkpoint.restore import ResumeState, initial_state, restore_run
from agent_r1.training.config import TrainConfig
from agent_r1.training.data_fingerprint import check_data_unchanged, fingerprint_data
from agent_r1.training.evaluate import BASE, Method, greedy_agent, list_methods, measure_pass_at_k, make_table
from agent_r1.training.loop import Parts, loop
from agent_r1.training.memory_estimate import available_memory, check_memory
from agent_r1.training.progress import Progress
from agent_r1.training.resume import resolve_resume_config
from agent_r1.training.shutdown import GracefulShutdown, ShutdownRequested, handle_signals
from agent_r1.training.tables import PassAtK, TrainReport

log = logging.getLogger(__name__)

PASS_QUESTIONS = 50
"""At most so many questions per split for the base model's pass@k."""


@dataclass(frozen=True, slots=True)
class Ready:
    """What was checked and built before anything of a run is written."""

    policy: Policy
    row: Algorithm
    updater: PolicyUpdater
    engine: TorchEngine


def train(config: TrainConfig, taskset: TaskSet, progress: Progress) -> TrainReport:
    """Train, then compare. Raises InvalidInput, with nothing written, where the input cannot be used, and RunStopped
    where the run could only go wrong.

    Asked to stop by SIGINT or SIGTERM it saves its last step and raises Interrupted, a KeyboardInterrupt.
    """
    taskset = with_columns(taskset, config.splits)
    folder = run_folder(config.run or default_run_name(config.taskset, config.algorithm.name, datetime.now()))
    require_new_run(folder)
    ready, inputs = _ready(config, taskset), fingerprint_data(config, taskset)
    ledger = create_run(folder, config.model_dump(mode="json"))
    try:
        start = initial_state(ready.updater)
        start = replace(start, events=(*start.events, *inputs))
        return _carry_out(config, taskset, ready, start, ledger, folder, progress)
    finally:
        ledger.close()


def resume(config: TrainConfig, taskset: TaskSet, progress: Progress) -> TrainReport:
    """Go on with the run that ``config.run`` names, in a new segment, then compare.

    ``config`` is what :func:`agent_r1.training.resume.resumed` gives. Raises InvalidInput, with nothing written, where
    the world, the model, a file of tasks or a checkpoint is not the run's, or another process is writing it.
    """
    if taskset.name != config.taskset:
        do = f"resume with the task set of the run, {config.taskset!r}"
        raise InvalidInput("taskset", got=repr(taskset.name), do=do)
    taskset = with_columns(taskset, config.splits)
    folder = run_folder(config.run)
    ledger = reopen_run(folder)  # locked before anything large is loaded
    try:
        inputs = fingerprint_data(config, taskset)
        check_data_unchanged(folder, config, inputs)
        ready = _ready(config, taskset)
        resolve_resume_config([Layer("what was read before the run was locked", config.model_dump(mode="json"))])
        start = restore_run(folder, ready.policy, ready.updater)
        start = replace(start, events=(*start.events, *inputs))
        ledger.open_segment(start.progress.step, config.model_dump(mode="json"))
        return _carry_out(config, taskset, ready, start, ledger, folder, progress)
    finally:
        ledger.close()


def _ready(config: TrainConfig, taskset: TaskSet) -> Ready:
    """Everything that can be refused."""
    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    row = config.algorithm
    if "group" in row.needs and config.group_size < 2:
        raise InvalidInput("group_size", got=config.group_size, do=f"give at least 2: {row.name} compares attempts")
    check_reuse(config, row)
    check_view(config, row)
    policy = open_policy(config, taskset)
    check_taskset(policy, taskset, ["train", *taskset.evaluation, *_validation(config, taskset)])
    check_memory(policy.model, row, policy.context, available_memory(policy.model.device))
    trainer = SingleProcessTrainer(
        policy.model,
        row,
        config.trainer,
        temperature=config.temperature,
        teacher=open_teacher(config, row, policy),
    )
    updater = PolicyUpdater(trainer, row, config.trainer, reward_weights=config.reward_weights, seed=config.seed)
    return Ready(policy, row, updater, TorchEngine(copy.deepcopy(policy.model), policy.context))


def _carry_out(
    config: TrainConfig, taskset: TaskSet, ready: Ready, start: ResumeState, ledger: RunWriter, folder: Path, progress: Progress
) -> TrainReport:
    policy, row, updater, engine = ready.policy, ready.row, ready.updater, ready.engine
    progress.print_line(f"run: {folder}")
    if taskset.sandbox is not None:
        start = replace(start, events=(*start.events, LogEvent("sandbox", taskset.sandbox)))
    agent = policy.agent(engine, config, config.temperature)
    collector = Collector(
        AgentLoop(agent, taskset.env),
        taskset.scorers,
        ledger,
        ledger.run,
        limits_of(config),
        seed=config.seed,
        greedy=AgentLoop(greedy_agent(agent), taskset.env) if "greedy" in row.needs else None,
    )
    parts = Parts(config, taskset, policy, row, updater, engine, agent, collector, ledger, folder, start, progress)
    for event in start.events:
        if isinstance(event, LogEvent):
            told = log.warning if event.kind == CORRUPT else progress.print_line
            told(f"{event.kind}: {event.detail}")
    try:
        return asyncio.run(_run(parts))
    finally:
        progress.finish()


def _validation(config: TrainConfig, taskset: TaskSet) -> list[str]:
    """The split to validate on, where that is asked for."""
    if config.evaluate_every == 0:
        return []
    if taskset.validation is None:
        do = "leave it out: this task has no validation split"
        raise InvalidInput("evaluate_every", got=config.evaluate_every, do=do)
    return [taskset.validation]


async def _run(parts: Parts) -> TrainReport:
    """Train, save, compare; the run's last event says how it ended."""
    with handle_signals(parts.progress) as halt:
        try:
            return await _train_and_compare(parts, halt)
        except ShutdownRequested:
            assert halt.signal is not None
            said = signal.Signals(halt.signal).name
            await parts.ledger.record(LogEvent("stopped", said))
            raise Interrupted(halt.signal, f"stopped by {said}{_caveat(parts)}", parts.folder) from None
        except BaseException as error:
            with suppress(RunWriteError):  # it may be what failed
                await parts.ledger.record(LogEvent("stopped", f"{type(error).__name__}: {error}"))
            raise
        finally:
            await parts.engine.close()


async def _train_and_compare(parts: Parts, halt: GracefulShutdown) -> TrainReport:
    began = time.perf_counter()
    parts.progress.start(parts.config.steps, parts.start.progress.step)
    await loop(parts, halt)
    parts.progress.finish()
    seconds = time.perf_counter() - began
    with halt.interruptible():
        report = await _compare(parts, seconds)
    await parts.ledger.record(LogEvent("completed", f"{parts.config.steps} steps in {seconds:.1f} s"))
    return report


def _caveat(parts: Parts) -> str:
    return "" if parts.config.checkpoint_every > 0 else " with checkpoint_every 0, so that it will begin anew"


async def _compare(parts: Parts, seconds: float) -> TrainReport:
    """The table of methods, and the base model's pass@k. The base model is loaded anew."""
    config, taskset = parts.config, parts.taskset
    base_engine = TorchEngine(open_policy(config, taskset).model, parts.policy.context)
    base = parts.policy.agent(base_engine, config, 1.0)
    try:
        methods = list_methods(taskset, base, parts.agent)
        table = await make_table(methods, taskset, config.evaluate_n, limits_of(config), parts.progress)
        passed = await _pass_at_k(parts, Method(BASE, base, taskset.env))
    finally:
        await base_engine.close()
    return TrainReport(parts.folder, config.steps, seconds, table, passed, parts.start.progress.step)


async def _pass_at_k(parts: Parts, method: Method) -> PassAtK | None:
    config, k = parts.config, parts.config.pass_k
    if k == 0:
        return None
    size = config.pass_attempts or k
    return await measure_pass_at_k(method, parts.taskset, PASS_QUESTIONS, k, size, limits_of(config), parts.progress)
