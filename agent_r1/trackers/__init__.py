"""Trackers: send the metrics of a run to TensorBoard, Weights & Biases, Trackio or MLflow during training."""

from agent_r1.trackers.protocol import AttemptSample, TrackedRun, Tracker
from agent_r1.trackers.recorder import TrackingRecorder
from agent_r1.trackers.registry import TrackerName

__all__ = ["AttemptSample", "TrackedRun", "Tracker", "TrackerName", "TrackingRecorder"]
