"""Events as rows to insert, and reward values as database values."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from agent_r1.core.attempt import Attempt
from agent_r1.core.record import Dispatched, Event, Fate, Finished, Happened, Measured
from agent_r1.core.trajectory import RewardValue, Trajectory, Turn
from agent_r1.store.codec import from_action, from_messages, from_result, from_spans
from agent_r1.store.packed import Tokens, pack_document


class Insert(NamedTuple):
    """Rows for one table; ``columns`` is the list between the parentheses of INSERT."""

    table: str
    columns: str
    rows: Sequence[tuple[Any, ...]]

    @property
    def sql(self) -> str:
        marks = ", ".join("?" * len(self.columns.split(",")))
        return f"INSERT INTO {self.table} ({self.columns}) VALUES ({marks})"


def readable(text: str) -> str:
    """Text for a column: what is not valid Unicode (lone surrogates) is escaped, because SQLite refuses it."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def attempt_key(attempt: Attempt) -> str:
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


def inserts(event: Event) -> Iterator[Insert]:
    """The rows that write one event down."""
    match event:
        case Dispatched(attempt, split, version):
            name = (attempt_key(attempt), readable(attempt.run), readable(attempt.task), *attempt.order)
            columns = "attempt, run, task, group_serial, member, retry, split, version"
            yield Insert("attempts", columns, [(*name, readable(split), version)])
        case Finished(trajectory):
            yield from _trajectory(trajectory)
        case Fate(attempt, fate, step, reason):
            met = (attempt_key(attempt), fate, step, None if reason is None else readable(reason))
            yield Insert("fates", "attempt, fate, step, reason", [met])
        case Measured(step, values):
            yield Insert(
                "metrics",
                "step, name, value",
                [(step, readable(name), from_number(value)) for name, value in values.items()],
            )
        case Happened(kind, detail):
            yield Insert("events", "at, kind, detail", [(time.time(), readable(kind), readable(detail))])


def _trajectory(trajectory: Trajectory) -> Iterator[Insert]:
    key = attempt_key(trajectory.attempt)
    reason = None if trajectory.reason is None else readable(trajectory.reason)
    start = pack_document(from_messages(trajectory.start))
    outcome = (key, trajectory.status.value, trajectory.truncated, reason, trajectory.seconds)
    row = (*outcome, readable(trajectory.task_id), start)
    yield Insert("outcomes", "attempt, status, truncated, reason, seconds, task_id, start", [row])
    columns = "attempt, turn, parent, role, kind, stop, tokens, said"
    yield Insert("turns", columns, [_turn(key, turn) for turn in trajectory.turns])
    yield Insert("rewards", "attempt, turn, name, value", list(_rewards(key, trajectory)))


def _turn(key: str, turn: Turn) -> tuple[Any, ...]:
    said = [
        from_action(turn.action),
        from_messages(turn.observation),
        [from_result(result) for result in turn.results],
        from_spans(turn.spans),
    ]
    place = (key, turn.index, turn.parent, readable(turn.role), readable(turn.kind), turn.stop)
    return (*place, Tokens(turn.new_ids, turn.action_ids, turn.logprobs).pack(), pack_document(said))


def _rewards(key: str, trajectory: Trajectory) -> Iterator[tuple[Any, ...]]:
    for name, value in trajectory.rewards.items():
        yield key, None, readable(name), from_reward(value)
    for turn in trajectory.turns:
        for name, value in turn.rewards.items():
            yield key, turn.index, readable(name), from_reward(value)
