"""The results of failed tool calls, and the limit on the output that an agent sees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import StrEnum
from numbers import Real

from agent_r1.core.errors import suggest
from agent_r1.core.messages import ContentPart, Image, Text, ToolResult, join_parts

_MAX_NAME = 64  # characters; a longer name is cut before the comparison with the tools and in the text


class ToolErrorKind(StrEnum):
    MALFORMED_CALL = "malformed call"
    UNKNOWN_TOOL = "unknown tool"
    INVALID_ARGUMENTS = "invalid arguments"
    RAISED = "raised"
    TIMED_OUT = "timed out"
    BAD_RESULT = "bad result"


INVALID_CALL_KINDS = frozenset(
    {ToolErrorKind.MALFORMED_CALL, ToolErrorKind.UNKNOWN_TOOL, ToolErrorKind.INVALID_ARGUMENTS}
)
"""The failures that the agent caused with an invalid call. The other kinds are failures of the tool."""


def error_result(kind: ToolErrorKind, text: str) -> ToolResult:
    return ToolResult((Text(text),), ok=False, error=kind)


def malformed_call_result(reason: str) -> ToolResult:
    text = f"The tool call could not be read and was not run: {reason}."
    return error_result(ToolErrorKind.MALFORMED_CALL, text)


def unknown_tool_result(name: str, known: Sequence[str]) -> ToolResult:
    name = name[:_MAX_NAME]
    hint = suggest(name, known).replace("did", " Did", 1)
    text = f"There is no tool {name!r}.{hint} The tools are: {', '.join(known) or 'none'}."
    return error_result(ToolErrorKind.UNKNOWN_TOOL, text)


def truncate_output(result: ToolResult, max_output: int) -> ToolResult:
    """Return the result with at most ``max_output`` characters of text, and a note if text was removed.

    Invalid Unicode becomes question marks. The note does not count towards ``max_output``.

    Example:
        >>> truncate_output(ToolResult((Text("abcdef"),), ok=True), 4).parts[0].text
        'abcd\\n[cut here: 2 more characters]'
    """
    parts: list[ContentPart] = []
    budget, removed = max_output, 0
    for part in result.parts:
        if not isinstance(part, Text):
            parts.append(part)
            continue
        removed += max(len(part.text) - budget, 0)
        # lone surrogates become question marks, because no tokenizer accepts them
        parts.append(Text(part.text[:budget].encode("utf-8", "replace").decode("utf-8")))
        budget = max(budget - len(part.text), 0)
    if removed:
        parts.append(Text(f"\n[cut here: {removed} more characters]"))
    return replace(result, parts=join_parts(parts))


def validation_errors(result: ToolResult) -> Iterator[str]:
    """Yield each reason why a ToolResult from user code is not valid.

    Example:
        >>> list(validation_errors(ToolResult((Text("page"),), ok=False, error=404)))
        ['its error is an object of type int, neither text nor None']
    """
    if not isinstance(result.parts, tuple):
        yield f"its parts are {describe_type(result.parts)}, not a tuple"
    else:
        yield from part_errors(result.parts)
    if not isinstance(result.ok, bool):
        yield f"its ok is {describe_type(result.ok)}, not a bool"
    if not isinstance(result.error, str | None):
        yield f"its error is {describe_type(result.error)}, neither text nor None"
    if not isinstance(result.seconds, Real):
        yield f"its seconds are {describe_type(result.seconds)}, not a number"


def part_errors(parts: Sequence[object]) -> Iterator[str]:
    """Yield a message for each element of ``parts`` that is neither an Image nor a Text with a string."""
    for part in parts:
        if not isinstance(part, Image) and not (isinstance(part, Text) and isinstance(part.text, str)):
            yield f"it has {describe_type(part.text if isinstance(part, Text) else part)} where text belongs"


def describe_type(value: object) -> str:
    # No method of the value is called, because it can be user code.
    return "None" if value is None else f"an object of type {type(value).__name__}"
