"""The base classes of tool-call formats, the classes of parsed calls, and the rules that formats share."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from agent_r1.core.arguments import json_type, parse_arguments
from agent_r1.core.errors import UnsupportedChat
from agent_r1.core.messages import Message, ToolSpec, to_openai

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"

Tools = tuple[ToolSpec, ...]


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A tool call that was found in a text."""

    name: str  # "" if the name could not be read
    arguments: Mapping[str, Any] | None  # None if the call could not be read
    raw: str  # the text of the call, as the policy wrote it
    end: int  # the index of the first character after the call
    error: str | None = None  # why the call could not be read


@dataclass(frozen=True, slots=True)
class ParsedOutput:
    """The parsed text of an action, without the reasoning."""

    content: str  # the text without the calls
    calls: tuple[ParsedCall, ...] = ()  # in their order in the text
    end: int | None = None  # the index after the action; None if nothing in the text ends the action


class ToolFormat(ABC):
    """The way in which a model writes tool calls.

    A format parses the calls in a text, and converts messages to the dictionaries that chat templates expect.
    """

    name: ClassVar[str]
    delimiters: ClassVar[tuple[str, ...]] = ()
    """Texts that are not allowed in arguments, because the template does not escape such texts."""

    required_tokens: ClassVar[tuple[str, ...]] = ()
    """The format is detected only for tokenizers that have these special tokens."""

    @abstractmethod
    def parse(self, text: str, tools: Tools) -> ParsedOutput:
        """Return the content and the calls of ``text``. ``text`` is the second result of :meth:`split_reasoning`.

        This method raises no exception. A call that cannot be read has an ``error``.
        """

    def split_reasoning(self, text: str, opened: bool = False) -> tuple[str | None, str]:
        """Divide the text of an action. Return (reasoning, rest), or (None, text) if the text has no reasoning."""
        return split_reasoning(text, opened)

    def check_writable(self, messages: Iterable[Message]) -> None:
        """Raise UnsupportedChat if an argument of a call contains one of the format's ``delimiters``."""
        for call in (call for message in messages for call in message.calls):
            if found := self.find_delimiter(call.arguments or {}):
                problem = f"a call of {call.name!r} cannot be written as {self.name}: an argument holds {found}"
                raise UnsupportedChat(f"{problem}, which ends it; take it out, or give another --tool_format")

    def find_delimiter(self, arguments: Mapping[str, Any]) -> str | None:
        """Return the first of the format's ``delimiters`` that occurs in a value of the arguments, or None."""
        if not self.delimiters:
            return None
        text = json.dumps(dict(arguments), ensure_ascii=False, default=str)
        return next((delimiter for delimiter in self.delimiters if delimiter in text), None)

    def stop_strings(self, tools: Tools) -> tuple[str, ...]:
        """Return the stop strings: texts after which an action can be complete without an end token."""
        return ()

    def is_complete(self, text: str, tools: Tools) -> bool:
        """Return whether the action ends within ``text``. Text after this end is not part of the action."""
        end = self.parse(text, tools).end
        return end is not None and self.parse(f"{text}.", tools).end == end

    def completion_check(self, tools: Tools, *, is_opened: bool, thoughts: int) -> Callable[[str], bool]:
        """Return a fast function that avoids most calls of the slower :meth:`is_complete`."""
        return lambda part: True

    def to_template(self, messages: Sequence[Message], tools: Tools) -> list[dict[str, Any]]:
        """Return the messages as the dictionaries that chat templates of this format expect."""
        return [self.write_message(message) for message in messages]

    def write_message(self, message: Message) -> dict[str, Any]:
        """Return one message as the dictionary that chat templates of this format expect."""
        return to_openai(message)

    def tool_instructions(self, tools: Tools) -> str | None:
        """Return a system message for chat templates that do not describe the tools, or None."""
        return None


@dataclass(frozen=True, slots=True)
class CallBlock:
    """The text between the two delimiters of a :class:`BlockFormat`."""

    text: str
    end: int  # the index after the closing delimiter, in the whole text


class BlockFormat(ToolFormat):
    """A format whose calls stand between two delimiters that cannot occur inside.

    If the closing delimiter is missing, the block ends at the next opening delimiter, or at the end of the text.
    """

    opening: ClassVar[str]
    closing: ClassVar[str]

    @abstractmethod
    def parse_block(self, block: CallBlock, tools: Tools) -> Iterable[ParsedCall]:
        """Return the calls between two delimiters."""

    def parse(self, text: str, tools: Tools) -> ParsedOutput:
        calls: list[ParsedCall] = []
        content, *parts = text.split(self.opening)
        start = len(content)
        for part in parts:
            inside, closing, _ = part.partition(self.closing)
            end = start + len(self.opening + inside + closing)
            if closing:
                calls += self.parse_block(CallBlock(inside, end), tools)
            else:
                calls.append(malformed_call(inside, end, f"the call is not closed by {self.closing}"))
            start += len(self.opening + part)
        return ParsedOutput(text_before(text, self.opening), tuple(map(self._require_writable, calls)))

    def _require_writable(self, call: ParsedCall) -> ParsedCall:
        # The policy sees a malformed call as an error. Without this check, the next render would fail the episode.
        if found := self.find_delimiter(call.arguments or {}):
            return malformed_call(call.raw, call.end, f"an argument holds {found}, which ends it", call.name)
        return call


def split_reasoning(text: str, opened: bool = False) -> tuple[str | None, str]:
    """Divide a text after its reasoning. Return (reasoning, rest), or (None, text) if the text has no reasoning.

    Reasoning is the text between ``<think>`` at the beginning and the first ``</think>``. With ``opened``, the text
    begins inside the reasoning, without ``<think>``. Reasoning without ``</think>`` is not finished: the rest is empty.

    Example:
        >>> split_reasoning("<think>\\nSo.\\n</think>\\n\\nYes."), split_reasoning("So I", opened=True)
        (('So.', 'Yes.'), ('So I', ''))
    """
    stripped = text.lstrip()
    if not opened and not stripped.startswith(THINK_OPEN):
        return None, text
    reasoning, _, rest = stripped.removeprefix(THINK_OPEN).partition(THINK_CLOSE)
    return reasoning.strip("\n"), rest.lstrip("\n")


def text_before(text: str, opening: str) -> str:
    """Return the text before the first ``opening``, without a line break at its end; all text if there is none."""
    content, mark, _ = text.partition(opening)
    return content.removesuffix("\n") if mark else content


def malformed_call(raw: str, end: int, error: str, name: str = "") -> ParsedCall:
    """Return a ParsedCall for a call that could not be read. Its ``arguments`` are None."""
    return ParsedCall(name, None, raw, end, error)


_CALL_KEYS = frozenset(("name", "arguments", "parameters", "id", "type"))


def call_from_json(data: object, raw: str, end: int) -> ParsedCall:
    """Return the call that a JSON value describes: an object with a ``name`` and its ``arguments`` (or ``parameters``).

    The arguments are as in :func:`parse_arguments`. ``id`` and ``type`` have no effect. Any other value gives a
    malformed call, so that no part of what the policy wrote is ignored.
    """
    if not isinstance(data, dict):
        return malformed_call(raw, end, f"a call is a JSON object, got {json_type(data)}")
    given = data.get("name")
    name = given if isinstance(given, str) else ""
    if unknown := sorted(data.keys() - _CALL_KEYS):
        reason = f'a call has no key {unknown[0]!r}: its keys are "name" and "arguments", which hold all values'
        return malformed_call(raw, end, reason, name)
    if not name:
        return malformed_call(raw, end, 'the call has no "name"')
    if "arguments" in data and "parameters" in data:
        return malformed_call(raw, end, 'the call has "arguments" and "parameters": give one of them', name)
    if data.get("type", "function") != "function":
        return malformed_call(raw, end, f'the "type" of a call is "function", got {data["type"]!r:.40}', name)
    try:
        arguments = parse_arguments(data.get("arguments", data.get("parameters")))
    except ValueError as error:
        return malformed_call(raw, end, str(error), name)
    return ParsedCall(name, arguments, raw, end)


def call_with_arguments(name: str, text: str, raw: str, end: int) -> ParsedCall:
    """Return the call of a tool whose arguments are the JSON object in ``text``, or a malformed call."""
    return call_from_json({"name": name, "arguments": text}, raw, end)
