"""Tool calls of gpt-oss (the Harmony format): messages on channels. A call is a message to ``functions.NAME``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from agent_r1.core.messages import Message, ToolCall, to_openai
from agent_r1.renderers.formats.tool_format import ParsedOutput, ToolFormat, Tools, call_with_arguments

START, MESSAGE, CHANNEL = "<|start|>assistant", "<|message|>", "<|channel|>"
_ANALYSIS = re.compile(
    r"(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>(.*?)(?:<\|end\|>(?:<\|start\|>assistant)?|\Z)",
    re.DOTALL,
)
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")


class Harmony(ToolFormat):
    """The Harmony format. The reasoning is the text on the analysis channel. The token ``<|call|>`` ends an action.

    Example: <|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}
    """

    name: ClassVar[str] = "harmony"

    def split_reasoning(self, text: str, opened: bool = False) -> tuple[str | None, str]:
        found = _ANALYSIS.match(text)
        return (found[1], text[found.end() :]) if found else (None, text)

    def parse(self, text: str, tools: Tools) -> ParsedOutput:
        contents, calls = [], []
        for header, body, end in _split_messages(text):
            recipient = _RECIPIENT.search(header)
            if recipient is not None:
                calls.append(call_with_arguments(recipient[1], body, body, end))
            elif "analysis" not in header:
                contents.append(body)
        return ParsedOutput("" if calls else "".join(contents), tuple(calls))

    def to_template(self, messages: Sequence[Message], tools: Tools) -> list[dict[str, Any]]:
        return [_to_template(message) for message in messages]


def _split_messages(text: str) -> Iterator[tuple[str, str, int]]:
    """Yield (header, body, end) for each message in a text: the text before ``<|message|>``, the text after it, and the
    index after the message.
    """
    end = 0
    for piece in text.split(START):
        end += len(piece)
        header, mark, body = piece.partition(MESSAGE)
        if mark:
            yield header, body.removesuffix("<|end|>"), end
        elif piece:
            yield (piece, "", end) if "to=" in piece and CHANNEL in piece else ("", piece, end)
        end += len(START)


def _to_template(message: Message) -> dict[str, Any]:
    data = to_openai(message)
    reasoning = data.pop("reasoning_content", None)
    if reasoning is not None:
        data["thinking"] = _escape_channel(reasoning)
    if message.role == "assistant":
        data["content"] = _escape_channel(data["content"])
    # a malformed call stays a call, because the template requires a call before each tool result
    if any(call.arguments is None for call in message.calls):
        data |= {"content": "", "tool_calls": [_as_written(call) for call in message.calls]}
    return data


def _escape_channel(text: str) -> str:
    """Return the text with a space in each channel token. The template refuses texts that contain channel tokens."""
    return text.replace(CHANNEL, f"{CHANNEL[0]} {CHANNEL[1:]}")


def _as_written(call: ToolCall) -> dict[str, Any]:
    arguments = call.raw if call.arguments is None else dict(call.arguments)
    return {"type": "function", "function": {"name": call.name or "unknown", "arguments": arguments}}
