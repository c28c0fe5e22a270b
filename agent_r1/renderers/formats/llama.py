"""Tool calls of Llama 3: the text begins with a JSON object ``{"name": .., "parameters": ..}``."""

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
_LOOKS_LIKE_CALL = re.compile(r'\{\s*"(?:name|type)"')


class Llama(ToolFormat):
    """The tool format of Llama 3: a text with calls begins with a JSON object.

    The tag ``<|python_tag|>`` can come before the object. Without the tag, a JSON object is a call only if it has a
    name and parameters, or the name of a known tool. Several calls are separated by ``;``. Text after the calls is
    dropped. Without tools, every text is an answer.

    Example: {"name": "add", "parameters": {"a": 1}}
    """

    name: ClassVar[str] = "llama3"

    def parse(self, text: str, tools: Tools) -> ParsedOutput:
        stripped = text.lstrip()
        tagged = stripped.startswith(TAG)
        start = len(text) - len(stripped) + tagged * len(TAG)
        calls = _parse_calls(text, start, tagged, frozenset(tool.name for tool in tools)) if tools else ()
        return ParsedOutput("" if calls else text, calls)

    def to_template(self, messages: Sequence[Message], tools: Tools) -> list[dict[str, Any]]:
        return [_to_template(message) for message in messages]


def _to_template(message: Message) -> dict[str, Any]:
    data = to_openai(message)
    if len(data.get("tool_calls", ())) > 1:  # the template refuses several calls in one message
        del data["tool_calls"]
        data["content"] = "; ".join(call.raw for call in message.calls)
    return data


def _parse_calls(text: str, start: int, tagged: bool, known: frozenset[str]) -> tuple[ParsedCall, ...]:
    calls: list[ParsedCall] = []
    while rest := text[start:].lstrip("; \n\t"):
        begin = len(text) - len(rest)
        must_be_call = tagged and not calls
        try:
            _, start = json.JSONDecoder().raw_decode(text, begin)
            data = parse_json(text[begin:start])
        except (ValueError, RecursionError) as error:
            if must_be_call or _LOOKS_LIKE_CALL.match(rest):
                calls.append(malformed_call(rest, len(text), f"the call is not valid JSON: {error}"))
            break
        if not must_be_call and not _is_call(data, known):
            break
        calls.append(call_from_json(data, text[begin:start], start, "parameters"))
    return tuple(calls)


def _is_call(data: object, known: frozenset[str]) -> bool:
    if not isinstance(data, dict) or not isinstance(name := data.get("name"), str):
        return False
    return "parameters" in data or name in known
