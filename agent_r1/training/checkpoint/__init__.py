"""Checkpoints: saving during training, and continuing a run from its newest intact checkpoint."""

from agent_r1.training.checkpoint.files import (
    Checkpoint,
    CheckpointError,
    Snapshot,
    TrainProgress,
    copy_weights,
    find_latest_checkpoint,
    find_trained_model,
    load_checkpoint,
    save_checkpoint,
    save_model,
)

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Snapshot",
    "TrainProgress",
    "copy_weights",
    "find_latest_checkpoint",
    "find_trained_model",
    "load_checkpoint",
    "save_checkpoint",
    "save_model",
]
