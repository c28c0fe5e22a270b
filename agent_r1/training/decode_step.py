"""The implementation of a run's decode steps. It is recorded when the run begins, and kept when the run is resumed."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from agent_r1.core.events import LogEvent
from agent_r1.core.inference import InferenceEngine
from agent_r1.inference.torch_engine import TorchEngine
from agent_r1.store import RunReader
from agent_r1.training.checkpoint.restore import INEXACT
from agent_r1.training.resume import DECODE_STEP, TORCH, recorded_decode_step


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
    if engine.decode_step == before:
        return ()
    changed = f"decode steps are computed by {engine.decode_step} instead of {before}"
    detail = f"{changed}: results differ in their last bits from those of an uninterrupted run"
    return LogEvent(DECODE_STEP, engine.decode_step), LogEvent(INEXACT, detail)
