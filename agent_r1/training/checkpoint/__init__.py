"""Checkpoints: saving during training, and continuing a run from its newest intact checkpoint.

The module ``manager`` decides when a checkpoint is saved, and the module ``restore`` continues a run. This package does
not export their names, because importing ``manager`` and ``restore`` imports the whole training room.
"""

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
