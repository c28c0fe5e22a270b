"""Core types as JSON documents and back, exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agent_r1.core.inference import PolicyVersionSpan
from agent_r1.core.messages import Action, ContentPart, Media, Message, Text, ToolCall
from agent_r1.core.tool import ToolResult

DEEPEST = 100
TOO_DEEP = f"(nested deeper than {DEEPEST} levels)"

LONGEST_INTEGER = 4096
"""Bits of an integer that are written as a number; Python refuses to spell much longer ones."""


def from_value(value: Any, depth: int = 0) -> Any:
    """Any value as JSON. Tuples and mappings with odd keys are tagged, so that they come back as they were.

    What JSON cannot hold (objects, sets, integers of a thousand digits) is kept as text; what lies deeper
    than ``DEEPEST`` levels is replaced by ``TOO_DEEP``, because a policy can write brackets without end.

    Example:
        >>> from_value({"titles": ("Alba", "Bruno")})
        {'titles': {'$tuple': ['Alba', 'Bruno']}}
    """
    if isinstance(value, int) and value.bit_length() > LONGEST_INTEGER:
        return hex(value)
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if not isinstance(value, list | tuple | Mapping):
        return _described(value)
    if depth == DEEPEST:
        return TOO_DEEP
    if isinstance(value, list):
        return [from_value(item, depth + 1) for item in value]
    if isinstance(value, tuple):
        return {"$tuple": [from_value(item, depth + 1) for item in value]}
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: from_value(item, depth + 1) for key, item in value.items()}
    return {"$pairs": [[from_value(key, depth + 1), from_value(item, depth + 1)] for key, item in value.items()]}


def _described(value: object) -> str:
    """Its ``repr``, which is a tool's own code and may fail like any."""
    try:
        return repr(value)
    except Exception as error:
        return f"({type(value).__name__}, whose repr raised {type(error).__name__})"


def to_value(data: Any) -> Any:
    """The inverse of :func:`from_value`."""
    if isinstance(data, list):
        return [to_value(item) for item in data]
    if not isinstance(data, dict):
        return data
    if "$tuple" in data:
        return tuple(to_value(item) for item in data["$tuple"])
    if "$pairs" in data:
        return {to_value(key): to_value(item) for key, item in data["$pairs"]}
    return {key: to_value(item) for key, item in data.items()}


def from_parts(parts: Sequence[ContentPart]) -> list[Any]:
    """A text part is its string, a media part its fields."""
    return [part.text if isinstance(part, Text) else {"sha256": part.sha256, "mime": part.mime} for part in parts]


def to_parts(data: Sequence[Any]) -> tuple[ContentPart, ...]:
    """The inverse of :func:`from_parts`."""
    return tuple(Text(part) if isinstance(part, str) else Media(**part) for part in data)


def from_message(message: Message) -> dict[str, Any]:
    """A message with everything core knows of it; OpenAI's form would lose raw text and errors of calls."""
    return {
        "role": message.role,
        "parts": from_parts(message.parts),
        "calls": [[call.id, call.name, from_value(call.arguments), call.raw, call.error] for call in message.calls],
        "reasoning": message.reasoning,
        "call_id": message.call_id,
    }


def to_message(data: Mapping[str, Any]) -> Message:
    """The inverse of :func:`from_message`."""
    calls = tuple(
        ToolCall(id, name, to_value(arguments), raw, error) for id, name, arguments, raw, error in data["calls"]
    )
    return Message(data["role"], to_parts(data["parts"]), calls, data["reasoning"], data["call_id"])


def from_messages(messages: Sequence[Message]) -> list[Any]:
    return [from_message(message) for message in messages]


def to_messages(data: Sequence[Any]) -> tuple[Message, ...]:
    return tuple(to_message(message) for message in data)


def from_action(action: Action) -> list[Any]:
    return [from_message(action.message), action.text]


def to_action(data: Sequence[Any]) -> Action:
    return Action(to_message(data[0]), data[1])


def from_result(result: ToolResult) -> list[Any]:
    return [from_parts(result.parts), result.ok, result.error, from_value(result.data), result.seconds]


def to_result(data: Sequence[Any]) -> ToolResult:
    parts, ok, error, value, seconds = data
    return ToolResult(to_parts(parts), ok, error, to_value(value), seconds)


def version_spans_to_json(version_spans: Sequence[PolicyVersionSpan]) -> list[Any]:
    return [[span.start, span.version] for span in version_spans]


def version_spans_from_json(data: Sequence[Any]) -> tuple[PolicyVersionSpan, ...]:
    return tuple(PolicyVersionSpan(start, version) for start, version in data)
