"""Log to MLflow: to a tracking server, or to a local SQLite file."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence

from agent_r1.core.packages import import_extra
from agent_r1.trackers.protocol import PROJECT, AttemptSample, RunEnd, TrackedRun

MAX_PARAMS = 100
"""The maximum number of settings in one MLflow request."""

STATUS: Mapping[RunEnd, str] = {"completed": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MlflowTracker:
    """A tracker that logs to MLflow.

    MLFLOW_TRACKING_URI selects a server, and MLFLOW_EXPERIMENT_NAME an experiment (default: ``agent-r1``).
    """

    def __init__(self, run: TrackedRun) -> None:
        mlflow = import_extra("mlflow", "mlflow")
        self._entities = mlflow.entities
        self._client = mlflow.MlflowClient()
        saved = run.saved_id("mlflow")
        if saved is not None:
            self._id = saved
            self._client.update_run(saved, status="RUNNING")
            return
        self._id = self._client.create_run(self._experiment(), run_name=run.name).info.run_id
        run.save_id("mlflow", self._id)
        params = [self._entities.Param(_valid_name(name), str(value)) for name, value in run.settings.items()]
        for first in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(self._id, params=params[first : first + MAX_PARAMS])

    def _experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        found = self._client.get_experiment_by_name(name)
        return str(self._client.create_experiment(name) if found is None else found.experiment_id)

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._entities.Metric(_valid_name(name), value, now, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def log_attempts(self, step: int, attempts: Sequence[AttemptSample]) -> None:
        text = "\n\n".join(attempt.text for attempt in attempts)
        self._client.log_text(self._id, text, f"attempts/step-{step:06}.txt")

    def finish(self, end: RunEnd) -> None:
        self._client.set_terminated(self._id, status=STATUS[end])


def _valid_name(name: str) -> str:
    return re.sub(r"[^/\w.\- :]", "_", name)[:250]
