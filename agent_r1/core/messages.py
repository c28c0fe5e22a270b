"""Messages, tool calls and actions, and their conversion to and from the OpenAI format."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from agent_r1.core.arguments import parse_arguments
from agent_r1.core.errors import InvalidInput
from agent_r1.core.images import decode_data_url, encode_picture, read_header

RoleName = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Image:
    """An image that is part of a message. Two images are equal if their files have equal bytes."""

    sha256: str  # of the file, in hexadecimal
    mime: str  # such as image/png
    width: int = field(default=0, compare=False)
    height: int = field(default=0, compare=False)
    data: bytes = field(default=b"", compare=False, repr=False)  # the file; empty in messages read from a run

    @classmethod
    def from_bytes(cls, data: bytes, mime: str | None = None) -> Image:
        """Return the image in the file contents ``data``."""
        header = read_header(data, mime)
        return cls(hashlib.sha256(data).hexdigest(), header.mime, header.width, header.height, data)

    @classmethod
    def from_file(cls, path: str | Path) -> Image:
        """Return the image in a file. Raise InvalidInput if the file is not an image."""
        try:
            return cls.from_bytes(Path(path).read_bytes())
        except OSError as error:
            raise InvalidInput("image", got=f"{path}: {error.strerror}", do="name a file that can be read") from error

    @classmethod
    def from_data_url(cls, url: str) -> Image:
        """Return the image in a URL such as ``data:image/png;base64,iVBOR..``."""
        return cls.from_bytes(*decode_data_url(url))

    @classmethod
    def from_pil(cls, picture: Any) -> Image:
        """Convert an image of the package pillow to a PNG."""
        return cls.from_bytes(encode_picture(picture))

    def to_data_url(self) -> str:
        return f"data:{self.mime};base64,{base64.b64encode(self.data).decode('ascii')}"

    def __str__(self) -> str:
        size = f" {self.width}x{self.height}" if self.width else ""
        return f"[{self.mime}{size} {self.sha256[:12]}]"


ContentPart = Text | Image


def join_texts(texts: Iterable[str]) -> str:
    """Join texts with a line break between two of them, unless there is one: they can be values, such as 1 and 23."""
    joined = ""
    for text in texts:
        is_apart = not joined or not text or joined.endswith("\n") or text.startswith("\n")
        joined += text if is_apart else f"\n{text}"
    return joined


def join_parts(parts: Iterable[ContentPart]) -> tuple[ContentPart, ...]:
    """Return the parts with adjacent texts joined to one."""
    joined: list[ContentPart] = []
    for part in parts:
        if joined and isinstance(part, Text) and isinstance(last := joined[-1], Text):
            joined[-1] = Text(join_texts((last.text, part.text)))
        else:
            joined.append(part)
    return tuple(joined)


def parts_text(parts: Iterable[ContentPart]) -> str:
    """Return the parts of a message as one text. Each image is a line such as ``[image/png 64x48 9f86d081884c]``."""
    return join_texts(f"{part}\n" if isinstance(part, Image) else part.text for part in parts)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call as the policy wrote it."""

    id: str
    name: str
    arguments: Mapping[str, Any] | None  # None if ``raw`` cannot be parsed
    raw: str  # the text of the call, without the markers around it
    error: str | None = None  # why ``raw`` cannot be parsed


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation."""

    role: RoleName
    parts: tuple[ContentPart, ...]
    calls: tuple[ToolCall, ...] = ()  # of an assistant message
    reasoning: str | None = None  # the thought at the beginning of an assistant message
    call_id: str | None = None  # the tool call that a tool message answers

    @property
    def text(self) -> str:
        """The text parts of the message, joined by line breaks."""
        return join_texts(part.text for part in self.parts if isinstance(part, Text))

    @property
    def images(self) -> tuple[Image, ...]:
        return tuple(part for part in self.parts if isinstance(part, Image))

    def with_images_as_text(self) -> Message:
        """Return the message with each image replaced by a line of text."""
        return replace(self, parts=(Text(parts_text(self.parts)),)) if self.images else self

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
    """Return a message as an OpenAI-style dictionary for a chat template. Calls that could not be parsed are left out.

    Example:
        >>> to_openai(Message.user("hello"))
        {'role': 'user', 'content': 'hello'}
    """
    data: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.images:
        data["content"] = [_part_to_openai(part) for part in join_parts(message.parts)]
    if message.reasoning is not None:
        data["reasoning_content"] = message.reasoning
    if message.calls and all(call.arguments is not None for call in message.calls):
        data["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                # a mapping and not text, as the templates of transformers expect
                "function": {"name": call.name, "arguments": dict(call.arguments or {})},
            }
            for call in message.calls
        ]
    if message.call_id is not None:
        data["tool_call_id"] = message.call_id
    return data


def from_openai(data: Mapping[str, Any]) -> Message:
    """Return the message that an OpenAI-style dictionary describes.

    Raise ValueError if the dictionary cannot be read, and InvalidInput if an image cannot be used.
    """
    if data.get("role") not in get_args(RoleName):
        raise ValueError(f"a message with the role {data.get('role')!r}, which is not one of {get_args(RoleName)}")
    parts = _content(data.get("content"))
    calls = tuple(_call(call, index) for index, call in enumerate(data.get("tool_calls") or ()))
    return Message(data["role"], parts, calls, data.get("reasoning_content"), data.get("tool_call_id"))


def to_messages(given: str | Iterable[Message | Mapping[str, Any]]) -> tuple[Message, ...]:
    """Convert the text of one user message, or an iterable of messages and OpenAI-style dictionaries.

    Raise TypeError or ValueError if an element is not a message, and InvalidInput if an image cannot be used.

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
    if isinstance(content, list | tuple):
        return tuple(map(_part, content))
    raise ValueError(
        f"a message with content of type {type(content).__name__} that is neither text nor a list of parts"
    )


def _part(part: object) -> ContentPart:
    match part:
        case Text() | Image():
            return part
        case {"text": str(text), **others} if others.get("type", "text") in ("text", "input_text", "output_text"):
            return Text(text)
        case {"image_url": {"url": str(url)}} | {"image_url": str(url)}:
            return Image.from_data_url(url)
        case {"type": "image", "image": Image() as image}:
            return image
        case {"type": "image", "image": bytes(data)}:
            return Image.from_bytes(data)
        case {"type": "image", "image": str(name)}:
            do = "give a part of the type image_url with data:image/png;base64,.., or in Python Image.from_file(path)"
            raise InvalidInput("image", got=f"{name[:80]!r} in a part of the type image", do=do)
        case {"type": "image", "image": picture} if type(picture).__module__.startswith("PIL."):  # as in data sets
            return Image.from_pil(picture)
    kind = repr(part.get("type")) if isinstance(part, Mapping) else type(part).__name__
    raise ValueError(f"a part of a message of type {kind:.80} that is neither text nor image_url")


def _part_to_openai(part: ContentPart) -> dict[str, Any]:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    return {"type": "image_url", "image_url": {"url": part.to_data_url()}}


def _call(call: object, index: int) -> ToolCall:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"a tool call without a function and its name: {call!r:.80}")
    given = function.get("arguments")
    raw = given if isinstance(given, str) else ""
    return ToolCall(str(call.get("id", f"call_{index}")), function["name"], parse_arguments(given), raw)


@dataclass(frozen=True, slots=True)
class Action:
    """The output of the policy in one turn: the parsed message and the raw text."""

    message: Message
    text: str


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """The description of a tool for the policy."""

    name: str
    description: str
    parameters: Mapping[str, Any]  # the JSON schema of the arguments

    def to_openai(self) -> dict[str, Any]:
        """Return the tool in the OpenAI format, for the argument ``tools`` of a chat template."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of one tool call."""

    parts: tuple[ContentPart, ...]  # what the agent sees
    ok: bool
    error: str | None = None  # the kind of the failure; None if the call succeeded
    data: Any = None  # for the rewards, not shown to the agent
    seconds: float = 0.0  # the duration of the call
