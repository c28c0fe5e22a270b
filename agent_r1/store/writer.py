"""Write the events of a run to its database, in one thread. Events that wait together share one transaction."""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_r1.core.errors import AgentR1Error, InvalidInput
from agent_r1.core.events import AttemptFate, AttemptFinished, AttemptStarted, Event
from agent_r1.core.files import DISK
from agent_r1.core.profile import measure
from agent_r1.core.threads import WorkerThread
from agent_r1.store.manifest import DIGEST_FILE, check_closed, read_digest_file, write_digest_file
from agent_r1.store.rows import attempt_key, event_rows
from agent_r1.store.schema import check_schema, close_writer, insert, open_writer, read_run_name, savepoint, transaction

LOCKS = Path("/proc/locks")
"""On Linux, a file with one line per lock: "1: FLOCK ADVISORY WRITE 6194 fe:00:2146482 0 EOF"."""


class RunWriteError(AgentR1Error):
    """Raised if events cannot be recorded: the disk failed, or an event was refused (such as a second end of an
    attempt).
    """


@dataclass(slots=True)
class _Submission:
    events: tuple[Event, ...]
    error: RunWriteError | None = None


class RunWriter:
    """A :class:`~agent_r1.core.events.Recorder` that writes ``run.db`` in a thread of its own.

    A ``record`` call returns only after its events are on the disk. If the disk fails, or the call violates one of
    these rules, the call raises RunWriteError, and none of its events is recorded:

    - The start of an attempt is recorded before other events about the attempt.
    - The end of an attempt is recorded at most once.
    - At most one fate, such as trained, is recorded for an attempt.

    After a failure of the disk, all later calls raise RunWriteError. Only one process can write a run at a time.

    Attributes:
        run: the name with which the run was created, even if the folder was renamed.

    Raises:
        InvalidInput: another process is writing the run, ``path`` is damaged, or its schema version is not
            ``SCHEMA_VERSION``.
    """

    def __init__(self, path: Path) -> None:
        self._lock = _lock(path.parent)
        try:
            self._connection = _open_checked(path)
            # Nothing that this writer adds is in the old digest. Removed for good before the first row is written.
            (path.parent / DIGEST_FILE).unlink(missing_ok=True)
            DISK.sync(path.parent)
        except BaseException:
            os.close(self._lock)
            raise
        self.run = read_run_name(self._connection)
        self._path, self._inode = path, path.stat().st_ino
        self._segment = latest_segment(self._connection)
        self._reward_weights = read_reward_weights(self._connection)
        self._waiting: deque[_Submission] = deque()
        self._failure: RunWriteError | None = None
        self._worker = WorkerThread(
            "run writer", lambda: RunWriteError("the run was closed; nothing more can be written")
        )

    def open_segment(self, step: int, config: Mapping[str, Any]) -> None:
        """Start a new segment (a stretch of training without a stop) from ``step``. Call it before recording events.

        Raises:
            InvalidInput: if the run never reached ``step``.
            RunWriteError: if the database cannot be written.
        """
        try:
            # The worker thread does not use the connection meanwhile: it is idle until the first event, or runs this.
            self._segment = open_segment(self._connection, step, config)
            self._reward_weights = read_reward_weights(self._connection)
        except sqlite3.Error as error:
            raise RunWriteError(f"could not open a segment: {error}") from error

    async def continue_from(self, step: int, config: Mapping[str, Any]) -> None:
        """Write all events that were recorded so far, then start a new segment (see :meth:`open_segment`)."""
        await self._worker.run(self.open_segment, step, config)

    async def record(self, *events: Event) -> None:
        """Record all events in order, and return when the events are on the disk.

        Raises RunWriteError if the events are refused or the disk fails. Then no event of the call is recorded.
        """
        submission = _Submission(events)
        self._waiting.append(submission)
        await self._worker.run(self._commit_waiting)
        if submission.error is not None:
            raise submission.error

    def close(self) -> None:
        """Write the waiting events, write ``digest.json``, close the database, and release the lock.

        ``digest.json`` is not written after a failed commit.
        """
        self._worker.close(wait_seconds=None)
        if self._failure is None:
            with suppress(OSError, sqlite3.Error):  # verify then reports the rows as not closed
                write_digest_file(self._path.parent, self._connection)
        close_writer(self._connection)
        os.close(self._lock)

    def _commit_waiting(self) -> None:
        batch = [self._waiting.popleft() for _ in range(len(self._waiting))]
        if not batch:
            return
        with measure("store"):
            for submission, error in zip(batch, self._commit(batch), strict=True):
                submission.error = error

    def _commit(self, batch: Sequence[_Submission]) -> list[RunWriteError | None]:
        if self._failure is None:
            try:
                # SQLite would go on writing a file that was deleted or moved, and its rows would be lost.
                if not self._path.exists() or self._path.stat().st_ino != self._inode:
                    raise FileNotFoundError(f"{self._path} was deleted or moved while the run was written")
                with transaction(self._connection):
                    return [self._append(submission.events) for submission in batch]
            except Exception as error:  # catch all errors: otherwise the callers would wait forever
                self._failure = RunWriteError(f"the run can no longer be written: {error}")
                self._connection.close()
        return [self._failure] * len(batch)

    def _append(self, events: Sequence[Event]) -> RunWriteError | None:
        try:
            with savepoint(self._connection):
                for event in events:
                    for rows in event_rows(event, self._segment, self._reward_weights, self._connection):
                        insert(self._connection, rows.table, rows.values)
        except sqlite3.IntegrityError as error:
            return RunWriteError(f"{_subject(event)}: {error}")
        except sqlite3.Error:
            raise
        except Exception as error:  # the other submissions must not fail
            return RunWriteError(f"an event cannot be encoded: {error!r}")
        return None


def _subject(event: Event) -> str:
    match event:
        case AttemptStarted(attempt=attempt) | AttemptFate(attempt=attempt):
            return attempt_key(attempt)
        case AttemptFinished(trajectory):
            return attempt_key(trajectory.attempt)
    return type(event).__name__


def _lock(folder: Path) -> int:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        process = writing_process(folder)
        named = "" if process is None else f" (process {process})"
        got = f"{folder}, which another process is writing{named}"
        raise InvalidInput("run", got=got, do="wait until it has ended, or end it") from None
    return descriptor


def writing_process(folder: Path) -> int | None:
    """Return the id of the process that writes a run; None if there is no such process, or if the id is not known."""
    found = folder.stat()
    name = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    with suppress(OSError):
        for line in LOCKS.read_text(encoding="ascii").splitlines():
            match line.split():
                case [_, "FLOCK", _, _, process, place, *_] if place == name:
                    return int(process)
    return None


def _open_checked(path: Path) -> sqlite3.Connection:
    connection = open_writer(path)
    try:
        check_schema(connection, path)
        closed = read_digest_file(path.parent)
        if closed is not None and (changes := check_closed(connection, closed)):
            do = "put back a copy of it, or start a new run"
            raise InvalidInput("run", got=f"{path}, which changed since it was closed: {changes[0]}", do=do)
    except BaseException:
        connection.close()
        raise
    return connection


SUPERSEDED = """
    SELECT current_attempts.id, :segment, 'superseded', :step, 'the run was resumed from step ' || :step, NULL
    FROM current_attempts LEFT JOIN outcomes ON attempt_id = current_attempts.id
    WHERE step > :step OR (fate IS NULL AND coalesce(newest_version NOT BETWEEN 0 AND :version, TRUE))
    ORDER BY current_attempts.id
"""


def latest_segment(connection: sqlite3.Connection) -> int:
    return int(connection.execute("SELECT max(segment) FROM segments").fetchone()[0])


def read_reward_weights(connection: sqlite3.Connection) -> Mapping[str, float]:
    """Return the weights of rewards by name; {} if no weight is set."""
    config = connection.execute("SELECT config FROM segments ORDER BY segment DESC LIMIT 1").fetchone()[0]
    weights: Mapping[str, float] = json.loads(config).get("reward_weights", {})
    return weights


def open_segment(connection: sqlite3.Connection, step: int, config: Mapping[str, Any]) -> int:
    """Open a new segment from the checkpoint of ``step``, in one transaction. Return the number of the segment.

    Raises:
        InvalidInput: the run did not reach ``step``, or has no weights of this or an earlier step. Step 0 is always
            valid.
    """
    with transaction(connection):
        known = connection.execute("SELECT ?1 = 0 OR max(step) >= ?1 FROM current_metrics", (step,)).fetchone()[0]
        sql = "SELECT max(version) FROM current_versions WHERE step <= ?"
        version = connection.execute(sql, (step,)).fetchone()[0]
        if not known or (version is None and step > 0):
            do = "resume from an older checkpoint, or put back the run.db that belongs to this one"
            raise InvalidInput("checkpoint", got=f"one of step {step}, which the run never reached", do=do)
        segment = latest_segment(connection) + 1
        insert(connection, "segments", [(segment, step, time.time(), json.dumps(config))])
        # What was sampled with weights after the checkpoint no longer counts; other finished attempts stay pending.
        superseded = {"segment": segment, "step": step, "version": version or 0}
        insert(connection, "fates", connection.execute(SUPERSEDED, superseded).fetchall())
    return segment
