"""The loop of training: groups in, weights out, and what is written down of each step."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.core.events import PendingDropped, PolicyPublished, StepMetrics, StepTimings
from agent_r1.core.taskset import TaskSet
from agent_r1.core.threads import run_in_thread
from agent_r1.core.trajectory import Group
from agent_r1.inference.torch_engine import TorchEngine
from agent_r1.rollout.agent_loop import Agent
from agent_r1.rollout.collector import Collector
from agent_r1.rollout.staleness import StalenessController
from agent_r1.store.writer import RunWriter
from agent_r1.trainer.learner import Learner, Update
from agent_r1.training.build import Policy, orders
from agent_r1.training.checkpoint.files import TrainProgress
from agent_r1.training.checkpoint.manager import CheckpointManager
from agent_r1.training.checkpoint.restore import ResumeState, published
from agent_r1.training.config import TrainConfig
from agent_r1.training.eval_metrics import score_trajectory
from agent_r1.training.evaluate import measures_of
from agent_r1.training.monitor.health_monitor import HealthMonitor
from agent_r1.training.report import Progress, StepReport
from agent_r1.training.rollout_metrics import compute_rollout_metrics
from agent_r1.training.shutdown import GracefulShutdown, ShutdownRequested


@dataclass(frozen=True, slots=True)
class Parts:
    """What a run is made of."""

    config: TrainConfig
    taskset: TaskSet
    policy: Policy
    row: Algorithm
    learner: Learner
    engine: TorchEngine
    agent: Agent
    collector: Collector
    ledger: RunWriter
    folder: Path
    start: ResumeState
    progress: Progress


async def loop(parts: Parts, halt: GracefulShutdown) -> None:
    """Groups in, weights out. Raises ShutdownRequested, with the last step saved, where the run was asked to stop.

    Consumes groups in order. Waits for: a step's groups, then the update in its thread. Unblocks: the
    collector, whose next groups may start once the engine has the new weights.
    """
    config, learner = parts.config, parts.learner
    staleness = _clock(parts)
    keeper = _keeper(parts)
    doctor = HealthMonitor(config, learner, parts.ledger, parts.folder)
    doctor.restore(parts.start.doctor)
    position = parts.start.position
    wanted = orders(parts.taskset.tasks("train"), config, position.groups)
    await parts.ledger.record(*parts.start.events)
    await parts.engine.update_weights(learner.publish())
    async with aclosing(parts.collector.collect(wanted, staleness.acquire)) as groups, _settling(keeper):
        watch = Stopwatch()
        for _ in range(position.step, config.steps):
            with halt.section():
                batch = await _gather(groups, staleness, learner, doctor)
            watch.lap("rollout_seconds")
            before = learner.publish().version.number
            update = await run_in_thread(learner.update, batch)
            watch.lap("update_seconds")
            served = await parts.engine.update_weights(learner.publish())
            watch.lap("load_seconds")
            findings = doctor.examine(update, served)
            watch.lap("doctor_seconds")
            position = TrainProgress(update.step, position.groups + len(batch))
            kept = await keeper.after(position, doctor.state())
            watch.lap("keep_seconds")
            made = [published(learner.publish().version)] if update.version > before else []
            await _tell(parts, batch, update, made, kept, watch.take())
            await doctor.tell(findings)
            keeper.save()
            await staleness.on_step_end(update.version)
    if late := await keeper.validate_last():
        await parts.ledger.record(StepMetrics(config.steps, late))
    await parts.ledger.record(PendingDropped(config.steps, "the run had taken its last step"))
    await keeper.choose()
    await parts.engine.update_weights(learner.publish())


def _clock(parts: Parts) -> StalenessController:
    config, position = parts.config, parts.start.position
    return StalenessController(
        config.steps - position.step,
        config.groups_per_step,
        max_staleness=config.max_staleness,
        refill=parts.row.refill,
        taken=position.groups,
        version=parts.learner.publish().version.number,
    )


def _keeper(parts: Parts) -> CheckpointManager:
    acting = (parts.policy, parts.taskset, parts.learner, parts.agent)
    return CheckpointManager(*acting, parts.config, parts.folder, parts.start, parts.ledger)


@asynccontextmanager
async def _settling(keeper: CheckpointManager) -> AsyncIterator[None]:
    """Asked to stop, a run saves itself. After a failure nothing goes on saving while the ledger is closed; an
    interrupt does not wait for that."""
    try:
        yield
    except ShutdownRequested:
        await keeper.stop()
        raise
    except Exception:
        await keeper.settle()
        raise


async def _gather(groups: AsyncIterator[Group], staleness: StalenessController, learner: Learner, doctor: HealthMonitor) -> list[Group]:
    """The groups of one step, also those that teach nothing: the learner says what becomes of each."""
    batch: list[Group] = []
    while len(batch) < staleness.groups_wanted:
        batch.append(await anext(groups))
        doctor.receive(batch[-1])
        if not learner.teaches(batch[-1]):
            await staleness.request_refill()
    return batch


async def _tell(
    parts: Parts,
    batch: Sequence[Group],
    update: Update,
    made: Sequence[PolicyPublished],
    kept: dict[str, float],
    seconds: dict[str, float],
) -> None:
    """Write the step down, all of it or nothing, and show it."""
    lived = [trajectory for group in batch for trajectory in group.trajectories]
    answers = [score_trajectory(trajectory) for trajectory in lived]
    em = statistics.fmean([answer.em for answer in answers if answer.failure is None] or [math.nan])
    tokens = sum(len(turn.action_ids) for trajectory in lived for turn in trajectory.turns)
    speed = tokens / max(seconds["rollout_seconds"] + seconds["update_seconds"], 1e-9)
    came = {"groups": float(len(batch)), "refilled_groups": float(len(batch) - parts.config.groups_per_step)}
    own = measures_of(parts.taskset, lived)
    measured = StepMetrics(
        update.step,
        {**update.metrics, **kept, **came, **compute_rollout_metrics(batch), "em": em, "tokens": float(tokens), **own},
    )
    spent = StepTimings(update.step, {**seconds, "tokens_per_second": speed})
    await parts.ledger.record(*update.fates, *made, measured, spent)
    exact = all(answer.exact for answer in answers)
    parts.progress.stepped(StepReport(update.step, update.metrics["reward"], em if exact else None, speed))


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
