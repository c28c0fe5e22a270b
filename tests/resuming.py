"""What tests of resuming share: a run of a few small steps, images of it as a kill would leave it, and what it made."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import scenarios
from micro import Made, made_by

from agent_r1.config import Layer, resolve
from agent_r1.core.taskset import TaskSet
from agent_r1.training import run
from agent_r1.training.config import TrainConfig
from agent_r1.training.report import Silence, StepReport
from agent_r1.training.resume import resumed

STEPS = 10
MICRO: Mapping[str, Any] = {**scenarios.MICRO, "steps": STEPS}
EVERYTHING: Mapping[str, Any] = {**scenarios.EVERYTHING.settings, "steps": 6}


def config_of(world: TaskSet, folder: Path, settings: Mapping[str, Any]) -> TrainConfig:
    layers = [Layer("test", {**MICRO, **settings, "run": str(folder)}), Layer("recipe", world.recipe)]
    return resolve(TrainConfig, layers)


class Images(Silence):
    """Progress that copies a run's folder as each step is in its ledger and its checkpoint is not yet begun.

    The image ``step-K`` is what a kill at that moment leaves: the newest checkpoint is that of step K - 1.
    """

    def __init__(self, folder: Path, into: Path) -> None:
        self._folder, self._into = folder, into

    def stepped(self, report: StepReport) -> None:
        shutil.copytree(self._folder, self._into / f"step-{report.step}")


def train_with_images(world: TaskSet, place: Path, settings: Mapping[str, Any]) -> Made:
    """Train in ``place/whole``; the images stand beside it."""
    whole = place / "whole"
    run.train(config_of(world, whole, settings), world, Images(whole, place))
    return made_by(whole)


@dataclass(frozen=True, slots=True)
class Whole:
    """A run that never stopped, what it made, and the images beside it."""

    world: TaskSet
    place: Path
    made: Made

    def stopped(self, step: int, to: Path) -> Path:
        """The run as a kill leaves it while the checkpoint of ``step`` is the newest, somewhere else."""
        return Path(shutil.copytree(self.place / f"step-{step + 1}", to / "stopped"))


def resume(world: TaskSet, folder: Path, **settings: Any) -> Made:
    run.resume(resumed([Layer("test", {"run": str(folder), **settings})]), world, Silence())
    return made_by(folder)
