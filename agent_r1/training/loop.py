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
from agent_r1.core.events import AttemptFate, PendingDropped, PolicyPublished, StepMetrics, StepTimings
from agent_r1.core.taskset import TaskSet
from agent_r1.core.threads import run_in_thread
from agent_r1.core.trajectory import Group
from agent_r1.inference.torch_engine import TorchEngine
from agent_r1.rollout.agent_loop import Agent
from agent_r1.rollout.collector import Collector
from agent_r1.rollout.staleness import StalenessController
from agent_r1.store.writer import RunWriter
from agent_r1.trainer.updater import Outcome, PolicyUpdater, SelectedGroup, Trained, UpdateReport
from agent_r1.training.build import Policy, orders
from agent_r1.training.checkpoint.files import TrainProgress
from agent_r1.training.checkpoint.manager import CheckpointManager
from agent_r1.training.checkpoint.restore import ResumeState
from agent_r1.training.config import TrainConfig
from agent_r1.training.eval_metrics import score_trajectory
from agent_r1.training.evaluate import extra_measures
from agent_r1.training.monitor.health_monitor import HealthMonitor
from agent_r1.training.progress import Progress, StepReport
from agent_r1.training.rollout_metrics import compute_rollout_metrics
from agent_r1.training.shutdown import GracefulShutdown, ShutdownRequested


@dataclass(frozen=True, slots=True)
class Parts:
    """What a run is made of."""

    config: TrainConfig
    taskset: TaskSet
    policy: Policy
    row: Algorithm
    updater: PolicyUpdater
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
    config, updater = parts.config, parts.updater
    staleness = _clock(parts)
    manager = _checkpoint_manager(parts)
    monitor = HealthMonitor(config, updater, parts.ledger, parts.folder)
    monitor.load_state(parts.start.monitor)
    progress = parts.start.progress
    wanted = orders(parts.taskset.tasks("train"), config, progress.groups)
    await parts.ledger.record(*parts.start.events)
    await parts.engine.update_weights(updater.publish())
    async with aclosing(parts.collector.collect(wanted, staleness.acquire)) as groups, _saving_on_shutdown(manager):
        watch = Stopwatch()
        for _ in range(progress.step, config.steps):
            with halt.interruptible():
                batch = await _gather(groups, staleness, updater, monitor)
            watch.lap("rollout_seconds")
            before = updater.publish().version.number
            update = await updater.update(batch)
            watch.lap("update_seconds")
            served = await parts.engine.update_weights(updater.publish())
            watch.lap("load_seconds")
            findings = monitor.on_step(update, served)
            watch.lap("monitor_seconds")
            progress = TrainProgress(update.step, progress.groups + len(batch))
            kept = await manager.on_step_end(progress, monitor.state())
            watch.lap("checkpoint_seconds")
            made = [PolicyPublished(update.version)] if update.version.number > before else []
            await _tell(parts, batch, update, made, kept, watch.take())
            await monitor.report(findings)
            manager.start_saving()
            await staleness.on_step_end(update.version.number)
    if late := await manager.validate_last_step():
        await parts.ledger.record(StepMetrics(config.steps, late))
    await parts.ledger.record(PendingDropped(config.steps, "the run had taken its last step"))
    await manager.finalize()
    await parts.engine.update_weights(await run_in_thread(updater.publish))


def _clock(parts: Parts) -> StalenessController:
    config, progress = parts.config, parts.start.progress
    return StalenessController(
        config.steps - progress.step,
        config.groups_per_step,
        max_staleness=config.max_staleness,
        refill=parts.row.max_refill_rounds,
        taken=progress.groups,
        version=parts.updater.publish().version.number,
    )


def _checkpoint_manager(parts: Parts) -> CheckpointManager:
    acting = (parts.policy, parts.taskset, parts.updater, parts.agent)
    return CheckpointManager(*acting, parts.config, parts.folder, parts.start, parts.ledger)


@asynccontextmanager
async def _saving_on_shutdown(manager: CheckpointManager) -> AsyncIterator[None]:
    """Asked to stop, a run saves itself. After a failure nothing goes on saving while the ledger is closed; an
    interrupt does not wait for that."""
    try:
        yield
    except ShutdownRequested:
        await manager.save_now()
        raise
    except Exception:
        await manager.wait()
        raise


async def _gather(
    groups: AsyncIterator[Group], staleness: StalenessController, updater: PolicyUpdater, monitor: HealthMonitor
) -> list[SelectedGroup]:
    """Return the groups of one step, those without a training signal included."""
    batch: list[SelectedGroup] = []
    while len(batch) < staleness.groups_wanted:
        selected = updater.select(await anext(groups))
        batch.append(selected)
        monitor.on_group(selected)
        if not selected.has_signal:
            await staleness.request_refill()
    return batch


async def _tell(
    parts: Parts,
    selected: Sequence[SelectedGroup],
    update: UpdateReport,
    made: Sequence[PolicyPublished],
    kept: dict[str, float],
    seconds: dict[str, float],
) -> None:
    """Write the step down, all of it or nothing, and show it."""
    batch = [one.group for one in selected]
    lived = [trajectory for group in batch for trajectory in group.trajectories]
    answers = [score_trajectory(trajectory) for trajectory in lived]
    em = statistics.fmean([answer.em for answer in answers if answer.failure is None] or [math.nan])
    tokens = sum(len(turn.action_ids) for trajectory in lived for turn in trajectory.turns)
    speed = tokens / max(seconds["rollout_seconds"] + seconds["update_seconds"], 1e-9)
    came = {"groups": float(len(batch)), "refilled_groups": float(len(batch) - parts.config.groups_per_step)}
    own = extra_measures(parts.taskset, lived)
    measured = StepMetrics(
        update.step,
        {**update.metrics, **kept, **came, **compute_rollout_metrics(batch), "em": em, "tokens": float(tokens), **own},
    )
    spent = StepTimings(update.step, {**seconds, "tokens_per_second": speed})
    await parts.ledger.record(*(fate_of(outcome, update.step) for outcome in update.outcomes), *made, measured, spent)
    exact = all(answer.exact for answer in answers)
    parts.progress.on_step(StepReport(update.step, update.metrics["reward"], em if exact else None, speed))


def fate_of(outcome: Outcome, step: int) -> AttemptFate:
    """Return the fate that the run records for the outcome of an attempt in step ``step``."""
    if isinstance(outcome, Trained):
        return AttemptFate(outcome.attempt, "trained", step, credit=outcome.advantage_sum)
    return AttemptFate(outcome.attempt, "dropped", step, outcome.reason)


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
