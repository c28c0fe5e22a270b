"""Events as rows to insert, and reward values as database values."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from agent_r1.core.attempt_id import AttemptId
from agent_r1.core.events import (
    AttemptFate,
    AttemptFinished,
    AttemptStarted,
    CheckpointSaved,
    Event,
    LogEvent,
    PendingDropped,
    PolicyPublished,
    StepMetrics,
    StepTimings,
)
from agent_r1.core.trajectory import RewardValue, Trajectory, Turn
from agent_r1.store.codec import from_action, from_messages, from_result, version_spans_to_json
from agent_r1.store.compression import Tokens, pack_document


class Insert(NamedTuple):
    """Rows for one table, and the statement that inserts each of them."""

    table: str
    sql: str
    rows: Sequence[tuple[Any, ...]]


NEWEST_ROW = "(SELECT id FROM attempts WHERE attempt = ? ORDER BY lineage DESC LIMIT 1)"

DISPATCHED_AGAIN = """
    SELECT id, ?2, 'superseded', (SELECT step FROM lineages WHERE lineage = ?2), 'it was dispatched again'
    FROM attempts WHERE attempt = ?1 AND lineage < ?2 AND NOT EXISTS (SELECT 1 FROM fates WHERE attempt_id = id)
"""
"""An attempt that is still without a fate when a later lineage starts it anew."""

LEFT_OVER = """
    SELECT id, ?1, 'dropped', ?2, ?3 FROM attempts WHERE NOT EXISTS (SELECT 1 FROM fates WHERE attempt_id = id)
"""

FATE = "attempt_id, lineage, fate, step, reason"

SAVED = "saved"
"""The kind of an event whose detail is the step of a checkpoint that was saved."""


def _plain(table: str, columns: str, rows: Sequence[tuple[Any, ...]]) -> Insert:
    """The rows as they are; ``columns`` is the list between the parentheses of INSERT."""
    marks = ", ".join("?" * len(columns.split(",")))
    return Insert(table, f"INSERT INTO {table} ({columns}) VALUES ({marks})", rows)


def _of_attempts(table: str, columns: str, rows: Sequence[tuple[Any, ...]]) -> Insert:
    """Rows that begin with an attempt's name, where the table wants the id of its newest dispatch."""
    marks = ", ".join([NEWEST_ROW, *"?" * (len(columns.split(",")) - 1)])
    return Insert(table, f"INSERT INTO {table} ({columns}) VALUES ({marks})", rows)


def readable(text: str) -> str:
    """Text for a column: what is not valid Unicode (lone surrogates) is escaped, because SQLite refuses it."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def attempt_key(attempt: AttemptId) -> str:
    """The name under which an attempt is stored."""
    return readable(str(attempt))


def from_number(value: float) -> float | str:
    """A number as a column value; SQLite would turn NaN into null."""
    return "NaN" if math.isnan(value) else float(value)


def to_number(value: float | str) -> float:
    """The inverse of :func:`from_number`."""
    return float(value)


def from_reward(value: RewardValue) -> float | str | None:
    """A reward as a column value: SQLite knows no tuples, they become JSON text."""
    if isinstance(value, tuple):
        return json.dumps([float(item) for item in value])
    return None if value is None else from_number(value)


def to_reward(value: float | str | None) -> RewardValue:
    """The inverse of :func:`from_reward`."""
    if not isinstance(value, str):
        return value
    data = json.loads(value)
    return tuple(data) if isinstance(data, list) else data


def inserts(event: Event, lineage: int) -> Iterator[Insert]:
    """The rows that write one event of a lineage down."""
    match event:
        case AttemptStarted(attempt, split, version):
            key = attempt_key(attempt)
            if lineage > 1:
                yield Insert("fates", f"INSERT INTO fates ({FATE}) {DISPATCHED_AGAIN}", [(key, lineage)])
            name = (key, lineage, readable(attempt.run), readable(attempt.task), *attempt.order)
            columns = "attempt, lineage, run, task, group_serial, member, retry, split, version"
            yield _plain("attempts", columns, [(*name, readable(split), version)])
        case AttemptFinished(trajectory):
            yield from _trajectory(trajectory)
        case AttemptFate(attempt, fate, step, reason, credit):
            met = (attempt_key(attempt), lineage, fate, step, None if reason is None else readable(reason))
            row = (*met, None if credit is None else from_number(credit))
            yield _of_attempts("fates", f"{FATE}, credit", [row])
        case PendingDropped(step, reason):
            yield Insert("fates", f"INSERT INTO fates ({FATE}) {LEFT_OVER}", [(lineage, step, readable(reason))])
        case PolicyPublished(version, step, digest):
            yield _plain("versions", "lineage, version, step, digest", [(lineage, version, step, digest)])
        case StepMetrics(step, values):
            yield _metrics(lineage, step, values, exact=True)
        case StepTimings(step, values):
            yield _metrics(lineage, step, values, exact=False)
        case CheckpointSaved(step):
            yield _event(lineage, SAVED, str(step))
        case LogEvent(kind, detail):
            yield _event(lineage, kind, detail)


def _event(lineage: int, kind: str, detail: str) -> Insert:
    said = (lineage, time.time(), readable(kind), readable(detail))
    return _plain("events", "lineage, at, kind, detail", [said])


def _metrics(lineage: int, step: int, values: Mapping[str, float], exact: bool) -> Insert:
    rows = [(lineage, step, readable(name), from_number(value), exact) for name, value in values.items()]
    return _plain("metrics", "lineage, step, name, value, exact", rows)


def _trajectory(trajectory: Trajectory) -> Iterator[Insert]:
    key = attempt_key(trajectory.attempt)
    reason = None if trajectory.reason is None else readable(trajectory.reason)
    start = pack_document(from_messages(trajectory.start))
    outcome = (key, trajectory.status.value, trajectory.truncated, reason, trajectory.seconds)
    row = (*outcome, readable(trajectory.task_id), newest_version(trajectory), start)
    columns = "attempt_id, status, truncated, reason, seconds, task_id, newest_version, start"
    yield _of_attempts("outcomes", columns, [row])
    columns = "attempt_id, turn, parent, role, kind, stop, tokens, said"
    yield _of_attempts("turns", columns, [_turn(key, turn) for turn in trajectory.turns])
    yield _of_attempts("rewards", "attempt_id, turn, call, name, value", list(_rewards(key, trajectory)))


def newest_version(trajectory: Trajectory) -> int:
    """The version of the newest weights that sampled any of its tokens, -1 where none was sampled."""
    return max((span.version for turn in trajectory.turns for span in turn.version_spans), default=-1)


def _turn(key: str, turn: Turn) -> tuple[Any, ...]:
    said = [
        from_action(turn.action),
        from_messages(turn.observation),
        [from_result(result) for result in turn.results],
        version_spans_to_json(turn.version_spans),
        [list(turn.call_ends), len(turn.call_rewards)],
    ]
    place = (key, turn.index, turn.parent, readable(turn.role), readable(turn.kind), turn.finish_reason)
    return (*place, Tokens(turn.new_ids, turn.action_ids, turn.logprobs).pack(), pack_document(said))


def _rewards(key: str, trajectory: Trajectory) -> Iterator[tuple[Any, ...]]:
    for name, value in trajectory.rewards.items():
        yield key, None, None, readable(name), from_reward(value)
    for turn in trajectory.turns:
        for name, value in turn.rewards.items():
            yield key, turn.index, None, readable(name), from_reward(value)
        for call, rewards in enumerate(turn.call_rewards):
            for name, value in rewards.items():
                yield key, turn.index, call, readable(name), from_reward(value)
