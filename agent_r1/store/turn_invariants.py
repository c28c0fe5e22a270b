"""Whether the turns of every trajectory can be read, and agree with themselves."""

from __future__ import annotations

import math
import sqlite3
import struct
import zlib
from collections.abc import Iterator

from agent_r1.core.inference import PolicyVersionSpan
from agent_r1.store.codec import version_spans_from_json
from agent_r1.store.compression import Tokens, unpack_document
from agent_r1.store.rows import to_reward

UNREADABLE = (zlib.error, struct.error, ValueError, KeyError, TypeError, IndexError)


def broken_turns(connection: sqlite3.Connection, _: object) -> Iterator[str]:
    """Every attempt whose turns or rewards contradict themselves, and how."""
    for key, attempt, newest in connection.execute(
        "SELECT id, attempt, newest_version FROM attempts JOIN outcomes ON attempt_id = id ORDER BY id"
    ):
        try:
            wrong = next(_contradictions(connection, key, newest), None)
        except UNREADABLE as error:
            wrong = f"cannot be read: {type(error).__name__}: {error}"
        if wrong is not None:
            yield f"{attempt} {wrong}"


def _contradictions(connection: sqlite3.Connection, key: int, newest: int) -> Iterator[str]:
    seen = -1
    count = acts = 0
    columns = "turn, parent, kind, tokens, said"
    rows = connection.execute(f"SELECT {columns} FROM turns WHERE attempt_id = ? ORDER BY turn", (key,))
    for turn, parent, kind, tokens, said in rows:
        if turn != count:
            yield f"lacks turn {count}"
        if parent is not None and not 0 <= parent < turn:
            yield f"continues turn {parent} in turn {turn}"
        version_spans = version_spans_from_json(unpack_document(said)[3])
        yield from (f"turn {turn} {wrong}" for wrong in _token_contradictions(Tokens.unpack(tokens), version_spans))
        seen = max([seen, *(span.version for span in version_spans)])
        count += 1
        acts += kind == "act"
    if seen != newest:
        yield f"was sampled up to version {seen}, its outcome says {newest}"
    yield from _reward_contradictions(connection, key, {count, acts})


def _token_contradictions(tokens: Tokens, version_spans: tuple[PolicyVersionSpan, ...]) -> Iterator[str]:
    acted = len(tokens.action_ids)
    if acted != len(tokens.logprobs):
        yield f"has {acted} action tokens and {len(tokens.logprobs)} log-probabilities"
    if any(math.isnan(value) for value in tokens.logprobs):
        yield "has a log-probability that is no number"
    starts = [span.start for span in version_spans]
    if acted and (starts[:1] != [0] or starts != sorted(set(starts)) or starts[-1] >= acted):
        yield f"has spans of weights that begin at {starts} in {acted} action tokens"


def _reward_contradictions(connection: sqlite3.Connection, key: int, turns: set[int]) -> Iterator[str]:
    names = set()
    sql = "SELECT turn, call, name, value FROM rewards WHERE attempt_id = ?"
    for turn, call, name, value in connection.execute(sql, (key,)):
        reward = to_reward(value)
        if isinstance(reward, tuple) and (turn is not None or len(reward) not in turns):
            yield f"has {len(reward)} numbers of reward {name} for {max(turns)} turns"
        if (turn, call, name) in names:
            yield f"has reward {name} twice"
        names.add((turn, call, name))
