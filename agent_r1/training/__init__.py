"""Training: build the services of a run, the training loop, evaluation, checkpoints, the monitor, and the Python API."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from agent_r1.training.progress import Progress, StepReport
from agent_r1.training.tables import Table, TrainReport

if TYPE_CHECKING:
    from agent_r1.training.api import Trainer as Trainer
    from agent_r1.training.build import Placement as Placement
    from agent_r1.training.build import Runtime as Runtime
    from agent_r1.training.build import build_runtime as build_runtime

__all__ = ["Placement", "Progress", "Runtime", "StepReport", "Table", "TrainReport", "Trainer", "build_runtime"]

_LAZY = {"Trainer": "api", "Placement": "build", "Runtime": "build", "build_runtime": "build"}
"""Names whose modules import torch, with their module: loaded when they are first used."""


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return vars(import_module(f"agent_r1.training.{_LAZY[name]}"))[name]
    raise AttributeError(f"module 'agent_r1.training' has no attribute {name!r}")
