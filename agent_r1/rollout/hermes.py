"""Tool calls as Hermes and Qwen write them: ``<tool_call>`` JSON ``</tool_call>`` inside the text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from agent_r1.core.messages import Action, Call, Message

OPEN, CLOSE = "<tool_call>", "</tool_call>"
THINK, THOUGHT = "<think>", "</think>"


def parse_action(text: str, turn: int = 0, reasoning: str | None = None, said: str | None = None) -> Action:
    """What the policy's text of one turn says: content and calls.

    ``said`` is the end of the text, without its thought, where ``reasoning`` was split off (:func:`split_reasoning`).
    A block that is no call stays a ``Call`` with its ``error``; the message then keeps the whole text as
    content, so that nothing the policy said is lost when the conversation is rendered.

    Example:
        >>> action = parse_action('<tool_call>\\n{"name": "add", "arguments": {"a": 1}}\\n</tool_call>')
        >>> action.message.calls[0].name, dict(action.message.calls[0].arguments)
        ('add', {'a': 1})
    """
    said = text if said is None else said
    calls = tuple(_parse_call(block, f"call_{turn}_{index}") for index, block in enumerate(_blocks(said)))
    if any(call.error for call in calls):
        return Action(Message.assistant(text, calls), text)
    return Action(Message.assistant(_content(said), calls, reasoning), text)


def call_ends(said: str) -> tuple[int, ...]:
    """For each call that :func:`parse_action` reads, how many characters of the text there are up to its end.

    A call ends with its closing mark; one without, where the next begins or with the text.

    Example:
        >>> call_ends("<tool_call>{}</tool_call> and <tool_call>{")
        (25, 42)
    """
    return tuple(block.end for block in _blocks(said))


def split_reasoning(text: str) -> tuple[str | None, str]:
    """(thought, rest). The opening mark may have been part of the prompt.

    Example:
        >>> split_reasoning("<think>\\nSo.\\n</think>\\n\\nYes.")
        ('So.', 'Yes.')
    """
    thought, mark, rest = text.partition(THOUGHT)
    if not mark:
        return None, text
    return thought.removeprefix(THINK).strip("\n"), rest.lstrip("\n")


@dataclass(frozen=True, slots=True)
class _Block:
    """The text between a call's marks, whether it was closed, and how many characters of the whole it ends after.

    Example:
        _Block('{"name": "add"', closed=False, end=25)
    """

    text: str
    closed: bool
    end: int


def _blocks(text: str) -> list[_Block]:
    """Each call's text; an unclosed call reaches to the next one, or to the end."""
    content, *pieces = text.split(OPEN)
    blocks = []
    start = len(content)
    for piece in pieces:
        inside, mark, _ = piece.partition(CLOSE)
        blocks.append(_Block(inside, bool(mark), start + len(OPEN + inside + mark)))
        start += len(OPEN + piece)
    return blocks


def _content(text: str) -> str:
    """The text before the first call, without the line break that stands between."""
    content, mark, _ = text.partition(OPEN)
    return content.removesuffix("\n") if mark else content


def _parse_call(block: _Block, identity: str) -> Call:
    if not block.closed:
        return _broken(block.text, identity, f"the call is not closed by {CLOSE}")
    try:
        data = json.loads(block.text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        return _broken(block.text, identity, f"the call is not valid JSON: {error}")
    return _checked(data, block.text, identity)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _checked(data: Any, block: str, identity: str) -> Call:
    if not isinstance(data, dict):
        return _broken(block, identity, f"a call is a JSON object, got {type(data).__name__}")
    name = data.get("name")
    if not isinstance(name, str) or not name:
        return _broken(block, identity, 'the call has no "name"')
    arguments = data.get("arguments")
    if not isinstance(arguments, dict):
        return _broken(block, identity, 'the call has no "arguments" object', name)
    return Call(identity, name, arguments, block)


def _broken(block: str, identity: str, error: str, name: str = "") -> Call:
    return Call(identity, name, None, block, error)
