"""Convert messages, actions, tool results and other values to JSON values and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agent_r1.core.inference import PolicyVersionSpan, PromptMedia
from agent_r1.core.messages import Action, ContentPart, Image, Message, Text, ToolCall
from agent_r1.core.tool import ToolResult, ToolSpec

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
    """Encode the parts of a message: a text as a string, an image as an object without its bytes.

    Example:
        ["Look:", {"sha256": "9f86d0..", "mime": "image/png", "width": 64, "height": 48}]
    """
    return [part.text if isinstance(part, Text) else _encode_image(part) for part in parts]


def decode_parts(data: Sequence[Any]) -> tuple[ContentPart, ...]:
    return tuple(Text(part) if isinstance(part, str) else Image(**part) for part in data)


def _encode_image(image: Image) -> dict[str, Any]:
    return {"sha256": image.sha256, "mime": image.mime, "width": image.width, "height": image.height}


def encode_media(media: Sequence[PromptMedia]) -> list[Any]:
    """Encode the images of a prompt, each with the spans [start, stop] of its placeholder tokens.

    Example:
        [[{"sha256": "9f86d0..", "mime": "image/png", "width": 64, "height": 48}, [[4, 8]]]]
    """
    return [[_encode_image(one.image), [[span.start, span.stop] for span in one.spans]] for one in media]


def decode_media(data: Sequence[Any]) -> tuple[PromptMedia, ...]:
    return tuple(PromptMedia(Image(**image), tuple(range(*span) for span in spans)) for image, spans in data)


def encode_message(message: Message) -> dict[str, Any]:
    """Encode a message. Unlike the OpenAI format, the result contains the raw text of each call.

    Example:
        {"role": "user", "parts": ["Who rules Alba?"], "calls": [], "reasoning": None, "call_id": None}
    """
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
