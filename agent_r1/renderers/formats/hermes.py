"""Tool calls of Hermes, Qwen2.5 and Qwen3: a JSON object between ``<tool_call>`` and ``</tool_call>``."""

from __future__ import annotations

import json
import re
from contextlib import suppress
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
        calls: list[ParsedCall] = []
        opened = _OPEN.search(text)
        while opened:
            calls.append(_parse_call(text, opened.start() + len(OPEN), opened.end()))
            opened = _OPEN.search(text, calls[-1].end)
        return ParsedOutput(text_before(text, OPEN), tuple(calls))


def _parse_call(text: str, start: int, value: int) -> ParsedCall:
    """Return the call whose opening tag ends at ``start``, and whose JSON begins at ``value``.

    If a closing tag comes directly after complete JSON, the call ends with this tag. Otherwise the call ends at the
    next closing tag, at the next opening tag or at the end of the text, whichever comes first.
    """
    closed = None
    with suppress(ValueError, RecursionError):  # decode the JSON, because a string in it can contain the closing tag
        closed = _CLOSE.match(text, json.JSONDecoder().raw_decode(text, value)[1])
    if closed is not None:
        end = closed.end()
    else:
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
    """Return the JSON value of a call, with an object under the key "arguments".

    If the key is missing, the object is empty. A string under this key, as in the format of OpenAI, is parsed as JSON.
    """
    if not isinstance(data, dict):
        return data
    arguments = data.get("arguments", {})
    try:
        return data | {"arguments": parse_json(arguments) if isinstance(arguments, str) else arguments}
    except ValueError:
        return data
