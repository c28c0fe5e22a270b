"""Tool calls as Llama 3 writes them: all that is said is one JSON object, ``{"name": .., "parameters": ..}``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, ClassVar

from agent_r1.core.messages import Message, to_openai
from agent_r1.rollout.formats.format import Format, Reading, Tools, Written, broken, call_of, read_json

TAG = "<|python_tag|>"


class Llama(Format):
    """What begins with a brace, or with the python tag, is calls; several stand one after the other, apart by ``;``.

    A JSON object that has neither a name nor parameters is an answer.

    Example: {"name": "add", "parameters": {"a": 1}}
    """

    name: ClassVar[str] = "llama3"

    def read(self, said: str, tools: Tools) -> Reading:
        start = _start(said)
        if start is None:
            return Reading(said)
        calls = _calls(said, start)
        return Reading("", calls) if calls else Reading(said)

    def shaped(self, messages: Sequence[Message], tools: Tools) -> list[dict[str, Any]]:
        """Its templates refuse several calls in one message: those stay the text they are."""
        return [_shaped(message) for message in messages]


def _shaped(message: Message) -> dict[str, Any]:
    data = to_openai(message)
    if len(data.get("tool_calls", ())) > 1:
        del data["tool_calls"]
        data["content"] = "; ".join(call.raw for call in message.calls)
    return data


def _start(said: str) -> int | None:
    """Where the first call begins; None where nothing is called."""
    text = said.lstrip()
    skipped = len(said) - len(text)
    if text.startswith(TAG):
        return skipped + len(TAG)
    return skipped if text.startswith("{") else None


def _calls(said: str, start: int) -> tuple[Written, ...]:
    calls: list[Written] = []
    decoder = json.JSONDecoder()
    while rest := said[start:].lstrip("; \n\t"):
        start = len(said) - len(rest)
        try:
            _, end = decoder.raw_decode(said, start)
            data = read_json(said[start:end])
        except (ValueError, RecursionError) as error:
            return (*calls, broken(rest, len(said), f"the call is not valid JSON: {error}"))
        if isinstance(data, dict) and not data.keys() & {"name", "parameters", "arguments"} and not calls:
            return ()
        calls.append(call_of(data, said[start:end], end, "parameters"))
        start = end
    return tuple(calls)
