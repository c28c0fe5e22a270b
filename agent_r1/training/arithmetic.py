"""The implementations that decide the rounding errors of a run, apart from its settings.

They depend on the machine: on its processor, its compiler and its version of PyTorch. They are recorded when the run
begins, and compared when the run is resumed.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from agent_r1.core.events import LogEvent
from agent_r1.core.inference import InferenceEngine
from agent_r1.inference.torch_engine import TorchEngine
from agent_r1.store import RunReader
from agent_r1.trainer.protocol import Trainer
from agent_r1.training.checkpoint.restore import INEXACT
from agent_r1.training.resume import DECODE_STEP, TORCH, recorded_decode_step

UPDATE = "update"
"""The kind of an event that names who computes the products of updates, and whether updates share prefixes."""


def decode_step_events(engine: InferenceEngine, run: Path | None) -> tuple[LogEvent, ...]:
    """Return the events that record which implementation computes the decode steps.

    A new run has no event if the implementation is PyTorch. A resumed run has an event only if the implementation has
    changed. A second event then reports that results can differ in their last bits. If the engine is not embedded,
    there are no events.

    Args:
        engine: the engine of the policy.
        run: the folder of the resumed run; None if the run is new.
    """
    if not isinstance(engine, TorchEngine):
        return ()
    if run is None:
        return () if engine.decode_step == TORCH else (LogEvent(DECODE_STEP, engine.decode_step),)
    with closing(RunReader(run)) as reader:
        before = recorded_decode_step(reader)
    return _changes(DECODE_STEP, f"decode steps are computed by {engine.decode_step}", engine.decode_step, before)


def update_events(trainer: Trainer, run: Path | None) -> tuple[LogEvent, ...]:
    """Return the events that record how the trainer computes updates (:attr:`Trainer.arithmetic`).

    A resumed run has an event only if this has changed, and a second event as in :func:`decode_step_events`. Runs of
    earlier versions have no such event; then the first event is recorded when the run is resumed.

    Args:
        trainer: the trainer of the policy.
        run: the folder of the resumed run; None if the run is new.
    """
    recorded: list[str] = []
    if run is not None:
        with closing(RunReader(run)) as reader:
            recorded = [event.detail for event in reader.events() if event.kind == UPDATE]
    if not recorded:
        return (LogEvent(UPDATE, trainer.arithmetic),)
    return _changes(UPDATE, f"updates have {trainer.arithmetic}", trainer.arithmetic, recorded[-1])


def _changes(kind: str, report: str, now: str, before: str) -> tuple[LogEvent, ...]:
    """Return the events of a resumed run whose implementation is ``now`` and was ``before``: none if they are equal."""
    if now == before:
        return ()
    detail = f"{report} instead of {before}: results differ in their last bits from those of an uninterrupted run"
    return LogEvent(kind, now), LogEvent(INEXACT, detail)
