"""Tool calls by the response template that a tokenizer brings: transformers reads them as that says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from transformers.utils.chat_parsing import ResponseParser

from agent_r1.renderers.formats.tool_format import (
    ParsedCall,
    ParsedOutput,
    ToolFormat,
    Tools,
    call_from_json,
    malformed_call,
)

CALLS = "tool_calls"
THOUGHTS = ("reasoning_content", "thinking")
"""Fields in which templates keep the thought."""


class Response(ToolFormat):
    """``template`` is the tokenizer's ``response_template``, ``header`` what a prompt ends with: it may hold the
    beginning of the message (an opened thought) that the parser has to see.
    """

    name: ClassVar[str] = "response"

    def __init__(self, template: Mapping[str, Any], header: str) -> None:
        self._template, self._header = dict(template), header

    def divide(self, text: str, opened: bool = False) -> tuple[str | None, str]:
        """The parser tells the thought from the rest, so the rest is left whole."""
        message, _ = self._parsed(text, ())
        return next((str(message[name]) for name in THOUGHTS if message.get(name)), None), text

    def read(self, said: str, tools: Tools) -> ParsedOutput:
        message, calls = self._parsed(said, tools)
        return ParsedOutput(str(message.get("content") or ""), tuple(calls))

    def _parsed(self, text: str, tools: Tools) -> tuple[Mapping[str, Any], list[ParsedCall]]:
        """The message, and its calls with where they end: fed by characters, the parser tells when each is complete."""
        shown: list[dict[Any, Any] | Callable[..., Any]] = [tool.to_openai() for tool in tools]
        parser = ResponseParser(self._template, prefix=self._header, tools=shown or None)
        calls: list[ParsedCall] = []
        place = start = 0
        try:
            for place, character in enumerate(text, start=1):
                start = _take(parser.feed(character), text, start, place, calls)
            message, events = parser.finalize()
            _take(events, text, start, len(text), calls)
        except Exception as error:  # what a template of somebody's makes of a policy's text may be anything
            reason = f"it does not follow the model's response template: {' '.join(str(error).split())[:200]}"
            return {}, [*calls, malformed_call(text[start:], len(text), reason)]
        return message, calls


def _take(events: list[dict[str, Any]], text: str, start: int, place: int, calls: list[ParsedCall]) -> int:
    """Add the calls that were completed at ``place``; the place where what comes next begins."""
    for event in events:
        if event["type"] == "region_close" and event["field"] == CALLS:
            for value in event["value"] if isinstance(event["value"], list) else [event["value"]]:
                data = value.get("function", value) if isinstance(value, dict) else value
                calls.append(call_from_json(data, text[start:place], place))
            start = place
    return start
