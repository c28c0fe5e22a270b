"""Tool calls read by the response template of a tokenizer: transformers parses them as the template says."""

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

_CALLS = "tool_calls"
_REASONING = ("reasoning_content", "thinking")
"""Fields in which response templates keep the reasoning."""


class Response(ToolFormat):
    """``template`` is the tokenizer's ``response_template``, ``header`` the text that a prompt ends with.

    The parser has to see the header: it may hold the beginning of the message (opened reasoning).
    """

    name: ClassVar[str] = "response"

    def __init__(self, template: Mapping[str, Any], header: str) -> None:
        self._template, self._header = dict(template), header

    def split_reasoning(self, text: str, opened: bool = False) -> tuple[str | None, str]:
        """Return the reasoning and the whole text: the parser separates the two itself."""
        message, _ = self._parse(text, ())
        return next((str(message[name]) for name in _REASONING if message.get(name)), None), text

    def parse(self, text: str, tools: Tools) -> ParsedOutput:
        message, calls = self._parse(text, tools)
        return ParsedOutput(str(message.get("content") or ""), tuple(calls))

    def _parse(self, text: str, tools: Tools) -> tuple[Mapping[str, Any], list[ParsedCall]]:
        """Return the message and its calls. The parser is fed one character at a time, which gives the end of each."""
        schemas: list[dict[Any, Any] | Callable[..., Any]] = [tool.to_openai() for tool in tools]
        parser = ResponseParser(self._template, prefix=self._header, tools=schemas or None)
        calls: list[ParsedCall] = []
        end = start = 0
        try:
            for end, character in enumerate(text, start=1):
                start = _add_calls(parser.feed(character), text, start, end, calls)
            message, events = parser.finalize()
            _add_calls(events, text, start, len(text), calls)
        except Exception as error:  # a third-party template may raise anything on a policy's text
            reason = f"it does not follow the model's response template: {' '.join(str(error).split())[:200]}"
            return {}, [*calls, malformed_call(text[start:], len(text), reason)]
        return message, calls


def _add_calls(events: list[dict[str, Any]], text: str, start: int, end: int, calls: list[ParsedCall]) -> int:
    """Add the calls that were completed at ``end``; return the index at which the next part begins."""
    for event in events:
        if event["type"] == "region_close" and event["field"] == _CALLS:
            for value in event["value"] if isinstance(event["value"], list) else [event["value"]]:
                data = value.get("function", value) if isinstance(value, dict) else value
                calls.append(call_from_json(data, text[start:end], end))
            start = end
    return start
