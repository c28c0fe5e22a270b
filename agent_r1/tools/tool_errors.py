"""What an agent is told when its call could not be done, and how much of a result it is shown.

Each kind of failure has a ``ToolErrorKind``, kept in ``ToolResult.error``, so that rewards and metrics can
tell a call that was wrong from a tool that failed; the text for the agent is in ``ToolResult.parts``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import StrEnum
from numbers import Real

from agent_r1.core.messages import ContentPart, Media, Text
from agent_r1.core.tool import ToolResult

_NAME_LENGTH = 64  # a name longer than any tool's is compared and quoted only so far


class ToolErrorKind(StrEnum):
    """Why a call gave no result."""

    MALFORMED_CALL = "malformed call"
    UNKNOWN_TOOL = "unknown tool"
    INVALID_ARGUMENTS = "invalid arguments"
    RAISED = "raised"
    TIMED_OUT = "timed out"
    BAD_RESULT = "bad result"


INVALID_CALL_KINDS = frozenset({ToolErrorKind.MALFORMED_CALL, ToolErrorKind.UNKNOWN_TOOL, ToolErrorKind.INVALID_ARGUMENTS})
"""The faults of the agent, as opposed to those of the tool."""


def error_result(fault: ToolErrorKind, text: str) -> ToolResult:
    """A result that tells the agent, in ``text``, what was wrong and what is expected."""
    return ToolResult((Text(text),), ok=False, error=fault)


def malformed_call_result(reason: str) -> ToolResult:
    """The call could not be read at all."""
    return error_result(ToolErrorKind.MALFORMED_CALL, f"The tool call could not be read and was not run: {reason}.")


def unknown_tool_result(name: str, known: Sequence[str]) -> ToolResult:
    """No tool has this name; the nearest one is named.

    Example:
        >>> unknown_tool_result("serach", ["search", "add"]).parts[0].text
        "There is no tool 'serach'. Did you mean 'search'? The tools are: search, add."
    """
    name = name[:_NAME_LENGTH]
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    return error_result(ToolErrorKind.UNKNOWN_TOOL, f"There is no tool {name!r}.{hint} The tools are: {', '.join(known) or 'none'}.")


def truncate_output(result: ToolResult, max_output: int) -> ToolResult:
    """The result as an agent may see it: at most ``max_output`` characters of text, and valid Unicode.

    What is cut is marked, with how much it was; the mark comes on top of ``max_output``.

    Example:
        >>> truncate_output(ToolResult((Text("abcdef"),), ok=True), 4).parts[0].text
        'abcd\\n[cut here: 2 more characters]'
    """
    kept: list[ContentPart] = []
    room, more = max_output, 0
    for part in result.parts:
        if isinstance(part, Text):
            more += max(len(part.text) - room, 0)
            part = Text(_valid(part.text[:room]))
            room -= len(part.text)
        kept.append(part)
    if more:
        kept.append(Text(f"\n[cut here: {more} more characters]"))
    return replace(result, parts=tuple(_joined(kept)))


def validation_errors(result: ToolResult) -> Iterator[str]:
    """Why a user's own ToolResult cannot be shown, counted or written down; nothing where it can.

    Example:
        >>> list(validation_errors(ToolResult((Text("page"),), ok=False, error=404)))
        ['its error is an object of type int, and neither text nor None']
    """
    if not isinstance(result.parts, tuple):
        yield f"its parts are {describe_type(result.parts)}, and no tuple"
    else:
        yield from part_errors(result.parts)
    if not isinstance(result.ok, bool):
        yield f"its ok is {describe_type(result.ok)}, and no bool"
    if not isinstance(result.error, str | None):
        yield f"its error is {describe_type(result.error)}, and neither text nor None"
    if not isinstance(result.seconds, Real):
        yield f"its seconds are {describe_type(result.seconds)}, and no number"


def part_errors(parts: Sequence[object]) -> Iterator[str]:
    """What stands among parts of a message or result and is none."""
    for part in parts:
        if not isinstance(part, Media) and not (isinstance(part, Text) and isinstance(part.text, str)):
            yield f"it has {describe_type(part.text if isinstance(part, Text) else part)} where text belongs"


def describe_type(value: object) -> str:
    """What a value is, without asking the value itself."""
    return "None" if value is None else f"an object of type {type(value).__name__}"


def _valid(text: str) -> str:
    """Lone surrogates, which no tokenizer takes, become question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _joined(parts: Sequence[ContentPart]) -> list[ContentPart]:
    """Neighbouring texts become one."""
    joined: list[ContentPart] = []
    for part in parts:
        if isinstance(part, Text) and joined and isinstance(joined[-1], Text):
            joined[-1] = Text(joined[-1].text + part.text)
        else:
            joined.append(part)
    return joined
