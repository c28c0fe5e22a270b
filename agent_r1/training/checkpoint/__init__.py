"""Checkpoints: saving during training, and continuing from the newest intact one.

``manager`` decides when to save, ``restore`` continues a run; they are imported from their modules, because they need
the whole training room.
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
