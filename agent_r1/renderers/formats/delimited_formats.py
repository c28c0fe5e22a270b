"""Tool formats that cannot escape their delimiters: Qwen3.5 and GLM (XML elements), LFM2 (Python calls).

A value ends at the first closing delimiter, so a call whose value contains a delimiter is malformed.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from agent_r1.core.arguments import Kind, parameters_of, parse_json, refuse_duplicates
from agent_r1.core.messages import Message, ToolCall, to_openai
from agent_r1.renderers.formats.json_formats import CLOSE, OPEN
from agent_r1.renderers.formats.tool_format import (
    BlockFormat,
    CallBlock,
    ParsedCall,
    Tools,
    call_from_json,
    malformed_call,
)


class XmlFormat(BlockFormat):
    """A tool format with one XML element for each argument inside ``<tool_call>``.

    A value is plain text, so the tool's schema decides whether ``7`` is a number.
    """

    opening, closing = OPEN, CLOSE
    argument: ClassVar[re.Pattern[str]]
    """The pattern of one argument, with the groups name and value."""

    @abstractmethod
    def split(self, text: str) -> tuple[str, str] | str:
        """Return the name of the tool and the text of all arguments, or the reason why the call cannot be read."""

    def parse_block(self, block: CallBlock, tools: Tools) -> Iterator[ParsedCall]:
        parts = self.split(block.text)
        if isinstance(parts, str):
            yield malformed_call(block.text, block.end, parts)
            return
        name, text = parts
        pairs = self.argument.findall(text)
        keys = [key for key, _ in pairs]
        if left := self.argument.sub("", text).strip():
            yield malformed_call(block.text, block.end, f"this is no argument: {left[:40]!r}", name)
        elif duplicate := next((key for key in keys if keys.count(key) > 1), None):
            yield malformed_call(block.text, block.end, f"argument {duplicate!r} is given twice", name)
        else:
            parameters = parameters_of(next((spec.parameters for spec in tools if spec.name == name), {}))
            try:
                arguments = {key: convert_value(value, parameters.kinds(key)) for key, value in pairs}
            except ValueError as error:
                yield malformed_call(block.text, block.end, f"a value cannot be read: {error}", name)
            else:
                yield ParsedCall(name, arguments, block.text, block.end)


class Qwen35(XmlFormat):
    """The tool format of Qwen3.5.

    Example: <tool_call>\\n<function=add>\\n<parameter=a>\\n1\\n</parameter>\\n</function>\\n</tool_call>
    """

    name: ClassVar[str] = "qwen3.5"
    delimiters: ClassVar[tuple[str, ...]] = (OPEN, CLOSE, "</parameter>")
    argument = re.compile(r"<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
    _function = re.compile(r"\s*<function=([^<>\n]+)>(.*)</function>\s*", re.DOTALL)

    def split(self, text: str) -> tuple[str, str] | str:
        found = self._function.fullmatch(text)
        return (found[1].strip(), found[2]) if found else "a call is <function=NAME> .. </function>"


class Glm(XmlFormat):
    """The tool format of GLM-4.5.

    Example: <tool_call>add\\n<arg_key>a</arg_key>\\n<arg_value>1</arg_value>\\n</tool_call>
    """

    name: ClassVar[str] = "glm"
    delimiters: ClassVar[tuple[str, ...]] = (OPEN, CLOSE, "</arg_value>")
    argument = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)

    def split(self, text: str) -> tuple[str, str] | str:
        name, mark, rest = text.partition("<arg_key>")
        if len(name.split()) != 1:
            return "a call begins with the name of a tool, alone on its line"
        return name.strip(), mark + rest


_WORDS: Mapping[str, Any] = {"true": True, "false": False, "null": None, "none": None}  # of JSON and of Python


def convert_value(text: str, declared: Sequence[Kind]) -> object:
    """Convert the text of an argument to a value of the declared kinds.

    If a text is allowed, return the text, unless it is null, an object or an array, and this is allowed too. Otherwise
    return the JSON value of the text, or the text itself if it is not JSON. Raise ValueError for an object or array
    that is not valid JSON, if no text is allowed.

    Example:
        >>> [convert_value("7", [declared]) for declared in (Kind(("integer",)), Kind(("string",)), Kind())]
        [7, '7', 7]
    """
    is_open = any(kind.types is None and kind.values is None for kind in declared)
    allows_text = any(kind.allows_type("string") for kind in declared)
    value: object = text
    if (word := text.strip().lower()) in _WORDS:
        value = _WORDS[word]
    else:
        try:
            value = parse_json(text)
        except ValueError:
            if text.lstrip().startswith(("{", "[")) and not allows_text:
                raise
    if is_open:
        return value
    candidates = (value, text) if value is None or isinstance(value, list | dict) else (text, value)
    fitting = [one for one in candidates if any(kind.fits(one) for kind in declared)]
    return fitting[0] if fitting else text if allows_text else value


CALL_START, CALL_END = "<|tool_call_start|>", "<|tool_call_end|>"
_CALL = re.compile(r"\s*([^\s()\[\]{},='\"]+)\s*\((.*)\)\s*", re.DOTALL)
_ARGUMENT = re.compile(r"\s*([^\s()\[\]{},='\"]+)\s*=(.*)", re.DOTALL)
_TOKEN = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|[(\[{)\]},]", re.DOTALL)


class Lfm2(BlockFormat):
    """The tool format of LFM2 and LFM2.5: a list of Python calls between special tokens.

    Calls are written into the content of messages, because the template of LFM2 does not write calls, and the template
    of LFM2.5 does not escape quotes.
    """

    name: ClassVar[str] = "lfm2"
    opening, closing = CALL_START, CALL_END
    delimiters: ClassVar[tuple[str, ...]] = (CALL_START, CALL_END)
    required_tokens: ClassVar[tuple[str, ...]] = (CALL_START, CALL_END)

    def parse_block(self, block: CallBlock, tools: Tools) -> Iterator[ParsedCall]:
        inside = block.text.strip()
        if not (inside.startswith("[") and inside.endswith("]")):
            yield malformed_call(block.text, block.end, "calls are written as a list: [name(argument=value)]")
            return
        start = block.end - len(CALL_END) - len(block.text) + block.text.index("[") + 1
        parts = _split_at_commas(inside[1:-1])
        for number, part in enumerate(parts):
            end = block.end if number == len(parts) - 1 else start + len(part)
            yield _python_call(part.strip(), end)
            start += len(part) + 1

    def write_message(self, message: Message) -> dict[str, Any]:
        data = to_openai(message)
        if data.pop("tool_calls", None):
            data["content"] += f"{CALL_START}[{', '.join(map(_written, message.calls))}]{CALL_END}"
        return data


def _written(call: ToolCall) -> str:
    # The text of a policy's call is kept. The raw text of a client's call holds only its arguments.
    read = _python_call(call.raw, 0)
    if (read.name, read.arguments) == (call.name, call.arguments):
        return call.raw
    arguments = json.loads(json.dumps(dict(call.arguments or {})))  # plain values, so that repr writes Python literals
    return f"{call.name}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"


def _split_at_commas(text: str) -> list[str]:
    # commas in strings and in brackets do not count
    parts, begin, depth = [], 0, 0
    for found in _TOKEN.finditer(text):
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(found[0], 0)
        if found[0] == "," and depth == 0:
            parts.append(text[begin : found.start()])
            begin = found.end()
    return [*parts, text[begin:]]


def _python_call(text: str, end: int) -> ParsedCall:
    found = _CALL.fullmatch(text)
    if found is None:
        return malformed_call(text, end, "a call is written as name(argument=value)")
    name, arguments = found[1], {}
    for part in _split_at_commas(found[2]) if found[2].strip() else ():
        argument = _ARGUMENT.fullmatch(part)
        if argument is None:
            return malformed_call(text, end, f"an argument is written as name=value, got {part.strip()[:40]!r}", name)
        if argument[1] in arguments:
            return malformed_call(text, end, f"argument {argument[1]!r} is given twice", name)
        try:
            arguments[argument[1]] = _python_value(argument[2].strip())
        except ValueError as error:
            return malformed_call(text, end, f"the value of {argument[1]} cannot be read: {error}", name)
    return call_from_json({"name": name, "arguments": arguments}, text, end)


def _python_value(text: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns about unknown escapes, and keeps them unchanged
            tree = ast.parse(text.strip(), mode="eval")
            value = ast.literal_eval(tree)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return parse_json(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            keys = [ast.literal_eval(key) for key in node.keys if key is not None]
            if other := [key for key in keys if not isinstance(key, str)]:
                raise ValueError(f"the key {other[0]!r} is no text")
            refuse_duplicates([(key, None) for key in keys])
    try:
        return parse_json(json.dumps(value, allow_nan=False))
    except TypeError as error:
        raise ValueError(f"{error}") from None
