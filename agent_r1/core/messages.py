"""Messages, tool calls and actions, and their conversion to and from the OpenAI format."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

RoleName = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Text:
    """A text that is part of a message."""

    text: str


@dataclass(frozen=True, slots=True)
class Media:
    """A part of a message that is not text, such as an image: the sha256 of its bytes and its MIME type."""

    sha256: str
    mime: str


ContentPart = Text | Media


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call as the policy wrote it.

    ``raw`` is the text of the call, without the markers around it. If the call cannot be parsed, ``arguments`` is None
    and ``error`` gives the reason.

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

    Attributes:
        calls: the tool calls of an assistant message.
        reasoning: the thought that an assistant message begins with, or None.
        call_id: the id of the tool call that a tool message answers; None for other messages.

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
        """The text parts of the message, joined to one text."""
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
    """Return a message as an OpenAI-style dictionary for a chat template.

    The arguments of a call are a mapping, as the templates of transformers expect. If the message has a call that could
    not be parsed, ``content`` is the whole text of the action, and no calls are listed.

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
    """Return the message that ``data``, an OpenAI-style dictionary, describes.

    Its ``content`` is text, a list of text parts, or None. The arguments of a call are a mapping or a JSON object as
    text.

    Raises:
        ValueError: the role is unknown, or a part of the dictionary cannot be read.

    Example:
        >>> from_openai({"role": "user", "content": "hello"}).text
        'hello'
    """
    if data.get("role") not in get_args(RoleName):
        raise ValueError(f"a message with the role {data.get('role')!r}, which is not one of {get_args(RoleName)}")
    parts = _content(data.get("content"))
    calls = tuple(_call(call, index) for index, call in enumerate(data.get("tool_calls") or ()))
    return Message(data["role"], parts, calls, data.get("reasoning_content"), data.get("tool_call_id"))


def to_messages(given: str | Iterable[Message | Mapping[str, Any]]) -> tuple[Message, ...]:
    """Return messages as a tuple.

    ``given`` is text (one user message), or a list of messages or OpenAI-style dictionaries.

    Raises:
        TypeError: an element is neither a Message nor a mapping.
        ValueError: a dictionary cannot be read as a message.

    Example:
        >>> [message.text for message in to_messages([{"role": "user", "content": "hello"}])]
        ['hello']
    """
    if isinstance(given, str):
        return (Message.user(given),)
    messages = []
    for item in given:
        if isinstance(item, Mapping):
            item = from_openai(item)
        if not isinstance(item, Message):
            raise TypeError(f"an object of type {type(item).__name__} where a message belongs")
        messages.append(item)
    return tuple(messages)


def _content(content: object) -> tuple[ContentPart, ...]:
    if content is None or isinstance(content, str):
        return (Text(content or ""),)
    if isinstance(content, list | tuple) and all(
        isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content
    ):
        return tuple(Text(part["text"]) for part in content)
    raise ValueError(f"a message with content of type {type(content).__name__} that is neither text nor text parts")


def _call(call: object, index: int) -> ToolCall:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"a tool call without a function and its name: {call!r:.80}")
    arguments = function.get("arguments", {})
    raw = arguments if isinstance(arguments, str) else ""
    if isinstance(arguments, str):
        arguments = json.loads(arguments or "{}")
    if not isinstance(arguments, Mapping):
        raise ValueError(f"a tool call whose arguments are not an object: {arguments!r:.80}")
    return ToolCall(str(call.get("id", f"call_{index}")), function["name"], arguments, raw)


@dataclass(frozen=True, slots=True)
class Action:
    """The output of the policy in one turn: the parsed message and the raw text.

    Example:
        Action(Message.assistant("<answer>Bruno</answer>"), "<answer>Bruno</answer>")
    """

    message: Message
    text: str
