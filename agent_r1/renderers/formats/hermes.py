"""Tool calls as Hermes, Qwen2.5 and Qwen3 write them: ``<tool_call>`` JSON ``</tool_call>`` inside the text."""

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
    before,
    call_from_json,
    malformed_call,
    parse_json,
)

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_OPEN, _CLOSE = re.compile(rf"{OPEN}\s*"), re.compile(rf"\s*{CLOSE}")


class Hermes(ToolFormat):
    """Example: <tool_call>\\n{"name": "add", "arguments": {"a": 1}}\\n</tool_call>"""

    name: ClassVar[str] = "hermes"

    def read(self, said: str, tools: Tools) -> ParsedOutput:
        return ParsedOutput(before(said, OPEN), tuple(_calls(said)))


def _calls(said: str) -> Iterator[ParsedCall]:
    """The calls; an unclosed one reaches to the next, or to the end."""
    opened = _OPEN.search(said)
    while opened:
        call = _call(said, opened.start() + len(OPEN), _closed(said, opened.end()))
        yield call
        opened = _OPEN.search(said, call.end)


def _closed(said: str, start: int) -> int | None:
    """The end of a call whose JSON begins at ``start``, where there is a whole value: its strings may hold marks."""
    try:
        _, end = json.JSONDecoder().raw_decode(said, start)
    except (ValueError, RecursionError):
        return None
    closed = _CLOSE.match(said, end)
    return closed.end() if closed else None


def _call(said: str, start: int, end: int | None) -> ParsedCall:
    if end is None:
        inside, _, _ = said[start:].partition(OPEN)
        inside, mark, _ = inside.partition(CLOSE)
        end = start + len(inside + mark)
        if not mark:
            return malformed_call(inside, end, f"the call is not closed by {CLOSE}")
    raw = said[start:end].removesuffix(CLOSE)
    try:
        return call_from_json(_with_arguments(parse_json(raw)), raw, end)
    except ValueError as error:
        return malformed_call(raw, end, f"the call is not valid JSON: {error}")


def _with_arguments(data: Any) -> Any:
    """What models write of a call's arguments besides an object: nothing, or JSON inside a string, as OpenAI does."""
    if not isinstance(data, dict):
        return data
    arguments = data.get("arguments", {})
    try:
        return data | {"arguments": parse_json(arguments) if isinstance(arguments, str) else arguments}
    except ValueError:
        return data
