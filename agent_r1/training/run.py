"""Start or resume a run: train the policy, and compare the trained model with the baselines."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path

from agent_r1.config import Layer, resolve
from agent_r1.core.environment import EnvByTask, named_envs
from agent_r1.core.errors import Interrupted, InvalidInput
from agent_r1.core.events import LogEvent
from agent_r1.core.redaction import flat_settings
from agent_r1.core.taskset import TaskSet
from agent_r1.core.threads import run_in_thread
from agent_r1.inference.torch_engine import TorchEngine
from agent_r1.store.folder import create_run, default_run_name, reopen_run, require_new_run, run_argument, run_folder
from agent_r1.store.reader import RunReader, file_events, result_event, tools_event
from agent_r1.store.saved_weights import find_parent
from agent_r1.store.writer import RunWriteError, RunWriter
from agent_r1.tasksets.transcripts import keep_transcripts
from agent_r1.trackers import RunEnd, TrackedRun, TrackingRecorder, require_trackers
from agent_r1.trainer.optimizer import learning_rate_schedule
from agent_r1.trainer.ranks import RankDied
from agent_r1.training.build import DEVICES, MEMORY, Placement, Runtime, build_runtime, load_and_check, rebuild_trainer
from agent_r1.training.checkpoint_files import CORRUPT, keep_for_branch
from agent_r1.training.checkpoint_manager import INEXACT, RESUMED, ResumeState, initial_state, restore_run
from agent_r1.training.config import TrainConfig
from agent_r1.training.environments import close_environments, rollout_limits, with_environments
from agent_r1.training.evaluate import BASE, Method, list_methods, make_table, measure_pass_at_k
from agent_r1.training.loop import TrainingRun, make_collector, train_loop
from agent_r1.training.memory_estimate import MemoryPlan
from agent_r1.training.policy import load_policy, load_teacher
from agent_r1.training.preflight import check_data_unchanged, fingerprint_data
from agent_r1.training.progress import Progress
from agent_r1.training.resume import DECODE_STEP, resolve_resume_config
from agent_r1.training.servers import find_hardware, hardware_event, plan_devices
from agent_r1.training.shutdown import GracefulShutdown, ShutdownRequested, handle_signals
from agent_r1.training.tables import PassAtK, Table, TrainReport, table_json

log = logging.getLogger(__name__)

UPDATE = "update"
"""The kind of an event. Its text tells how the trainer computes an update (``TrainerBackend.arithmetic``)."""

RANKS_RESTARTED = "ranks restarted"
LARGE_MODEL = 50_000_000  # weights: a step of a larger model takes minutes on one core
PASS_AT_K_QUESTIONS = 50


def train(config: TrainConfig, taskset: TaskSet, progress: Progress, placement: Placement | None = None) -> TrainReport:
    """Train a policy in a new run, compare the trained model with the baselines, and return a report.

    After SIGINT or SIGTERM, the last step is saved, unless ``checkpoint_every`` is 0. If ``placement`` is None, the
    settings determine the placement.

    Raises:
        InvalidInput: the input cannot be used. Nothing was written.
        RunStopped: the monitor stopped the run. The message is a diagnosis.
        Interrupted: a signal stopped the run. Interrupted is a subclass of KeyboardInterrupt.
    """
    folder = _folder_of(config)
    require_new_run(folder)
    taskset = _taskset_of(config, taskset)
    runtime = build_runtime(config, taskset, placement, folder)
    data_events, parent = fingerprint_data(config, taskset), find_parent(config.model)
    parents = [] if parent is None else [result_event("parent", asdict(parent))]
    # The folder is created last, so that a run with wrong input leaves no folder behind.
    with closing(create_run(folder, config.model_dump(mode="json"))) as writer:
        keep_for_branch(Path(config.model))
        keep_transcripts(taskset, folder)
        start = initial_state(runtime.updater)
        start = replace(start, events=(*start.events, *parents, *data_events, *arithmetic_events(runtime)))
        return _train_and_close(runtime, start, writer, folder, progress)


def resume(
    config: TrainConfig, taskset: TaskSet, progress: Progress, placement: Placement | None = None
) -> TrainReport:
    """Continue the stopped run ``config.run``, a result of ``resolve_resume_config``. Otherwise as :func:`train`."""
    if taskset.name != config.taskset:
        do = f"resume with the task set of the run, {config.taskset!r}"
        raise InvalidInput("taskset", got=repr(taskset.name), do=do)
    folder = run_folder(config.run)
    taskset = _taskset_of(config, taskset)
    with closing(reopen_run(folder)) as writer:  # also locks the run, before the models are loaded
        data_events = fingerprint_data(config, taskset)
        check_data_unchanged(folder, config, data_events)
        runtime = build_runtime(config, taskset, placement, folder)
        # Check again: another process can have changed the run after its configuration was read, before it was locked.
        resolve_resume_config([Layer("configuration read before the run was locked", config.model_dump(mode="json"))])
        start = restore_run(folder, runtime.policy, runtime.updater)
        changed = (*arithmetic_events(runtime, folder), *schedule_events(folder, config, start.progress.step))
        start = replace(start, events=(*start.events, *data_events, *changed))
        writer.open_segment(start.progress.step, config.model_dump(mode="json"))
        return _train_and_close(runtime, start, writer, folder, progress)


def dry_run(config: TrainConfig, taskset: TaskSet) -> MemoryPlan:
    """Check a run as :func:`train` does, and return the memory that it would need. Start nothing, and write nothing."""
    require_new_run(_folder_of(config))
    taskset = _taskset_of(config, taskset)
    try:
        if config.placement.launcher == "processes":  # Ray alone knows the hardware of its cluster
            plan_devices(config, find_hardware())
        policy, _, plan = load_and_check(config, taskset)
        load_teacher(config, policy)
        return plan
    finally:
        asyncio.run(close_environments(taskset))


def _folder_of(config: TrainConfig) -> Path:
    return run_folder(config.run or default_run_name(config.taskset, config.algorithm.name, datetime.now()))


def _taskset_of(config: TrainConfig, taskset: TaskSet) -> TaskSet:
    require_trackers(config.track)
    return with_environments(with_splits(taskset, config.splits), config)


def with_splits(taskset: TaskSet, splits: tuple[str, ...]) -> TaskSet:
    """Return the task set with ``splits`` as its evaluation splits. If ``splits`` is (), the task set is unchanged."""
    return replace(taskset, evaluation=splits) if splits else taskset


def arithmetic_events(runtime: Runtime, run: Path | None = None) -> list[LogEvent]:
    """Return events that tell how decode steps and updates are computed; for a resumed run in ``run``, only changes."""
    now = {UPDATE: (runtime.trainer.arithmetic, "updates have")}
    if isinstance(runtime.engine, TorchEngine):
        now[DECODE_STEP] = runtime.engine.decode_step, "decode steps are computed by"
    recorded: dict[str, str] = {}
    if run is not None:
        with closing(RunReader(run)) as reader:
            recorded = {event.kind: event.detail for event in reader.events()}  # the last event of each kind
    events: list[LogEvent] = []
    for kind, (implementation, report) in now.items():
        before = recorded.get(kind)
        if before != implementation:
            events.append(LogEvent(kind, implementation))
        if before not in (None, implementation):
            detail = f"{report} {implementation} instead of {before}: results differ in their last bits"
            events.append(LogEvent(INEXACT, f"{detail} from those of an uninterrupted run"))
    return events


def schedule_events(run: Path, config: TrainConfig, taken: int) -> tuple[LogEvent, ...]:
    """Return an event if a run of ``taken`` steps continues with another learning rate than it would have had."""
    with closing(RunReader(run)) as reader:
        before = resolve(TrainConfig, [Layer(f"configuration of {run}", reader.config())])
    old, new = (learning_rate_schedule(each.trainer.schedule, each.steps) for each in (before, config))
    for step in range(taken + 1, config.steps + 1):
        if old(step) != new(step):
            spans = [each.trainer.schedule.total(each.steps) for each in (before, config)]
            rates = [config.trainer.learning_rate * factor(step) for factor in (old, new)]
            detail = (
                f"the learning rate of step {step} is {rates[1]:.3g} instead of {rates[0]:.3g}, because its curve has "
                f"{spans[1]} steps instead of {spans[0]}; --trainer.schedule.steps {spans[0]} keeps the old curve"
            )
            return (LogEvent(INEXACT, detail),)
    return ()


async def train_with_restarts(run: TrainingRun, writer: RunWriter, shutdown: GracefulShutdown) -> int:
    """Train until the last step, close the trainer, and return the number of steps.

    If a rank dies, start all ranks again at the last checkpoint, at most ``trainer.rank_restarts`` times. Engines and
    environments keep running.
    """
    allowed = run.runtime.config.trainer.rank_restarts
    death: RankDied | None = None
    for restarts in range(allowed + 1):
        try:
            if death is not None:
                run = await _restart(run, writer, f"{death.event} (restart {restarts} of {allowed})")
            return await train_loop(run, shutdown)
        except RankDied as error:
            death = error
        finally:
            run.runtime.trainer.close()
    assert death is not None
    raise death


async def _restart(run: TrainingRun, writer: RunWriter, reason: str) -> TrainingRun:
    run.progress.print_line(f"WARNING: {reason}; the ranks are started again")
    runtime = await run_in_thread(rebuild_trainer, run.runtime)
    try:
        start = await run_in_thread(restore_run, run.folder, runtime.policy, runtime.updater)
        await writer.continue_from(start.progress.step, runtime.config.model_dump(mode="json"))
    except BaseException:
        runtime.trainer.close()
        raise
    run.progress.finish()
    run.progress.start(runtime.config.steps, start.progress.step)
    return replace(
        run,
        runtime=runtime,
        collector=make_collector(runtime, run.recorder, writer.run),
        start=replace(start, events=(*start.events, LogEvent(RANKS_RESTARTED, reason))),
    )


def _train_and_close(
    runtime: Runtime, start: ResumeState, writer: RunWriter, folder: Path, progress: Progress
) -> TrainReport:
    config, taskset = runtime.config, runtime.taskset
    _introduce(runtime, start, folder, progress)
    sandbox = [] if taskset.sandbox is None else [LogEvent("sandbox", taskset.sandbox)]
    tools = tools_event(taskset.env_for_split("train").tools)
    events = (*start.events, *runtime.events, *sandbox, tools, hardware_event(), *file_events(taskset.file))
    settings = flat_settings(config.model_dump(mode="json"))
    is_resumed = any(isinstance(event, LogEvent) and event.kind == RESUMED for event in start.events)
    tracked = TrackedRun(folder.name, folder, settings, start.progress.step if is_resumed else None)
    recorder = TrackingRecorder(writer, config.track, tracked, progress.print_line)
    collector = make_collector(runtime, recorder, writer.run)
    run = TrainingRun(runtime, collector, recorder, folder, replace(start, events=events), progress)
    end: RunEnd = "failed"
    try:
        report = asyncio.run(_run(run, writer))
        end = "completed"
        return report
    except Interrupted:
        end = "stopped"
        raise
    finally:
        progress.finish()
        recorder.close(end)


def _introduce(runtime: Runtime, start: ResumeState, folder: Path, progress: Progress) -> None:
    # Print what a person wants to know before the first step. All other events are only recorded.
    config, taskset = runtime.config, runtime.taskset
    devices = [event.detail for event in runtime.events if event.kind == DEVICES] or [runtime.policy.model.device.type]
    each = f"tasks with {config.group_size} attempts each" if config.acts else "transcripts"
    progress.print_line(
        f"training {config.model} on {taskset.name} with {config.algorithm.name} ({', '.join(devices)}): "
        f"{config.steps} steps of {config.groups_per_step} {each}"
    )
    look = f"agent-r1 show {run_argument(folder)}, or in the browser: agent-r1 view"
    progress.print_line(f"stored in {folder}; to look at it: {look}")
    if config.model == "tiny-base" and taskset.name != "tinywiki":
        progress.print_line("note: tiny-base knows the words of TinyWiki only; for other tasks give --model")
    for env in named_envs(taskset.env_for_split("train")).values():
        if not env.tools and not isinstance(env, EnvByTask) and not type(env).__module__.startswith("agent_r1."):
            progress.print_line(
                f"note: {type(env).__name__}.tools is empty, so its prompts show no tool; if it hands tasks to other "
                'environments, give env = {"NAME": env, ..}'
            )
    if taskset.validation is not None and config.evaluate_every == 0 and config.evaluate_n > 0:
        progress.print_line(
            f"note: the split {taskset.validation!r} is not used; set evaluate_every to choose the best step"
        )
    model, cores = runtime.policy.model, os.cpu_count() or 1
    if config.threads == 1 < cores and model.device.type == "cpu" and model.num_parameters() >= LARGE_MODEL:
        progress.print_line(f"note: one of {cores} cores computes; --threads {cores} is faster, and rounds otherwise")
    for event in (*start.events, *runtime.events):
        if isinstance(event, LogEvent) and event.kind in (CORRUPT, INEXACT):
            log.warning("%s: %s", event.kind, event.detail)
        elif isinstance(event, LogEvent) and event.kind in (RESUMED, MEMORY):
            progress.print_line(f"{event.kind}: {event.detail}")


async def _run(run: TrainingRun, writer: RunWriter) -> TrainReport:
    config = run.runtime.config
    with handle_signals(run.progress) as shutdown:
        try:
            began = time.perf_counter()
            run.progress.start(config.steps, run.start.progress.step)
            with _frozen_objects():
                steps = await train_with_restarts(run, writer, shutdown)
            run.progress.finish()
            seconds = time.perf_counter() - began
            with shutdown.interruptible():
                report = await _compare(run, steps, seconds)
            done = LogEvent("completed", f"{steps} step{'s' * (steps != 1)} in {seconds:.1f} s")
            await run.recorder.record(result_event("table", table_json(report.table)), done)
            return report
        except ShutdownRequested:
            assert shutdown.signal is not None
            name = signal.Signals(shutdown.signal).name
            await run.recorder.record(LogEvent("stopped", name))
            restarts = config.checkpoint_every == 0
            message = f"stopped by {name}{' without checkpoints: it would start from step 0' if restarts else ''}"
            raise Interrupted(shutdown.signal, message, run.folder) from None
        except BaseException as error:
            with suppress(RunWriteError):  # the writer itself can have failed
                await run.recorder.record(LogEvent("stopped", f"{type(error).__name__}: {error}"))
            raise
        finally:
            await close_environments(run.runtime.taskset)
            await run.runtime.engine.close()


@contextmanager
def _frozen_objects() -> Iterator[None]:
    # The models and modules of a run live until its end. Frozen, they are not traversed by each collection of garbage.
    if gc.get_freeze_count() > 0:  # the caller has frozen objects, and more could not be released apart from these
        yield
        return
    gc.collect()  # garbage that is frozen would never be collected
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


async def _compare(run: TrainingRun, steps: int, seconds: float) -> TrainReport:
    # The base model is loaded again, because training has changed the policy's weights.
    runtime, config, taskset = run.runtime, run.runtime.config, run.runtime.taskset
    if config.evaluate_n == 0 or not taskset.evaluation:
        return TrainReport(run.folder, steps, seconds, Table({}, {}), resumed_from=run.start.progress.step)
    base_policy = load_policy(config, taskset, config.engine.dtype)
    base_engine = runtime.placement.engine(base_policy, config)
    base = base_policy.agent(base_engine, config, 1.0)
    try:
        methods, limits = list_methods(taskset, base, runtime.agent), rollout_limits(config)
        table = await make_table(methods, taskset, config.evaluate_n, limits, run.progress)
        pass_at_k: PassAtK | None = None
        if config.pass_k > 0:
            method, attempts = Method(BASE, base, taskset.env), config.pass_attempts or config.pass_k
            pass_at_k = await measure_pass_at_k(
                method, taskset, PASS_AT_K_QUESTIONS, config.pass_k, attempts, limits, run.progress
            )
    finally:
        await base_engine.close()
    return TrainReport(run.folder, steps, seconds, table, pass_at_k, run.start.progress.step)
