"""The training loop: each step trains on groups, publishes the new weights, and is recorded."""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path

from transformers import PreTrainedModel

from agent_r1.algorithms.ops import MIN_STD
from agent_r1.core.environment import named_envs
from agent_r1.core.errors import AgentR1Error, InvalidInput
from agent_r1.core.events import (
    PENDING_AT_END,
    STOPPED_EARLY,
    AttemptFate,
    Event,
    LogEvent,
    PendingDropped,
    PolicyPublished,
    Recorder,
    StepMetrics,
    StepTimings,
    TokensRecorded,
)
from agent_r1.core.inference import InferenceEngine, PolicyVersion, WeightUpdate
from agent_r1.core.profile import SECONDS, StepProfiler, format_profile, mean_profile, measure, profiling
from agent_r1.core.task import Task
from agent_r1.core.threads import run_in_thread
from agent_r1.core.trajectory import Group, Trajectory
from agent_r1.model.weights import DTYPES, weights_checksum
from agent_r1.rewards.scoring import ShuffledScorer
from agent_r1.rollout.collector import Collector, GroupRequest, StalenessController
from agent_r1.rollout.replay import Continuations
from agent_r1.rollout.scripted import ScriptedAgent
from agent_r1.rollout.user_code import format_error
from agent_r1.tasksets.transcripts import EXAMPLE
from agent_r1.tools.execution import user_code_location
from agent_r1.trainer.updater import PolicyUpdater, SelectedGroup, Trained, UpdateReport
from agent_r1.training.build import Runtime
from agent_r1.training.check import reaches
from agent_r1.training.checkpoint_files import TrainProgress
from agent_r1.training.checkpoint_manager import CheckpointManager, ResumeState
from agent_r1.training.config import TrainConfig
from agent_r1.training.environments import make_rollout, rollout_limits
from agent_r1.training.evaluate import extra_measures, with_temperature
from agent_r1.training.metrics import (
    ENV_CONSTANT,
    ENV_EM,
    ENV_REWARD,
    REWARD_MEAN,
    compute_rollout_metrics,
    mean_em,
    reward_means,
    score_trajectory,
    sum_rewards,
)
from agent_r1.training.monitor import HealthMonitor, proxy_metrics, true_reward
from agent_r1.training.progress import Progress, StepReport
from agent_r1.training.sampling import AdaptiveSampler, group_requests
from agent_r1.training.sft import find_fault
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


async def publish_weights(engine: InferenceEngine, update: WeightUpdate) -> PolicyVersion:
    """Send the trainer's weights to an engine, and return the version that it then serves."""
    capabilities, model, version = engine.capabilities, update.handle, update.version
    if not capabilities.checksum:
        version = replace(version, checksum=None)
    elif version.checksum is not None and capabilities.dtype is not None and isinstance(model, PreTrainedModel):
        dtype = DTYPES[capabilities.dtype]
        # An engine of another data type holds other bits than the trainer, so it is compared with the cast weights.
        if any(parameter.dtype != dtype for parameter in model.parameters()):
            version = replace(version, checksum=await run_in_thread(weights_checksum, model, dtype))
    served = await engine.update_weights(replace(update, version=version))
    return update.version if served == version else served


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
        examples=SolutionExamples(runtime) if config.example_coef else None,
        continuations=Continuations(runtime.agent, env, number) if (number := runtime.updater.continuations) else None,
    )


class SolutionExamples:
    """The first right solution of each task, of the task set of a run."""

    def __init__(self, runtime: Runtime) -> None:
        self._policy, self._taskset = runtime.policy, runtime.taskset

    def rollout(self, task: Task, attempts: Sequence[Trajectory]) -> ScriptedAgent | None:
        assert self._taskset.solutions is not None
        if task.env in self._taskset.unsolved:
            return None
        solutions = self._taskset.solutions(task)
        expected = solutions.expected_rewards
        if not solutions.gold or any(reaches(sum_rewards(attempt), expected) for attempt in attempts):
            return None
        respond = solutions.gold[0].respond
        return ScriptedAgent(self._taskset.env_for_split("train"), lambda _: respond, self._policy.renderer)

    def fault(self, task: Task, example: Trajectory) -> str | None:
        assert self._taskset.solutions is not None
        if fault := find_fault(self._policy, example):
            return fault
        totals, expected = sum_rewards(example), self._taskset.solutions(task).expected_rewards
        return None if reaches(totals, expected) else f"it earned {dict(totals)} and not {dict(expected)}"


async def train_loop(run: TrainingRun, shutdown: GracefulShutdown) -> int:
    """Train until the last step, or until validations are no longer better. Save the final model, return the steps.

    Raise ShutdownRequested after a shutdown. The latest completed step was saved, unless checkpoints are disabled.
    """
    profiles = ProfileLog(run.runtime.config.profile, run.progress)
    runtime, config, updater = run.runtime, run.runtime.config, run.runtime.updater
    progress = run.start.progress
    first = await run_in_thread(updater.publish)  # in a thread, because publish() can compute a checksum of all weights
    manager = CheckpointManager(runtime, run.folder, run.start, run.recorder)
    envs = named_envs(runtime.taskset.env_for_split("train")).values()
    tools = dict.fromkeys(tool.name for env in envs for tool in env.tools)
    monitor = HealthMonitor(config, run.recorder, run.folder, run.start.monitor, list(tools))
    trusted = true_reward(config, runtime.taskset.rewards)
    tasks, kind = runtime.taskset.tasks("train"), runtime.taskset.kind
    sampler = AdaptiveSampler(tasks, config, kind, progress.sampling) if config.sampling == "adaptive" else None
    staleness = StalenessController(
        config.steps - progress.step,
        config.groups_per_step,
        max_staleness=config.max_staleness,
        refill=config.algorithm.max_refill_rounds,
        taken=progress.groups,
        version=first.version.number,
    )
    source = sampler.requests(progress.groups) if sampler else group_requests(tasks, config, progress.groups, kind)
    requests = _when_allowed(source, staleness, progress.groups)
    await run.recorder.record(*run.start.events)
    await publish_weights(runtime.engine, first)
    with profiling(profiles.profiler):
        async with aclosing(run.collector.collect(requests)) as groups, _saving_on_shutdown(manager):
            watch = Stopwatch()
            runtime.meter.take(), profiles.take()  # drop what was counted before the first step
            for _ in range(progress.step, config.steps):
                if manager.stops_early:
                    break
                # Only here a shutdown may cancel the work: a resumed run samples these groups again.
                with shutdown.interruptible():
                    batch = await _gather(groups, staleness, updater, monitor, run.progress)
                watch.lap("rollout_seconds")
                before = updater.publish().version.number
                update = await _update(run, batch)
                watch.lap("update_seconds")
                with measure("publish"):
                    weights = updater.publish()
                    served = await publish_weights(runtime.engine, weights)
                watch.lap("load_seconds")
                proxy = proxy_metrics(batch, trusted) if trusted else {}
                attempts = [attempt for selected in batch for attempt in selected.group.trajectories]
                findings = monitor.on_step(update, attempts, served, weights.version, proxy)
                watch.lap("monitor_seconds")
                if sampler is not None:
                    sampler.on_step_end(update.step, batch)
                sampling = None if sampler is None else sampler.state
                progress = TrainProgress(update.step, progress.groups + len(batch), sampling=sampling)
                with measure("validation"):
                    validation = await manager.validate_if_due(progress)
                if validation and (best := manager.best) is not None:
                    findings += monitor.on_validation(update.step, validation["validation_em"], best.step, best.em)
                with measure("store"):
                    await manager.take_snapshot_if_due(monitor.state)
                watch.lap("checkpoint_seconds")
                published = [PolicyPublished(update.version)] if update.version.number > before else []
                timings = watch.take() | (profile := profiles.take()) | (runtime.meter.take() if config.acts else {})
                await _record_step(run, batch, update, published, validation | proxy, timings)
                profiles.on_step(update.step, profile, is_last=update.step == config.steps)
                await monitor.report(findings)
                watch.lap("monitor_seconds")
                with measure("store"):
                    await manager.save_if_due()  # after the step was recorded: it needs the rows up to its step
                watch.lap("checkpoint_seconds")
                if not manager.stops_early:  # no attempt starts that would never be trained
                    await staleness.on_step_end(update.version.number)
    monitor.on_end()
    if validation := await manager.validate_last_step():
        await run.recorder.record(StepMetrics(progress.step, validation))
    early = _early_stop(manager, progress.step, config)
    for event in early:
        run.progress.print_line(f"stopped {event.detail}")
    await run.recorder.record(PendingDropped(progress.step, PENDING_AT_END), *early)
    await manager.finalize()
    # The final model can have the weights of an earlier step: the engine serves them in the evaluation.
    await publish_weights(runtime.engine, await run_in_thread(updater.publish))
    return progress.step


async def _when_allowed(
    source: Iterator[GroupRequest], staleness: StalenessController, first: int
) -> AsyncIterator[GroupRequest]:
    for group_id in count(first):
        version = await staleness.acquire(group_id)
        yield replace(next(source), version=version)  # the task is drawn now, by the outcomes that are known


def _early_stop(manager: CheckpointManager, step: int, config: TrainConfig) -> list[LogEvent]:
    if step == config.steps or manager.best is None:
        return []
    count = "1 validation was" if config.stop_after == 1 else f"{config.stop_after} validations were"
    best = f"the best, of equal ones the last, is {manager.best.em:.3f} at step {manager.best.step}"
    return [LogEvent(STOPPED_EARLY, f"at step {step}: {count} not better than one before; {best}")]


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
    em = mean_em(results)
    tokens = sum(len(turn.action_ids) for trajectory in trajectories for turn in trajectory.turns)
    rollout_metrics = compute_rollout_metrics(groups)
    sampled = tokens + rollout_metrics.get("continuation_tokens", 0.0)
    tokens_per_second = sampled / max(timings["rollout_seconds"] + timings["update_seconds"], 1e-9)
    metrics = {
        **update.metrics,
        **measured,
        "groups": float(len(groups)),
        "refilled_groups": float(len(groups) - run.runtime.config.groups_per_step),
        **rollout_metrics,
        **reward_means([t for one in some for t in one.group.trajectories] for some in _by_env(batch).values()),
        **_environment_metrics(batch),
        "em": em,
        "tokens": float(tokens),
        **extra_measures(run.runtime.taskset, trajectories),
    }
    if not run.runtime.config.acts:  # the transcripts have no scores of their own
        made_up = {"reward", "em", "reward_spread", "policy_loss", "clip_fraction", "kl_old", "constant_groups"}
        made_up |= {"dead_groups", "solved_groups", f"{REWARD_MEAN}{EXAMPLE}", "calls", "failed_calls", "invalid_calls"}
        metrics = {key: value for key, value in metrics.items() if key not in made_up}
    fates = [
        AttemptFate(one.attempt, "trained", update.step, credit=one.advantage_sum)
        if isinstance(one, Trained)
        else AttemptFate(one.attempt, "dropped", update.step, one.reason)
        for one in update.outcomes
    ]
    await run.recorder.record(
        *fates,
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


def _by_env(batch: Sequence[SelectedGroup]) -> Mapping[str, list[SelectedGroup]]:
    by_env: dict[str, list[SelectedGroup]] = {}
    for selected in batch:
        by_env.setdefault(selected.group.task.env, []).append(selected)
    return by_env


def _environment_metrics(batch: Sequence[SelectedGroup]) -> dict[str, float]:
    # As the metrics reward, em and constant_groups of the whole batch; {} if there is a single environment.
    metrics: dict[str, float] = {}
    for name, groups in sorted(_by_env(batch).items()):
        if name:
            rewards = [[sample.total for sample in one.selection.samples] for one in groups]
            constant = [statistics.pstdev(some) <= MIN_STD for some in rewards if len(some) > 1]
            results = [score_trajectory(trajectory) for one in groups for trajectory in one.group.trajectories]
            metrics[f"{ENV_REWARD}{name}"] = statistics.fmean([*chain.from_iterable(rewards)] or [math.nan])
            metrics[f"{ENV_EM}{name}"] = mean_em(results)
            metrics[f"{ENV_CONSTANT}{name}"] = statistics.fmean(constant or [math.nan])
    return metrics


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
