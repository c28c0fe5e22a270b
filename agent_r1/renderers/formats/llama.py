"""Tool calls as Llama 3 writes them: all that is said is one JSON object, ``{"name": .., "parameters": ..}``."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, ClassVar

from agent_r1.core.messages import Message, to_openai
from agent_r1.renderers.formats.tool_format import (
    ParsedCall,
    ParsedOutput,
    ToolFormat,
    Tools,
    call_from_json,
    malformed_call,
    parse_json,
)

TAG = "<|python_tag|>"
_LIKE_A_CALL = re.compile(r'\{\s*"(?:name|type)"')


class Llama(ToolFormat):
    """What begins with a brace, or with the python tag, is calls; several stand one after the other, apart by ``;``.
    What is said after them is dropped.

    Without the tag, a JSON object is a call only where it has a name and parameters, or names a tool there is; any
    other is an answer, and so is everything where there are no tools.

    Example: {"name": "add", "parameters": {"a": 1}}
    """

    name: ClassVar[str] = "llama3"

    def read(self, said: str, tools: Tools) -> ParsedOutput:
        text = said.lstrip()
        tagged = text.startswith(TAG)
        start = len(said) - len(text) + tagged * len(TAG)
        calls = _calls(said, start, tagged, frozenset(tool.name for tool in tools)) if tools else ()
        return ParsedOutput("" if calls else said, calls)

    def shaped(self, messages: Sequence[Message], tools: Tools) -> list[dict[str, Any]]:
        """Its templates refuse several calls in one message: those stay the text they are."""
        return [_shaped(message) for message in messages]


def _shaped(message: Message) -> dict[str, Any]:
    data = to_openai(message)
    if len(data.get("tool_calls", ())) > 1:
        del data["tool_calls"]
        data["content"] = "; ".join(call.raw for call in message.calls)
    return data


def _calls(said: str, start: int, tagged: bool, known: frozenset[str]) -> tuple[ParsedCall, ...]:
    calls: list[ParsedCall] = []
    while rest := said[start:].lstrip("; \n\t"):
        begin = len(said) - len(rest)
        must_be = tagged and not calls
        try:
            _, start = json.JSONDecoder().raw_decode(said, begin)
            data = parse_json(said[begin:start])
        except (ValueError, RecursionError) as error:
            if must_be or _LIKE_A_CALL.match(rest):
                calls.append(malformed_call(rest, len(said), f"the call is not valid JSON: {error}"))
            break
        if not must_be and not _is_call(data, known):
            break
        calls.append(call_from_json(data, said[begin:start], start, "parameters"))
    return tuple(calls)


def _is_call(data: object, known: frozenset[str]) -> bool:
    if not isinstance(data, dict) or not isinstance(name := data.get("name"), str):
        return False
    return "parameters" in data or name in known
