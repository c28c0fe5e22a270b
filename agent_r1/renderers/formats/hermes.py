"""Tool calls of Hermes, Qwen2.5 and Qwen3: a JSON object between ``<tool_call>`` and ``</tool_call>``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, ClassVar

from agent_r1.renderers.formats.tool_format import (
    ParsedCall,
    ParsedOutput,
    ToolFormat,
    Tools,
    call_from_json,
    malformed_call,
    parse_json,
    text_before,
)

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_OPEN, _CLOSE = re.compile(rf"{OPEN}\s*"), re.compile(rf"\s*{CLOSE}")


class Hermes(ToolFormat):
    """The tool format of Hermes, Qwen2.5 and Qwen3.

    Example: <tool_call>\\n{"name": "add", "arguments": {"a": 1}}\\n</tool_call>
    """

    name: ClassVar[str] = "hermes"

    def parse(self, text: str, tools: Tools) -> ParsedOutput:
        return ParsedOutput(text_before(text, OPEN), tuple(_parse_calls(text)))


def _parse_calls(text: str) -> Iterator[ParsedCall]:
    """Yield the calls of a text. A call that is not closed ends at the next call, or at the end of the text."""
    opened = _OPEN.search(text)
    while opened:
        call = _parse_call(text, opened.start() + len(OPEN), _end_of_call(text, opened.end()))
        yield call
        opened = _OPEN.search(text, call.end)


def _end_of_call(text: str, start: int) -> int | None:
    """Return the index after the call whose JSON begins at ``start``; None if the call is not complete."""
    try:  # decode the JSON, because a string in it can contain the closing tag
        _, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    closed = _CLOSE.match(text, end)
    return closed.end() if closed else None


def _parse_call(text: str, start: int, end: int | None) -> ParsedCall:
    if end is None:
        inside, _, _ = text[start:].partition(OPEN)
        inside, closing, _ = inside.partition(CLOSE)
        end = start + len(inside + closing)
        if not closing:
            return malformed_call(inside, end, f"the call is not closed by {CLOSE}")
    raw = text[start:end].removesuffix(CLOSE)
    try:
        return call_from_json(_with_arguments(parse_json(raw)), raw, end)
    except ValueError as error:
        return malformed_call(raw, end, f"the call is not valid JSON: {error}")


def _with_arguments(data: Any) -> Any:
    """Return the JSON value of a call with an object under the key "arguments".

    If the key is missing, add an empty object. If the arguments are a string, as in the format of OpenAI, parse the
    string as JSON. Return other values unchanged.
    """
    if not isinstance(data, dict):
        return data
    arguments = data.get("arguments", {})
    try:
        return data | {"arguments": parse_json(arguments) if isinstance(arguments, str) else arguments}
    except ValueError:
        return data
