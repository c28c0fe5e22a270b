"""The state of a run at the beginning of training: new, or from the newest intact checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from agent_r1.core.errors import InvalidInput
from agent_r1.core.events import Event, LogEvent, PolicyPublished
from agent_r1.model.load import read_weights
from agent_r1.store.manifest import CHECKPOINTS, STEP, CorruptCheckpoint, checkpoint_step, list_checkpoints
from agent_r1.store.reader import RunReader
from agent_r1.trainer.protocol import TrainerState
from agent_r1.trainer.updater import PolicyUpdater
from agent_r1.training.checkpoint.files import (
    CORRUPT,
    LatestCheckpoint,
    SkippedCheckpoint,
    TrainProgress,
    copy_weights,
    find_latest_checkpoint,
    load_checkpoint,
    quarantine,
)
from agent_r1.training.monitor.state import MonitorState
from agent_r1.training.policy import Policy

RESUMED = "resumed"

INEXACT = "inexact"
"""The kind of the event about possible differences between a resumed run and an uninterrupted run."""


@dataclass(frozen=True, slots=True, eq=False)
class ResumeState:
    """The state of a run at the beginning of training, without the state of the trainer.

    Attributes:
        events: the events that the run records first.
        best_weights: the weights of the step ``progress.best``; empty without a best step.
    """

    progress: TrainProgress
    monitor: MonitorState
    events: tuple[Event, ...]
    best_weights: Mapping[str, Tensor] = field(default_factory=dict)


def initial_state(updater: PolicyUpdater) -> ResumeState:
    return ResumeState(TrainProgress(), MonitorState(), (PolicyPublished(updater.publish().version),))


def restore_run(run: Path, policy: Policy, updater: PolicyUpdater) -> ResumeState:
    """Load the newest intact checkpoint of a run into ``policy`` and ``updater``. Return the rest of the run's state.

    If the run has never saved a checkpoint, ``policy`` and ``updater`` are unchanged, and the run restarts from step 0.
    Corrupt checkpoints that are newer than the loaded checkpoint are renamed.

    Raises:
        InvalidInput: the run did not begin with the weights of ``policy``; the checkpoint is of a different model;
            or the run has saved checkpoints, but all of them are corrupt or removed.
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
    return state if saved.progress.best is None else _with_best_weights(state, run, policy)


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
    """Return the newest intact checkpoint of the run, and the newer checkpoints that cannot be used.

    Raises:
        InvalidInput: the run saved checkpoints, but all are corrupt or removed.
    """
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


def _with_best_weights(state: ResumeState, run: Path, policy: Policy) -> ResumeState:
    """Read the weights of the best step, and return ``state`` with these weights.

    If the checkpoint of the best step is corrupt, return ``state`` without a best step, and with two more events, which
    say that the checkpoint is corrupt.
    """
    best = state.progress.best
    assert best is not None
    if best.step == state.progress.step:
        return replace(state, best_weights=copy_weights(policy.model))
    folder = run / CHECKPOINTS / f"{STEP}{best.step}"
    try:
        with closing(RunReader(run)) as reader:
            reader.check_checkpoint(folder)
    except CorruptCheckpoint as error:
        lost = LogEvent(CORRUPT, f"the best checkpoint by validation, of step {best.step}, is lost")
        events = (*state.events, _quarantine(SkippedCheckpoint(folder, str(error))), lost)
        return replace(state, progress=replace(state.progress, best=None), events=events)
    return replace(state, best_weights=dict(read_weights(folder, policy.model)))
