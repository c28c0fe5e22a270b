"""Log to Weights & Biases: online, or to a local folder if WANDB_MODE is ``offline``."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence

from agent_r1.core.packages import import_extra
from agent_r1.trackers.protocol import PROJECT, AttemptSample, RunEnd, TrackedRun

STEP = "step"
"""The metric on the horizontal axis of the charts. wandb's own step counter cannot go back after a resume."""


class WandbTracker:
    """A tracker that logs to wandb.

    wandb's environment variables, such as WANDB_PROJECT and WANDB_MODE, work as usual. The default project is
    ``agent-r1``.
    """

    def __init__(self, run: TrackedRun) -> None:
        self._wandb = import_extra("wandb", "wandb")
        name = run.saved_id("wandb") or uuid.uuid4().hex[:12]
        run.save_id("wandb", name)
        # Without the metadata that wandb collects: it contains the command line, which can contain credentials.
        # Without the capture of the console, which replaces sys.stdout.
        settings = self._wandb.Settings(console="off", x_disable_meta=True, x_save_requirements=False)
        self._run = self._wandb.init(
            id=name,
            name=run.name,
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            dir=str(run.folder),
            config=dict(run.settings),
            allow_val_change=True,
            resume="allow",
            reinit="create_new",
            save_code=False,
            settings=settings,
        )
        self._run.define_metric("*", step_metric=STEP)

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({STEP: step, **values})

    def log_attempts(self, step: int, attempts: Sequence[AttemptSample]) -> None:
        rows = [[step, attempt.name, attempt.summary, attempt.text] for attempt in attempts]
        table = self._wandb.Table(columns=["step", "attempt", "result", "conversation"], data=rows)
        self._run.log({STEP: step, "attempts": table})

    def finish(self, end: RunEnd) -> None:
        self._run.finish(exit_code=0 if end == "completed" else 1)
