"""The training loop: each step trains on groups, publishes the new weights, and is recorded."""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, closing
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedModel

from agent_r1.core.errors import AgentR1Error, EngineError, InvalidInput
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
from agent_r1.core.inference import InferenceEngine, PolicyVersion, WeightUpdate
from agent_r1.core.profile import SECONDS, StepProfiler, format_profile, mean_profile, measure, profiling
from agent_r1.core.threads import run_in_thread
from agent_r1.core.trajectory import Group
from agent_r1.inference.policy_engine import WeightFolders
from agent_r1.model.adapter import has_adapter, merged_copy
from agent_r1.model.weights import DTYPES, weights_checksum
from agent_r1.rewards.scoring import ShuffledScorer
from agent_r1.rollout.collector import Collector, StalenessController
from agent_r1.rollout.user_code import format_error
from agent_r1.tools.execution import user_code_location
from agent_r1.trainer.updater import Outcome, PolicyUpdater, SelectedGroup, Trained, UpdateReport
from agent_r1.training.build import Runtime, group_requests, rollout_limits
from agent_r1.training.checkpoint_files import TrainProgress
from agent_r1.training.checkpoint_manager import CheckpointManager, ResumeState
from agent_r1.training.config import TrainConfig
from agent_r1.training.environments import make_rollout
from agent_r1.training.evaluate import extra_measures, with_temperature
from agent_r1.training.metrics import REWARD_MEAN, compute_rollout_metrics, reward_means, score_trajectory
from agent_r1.training.monitor import HealthMonitor, proxy_metrics
from agent_r1.training.progress import Progress, StepReport
from agent_r1.training.shutdown import GracefulShutdown, ShutdownRequested


class ProfileLog:
    """Prints the mean profile of each ``every`` steps, and of all steps at the end. 0: the steps are not profiled."""

    def __init__(self, every: int, progress: Progress) -> None:
        self.profiler = StepProfiler() if every else None
        self._every, self._progress = every, progress
        self._curves: defaultdict[str, dict[int, float]] = defaultdict(dict)

    def take(self) -> dict[str, float]:
        """Return the profile since the last call by metric name; {} if the steps are not profiled."""
        return {} if self.profiler is None else self.profiler.take()

    def on_step(self, step: int, profile: Mapping[str, float], is_last: bool) -> None:
        for name, seconds in profile.items():
            self._curves[name][step] = seconds
        if self._every and (is_last or step % self._every == 0):
            steps = list(self._curves[f"{SECONDS}other"])[0 if is_last else -self._every :]
            title = f"time of a step, mean of {len(steps)}"
            self._progress.print_line(format_profile(mean_profile(self._curves, steps[0]), title))


class WeightPublisher:
    """A service that sends the trainer's weights to an engine.

    If engine and trainer share memory, the engine gets the trainer's model, with its adapter (if the model has an
    adapter). Otherwise the adapter is merged into the weights, and the weights are written to a folder
    (:class:`~agent_r1.inference.policy_engine.WeightFolders`).
    """

    def __init__(self, engine: InferenceEngine, run_folder: Path) -> None:
        self._engine = engine
        self._folders = WeightFolders(run_folder, engine.capabilities.dtype)

    async def publish(self, update: WeightUpdate) -> PolicyVersion:
        """Send the weights of ``update`` to the engine, and return the version of the engine's weights.

        If the engine serves the sent weights, the result is ``update.version``. Any other result shows that the engine
        serves different weights.

        Raises EngineError if the weights cannot be written or loaded, or if the engine does not support
        ``update.transport``.
        """
        transports = self._engine.capabilities.transports
        sent = await run_in_thread(self._for_engine, update)
        if update.transport in transports:
            served = await self._engine.update_weights(sent)
        elif update.transport == "shared_memory" and "safetensors" in transports:
            folder = await run_in_thread(self._write, sent)
            served = await self._engine.update_weights(replace(sent, transport="safetensors", handle=folder))
        else:
            got = f"the trainer publishes by {update.transport!r}"
            raise EngineError(f"{got}, and the engine takes {sorted(transports)}")
        return update.version if served == sent.version else served

    def _for_engine(self, update: WeightUpdate) -> WeightUpdate:
        capabilities, model = self._engine.capabilities, update.handle
        if not capabilities.checksum:
            update = replace(update, version=replace(update.version, checksum=None))
        if not isinstance(model, PreTrainedModel):
            return update
        if update.transport not in capabilities.transports and has_adapter(model):
            model = merged_copy(model)
        dtype = None if capabilities.dtype is None else DTYPES[capabilities.dtype]
        is_cast = dtype is not None and any(parameter.dtype != dtype for parameter in model.parameters())
        if update.version.checksum is None or (model is update.handle and not is_cast):
            return replace(update, handle=model)
        return replace(update, version=replace(update.version, checksum=weights_checksum(model, dtype)), handle=model)

    def close(self) -> None:
        self._folders.close()

    def _write(self, update: WeightUpdate) -> Path:
        assert isinstance(update.handle, PreTrainedModel)
        return self._folders.write(update.handle, update.version.number)


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
        make_rollout(runtime.agent, env),
        tuple(map(ShuffledScorer, scorers)) if config.shuffle_rewards else scorers,
        recorder,
        run,
        rollout_limits(config),
        seed=config.seed,
        greedy=make_rollout(with_temperature(runtime.agent, 0.0), env) if runtime.updater.needs_greedy else None,
    )


async def train_loop(run: TrainingRun, shutdown: GracefulShutdown) -> None:
    """Train until the last step, then remove the folders of published weights.

    Raises:
        ShutdownRequested: a shutdown was requested. The latest completed step was saved, unless checkpoints are
            disabled.
    """
    profiles = ProfileLog(run.runtime.config.profile, run.progress)
    with closing(WeightPublisher(run.runtime.engine, run.folder)) as publisher, profiling(profiles.profiler):
        await _train_steps(run, publisher, profiles, shutdown)


async def _train_steps(
    run: TrainingRun, publisher: WeightPublisher, profiles: ProfileLog, shutdown: GracefulShutdown
) -> None:
    runtime, config, updater = run.runtime, run.runtime.config, run.runtime.updater
    progress = run.start.progress
    first = await run_in_thread(updater.publish)  # in a thread, because publish() can compute a checksum of all weights
    manager = CheckpointManager(runtime, run.folder, run.start, run.recorder)
    monitor = HealthMonitor(config, run.recorder, run.folder, run.start.monitor)
    staleness = _make_staleness_controller(config, progress, first.version.number)
    requests = group_requests(runtime.taskset.tasks("train"), config, progress.groups, runtime.taskset.kind)
    await run.recorder.record(*run.start.events)
    await publisher.publish(first)
    async with aclosing(run.collector.collect(requests, staleness.acquire)) as groups, _saving_on_shutdown(manager):
        watch = Stopwatch()
        runtime.meter.take(), profiles.take()  # drop what was counted before the first step
        for _ in range(progress.step, config.steps):
            with shutdown.interruptible():
                batch = await _gather(groups, staleness, updater, monitor, run.progress)
            watch.lap("rollout_seconds")
            before = updater.publish().version.number
            update = await _update(run, batch)
            watch.lap("update_seconds")
            with measure("publish"):
                weights = updater.publish()
                served = await publisher.publish(weights)
            watch.lap("load_seconds")
            proxy = proxy_metrics(batch, config.monitor.true_reward) if config.monitor.true_reward else {}
            findings = monitor.on_step(update, served, weights.version, proxy)
            watch.lap("monitor_seconds")
            progress = TrainProgress(update.step, progress.groups + len(batch))
            with measure("validation"):
                validation = await manager.validate_if_due(progress)
            if validation and (best := manager.best) is not None:
                findings += monitor.on_validation(update.step, validation["validation_em"], best.step, best.em)
            with measure("store"):
                await manager.copy_if_due(monitor.state)
            watch.lap("checkpoint_seconds")
            published = [PolicyPublished(update.version)] if update.version.number > before else []
            timings = watch.take() | (profile := profiles.take()) | runtime.meter.take()
            await _record_step(run, batch, update, published, validation | proxy, timings)
            profiles.on_step(update.step, profile, is_last=update.step == config.steps)
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
