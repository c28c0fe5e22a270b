"""Training: the services of a run, the training loop, evaluation, checkpoints, the monitor, and the Python API."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent_r1.core.lazy import lazy_names
from agent_r1.training.progress import Progress, StepReport
from agent_r1.training.tables import Table, TrainReport

if TYPE_CHECKING:
    from agent_r1.training.api import Trainer as Trainer
    from agent_r1.training.build import Placement as Placement
    from agent_r1.training.build import Runtime as Runtime
    from agent_r1.training.build import build_runtime as build_runtime

__all__ = ["Placement", "Progress", "Runtime", "StepReport", "Table", "TrainReport", "Trainer", "build_runtime"]

# Each name is imported when it is first used, because the modules of the names import torch.
__getattr__ = lazy_names(__name__, {"api": ("Trainer",), "build": ("Placement", "Runtime", "build_runtime")})
