"""Saving while training goes on: one save at a time, in a thread, whose failure is told at the next."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from agent_r1.core.events import CheckpointSaved, Recorder
from agent_r1.core.threads import run_in_thread
from agent_r1.training.checkpoint.files import CheckpointError, Snapshot


class AsyncCheckpointWriter:
    """Gives snapshots to ``write`` in a thread, and writes down which are on the disk.

    A save that failed, for whatever reason, is not tried again; the run learns of it from ``settled``, before its next
    snapshot and at its end.
    """

    def __init__(self, write: Callable[[Snapshot], object], recorder: Recorder) -> None:
        self._write, self._recorder = write, recorder
        self._under_way: asyncio.Task[CheckpointError | None] | None = None

    def start(self, snapshot: Snapshot) -> None:
        """Begin to save; the save before must have settled."""
        self._under_way = asyncio.create_task(self._save(snapshot))

    async def settled(self) -> None:
        """Wait until nothing is being saved. Raises CheckpointError, once, where the last save failed."""
        under_way, self._under_way = self._under_way, None
        error = None if under_way is None else await under_way
        if error is not None:
            raise error

    async def _save(self, snapshot: Snapshot) -> CheckpointError | None:
        try:
            await run_in_thread(self._write, snapshot)
        except CheckpointError as error:
            return error
        except Exception as error:  # whatever it is, the run that waits for it ends in one line
            return CheckpointError(f"step {snapshot.position.step} could not be saved: {error!r}")
        await self._recorder.record(CheckpointSaved(snapshot.position.step))
        return None
