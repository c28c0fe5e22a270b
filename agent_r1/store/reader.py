"""Reading of a run that is finished, interrupted, or still being written."""

from __future__ import annotations

import json
import math
import os
import re
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

from agent_r1.core.errors import InvalidInput
from agent_r1.core.events import AttemptFate, AttemptStarted, FateName, LogEvent, StepMetrics, TokenRecord
from agent_r1.core.inference import PolicyVersion
from agent_r1.core.messages import ContentPart, Image, Message, ToolSpec
from agent_r1.core.trajectory import AttemptId, Status, Trajectory, Turn, TurnTiming
from agent_r1.store.folder import DATABASE
from agent_r1.store.manifest import CorruptCheckpoint, Manifest, changed_tables, check_manifest, checkpoint_step
from agent_r1.store.rows import (
    CHECKPOINT_SAVED,
    TurnTokens,
    attempt_key,
    decode_action,
    decode_media,
    decode_messages,
    decode_number,
    decode_result,
    decode_reward,
    decode_token_record,
    decode_tools,
    decode_version_spans,
    unpack_document,
)
from agent_r1.store.schema import COMPLETED, TABLE_NAMES, open_reader

AttemptFateName = FateName | Literal["pending"]
"""The fate of an attempt: the attempt was trained, dropped or superseded, or is still pending.

A superseded attempt became invalid when the run was resumed. A pending attempt is neither trained nor dropped yet.
"""

AttemptOrder = Literal["started", "step", "reward", "credit", "turns", "tokens", "calls", "errors", "seconds"]
"""The column by which a list of attempts is sorted. "credit" is the sum of the advantages of an attempt's tokens."""

_COLUMNS_BY_ORDER: Mapping[AttemptOrder, str] = {
    "started": "attempts.id",
    "step": "step",
    "reward": "reward",
    "credit": "credit",
    "turns": "turns",
    "tokens": "action_tokens",
    "calls": "calls",
    "errors": "call_errors",
    "seconds": "seconds",
}


@dataclass(frozen=True, slots=True)
class AttemptFilter:
    """The conditions that the attempts of a list must meet. A field that is None sets no condition.

    Attributes:
        fate: "trained", "dropped", or "pending" (neither trained nor dropped yet).
        failed: whether the attempt ended without a reward: it failed, or a reward could not be computed.
        min_reward: the reward is known, and at least this number.
        text: this text occurs in the attempt's id, in ``status_reason`` or in ``fate_reason`` (see
            :class:`AttemptSummary`). Case is ignored.
        recorded: whether the attempt has token records (:class:`TokenRecord`).
        id_prefix: the attempt's id begins with this text, with or without the name of the run.
    """

    split: str | None = None
    status: Status | None = None
    fate: AttemptFateName | None = None
    group_id: int | None = None
    failed: bool | None = None
    min_reward: float | None = None
    text: str | None = None
    recorded: bool | None = None
    id_prefix: str | None = None


ALL = AttemptFilter()


@dataclass(frozen=True, slots=True)
class AttemptSummary:
    """One line in a list of attempts."""

    attempt: AttemptId
    split: str
    version: int  # the version of the weights with which the attempt started
    status: Status | None  # how the episode ended. None: the episode has not ended, and all counts are 0
    status_reason: str | None  # why the attempt failed, or why a reward could not be computed
    seconds: float
    turns: int
    action_tokens: int
    calls: int
    call_errors: int  # the number of tool calls whose result is an error
    reward: float | None  # the weighted sum of all rewards; None if not known
    fate: FateName | None  # "trained" or "dropped"; None if not decided yet
    step: int | None  # the number of the optimizer step at which the attempt was trained or dropped
    fate_reason: str | None  # why the attempt was dropped
    credit: float | None  # the sum of the advantages of the attempt's tokens; None if the attempt was not trained
    has_token_records: bool


_ATTEMPT = "attempts.run, attempts.task, attempts.group_id, attempts.sample_index, attempts.retry"
_LISTED = "current_attempts AS attempts LEFT JOIN outcomes ON outcomes.attempt_id = attempts.id"
_RECORDED = "EXISTS (SELECT 1 FROM token_records WHERE token_records.attempt_id = attempts.id)"
_SUMMARY = f"""
    {_ATTEMPT}, split, version, status, outcomes.reason, coalesce(seconds, 0.0), coalesce(turns, 0),
    coalesce(action_tokens, 0), coalesce(calls, 0), coalesce(call_errors, 0), reward, fate, step, attempts.reason,
    credit, {_RECORDED}
"""
_TRAJECTORY = (
    f"attempts.id, {_ATTEMPT}, task_id, status, truncated, outcomes.reason, seconds, start, answer, start_time,"
    " wait_seconds"
)
_ENDED = "current_attempts AS attempts JOIN outcomes ON attempt_id = attempts.id"
# "train" is also the split of an attempt in "calc/train", in a run with several environments.
_IN_SPLIT = "? IN (split, substr(split, instr(split, '/') + 1))"
# Rewards by (turn, call): (None, None) for the whole trajectory, (turn, None) for the whole turn.
_RewardTable = Mapping[tuple[int | None, int | None], Mapping[str, Any]]


def _condition(where: AttemptFilter) -> tuple[str, list[Any]]:
    # One SQL expression and its parameters, such as ("fate = ? AND reward >= ?", ["trained", 0.5]).
    conditions = {
        _IN_SPLIT: where.split,
        "status = ?": where.status,
        "fate = ?": None if where.fate == "pending" else where.fate,
        "attempts.group_id = ?": where.group_id,
        f"{_RECORDED} = ?": where.recorded,
        "(status IS NOT NULL AND reward IS NULL) = ?": where.failed,
        "reward >= ?": where.min_reward,
    }
    sql = [condition for condition, value in conditions.items() if value is not None]
    parameters: list[Any] = [value for value in conditions.values() if value is not None]
    if where.fate == "pending":
        sql.append("fate IS NULL")
    if where.text is not None:
        pattern = "%" + re.sub(r"([\\%_])", r"\\\1", where.text) + "%"
        columns = ("attempt", "outcomes.reason", "attempts.reason")
        sql.append("(" + " OR ".join(f"{column} LIKE ? ESCAPE '\\'" for column in columns) + ")")
        parameters += [pattern] * len(columns)
    if where.id_prefix is not None:
        sql.append("(substr(attempt, 1, length(?)) = ? OR substr(attempt, length(attempts.run) + 2, length(?)) = ?)")
        parameters += [where.id_prefix] * 4
    return " AND ".join(sql) or "TRUE", parameters


def _order(sort: AttemptOrder, descending: bool) -> str:
    order = f"{_COLUMNS_BY_ORDER[sort]} {'DESC' if descending else 'ASC'} NULLS LAST"
    return order if sort == "started" else f"{order}, attempts.id DESC"  # so that pages of equal values do not overlap


def _summary(row: tuple[Any, ...]) -> AttemptSummary:
    split, version, status, *rest, credit, recorded = row[5:]
    known = None if status is None else Status(status)
    ends = (None if credit is None else decode_number(credit), bool(recorded))
    return AttemptSummary(*(AttemptId(*row[:5]), split, version, known, *rest, *ends))


@dataclass(frozen=True, slots=True)
class TaskSummary:
    """The attempts of a run at one task."""

    task: str
    split: str
    attempts: int
    failed: int  # attempts without a reward: they failed or have not ended
    reward: float | None  # the mean reward; None if no attempt has one
    above_zero: float | None  # the share of the rewards that are above 0
    last: float | None  # the reward of the newest attempt that has one


@dataclass(frozen=True, slots=True)
class RecordedEvent:
    """A log event with its time (in seconds since 1970) and its segment (a stretch of training without a stop)."""

    segment: int
    time: float
    event: LogEvent


@dataclass(frozen=True, slots=True)
class SegmentStart:
    """The start of a segment (a stretch of training without a stop)."""

    segment: int  # the number of the segment, from 1
    step: int  # the step of the checkpoint from which training continues; 0 at the beginning of a run
    time: float  # in seconds since 1970


class RunReader:
    """A reader of the attempts, metrics and events of a run.

    If the run was resumed from a checkpoint, records that became invalid are left out. Log events are never left out.
    Attempts, trajectories and fates (trained or dropped) are returned in the order in which the attempts were started.

    Raises:
        InvalidInput: if ``folder`` holds no run, or a run whose schema version is not ``SCHEMA_VERSION``.
    """

    def __init__(self, folder: Path, connection: sqlite3.Connection | None = None) -> None:
        self._connection = connection or open_reader(folder / DATABASE)

    def close(self) -> None:
        self._connection.close()

    def config(self) -> dict[str, Any]:
        """Return the resolved configuration with which the run was started or last resumed.

        Raises InvalidInput if the configuration is damaged.
        """
        row = self._connection.execute("SELECT config FROM segments ORDER BY segment DESC LIMIT 1").fetchone()
        try:
            config = json.loads(row[0]) if row else None
        except (ValueError, TypeError, RecursionError):
            config = None
        if not isinstance(config, dict):
            do = "restore it from a copy, or start a new run"
            raise InvalidInput("run", got="a database whose configuration is damaged", do=do)
        return config

    def is_complete(self) -> bool:
        """Return whether the run finished and was not resumed afterwards."""
        return bool(self._connection.execute(f"SELECT {COMPLETED}").fetchone()[0])

    def last_step(self) -> int:
        """Return the last step with metrics, or 0."""
        return int(next(self._rows("SELECT coalesce(max(step), 0) FROM current_metrics"))[0])

    def last_checkpoint_step(self) -> int | None:
        """Return the step of the last saved checkpoint, or None.

        A checkpoint of step 30 no longer counts after the run was resumed from step 20.
        """
        sql = f"""SELECT max(CAST(detail AS INTEGER)) FROM events JOIN segment_ends USING (segment)
                  WHERE kind = '{CHECKPOINT_SAVED}' AND CAST(detail AS INTEGER) <= last_step"""
        found = next(self._rows(sql))[0]
        return None if found is None else int(found)

    def check_checkpoint(self, checkpoint: Path) -> Manifest:
        """Compare a checkpoint with its manifest and with this run. Return the manifest.

        Raises:
            CorruptCheckpoint: a file is missing, additional or changed, or the checkpoint contradicts the run.
            InvalidInput: this version of agent-r1 does not read the checkpoint's format.
        """
        manifest, step, last = check_manifest(checkpoint), checkpoint_step(checkpoint), self.last_step()
        if step > last:
            raise CorruptCheckpoint(f"{checkpoint} is of a step after the last one with metrics, {last}")
        sql = "SELECT checksum FROM current_versions WHERE step <= ? ORDER BY version DESC LIMIT 1"
        row = next(self._rows(sql, step), None)
        if row is None or row[0] not in (None, manifest.fingerprint.weights):  # None: no checksum was computed
            raise CorruptCheckpoint(f"{checkpoint} does not hold the weights of step {step}")
        self.check_rows(checkpoint, manifest)
        return manifest

    def check_rows(self, folder: Path, manifest: Manifest) -> None:
        """Raise CorruptCheckpoint if rows that the run had when ``folder`` was saved have changed."""
        changes = [] if manifest.rows is None else changed_tables(self._connection, manifest.rows)
        if changes:
            raise CorruptCheckpoint(f"{folder} does not fit the database: {', '.join(changes)}")

    def attempts(self) -> Iterator[AttemptStarted]:
        sql = f"SELECT {_ATTEMPT}, split, version FROM current_attempts AS attempts ORDER BY id"
        for *attempt, split, version in self._rows(sql):
            yield AttemptStarted(AttemptId(*attempt), split, version)

    def trajectories(self, split: str | None = None) -> Iterator[Trajectory]:
        """Yield the trajectory of every attempt that ended, or only of attempts in ``split``."""
        condition, parameters = _condition(AttemptFilter(split=split))
        sql = f"SELECT {_TRAJECTORY} FROM {_ENDED} WHERE {condition} ORDER BY attempts.id"
        return map(self._trajectory, self._rows(sql, *parameters))

    def trajectory(self, attempt: AttemptId) -> Trajectory | None:
        """Return the trajectory of an attempt, or None if the attempt did not end."""
        found = self._rows(f"SELECT {_TRAJECTORY} FROM {_ENDED} WHERE attempt = ?", attempt_key(attempt))
        return next(map(self._trajectory, found), None)

    def trajectory_of_row(self, attempt_id: int) -> Trajectory:
        """Return the trajectory of a row of the table ``attempts``, also of a superseded one."""
        sql = f"SELECT {_TRAJECTORY} FROM attempts JOIN outcomes ON attempt_id = attempts.id WHERE attempts.id = ?"
        return self._trajectory(next(self._rows(sql, attempt_id)))

    def image(self, sha256: str) -> Image | None:
        """Return the image with the hash ``sha256``, or None if the run holds no such image."""
        sql = "SELECT data, mime FROM images WHERE sha256 = ?"
        found = next(self._rows(sql, sha256), None)
        return None if found is None else Image(sha256, found[1], data=found[0])

    def with_images(self, trajectory: Trajectory) -> Trajectory:
        """Return a copy of ``trajectory`` with the bytes of its images. Other methods leave these bytes out.

        ``trajectory`` is a trajectory of this run.
        """

        def fill(part: ContentPart) -> ContentPart:
            stored = self.image(part.sha256) if isinstance(part, Image) else None
            return part if stored is None else stored

        def filled(messages: Iterable[Message]) -> tuple[Message, ...]:
            return tuple(replace(message, parts=tuple(map(fill, message.parts))) for message in messages)

        turns = (
            replace(turn, observation=filled(turn.observation), new_messages=filled(turn.new_messages))
            for turn in trajectory.turns
        )
        return replace(trajectory, start=filled(trajectory.start), turns=tuple(turns))

    def reward_sums(self) -> Iterator[tuple[AttemptId, str, float]]:
        """Yield (attempt, name of a reward, its sum over the attempt, its turns and calls). Only numbers are summed."""
        sql = f"""SELECT {_ATTEMPT}, name, sum(value)
                  FROM rewards JOIN current_attempts AS attempts ON attempt_id = attempts.id
                  WHERE typeof(value) IN ('integer', 'real') GROUP BY attempts.id, name ORDER BY attempts.id"""
        for *attempt, name, total in self._rows(sql):
            yield AttemptId(*attempt), name, total

    def token_records(self, attempt: AttemptId) -> tuple[TokenRecord, ...]:
        """Return the token records of an attempt, one per turn; () if none were recorded."""
        sql = """SELECT turn, numbers FROM token_records JOIN current_attempts AS attempts ON attempt_id = attempts.id
                 WHERE attempt = ? ORDER BY turn"""
        rows = self._rows(sql, attempt_key(attempt))
        return tuple(decode_token_record(attempt, turn, numbers) for turn, numbers in rows)

    def list_attempts(
        self,
        where: AttemptFilter = ALL,
        *,
        sort: AttemptOrder = "started",
        descending: bool = False,
        limit: int = 50,
        offset: int = 0,
    ) -> tuple[AttemptSummary, ...]:
        """Return the attempts that meet all conditions. Attempts without a value in the column ``sort`` come last."""
        condition, parameters = _condition(where)
        order = _order(sort, descending)
        # The page is chosen before its columns are read, because sorting whole rows takes much longer.
        chosen = f"SELECT attempts.id FROM {_LISTED} WHERE {condition} ORDER BY {order} LIMIT ? OFFSET ?"
        sql = f"SELECT {_SUMMARY} FROM {_LISTED} WHERE attempts.id IN ({chosen}) ORDER BY {order}"
        return tuple(map(_summary, self._rows(sql, *parameters, limit, offset)))

    def list_tasks(self) -> tuple[TaskSummary, ...]:
        """Return a summary of each task that was attempted, those with the lowest mean reward first."""
        # SQLite takes ``reward`` alone from the row that has the maximum.
        last = f"""SELECT task, reward, max(attempts.id) FROM {_LISTED} WHERE reward IS NOT NULL GROUP BY task"""
        sql = f"""SELECT attempts.task, split, count(*), count(*) - count(outcomes.reward), avg(outcomes.reward),
                         avg(outcomes.reward > 0), last.reward
                  FROM {_LISTED} LEFT JOIN ({last}) AS last ON last.task = attempts.task
                  GROUP BY attempts.task ORDER BY 5 NULLS FIRST, attempts.task"""
        return tuple(TaskSummary(*row) for row in self._rows(sql))

    def count_attempts(self, where: AttemptFilter = ALL, most: int = -1) -> int:
        """Return the number of attempts that meet all conditions. Counting ends at ``most``; -1: no limit."""
        condition, parameters = _condition(where)
        sql = f"SELECT count(*) FROM (SELECT 1 FROM {_LISTED} WHERE {condition} LIMIT ?)"
        return int(next(self._rows(sql, *parameters, most))[0])

    def neighbors(
        self, attempt: AttemptId, where: AttemptFilter, sort: AttemptOrder, descending: bool
    ) -> tuple[AttemptId | None, AttemptId | None]:
        """Return the attempts before and after ``attempt`` in a list of :meth:`list_attempts`; None at an end."""
        condition, parameters = _condition(where)
        places = f"""SELECT attempt, lag(attempts.id) OVER list AS before, lead(attempts.id) OVER list AS after
                     FROM {_LISTED} WHERE {condition} WINDOW list AS (ORDER BY {_order(sort, descending)})"""
        sql = f"SELECT before, after FROM ({places}) WHERE attempt = ?"
        ids = next(self._rows(sql, *parameters, attempt_key(attempt)), (None, None))
        before, after = (next(self._rows(f"SELECT {_ATTEMPT} FROM attempts WHERE id = ?", one), None) for one in ids)
        return AttemptId(*before) if before else None, AttemptId(*after) if after else None

    def find_attempt(self, name: str) -> AttemptSummary | None:
        """Return the attempt with the id ``name``, with or without the name of the run, or None."""
        run = "(SELECT value FROM meta WHERE key = 'run')"
        sql = f"SELECT {_SUMMARY} FROM {_LISTED} WHERE attempt IN (?1, {run} || ':' || ?1)"
        return next(map(_summary, self._rows(sql, name)), None)

    def count_statuses(self) -> Mapping[Status, int]:
        """Return how many attempts ended with each status, the most frequent status first."""
        sql = """SELECT status, count(*) FROM outcomes GROUP BY status UNION ALL
                 SELECT status, -count(*) FROM fates JOIN outcomes USING (attempt_id) WHERE fate = 'superseded'
                 GROUP BY status"""
        return _totals((Status(status), count) for status, count in self._rows(sql))

    def count_fates(self) -> Mapping[AttemptFateName, int]:
        """Return how many attempts are trained, dropped and pending, the most frequent fate first."""
        both = """FROM fates AS later JOIN fates USING (attempt_id)
                  WHERE later.fate = 'superseded' AND fates.fate <> 'superseded'"""
        sql = f"""SELECT fate, count(*) FROM fates WHERE fate <> 'superseded' GROUP BY fate UNION ALL
                  SELECT fates.fate, -count(*) {both} GROUP BY fates.fate UNION ALL
                  SELECT 'pending', (SELECT count(*) FROM attempts) - (SELECT count(*) FROM fates)
                                    + (SELECT count(*) {both})"""
        return _totals(self._rows(sql))

    def revision(self) -> int:
        """Return the number of rows of the run. If this number has not changed, the run has not changed."""
        counts = (f"(SELECT coalesce(max(id), 0) FROM {table})" for table in TABLE_NAMES)
        return int(next(self._rows(f"SELECT {' + '.join(counts)}"))[0])

    def siblings(self, attempt: AttemptId) -> tuple[AttemptSummary, ...]:
        """Return all attempts in the group of ``attempt``, in the order of sample indices."""
        found = self.list_attempts(AttemptFilter(group_id=attempt.group_id), limit=-1)
        return tuple(sorted(found, key=lambda summary: summary.attempt.sort_key))

    def fates(self) -> Iterator[AttemptFate]:
        """Yield the fate (trained or dropped) of each attempt. Pending attempts are left out."""
        columns = f"{_ATTEMPT}, fate, step, reason, credit"
        sql = f"SELECT {columns} FROM current_attempts AS attempts WHERE fate IS NOT NULL ORDER BY id"
        for *attempt, fate, step, reason, credit in self._rows(sql):
            yield AttemptFate(
                AttemptId(*attempt), fate, step, reason, None if credit is None else decode_number(credit)
            )

    def versions(self) -> Iterator[PolicyVersion]:
        """Yield the published policy versions, in the order of version numbers."""
        for row in self._rows("SELECT version, step, checksum FROM current_versions ORDER BY version, segment"):
            yield PolicyVersion(*row)

    def metrics(self) -> Iterator[StepMetrics]:
        """Yield the metrics and timings of each step, in the order of steps."""
        return self._metrics("TRUE")

    def reproducible_metrics(self) -> Iterator[StepMetrics]:
        """Yield the metrics of each step without the timings."""
        return self._metrics("reproducible")

    def metric_names(self) -> tuple[str, ...]:
        """Return the names of all metrics and timings, in the order in which they were first recorded."""
        sql = "SELECT name FROM current_metrics GROUP BY name ORDER BY min(id)"
        return tuple(name for (name,) in self._rows(sql))

    def curve(self, name: str) -> Mapping[int, float]:
        """Return the values of one metric or timing by step; {} if no step has the metric."""
        sql = "SELECT step, value FROM current_metrics WHERE name = ? ORDER BY step, id"
        return {step: decode_number(value) for step, value in self._rows(sql, name)}

    def segments(self) -> tuple[SegmentStart, ...]:
        """Return the start of each segment (a stretch of training without a stop), oldest first."""
        rows = self._rows("SELECT segment, step, time FROM segments ORDER BY segment")
        return tuple(SegmentStart(*row) for row in rows)

    def active_seconds(self, now: float | None = None) -> float:
        """Return the seconds in which the run was trained: from the start of each segment to its last event.

        ``now`` is the time in seconds since 1970 if the last segment is still trained.
        """
        sql = """SELECT segments.time, coalesce(max(events.time), segments.time)
                 FROM segments LEFT JOIN events USING (segment) GROUP BY segment ORDER BY segment"""
        spans = list(self._rows(sql))
        if now is not None:
            spans[-1] = (spans[-1][0], now)
        return math.fsum(end - start for start, end in spans)

    def recent_events(self, limit: int) -> tuple[RecordedEvent, ...]:
        """Return the last log events of the run, oldest first. The result has at most ``limit`` events."""
        rows = self._rows("SELECT segment, time, kind, detail FROM events ORDER BY id DESC LIMIT ?", limit)
        found = [RecordedEvent(segment, time, LogEvent(kind, detail)) for segment, time, kind, detail in rows]
        return tuple(reversed(found))

    def events(self) -> Iterator[LogEvent]:
        """Yield all log events of the run, oldest first."""
        for kind, detail in self._rows("SELECT kind, detail FROM events ORDER BY id"):
            yield LogEvent(kind, detail)

    def _rows(self, sql: str, *parameters: Any) -> Iterator[tuple[Any, ...]]:
        return self._connection.execute(sql, parameters)

    def _metrics(self, condition: str) -> Iterator[StepMetrics]:
        rows = self._rows(f"SELECT step, name, value FROM current_metrics WHERE {condition} ORDER BY step, id")
        for step, group in groupby(rows, key=itemgetter(0)):
            yield StepMetrics(step, {name: decode_number(value) for _, name, value in group})

    def _trajectory(self, row: tuple[Any, ...]) -> Trajectory:
        key, *attempt, task_id, status, truncated, reason, seconds, start, answer, start_time, wait_seconds = row
        rewards, opening = self._rewards(key), decode_messages(unpack_document(start))
        return Trajectory(
            attempt=AttemptId(*attempt),
            task_id=task_id,
            turns=self._turns(key, rewards, opening),
            status=Status(status),
            truncated=bool(truncated),
            rewards=rewards.get((None, None), {}),
            reason=reason,
            start=opening,
            seconds=seconds,
            answer=answer,
            start_time=start_time,
            wait_seconds=wait_seconds,
        )

    def _rewards(self, key: int) -> _RewardTable:
        rewards: dict[tuple[int | None, int | None], dict[str, Any]] = {}
        sql = "SELECT turn, call, name, value FROM rewards WHERE attempt_id = ? ORDER BY id"
        for turn, call, name, value in self._rows(sql, key):
            rewards.setdefault((turn, call), {})[name] = decode_reward(value)
        return rewards

    def _turns(self, key: int, rewards: _RewardTable, opening: tuple[Message, ...]) -> tuple[Turn, ...]:
        times = "start_seconds, end_seconds, first_token_seconds, env_seconds"
        columns = f"turn, parent, tokens, finish_reason, kind, content, {times}"
        rows = self._rows(f"SELECT {columns} FROM turns WHERE attempt_id = ? ORDER BY turn", key)
        turns: list[Turn] = []
        for row in rows:
            turns.append(_turn(row, rewards, opening, turns))
        return tuple(turns)


def _totals(counts: Iterable[tuple[Any, int]]) -> Mapping[Any, int]:
    totals: Counter[Any] = Counter()
    for key, count in counts:
        totals[key] += count
    return dict((+totals).most_common())


def _turn(row: tuple[Any, ...], rewards: _RewardTable, opening: tuple[Message, ...], before: list[Turn]) -> Turn:
    index, parent, tokens, finish_reason, kind, content, *times = row
    new_ids, action_ids, logprobs = TurnTokens.unpack(tokens)
    action, observation, results, version_spans, (call_ends, calls_with_rewards), state, media = unpack_document(
        content
    )
    new_messages, tools = state
    if new_messages is not None:
        state_messages = decode_messages(new_messages)
    else:
        state_messages = opening if parent is None else before[parent].observation
    return Turn(
        index=index,
        parent=parent,
        new_ids=new_ids,
        action_ids=action_ids,
        logprobs=logprobs,
        version_spans=decode_version_spans(version_spans),
        finish_reason=finish_reason,
        action=decode_action(action),
        observation=decode_messages(observation),
        results=tuple(decode_result(result) for result in results),
        rewards=rewards.get((index, None), {}),
        kind=kind,
        call_rewards=tuple(rewards.get((index, call), {}) for call in range(calls_with_rewards)),
        call_ends=tuple(call_ends),
        new_messages=state_messages,
        tools=decode_tools(tools),
        media=decode_media(media),
        timing=None if times[0] is None else TurnTiming(*times),
    )


ResultKind = Literal["tools", "file", "hardware", "parent", "validation", "table"]
"""The kind of a log event with a fact or a result. The first three are recorded at every start or resumption.

- tools: the tools of the training environment in the OpenAI format.
- file: the absolute path of the Python file that defines the task set.
- hardware: processor, cores, GPUs and the version of torch.
- parent: the saved weights of another run with which the run began.
- validation: the figures of one validation: step, split, em, f1, n, and the confidence interval from low to high.
- table: the table of methods at the end of a run, as ``agent-r1 train --json`` prints it.
"""


def result_event(kind: ResultKind, value: Mapping[str, Any] | Sequence[Any] | str) -> LogEvent:
    return LogEvent(kind, json.dumps(value))


def tools_event(tools: Sequence[ToolSpec]) -> LogEvent:
    return result_event("tools", [tool.to_openai() for tool in tools])


def file_events(file: Path | None) -> list[LogEvent]:
    """Return the event that records the Python file of a user's task set; [] if there is no such file."""
    return [] if file is None else [result_event("file", os.path.abspath(file))]


def read_results(reader: RunReader, kind: ResultKind) -> Iterator[Any]:
    """Yield the JSON values of one kind, in the order in which they were recorded."""
    for event in reader.events():
        if event.kind == kind:
            yield json.loads(event.detail)


def read_tools(reader: RunReader) -> list[dict[str, Any]]:
    """Return the tools of the training environment, in the OpenAI format; [] if the run did not record its tools."""
    tools: list[list[dict[str, Any]]] = list(read_results(reader, "tools"))
    return tools[-1] if tools else []  # the tools of the last segment


def read_hardware(reader: RunReader) -> Mapping[str, Any]:
    """Return the hardware of the last start or resumption of a run; {} if it was not recorded."""
    found = list(read_results(reader, "hardware"))
    return found[-1] if found else {}


def read_file(reader: RunReader) -> Path | None:
    """Return the Python file that defines the task set of a run; None if the run recorded no such file."""
    files = list(read_results(reader, "file"))
    return Path(files[-1]) if files else None
