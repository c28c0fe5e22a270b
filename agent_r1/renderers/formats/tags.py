"""Tool calls as tags and fences in plain text, for models without a tool format (Search-R1, arXiv:2503.09516).

Example of a call of the tool ``search``, and of its result:

<search>mayor of Alba</search>
<information>Alba: mayor Bruno.</information>
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from agent_r1.core.arguments import describe_parameters, parameters_of
from agent_r1.core.errors import InvalidInput
from agent_r1.core.messages import Message, ToolCall, ToolSpec
from agent_r1.renderers.formats.tool_format import (
    THINK_CLOSE,
    THINK_OPEN,
    ParsedCall,
    ParsedOutput,
    ToolFormat,
    Tools,
    call_with_arguments,
    malformed_call,
    split_reasoning,
)

FENCE = "```"
"""Three backticks. A tag that begins with three backticks stands for a code block (see ``TagsConfig``)."""


class TagsConfig(BaseModel):
    """Names of the tags in the tool format ``tags``."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    observation: str = Field(default="information", min_length=1)
    """The tag around a tool result."""

    answer: str = Field(default="answer", min_length=1)
    """The tag around a final answer. A closed answer ends the action."""

    names: dict[str, str] = Field(default_factory=dict)
    """The tag around a call, by the name of the tool, such as {"search": "find"}. Tools without an entry have their
    default tag: the name of the tool, but a code fence for ``python``. A tag that begins with three backticks is a code
    fence."""


_PYTHON_FENCE = f"{FENCE}python"
_FENCE_STOPS = tuple(FENCE + after for after in "\n \t")
"""The stop strings that end a code block. Spaces and tabs are allowed between the backticks and the end of the line."""

_FENCE_CLOSE_LINE = re.compile(rf"\n?{FENCE}(?=[ \t]*\n)")
_FENCE_CLOSE = re.compile(rf"\n?{FENCE}(?=[ \t]*(?:\n|\Z))")

_PARTIAL_FENCE = re.compile(r"```\w*[ \t]*")
"""Matches a Markdown code fence, perhaps with a part of a language name, at the end of the text sampled so far.

Only the text after the fence shows whether the fence opens or closes a block of code.
"""


@dataclass(frozen=True, slots=True)
class Delimiters:
    """The delimiters of a call or an answer in the text of an action: a pair of tags, or a Markdown code fence."""

    # as a policy should write them
    opening: str
    closing: str
    # as they are found in a complete text
    open_pattern: re.Pattern[str]
    close_pattern: re.Pattern[str]
    # The closing delimiter in a growing text. The end of a line must follow the backticks of a fence, because other
    # text could follow later.
    scan_pattern: re.Pattern[str]
    stops: tuple[str, ...]  # the stop strings that can end the call or the answer

    @classmethod
    def of(cls, tag: str) -> Delimiters:
        """Return the delimiters of a tag: ``<search>`` and ``</search>`` for "search", a fence for "```python"."""
        if tag.startswith(FENCE):
            names = f"{FENCE}(?:python|py)" if tag == _PYTHON_FENCE else re.escape(tag)
            opens = re.compile(rf"{names}[ \t]*\n")
            return cls(f"{tag}\n", f"\n{FENCE}", opens, _FENCE_CLOSE, _FENCE_CLOSE_LINE, _FENCE_STOPS)
        opening, closing = f"<{tag}>", f"</{tag}>"
        closes = re.compile(re.escape(closing))
        return cls(opening, closing, re.compile(re.escape(opening)), closes, closes, (closing,))

    def find(self, text: str, position: int) -> _Element | None:
        opened = self.open_pattern.search(text, position)
        if opened is None:
            return None
        closed = self.close_pattern.search(text, opened.end())
        inside = text[opened.end() : closed.start()] if closed else text[opened.end() :]
        return _Element(opened.start(), inside, closed.end() if closed else None)


@dataclass(frozen=True, slots=True)
class _Element:
    start: int  # the index of the opening delimiter
    inside: str
    end: int | None  # the index after the closing delimiter; None without a closing delimiter


class _Search:
    # A search in a growing text: first for the opening delimiter of an element, then for its closing delimiter.

    def __init__(self, delimiters: Delimiters, is_answer: bool) -> None:
        self.is_answer, self.start, self.is_closed = is_answer, -1, False
        self._delimiters, self._position = delimiters, 0

    def look(self, text: str, begin: int) -> None:
        self._position = max(self._position, begin)
        if self.start < 0 and (opened := self._find(self._delimiters.open_pattern, text)):
            self.start, self._position = opened.start(), opened.end()
        if self.start >= 0 and not self.is_closed and self._find(self._delimiters.scan_pattern, text):
            self.is_closed = True

    def _find(self, pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
        found = pattern.search(text, self._position)
        if found is None:
            # The next search begins here, so that the cost of all searches is linear in the length of the text. Only a
            # delimiter that has begun at the end of the text can still become complete.
            fence = text.rfind(FENCE, self._position)
            is_partial = fence >= 0 and _PARTIAL_FENCE.fullmatch(text, fence)
            longest = len(self._delimiters.opening) + len(self._delimiters.closing)
            self._position = max(self._position, max(fence - 1, 0) if is_partial else len(text) - longest)
        return found


class TagScan:
    """A callable that gets each new part of an action's text, and returns whether the action is complete.

    An action is complete after the closing delimiter of its first call. An action is also complete after the closing
    delimiter of an answer, if no call begins before the answer. Thoughts (``<think> .. </think>``) at the beginning of
    the text are skipped.

    Args:
        elements: the delimiters of each call and answer, and whether they belong to an answer.
        is_opened: whether the text begins inside a thought.
        thoughts: the maximum number of thoughts that are skipped.
    """

    def __init__(self, elements: Sequence[tuple[Delimiters, bool]], *, is_opened: bool, thoughts: int) -> None:
        self._searches = [_Search(delimiters, is_answer) for delimiters, is_answer in elements]
        self._text, self._begin, self._position = "", 0, 0
        self._is_thinking, self._thoughts = is_opened, thoughts

    def __call__(self, part: str) -> bool:
        self._text += part
        if not self._skip_thoughts():
            return False
        for search in self._searches:
            search.look(self._text, self._begin)
        opened = [search for search in self._searches if search.start >= 0]
        first = min((s for s in opened if not s.is_answer), key=lambda s: s.start, default=None)
        answers = (s for s in opened if s.is_answer and s.is_closed)
        return (first is not None and first.is_closed) or any(
            first is None or answer.start < first.start for answer in answers
        )

    def _skip_thoughts(self) -> bool:
        while self._thoughts:
            if not self._is_thinking:
                rest = self._text[self._position :]
                self._position += len(rest) - len(rest.lstrip())
                ahead = self._text[self._position : self._position + len(THINK_OPEN)]
                if THINK_OPEN.startswith(ahead) and ahead != THINK_OPEN:
                    return False  # the text is too short to show whether a thought begins
                if ahead != THINK_OPEN:
                    self._thoughts = 0
                    break
                self._is_thinking = True
            end = self._text.find(THINK_CLOSE, self._position)
            if end < 0:
                self._position = max(self._position, len(self._text) - len(THINK_CLOSE))
                return False
            self._begin = self._position = end + len(THINK_CLOSE)
            self._is_thinking, self._thoughts = False, self._thoughts - 1
        return True


PLAIN_TEMPLATE = """\
{%- for message in messages %}
    {{- message.content }}
    {{- eos_token if loop.last and message.role == 'assistant' and not add_generation_prompt else '\\n\\n' }}
{%- endfor %}"""
"""A template for tokenizers without a chat template: the texts of all messages, separated by empty lines."""

PLAIN_BREAK = "\n\n"
"""The text that PLAIN_TEMPLATE writes between an action and the next message. It contains no end token."""


class Tags(ToolFormat):
    """The tool format in which each call stands between the tags of its tool.

    An action ends with its first call or answer. If a tool needs only one text argument, the text is written between
    the tags. Otherwise the arguments are written as a JSON object.

    By default, the tag of a tool is its name. Only the tool ``python`` has no tag by default: its call is a code block
    between fences.
    """

    name: ClassVar[str] = "tags"

    def __init__(self, config: TagsConfig | None = None) -> None:
        self._config = config or TagsConfig()
        self._observation = Delimiters.of(self._config.observation)
        self._answer = Delimiters.of(self._config.answer)

    def check(self, tools: Tools) -> None:
        """Raise InvalidInput if ``config.names`` contains a tool that does not exist, or one tag has two meanings."""
        names = {tool.name for tool in tools}
        if unknown := sorted(self._config.names.keys() - names):
            raise InvalidInput("tags.names", got=unknown[0], do=f"name one of the tools: {', '.join(sorted(names))}")
        tags = [self._config.observation, self._config.answer, *(self._tag(tool) for tool in tools)]
        if duplicate := next((tag for tag in tags if tags.count(tag) > 1), None):
            do = "give each tool (tags.names), tags.observation and tags.answer a tag of its own"
            raise InvalidInput("tags", got=f"{duplicate} for two things", do=do)

    def parse(self, text: str, tools: Tools) -> ParsedOutput:
        start = len(text) - len(split_reasoning(text)[1])
        elements = [(call, tool) for tool in tools if (call := self._delimiters(tool).find(text, start))]
        first = min(elements, key=lambda element: element[0].start, default=None)
        answer = self._answer.find(text, start)
        if answer is not None and answer.end is not None and (first is None or answer.start < first[0].start):
            return ParsedOutput(text, end=answer.end)
        if first is None:
            return ParsedOutput(text)
        element, tool = first
        if element.end is None:
            error = f"the call is not closed by {self._delimiters(tool).closing.strip()}"
            return ParsedOutput(text[: element.start], (malformed_call(element.inside, len(text), error, tool.name),))
        return ParsedOutput(text[: element.start], (_call_of(tool, element.inside, element.end),), element.end)

    def stop_strings(self, tools: Tools) -> tuple[str, ...]:
        elements = (self._answer, *map(self._delimiters, tools))
        return tuple(dict.fromkeys(stop for delimiters in elements for stop in delimiters.stops))

    def completion_check(self, tools: Tools, *, is_opened: bool, thoughts: int) -> Callable[[str], bool]:
        elements = [(self._answer, True), *((self._delimiters(tool), False) for tool in tools)]
        # one more thought than the template has, because parse skips a thought of its own
        return TagScan(elements, is_opened=is_opened, thoughts=thoughts + 1)

    def _delimiters(self, tool: ToolSpec) -> Delimiters:
        return Delimiters.of(self._tag(tool))

    def _tag(self, tool: ToolSpec) -> str:
        return self._config.names.get(tool.name, _PYTHON_FENCE if tool.name == "python" else tool.name)

    def to_template(self, messages: Sequence[Message], tools: Tools) -> list[dict[str, Any]]:
        by_name = {tool.name: tool for tool in tools}
        converted: list[dict[str, Any]] = []
        for message in messages:
            role = "user" if message.role == "tool" else message.role
            text = self._text(message, by_name)
            if converted and converted[-1]["role"] == role == "user":
                converted[-1]["content"] += PLAIN_BREAK + text
            else:
                converted.append({"role": role, "content": text})
        return converted

    def _text(self, message: Message, by_name: dict[str, ToolSpec]) -> str:
        if message.role == "tool":
            tags = self._observation
            text = message.text.replace(tags.closing, f"{tags.closing[0]} {tags.closing[1:]}")
            return f"{tags.opening}{text}{tags.closing}"
        if any(call.arguments is None for call in message.calls):
            return message.text
        return message.text + "".join(self._call_text(call, by_name) for call in message.calls)

    def _call_text(self, call: ToolCall, by_name: dict[str, ToolSpec]) -> str:
        tool = by_name.get(call.name) or ToolSpec(call.name, "", {})
        tags, bare_name = self._delimiters(tool), _bare_parameter(tool)
        arguments = dict(call.arguments or {})
        bare = str(arguments[bare_name]) if bare_name is not None and arguments.keys() == {bare_name} else ""
        # a text that would be parsed as a different argument is written as JSON
        is_read_back = _call_of(tool, bare, 0).arguments == arguments
        is_readable = is_read_back and not tags.close_pattern.search(f"{bare}{tags.closing}"[:-1])
        written = bare if is_readable else json.dumps(arguments, ensure_ascii=False).replace("</", "<\\/")
        return f"{tags.opening}{call.raw or written}{tags.closing}"

    def tool_instructions(self, tools: Tools) -> str:
        lines = [f"{self._usage(tool)} {tool.description.strip()}{_values(tool)}" for tool in tools]
        result = f"{self._observation.opening}..{self._observation.closing}"
        return "To use a tool, write one of these:\n" + "\n".join(lines) + f"\nWhat it gives comes back in {result}."

    def _usage(self, tool: ToolSpec) -> str:
        placeholder = _bare_parameter(tool) or json.dumps(dict.fromkeys(parameters_of(tool.parameters).schemas, "..."))
        return f"{self._delimiters(tool).opening}{placeholder}{self._delimiters(tool).closing}"


def _values(tool: ToolSpec) -> str:
    # what may be given, if it is not one free text
    described = describe_parameters(tool.parameters)
    bare = _bare_parameter(tool)
    return "" if described in ("no arguments", f"{bare} (string)") else f" Arguments: {described}."


def _bare_parameter(tool: ToolSpec) -> str | None:
    # All values of the parameter must be texts.
    parameters = parameters_of(tool.parameters)
    names = parameters.required or tuple(parameters.schemas)
    return names[0] if len(names) == 1 and parameters.is_text(names[0]) else None


def _holds_arguments(text: str, names: Collection[str]) -> bool:
    # Whether a text is an object of arguments, even if parse_json refuses it, and not the value of one argument.
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(data, dict) and (not data or not data.keys().isdisjoint(names))


def _call_of(tool: ToolSpec, inside: str, end: int) -> ParsedCall:
    bare_name, parameters = _bare_parameter(tool), parameters_of(tool.parameters)
    if bare_name is None or _holds_arguments(inside, parameters.schemas):
        call = call_with_arguments(tool.name, inside, inside, end)
        if parameters.schemas and (unknown := sorted((call.arguments or {}).keys() - parameters.schemas.keys())):
            takes = f"it takes {describe_parameters(tool.parameters)}"
            return malformed_call(inside, end, f"{tool.name} takes no {unknown[0]!r}: {takes}", tool.name)
        return call
    if inside.strip():
        return ParsedCall(tool.name, {bare_name: inside}, inside, end)
    if bare_name in parameters.required:
        return malformed_call(inside, end, f"nothing is given for {bare_name}", tool.name)
    return ParsedCall(tool.name, {}, inside, end)
