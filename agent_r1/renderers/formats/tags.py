"""Tool calls as tags and fences in plain text, for models that know no other way (Search-R1, 2503.09516).

<search>mayor of Alba</search>
<information>Alba: mayor Bruno.</information>
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from agent_r1.core.errors import InvalidInput
from agent_r1.core.messages import Message, ToolCall
from agent_r1.core.tool import ToolSpec
from agent_r1.renderers.config import FENCE, TagsConfig
from agent_r1.renderers.formats.tool_format import (
    ParsedCall,
    ParsedOutput,
    ToolFormat,
    Tools,
    arguments_of,
    malformed_call,
    parse_json,
    split_reasoning,
)

PLAIN_TEMPLATE = """\
{%- for message in messages %}
    {{- message.content }}
    {{- eos_token if loop.last and message.role == 'assistant' and not add_generation_prompt else '\\n\\n' }}
{%- endfor %}"""
"""A conversation as running text, for tokenizers without a template: what is said, apart by empty lines."""

PLAIN_BREAK = "\n\n"
"""What follows an action in :data:`PLAIN_TEMPLATE`, where no token ends it."""


@dataclass(frozen=True, slots=True)
class Marks:
    """What is written around something, as what it is found, and ``stops``, of which one stands where it is over.

    Example:
        Marks.of("search").opening == "<search>" and Marks.of("```python").opening == "```python\\n"
    """

    opening: str
    closing: str
    opens: re.Pattern[str]
    closes: re.Pattern[str]
    stops: tuple[str, ...]

    @classmethod
    def of(cls, tag: str) -> Marks:
        """The marks of a tag; one that begins with three backticks is a fence, closed where three end a line."""
        if not tag.startswith(FENCE):
            opening, closing = f"<{tag}>", f"</{tag}>"
            return cls(opening, closing, re.compile(re.escape(opening)), re.compile(re.escape(closing)), (closing,))
        names = f"{FENCE}(?:python|py)" if tag == PYTHON_FENCE else re.escape(tag)
        return cls(f"{tag}\n", f"\n{FENCE}", re.compile(rf"{names}[ \t]*\n"), _END_OF_FENCE, _STOPS_OF_FENCE)


PYTHON_FENCE = f"{FENCE}python"
_STOPS_OF_FENCE = tuple(FENCE + after for after in "\n \t")
"""It is over where the line is: with blanks between, the end of the line has no text of its own to be found by."""

_END_OF_FENCE = re.compile(rf"\n?{FENCE}(?=[ \t]*(?:\n|\Z))")


@dataclass(frozen=True, slots=True)
class _Found:
    """Something between marks: where it begins, what is inside, and where it ends (None: it is not closed)."""

    start: int
    inside: str
    end: int | None


def _find(said: str, marks: Marks, place: int) -> _Found | None:
    """The first from ``place`` on."""
    opened = marks.opens.search(said, place)
    if opened is None:
        return None
    closed = marks.closes.search(said, opened.end())
    inside = said[opened.end() : closed.start()] if closed else said[opened.end() :]
    return _Found(opened.start(), inside, closed.end() if closed else None)


class Tags(ToolFormat):
    """Each tool has a tag: its name, or what ``config.names`` says; ``python`` has a fence. An action ends with its
    first call or answer. The one text that a tool needs stands bare, anything else is a JSON object of arguments.
    """

    name: ClassVar[str] = "tags"

    def __init__(self, config: TagsConfig | None = None) -> None:
        self._config = config or TagsConfig()
        self._observation = Marks.of(self._config.observation)
        self._answer = Marks.of(self._config.answer)

    def check(self, tools: Tools) -> None:
        """Raise InvalidInput where the tags do not fit the tools."""
        names = {tool.name for tool in tools}
        if unknown := sorted(self._config.names.keys() - names):
            raise InvalidInput("tags.names", got=unknown[0], do=f"name one of the tools: {', '.join(sorted(names))}")
        taken = [self._config.observation, self._config.answer, *(self._tag(tool) for tool in tools)]
        if twice := next((tag for tag in taken if taken.count(tag) > 1), None):
            do = "give each tool (tags.names), tags.observation and tags.answer a tag of its own"
            raise InvalidInput("tags", got=f"{twice} for two things", do=do)

    def read(self, said: str, tools: Tools) -> ParsedOutput:
        thought = len(said) - len(split_reasoning(said)[1])
        found = [(call, tool) for tool in tools if (call := _find(said, self._marks(tool), thought))]
        first = min(found, key=lambda one: one[0].start, default=None)
        answer = _find(said, self._answer, thought)
        if answer is not None and answer.end is not None and (first is None or answer.start < first[0].start):
            return ParsedOutput(said, end=answer.end)
        if first is None:
            return ParsedOutput(said)
        call, tool = first
        return ParsedOutput(said[: call.start], (self._read(call, tool, len(said)),), call.end)

    def stop_texts(self, tools: Tools) -> tuple[str, ...]:
        every = (self._answer, *map(self._marks, tools))
        return tuple(dict.fromkeys(stop for marks in every for stop in marks.stops))

    def _read(self, call: _Found, tool: ToolSpec, length: int) -> ParsedCall:
        if call.end is None:
            error = f"the call is not closed by {self._marks(tool).closing.strip()}"
            return malformed_call(call.inside, length, error, tool.name)
        return _call(tool, call.inside, call.end)

    def _marks(self, tool: ToolSpec) -> Marks:
        return Marks.of(self._tag(tool))

    def _tag(self, tool: ToolSpec) -> str:
        return self._config.names.get(tool.name, PYTHON_FENCE if tool.name == "python" else tool.name)

    def shaped(self, messages: Sequence[Message], tools: Tools) -> list[dict[str, Any]]:
        """Plain text under the roles that every template knows; neighbours of one role become one message."""
        by_name = {tool.name: tool for tool in tools}
        shaped: list[dict[str, Any]] = []
        for message in messages:
            role = "user" if message.role == "tool" else message.role
            text = self._text(message, by_name)
            if shaped and shaped[-1]["role"] == role == "user":
                shaped[-1]["content"] += PLAIN_BREAK + text
            else:
                shaped.append({"role": role, "content": text})
        return shaped

    def _text(self, message: Message, by_name: dict[str, ToolSpec]) -> str:
        if message.role == "tool":
            marks = self._observation
            text = message.text.replace(marks.closing, f"{marks.closing[0]} {marks.closing[1:]}")
            return f"{marks.opening}{text}{marks.closing}"
        if any(call.arguments is None for call in message.calls):
            return message.text
        return message.text + "".join(self._written(call, by_name) for call in message.calls)

    def _written(self, call: ToolCall, by_name: dict[str, ToolSpec]) -> str:
        tool = by_name.get(call.name) or ToolSpec(call.name, "", {})
        marks, single = self._marks(tool), _single(tool)
        arguments = dict(call.arguments or {})
        bare = str(arguments[single]) if single is not None and arguments.keys() == {single} else ""
        # else it would be read as something else
        taken = _call(tool, bare, 0).arguments == arguments and not marks.closes.search(f"{bare}{marks.closing}"[:-1])
        built = bare if taken else json.dumps(arguments, ensure_ascii=False).replace("</", "<\\/")
        return f"{marks.opening}{call.raw or built}{marks.closing}"

    def instruction(self, tools: Tools) -> str:
        lines = [f"{self._usage(tool)} {tool.description.strip()}" for tool in tools]
        given = f"{self._observation.opening}..{self._observation.closing}"
        return "To use a tool, write one of these:\n" + "\n".join(lines) + f"\nWhat it gives comes back in {given}."

    def _usage(self, tool: ToolSpec) -> str:
        single = _single(tool)
        given = single or json.dumps(dict.fromkeys(tool.parameters.get("properties", {}), "..."))
        return f"{self._marks(tool).opening}{given}{self._marks(tool).closing}"


def _single(tool: ToolSpec) -> str | None:
    """The one parameter that a tool needs, where that is text: it may stand bare."""
    properties, required = tool.parameters.get("properties", {}), list(tool.parameters.get("required", ()))
    names = required or list(properties)
    return names[0] if len(names) == 1 and properties.get(names[0], {}).get("type") == "string" else None


def _object(tool: ToolSpec, text: str) -> dict[str, Any] | None:
    """The JSON object that a text is; None where it is none, or has nothing to do with the tool's arguments."""
    try:
        data = parse_json(text)
    except ValueError:
        return None
    names = tool.parameters.get("properties", {}).keys()
    return data if isinstance(data, dict) and (not data or data.keys() & names) else None


def _call(tool: ToolSpec, inside: str, end: int) -> ParsedCall:
    single, given = _single(tool), _object(tool, inside)
    if given is not None:
        if unknown := sorted(given.keys() - tool.parameters.get("properties", {}).keys()):
            return malformed_call(inside, end, f"{tool.name} takes no {unknown[0]!r}", tool.name)
        return ParsedCall(tool.name, given, inside, end)
    if single is None:
        return arguments_of(tool.name, inside, inside, end)
    if not inside.strip():
        return malformed_call(inside, end, f"nothing is given for {single}", tool.name)
    return ParsedCall(tool.name, {single: inside}, inside, end)
