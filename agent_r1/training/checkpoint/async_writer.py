"""Asynchronous saving of checkpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from agent_r1.core.events import CheckpointSaved, Recorder
from agent_r1.core.threads import run_in_thread
from agent_r1.training.checkpoint.files import CheckpointError, Snapshot


class AsyncCheckpointWriter:
    """A writer that saves checkpoints in a thread, one at a time, while training continues."""

    def __init__(self, write: Callable[[Snapshot], object], recorder: Recorder) -> None:
        self._write, self._recorder = write, recorder
        self._task: asyncio.Task[CheckpointError | None] | None = None

    def start(self, snapshot: Snapshot) -> None:
        """Start saving a snapshot. Await :meth:`wait` first, so that the previous save is complete."""
        self._task = asyncio.create_task(self._save(snapshot))

    async def wait(self) -> None:
        """Wait until no save is running.

        Raises:
            CheckpointError: the last save failed. The error is raised once, and the save is not repeated.
        """
        task, self._task = self._task, None
        error = None if task is None else await task
        if error is not None:
            raise error

    async def _save(self, snapshot: Snapshot) -> CheckpointError | None:
        try:
            await run_in_thread(self._write, snapshot)
        except CheckpointError as error:
            return error
        except Exception as error:  # a CheckpointError ends the run with one line instead of a traceback
            return CheckpointError(f"step {snapshot.progress.step} could not be saved: {error!r}")
        await self._recorder.record(CheckpointSaved(snapshot.progress.step))
        return None
