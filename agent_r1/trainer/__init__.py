"""The policy update: the trainer protocol, two trainers, and the updater that calls a trainer.

Public names are imported at their first use, so ``agent_r1.trainer.config`` loads neither torch nor transformers.
"""

from typing import TYPE_CHECKING

from agent_r1.core.lazy import lazy_names

if TYPE_CHECKING:
    from agent_r1.trainer.config import TrainerConfig
    from agent_r1.trainer.oom_retry import OutOfMemory
    from agent_r1.trainer.protocol import OptimStats, PassStats, PreparedBatch, Trainer, TrainerState
    from agent_r1.trainer.report import Outcome, Trained
    from agent_r1.trainer.single_process import SingleProcessTrainer
    from agent_r1.trainer.updater import PolicyUpdater, SelectedGroup, UpdateReport

__all__ = [
    "OptimStats",
    "OutOfMemory",
    "Outcome",
    "PassStats",
    "PolicyUpdater",
    "PreparedBatch",
    "SelectedGroup",
    "SingleProcessTrainer",
    "Trained",
    "Trainer",
    "TrainerConfig",
    "TrainerState",
    "UpdateReport",
]

__getattr__ = lazy_names(
    __name__,
    {
        "config": ("TrainerConfig",),
        "oom_retry": ("OutOfMemory",),
        "report": ("Outcome", "Trained"),
        "protocol": ("OptimStats", "PassStats", "PreparedBatch", "Trainer", "TrainerState"),
        "single_process": ("SingleProcessTrainer",),
        "updater": ("PolicyUpdater", "SelectedGroup", "UpdateReport"),
    },
)
