"""The base class of tool-call formats, and the result of parsing with one."""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

from agent_r1.core.errors import UnsupportedChat
from agent_r1.core.messages import Message, to_openai
from agent_r1.core.tool import ToolSpec

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"

Tools = tuple[ToolSpec, ...]


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A tool call in a text.

    Attributes:
        name: the tool; "" if it could not be read.
        arguments: None if the call could not be read; ``error`` is then the reason.
        raw: the part of the text that the policy wrote for it.
        end: the number of characters of the text up to the end of the call.

    Example:
        ParsedCall("add", {"a": 1}, '{"name": "add", "arguments": {"a": 1}}', end=61)
    """

    name: str
    arguments: Mapping[str, Any] | None
    raw: str
    end: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ParsedOutput:
    """A text without its reasoning: the content beside the calls, and the calls in their order.

    ``end`` is the number of its characters that belong to the action, if the format ends the action by text.

    Example:
        ParsedOutput("I look.", (ParsedCall("search", {"query": "Alba"}, '{"name": ..}', end=70),))
    """

    content: str
    calls: tuple[ParsedCall, ...] = ()
    end: int | None = None


class ToolFormat(ABC):
    """One way of writing calls: parses them, and converts messages to the form that its templates take."""

    name: ClassVar[str]
    delimiters: ClassVar[tuple[str, ...]] = ()
    """Texts that no argument may hold: a template does not escape them, so the call would be read as another one."""

    required_tokens: ClassVar[tuple[str, ...]] = ()
    """Special tokens that the tokenizers of this format have. Without them the format is not detected."""

    @abstractmethod
    def parse(self, text: str, tools: Tools) -> ParsedOutput:
        """Return the content and calls of a text without its reasoning.

        Never raises: a call that cannot be read has an ``error``.
        """

    def split_reasoning(self, text: str, opened: bool = False) -> tuple[str | None, str]:
        """Return (reasoning, rest); the rest is a suffix of the text.

        ``opened`` means that the prompt ended inside the reasoning.
        """
        return split_reasoning(text, opened)

    def check_writable(self, messages: Iterable[Message]) -> None:
        """Raise UnsupportedChat if a call, written by the template, would be read as another one.

        Calls of a policy are malformed already when they are parsed. Calls that come with a task may be like this.
        """
        for call in (call for message in messages for call in message.calls if self.delimiters and call.arguments):
            if found := find_delimiter(call.arguments or {}, self.delimiters):
                problem = f"a call of {call.name!r} cannot be written as {self.name}: an argument holds {found}"
                raise UnsupportedChat(f"{problem}, which ends it; take it out, or give another --tool_format")

    def stop_strings(self, tools: Tools) -> tuple[str, ...]:
        """Return the texts that may end an action without an end token. Most formats have none."""
        return ()

    def is_complete(self, text: str, tools: Tools) -> bool:
        """Return whether the action ends within ``text``, whatever text follows."""
        end = self.parse(text, tools).end
        return end is not None and self.parse(f"{text}.", tools).end == end

    def completion_check(self, tools: Tools, *, is_opened: bool, thoughts: int) -> Callable[[str], bool]:
        """Return a function that takes each further part of one action, and returns whether the action may be complete.

        :meth:`is_complete` confirms it. A format with stop strings overrides this: it is called for each of them.

        Args:
            tools: the tools of the prompt.
            is_opened: whether the action begins inside a thought.
            thoughts: how many leading thoughts are no part of the text that :meth:`parse` sees.
        """
        return lambda part: True

    def to_template(self, messages: Sequence[Message], tools: Tools) -> list[dict[str, Any]]:
        """Return the messages as the dictionaries that a chat template of this format takes."""
        return [to_openai(message) for message in messages]

    def tool_instructions(self, tools: Tools) -> str | None:
        """Return a system message that describes the tools, for templates that do not; None if there is none."""
        return None


def split_reasoning(text: str, opened: bool = False) -> tuple[str | None, str]:
    """Return (reasoning, rest). Reasoning that is not closed has no rest.

    Example:
        >>> split_reasoning("<think>\\nSo.\\n</think>\\n\\nYes."), split_reasoning("So I", opened=True)
        (('So.', 'Yes.'), ('So I', ''))
    """
    stripped = text.lstrip()
    if not opened and not stripped.startswith(THINK_OPEN):
        return None, text
    reasoning, _, rest = stripped.removeprefix(THINK_OPEN).partition(THINK_CLOSE)
    return reasoning.strip("\n"), rest.lstrip("\n")


def find_delimiter(arguments: Mapping[str, Any], delimiters: Iterable[str]) -> str | None:
    """Return the delimiter that arguments hold when a template writes them; None if they hold none.

    The arguments are written out again, because JSON may have spelled the delimiter with escapes.

    Example:
        >>> find_delimiter({"words": ["a</parameter>"]}, ("</parameter>",))
        '</parameter>'
    """
    text = json.dumps(dict(arguments), ensure_ascii=False, default=str)
    return next((delimiter for delimiter in delimiters if delimiter in text), None)


@dataclass(frozen=True, slots=True)
class CallBlock:
    """The text between the delimiters of a call; ``end`` counts the characters of the whole text up to its end.

    Example:
        CallBlock('{"name": "add"', is_closed=False, end=25)
    """

    text: str
    is_closed: bool
    end: int


def split_blocks(text: str, opening: str, closing: str) -> list[CallBlock]:
    """Return the block of each call; a call that is not closed reaches to the next one, or to the end.

    Example:
        >>> [block.end for block in split_blocks("<a>{}</a> and <a>{", "<a>", "</a>")]
        [9, 18]
    """
    content, *pieces = text.split(opening)
    found = []
    start = len(content)
    for piece in pieces:
        inside, mark, _ = piece.partition(closing)
        found.append(CallBlock(inside, bool(mark), start + len(opening + inside + mark)))
        start += len(opening + piece)
    return found


def text_before(text: str, opening: str) -> str:
    """Return the text before the first call, without the line break that separates them."""
    content, mark, _ = text.partition(opening)
    return content.removesuffix("\n") if mark else content


MAX_JSON_DEPTH = 100
"""Levels of lists and objects in a call. Code that renders, copies and stores a call recurses into them."""

_BRACKET = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{}]', re.DOTALL)
"""A bracket, or a whole string, so that brackets inside strings do not match."""


def parse_json(text: str) -> Any:
    """Return a JSON value. Raises ValueError, with a reason, if the text is not one; NaN and infinities are not."""
    steps = ({"[": 1, "{": 1, "]": -1, "}": -1}.get(token[0], 0) for token in _BRACKET.findall(text))
    if max(accumulate(steps), default=0) > MAX_JSON_DEPTH:
        raise ValueError(f"it is nested too deeply, more than {MAX_JSON_DEPTH} levels")
    return json.loads(text, parse_constant=_refuse_constant, parse_float=_finite_float)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is too large a number")
    return value


def malformed_call(raw: str, end: int, error: str, name: str = "") -> ParsedCall:
    """Return a call that could not be read, with the reason."""
    return ParsedCall(name, None, raw, end, error)


def call_from_json(data: object, raw: str, end: int, key: str = "arguments") -> ParsedCall:
    """Return the call for a JSON value: an object with a "name" and an object of arguments under ``key``."""
    if not isinstance(data, dict):
        return malformed_call(raw, end, f"a call is a JSON object, got {type(data).__name__}")
    name = data.get("name")
    if not isinstance(name, str) or not name:
        return malformed_call(raw, end, 'the call has no "name"')
    arguments = data.get(key)
    if not isinstance(arguments, dict):
        return malformed_call(raw, end, f'the call has no "{key}" object', name)
    return ParsedCall(name, arguments, raw, end)


def call_with_arguments(name: str, text: str, raw: str, end: int) -> ParsedCall:
    """Return the call of ``name`` with the JSON object ``text`` as arguments."""
    try:
        arguments = parse_json(text)
    except ValueError as error:
        return malformed_call(raw, end, f"the arguments are not valid JSON: {error}", name)
    return call_from_json({"name": name, "arguments": arguments}, raw, end)
