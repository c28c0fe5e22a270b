"""Training: the loop, and what stands around it."""

from __future__ import annotations

import asyncio
import copy
import math
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import torch

from agent_r1.core.acting import Weights
from agent_r1.core.errors import AgentR1Error, InvalidInput
from agent_r1.core.record import Happened, LeftOver, Measured, Published, Spent
from agent_r1.core.trajectory import Group
from agent_r1.core.world import World
from agent_r1.learn.choose import build_row, terms
from agent_r1.learn.learner import Learner, Update
from agent_r1.learn.row import Row
from agent_r1.rollout.agent import Agent
from agent_r1.rollout.collector import Collector
from agent_r1.rollout.torch_engine import TorchEngine
from agent_r1.store.folder import create_run, default_run_name, run_folder
from agent_r1.store.ledger import Ledger, LedgerError
from agent_r1.train.clock import Clock
from agent_r1.train.config import TrainConfig
from agent_r1.train.evaluate import BASE, Method, greedy, methods_of, pass_at, table_of
from agent_r1.train.keeper import Keeper
from agent_r1.train.prepare import Policy, check_reuse, check_world, limits_of, open_policy, open_teacher, orders
from agent_r1.train.report import PassAtK, Progress, StepReport, TrainReport
from agent_r1.train.scores import answered
from agent_r1.train.threads import in_thread

PASS_QUESTIONS = 50
"""At most so many questions per split for the base model's pass@k."""

FRUITLESS_STEPS = 3
"""After so many steps in a row in which no attempt could be scored, the run stops."""


class RunStopped(AgentR1Error):
    """A run that would go on without learning anything was stopped; says why."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a run is made of."""

    config: TrainConfig
    world: World
    policy: Policy
    row: Row
    learner: Learner
    engine: TorchEngine
    agent: Agent
    ledger: Ledger
    folder: Path
    progress: Progress


def train(config: TrainConfig, world: World, progress: Progress) -> TrainReport:
    """Train, then compare. Raises InvalidInput, with nothing written, where the input cannot be used.

    Interrupted (KeyboardInterrupt), it leaves a run that can be read.
    """
    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    row = build_row(config.algorithm, config.row)
    if "group" in row.needs and config.group_size < 2:
        raise InvalidInput("group_size", got=config.group_size, do=f"give at least 2: {row.name} compares attempts")
    check_reuse(config, row)
    policy = open_policy(config, world)
    check_world(policy, world, ["train", *world.evaluation, *_validation(config, world)])
    name = config.run or default_run_name(config.task, config.algorithm, datetime.now())
    folder = run_folder(name)
    learner = Learner(
        policy.model,
        row,
        config.learner,
        temperature=config.temperature,
        reward_weights=config.reward_weights,
        seed=config.seed,
        teacher=open_teacher(config, row, policy),
    )
    engine = TorchEngine(copy.deepcopy(policy.model), policy.context)
    agent = policy.agent(engine, config, config.temperature)
    resolved = config.model_copy(update={"row": dict(terms(row))})
    ledger = create_run(folder, resolved.model_dump(mode="json"))
    parts = Parts(config, world, policy, row, learner, engine, agent, ledger, folder, progress)
    try:
        return asyncio.run(_run(parts))
    finally:
        progress.end()
        ledger.close()


def _validation(config: TrainConfig, world: World) -> list[str]:
    """The split to validate on, where that is asked for."""
    if config.evaluate_every == 0:
        return []
    if world.validation is None:
        do = "leave it out: this task has no validation split"
        raise InvalidInput("evaluate_every", got=config.evaluate_every, do=do)
    return [world.validation]


async def _run(parts: Parts) -> TrainReport:
    """Train, save, compare; the run's last event says how it ended."""
    try:
        began = time.perf_counter()
        parts.progress.begin(parts.config.steps)
        await _loop(parts)
        parts.progress.end()
        seconds = time.perf_counter() - began
        report = await _compare(parts, seconds)
        await parts.ledger.record(Happened("completed", f"{parts.config.steps} steps in {seconds:.1f} s"))
        return report
    except BaseException as error:
        with suppress(LedgerError):  # it may be what failed
            await parts.ledger.record(Happened("stopped", f"{type(error).__name__}: {error}"))
        raise
    finally:
        await parts.engine.close()


async def _loop(parts: Parts) -> None:
    """Groups in, weights out.

    Consumes groups in order. Waits for: a step's groups, then the update in its thread. Unblocks: the
    collector, whose next groups may start once the engine has the new weights.
    """
    config, learner = parts.config, parts.learner
    row = parts.row
    clock = Clock(config.steps, config.groups_per_step, max_staleness=config.max_staleness, refill=row.refill)
    keeper = Keeper(parts.policy, parts.world, learner, parts.agent, config, parts.folder)
    wanted = orders(parts.world.tasks("train"), config)
    await parts.ledger.record(published(learner.weights(), 0))
    async with aclosing(_collector(parts).collect(wanted, clock.permit)) as groups:
        watch = Stopwatch()
        fruitless = 0
        for _ in range(config.steps):
            batch = await _gather(groups, clock, learner)
            watch.lap("rollout_seconds")
            before = learner.weights()
            update = await in_thread(learner.update, batch)
            watch.lap("update_seconds")
            await parts.engine.load(learner.weights())
            watch.lap("load_seconds")
            kept = await keeper.after(update.step)
            watch.lap("keep_seconds")
            made = [published(learner.weights(), update.step)] if update.version > before.version else []
            await _tell(parts, batch, update, made, kept, watch.take())
            keeper.save()
            fruitless = _fruitless(fruitless, update)
            await clock.advance(update.version)
    await parts.ledger.record(LeftOver(config.steps, "the run had taken its last step"))
    await keeper.choose()
    await parts.engine.load(learner.weights())


def _fruitless(before: int, update: Update) -> int:
    """How many steps in a row no attempt could be scored. Raises RunStopped where they are too many."""
    if not math.isnan(update.metrics["reward"]):
        return 0
    if before + 1 == FRUITLESS_STEPS:
        (reason, count), *_ = Counter(fate.reason for fate in update.fates).most_common(1)
        said = f"no attempt could be scored in {FRUITLESS_STEPS} steps; of the last, {count} failed: {reason}"
        raise RunStopped(said)
    return before + 1


def _collector(parts: Parts) -> Collector:
    """What lives the attempts of the run, greedy ones too where the algorithm compares with them."""
    return Collector(
        parts.agent,
        parts.world.env,
        parts.world.scorers,
        parts.ledger,
        parts.folder.name,
        limits_of(parts.config),
        greedy(parts.agent) if "greedy" in parts.row.needs else None,
    )


async def _gather(groups: AsyncIterator[Group], clock: Clock, learner: Learner) -> list[Group]:
    """The groups of one step, also those that teach nothing: the learner says what becomes of each."""
    batch: list[Group] = []
    while len(batch) < clock.wanted:
        batch.append(await anext(groups))
        if not learner.teaches(batch[-1]):
            await clock.miss()
    return batch


def published(weights: Weights, step: int) -> Published:
    """The record of weights that a step made."""
    return Published(weights.version, step, weights.digest)


async def _tell(
    parts: Parts,
    batch: Sequence[Group],
    update: Update,
    made: Sequence[Published],
    kept: dict[str, float],
    seconds: dict[str, float],
) -> None:
    """Write the step down, all of it or nothing, and show it."""
    lived = [trajectory for group in batch for trajectory in group.trajectories]
    answers = [answered(trajectory) for trajectory in lived]
    em = statistics.fmean([answer.em for answer in answers if answer.failure is None] or [math.nan])
    tokens = sum(len(turn.action_ids) for trajectory in lived for turn in trajectory.turns)
    speed = tokens / max(seconds["rollout_seconds"] + seconds["update_seconds"], 1e-9)
    came = {"groups": float(len(batch)), "refilled_groups": float(len(batch) - parts.config.groups_per_step)}
    measured = Measured(update.step, {**update.metrics, **kept, **came, "em": em, "tokens": float(tokens)})
    spent = Spent(update.step, {**seconds, "tokens_per_second": speed})
    await parts.ledger.record(*update.fates, *made, measured, spent)
    exact = all(answer.exact for answer in answers)
    parts.progress.stepped(StepReport(update.step, update.metrics["reward"], em if exact else None, speed))


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
    return TrainReport(parts.folder, config.steps, seconds, table, passed)


async def _pass_at_k(parts: Parts, method: Method) -> PassAtK | None:
    k, world = parts.config.pass_k, parts.world
    if k == 0:
        return None
    parts.progress.say(f"pass@{k} of {method.name}")
    shares = await pass_at(method, world, world.evaluation, PASS_QUESTIONS, k, limits_of(parts.config))
    return PassAtK(k, shares)


class Stopwatch:
    """Seconds by phase since the last ``take``."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._laps: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self._laps[phase] = self._laps.get(phase, 0.0) + now - self._last
        self._last = now

    def take(self) -> dict[str, float]:
        laps, self._laps = self._laps, {}
        return laps
