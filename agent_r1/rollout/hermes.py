"""Tool calls as Hermes and Qwen write them: ``<tool_call>`` JSON ``</tool_call>`` inside the text."""

from __future__ import annotations

import json
from typing import Any

from agent_r1.core.messages import Action, Call, Message

OPEN, CLOSE = "<tool_call>", "</tool_call>"
THINK, THOUGHT = "<think>", "</think>"


def parse_action(text: str, turn: int = 0, reasoning: str | None = None, said: str | None = None) -> Action:
    """What the policy's text of one turn says: content and calls.

    ``said`` is the text without its thought, where ``reasoning`` was split off (:func:`split_reasoning`).
    A block that is no call stays a ``Call`` with its ``error``; the message then keeps the whole text as
    content, so that nothing the policy said is lost when the conversation is rendered.

    Example:
        >>> action = parse_action('<tool_call>\\n{"name": "add", "arguments": {"a": 1}}\\n</tool_call>')
        >>> action.message.calls[0].name, dict(action.message.calls[0].arguments)
        ('add', {'a': 1})
    """
    content, blocks = _split_blocks(text if said is None else said)
    calls = tuple(_parse_call(block, f"call_{turn}_{index}") for index, block in enumerate(blocks))
    if any(call.error for call in calls):
        return Action(Message.assistant(text, calls), text)
    return Action(Message.assistant(content, calls, reasoning), text)


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


def _split_blocks(text: str) -> tuple[str, list[str]]:
    """The text before the first call, and the text of each call; an unclosed call reaches to the end."""
    content, *rest = text.split(OPEN)
    if not rest:
        return content, []
    return content.removesuffix("\n"), [piece.partition(CLOSE)[0] if CLOSE in piece else piece + "\0" for piece in rest]


def _parse_call(block: str, identity: str) -> Call:
    if block.endswith("\0"):
        return _broken(block[:-1], identity, f"the call is not closed by {CLOSE}")
    try:
        data = json.loads(block, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        return _broken(block, identity, f"the call is not valid JSON: {error}")
    return _checked(data, block, identity)


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
