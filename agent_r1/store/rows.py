"""Encode events as rows of the run database, and numbers and rewards as column values."""

from __future__ import annotations

import json
import math
import sqlite3
import struct
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

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
    TokenRecord,
    TokensRecorded,
)
from agent_r1.core.inference import PolicyVersionSpan, PromptMedia
from agent_r1.core.messages import Action, ContentPart, Image, Message, Text, ToolCall, ToolResult, ToolSpec
from agent_r1.core.trajectory import AttemptId, RewardValue, Trajectory, Turn, total_reward

MAX_DEPTH = 100
TOO_DEEP = f"(nested deeper than {MAX_DEPTH} levels)"

MAX_INTEGER_BITS = 4096
"""The maximum bit length of an integer that is stored as a number. Larger integers are stored as hexadecimal text."""


def encode_value(value: Any, depth: int = 0) -> Any:
    """Convert a value to a JSON value. :func:`decode_value` converts the result back.

    Tuples, and mappings with keys that are not text, are marked, so that they can be converted back. Objects, sets and
    very long integers become text, and are not converted back. Collections at depth ``MAX_DEPTH`` are replaced by
    ``TOO_DEEP``.

    Example:
        >>> encode_value({"titles": ("Alba", "Bruno")})
        {'titles': {'$tuple': ['Alba', 'Bruno']}}
    """
    if isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
        return hex(value)
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if not isinstance(value, list | tuple | Mapping):
        return _safe_repr(value)
    if depth == MAX_DEPTH:  # a policy can generate any number of nested brackets
        return TOO_DEEP
    if isinstance(value, list):
        return [encode_value(item, depth + 1) for item in value]
    if isinstance(value, tuple):
        return {"$tuple": [encode_value(item, depth + 1) for item in value]}
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: encode_value(item, depth + 1) for key, item in value.items()}
    return {"$pairs": [[encode_value(key, depth + 1), encode_value(item, depth + 1)] for key, item in value.items()]}


def _safe_repr(value: object) -> str:
    try:
        return repr(value)
    except Exception as error:
        return f"({type(value).__name__}, whose repr raised {type(error).__name__})"


def decode_value(data: Any) -> Any:
    if isinstance(data, list):
        return [decode_value(item) for item in data]
    if not isinstance(data, dict):
        return data
    if "$tuple" in data:
        return tuple(decode_value(item) for item in data["$tuple"])
    if "$pairs" in data:
        return {decode_value(key): decode_value(item) for key, item in data["$pairs"]}
    return {key: decode_value(item) for key, item in data.items()}


def encode_parts(parts: Sequence[ContentPart]) -> list[Any]:
    """Encode the parts of a message: a text as a string, an image as an object without its bytes."""
    return [part.text if isinstance(part, Text) else _encode_image(part) for part in parts]


def decode_parts(data: Sequence[Any]) -> tuple[ContentPart, ...]:
    return tuple(Text(part) if isinstance(part, str) else Image(**part) for part in data)


def _encode_image(image: Image) -> dict[str, Any]:
    return {"sha256": image.sha256, "mime": image.mime, "width": image.width, "height": image.height}


def encode_media(media: Sequence[PromptMedia]) -> list[Any]:
    """Encode the images of a prompt, each with the spans [start, stop] of its placeholder tokens."""
    return [[_encode_image(one.image), [[span.start, span.stop] for span in one.spans]] for one in media]


def decode_media(data: Sequence[Any]) -> tuple[PromptMedia, ...]:
    return tuple(PromptMedia(Image(**image), tuple(range(*span) for span in spans)) for image, spans in data)


def encode_message(message: Message) -> dict[str, Any]:
    """Encode a message. Unlike the OpenAI format, the result contains the raw text of each call."""
    return {
        "role": message.role,
        "parts": encode_parts(message.parts),
        "calls": [[call.id, call.name, encode_value(call.arguments), call.raw, call.error] for call in message.calls],
        "reasoning": message.reasoning,
        "call_id": message.call_id,
    }


def decode_message(data: Mapping[str, Any]) -> Message:
    calls = tuple(
        ToolCall(id, name, decode_value(arguments), raw, error) for id, name, arguments, raw, error in data["calls"]
    )
    return Message(data["role"], decode_parts(data["parts"]), calls, data["reasoning"], data["call_id"])


def encode_messages(messages: Sequence[Message]) -> list[Any]:
    return [encode_message(message) for message in messages]


def decode_messages(data: Sequence[Any]) -> tuple[Message, ...]:
    return tuple(decode_message(message) for message in data)


def encode_action(action: Action) -> list[Any]:
    return [encode_message(action.message), action.text]


def decode_action(data: Sequence[Any]) -> Action:
    return Action(decode_message(data[0]), data[1])


def encode_result(result: ToolResult) -> list[Any]:
    return [encode_parts(result.parts), result.ok, result.error, encode_value(result.data), result.seconds]


def decode_result(data: Sequence[Any]) -> ToolResult:
    parts, ok, error, value, seconds = data
    return ToolResult(decode_parts(parts), ok, error, decode_value(value), seconds)


def encode_version_spans(version_spans: Sequence[PolicyVersionSpan]) -> list[Any]:
    return [[span.start, span.version] for span in version_spans]


def decode_version_spans(data: Sequence[Any]) -> tuple[PolicyVersionSpan, ...]:
    return tuple(PolicyVersionSpan(start, version) for start, version in data)


def encode_tools(tools: Sequence[ToolSpec] | None) -> list[Any] | None:
    return None if tools is None else [[tool.name, tool.description, encode_value(tool.parameters)] for tool in tools]


def decode_tools(data: Sequence[Any] | None) -> tuple[ToolSpec, ...] | None:
    if data is None:
        return None
    return tuple(ToolSpec(name, description, decode_value(parameters)) for name, description, parameters in data)


DECODING_ERRORS = (zlib.error, struct.error, ValueError, KeyError, TypeError, IndexError, AttributeError)
"""The errors that can be raised when a damaged row is decoded."""

LEVEL = 1  # The blobs are short, so higher levels take more time and save almost nothing.


class TurnTokens(NamedTuple):
    """The tokens that a turn adds to the prompt, the sampled tokens, and their log-probabilities.

    The packed blob is compressed by zlib. Its layout is little-endian: the number of new ids and the number of action
    ids as uint32, all ids as int32, and the log-probabilities as float64.

    Example:
        >>> TurnTokens.unpack(TurnTokens((5, 6), (9, 2), (-0.3, -0.1)).pack())
        TurnTokens(new_ids=(5, 6), action_ids=(9, 2), logprobs=(-0.3, -0.1))
    """

    new_ids: tuple[int, ...]
    action_ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    def pack(self) -> bytes:
        new, actions = len(self.new_ids), len(self.action_ids)
        layout = f"<2I{new + actions}i{len(self.logprobs)}d"
        return zlib.compress(struct.pack(layout, new, actions, *self.new_ids, *self.action_ids, *self.logprobs), LEVEL)

    @classmethod
    def unpack(cls, blob: bytes) -> TurnTokens:
        data = zlib.decompress(blob)
        new, actions = _COUNTS.unpack_from(data)
        ids = struct.unpack_from(f"<{new + actions}i", data, _COUNTS.size)
        start = _COUNTS.size + 4 * len(ids)
        return cls(ids[:new], ids[new:], struct.unpack_from(f"<{(len(data) - start) // 8}d", data, start))


_COUNTS = struct.Struct("<2I")


def pack_columns(columns: Sequence[Sequence[float]]) -> bytes:
    """Return columns of equal length as one compressed blob, in which every number is exact, also NaN."""
    numbers = [number for column in columns for number in column]
    return zlib.compress(struct.pack(f"<I{len(numbers)}d", len(columns), *numbers), LEVEL)


def unpack_columns(blob: bytes) -> tuple[tuple[float, ...], ...]:
    """Return the columns in a result of :func:`pack_columns`. Raise ValueError if their lengths differ."""
    data = zlib.decompress(blob)
    (columns,) = struct.unpack_from("<I", data)
    numbers = struct.unpack_from(f"<{(len(data) - 4) // 8}d", data, 4)
    if not columns or len(numbers) % columns:
        raise ValueError(f"{len(numbers)} numbers are not {columns} columns of equal length")
    length = len(numbers) // columns
    return tuple(numbers[start * length : (start + 1) * length] for start in range(columns))


def pack_document(document: Any) -> bytes:
    """Return a JSON value as compressed ASCII text. Lone surrogates in strings are stored exactly."""
    return zlib.compress(json.dumps(document, separators=(",", ":")).encode("ascii"), LEVEL)


def unpack_document(blob: bytes) -> Any:
    return json.loads(zlib.decompress(blob))


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
    """Rows for one table. A row has a value for each column of the table except ``id``, in order."""

    table: str
    values: Sequence[Values]


def attempt_key(attempt: AttemptId) -> str:
    """Return the name under which an attempt is stored, such as "demo:3.0.1:style-a/7"."""
    return _escape(str(attempt))


def encode_number(value: float) -> float | str:
    """Return a number as a column value. NaN becomes text, because SQLite would store null."""
    return "NaN" if math.isnan(value) else float(value)


def decode_number(value: float | str) -> float:
    return float(value)


def encode_reward(value: RewardValue) -> float | str | None:
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
    # None if the attempt was never started.
    sql = "SELECT id FROM attempts WHERE attempt = ? ORDER BY segment DESC LIMIT 1"
    found = connection.execute(sql, (attempt_key(attempt),)).fetchone()
    return None if found is None else int(found[0])


def _escape(text: str) -> str:
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


class Counts(NamedTuple):
    """What an outcome says about the turns of its attempt. ``newest_version`` is -1 if no weights sampled one."""

    newest_version: int
    turns: int
    action_tokens: int
    calls: int
    call_errors: int


def count_turns(trajectory: Trajectory) -> Counts:
    results = [result for turn in trajectory.turns for result in turn.results]
    return Counts(
        max((span.version for turn in trajectory.turns for span in turn.version_spans), default=-1),
        len(trajectory.turns),
        sum(len(turn.action_ids) for turn in trajectory.turns),
        len(results),
        sum(not result.ok for result in results),
    )


def _trajectory_rows(
    trajectory: Trajectory, attempt_id: int | None, reward_weights: Mapping[str, float]
) -> Iterator[Rows]:
    reason = None if trajectory.reason is None else _escape(trajectory.reason)
    start = pack_document(encode_messages(trajectory.start))
    end = (trajectory.status.value, int(trajectory.truncated), reason, float(trajectory.seconds))
    reward = total_reward(trajectory, reward_weights)
    answer = None if trajectory.answer is None else _escape(trajectory.answer)
    times = (float(trajectory.start_time), float(trajectory.wait_seconds))
    row = (*end, _escape(trajectory.task_id), *count_turns(trajectory), reward, start, answer, *times)
    yield Rows("outcomes", [(attempt_id, *row)])
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
