"""What is kept of a run: checkpoints as it goes, the best by validation, the final model."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from agent_r1.core.events import Recorder
from agent_r1.core.taskset import TaskSet
from agent_r1.rollout.agent_loop import Agent
from agent_r1.trainer.learner import Learner
from agent_r1.training.build import Policy, limits_of
from agent_r1.training.checkpoint.async_writer import Saver
from agent_r1.training.checkpoint.files import (
    Best,
    CheckpointError,
    Position,
    Snapshot,
    copied,
    save_checkpoint,
    save_model,
)
from agent_r1.training.checkpoint.restore import Start
from agent_r1.training.config import TrainConfig
from agent_r1.training.evaluate import Method, answers_of
from agent_r1.training.monitor.state import DoctorState


class Keeper:
    """Validates and saves after optimizer steps; at the end the best weights become the model.

    The best is chosen on the world's validation split alone. Where nothing is validated, the last is kept. Where
    checkpoints are kept, each new best is one of them.
    """

    def __init__(
        self,
        policy: Policy,
        world: TaskSet,
        learner: Learner,
        agent: Agent,
        config: TrainConfig,
        folder: Path,
        start: Start,
        recorder: Recorder,
    ) -> None:
        self._policy, self._world, self._learner = policy, world, learner
        self._agent, self._config, self._folder = agent, config, folder
        self._best: Best | None = start.position.best
        self._best_weights: Mapping[str, Tensor] = start.best
        self._saver = Saver(self._write, recorder)
        self._snapshot: Snapshot | None = None
        self._validated = start.position.validated
        self._saved, self._position, self._doctor = start.position.step, start.position, start.doctor

    async def after(self, position: Position, doctor: DoctorState) -> dict[str, float]:
        """What is due at a position, before weights move again; the validation's measures, where it was.

        The best of the position is this keeper's to say. ``doctor`` is what the doctor remembers by then.

        Raises CheckpointError where the save before failed.
        """
        measured: dict[str, float] = {}
        step = position.step
        if self._due(step, self._config.evaluate_every):
            measured = await self._validate(step)
        self._position, self._doctor = replace(position, best=self._best, validated=self._validated), doctor
        every = self._config.checkpoint_every
        if self._due(step, every) or (every > 0 and self._best is not None and self._best.step == step):
            await self._saver.settled()
            self._snapshot = self._taken()
        return measured

    def _taken(self) -> Snapshot:
        self._saved = self._position.step
        return Snapshot(self._position, copied(self._policy.model), self._learner.state(), self._doctor)

    def save(self) -> None:
        """Begin to save the snapshot that was taken. The step must be in the ledger by now: a checkpoint is proof
        that the ledger holds all before it."""
        if self._snapshot is not None:
            self._saver.start(self._snapshot)
            self._snapshot = None

    async def stop(self) -> None:
        """Save the last position, before anything of a further step has changed the learner; returns when it is on
        the disk. Nothing is saved where no checkpoints are wanted. Raises CheckpointError."""
        await self._saver.settled()
        if self._config.checkpoint_every > 0 and self._saved != self._position.step:
            self._saver.start(self._taken())
            await self._saver.settled()

    async def settle(self) -> None:
        """Wait until nothing is being saved, whether that succeeds or not."""
        with suppress(CheckpointError):
            await self._saver.settled()

    def _write(self, snapshot: Snapshot) -> None:
        save_checkpoint(
            self._folder, snapshot, self._policy.model, self._policy.tokenizer, self._config.checkpoint_keep
        )

    def _due(self, step: int, every: int) -> bool:
        return every > 0 and (step % every == 0 or step == self._config.steps)

    async def validate_last(self) -> dict[str, float]:
        """The measures of the last step, where it had not been the last one when it was taken."""
        if self._config.evaluate_every == 0 or self._validated == self._config.steps:
            return {}
        await self._saver.settled()
        measured = await self._validate(self._config.steps)
        self._position = replace(self._position, best=self._best, validated=self._validated)
        if self._config.checkpoint_every > 0:
            self._saver.start(self._taken())  # else a run that is extended would not know of this best
        return measured

    async def _validate(self, step: int) -> dict[str, float]:
        split = self._world.validation
        assert split is not None, "it was not looked at when the run began"
        method = Method("validation", self._agent, self._world.env)
        count = self._config.evaluate_n
        answers = await answers_of(method, self._world, split, count, limits_of(self._config))
        em = statistics.fmean(answer.em for answer in answers)
        self._validated = step
        if self._best is None or em >= self._best.em:
            self._best, self._best_weights = Best(step, em), copied(self._policy.model)
        return {"validation_em": em, "validation_f1": statistics.fmean(answer.f1 for answer in answers)}

    async def choose(self) -> None:
        """Give the model its best weights, and save it. Raises CheckpointError, also where the last save failed."""
        try:
            await self._saver.settled()
        finally:
            if self._best is not None:
                self._learner.adopt(self._best_weights)
            save_model(self._folder, self._policy.model, self._policy.tokenizer)
