"""Encode events as rows of the run database, and numbers and rewards as column values."""

from __future__ import annotations

import json
import math
import sqlite3
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
    TokensRecorded,
)
from agent_r1.core.messages import Image
from agent_r1.core.token_record import TokenRecord
from agent_r1.core.trajectory import RewardValue, Trajectory, Turn
from agent_r1.core.weighted_rewards import total_reward
from agent_r1.store.codec import (
    encode_action,
    encode_media,
    encode_messages,
    encode_result,
    encode_tools,
    encode_version_spans,
)
from agent_r1.store.compression import TurnTokens, pack_columns, pack_document, unpack_columns

CHECKPOINT_SAVED = "checkpoint_saved"
"""The kind of the row that records a saved checkpoint. The detail of the row is the step."""

# The row with the fate "superseded" for an attempt that is pending when a later segment starts the attempt again.
_RESTARTED = """
    SELECT id, ?2, 'superseded', (SELECT step FROM segments WHERE segment = ?2), 'it was started again', NULL
    FROM attempts
    WHERE attempt = ?1 AND segment < ?2 AND NOT EXISTS (SELECT 1 FROM fates WHERE attempt_id = attempts.id)
"""

_PENDING = """
    SELECT id, ?1, 'dropped', ?2, ?3, NULL
    FROM attempts WHERE NOT EXISTS (SELECT 1 FROM fates WHERE attempt_id = attempts.id) ORDER BY id
"""

Values = tuple[Any, ...]


class Rows(NamedTuple):
    """Rows for one table. A row has a value for each column of the table except ``id`` and ``seal``, in order."""

    table: str
    values: Sequence[Values]


def attempt_key(attempt: AttemptId) -> str:
    """Return the name under which an attempt is stored, such as "demo:3.0.1:style-a/7".

    The example has the run "demo", the group 3, attempt 0 of this group, the retry 1, and the task "style-a/7".
    """
    return _escape(str(attempt))


def encode_number(value: float) -> float | str:
    """Return a number as a column value. NaN becomes text, because SQLite would store null."""
    return "NaN" if math.isnan(value) else float(value)


def decode_number(value: float | str) -> float:
    return float(value)


def encode_reward(value: RewardValue) -> float | str | None:
    """Return a reward as a column value.

    Example:
        >>> encode_reward(1.0), encode_reward((0.5, 0.0)), encode_reward(None)
        (1.0, '[0.5, 0.0]', None)
    """
    if isinstance(value, tuple):
        return json.dumps([float(item) for item in value])
    return None if value is None else encode_number(value)


def decode_reward(value: float | str | None) -> RewardValue:
    if not isinstance(value, str):
        return value
    data = json.loads(value)
    return tuple(data) if isinstance(data, list) else data


def event_rows(
    event: Event, segment: int, reward_weights: Mapping[str, float], connection: sqlite3.Connection
) -> Iterator[Rows]:
    """Yield the rows that record one event, by table.

    Args:
        segment: the segment (a stretch of training without a stop) of the event.
        reward_weights: the weight of each reward, by name. A reward without an entry has weight 1.
        connection: the database. The rows of all earlier events must already be in the database.
    """
    match event:
        case AttemptStarted(attempt, split, version):
            key = attempt_key(attempt)
            if segment > 1:
                yield Rows("fates", connection.execute(_RESTARTED, (key, segment)).fetchall())
            name = (key, segment, _escape(attempt.run), _escape(attempt.task), *attempt.sort_key)
            yield Rows("attempts", [(*name, _escape(split), version)])
        case AttemptFinished(trajectory):
            yield Rows("images", _new_images(trajectory, connection))
            yield from _trajectory_rows(trajectory, _latest_id(trajectory.attempt, connection), reward_weights)
        case AttemptFate(attempt, fate, step, reason, credit):
            text = None if reason is None else _escape(reason)
            number = None if credit is None else encode_number(credit)
            yield Rows("fates", [(_latest_id(attempt, connection), segment, fate, step, text, number)])
        case TokensRecorded(records):
            ids = {record.attempt: _latest_id(record.attempt, connection) for record in records}
            values = [(ids[record.attempt], record.turn, encode_token_record(record)) for record in records]
            yield Rows("token_records", values)
        case PendingDropped(step, reason):
            yield Rows("fates", connection.execute(_PENDING, (segment, step, _escape(reason))).fetchall())
        case PolicyPublished(version):
            yield Rows("versions", [(segment, version.number, version.step, version.checksum)])
        case StepMetrics(step, values):
            yield _metrics_rows(segment, step, values, reproducible=True)
        case StepTimings(step, values):
            yield _metrics_rows(segment, step, values, reproducible=False)
        case CheckpointSaved(step):
            yield _event_row(segment, CHECKPOINT_SAVED, str(step))
        case LogEvent(kind, detail):
            yield _event_row(segment, kind, detail)


def _latest_id(attempt: AttemptId, connection: sqlite3.Connection) -> int | None:
    """Return the row id of the latest start of an attempt; None if the attempt was never started.

    The rows about an attempt contain this id. The database refuses such a row if the id is None, so nothing can be
    recorded about an attempt before its start.
    """
    sql = "SELECT id FROM attempts WHERE attempt = ? ORDER BY segment DESC LIMIT 1"
    found = connection.execute(sql, (attempt_key(attempt),)).fetchone()
    return None if found is None else int(found[0])


def _escape(text: str) -> str:
    """Escape lone surrogates, which SQLite refuses."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _event_row(segment: int, kind: str, detail: str) -> Rows:
    return Rows("events", [(segment, time.time(), _escape(kind), _escape(detail))])


def _metrics_rows(segment: int, step: int, values: Mapping[str, float], reproducible: bool) -> Rows:
    rows = [(segment, step, _escape(name), encode_number(value), int(reproducible)) for name, value in values.items()]
    return Rows("metrics", rows)


def encode_token_record(record: TokenRecord) -> bytes:
    columns = (record.logprobs, record.advantages, record.loss_weights, record.entropies)
    return pack_columns((*columns, record.values) if record.values else columns)


def decode_token_record(attempt: AttemptId, turn: int, blob: bytes) -> TokenRecord:
    return TokenRecord(attempt, turn, *unpack_columns(blob))


def _new_images(trajectory: Trajectory, connection: sqlite3.Connection) -> list[Values]:
    images = {image.sha256: image for message in trajectory.messages for image in message.images}
    for turn in trajectory.turns:  # a result that is not in a message, and prompts whose context was rewritten
        images |= {part.sha256: part for result in turn.results for part in result.parts if isinstance(part, Image)}
        images |= {media.image.sha256: media.image for media in turn.media}
    held = "SELECT 1 FROM images WHERE sha256 = ?"
    new = [
        image for image in images.values() if image.data and not connection.execute(held, (image.sha256,)).fetchone()
    ]
    return [(image.sha256, image.mime, image.data) for image in new]


def _trajectory_rows(
    trajectory: Trajectory, attempt_id: int | None, reward_weights: Mapping[str, float]
) -> Iterator[Rows]:
    reason = None if trajectory.reason is None else _escape(trajectory.reason)
    # -1 if no token was sampled
    newest = max((span.version for turn in trajectory.turns for span in turn.version_spans), default=-1)
    start = pack_document(encode_messages(trajectory.start))
    end = (trajectory.status.value, int(trajectory.truncated), reason, float(trajectory.seconds))
    task = _escape(trajectory.task_id)
    results = [result for turn in trajectory.turns for result in turn.results]
    counts = (
        len(trajectory.turns),
        sum(len(turn.action_ids) for turn in trajectory.turns),
        len(results),
        sum(not result.ok for result in results),
    )
    reward = total_reward(trajectory, reward_weights)
    answer = None if trajectory.answer is None else _escape(trajectory.answer)
    times = (float(trajectory.start_time), float(trajectory.wait_seconds))
    yield Rows("outcomes", [(attempt_id, *end, task, newest, *counts, reward, start, answer, *times)])
    yield Rows("turns", [(attempt_id, *_turn_values(turn, trajectory)) for turn in trajectory.turns])
    yield Rows("rewards", [(attempt_id, *values) for values in _reward_values(trajectory)])


def _turn_values(turn: Turn, trajectory: Trajectory) -> Values:
    is_known = turn.new_messages == trajectory.known_messages(turn)  # as for most turns; then it is not stored twice
    content = [
        encode_action(turn.action),
        encode_messages(turn.observation),
        [encode_result(result) for result in turn.results],
        encode_version_spans(turn.version_spans),
        [list(turn.call_ends), len(turn.call_rewards)],
        [None if is_known else encode_messages(turn.new_messages), encode_tools(turn.tools)],
        encode_media(turn.media),
    ]
    tokens = TurnTokens(turn.new_ids, turn.action_ids, turn.logprobs).pack()
    timing = turn.timing
    times: Values = (None,) * 4
    if timing is not None:
        times = (timing.start_seconds, timing.first_token_seconds, timing.end_seconds, timing.env_seconds)
    return turn.index, turn.parent, _escape(turn.kind), turn.finish_reason, tokens, pack_document(content), *times


def _reward_values(trajectory: Trajectory) -> Iterator[Values]:
    for name, value in trajectory.rewards.items():
        yield None, None, _escape(name), encode_reward(value)
    for turn in trajectory.turns:
        for name, value in turn.rewards.items():
            yield turn.index, None, _escape(name), encode_reward(value)
        for call, rewards in enumerate(turn.call_rewards):
            for name, value in rewards.items():
                yield turn.index, call, _escape(name), encode_reward(value)
