"""Tool calls whose arguments are elements of their own inside ``<tool_call>``: Qwen3.5 and GLM-4.5.

Values are bare text there, so the tool's schema decides whether ``7`` is a number. A value that holds a closing mark
ends there; what is left of it is refused, and the policy told why, unless it looks like an argument: then it is one.
So is a call whose JSON spells a mark with escapes: the template would write the mark itself.
A call of somebody else's with such a value is refused before the template writes it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import ClassVar

from agent_r1.renderers.formats.arguments import argument_schema, convert_value
from agent_r1.renderers.formats.hermes import CLOSE, OPEN
from agent_r1.renderers.formats.tool_format import (
    CallBlock,
    ParsedCall,
    ParsedOutput,
    ToolFormat,
    Tools,
    before,
    find_delimiter,
    malformed_call,
    split_blocks,
)

_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


class Qwen35(ToolFormat):
    """Example: <tool_call>\\n<function=add>\\n<parameter=a>\\n1\\n</parameter>\\n</function>\\n</tool_call>"""

    name: ClassVar[str] = "qwen3.5"
    marks: ClassVar[tuple[str, ...]] = (OPEN, CLOSE, "</parameter>")

    def read(self, said: str, tools: Tools) -> ParsedOutput:
        return _reading(said, tools, _function, self.marks)


class Glm(ToolFormat):
    """Example: <tool_call>add\\n<arg_key>a</arg_key>\\n<arg_value>1</arg_value>\\n</tool_call>"""

    name: ClassVar[str] = "glm"
    marks: ClassVar[tuple[str, ...]] = (OPEN, CLOSE, "</arg_value>")

    def read(self, said: str, tools: Tools) -> ParsedOutput:
        return _reading(said, tools, _keyed, self.marks)


Parts = tuple[str, str, re.Pattern[str]]
"""A tool's name, the text of its arguments, and how one of them looks."""


def _function(block: str) -> Parts | str:
    found = _FUNCTION.fullmatch(block)
    return (found[1].strip(), found[2], _PARAMETER) if found else "a call is <function=NAME> .. </function>"


def _keyed(block: str) -> Parts | str:
    name, mark, rest = block.partition("<arg_key>")
    if not name.strip() or len(name.split()) > 1:
        return "a call begins with the name of a tool, alone on its line"
    return name.strip(), mark + rest, _ARGUMENT


def _reading(said: str, tools: Tools, divide: Callable[[str], Parts | str], marks: tuple[str, ...]) -> ParsedOutput:
    calls = (_writable(_call(block, tools, divide), marks) for block in split_blocks(said, OPEN, CLOSE))
    return ParsedOutput(before(said, OPEN), tuple(calls))


def _writable(call: ParsedCall, marks: tuple[str, ...]) -> ParsedCall:
    """The call, malformed where no template could write it so that it is read as the same: that costs a turn, and
    refusing it later would cost the episode."""
    if mark := find_delimiter(call.arguments or {}, marks):
        return malformed_call(call.raw, call.end, f"an argument holds {mark}, which ends it", call.name)
    return call


def _call(block: CallBlock, tools: Tools, divide: Callable[[str], Parts | str]) -> ParsedCall:
    if not block.closed:
        return malformed_call(block.text, block.end, f"the call is not closed by {CLOSE}")
    parts = divide(block.text)
    if isinstance(parts, str):
        return malformed_call(block.text, block.end, parts)
    name, text, pattern = parts
    given = pattern.findall(text)
    keys = [key for key, _ in given]
    if left := pattern.sub("", text).strip():
        return malformed_call(block.text, block.end, f"this is no argument: {left[:40]!r}", name)
    if twice := next((key for key in keys if keys.count(key) > 1), None):
        return malformed_call(block.text, block.end, f"argument {twice!r} is given twice", name)
    arguments = {key: convert_value(value, argument_schema(tools, name, key)) for key, value in given}
    return ParsedCall(name, arguments, block.text, block.end)
