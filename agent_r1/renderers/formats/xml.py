"""Tool calls of Qwen3.5 and GLM-4.5, with one XML element for each argument inside ``<tool_call>``.

A value is plain text, so the tool's schema decides whether ``7`` is a number. A value ends at the first closing
delimiter. The format cannot escape a delimiter in a value, so a call whose value contains a delimiter is malformed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import ClassVar

from agent_r1.renderers.formats.json_formats import CLOSE, OPEN
from agent_r1.renderers.formats.tool_format import (
    CallBlock,
    ParsedCall,
    ParsedOutput,
    ToolFormat,
    Tools,
    argument_schema,
    convert_value,
    find_delimiter,
    malformed_call,
    split_blocks,
    text_before,
)

_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)

_CallParts = tuple[str, str, re.Pattern[str]]
"""The parts of a call: the name of the tool, the text of all arguments, and the pattern that finds one argument."""


class Qwen35(ToolFormat):
    """The tool format of Qwen3.5.

    Example: <tool_call>\\n<function=add>\\n<parameter=a>\\n1\\n</parameter>\\n</function>\\n</tool_call>
    """

    name: ClassVar[str] = "qwen3.5"
    delimiters: ClassVar[tuple[str, ...]] = (OPEN, CLOSE, "</parameter>")

    def parse(self, text: str, tools: Tools) -> ParsedOutput:
        return _parse(text, tools, _split_function, self.delimiters)


class Glm(ToolFormat):
    """The tool format of GLM-4.5.

    Example: <tool_call>add\\n<arg_key>a</arg_key>\\n<arg_value>1</arg_value>\\n</tool_call>
    """

    name: ClassVar[str] = "glm"
    delimiters: ClassVar[tuple[str, ...]] = (OPEN, CLOSE, "</arg_value>")

    def parse(self, text: str, tools: Tools) -> ParsedOutput:
        return _parse(text, tools, _split_keyed, self.delimiters)


def _split_function(block: str) -> _CallParts | str:
    # Return the parts of a tool call that a Qwen3.5 model wrote, or the reason why the call cannot be read.
    found = _FUNCTION.fullmatch(block)
    return (found[1].strip(), found[2], _PARAMETER) if found else "a call is <function=NAME> .. </function>"


def _split_keyed(block: str) -> _CallParts | str:
    # Return the parts of a tool call that a GLM model wrote, or the reason why the call cannot be read.
    name, mark, rest = block.partition("<arg_key>")
    if not name.strip() or len(name.split()) > 1:
        return "a call begins with the name of a tool, alone on its line"
    return name.strip(), mark + rest, _ARGUMENT


def _parse(
    text: str, tools: Tools, split: Callable[[str], _CallParts | str], delimiters: tuple[str, ...]
) -> ParsedOutput:
    calls = (_parse_call(block, tools, split) for block in split_blocks(text, OPEN, CLOSE))
    return ParsedOutput(text_before(text, OPEN), tuple(_require_writable(call, delimiters) for call in calls))


def _require_writable(call: ParsedCall, delimiters: tuple[str, ...]) -> ParsedCall:
    # The policy sees a malformed call as an error. Without this check, the next render would fail the episode.
    if found := find_delimiter(call.arguments or {}, delimiters):
        return malformed_call(call.raw, call.end, f"an argument holds {found}, which ends it", call.name)
    return call


def _parse_call(block: CallBlock, tools: Tools, split: Callable[[str], _CallParts | str]) -> ParsedCall:
    if not block.is_closed:
        return malformed_call(block.text, block.end, f"the call is not closed by {CLOSE}")
    parts = split(block.text)
    if isinstance(parts, str):
        return malformed_call(block.text, block.end, parts)
    name, text, pattern = parts
    pairs = pattern.findall(text)
    keys = [key for key, _ in pairs]
    if left := pattern.sub("", text).strip():
        return malformed_call(block.text, block.end, f"this is no argument: {left[:40]!r}", name)
    if duplicate := next((key for key in keys if keys.count(key) > 1), None):
        return malformed_call(block.text, block.end, f"argument {duplicate!r} is given twice", name)
    arguments = {key: convert_value(value, argument_schema(tools, name, key)) for key, value in pairs}
    return ParsedCall(name, arguments, block.text, block.end)
