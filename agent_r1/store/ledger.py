"""Writing a run down: one thread, one transaction for all events that wait together."""

from __future__ import annotations

import asyncio
import fcntl
import os
import queue
import sqlite3
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_r1.core.errors import AgentR1Error, InvalidInput
from agent_r1.core.events import Event
from agent_r1.store.rows import inserts
from agent_r1.store.schema import check_schema, close_writer, open_writer, run_name
from agent_r1.store.segment import newest_lineage, open_lineage

LOCKS = Path("/proc/locks")
"""The locks that are held, a line each: "1: FLOCK ADVISORY WRITE 6194 fe:00:2146482 0 EOF"."""


class LedgerError(AgentR1Error):
    """Events could not be written: they contradict the ledger, or the disk failed."""


@dataclass(frozen=True, slots=True)
class Submission:
    """The events of one ``record`` call, and the promise to its caller."""

    events: tuple[Event, ...]
    durable: asyncio.Future[None]


class Ledger:
    """A :class:`~agent_r1.core.events.Recorder` over ``run.db``.

    Recording is a group commit: whatever waits while a transaction is being synced becomes the next
    transaction, so that many episodes share one fsync. An attempt is dispatched before anything else is
    said of it, finishes at most once and meets at most one fate; events that contradict this raise
    LedgerError to their caller alone. After a failed commit the ledger refuses everything: what the disk
    then holds is only what was acknowledged before.

    ``run`` is the run's name, by which its attempts are called, wherever its folder lies by now. What is recorded
    belongs to the newest lineage. One process at a time writes a run: InvalidInput to others, and
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
        self._lineage = newest_lineage(self._connection)
        self._waiting: queue.SimpleQueue[Submission | None] = queue.SimpleQueue()
        self._failure: LedgerError | None = None
        self._thread = threading.Thread(target=self._write, name="ledger", daemon=True)
        self._thread.start()

    def open_lineage(self, step: int, config: Mapping[str, Any]) -> None:
        """Go on from the checkpoint of ``step`` in a new lineage, under ``config``, before anything is recorded.

        What the checkpoint does not know of is superseded, as :func:`agent_r1.store.segment.open_lineage` says.
        Raises InvalidInput where the run never came to ``step``, LedgerError where the disk fails.
        """
        try:
            self._lineage = open_lineage(self._connection, step, config)  # the thread waits for its first event
        except sqlite3.Error as error:
            raise LedgerError(f"no lineage could be opened: {error}") from error

    async def record(self, *events: Event) -> None:
        """Write events down, in order, all or none; returns when they are on the disk. Raises LedgerError."""
        if not self._thread.is_alive():
            raise LedgerError("the run was closed; nothing more can be written")
        durable = asyncio.get_running_loop().create_future()
        self._waiting.put(Submission(events, durable))
        await durable

    def close(self) -> None:
        """Write what still waits, then release the file."""
        self._waiting.put(None)
        self._thread.join()
        close_writer(self._connection)
        os.close(self._lock)

    def _write(self) -> None:
        open_for_more = True
        while open_for_more:
            batch = [self._waiting.get()]
            while not self._waiting.empty():
                batch.append(self._waiting.get())
            open_for_more = None not in batch
            submissions = [submission for submission in batch if submission is not None]
            answers = list(zip(submissions, self._commit(submissions), strict=True))
            # One wake-up per loop, not per caller: hundreds of callers would fight this thread for the interpreter.
            for loop in {submission.durable.get_loop() for submission in submissions}:
                with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                    loop.call_soon_threadsafe(_answer, [a for a in answers if a[0].durable.get_loop() is loop])

    def _commit(self, batch: Sequence[Submission]) -> list[LedgerError | None]:
        if self._failure is None:
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                errors = [self._apply(submission.events) for submission in batch]
                self._connection.execute("COMMIT")
                return errors
            except Exception as error:  # an exception lost in this thread would leave every caller waiting
                self._failure = LedgerError(f"the run can no longer be written: {error}")
                self._connection.close()
        return [self._failure] * len(batch)

    def _apply(self, events: Sequence[Event]) -> LedgerError | None:
        try:
            rows = [insert for event in events for insert in inserts(event, self._lineage)]
        except Exception as error:  # one event that cannot be encoded must not fail its neighbours
            return LedgerError(f"an event cannot be encoded: {error!r}")
        self._connection.execute("SAVEPOINT submission")
        refused = None
        for insert in rows:
            try:
                self._connection.executemany(insert.sql, insert.rows)
            except sqlite3.IntegrityError as error:
                refused = LedgerError(f"{insert.table} of {insert.rows[0][0]}: {error}")
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


def _answer(answers: Sequence[tuple[Submission, LedgerError | None]]) -> None:
    for submission, error in answers:
        if submission.durable.done():  # the caller was cancelled; its events are written all the same
            continue
        if error is None:
            submission.durable.set_result(None)
        else:
            submission.durable.set_exception(error)
