"""SQL queries that filter, sort and count the attempts of a run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from agent_r1.core.events import FateName
from agent_r1.core.trajectory import AttemptId, Status
from agent_r1.store.rows import decode_number

AttemptFateName = FateName | Literal["pending"]
"""The fate of an attempt: the attempt was trained, dropped or superseded, or is still pending.

A superseded attempt became invalid when the run was resumed. A pending attempt is neither trained nor dropped yet.
"""

AttemptOrder = Literal["started", "step", "reward", "credit", "turns", "tokens", "calls", "errors", "seconds"]
"""The column by which a list of attempts is sorted. "credit" is the sum of the advantages of an attempt's tokens."""

ORDERS: Mapping[AttemptOrder, str] = {
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
        step: the number of the optimizer step at which the attempt was trained or dropped.
        fate: "trained", "dropped", or "pending" (neither trained nor dropped yet).
        task: the id of the task.
        has_reward: whether the reward is known.
        reward_below: the reward is below this number.
        reward_from: the reward is at least this number.
        reward_to: the reward is at most this number.
        text: this text occurs in the attempt's id, in ``status_reason`` or in ``fate_reason`` (see
            :class:`AttemptSummary`). Case is ignored.
        recorded: whether the attempt has token records (:class:`TokenRecord`).
        id_prefix: the attempt's id begins with this text, with or without the name of the run.
    """

    split: str | None = None
    step: int | None = None
    status: Status | None = None
    fate: AttemptFateName | None = None
    task: str | None = None
    group_id: int | None = None
    has_reward: bool | None = None
    reward_below: float | None = None
    reward_from: float | None = None
    reward_to: float | None = None
    text: str | None = None
    recorded: bool | None = None
    id_prefix: str | None = None


@dataclass(frozen=True, slots=True)
class AttemptSummary:
    """One line in a list of attempts.

    Attributes:
        version: the version of the weights with which the attempt started.
        status: how the episode ended. None: the episode has not ended, and all counts are 0.
        status_reason: why the attempt failed, or why a reward could not be computed.
        call_errors: the number of tool calls whose result is an error.
        reward: the weighted sum of all rewards; None if not known.
        fate: "trained" or "dropped"; None if not decided yet.
        step: the number of the optimizer step at which the attempt was trained or dropped.
        fate_reason: why the attempt was dropped.
        credit: the sum of the advantages of the attempt's tokens; None if the attempt was not trained.
    """

    attempt: AttemptId
    split: str
    version: int
    status: Status | None
    status_reason: str | None
    seconds: float
    turns: int
    action_tokens: int
    calls: int
    call_errors: int
    reward: float | None
    fate: FateName | None
    step: int | None
    fate_reason: str | None
    credit: float | None
    has_token_records: bool


TABLES = "current_attempts AS attempts LEFT JOIN outcomes ON outcomes.attempt_id = attempts.id"
_RECORDED = "EXISTS (SELECT 1 FROM token_records WHERE token_records.attempt_id = attempts.id)"
COLUMNS = f"""
    attempts.run, attempts.task, attempts.group_id, attempts.sample_index, attempts.retry, split, version,
    status, outcomes.reason, coalesce(seconds, 0.0), coalesce(turns, 0), coalesce(action_tokens, 0), coalesce(calls, 0),
    coalesce(call_errors, 0), reward, fate, step, attempts.reason, credit, {_RECORDED}
"""


@dataclass(frozen=True, slots=True)
class Query:
    sql: str
    parameters: tuple[Any, ...]


def page_query(where: AttemptFilter, sort: AttemptOrder, descending: bool, limit: int, offset: int) -> Query:
    """Return the query of one page of a sorted list: at most ``limit`` attempts after the first ``offset`` attempts.

    Attempts without a value in the column ``sort`` come last. :func:`read_summary` reads a row of the result.
    """
    condition = condition_query(where)
    order = f"{ORDERS[sort]} {'DESC' if descending else 'ASC'} NULLS LAST"
    order += "" if sort == "started" else ", attempts.id"  # so that pages of equal values do not overlap
    # The page is chosen before its columns are read, because sorting whole rows takes much longer.
    chosen = f"SELECT attempts.id FROM {TABLES} WHERE {condition.sql} ORDER BY {order} LIMIT ? OFFSET ?"
    sql = f"SELECT {COLUMNS} FROM {TABLES} WHERE attempts.id IN ({chosen}) ORDER BY {order}"
    return Query(sql, (*condition.parameters, limit, offset))


def count_query(where: AttemptFilter, most: int | None = None) -> Query:
    """Return the query that counts the attempts that meet the conditions in the argument ``where``."""
    condition = condition_query(where)
    rows = f"SELECT 1 FROM {TABLES} WHERE {condition.sql} LIMIT ?"
    return Query(f"SELECT count(*) FROM ({rows})", (*condition.parameters, -1 if most is None else most))


def condition_query(where: AttemptFilter) -> Query:
    """Return the conditions of a filter as one SQL expression with its parameters.

    Example:
        Query("split = ? AND reward >= ?", ("train", 0.5))
    """
    conditions = {
        "split = ?": where.split,
        "step = ?": where.step,
        "status = ?": where.status,
        "fate = ?": None if where.fate == "pending" else where.fate,
        "attempts.task = ?": where.task,
        "attempts.group_id = ?": where.group_id,
        f"{_RECORDED} = ?": where.recorded,
        "(reward IS NOT NULL) = ?": where.has_reward,
        "reward < ?": where.reward_below,
        "reward >= ?": where.reward_from,
        "reward <= ?": where.reward_to,
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
    return Query(" AND ".join(sql) or "TRUE", tuple(parameters))


def read_summary(row: Sequence[Any]) -> AttemptSummary:
    """Convert a row of the result of :func:`page_query` to a summary."""
    run, task, group_id, sample_index, retry, split, version, status, status_reason, seconds, *counts = row
    turns, action_tokens, calls, call_errors, reward, fate, step, fate_reason, credit, has_token_records = counts
    return AttemptSummary(
        AttemptId(run, task, group_id, sample_index, retry),
        split,
        version,
        None if status is None else Status(status),
        status_reason,
        seconds,
        turns,
        action_tokens,
        calls,
        call_errors,
        reward,
        fate,
        step,
        fate_reason,
        None if credit is None else decode_number(credit),
        bool(has_token_records),
    )
