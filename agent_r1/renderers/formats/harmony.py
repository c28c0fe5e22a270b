"""Tool calls as gpt-oss writes them: messages on channels, a call addressed to ``functions.NAME``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from agent_r1.core.messages import Message, ToolCall, to_openai
from agent_r1.renderers.formats.tool_format import ParsedCall, ParsedOutput, ToolFormat, Tools, arguments_of

START, MESSAGE, CHANNEL = "<|start|>assistant", "<|message|>", "<|channel|>"
_ANALYSIS = re.compile(
    r"(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>(.*?)(?:<\|end\|>(?:<\|start\|>assistant)?|\Z)",
    re.DOTALL,
)
_TO = re.compile(r"to=(?:functions\.)?([^\s<]+)")


class Harmony(ToolFormat):
    """The thought is what is said on the analysis channel. A call ends its action (``<|call|>``).

    Example: <|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}
    """

    name: ClassVar[str] = "harmony"

    def divide(self, text: str, opened: bool = False) -> tuple[str | None, str]:
        found = _ANALYSIS.match(text)
        return (found[1], text[found.end() :]) if found else (None, text)

    def read(self, said: str, tools: Tools) -> ParsedOutput:
        contents, calls = [], []
        for header, body, end in _segments(said):
            to = _TO.search(header)
            if to is not None:
                calls.append(_call(to[1], body, end))
            elif "analysis" not in header:
                contents.append(body)
        return ParsedOutput("" if calls else "".join(contents), tuple(calls))

    def shaped(self, messages: Sequence[Message], tools: Tools) -> list[dict[str, Any]]:
        """A call that could not be read is shown as it was written: a tool's answer has to follow a call."""
        return [_shaped(message) for message in messages]


def _segments(said: str) -> Iterator[tuple[str, str, int]]:
    """(header, body, how many characters of the whole it ends after) of each message."""
    end = 0
    for piece in said.split(START):
        end += len(piece)
        header, mark, body = piece.partition(MESSAGE)
        if mark:
            yield header, body.removesuffix("<|end|>"), end
        elif piece:
            yield (piece, "", end) if "to=" in piece and CHANNEL in piece else ("", piece, end)
        end += len(START)


def _call(name: str, body: str, end: int) -> ParsedCall:
    return arguments_of(name, body, body, end)


def _shaped(message: Message) -> dict[str, Any]:
    data = to_openai(message)
    reasoning = data.pop("reasoning_content", None)
    if reasoning is not None:
        data["thinking"] = _escape_channel(reasoning)
    if message.role == "assistant":
        data["content"] = _escape_channel(data["content"])
    if any(call.arguments is None for call in message.calls):
        data |= {"content": "", "tool_calls": [_as_written(call) for call in message.calls]}
    return data


def _escape_channel(text: str) -> str:
    """The template raises where the names of channels stand in a content or a thought."""
    return text.replace(CHANNEL, f"{CHANNEL[0]} {CHANNEL[1:]}")


def _as_written(call: ToolCall) -> dict[str, Any]:
    arguments = call.raw if call.arguments is None else dict(call.arguments)
    return {"type": "function", "function": {"name": call.name or "unknown", "arguments": arguments}}
