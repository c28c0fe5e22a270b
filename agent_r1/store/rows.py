"""Encoding of events as SQL inserts, and of numbers and rewards as column values."""

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
from agent_r1.store.codec import encode_action, encode_messages, encode_result, encode_version_spans
from agent_r1.store.compression import TurnTokens, pack_document

CHECKPOINT_SAVED = "checkpoint_saved"
"""The kind of the event whose detail is the step of a saved checkpoint."""

_LATEST_ROW = "(SELECT id FROM attempts WHERE attempt = ? ORDER BY segment DESC LIMIT 1)"

_FATE_COLUMNS = "attempt_id, segment, fate, step, reason"

# An attempt that is still pending when a later segment starts it again.
_SUPERSEDE_RESTARTED = f"""
    INSERT INTO fates ({_FATE_COLUMNS})
    SELECT id, ?2, 'superseded', (SELECT step FROM segments WHERE segment = ?2), 'it was started again'
    FROM attempts WHERE attempt = ?1 AND segment < ?2 AND NOT EXISTS (SELECT 1 FROM fates WHERE attempt_id = id)
"""

_DROP_PENDING = f"""
    INSERT INTO fates ({_FATE_COLUMNS})
    SELECT id, ?1, 'dropped', ?2, ?3 FROM attempts WHERE NOT EXISTS (SELECT 1 FROM fates WHERE attempt_id = id)
"""


class Insert(NamedTuple):
    """Rows for one table, and the statement that inserts each of them."""

    table: str
    sql: str
    rows: Sequence[tuple[Any, ...]]


def attempt_key(attempt: AttemptId) -> str:
    """Return the name under which an attempt is stored."""
    return _escape(str(attempt))


def encode_number(value: float) -> float | str:
    """Return a number as a column value; SQLite would turn NaN into null."""
    return "NaN" if math.isnan(value) else float(value)


def decode_number(value: float | str) -> float:
    """Invert :func:`encode_number`."""
    return float(value)


def encode_reward(value: RewardValue) -> float | str | None:
    """Return a reward as a column value. A tuple becomes JSON text, because SQLite has no arrays."""
    if isinstance(value, tuple):
        return json.dumps([float(item) for item in value])
    return None if value is None else encode_number(value)


def decode_reward(value: float | str | None) -> RewardValue:
    """Invert :func:`encode_reward`."""
    if not isinstance(value, str):
        return value
    data = json.loads(value)
    return tuple(data) if isinstance(data, list) else data


def insert_statements(event: Event, segment: int) -> Iterator[Insert]:
    """Yield the inserts that record one event in a segment."""
    match event:
        case AttemptStarted(attempt, split, version):
            key = attempt_key(attempt)
            if segment > 1:
                yield Insert("fates", _SUPERSEDE_RESTARTED, [(key, segment)])
            name = (key, segment, _escape(attempt.run), _escape(attempt.task), *attempt.sort_key)
            columns = "attempt, segment, run, task, group_id, sample_index, retry, split, version"
            yield _insert("attempts", columns, [(*name, _escape(split), version)])
        case AttemptFinished(trajectory):
            yield from _trajectory_inserts(trajectory)
        case AttemptFate(attempt, fate, step, reason, credit):
            text = None if reason is None else _escape(reason)
            number = None if credit is None else encode_number(credit)
            row = (attempt_key(attempt), segment, fate, step, text, number)
            yield _insert_by_attempt("fates", f"{_FATE_COLUMNS}, credit", [row])
        case PendingDropped(step, reason):
            yield Insert("fates", _DROP_PENDING, [(segment, step, _escape(reason))])
        case PolicyPublished(version):
            columns = "segment, version, step, checksum"
            yield _insert("versions", columns, [(segment, version.number, version.step, version.checksum)])
        case StepMetrics(step, values):
            yield _metrics_insert(segment, step, values, reproducible=True)
        case StepTimings(step, values):
            yield _metrics_insert(segment, step, values, reproducible=False)
        case CheckpointSaved(step):
            yield _event_insert(segment, CHECKPOINT_SAVED, str(step))
        case LogEvent(kind, detail):
            yield _event_insert(segment, kind, detail)


def _insert(table: str, columns: str, rows: Sequence[tuple[Any, ...]]) -> Insert:
    """Return an insert of complete rows; ``columns`` is the list between the parentheses of INSERT."""
    values = ", ".join("?" * len(columns.split(",")))
    return Insert(table, f"INSERT INTO {table} ({columns}) VALUES ({values})", rows)


def _insert_by_attempt(table: str, columns: str, rows: Sequence[tuple[Any, ...]]) -> Insert:
    """Return an insert of rows that begin with an attempt's key, stored as the id of its latest row in ``attempts``."""
    values = ", ".join([_LATEST_ROW, *"?" * (len(columns.split(",")) - 1)])
    return Insert(table, f"INSERT INTO {table} ({columns}) VALUES ({values})", rows)


def _escape(text: str) -> str:
    """Escape lone surrogates, which SQLite refuses."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _event_insert(segment: int, kind: str, detail: str) -> Insert:
    return _insert("events", "segment, time, kind, detail", [(segment, time.time(), _escape(kind), _escape(detail))])


def _metrics_insert(segment: int, step: int, values: Mapping[str, float], reproducible: bool) -> Insert:
    rows = [(segment, step, _escape(name), encode_number(value), reproducible) for name, value in values.items()]
    return _insert("metrics", "segment, step, name, value, reproducible", rows)


def _trajectory_inserts(trajectory: Trajectory) -> Iterator[Insert]:
    key = attempt_key(trajectory.attempt)
    reason = None if trajectory.reason is None else _escape(trajectory.reason)
    # -1 if no token was sampled
    newest = max((span.version for turn in trajectory.turns for span in turn.version_spans), default=-1)
    start = pack_document(encode_messages(trajectory.start))
    row = (key, trajectory.status.value, trajectory.truncated, reason, trajectory.seconds)
    columns = "attempt_id, status, truncated, reason, seconds, task_id, newest_version, start"
    yield _insert_by_attempt("outcomes", columns, [(*row, _escape(trajectory.task_id), newest, start)])
    columns = "attempt_id, turn, parent, kind, finish_reason, tokens, content"
    yield _insert_by_attempt("turns", columns, [_turn_row(key, turn) for turn in trajectory.turns])
    rewards = list(_reward_rows(key, trajectory))
    yield _insert_by_attempt("rewards", "attempt_id, turn, call, name, value", rewards)


def _turn_row(key: str, turn: Turn) -> tuple[Any, ...]:
    content = [
        encode_action(turn.action),
        encode_messages(turn.observation),
        [encode_result(result) for result in turn.results],
        encode_version_spans(turn.version_spans),
        [list(turn.call_ends), len(turn.call_rewards)],
    ]
    row = (key, turn.index, turn.parent, _escape(turn.kind), turn.finish_reason)
    return (*row, TurnTokens(turn.new_ids, turn.action_ids, turn.logprobs).pack(), pack_document(content))


def _reward_rows(key: str, trajectory: Trajectory) -> Iterator[tuple[Any, ...]]:
    for name, value in trajectory.rewards.items():
        yield key, None, None, _escape(name), encode_reward(value)
    for turn in trajectory.turns:
        for name, value in turn.rewards.items():
            yield key, turn.index, None, _escape(name), encode_reward(value)
        for call, rewards in enumerate(turn.call_rewards):
            for name, value in rewards.items():
                yield key, turn.index, call, _escape(name), encode_reward(value)
