"""Reading of a run that is finished, interrupted, or still being written."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

from agent_r1.core.errors import InvalidInput
from agent_r1.core.events import AttemptFate, AttemptStarted, LogEvent, StepMetrics, TokenRecord
from agent_r1.core.inference import PolicyVersion
from agent_r1.core.messages import ContentPart, Image, Message, ToolSpec
from agent_r1.core.trajectory import AttemptId, Status, Trajectory, Turn, TurnTiming
from agent_r1.store.attempt_list import (
    COLUMNS,
    TABLES,
    AttemptFateName,
    AttemptFilter,
    AttemptOrder,
    AttemptSummary,
    count_query,
    page_query,
    read_summary,
)
from agent_r1.store.attempt_search import AttemptList, AttemptPage, read_page
from agent_r1.store.folder import DATABASE
from agent_r1.store.invariants import COMPLETED, check_checkpoint, last_checkpoint_step, last_step
from agent_r1.store.manifest import Manifest
from agent_r1.store.rows import (
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
from agent_r1.store.schema import open_reader

_ATTEMPT = "attempts.run, attempts.task, attempts.group_id, attempts.sample_index, attempts.retry"
_TRAJECTORY = (
    f"attempts.id, {_ATTEMPT}, task_id, status, truncated, outcomes.reason, seconds, start, answer, start_time,"
    " wait_seconds"
    " FROM current_attempts AS attempts JOIN outcomes ON attempt_id = attempts.id"
)
# Rewards by (turn, call): (None, None) for the whole trajectory, (turn, None) for the whole turn.
_RewardTable = Mapping[tuple[int | None, int | None], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class RecordedEvent:
    """A log event with its time (in seconds since 1970) and its segment (a stretch of training without a stop).

    Example:
        RecordedEvent(segment=1, time=1767323045.0, event=LogEvent("warning", "gradient_spike: the gradient norm .."))
    """

    segment: int
    time: float
    event: LogEvent


@dataclass(frozen=True, slots=True)
class SegmentStart:
    """The start of a segment (a stretch of training without a stop).

    Attributes:
        segment: the number of the segment, from 1.
        step: the step of the checkpoint from which training continues; 0 at the beginning of a run.
        time: in seconds since 1970.
    """

    segment: int
    step: int
    time: float


class RunReader:
    """A reader of the attempts, metrics and events of a run.

    If the run was resumed from a checkpoint, records that became invalid are left out. Log events are never left out.
    Attempts, trajectories and fates (trained or dropped) are returned in the order in which the attempts were started.

    Raises:
        InvalidInput: if ``folder`` holds no run, or a run whose schema version is not ``SCHEMA_VERSION``.
    """

    def __init__(self, folder: Path) -> None:
        self._connection = open_reader(folder / DATABASE)

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
        return last_step(self._connection)

    def last_checkpoint_step(self) -> int | None:
        """Return the step of the last saved checkpoint, or None."""
        return last_checkpoint_step(self._connection)

    def check_checkpoint(self, checkpoint: Path) -> Manifest:
        """Compare a checkpoint with its manifest and with this run. Return the manifest.

        Raises:
            CorruptCheckpoint: the checkpoint is not intact, or does not belong to this run.
            InvalidInput: this version of agent-r1 does not read the checkpoint's format.
        """
        return check_checkpoint(self._connection, checkpoint)

    def attempts(self) -> Iterator[AttemptStarted]:
        sql = f"SELECT {_ATTEMPT}, split, version FROM current_attempts AS attempts ORDER BY id"
        for *attempt, split, version in self._rows(sql):
            yield AttemptStarted(AttemptId(*attempt), split, version)

    def trajectories(self, split: str | None = None) -> Iterator[Trajectory]:
        """Yield the trajectory of every attempt that ended, or only of attempts in ``split``."""
        for row in self._rows(f"SELECT {_TRAJECTORY} WHERE ?1 IS NULL OR split = ?1 ORDER BY attempts.id", split):
            yield self._trajectory(row)

    def trajectory(self, attempt: AttemptId) -> Trajectory | None:
        """Return the trajectory of an attempt, or None if the attempt did not end."""
        found = next(self._rows(f"SELECT {_TRAJECTORY} WHERE attempt = ?", attempt_key(attempt)), None)
        return None if found is None else self._trajectory(found)

    def image(self, sha256: str) -> Image | None:
        """Return the image with the hash ``sha256``, or None if the run holds no such image."""
        sql = "SELECT data, mime FROM images WHERE sha256 = ?"
        found = next(self._rows(sql, sha256), None)
        return None if found is None else Image(sha256, found[1], data=found[0])

    def with_images(self, trajectory: Trajectory) -> Trajectory:
        """Return a copy of ``trajectory`` with the bytes of its images. Other methods leave these bytes out.

        ``trajectory`` is a trajectory of this run.
        """

        def filled(messages: Iterable[Message]) -> tuple[Message, ...]:
            return tuple(replace(message, parts=tuple(map(self._filled, message.parts))) for message in messages)

        turns = (
            replace(turn, observation=filled(turn.observation), new_messages=filled(turn.new_messages))
            for turn in trajectory.turns
        )
        return replace(trajectory, start=filled(trajectory.start), turns=tuple(turns))

    def _filled(self, part: ContentPart) -> ContentPart:
        if isinstance(part, Image) and (stored := self.image(part.sha256)) is not None:
            return replace(part, data=stored.data)
        return part

    def token_records(self, attempt: AttemptId) -> tuple[TokenRecord, ...]:
        """Return the token records of an attempt, one per turn; () if none were recorded."""
        sql = """SELECT turn, numbers FROM token_records JOIN current_attempts AS attempts ON attempt_id = attempts.id
                 WHERE attempt = ? ORDER BY turn"""
        rows = self._rows(sql, attempt_key(attempt))
        return tuple(decode_token_record(attempt, turn, numbers) for turn, numbers in rows)

    def list_attempts(
        self,
        where: AttemptFilter = AttemptFilter(),  # noqa: B008  (a frozen value)
        *,
        sort: AttemptOrder = "started",
        descending: bool = False,
        limit: int = 50,
        offset: int = 0,
    ) -> tuple[AttemptSummary, ...]:
        """Return the attempts that meet the conditions in the argument ``where``."""
        query = page_query(where, sort, descending, limit, offset)
        return tuple(map(read_summary, self._rows(query.sql, *query.parameters)))

    def count_attempts(self, where: AttemptFilter = AttemptFilter(), most: int | None = None) -> int:  # noqa: B008
        """Return the number of attempts that meet the conditions in the argument ``where``."""
        query = count_query(where, most)
        return int(next(self._rows(query.sql, *query.parameters))[0])

    def page_attempts(
        self, listed: AttemptList, *, after: AttemptId | None = None, limit: int = 50, backwards: bool = False
    ) -> AttemptPage:
        """Return a page of a list of attempts: at most ``limit`` attempts. ``listed`` describes the list.

        If ``after`` is None, the page begins with the first attempt of the list.
        """
        return read_page(self._connection, listed, after, limit, backwards)

    def find_attempt(self, name: str) -> AttemptSummary | None:
        """Return the attempt with the id ``name``, or None if the run has no such attempt."""
        sql = f"SELECT {COLUMNS} FROM {TABLES} WHERE attempt = (SELECT value FROM meta WHERE key = 'run') || ':' || ?"
        row = next(self._rows(sql, name), None)
        return None if row is None else read_summary(row)

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
        """Return the number of the last row of the run. If this number has not changed, the run has not changed."""
        return int(next(self._rows("SELECT row FROM head"))[0])

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
        """Return the values of one metric or timing by step; {} if no step has the metric.

        Example:
            reader.curve("validation_em") == {5: 0.31, 10: 0.62}
        """
        sql = "SELECT step, value FROM current_metrics WHERE name = ? ORDER BY step, id"
        return {step: decode_number(value) for step, value in self._rows(sql, name)}

    def segments(self) -> tuple[SegmentStart, ...]:
        """Return the start of each segment (a stretch of training without a stop), oldest first."""
        rows = self._rows("SELECT segment, step, time FROM segments ORDER BY segment")
        return tuple(SegmentStart(*row) for row in rows)

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


ResultKind = Literal["tools", "file", "hardware", "validation", "table"]
"""The kind of a log event with a fact or a result. The first three are recorded at every start or resumption.

- tools: the tools of the training environment in the OpenAI format.
- file: the absolute path of the Python file that defines the task set.
- hardware: processor, cores, GPUs and the version of torch.
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
    found: list[Mapping[str, Any]] = list(read_results(reader, "hardware"))
    return found[-1] if found else {}


def read_file(reader: RunReader) -> Path | None:
    """Return the Python file that defines the task set of a run; None if the run recorded no such file."""
    files = list(read_results(reader, "file"))
    return Path(files[-1]) if files else None
