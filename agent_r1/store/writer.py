"""Writing a run down: one thread, one transaction for all events that wait together."""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_r1.core.errors import AgentR1Error, InvalidInput
from agent_r1.core.events import Event
from agent_r1.core.threads import WorkerThread
from agent_r1.store.rows import insert_statements
from agent_r1.store.schema import check_schema, close_writer, open_writer, run_name
from agent_r1.store.segment import latest_segment, open_segment

LOCKS = Path("/proc/locks")
"""The locks that are held, a line each: "1: FLOCK ADVISORY WRITE 6194 fe:00:2146482 0 EOF"."""


class RunWriteError(AgentR1Error):
    """Events could not be written: they contradict the ledger, or the disk failed."""


@dataclass(slots=True)
class Submission:
    """The events of one ``record`` call, and the error if they were refused."""

    events: tuple[Event, ...]
    error: RunWriteError | None = None


class RunWriter:
    """A :class:`~agent_r1.core.events.Recorder` over ``run.db``.

    Recording is a group commit: whatever waits while a transaction is being synced becomes the next
    transaction, so that many episodes share one fsync. An attempt is dispatched before anything else is
    said of it, finishes at most once and meets at most one fate; events that contradict this raise
    RunWriteError to their caller alone. After a failed commit the ledger refuses everything: what the disk
    then holds is only what was acknowledged before.

    ``run`` is the run's name, by which its attempts are called, wherever its folder lies by now. What is recorded
    belongs to the newest segment. One process at a time writes a run: InvalidInput to others, and
    where ``path`` is of another schema.
    """

    def __init__(self, path: Path) -> None:
        self._lock = _lock(path.parent)
        try:
            self._connection = _opened(path)
        except BaseException:
            os.close(self._lock)
            raise
        self.run = run_name(self._connection)
        self._lineage = latest_segment(self._connection)
        self._waiting: deque[Submission] = deque()
        self._failure: RunWriteError | None = None
        self._worker = WorkerThread("run writer", lambda: RunWriteError("the run was closed; nothing more can be written"))

    def open_segment(self, step: int, config: Mapping[str, Any]) -> None:
        """Go on from the checkpoint of ``step`` in a new segment, under ``config``, before anything is recorded.

        What the checkpoint does not know of is superseded, as :func:`agent_r1.store.segment.open_segment` says.
        Raises InvalidInput where the run never came to ``step``, RunWriteError where the disk fails.
        """
        try:
            self._lineage = open_segment(self._connection, step, config)  # the thread waits for its first event
        except sqlite3.Error as error:
            raise RunWriteError(f"no segment could be opened: {error}") from error

    async def record(self, *events: Event) -> None:
        """Write events down, in order, all or none; returns when they are on the disk. Raises RunWriteError."""
        submission = Submission(events)
        self._waiting.append(submission)
        await self._worker.run(self._commit_waiting)
        if submission.error is not None:
            raise submission.error

    def close(self) -> None:
        """Write what still waits, then release the file."""
        self._worker.close(wait=True)
        close_writer(self._connection)
        os.close(self._lock)

    def _commit_waiting(self) -> None:
        """Commit all events that wait in one transaction: none if an earlier job took this caller's along."""
        batch = [self._waiting.popleft() for _ in range(len(self._waiting))]
        if not batch:
            return
        for submission, error in zip(batch, self._commit(batch), strict=True):
            submission.error = error

    def _commit(self, batch: Sequence[Submission]) -> list[RunWriteError | None]:
        if self._failure is None:
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                errors = [self._apply(submission.events) for submission in batch]
                self._connection.execute("COMMIT")
                return errors
            except Exception as error:  # an exception lost in this thread would leave every caller waiting
                self._failure = RunWriteError(f"the run can no longer be written: {error}")
                self._connection.close()
        return [self._failure] * len(batch)

    def _apply(self, events: Sequence[Event]) -> RunWriteError | None:
        try:
            rows = [insert for event in events for insert in insert_statements(event, self._lineage)]
        except Exception as error:  # one event that cannot be encoded must not fail its neighbours
            return RunWriteError(f"an event cannot be encoded: {error!r}")
        self._connection.execute("SAVEPOINT submission")
        refused = None
        for insert in rows:
            try:
                self._connection.executemany(insert.sql, insert.rows)
            except sqlite3.IntegrityError as error:
                refused = RunWriteError(f"{insert.table} of {insert.rows[0][0]}: {error}")
                self._connection.execute("ROLLBACK TO submission")
                break
        self._connection.execute("RELEASE submission")
        return refused


def _lock(folder: Path) -> int:
    """A lock on the run, held until the descriptor is closed or the process ends, however it ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        got = f"{folder}, which another process is writing{_holder(folder)}"
        raise InvalidInput("run", got=got, do="wait until it has ended, or end it") from None
    return descriptor


def _holder(folder: Path) -> str:
    """Which process has the lock, as far as the kernel says: Linux does, of processes that this one can see."""
    found = folder.stat()
    name = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    with suppress(OSError):
        for line in LOCKS.read_text(encoding="ascii").splitlines():
            match line.split():
                case [_, "FLOCK", _, _, process, place, *_] if place == name:
                    return f" (process {process})"
    return ""


def _opened(path: Path) -> sqlite3.Connection:
    connection = open_writer(path)
    try:
        check_schema(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection
