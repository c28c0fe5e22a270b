"""What every tool-call format is, and what reading with one gives."""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

from agent_r1.core.errors import UnsupportedChat
from agent_r1.core.messages import Message, to_openai
from agent_r1.core.tool import ToolSpec

THINK, THOUGHT = "<think>", "</think>"

Tools = tuple[ToolSpec, ...]


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A call as it stands in a text. ``raw`` is what the policy wrote of it, ``end`` how many characters of the text
    there are up to its end. ``arguments`` is None, and ``error`` says why, where it could not be read.

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
    """A text taken apart: what it says beside its calls, and the calls in their order.

    ``end`` says how many of its characters are the action, where that ends although no token of its own ends it there.

    Example:
        ParsedOutput("I look.", (ParsedCall("search", {"query": "Alba"}, '{"name": ..}', end=70),))
    """

    content: str
    calls: tuple[ParsedCall, ...] = ()
    end: int | None = None


class ToolFormat(ABC):
    """One way of writing calls: reads them, and gives messages the shape that its templates take."""

    name: ClassVar[str]
    marks: ClassVar[tuple[str, ...]] = ()
    """Texts that no argument of a call can hold: a template writes it as it is, and it would be read as another."""

    @abstractmethod
    def read(self, said: str, tools: Tools) -> ParsedOutput:
        """The calls in what was said (a text without its thought). Never raises: what cannot be read has an error."""

    def divide(self, text: str, opened: bool = False) -> tuple[str | None, str]:
        """(thought, rest); the rest is an end of the text. ``opened`` says that the prompt ended inside a thought."""
        return split_reasoning(text, opened)

    def refuse_unreadable(self, messages: Iterable[Message]) -> None:
        """Raise UnsupportedChat where a call, written by the template, would be read as another one.

        What a policy wrote never is such a call: it is malformed where it is read. Calls that come with a task may be.
        """
        for call in (call for message in messages for call in message.calls if self.marks and call.arguments):
            if mark := find_delimiter(call.arguments or {}, self.marks):
                told = f"a call of {call.name!r} cannot be written as {self.name}: an argument holds {mark}"
                raise UnsupportedChat(f"{told}, which ends it; take it out, or give another --tool_format")

    def stop_texts(self, tools: Tools) -> tuple[str, ...]:
        """Texts with which an action may end although no token of its own ends it; mostly there are none."""
        return ()

    def ended(self, said: str, tools: Tools) -> bool:
        """Whether the action ends in what was said so far, whatever is said next."""
        end = self.read(said, tools).end
        return end is not None and self.read(f"{said}.", tools).end == end

    def shaped(self, messages: Sequence[Message], tools: Tools) -> list[dict[str, Any]]:
        """The messages as the dictionaries that a chat template of this format takes."""
        return [to_openai(message) for message in messages]

    def instruction(self, tools: Tools) -> str | None:
        """What a system message says of the tools where the template does not show them; None: it has to."""
        return None


def split_reasoning(text: str, opened: bool = False) -> tuple[str | None, str]:
    """(thought, rest). A thought that is not closed is all there is: what was cut there was not said.

    Example:
        >>> split_reasoning("<think>\\nSo.\\n</think>\\n\\nYes."), split_reasoning("So I", opened=True)
        (('So.', 'Yes.'), ('So I', ''))
    """
    begun = text.lstrip()
    if not opened and not begun.startswith(THINK):
        return None, text
    thought, _, rest = begun.removeprefix(THINK).partition(THOUGHT)
    return thought.strip("\n"), rest.lstrip("\n")


def find_delimiter(arguments: Mapping[str, Any], marks: Iterable[str]) -> str | None:
    """The mark that arguments hold, as a template writes them: JSON that was read may have spelled it with escapes.

    Example:
        >>> find_delimiter({"words": ["a</parameter>"]}, ("</parameter>",))
        '</parameter>'
    """
    text = json.dumps(dict(arguments), ensure_ascii=False, default=str)
    return next((mark for mark in marks if mark in text), None)


@dataclass(frozen=True, slots=True)
class CallBlock:
    """The text between a call's marks, whether it was closed, and how many characters of the whole it ends after.

    Example:
        CallBlock('{"name": "add"', closed=False, end=25)
    """

    text: str
    closed: bool
    end: int


def split_blocks(text: str, opening: str, closing: str) -> list[CallBlock]:
    """Each call's text; an unclosed call reaches to the next one, or to the end.

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


def before(text: str, opening: str) -> str:
    """The text before the first call, without the line break that stands between."""
    content, mark, _ = text.partition(opening)
    return content.removesuffix("\n") if mark else content


def malformed_call(raw: str, end: int, error: str, name: str = "") -> ParsedCall:
    return ParsedCall(name, None, raw, end, error)


MAX_JSON_DEPTH = 100
"""Levels of lists and objects in a call; what renders, copies and stores it recurses into them."""

_BRACKET = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{}]', re.DOTALL)
"""A bracket, or a string, whose brackets are none."""


def parse_json(text: str) -> Any:
    """A JSON value. Raises ValueError, with a reason, for what is none; NaN and infinities are none."""
    if _depth(text) > MAX_JSON_DEPTH:
        raise ValueError(f"it is nested too deeply, more than {MAX_JSON_DEPTH} levels")
    return json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)


def _depth(text: str) -> int:
    found = (token[0] for token in _BRACKET.findall(text))
    return max(accumulate({"[": 1, "{": 1, "]": -1, "}": -1}.get(token, 0) for token in found), default=0)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is too large a number")
    return value


def call_from_json(data: object, raw: str, end: int, key: str = "arguments") -> ParsedCall:
    """The call that a JSON value stands for: an object with a "name" and an object of arguments under ``key``."""
    if not isinstance(data, dict):
        return malformed_call(raw, end, f"a call is a JSON object, got {type(data).__name__}")
    name = data.get("name")
    if not isinstance(name, str) or not name:
        return malformed_call(raw, end, 'the call has no "name"')
    arguments = data.get(key)
    if not isinstance(arguments, dict):
        return malformed_call(raw, end, f'the call has no "{key}" object', name)
    return ParsedCall(name, arguments, raw, end)


def arguments_of(name: str, text: str, raw: str, end: int) -> ParsedCall:
    """The call of ``name`` whose arguments ``text`` gives as a JSON object."""
    try:
        arguments = parse_json(text)
    except ValueError as error:
        return malformed_call(raw, end, f"the arguments are not valid JSON: {error}", name)
    return call_from_json({"name": name, "arguments": arguments}, raw, end)
