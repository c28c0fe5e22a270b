"""Log to TensorBoard: write event files to the folder of the run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from agent_r1.trackers.protocol import AttemptSample, RunEnd, TrackedRun


class TensorBoardTracker:
    """A tracker that writes event files to ``RUN/tensorboard``. ``tensorboard --logdir runs`` shows the files.

    After a resume, TensorBoard hides the earlier values of the repeated steps.
    """

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter  # imports the package tensorboard

        first = None if run.step is None else run.step + 1
        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=first, flush_secs=10)
        self._writer.add_text("settings", _as_code(json.dumps(run.settings, indent=2)), run.step or 0)

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def log_attempts(self, step: int, attempts: Sequence[AttemptSample]) -> None:
        for number, attempt in enumerate(attempts):
            self._writer.add_text(f"attempts/{number}", _as_code(attempt.text), step)

    def finish(self, end: RunEnd) -> None:
        self._writer.close()


def _as_code(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.split("\n"))
