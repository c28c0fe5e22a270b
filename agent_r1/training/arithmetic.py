"""Events that name the implementations on which a run's rounding errors depend, such as PyTorch or C++ code.

The events are recorded when a run begins, and compared when the run is resumed.
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
"""The kind of an event. The text of the event tells how the trainer computes an update (``Trainer.arithmetic``)."""


def decode_step_events(engine: InferenceEngine, run: Path | None) -> tuple[LogEvent, ...]:
    """Return the events about the implementation of the embedded engine's decode steps.

    - New run: one event that names the implementation; none for PyTorch.
    - Resumed run: none if the implementation is unchanged. Otherwise one event names the new implementation, and a
      second event reports that results can differ in their last bits.
    - Engine on servers: none.

    ``run`` is the folder of the resumed run; None for a new run.
    """
    if not isinstance(engine, TorchEngine):
        return ()
    if run is None:
        return () if engine.decode_step == TORCH else (LogEvent(DECODE_STEP, engine.decode_step),)
    with closing(RunReader(run)) as reader:
        before = recorded_decode_step(reader)
    return _changes(DECODE_STEP, f"decode steps are computed by {engine.decode_step}", engine.decode_step, before)


def update_events(trainer: Trainer, run: Path | None) -> tuple[LogEvent, ...]:
    """Return the events about the implementation of updates (:attr:`Trainer.arithmetic`).

    - New run: one event that names the implementation.
    - Resumed run: none if the implementation is unchanged. Otherwise one event names the new implementation, and a
      second event reports that results can differ in their last bits.

    ``run`` is the folder of the resumed run; None for a new run.
    """
    recorded: list[str] = []
    if run is not None:
        with closing(RunReader(run)) as reader:
            recorded = [event.detail for event in reader.events() if event.kind == UPDATE]
    if not recorded:
        return (LogEvent(UPDATE, trainer.arithmetic),)
    return _changes(UPDATE, f"updates have {trainer.arithmetic}", trainer.arithmetic, recorded[-1])


def _changes(kind: str, report: str, now: str, before: str) -> tuple[LogEvent, ...]:
    """Return two events if a resumed run has a new implementation of the decode steps or of the updates; () otherwise.

    - The first event has the kind ``kind``. Its text is the name of the new implementation.
    - The second event warns that results differ in their last bits. Its text begins with ``report``.

    Args:
        now: the name of the implementation that the resumed run uses.
        before: the name of the implementation that the run used before it was resumed.
    """
    if now == before:
        return ()
    detail = f"{report} instead of {before}: results differ in their last bits from those of an uninterrupted run"
    return LogEvent(kind, now), LogEvent(INEXACT, detail)
