"""Validation and saving during training: checkpoints, the best step by validation, and the final model."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from torch import Tensor

from agent_r1.core.events import Recorder
from agent_r1.core.threads import run_in_thread
from agent_r1.store.results import result_event
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
    state_folder,
)
from agent_r1.training.checkpoint.restore import ResumeState
from agent_r1.training.evaluate import Method, evaluate_split
from agent_r1.training.monitor.state import MonitorState
from agent_r1.training.tables import make_cell


class CheckpointManager:
    """A manager that validates the policy, saves checkpoints, and saves the final model.

    The final model has the weights of the best step. Without validation, it has the weights of the last step. If
    checkpoints are enabled, each new best step gets a checkpoint.
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
        self._recorder = recorder
        self._writer = AsyncCheckpointWriter(self._write, recorder)
        self._snapshot: Snapshot | None = None
        self._saved_step = start.progress.step
        self._progress, self._monitor = start.progress, start.monitor

    @property
    def best(self) -> BestStep | None:
        """The best step by validation so far; None if no step was validated."""
        return self._progress.best

    async def validate_if_due(self, progress: TrainProgress) -> dict[str, float]:
        """Evaluate the policy on the validation tasks, if a validation is due after the step ``progress.step``.

        After each update, call this method, then :meth:`copy_if_due`, and only then start the next update.

        Return metrics such as {"validation_em": 0.62, "validation_f1": 0.65}; {} if no validation was due.
        """
        before = self._progress
        self._progress = replace(progress, best=before.best, validated=before.validated)
        return await self._validate(progress.step) if self._is_due(progress.step, self._config.evaluate_every) else {}

    async def copy_if_due(self, monitor: MonitorState) -> None:
        """If a checkpoint is due, copy the content of the checkpoint: weights, trainer state and ``monitor``.

        :meth:`start_saving` writes the copy to disk later.

        Raises CheckpointError if a checkpoint is due and the previous save failed.
        """
        self._monitor = monitor
        step, best, every = self._progress.step, self._progress.best, self._config.checkpoint_every
        if self._is_due(step, every) or (every > 0 and best is not None and best.step == step):
            await self._writer.wait()
            self._snapshot = await run_in_thread(self._take_snapshot)

    def start_saving(self) -> None:
        """Start to write the copy that :meth:`copy_if_due` made. If there is no copy, do nothing.

        The database must contain all rows up to the step of a checkpoint, so record the step first.
        """
        if self._snapshot is not None:
            self._writer.start(self._snapshot)
            self._snapshot = None

    async def save_now(self) -> None:
        """Write a checkpoint now, and wait until it is complete. Call this method before the next update.

        Do nothing if the latest step already has a checkpoint, or if checkpoints are disabled. Raises CheckpointError
        if this save or the previous save fails.
        """
        await self._writer.wait()
        if self._config.checkpoint_every > 0 and self._saved_step != self._progress.step:
            self._writer.start(await run_in_thread(self._take_snapshot))
            await self._writer.wait()

    async def wait(self) -> None:
        """Wait until no save is running. Errors of the save are ignored."""
        with suppress(CheckpointError):
            await self._writer.wait()

    async def validate_last_step(self) -> dict[str, float]:
        """Evaluate the policy on the validation tasks at the end of the run. Return the validation metrics.

        Return {} if the policy was already evaluated after the last step, or if validation is disabled.
        """
        if self._config.evaluate_every == 0 or self._progress.validated == self._config.steps:
            return {}
        await self._writer.wait()
        metrics = await self._validate(self._config.steps)
        if self._config.checkpoint_every > 0:
            # Save the last step again, with the result of this validation, for the case that the run is resumed with
            # more steps.
            self._writer.start(await run_in_thread(self._take_snapshot))
        return metrics

    async def finalize(self) -> None:
        """Load the best weights into the policy, and save the policy as the final model.

        Raises CheckpointError if this save or the last save of a checkpoint failed.
        """
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
        cell = asdict(make_cell(results))
        await self._recorder.record(result_event("validation", {"step": step, "split": split, **cell}))
        self._progress = replace(self._progress, validated=step)
        if self._progress.best is None or em >= self._progress.best.em:
            self._progress = replace(self._progress, best=BestStep(step, em))
            self._best_weights = await run_in_thread(copy_weights, self._policy.model)
        return {"validation_em": em, "validation_f1": statistics.fmean(result.f1 for result in results)}

    def _take_snapshot(self) -> Snapshot:
        self._saved_step = self._progress.step
        state = self._updater.state(state_folder(self._folder))
        return Snapshot(self._progress, copy_weights(self._policy.model), state, self._monitor)

    def _write(self, snapshot: Snapshot) -> None:
        policy, keep = self._policy, self._config.checkpoint_keep
        save_checkpoint(self._folder, snapshot, policy.model, policy.tokenizer, keep, images=policy.images)

    def _save_final_model(self) -> None:
        if self._progress.best is not None:
            self._updater.load_weights(self._best_weights)
            self._updater.publish()  # a trainer in other processes copies its weights to the policy
        policy = self._policy
        save_model(self._folder, policy.model, policy.tokenizer, images=policy.images)
