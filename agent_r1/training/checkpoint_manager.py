"""Validation and saving during training: checkpoints, the best step by validation, and the final model."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import math
import statistics
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from torch import Tensor

from agent_r1.core.errors import InvalidInput
from agent_r1.core.events import CheckpointSaved, Event, LogEvent, PolicyPublished, Recorder
from agent_r1.core.threads import run_in_thread
from agent_r1.model.load import read_weights
from agent_r1.rollout.collector import RolloutLimits
from agent_r1.store.manifest import (
    CHECKPOINTS,
    STEP,
    CorruptCheckpoint,
    check_manifest,
    checkpoint_step,
    list_checkpoints,
)
from agent_r1.store.reader import RunReader, result_event
from agent_r1.trainer.protocol import TrainerState
from agent_r1.trainer.updater import PolicyUpdater
from agent_r1.training.build import Runtime
from agent_r1.training.checkpoint_files import (
    CORRUPT,
    BestStep,
    CheckpointError,
    LatestCheckpoint,
    SkippedCheckpoint,
    Snapshot,
    TrainProgress,
    find_latest_checkpoint,
    load_checkpoint,
    quarantine,
    save_checkpoint,
    save_model,
    state_folder,
    weights_on_cpu,
)
from agent_r1.training.environments import rollout_limits
from agent_r1.training.evaluate import Method, attempts, evaluate_split
from agent_r1.training.metrics import VALIDATION_SUBSET
from agent_r1.training.monitor import MonitorState
from agent_r1.training.policy import Policy
from agent_r1.training.tables import Cell, make_cell, normal_interval

_log = logging.getLogger(__name__)


class AsyncCheckpointWriter:
    """A writer that saves checkpoints in a thread, one at a time, while training continues."""

    def __init__(self, write: Callable[[Snapshot], object], recorder: Recorder) -> None:
        self._write, self._recorder = write, recorder
        self._task: asyncio.Task[CheckpointError | None] | None = None

    def start(self, snapshot: Snapshot) -> None:
        """Start saving a snapshot. Await :meth:`wait` first, so that the previous save is complete."""
        self._task = asyncio.create_task(self._save(snapshot))

    async def wait(self) -> None:
        """Wait until no save is running. If the last save failed, raise its CheckpointError, once."""
        task, self._task = self._task, None
        error = None if task is None else await task
        if error is not None:
            raise error

    async def _save(self, snapshot: Snapshot) -> CheckpointError | None:
        try:
            await run_in_thread(self._write, snapshot)
        except CheckpointError as error:
            return error
        except Exception as error:  # a CheckpointError ends the run with one line instead of a traceback
            return CheckpointError(f"step {snapshot.progress.step} could not be saved: {error!r}")
        await self._recorder.record(CheckpointSaved(snapshot.progress.step))
        return None


RESUMED = "resumed"

INEXACT = "inexact"
"""The kind of the event about possible differences between a resumed run and an uninterrupted run."""


@dataclass(frozen=True, slots=True, eq=False)
class ResumeState:
    """The state of a run at the beginning of training, without the state of the trainer."""

    progress: TrainProgress
    monitor: MonitorState
    events: tuple[Event, ...]  # the events that the run records first


def initial_state(updater: PolicyUpdater) -> ResumeState:
    return ResumeState(TrainProgress(), MonitorState(), (PolicyPublished(updater.publish().version),))


def restore_run(run: Path, policy: Policy, updater: PolicyUpdater) -> ResumeState:
    """Load the newest intact checkpoint of a run into ``policy`` and ``updater``. Return the rest of the state.

    Without any checkpoint, the run restarts from step 0. Newer corrupt checkpoints are renamed.
    """
    initial = initial_state(updater)
    with closing(RunReader(run)) as reader:
        first = next(reader.versions(), None)
    if first is not None and first.checksum not in (None, updater.publish().version.checksum):
        do = "put back the one that the run began with, or start a new run"
        raise InvalidInput("model", got="another than the run's", do=do)
    latest = _find_own_checkpoint(run)
    if latest.folder is None:
        # If the run stopped before it recorded its first event, the event of the initial weights is missing.
        unrecorded = initial.events if first is None else ()
        return replace(initial, events=(*unrecorded, LogEvent(RESUMED, "from its beginning")))
    saved = load_checkpoint(latest.folder, policy.model, policy.tokenizer)
    updater.load_weights(read_weights(latest.folder, policy.model))
    updater.load_state(saved.trainer)
    skipped = tuple(_quarantine(checkpoint) for checkpoint in latest.skipped)
    resumed = LogEvent(RESUMED, f"from step {saved.progress.step}")
    inexact = _smaller_micro_batches(saved.trainer, updater)
    state = ResumeState(saved.progress, saved.monitor, (*skipped, resumed, *inexact))
    return _without_lost_best(state, run)


def _smaller_micro_batches(saved: TrainerState, updater: PolicyUpdater) -> tuple[LogEvent, ...]:
    before, now = int(saved.scalars.get("micro_tokens", updater.micro_tokens)), updater.micro_tokens
    if now >= before:
        return ()
    detail = (
        f"micro-batches have {now} tokens instead of {before}, so that losses are summed in another order: "
        "results differ in their last bits from those of an uninterrupted run"
    )
    return (LogEvent(INEXACT, detail),)


def _find_own_checkpoint(run: Path) -> LatestCheckpoint:
    # Return the newest intact checkpoint of the run, and the newer checkpoints that cannot be used.
    with closing(RunReader(run)) as reader:
        latest = find_latest_checkpoint(run, reader.check_checkpoint)
        saved, last_step = reader.last_checkpoint_step(), reader.last_step()
    if latest.folder is None and (latest.skipped or saved is not None):
        reasons = "; ".join(one.reason for one in latest.skipped) or f"the checkpoint of step {saved} is gone"
        got = f"{run}, which reached step {last_step} and has no intact checkpoint: {reasons}"
        raise InvalidInput("resume", got=got, do="put its checkpoints back, or start a new run")
    if saved is None or any(checkpoint_step(folder) >= saved for folder in list_checkpoints(run)):
        return latest
    missing = SkippedCheckpoint(run / CHECKPOINTS / f"{STEP}{saved}", f"the checkpoint of step {saved} is gone")
    return replace(latest, skipped=(missing, *latest.skipped))


def _quarantine(skipped: SkippedCheckpoint) -> LogEvent:
    if not skipped.folder.exists():
        return LogEvent(CORRUPT, skipped.reason)
    try:
        return LogEvent(CORRUPT, f"{skipped.reason}; it was renamed to {quarantine(skipped.folder).name}")
    except OSError as error:
        do = "make the folder writable"
        raise InvalidInput("run", got=f"{skipped.folder}, which cannot be renamed: {error}", do=do) from error


def _without_lost_best(state: ResumeState, run: Path) -> ResumeState:
    best = state.progress.best
    if best is None or best.step == state.progress.step:
        return state
    folder = run / CHECKPOINTS / f"{STEP}{best.step}"
    try:
        with closing(RunReader(run)) as reader:
            reader.check_checkpoint(folder)
    except CorruptCheckpoint as error:
        lost = LogEvent(CORRUPT, f"the best checkpoint by validation, of step {best.step}, is lost")
        events = (*state.events, _quarantine(SkippedCheckpoint(folder, str(error))), lost)
        return replace(state, progress=replace(state.progress, best=None, not_better=0), events=events)
    return state


def _trim_heap() -> None:
    # The allocator of glibc keeps what a step and a copy for a checkpoint have freed, in ever smaller pieces: a process
    # grows by some 10 kB a step. Other systems have no such function.
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


class CheckpointManager:
    """Validates the policy, saves checkpoints, and saves the final model: of the best step, or else of the last."""

    def __init__(self, runtime: Runtime, folder: Path, start: ResumeState, recorder: Recorder) -> None:
        self._policy, self._taskset, self._updater = runtime.policy, runtime.taskset, runtime.updater
        self._agent, self._config, self._folder = runtime.agent, runtime.config, folder
        self._saves_copies = runtime.plan.copies
        self._best_weights: Mapping[str, Tensor] = {}  # only without checkpoints, which hold them otherwise
        self._recorder = recorder
        self._writer = AsyncCheckpointWriter(self._write, recorder)
        self._snapshot: Snapshot | None = None
        self._saved_step = start.progress.step
        self._progress, self._monitor = start.progress, start.monitor

    @property
    def best(self) -> BestStep | None:
        """The best step by validation so far; None if no step was validated."""
        return self._progress.best

    @property
    def stops_early(self) -> bool:
        """Whether the last ``stop_after`` validations were not better than one before them."""
        return 0 < self._config.stop_after <= self._progress.not_better

    async def validate_if_due(self, progress: TrainProgress) -> dict[str, float]:
        """Evaluate the policy on the validation tasks, if a validation is due after the step ``progress.step``."""
        self._progress = replace(self._progress, step=progress.step, groups=progress.groups, sampling=progress.sampling)
        return await self._validate(progress.step) if self._is_due(progress.step, self._config.evaluate_every) else {}

    async def take_snapshot_if_due(self, monitor: MonitorState) -> None:
        """If a checkpoint is due, take its content: weights, trainer state and ``monitor``."""
        self._monitor = monitor
        step, best, every = self._progress.step, self._progress.best, self._config.checkpoint_every
        is_best = best is not None and best.step == step
        if self._is_due(step, every) or (every > 0 and (is_best or self.stops_early)):
            await self._writer.wait()
            self._snapshot = await run_in_thread(self._take_snapshot)

    async def save_if_due(self) -> None:
        """Write what the last method took, if anything. Return before it is written only if it is a copy."""
        if self._snapshot is not None:
            self._writer.start(self._snapshot)
            self._snapshot = None
            if not self._saves_copies:  # the next update would change what is being written
                await self._writer.wait()

    async def save_now(self) -> None:
        """Write a checkpoint now, and wait until it is complete. Call this method before the next update."""
        await self._writer.wait()
        if self._config.checkpoint_every > 0 and self._saved_step != self._progress.step:
            self._writer.start(await run_in_thread(self._take_snapshot))
            await self._writer.wait()

    async def wait(self) -> None:
        """Wait until no save is running. Errors of the save are ignored."""
        with suppress(CheckpointError):
            await self._writer.wait()

    async def validate_last_step(self) -> dict[str, float]:
        """Validate the policy after the last step, and return the metrics; {} if that was done, or is disabled."""
        if self._config.evaluate_every == 0 or self._progress.validated == self._progress.step:
            return {}
        await self._writer.wait()
        metrics = await self._validate(self._progress.step)
        if self._config.checkpoint_every > 0:
            # Save the last step again, with the result of this validation, for the case that the run is resumed with
            # more steps.
            self._writer.start(await run_in_thread(self._take_snapshot))
        return metrics

    async def finalize(self) -> None:
        """Save the best weights as the final model. Raise CheckpointError if this or the last save failed."""
        try:
            await self._writer.wait()
        finally:
            await run_in_thread(self._save_final_model)

    def _is_due(self, step: int, every: int) -> bool:
        return every > 0 and (step % every == 0 or step == self._config.steps)

    async def _validate(self, step: int) -> dict[str, float]:
        split = self._taskset.validation
        assert split is not None, "the configuration was checked before the run began"
        method = Method("validation", self._agent, self._taskset.env)
        limits = rollout_limits(self._config)
        if not self._config.acts:
            return await self._validate_transcripts(step, method, split, limits)
        results = await evaluate_split(method, self._taskset, split, self._config.evaluate_n, limits)
        self._progress = replace(self._progress, validated=step)
        cell = make_cell(results)
        if cell is None:  # without a number the step can be neither the best nor worse than the best
            text = f"validation: all {len(results)} attempts failed, for example: {results[0].failure}"
            await self._recorder.record(LogEvent("warning", text))
            _log.warning("%s", text)
            return {}
        measure = " or ".join(sorted({result.measure for result in results if result.failure is None}))
        await self._record_validation(step, split, measure, cell)
        metrics = {"validation_em": cell.em, "validation_f1": cell.f1}
        if self._taskset.subset is not None:
            by_subset: dict[str, list[float]] = {}
            for task, result in zip(self._taskset.tasks(split), results, strict=False):
                if result.failure is None:
                    by_subset.setdefault(self._taskset.subset(task), []).append(result.em)
            metrics |= {f"{VALIDATION_SUBSET}{name}": statistics.fmean(ems) for name, ems in by_subset.items()}
        return metrics

    async def _validate_transcripts(
        self, step: int, method: Method, split: str, limits: RolloutLimits
    ) -> dict[str, float]:
        # By the mean loss of a token. So that more is better, the best step is that of the largest exp(-loss).
        tasks = self._taskset.tasks(split)[: self._config.evaluate_n]
        losses = await self._updater.losses(await attempts(method, self._taskset.scorers, tasks, 1, limits))
        loss = sum(total for total, _ in losses) / sum(count for _, count in losses)
        low, high = normal_interval([total / count for total, count in losses])
        likely, half = math.exp(-loss), (high - low) / 2
        cell = Cell(likely, likely, len(losses), math.exp(-loss - half), math.exp(-loss + half))
        self._progress = replace(self._progress, validated=step)
        await self._record_validation(step, split, "probability of a token (geometric mean)", cell)
        return {"validation_em": likely, "validation_loss": loss}

    async def _record_validation(self, step: int, split: str, measure: str, cell: Cell) -> None:
        data = {"step": step, "split": split, "measure": measure, **asdict(cell)}
        await self._recorder.record(result_event("validation", data))
        before = self._progress.best
        is_better = before is None or cell.em > before.em
        self._progress = replace(self._progress, not_better=0 if is_better else self._progress.not_better + 1)
        if before is None or cell.em >= before.em:  # of equal ones, the last
            self._progress = replace(self._progress, best=BestStep(step, cell.em))
            if self._config.checkpoint_every == 0:
                self._best_weights = await run_in_thread(weights_on_cpu, self._policy.model)

    def _take_snapshot(self) -> Snapshot:
        self._saved_step = self._progress.step
        state = self._updater.state(state_folder(self._folder), copy=self._saves_copies)
        weights = weights_on_cpu(self._policy.model, copy=self._saves_copies)
        return Snapshot(self._progress, weights, state, self._monitor)

    def _write(self, snapshot: Snapshot) -> None:
        policy, keep = self._policy, self._config.checkpoint_keep
        save_checkpoint(self._folder, snapshot, policy.model, policy.tokenizer, keep, images=policy.images)
        _trim_heap()

    def _save_final_model(self) -> None:
        policy, best = self._policy, self._progress.best
        if best is not None and best.step != self._progress.step:
            self._updater.load_weights(self._best_weights or self._read_best(best.step))
            self._updater.publish()  # a trainer in other processes copies its weights to the policy
        save_model(self._folder, policy.model, policy.tokenizer, images=policy.images)

    def _read_best(self, step: int) -> Mapping[str, Tensor]:
        folder = self._folder / CHECKPOINTS / f"{STEP}{step}"
        try:
            check_manifest(folder)
        except CorruptCheckpoint as error:
            lost = f"the weights of step {step}, the best by validation, are lost: {error}"
            raise CheckpointError(f"{lost}; resume the run to end it with those of its last step") from error
        return read_weights(folder, self._policy.model)
