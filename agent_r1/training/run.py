"""Start or resume a run: train the policy, and compare the trained model with the baselines."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from agent_r1.config import Layer
from agent_r1.core.errors import Interrupted, InvalidInput
from agent_r1.core.events import LogEvent
from agent_r1.core.inference import InferenceEngine
from agent_r1.core.redaction import flat_settings
from agent_r1.core.taskset import TaskSet
from agent_r1.core.threads import run_in_thread
from agent_r1.inference.torch_engine import TorchEngine
from agent_r1.store.folder import create_run, default_run_name, reopen_run, require_new_run, run_folder
from agent_r1.store.reader import RunReader, file_events, result_event, tools_event
from agent_r1.store.writer import RunWriteError, RunWriter
from agent_r1.trackers import RunEnd, TrackedRun, TrackingRecorder, require_trackers
from agent_r1.trainer.protocol import TrainerBackend
from agent_r1.trainer.ranks import RankDied
from agent_r1.training.build import Placement, Runtime, build_runtime, load_and_check, rebuild_trainer, rollout_limits
from agent_r1.training.checkpoint_files import CORRUPT
from agent_r1.training.checkpoint_manager import INEXACT, ResumeState, initial_state, restore_run
from agent_r1.training.config import TrainConfig
from agent_r1.training.environments import close_environments, with_environments
from agent_r1.training.evaluate import BASE, Method, list_methods, make_table, measure_pass_at_k
from agent_r1.training.loop import TrainingRun, make_collector, train_loop
from agent_r1.training.memory_estimate import MemoryPlan
from agent_r1.training.policy import load_policy
from agent_r1.training.preflight import check_data_unchanged, fingerprint_data
from agent_r1.training.progress import Progress
from agent_r1.training.resume import DECODE_STEP, TORCH, recorded_decode_step, resolve_resume_config
from agent_r1.training.servers import find_hardware, hardware_event, plan_devices
from agent_r1.training.shutdown import GracefulShutdown, ShutdownRequested, handle_signals
from agent_r1.training.tables import PassAtK, TrainReport, table_json

UPDATE = "update"
"""The kind of an event. Its text tells how the trainer computes an update (``TrainerBackend.arithmetic``)."""


def decode_step_events(engine: InferenceEngine, run: Path | None) -> tuple[LogEvent, ...]:
    """Return the events about the implementation of the embedded engine's decode steps."""
    if not isinstance(engine, TorchEngine):
        return ()
    if run is None:
        return () if engine.decode_step == TORCH else (LogEvent(DECODE_STEP, engine.decode_step),)
    with closing(RunReader(run)) as reader:
        before = recorded_decode_step(reader)
    return _changes(DECODE_STEP, f"decode steps are computed by {engine.decode_step}", engine.decode_step, before)


def update_events(trainer: TrainerBackend, run: Path | None) -> tuple[LogEvent, ...]:
    """Return the events about the implementation of updates (:attr:`TrainerBackend.arithmetic`).

    Otherwise one event names the new implementation, and a second event reports that results can differ in their last
    bits.
    """
    recorded: list[str] = []
    if run is not None:
        with closing(RunReader(run)) as reader:
            recorded = [event.detail for event in reader.events() if event.kind == UPDATE]
    if not recorded:
        return (LogEvent(UPDATE, trainer.arithmetic),)
    return _changes(UPDATE, f"updates have {trainer.arithmetic}", trainer.arithmetic, recorded[-1])


def _changes(kind: str, report: str, now: str, before: str) -> tuple[LogEvent, ...]:
    # Return two events if a resumed run has a new implementation of the decode steps or of the updates; () otherwise.
    if now == before:
        return ()
    detail = f"{report} instead of {before}: results differ in their last bits from those of an uninterrupted run"
    return LogEvent(kind, now), LogEvent(INEXACT, detail)


RANKS_RESTARTED = "ranks restarted"


async def train_with_restarts(run: TrainingRun, writer: RunWriter, shutdown: GracefulShutdown) -> None:
    """Train until the last step, then close the trainer.

    If a rank dies, start all ranks again at the last checkpoint, at most ``trainer.rank_restarts`` times. Engines and
    environments keep running.

    Raises:
        RankDied: a rank died after the last allowed restart.
        ShutdownRequested: as for :func:`agent_r1.training.loop.train_loop`.
    """
    allowed = run.runtime.config.trainer.rank_restarts
    death: RankDied | None = None
    for restarts in range(allowed + 1):
        try:
            if death is not None:
                run = await _restart(run, writer, f"{death.event} (restart {restarts} of {allowed})")
            await train_loop(run, shutdown)
            return
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


log = logging.getLogger(__name__)

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
    require_trackers(config.track)
    taskset = with_environments(with_splits(taskset, config.splits), config)
    folder = _folder_of(config)
    require_new_run(folder)
    runtime = build_runtime(config, taskset, placement, folder)
    data_events = fingerprint_data(config, taskset)
    writer = create_run(folder, config.model_dump(mode="json"))
    try:
        start = initial_state(runtime.updater)
        numeric = (*decode_step_events(runtime.engine, None), *update_events(runtime.trainer, None))
        start = replace(start, events=(*start.events, *data_events, *runtime.events, *numeric))
        return _train_and_close(runtime, start, writer, TrackedRun(folder.name, folder, _tracked(config)), progress)
    finally:
        writer.close()


def dry_run(config: TrainConfig, taskset: TaskSet) -> MemoryPlan:
    """Check a run as :func:`train` does, and return the memory that it would need. Start nothing, and write nothing.

    Raises InvalidInput if the input cannot be used.
    """
    require_trackers(config.track)
    taskset = with_environments(with_splits(taskset, config.splits), config)
    require_new_run(_folder_of(config))
    try:
        if config.placement.launcher == "processes":  # Ray alone knows the hardware of its cluster
            plan_devices(config, find_hardware())
        return load_and_check(config, taskset)[2]
    finally:
        asyncio.run(close_environments(taskset))


def _folder_of(config: TrainConfig) -> Path:
    return run_folder(config.run or default_run_name(config.taskset, config.algorithm.name, datetime.now()))


def resume(
    config: TrainConfig, taskset: TaskSet, progress: Progress, placement: Placement | None = None
) -> TrainReport:
    """Continue the stopped run ``config.run``, compare the trained model with the baselines, and return a report.

    ``config`` is the result of :func:`agent_r1.training.resume.resolve_resume_config`.

    Raises:
        InvalidInput: the task set, the model or the data have changed; all checkpoints are corrupt or lost; or a
            different process is writing the run.
        RunStopped, Interrupted: see :func:`train`.
    """
    if taskset.name != config.taskset:
        do = f"resume with the task set of the run, {config.taskset!r}"
        raise InvalidInput("taskset", got=repr(taskset.name), do=do)
    require_trackers(config.track)
    taskset = with_environments(with_splits(taskset, config.splits), config)
    folder = run_folder(config.run)
    writer = reopen_run(folder)  # also locks the run, before the models are loaded
    try:
        data_events = fingerprint_data(config, taskset)
        check_data_unchanged(folder, config, data_events)
        runtime = build_runtime(config, taskset, placement, folder)
        # Check again: another process can have changed the run after its configuration was read, before it was locked.
        resolve_resume_config([Layer("configuration read before the run was locked", config.model_dump(mode="json"))])
        start = restore_run(folder, runtime.policy, runtime.updater)
        numeric = (*decode_step_events(runtime.engine, folder), *update_events(runtime.trainer, folder))
        start = replace(start, events=(*start.events, *data_events, *runtime.events, *numeric))
        writer.open_segment(start.progress.step, config.model_dump(mode="json"))
        tracked = TrackedRun(folder.name, folder, _tracked(config), start.progress.step)
        return _train_and_close(runtime, start, writer, tracked, progress)
    finally:
        writer.close()


def with_splits(taskset: TaskSet, splits: tuple[str, ...]) -> TaskSet:
    """Return the task set with ``splits`` as its evaluation splits. If ``splits`` is (), the task set is unchanged."""
    return replace(taskset, evaluation=splits) if splits else taskset


def _train_and_close(
    runtime: Runtime, start: ResumeState, writer: RunWriter, tracked: TrackedRun, progress: Progress
) -> TrainReport:
    config, taskset = runtime.config, runtime.taskset
    progress.print_line(f"run: {tracked.folder}")
    if taskset.validation is not None and config.evaluate_every == 0:
        progress.print_line(
            f"note: the split {taskset.validation!r} is not used; set evaluate_every to choose the best step"
        )
    if taskset.sandbox is not None:
        start = replace(start, events=(*start.events, LogEvent("sandbox", taskset.sandbox)))
    for event in start.events:
        if isinstance(event, LogEvent):
            show = log.warning if event.kind in (CORRUPT, INEXACT) else progress.print_line
            show(f"{event.kind}: {event.detail}")
    tools = tools_event(taskset.env_for_split("train").tools)
    start = replace(start, events=(*start.events, tools, hardware_event(), *file_events(taskset.file)))
    recorder = TrackingRecorder(writer, config.track, tracked, progress.print_line)
    collector = make_collector(runtime, recorder, writer.run)
    end: RunEnd = "failed"
    try:
        run = TrainingRun(runtime, collector, recorder, tracked.folder, start, progress)
        report = asyncio.run(_run(run, writer))
        end = "completed"
        return report
    except Interrupted:
        end = "stopped"
        raise
    finally:
        progress.finish()
        recorder.close(end)


async def _run(run: TrainingRun, writer: RunWriter) -> TrainReport:
    with handle_signals(run.progress) as shutdown:
        try:
            return await _train_and_compare(run, writer, shutdown)
        except ShutdownRequested:
            assert shutdown.signal is not None
            name = signal.Signals(shutdown.signal).name
            await run.recorder.record(LogEvent("stopped", name))
            restarts = run.runtime.config.checkpoint_every == 0
            message = f"stopped by {name}{' without checkpoints: it would start from step 0' if restarts else ''}"
            raise Interrupted(shutdown.signal, message, run.folder) from None
        except BaseException as error:
            with suppress(RunWriteError):  # the writer itself can have failed
                await run.recorder.record(LogEvent("stopped", f"{type(error).__name__}: {error}"))
            raise
        finally:
            await close_environments(run.runtime.taskset)
            await run.runtime.engine.close()


def _tracked(config: TrainConfig) -> dict[str, str | int | float | bool | None]:
    return flat_settings(config.model_dump(mode="json"))


async def _train_and_compare(run: TrainingRun, writer: RunWriter, shutdown: GracefulShutdown) -> TrainReport:
    config = run.runtime.config
    began = time.perf_counter()
    run.progress.start(config.steps, run.start.progress.step)
    with _frozen_objects():
        await train_with_restarts(run, writer, shutdown)
    run.progress.finish()
    seconds = time.perf_counter() - began
    with shutdown.interruptible():
        report = await _compare(run, seconds)
    await run.recorder.record(result_event("table", table_json(report.table)))
    await run.recorder.record(
        LogEvent("completed", f"{config.steps} step{'s' * (config.steps != 1)} in {seconds:.1f} s")
    )
    return report


@contextmanager
def _frozen_objects() -> Iterator[None]:
    if gc.get_freeze_count() > 0:  # The caller has frozen objects. More could not be released apart from these.
        yield
        return
    gc.collect()  # garbage that is frozen would never be collected
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


async def _compare(run: TrainingRun, seconds: float) -> TrainReport:
    # The base model is loaded again, because training has changed the policy's weights.
    runtime, config, taskset = run.runtime, run.runtime.config, run.runtime.taskset
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
    return TrainReport(run.folder, config.steps, seconds, table, pass_at_k, run.start.progress.step)
