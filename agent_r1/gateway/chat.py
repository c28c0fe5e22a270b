"""Requests and answers in a form that does not depend on the client's API (OpenAI or Anthropic), and shared parsing."""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agent_r1.core.arguments import parse_arguments
from agent_r1.core.errors import InvalidInput
from agent_r1.core.messages import ContentPart, Image, Message, Text, ToolCall, ToolSpec, join_parts, join_texts

log = logging.getLogger(__name__)

Messages = tuple[Message, ...]

EndReason = Literal["stop", "stop_string", "length", "tool_calls"]
"""Why an answer ended: the model ended its turn, a stop string, the token limit, or tool calls."""


class RequestError(Exception):
    """Raised if a request is refused or fails. ``status`` is the HTTP status of the response.

    Attributes:
        code: the name of the error for use in programs, such as ``context_length_exceeded``, or None.
        param: the wrong part of the request, such as ``messages.0.content``, or None.
        can_retry: whether the same request can succeed later. If true, clients repeat the request.
    """

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None, can_retry: bool = False
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.can_retry = status, code, param, can_retry


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request for the next message of a conversation.

    Attributes:
        messages: the whole conversation. If the request continues an earlier answer, only the messages after it.
        calls_are_text: whether the answer contains tool calls as text.
        n: the number of alternative answers.
        max_tokens: the limit of tokens per answer. None: the limit of the model.
        temperature, top_p: None for the values of the model.
        seed: None for a random seed.
        instructions: a system message for this request only, which is left out of the conversation for later requests.
        ignored: the arguments of the request that have no effect.
        previous: the id of the earlier answer that the request continues, or None.
    """

    messages: Messages
    tools: tuple[ToolSpec, ...] = ()
    calls_are_text: bool = False
    n: int = 1
    max_tokens: int | None = None
    stop_strings: tuple[str, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    logprobs: bool = False
    instructions: str | None = None
    ignored: tuple[str, ...] = ()
    previous: str | None = None

    @property
    def conversation(self) -> Messages:
        """``messages``, with ``instructions`` before them as a system message."""
        return self.messages if self.instructions is None else (Message.system(self.instructions), *self.messages)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the alternative answers to a request."""

    # the message for the client, without the stop string. It has tool calls only if the request has tools
    message: Message
    end: EndReason
    num_tokens: int
    stop_string: str | None = None  # the stop string that ended the answer, or None
    # one entry for each sampled token, also for tokens of the stop string. () if not requested
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """The answer to a request. ``id`` is a unique text, without the prefix of an API (such as ``chatcmpl-``)."""

    id: str
    choices: tuple[Choice, ...]
    num_prompt_tokens: int

    @property
    def num_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)


@dataclass(frozen=True, slots=True)
class StreamStart:
    """The first part of a stream, sent before the first token. ``id`` is the id of the answer."""

    id: str
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A part of a stream: new characters of a choice's reasoning or text. ``index`` is the index of the choice."""

    index: int
    kind: Literal["reasoning", "text"]
    text: str


StreamPart = StreamStart | TextDelta | ChatAnswer
"""A part of a stream. A stream is a start, the deltas of reasoning and text, and the complete answer."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A complete answer that was not sent to a client yet. Call ``deliver`` once, when the answer is first sent."""

    answer: ChatAnswer
    deliver: Callable[[], None]


@dataclass(slots=True)
class LiveAnswer:
    """An answer while it is sampled. The object stays empty if the model does not support streaming."""

    start: StreamStart | None = None  # the first part of the stream; None if the stream cannot begin yet
    # converts ``token_ids`` to the part of the message that can already be sent
    read: Callable[[tuple[int, ...]], Message] = lambda token_ids: Message.assistant("")
    token_ids: Sequence[int] = ()  # the tokens that were sampled so far

    def set_tokens(self, token_ids: Sequence[int]) -> None:
        self.token_ids = token_ids


class ChatModel(Protocol):
    """A model that answers requests: the policy within one episode, or a served model."""

    name: str  # the name in the list of models
    max_concurrent: int  # how many requests are answered at the same time

    def draft(self, request: ChatRequest, live: LiveAnswer) -> Awaitable[Draft]:
        """Return the answer to a request. The caller sends the answer to the client."""
        ...

    async def count_tokens(self, request: ChatRequest) -> int:
        """Return the number of tokens of a request's prompt."""
        ...


# ---- dialects: the formats of the APIs

Json = dict[str, Any]


class DialectRequest(ABC):
    """A request in a dialect, the format of one API. It also writes the response in this dialect."""

    chat: ChatRequest  # the request in the form that all dialects share
    streams: bool  # whether the client wants the answer as server-sent events

    @abstractmethod
    def to_json(self, answer: ChatAnswer) -> Json:
        """Return the JSON body of the response, for a client that wants no events."""

    @abstractmethod
    def events(self, part: StreamPart) -> Iterator[str]:
        """Yield the server-sent events of the next part of the stream."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """The URL paths and the functions of one dialect, such as OpenAI's chat completions."""

    paths: tuple[str, ...]  # the URL paths of requests, such as ``/v1/chat/completions``
    # parses the JSON body of a request. Raises RequestError if the body is invalid
    read: Callable[[Json], DialectRequest]
    error: Callable[[RequestError], Json]  # returns the JSON body of an error response
    count_paths: tuple[str, ...] = ()  # the URL paths of requests that only count the tokens of a prompt


class Lenient(BaseModel):
    """A part of a request in which unknown fields are ignored, such as an additional field of a message."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)


class Body(BaseModel):
    """The JSON body of a request. An unknown field is an error, because it could change the meaning of the request."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    model: str
    stream: bool | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    # accepted, without an effect
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None


BodyT = TypeVar("BodyT", bound=Body)


def read_body(kind: type[BodyT], data: Json) -> BodyT:
    """Return the JSON body of a request as an object of the class ``kind``. Raise RequestError if it is invalid."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        param = ".".join(map(str, first["loc"]))
        message = "this argument is not supported" if first["type"] == "extra_forbidden" else first["msg"]
        raise RequestError(400, f"{param}: {message}", param=param) from None


def refuse(param: str, message: str) -> RequestError:
    """Return the error for an argument with a value that is not supported (HTTP status 400)."""
    return RequestError(400, f"{param}: {message}", code="unsupported_value", param=param)


class TextPart(Lenient):
    type: Literal["text", "input_text", "output_text"]
    text: str


class ImagePart(Lenient):
    """Base class of the images in the content of a message."""

    @property
    def url(self) -> str:
        raise NotImplementedError


def read_parts(content: str | Sequence[TextPart | ImagePart], param: str) -> tuple[ContentPart, ...]:
    """Return the parts of a message, with adjacent texts joined. Without content, return one empty text.

    Raise RequestError if an image cannot be used. ``param`` is the name of the content in the error.
    """
    if isinstance(content, str):
        return (Text(content),)
    parts: list[ContentPart] = []
    for part in content:
        if isinstance(part, ImagePart):
            try:
                parts.append(Image.from_data_url(part.url))
            except InvalidInput as error:
                raise refuse(param, str(error)) from None
        else:
            parts.append(Text(part.text))
    return join_parts(parts) or (Text(""),)


def read_text(content: str | Iterable[Lenient] | None) -> str:
    """Return the joined texts of a content. Parts of other types are left out."""
    if content is None or isinstance(content, str):
        return content or ""
    return join_texts(part.text for part in content if isinstance(part, TextPart))


class FunctionTool(Lenient):
    """The description of a client's tool in the APIs of OpenAI. Without ``parameters``, it has no arguments."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None

    def spec(self) -> ToolSpec:
        return ToolSpec(self.name, self.description or "", self.parameters or {"type": "object", "properties": {}})


def read_call(id: str, name: str, arguments: str, param: str) -> ToolCall:
    """Return a tool call that a client sends back. ``arguments`` is the text of a JSON object, as in parse_arguments.

    Raise RequestError if it is not. ``param`` is the name of the call in the error.
    """
    try:
        return ToolCall(id, name, parse_arguments(arguments), arguments)
    except ValueError as error:
        raise RequestError(400, f"{param}: {error}", param=param) from None


def write_arguments(call: ToolCall) -> str:
    """Return the arguments of a call as JSON text, such as '{"query": "Alba"}'."""
    return json.dumps(dict(call.arguments or {}), ensure_ascii=False)


MAX_STOP_STRINGS, MAX_STOP_CHARACTERS = 16, 256
"""The largest number of stop strings, and the largest number of characters of a stop string."""


def read_stop_strings(given: Sequence[str] | None, param: str) -> tuple[str, ...]:
    """Return the stop strings of a request. Raise RequestError if one is empty or too long, or there are too many."""
    strings = tuple(given or ())
    if len(strings) > MAX_STOP_STRINGS:
        raise refuse(param, f"got {len(strings)} stop strings; at most {MAX_STOP_STRINGS} are supported")
    for string in strings:
        if not 1 <= len(string) <= MAX_STOP_CHARACTERS:
            raise refuse(param, f"a stop string has 1 to {MAX_STOP_CHARACTERS} characters, got {len(string)}")
    return strings


def ignored_arguments(choice: object, tools: Sequence[ToolSpec], others: Mapping[str, object]) -> tuple[str, ...]:
    """Return the arguments of a request that have no effect, such as "frequency_penalty" or "tool_choice=required"."""
    values = {f"tool_choice={choice}": _requires_call(choice, tools), **others}
    return tuple(name for name, value in values.items() if value)


def _requires_call(choice: object, tools: Sequence[ToolSpec]) -> bool:
    # Calls are sampled, and forcing one would change the distribution that is trained. A required call is accepted,
    # because agents ask for it and the policy usually calls a tool; a certain tool only if there is no other.
    if choice is None or choice in ("auto", "none"):
        return False
    only = [tool.name for tool in tools] if len(tools) == 1 else []
    named = choice.get("function", choice) if isinstance(choice, dict) else {}
    if choice in ("required", "any") or (isinstance(named, dict) and [named.get("name")] == only):
        return True
    raise refuse("tool_choice", f"got {choice!r}; calls are sampled, not forced: use 'auto', 'required' or 'none'")


@cache
def warn_once(text: str) -> None:
    """Log a warning. Equal texts are logged only once per process."""
    log.warning("%s", text)


def event(data: object, name: str = "") -> str:
    """Return one server-sent event with ``data`` as JSON. If ``name`` is "", the event has no name."""
    opening = f"event: {name}\n" if name else ""
    return f"{opening}data: {json.dumps(data, ensure_ascii=False)}\n\n"
