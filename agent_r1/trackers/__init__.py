"""Trackers: TensorBoard, Weights & Biases, Trackio and MLflow receive the metrics of a run while it trains."""

from agent_r1.trackers.protocol import AttemptSample, TrackedRun, Tracker
from agent_r1.trackers.recorder import TrackingRecorder
from agent_r1.trackers.registry import TrackerName

__all__ = ["AttemptSample", "TrackedRun", "Tracker", "TrackerName", "TrackingRecorder"]
