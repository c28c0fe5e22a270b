"""Asynchronous saving of checkpoints: one at a time, in a thread, while training continues."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from agent_r1.core.events import CheckpointSaved, Recorder
from agent_r1.core.threads import run_in_thread
from agent_r1.training.checkpoint.files import CheckpointError, Snapshot


class AsyncCheckpointWriter:
    """Runs ``write(snapshot)`` in a thread, and records each checkpoint that is on the disk.

    A failed save is not repeated. The run gets its error from :meth:`wait`, before the next snapshot or at its end.
    """

    def __init__(self, write: Callable[[Snapshot], object], recorder: Recorder) -> None:
        self._write, self._recorder = write, recorder
        self._task: asyncio.Task[CheckpointError | None] | None = None

    def start(self, snapshot: Snapshot) -> None:
        """Start saving a snapshot. Call :meth:`wait` for the previous save first."""
        self._task = asyncio.create_task(self._save(snapshot))

    async def wait(self) -> None:
        """Wait until no save is running. Raises CheckpointError, once, if the last save failed."""
        task, self._task = self._task, None
        error = None if task is None else await task
        if error is not None:
            raise error

    async def _save(self, snapshot: Snapshot) -> CheckpointError | None:
        try:
            await run_in_thread(self._write, snapshot)
        except CheckpointError as error:
            return error
        except Exception as error:  # any failure must end the run with one line, not with a traceback
            return CheckpointError(f"step {snapshot.progress.step} could not be saved: {error!r}")
        await self._recorder.record(CheckpointSaved(snapshot.progress.step))
        return None
