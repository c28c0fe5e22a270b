"""Tool calls of LFM2 and LFM2.5: a list of Python calls between special tokens."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from agent_r1.core.messages import Message, ToolCall, to_openai
from agent_r1.renderers.formats.tool_format import (
    CallBlock,
    ParsedCall,
    ParsedOutput,
    ToolFormat,
    Tools,
    call_from_json,
    malformed_call,
    parse_json,
    split_blocks,
    text_before,
)

OPEN, CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
_CALL = re.compile(r"\s*([^\s()\[\]{},='\"]+)\s*\((.*)\)\s*", re.DOTALL)
_ARGUMENT = re.compile(r"\s*([^\s()\[\]{},='\"]+)\s*=(.*)", re.DOTALL)
_TOKEN = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|[(\[{)\]},]", re.DOTALL)


class Lfm2(ToolFormat):
    """The tool format of LFM2 and LFM2.5.

    Calls are written into the content of messages, because the template of LFM2 does not write calls, and the template
    of LFM2.5 does not escape quotes.

    Example: <|tool_call_start|>[add(a=1, b=2), search(query='Alba')]<|tool_call_end|>
    """

    name: ClassVar[str] = "lfm2"
    delimiters: ClassVar[tuple[str, ...]] = (OPEN, CLOSE)
    required_tokens: ClassVar[tuple[str, ...]] = (OPEN, CLOSE)

    def parse(self, text: str, tools: Tools) -> ParsedOutput:
        blocks = split_blocks(text, OPEN, CLOSE)
        return ParsedOutput(text_before(text, OPEN), tuple(call for block in blocks for call in _parse_block(block)))

    def to_template(self, messages: Sequence[Message], tools: Tools) -> list[dict[str, Any]]:
        return [_to_template(message) for message in messages]


def _to_template(message: Message) -> dict[str, Any]:
    data = to_openai(message)
    if data.pop("tool_calls", None):
        data["content"] += f"{OPEN}[{', '.join(map(_written, message.calls))}]{CLOSE}"
    return data


def _written(call: ToolCall) -> str:
    arguments = json.loads(json.dumps(dict(call.arguments or {})))
    return call.raw or f"{call.name}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"


def _parse_block(block: CallBlock) -> Iterator[ParsedCall]:
    inside = block.text.strip()
    if not block.is_closed:
        yield malformed_call(block.text, block.end, f"the call is not closed by {CLOSE}")
        return
    if not (inside.startswith("[") and inside.endswith("]")):
        yield malformed_call(block.text, block.end, "calls are written as a list: [name(argument=value)]")
        return
    start = block.end - len(CLOSE) - len(block.text) + block.text.index("[") + 1
    parts = _split(inside[1:-1])
    for number, part in enumerate(parts):
        end = block.end if number == len(parts) - 1 else start + len(part)
        yield _parse_call(part.strip(), end)
        start += len(part) + 1


def _split(text: str) -> list[str]:
    parts, begin, depth = [], 0, 0
    for found in _TOKEN.finditer(text):
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(found[0], 0)
        if found[0] == "," and depth == 0:
            parts.append(text[begin : found.start()])
            begin = found.end()
    return [*parts, text[begin:]]


def _parse_call(text: str, end: int) -> ParsedCall:
    found = _CALL.fullmatch(text)
    if found is None:
        return malformed_call(text, end, "a call is written as name(argument=value)")
    name, arguments = found[1], {}
    for part in _split(found[2]) if found[2].strip() else ():
        argument = _ARGUMENT.fullmatch(part)
        if argument is None:
            return malformed_call(text, end, f"an argument is written as name=value, got {part.strip()[:40]!r}", name)
        if argument[1] in arguments:
            return malformed_call(text, end, f"argument {argument[1]!r} is given twice", name)
        try:
            arguments[argument[1]] = _parse_value(argument[2].strip())
        except ValueError as error:
            return malformed_call(text, end, f"the value of {argument[1]} cannot be read: {error}", name)
    call = call_from_json({"name": name, "arguments": arguments}, text, end)
    holds = any(mark in json.dumps(arguments, ensure_ascii=False) for mark in (OPEN, CLOSE))
    return malformed_call(text, end, "an argument holds the tokens of a call", name) if holds else call


def _parse_value(text: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns about unknown escapes, and keeps them unchanged
            return parse_json(json.dumps(ast.literal_eval(text), allow_nan=False))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return parse_json(text)
