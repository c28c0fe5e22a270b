"""Validation and saving during training: checkpoints, the best step by validation, the final model."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from agent_r1.core.events import Recorder
from agent_r1.core.threads import run_in_thread
from agent_r1.training.build import Runtime, rollout_limits
from agent_r1.training.checkpoint.async_writer import AsyncCheckpointWriter
from agent_r1.training.checkpoint.files import (
    BestStep,
    CheckpointError,
    Snapshot,
    TrainProgress,
    copy_weights,
    save_checkpoint,
    save_model,
)
from agent_r1.training.checkpoint.restore import ResumeState
from agent_r1.training.evaluate import Method, evaluate_split
from agent_r1.training.monitor.state import MonitorState


class CheckpointManager:
    """Validates and saves after optimizer steps; at the end the best weights become the final model.

    The best step is chosen on the validation split only; without validation the last step is the best. If checkpoints
    are saved, each new best step gets one. Copies of weights are made in a thread, so that the event loop is not
    blocked; the next update must wait for them.
    """

    def __init__(
        self,
        runtime: Runtime,
        folder: Path,
        start: ResumeState,
        recorder: Recorder,
    ) -> None:
        self._policy, self._taskset, self._updater = runtime.policy, runtime.taskset, runtime.updater
        self._agent, self._config, self._folder = runtime.agent, runtime.config, folder
        self._best_weights: Mapping[str, Tensor] = start.best_weights
        self._writer = AsyncCheckpointWriter(self._write, recorder)
        self._snapshot: Snapshot | None = None
        self._saved_step = start.progress.step
        self._progress, self._monitor = start.progress, start.monitor

    async def on_step_end(self, progress: TrainProgress, monitor: MonitorState) -> dict[str, float]:
        """Run validation and take a snapshot if due at this step. Call it before the weights change again.

        Returns:
            The validation metrics, empty if there was no validation.

        Raises:
            CheckpointError: if the previous save failed.
        """
        step, before = progress.step, self._progress
        self._progress, self._monitor = replace(progress, best=before.best, validated=before.validated), monitor
        metrics = await self._validate(step) if self._is_due(step, self._config.evaluate_every) else {}
        best, every = self._progress.best, self._config.checkpoint_every
        if self._is_due(step, every) or (every > 0 and best is not None and best.step == step):
            await self._writer.wait()
            self._snapshot = await run_in_thread(self._take_snapshot)
        return metrics

    def start_saving(self) -> None:
        """Start saving the snapshot, if one was taken.

        The step must have been recorded before: a checkpoint implies that the database has everything up to it.
        """
        if self._snapshot is not None:
            self._writer.start(self._snapshot)
            self._snapshot = None

    async def save_now(self) -> None:
        """Save the last step if it has no checkpoint yet, and return when it is on the disk. Raises CheckpointError.

        Does nothing if checkpoints are disabled. The trainer must not have changed since the last step.
        """
        await self._writer.wait()
        if self._config.checkpoint_every > 0 and self._saved_step != self._progress.step:
            self._writer.start(await run_in_thread(self._take_snapshot))
            await self._writer.wait()

    async def wait(self) -> None:
        """Wait until no save is running, and ignore its error."""
        with suppress(CheckpointError):
            await self._writer.wait()

    async def validate_last_step(self) -> dict[str, float]:
        """Validate the last step if that is still missing, and return the metrics.

        That is the case if the run was extended or shortened, so that the step was not the last when it was taken.
        """
        if self._config.evaluate_every == 0 or self._progress.validated == self._config.steps:
            return {}
        await self._writer.wait()
        metrics = await self._validate(self._config.steps)
        if self._config.checkpoint_every > 0:
            # Otherwise a run that is extended would not know this best step.
            self._writer.start(await run_in_thread(self._take_snapshot))
        return metrics

    async def finalize(self) -> None:
        """Load the best weights into the model and save it. Raises CheckpointError, also if the last save failed."""
        try:
            await self._writer.wait()
        finally:
            await run_in_thread(self._save_final_model)

    def _is_due(self, step: int, every: int) -> bool:
        return every > 0 and (step % every == 0 or step == self._config.steps)

    async def _validate(self, step: int) -> dict[str, float]:
        split = self._taskset.validation
        assert split is not None, "the configuration was checked before the run began"
        method = Method("validation", self._agent, self._taskset.env)
        limits = rollout_limits(self._config)
        results = await evaluate_split(method, self._taskset, split, self._config.evaluate_n, limits)
        em = statistics.fmean(result.em for result in results)
        self._progress = replace(self._progress, validated=step)
        if self._progress.best is None or em >= self._progress.best.em:
            self._progress = replace(self._progress, best=BestStep(step, em))
            self._best_weights = await run_in_thread(copy_weights, self._policy.model)
        return {"validation_em": em, "validation_f1": statistics.fmean(result.f1 for result in results)}

    def _take_snapshot(self) -> Snapshot:
        self._saved_step = self._progress.step
        return Snapshot(self._progress, copy_weights(self._policy.model), self._updater.state(), self._monitor)

    def _write(self, snapshot: Snapshot) -> None:
        policy, keep = self._policy, self._config.checkpoint_keep
        save_checkpoint(self._folder, snapshot, policy.model, policy.tokenizer, keep)

    def _save_final_model(self) -> None:
        if self._progress.best is not None:
            self._updater.load_weights(self._best_weights)
            self._updater.publish()  # brings the policy's module up to date, wherever the trainer's processes are
        save_model(self._folder, self._policy.model, self._policy.tokenizer)
