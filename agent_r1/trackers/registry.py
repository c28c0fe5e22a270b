"""The trackers that a user can select by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from agent_r1.core.packages import require_extra
from agent_r1.trackers.mlflow import MlflowTracker
from agent_r1.trackers.protocol import TrackedRun, Tracker
from agent_r1.trackers.tensorboard import TensorBoardTracker
from agent_r1.trackers.trackio import TrackioTracker
from agent_r1.trackers.wandb import WandbTracker

TrackerName = Literal["tensorboard", "wandb", "trackio", "mlflow"]
"""The name of a tracker, of its package, and of the extra that installs the package."""

TRACKERS: Mapping[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "trackio": TrackioTracker,
    "mlflow": MlflowTracker,
}


def require_trackers(names: Iterable[TrackerName]) -> None:
    """Raise InvalidInput if the package of a tracker is not installed. The packages are not imported."""
    for name in names:
        require_extra(name, name)
