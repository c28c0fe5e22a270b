"""What is said: messages, calls and actions, and their OpenAI form at the outside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

RoleName = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of text."""

    text: str


@dataclass(frozen=True, slots=True)
class Media:
    """A piece of media, by reference: the digest of its bytes and its mime type."""

    sha256: str
    mime: str


ContentPart = Text | Media


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call as the policy wrote it.

    ``raw`` is the text between the call's markers. ``arguments`` is None and ``error`` says why
    when it could not be parsed.

    Example:
        ToolCall("call_0", "search", {"query": "Alba"}, '{"name": "search", ...}')
    """

    id: str
    name: str
    arguments: Mapping[str, Any] | None
    raw: str
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation.

    Example:
        Message.user("Who rules Alba?").text == "Who rules Alba?"
    """

    role: RoleName
    parts: tuple[ContentPart, ...]
    calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None
    call_id: str | None = None

    @property
    def text(self) -> str:
        """The text parts, joined without anything between them."""
        return "".join(part.text for part in self.parts if isinstance(part, Text))

    @classmethod
    def system(cls, text: str) -> Message:
        return cls("system", (Text(text),))

    @classmethod
    def user(cls, text: str) -> Message:
        return cls("user", (Text(text),))

    @classmethod
    def assistant(cls, text: str, calls: tuple[ToolCall, ...] = (), reasoning: str | None = None) -> Message:
        return cls("assistant", (Text(text),), calls, reasoning)

    @classmethod
    def tool(cls, text: str, call_id: str) -> Message:
        return cls("tool", (Text(text),), call_id=call_id)


def to_openai(message: Message) -> dict[str, Any]:
    """A message as the OpenAI-shaped dictionary that chat templates read.

    Arguments stay mappings, as transformers' templates expect. Where a call could not be parsed, the
    content already holds everything the policy said, and no calls are listed.

    Example:
        >>> to_openai(Message.user("hello"))
        {'role': 'user', 'content': 'hello'}
    """
    data: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.reasoning is not None:
        data["reasoning_content"] = message.reasoning
    if message.calls and all(call.arguments is not None for call in message.calls):
        data["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": dict(call.arguments or {})},
            }
            for call in message.calls
        ]
    if message.call_id is not None:
        data["tool_call_id"] = message.call_id
    return data


def from_openai(data: Mapping[str, Any]) -> Message:
    """The inverse of :func:`to_openai`.

    Example:
        >>> from_openai({"role": "user", "content": "hello"}).text
        'hello'
    """
    calls = tuple(
        ToolCall(
            id=call.get("id", f"call_{index}"),
            name=call["function"]["name"],
            arguments=call["function"]["arguments"],
            raw="",
        )
        for index, call in enumerate(data.get("tool_calls") or ())
    )
    text = Text(data.get("content") or "")
    return Message(data["role"], (text,), calls, data.get("reasoning_content"), data.get("tool_call_id"))


@dataclass(frozen=True, slots=True)
class Action:
    """What the policy said in one turn, parsed; the raw text is kept.

    Example:
        Action(Message.assistant("<answer>Bruno</answer>"), "<answer>Bruno</answer>")
    """

    message: Message
    text: str
