"""Shared by the tests of resuming: a small run, copies of its folder after each step, and its results."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import scenarios
from micro_run import RunResult, result_of

from agent_r1.config import Layer, resolve
from agent_r1.core.taskset import TaskSet
from agent_r1.training import run
from agent_r1.training.config import TrainConfig
from agent_r1.training.progress import SilentProgress, StepReport
from agent_r1.training.resume import resolve_resume_config

STEPS = 6
MICRO: Mapping[str, Any] = {**scenarios.MICRO, "steps": STEPS}
EVERYTHING: Mapping[str, Any] = {**scenarios.EVERYTHING.settings, "steps": 6}


def config_of(taskset: TaskSet, folder: Path, settings: Mapping[str, Any]) -> TrainConfig:
    layers = [Layer("test", {**MICRO, **settings, "run": str(folder)}), Layer("recipe", taskset.recipe)]
    return resolve(TrainConfig, layers)


class Images(SilentProgress):
    """Progress that copies a run's folder after each step was recorded and before its checkpoint is started.

    The copy ``step-K`` is what a kill at that moment leaves: the newest checkpoint is that of step K - 1.
    """

    def __init__(self, folder: Path, into: Path) -> None:
        self._folder, self._into = folder, into

    def on_step(self, report: StepReport) -> None:
        shutil.copytree(self._folder, self._into / f"step-{report.step}")


def train_with_images(taskset: TaskSet, place: Path, settings: Mapping[str, Any]) -> RunResult:
    """Train in ``place/whole``; the copies are beside it."""
    whole = place / "whole"
    run.train(config_of(taskset, whole, settings), taskset, Images(whole, place))
    return result_of(whole)


@dataclass(frozen=True, slots=True)
class Whole:
    """An uninterrupted run, its results, and the copies beside it."""

    taskset: TaskSet
    place: Path
    result: RunResult

    def stopped(self, step: int, to: Path) -> Path:
        """Return a copy of the run as a kill leaves it when the checkpoint of ``step`` is the newest."""
        return Path(shutil.copytree(self.place / f"step-{step + 1}", to / "stopped"))


def resume(taskset: TaskSet, folder: Path, **settings: Any) -> RunResult:
    run.resume(resolve_resume_config([Layer("test", {"run": str(folder), **settings})]), taskset, SilentProgress())
    return result_of(folder)
