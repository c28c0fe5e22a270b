"""The tool format of tokenizers with a response template.

A response template describes how a model writes messages and calls.
"""

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


class Response(ToolFormat):
    """The tool format of a tokenizer with a response template.

    The response template describes how the model writes messages and calls. The parser of transformers reads the calls
    with this template.

    Args:
        template: the ``response_template`` of the tokenizer.
        header: the text at the end of every prompt, such as ``<|im_start|>assistant``. The header can also contain the
            tag that begins the reasoning, such as ``<think>``.
    """

    name: ClassVar[str] = "response"

    def __init__(self, template: Mapping[str, Any], header: str) -> None:
        self._template, self._header = dict(template), header

    def split_reasoning(self, text: str, opened: bool = False) -> tuple[str | None, str]:
        """Return the pair (reasoning, ``text``), or (None, ``text``) if ``text`` has no reasoning.

        The reasoning is not removed from ``text``, because :meth:`parse` skips the reasoning.
        """
        message, _ = self._parse(text, ())
        return next((str(message[name]) for name in _REASONING if message.get(name)), None), text

    def parse(self, text: str, tools: Tools) -> ParsedOutput:
        message, calls = self._parse(text, tools)
        return ParsedOutput(str(message.get("content") or ""), tuple(calls))

    def _parse(self, text: str, tools: Tools) -> tuple[Mapping[str, Any], list[ParsedCall]]:
        schemas: list[dict[Any, Any] | Callable[..., Any]] = [tool.to_openai() for tool in tools]
        parser = ResponseParser(self._template, prefix=self._header, tools=schemas or None)
        calls: list[ParsedCall] = []
        end = start = 0
        try:
            # one character at a time, so that the index at which each call ends is known
            for end, character in enumerate(text, start=1):
                start = _add_calls(parser.feed(character), text, start, end, calls)
            message, events = parser.finalize()
            _add_calls(events, text, start, len(text), calls)
        except Exception as error:  # with a third-party template, the parser can raise an exception of any type
            reason = f"it does not follow the model's response template: {' '.join(str(error).split())[:200]}"
            return {}, [*calls, malformed_call(text[start:], len(text), reason)]
        return message, calls


def _add_calls(events: list[dict[str, Any]], text: str, start: int, end: int, calls: list[ParsedCall]) -> int:
    for event in events:
        if event["type"] == "region_close" and event["field"] == _CALLS:
            for value in event["value"] if isinstance(event["value"], list) else [event["value"]]:
                data = value.get("function", value) if isinstance(value, dict) else value
                calls.append(call_from_json(data, text[start:end], end))
            start = end
    return start
