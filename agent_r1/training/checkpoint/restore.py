"""Where training begins: with a model as it is, or where a run that stopped had come to."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from agent_r1.core.errors import InvalidInput
from agent_r1.core.events import Event, LogEvent, PolicyPublished
from agent_r1.core.weights import PolicyVersion
from agent_r1.model.load import load_model
from agent_r1.store.manifest import CHECKPOINTS, STEP, Damaged, checkpoints, step_of
from agent_r1.store.reader import RunReader
from agent_r1.trainer.learner import Learner
from agent_r1.training.build import Policy
from agent_r1.training.checkpoint.files import (
    DAMAGED,
    Found,
    Position,
    Skipped,
    copied,
    load_checkpoint,
    newest_whole,
    set_aside,
)
from agent_r1.training.monitor.state import DoctorState

RESUMED = "resumed"
"""The kind of the event that a resumed run begins with."""


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """Where a run stands when training begins, the best weights so far, and what is to be written down first."""

    position: Position
    doctor: DoctorState
    events: tuple[Event, ...]
    best: Mapping[str, Tensor] = field(default_factory=dict)


def published(version: PolicyVersion) -> PolicyPublished:
    """Return the record of weights that a step made."""
    return PolicyPublished(version.number, version.step, version.checksum or "")


def beginning(learner: Learner) -> Start:
    """The start of a new run."""
    return Start(Position(), DoctorState(), (published(learner.publish().version),))


def restore(run: Path, policy: Policy, learner: Learner) -> Start:
    """Bring the policy and its learner to the newest whole checkpoint of a run; they stay as they are where the run
    stopped too early to have one.

    The learner is one of the run's algorithm, on the model the run began with: that is its reference. Raises
    InvalidInput where the model is another, a checkpoint does not fit it, or none is left of those that were saved.
    """
    first = _first_version(run)
    began = beginning(learner)
    if first is not None and first.digest != learner.publish().version.checksum:
        do = "put back the one that the run began with, or begin a new run"
        raise InvalidInput("model", got="another than the run's", do=do)
    found = _newest_of(run)
    unwritten = began.events if first is None else ()  # it stopped before it had written its first line
    if found.folder is None:
        return replace(began, events=(*unwritten, LogEvent(RESUMED, "from its beginning")))
    saved = load_checkpoint(found.folder, policy.model, policy.tokenizer)
    policy.model.load_state_dict(_weights(found.folder, policy))
    learner.restore(saved.learner)
    skipped = tuple(_aside(one) for one in found.skipped)
    resumed = LogEvent(RESUMED, f"from step {saved.position.step}")
    start = Start(saved.position, saved.doctor, (*skipped, resumed))
    return start if saved.position.best is None else _with_best(start, run, policy)


def _newest_of(run: Path) -> Found:
    """The newest checkpoint that is whole and the run's own. Raises InvalidInput where all that it saved are gone."""
    with closing(RunReader(run)) as reader:
        found, saved, came_to = newest_whole(run, reader.check_checkpoint), reader.last_saved(), reader.last_step()
    if found.folder is None and (found.skipped or saved is not None):
        why = "; ".join(one.damage for one in found.skipped) or f"that of step {saved}, which was saved, is gone"
        got = f"{run}, which came to step {came_to} and has no whole checkpoint: {why}"
        raise InvalidInput("resume", got=got, do="put its checkpoints back, or begin a new run")
    if saved is None or any(step_of(there) >= saved for there in checkpoints(run)):
        return found
    gone = f"the checkpoint of step {saved}, which was saved, is gone"
    return replace(found, skipped=(Skipped(run / CHECKPOINTS / f"{STEP}{saved}", gone), *found.skipped))


def _aside(skipped: Skipped) -> LogEvent:
    """What is said of a checkpoint that is passed over, once it is out of the way."""
    if not skipped.folder.exists():
        return LogEvent(DAMAGED, skipped.damage)
    try:
        return LogEvent(DAMAGED, f"{skipped.damage}; it is {set_aside(skipped.folder).name} now")
    except OSError as error:
        do = "see that it can be written"
        raise InvalidInput("run", got=f"{skipped.folder}, which cannot be renamed: {error}", do=do) from error


def _first_version(run: Path) -> PolicyPublished | None:
    """The weights that a run began with, None where it had not begun."""
    with closing(RunReader(run)) as reader:
        return next(reader.versions(), None)


def _weights(folder: Path, policy: Policy) -> Mapping[str, Tensor]:
    return load_model(str(folder), policy.model.dtype).state_dict()


def _with_best(start: Start, run: Path, policy: Policy) -> Start:
    """The start with its best weights; with none, and an event that says so, where their checkpoint is damaged."""
    best = start.position.best
    assert best is not None
    if best.step == start.position.step:
        return replace(start, best=copied(policy.model))
    folder = run / CHECKPOINTS / f"{STEP}{best.step}"
    try:
        with closing(RunReader(run)) as reader:
            reader.check_checkpoint(folder)
    except Damaged as damage:
        lost = LogEvent(DAMAGED, f"the best by validation, of step {best.step}, is lost")
        events = (*start.events, _aside(Skipped(folder, str(damage))), lost)
        return replace(start, position=replace(start.position, best=None), events=events)
    return replace(start, best=dict(_weights(folder, policy)))
