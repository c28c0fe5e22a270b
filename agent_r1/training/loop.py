"""The training loop: each step trains on groups, publishes the new weights, and is recorded."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path

from agent_r1.core.errors import AgentR1Error, InvalidInput
from agent_r1.core.events import (
    AttemptFate,
    Event,
    PendingDropped,
    PolicyPublished,
    Recorder,
    StepMetrics,
    StepTimings,
    TokensRecorded,
)
from agent_r1.core.profile import Part
from agent_r1.core.threads import run_in_thread
from agent_r1.core.trajectory import Group
from agent_r1.rewards import ShuffledScorer
from agent_r1.rollout.collector import Collector
from agent_r1.rollout.staleness import StalenessController
from agent_r1.rollout.user_code import format_error
from agent_r1.tools.execution import user_code_location
from agent_r1.trainer.report import Outcome, Trained
from agent_r1.trainer.updater import PolicyUpdater, SelectedGroup, UpdateReport
from agent_r1.training.agent_programs import make_rollout
from agent_r1.training.build import Runtime, group_requests, rollout_limits
from agent_r1.training.checkpoint.files import TrainProgress
from agent_r1.training.checkpoint.manager import CheckpointManager
from agent_r1.training.checkpoint.restore import ResumeState
from agent_r1.training.config import TrainConfig
from agent_r1.training.eval_metrics import score_trajectory
from agent_r1.training.evaluate import extra_measures, with_temperature
from agent_r1.training.monitor.health_monitor import HealthMonitor
from agent_r1.training.monitor.reward_hacking import proxy_metrics
from agent_r1.training.profile_log import ProfileLog
from agent_r1.training.progress import Progress, StepReport
from agent_r1.training.publisher import WeightPublisher
from agent_r1.training.reward_totals import REWARD_MEAN, reward_means
from agent_r1.training.rollout_metrics import compute_rollout_metrics
from agent_r1.training.shutdown import GracefulShutdown, ShutdownRequested


@dataclass(frozen=True, slots=True)
class TrainingRun:
    runtime: Runtime
    collector: Collector
    recorder: Recorder
    folder: Path
    start: ResumeState
    progress: Progress


def make_collector(runtime: Runtime, recorder: Recorder, run: str) -> Collector:
    """Return the collector of training attempts. ``run`` is the name of the run in the attempts' ids."""
    config, taskset, env = runtime.config, runtime.taskset, runtime.taskset.env_for_split("train")
    scorers = (*taskset.scorers, *runtime.extra_scorers)
    return Collector(
        make_rollout(runtime.training_agent, env),
        tuple(map(ShuffledScorer, scorers)) if config.shuffle_rewards else scorers,
        recorder,
        run,
        rollout_limits(config),
        seed=config.seed,
        greedy=make_rollout(with_temperature(runtime.agent, 0.0), env) if runtime.updater.needs_greedy else None,
        profiler=runtime.profiler,
    )


async def train_loop(run: TrainingRun, shutdown: GracefulShutdown) -> None:
    """Train until the last step, then remove the folders of published weights.

    Raises:
        ShutdownRequested: a shutdown was requested. The latest completed step was saved, unless checkpoints are
            disabled.
    """
    with closing(WeightPublisher(run.runtime.engine, run.folder)) as publisher:
        await _train_steps(run, publisher, shutdown)


async def _train_steps(run: TrainingRun, publisher: WeightPublisher, shutdown: GracefulShutdown) -> None:
    """Train until the last step.

    Each step waits for the next groups in the order in which the groups were requested. Then the step updates the
    policy in a thread, publishes the new weights, and is recorded.
    """
    runtime, config, updater = run.runtime, run.runtime.config, run.runtime.updater
    measure = runtime.profiler.measure
    progress = run.start.progress
    first = await run_in_thread(updater.publish)  # in a thread, because publish() can compute a checksum of all weights
    manager = CheckpointManager(runtime, run.folder, run.start, run.recorder)
    monitor = HealthMonitor(config, updater, run.recorder, run.folder)
    monitor.load_state(run.start.monitor)
    staleness = _make_staleness_controller(config, progress, first.version.number)
    requests = group_requests(runtime.taskset.tasks("train"), config, progress.groups, runtime.taskset.kind)
    await run.recorder.record(*run.start.events)
    await publisher.publish(first)
    async with aclosing(run.collector.collect(requests, staleness.acquire)) as groups, _saving_on_shutdown(manager):
        watch, profiles = Stopwatch(), ProfileLog(runtime.profiler, config.profile, run.progress)
        runtime.meter.take()  # drop what was counted before the first step
        for _ in range(progress.step, config.steps):
            with shutdown.interruptible():
                batch = await _gather(groups, staleness, updater, monitor, run.progress)
            watch.lap("rollout_seconds")
            before = updater.publish().version.number
            update = await _update(run, batch)
            watch.lap("update_seconds")
            with measure(Part.PUBLISH):
                served = await publisher.publish(updater.publish())
            watch.lap("load_seconds")
            proxy = proxy_metrics(batch, config.monitor.true_reward) if config.monitor.true_reward else {}
            findings = monitor.on_step(update, served) + monitor.on_proxy(proxy)
            watch.lap("monitor_seconds")
            progress = TrainProgress(update.step, progress.groups + len(batch))
            with measure(Part.VALIDATION):
                validation = await manager.validate_if_due(progress)
            if validation and (best := manager.best) is not None:
                findings += monitor.on_validation(update.step, validation["validation_em"], best.step, best.em)
            with measure(Part.STORE):
                await manager.copy_if_due(monitor.state())
            watch.lap("checkpoint_seconds")
            published = [PolicyPublished(update.version)] if update.version.number > before else []
            timings = watch.take() | profiles.take() | runtime.meter.take()
            await _record_step(run, batch, update, published, validation | proxy, timings)
            profiles.on_step(update.step, is_last=update.step == config.steps)
            await monitor.report(findings)
            manager.start_saving()
            await staleness.on_step_end(update.version.number)
    if validation := await manager.validate_last_step():
        await run.recorder.record(StepMetrics(config.steps, validation))
    await run.recorder.record(PendingDropped(config.steps, "the run had taken its last step"))
    await manager.finalize()
    await publisher.publish(await run_in_thread(updater.publish))


def _make_staleness_controller(config: TrainConfig, progress: TrainProgress, version: int) -> StalenessController:
    return StalenessController(
        config.steps - progress.step,
        config.groups_per_step,
        max_staleness=config.max_staleness,
        refill=config.algorithm.max_refill_rounds,
        taken=progress.groups,
        version=version,
    )


async def _update(run: TrainingRun, batch: Sequence[SelectedGroup]) -> UpdateReport:
    """Update the policy with the groups of a step.

    Raises:
        InvalidInput: an advantage estimator or a policy loss of the user's own raised an error.
    """
    algorithm = run.runtime.config.algorithm
    try:
        return await run.runtime.updater.update(batch)
    except Exception as error:
        parts = (algorithm.advantage, algorithm.loss)
        own = any(not type(part).__module__.startswith("agent_r1.") for part in parts)
        if isinstance(error, AgentR1Error) or not own or not user_code_location(error):
            raise
        raise InvalidInput(f"algorithm {algorithm.name}", got=format_error(error), do="fix this line") from error


@asynccontextmanager
async def _saving_on_shutdown(manager: CheckpointManager) -> AsyncIterator[None]:
    """Save the latest completed step if the ``async with`` block raises ShutdownRequested.

    If the block raises any other error, wait until no save is running.
    """
    try:
        yield
    except ShutdownRequested:
        await manager.save_now()
        raise
    except Exception:
        await manager.wait()
        raise


async def _gather(
    groups: AsyncIterator[Group],
    staleness: StalenessController,
    updater: PolicyUpdater,
    monitor: HealthMonitor,
    progress: Progress,
) -> list[SelectedGroup]:
    """Return the groups of a step. For each group without a training signal, request one more group (a refill), as long
    as the controller ``staleness`` allows refills."""
    batch: list[SelectedGroup] = []
    while len(batch) < staleness.groups_wanted:
        selected = updater.select(await anext(groups))
        batch.append(selected)
        monitor.on_group(selected)
        if not selected.has_signal:
            await staleness.request_refill()
        size = len(selected.group.trajectories)
        progress.on_attempts(len(batch) * size, staleness.groups_wanted * size)
    return batch


async def _record_step(
    run: TrainingRun,
    batch: Sequence[SelectedGroup],
    update: UpdateReport,
    published: Sequence[Event],
    measured: dict[str, float],
    timings: dict[str, float],
) -> None:
    """Record the events of a step in one transaction, and show the step on the progress display.

    Args:
        published: the event about the new weights; () if the weights did not change.
        measured: metrics of the validation and of the check for reward hacking.
        timings: the seconds of each phase of the step, and the counters of the engine.
    """
    groups = [selected.group for selected in batch]
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    results = [score_trajectory(trajectory) for trajectory in trajectories]
    em = statistics.fmean([result.em for result in results if result.failure is None] or [math.nan])
    tokens = sum(len(turn.action_ids) for trajectory in trajectories for turn in trajectory.turns)
    tokens_per_second = tokens / max(timings["rollout_seconds"] + timings["update_seconds"], 1e-9)
    metrics = {
        **update.metrics,
        **measured,
        "groups": float(len(groups)),
        "refilled_groups": float(len(groups) - run.runtime.config.groups_per_step),
        **compute_rollout_metrics(groups),
        **reward_means(trajectories),
        "em": em,
        "tokens": float(tokens),
        **extra_measures(run.runtime.taskset, trajectories),
    }
    await run.recorder.record(
        *(fate_of(outcome, update.step) for outcome in update.outcomes),
        TokensRecorded(update.token_records),
        *published,
        StepMetrics(update.step, metrics),
        StepTimings(update.step, {**timings, "tokens_per_second": tokens_per_second}),
    )
    for name in run.runtime.config.reward_weights if update.step == 1 else ():
        if f"{REWARD_MEAN}{name}" not in metrics and name not in run.runtime.taskset.rewards:
            run.progress.print_line(f"WARNING: reward_weights.{name}: no attempt of step 1 has a reward of this name")
    shown_em = em if all(result.exact for result in results) else None
    run.progress.on_step(StepReport(update.step, update.metrics["reward"], shown_em, tokens_per_second, metrics))


def fate_of(outcome: Outcome, step: int) -> AttemptFate:
    """Return what happened to an attempt in step number ``step``: trained, or dropped for a reason."""
    if isinstance(outcome, Trained):
        return AttemptFate(outcome.attempt, "trained", step, credit=outcome.advantage_sum)
    return AttemptFate(outcome.attempt, "dropped", step, outcome.reason)


class Stopwatch:
    """A stopwatch that sums the seconds of each phase since the last call of ``take``."""

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
