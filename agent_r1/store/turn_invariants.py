"""Invariants of stored trajectories: all turns can be read and are consistent."""

from __future__ import annotations

import math
import sqlite3
import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from agent_r1.core.inference import PolicyVersionSpan
from agent_r1.core.tool import ToolResult
from agent_r1.core.trajectory import Status
from agent_r1.store.codec import (
    decode_action,
    decode_media,
    decode_messages,
    decode_result,
    decode_tools,
    decode_version_spans,
)
from agent_r1.store.compression import TurnTokens, unpack_columns, unpack_document
from agent_r1.store.rows import decode_reward

DECODING_ERRORS = (zlib.error, struct.error, ValueError, KeyError, TypeError, IndexError, AttributeError)
"""The errors that can be raised when a damaged turn or outcome is decoded."""


def invalid_turns(connection: sqlite3.Connection) -> Iterator[str]:
    """Yield the first problem of each attempt with an unreadable or inconsistent trajectory."""
    columns = "attempts.id, attempt, status, start, newest_version, turns, action_tokens, calls, call_errors"
    sql = f"SELECT {columns} FROM attempts JOIN outcomes ON attempt_id = attempts.id ORDER BY attempts.id"
    for key, attempt, status, start, newest, *counts in connection.execute(sql):
        try:
            _ = Status(status), decode_messages(unpack_document(start))
            problem = next(_attempt_problems(connection, key, newest, _Counts(*counts)), None)
        except DECODING_ERRORS as error:
            problem = f"cannot be read: {type(error).__name__}: {error}"
        if problem is not None:
            yield f"{attempt} {problem}"


class _Counts(NamedTuple):
    """Counts of one attempt. The fields are columns of the table ``outcomes``."""

    turns: int
    action_tokens: int
    calls: int
    call_errors: int


def _attempt_problems(connection: sqlite3.Connection, key: int, newest: int, counts: _Counts) -> Iterator[str]:
    newest_found = -1
    turns = env_turns = action_tokens = 0
    results: list[ToolResult] = []
    columns = "turn, parent, kind, tokens, content, numbers"
    tables = "turns LEFT JOIN token_records USING (attempt_id, turn)"
    rows = connection.execute(f"SELECT {columns} FROM {tables} WHERE attempt_id = ? ORDER BY turn", (key,))
    for turn, parent, kind, packed, content, numbers in rows:
        if turn != turns:
            yield f"lacks turn {turns}"
        if parent is not None and not 0 <= parent < turn:
            yield f"has turn {parent} as the parent of turn {turn}"
        tokens = TurnTokens.unpack(packed)
        turn_results, spans = _decode_content(content)
        yield from (f"turn {turn} {problem}" for problem in _token_problems(tokens, spans))
        if numbers is not None and (length := len(unpack_columns(numbers)[0])) != len(tokens.action_ids):
            yield f"turn {turn} has {len(tokens.action_ids)} action tokens and a token record of {length}"
        newest_found = max([newest_found, *(span.version for span in spans)])
        results += turn_results
        action_tokens += len(tokens.action_ids)
        turns += 1
        env_turns += kind == "act"
    if newest_found != newest:
        yield f"was sampled up to version {newest_found}, but its outcome has version {newest}"
    found = _Counts(turns, action_tokens, len(results), sum(not result.ok for result in results))
    for name, count, recorded in zip(_Counts._fields, found, counts, strict=True):
        if count != recorded:
            yield f"has {count} {name}, but its outcome has {recorded}"
    # A reward per turn has one number for each turn, or for each turn that is not a summary.
    yield from _reward_problems(connection, key, {turns, env_turns})


def _decode_content(content: bytes) -> tuple[list[ToolResult], tuple[PolicyVersionSpan, ...]]:
    """Decode the stored content of a turn. Return the tool results, and which policy version sampled which tokens.

    If the content is damaged, raise one of ``DECODING_ERRORS``.
    """
    action, observation, results, version_spans, (_call_ends, _calls_with_rewards), state, media = unpack_document(
        content
    )
    new_messages, tools = state
    _ = decode_action(action), decode_messages(observation), decode_messages(new_messages or ())
    _ = decode_tools(tools), decode_media(media)
    return [decode_result(result) for result in results], decode_version_spans(version_spans)


def _token_problems(tokens: TurnTokens, spans: tuple[PolicyVersionSpan, ...]) -> Iterator[str]:
    actions = len(tokens.action_ids)
    if actions != len(tokens.logprobs):
        yield f"has {actions} action tokens and {len(tokens.logprobs)} log-probabilities"
    if any(math.isnan(value) for value in tokens.logprobs):
        yield "has a log-probability that is not a number"
    starts = [span.start for span in spans]
    if actions and (starts[:1] != [0] or starts != sorted(set(starts)) or starts[-1] >= actions):
        yield f"has version spans that start at {starts} in {actions} action tokens"


def _reward_problems(connection: sqlite3.Connection, key: int, lengths: set[int]) -> Iterator[str]:
    names = set()
    sql = "SELECT turn, call, name, value FROM rewards WHERE attempt_id = ?"
    for turn, call, name, value in connection.execute(sql, (key,)):
        reward = decode_reward(value)
        if isinstance(reward, tuple) and (turn is not None or len(reward) not in lengths):
            yield f"has {len(reward)} numbers of reward {name} for {max(lengths)} turns"
        if (turn, call, name) in names:
            yield f"has reward {name} twice"
        names.add((turn, call, name))
