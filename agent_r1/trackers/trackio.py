"""Log to Trackio: to a local database, or to a Space of the Hugging Face Hub."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial

from agent_r1.core.packages import import_extra
from agent_r1.trackers.protocol import PROJECT, AttemptSample, RunEnd, TrackedRun


class TrackioTracker:
    """A tracker that logs to trackio. ``trackio show`` shows the metrics.

    Trackio's environment variables, such as TRACKIO_PROJECT and TRACKIO_SPACE_ID, work as usual. The default project is
    ``agent-r1``.
    """

    def __init__(self, run: TrackedRun) -> None:
        self._trackio = import_extra("trackio", "trackio")
        for name in ("trackio", "trackio.utils", "trackio.run"):
            # trackio prints its messages on stdout, which belongs to the result of the command.
            vars(sys.modules[name])["print"] = partial(print, file=sys.stderr)
        known = run.saved_id("trackio") is not None
        run.save_id("trackio", run.name)
        self._run = self._trackio.init(
            project=os.environ.get("TRACKIO_PROJECT") or PROJECT,
            name=run.name,
            config=dict(run.settings),
            resume="allow" if known else "never",
            embed=False,
        )

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        # trackio stores JSON, which has no NaN
        self._run.log({name: value for name, value in values.items() if math.isfinite(value)}, step=step)

    def log_attempts(self, step: int, attempts: Sequence[AttemptSample]) -> None:
        traces = {
            f"attempts/{number}": self._trackio.Trace(
                [dict(message) for message in attempt.messages],
                metadata={"attempt": attempt.name, "result": attempt.summary},
            )
            for number, attempt in enumerate(attempts)
        }
        self._run.log(traces, step=step)

    def finish(self, end: RunEnd) -> None:
        self._run.finish()
