"""The common parts of all dialects. A dialect is the format of one API, such as OpenAI's chat completions."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from agent_r1.core.errors import InvalidInput
from agent_r1.core.messages import ContentPart, Image, Text, ToolCall
from agent_r1.core.tool import ToolSpec
from agent_r1.gateway.chat import Answer, ChatRequest, Part, RequestError

log = logging.getLogger(__name__)

Json = dict[str, Any]
Body = TypeVar("Body", bound=BaseModel)

PIECE_CHARACTERS = 32
"""The largest number of characters in one event of a stream."""


MAX_STOP_STRINGS, MAX_STOP_CHARACTERS = 16, 256
"""The largest number of stop strings, and the largest number of characters of a stop string."""


EventWriter = Callable[[Part], Iterator[str]]
"""A function that yields the server-sent events of one part of a stream.

Call the function once for each part of the stream, in the order of the parts.
"""


class Exchange(Protocol):
    """A request in a dialect, the format of one API. The methods write the HTTP response in the same dialect."""

    @property
    def chat(self) -> ChatRequest:
        """The request in the form that all dialects share."""
        ...

    @property
    def streams(self) -> bool:
        """Whether the client wants the answer as server-sent events."""
        ...

    def to_json(self, answer: Answer) -> Json:
        """Return the JSON body of the response, for a client that wants no events."""
        ...

    def event_writer(self) -> EventWriter:
        """Return a new function that converts each part of a stream to server-sent events."""
        ...


@dataclass(frozen=True, slots=True)
class Dialect:
    """The URL paths and the functions of one dialect: the format of one API, such as OpenAI's chat completions.

    Attributes:
        paths: the URL paths of requests, such as ``/v1/chat/completions``.
        read: parses the JSON body of a request. Raises RequestError if the body is invalid.
        error: returns the JSON body of an error response.
        count_paths: the URL paths of requests that only count the tokens of a prompt.
    """

    paths: tuple[str, ...]
    read: Callable[[Json], Exchange]
    error: Callable[[RequestError], Json]
    count_paths: tuple[str, ...] = ()


class Strict(BaseModel):
    """A part of a request in which an unknown field is an error, because the field could change the meaning."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Lenient(BaseModel):
    """A part of a request in which unknown fields are ignored, such as an additional field of a message."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)


def read_body(kind: type[Body], data: Json) -> Body:
    """Return the JSON body of a request as an object of the class ``kind``.

    Raise RequestError if the body is invalid.
    """
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


def read_stop_strings(given: Sequence[str] | None, param: str) -> tuple[str, ...]:
    """Return the stop strings of a request.

    Raise RequestError if there are too many strings, or if a string is empty or too long. The error contains ``param``,
    the name of the argument, such as "stop".
    """
    strings = tuple(given or ())
    if len(strings) > MAX_STOP_STRINGS:
        raise refuse(param, f"got {len(strings)} stop strings; at most {MAX_STOP_STRINGS} are supported")
    for string in strings:
        if not 1 <= len(string) <= MAX_STOP_CHARACTERS:
            raise refuse(param, f"a stop string has 1 to {MAX_STOP_CHARACTERS} characters, got {len(string)}")
    return strings


def ignored_arguments(choice: object, tools: Sequence[ToolSpec], others: Mapping[str, object]) -> tuple[str, ...]:
    """Return the arguments of a request that have no effect, such as "frequency_penalty" or "tool_choice=required".

    Raise RequestError if ``tool_choice`` has a value that is not supported.

    Args:
        choice: the argument ``tool_choice``. It has no effect if it requires a call.
        others: the values of other arguments without an effect, by name. None, 0 or empty: the argument was not given.
    """
    values = {f"tool_choice={choice}": _requires_call(choice, tools), **others}
    return tuple(name for name, value in values.items() if value)


def _requires_call(choice: object, tools: Sequence[ToolSpec]) -> bool:
    """Return whether ``choice``, the argument ``tool_choice`` of a request, requires a call.

    The values "required", "any", and the name of the only tool require a call. Raise RequestError for unsupported
    values, such as the name of one of several tools.
    """
    if choice is None or choice in ("auto", "none"):
        return False
    only = [tool.name for tool in tools] if len(tools) == 1 else []
    named = choice.get("function", choice) if isinstance(choice, dict) else {}
    if choice in ("required", "any") or (isinstance(named, dict) and [named.get("name")] == only):
        return True
    raise refuse("tool_choice", f"got {choice!r}; calls are sampled, not forced: use 'auto', 'required' or 'none'")


def read_tool(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> ToolSpec:
    """Return the specification of a client's tool. Without ``parameters``, the tool has no arguments."""
    return ToolSpec(name, description or "", parameters or {"type": "object", "properties": {}})


def warn_about_ignored(request: ChatRequest) -> None:
    for argument in request.ignored:
        warn_once(f"the agent sends {argument}, which has no effect")


@cache
def warn_once(text: str) -> None:
    """Log a warning. Equal texts are logged only once per process."""
    log.warning("%s", text)


def merge_parts(parts: Iterable[ContentPart]) -> tuple[ContentPart, ...]:
    """Return the parts of a message, with adjacent texts joined. Without parts, return one empty text."""
    merged: list[ContentPart] = []
    for part in parts:
        if isinstance(part, Text) and merged and isinstance(last := merged[-1], Text):
            merged[-1] = Text(last.text + part.text)
        else:
            merged.append(part)
    return tuple(merged) or (Text(""),)


def read_image(url: str, param: str) -> Image:
    """Return the image in a data URL.

    Raise RequestError if the image cannot be used. The error contains ``param``, the name of the request's field with
    the URL, such as "messages".
    """
    try:
        return Image.from_data_url(url)
    except InvalidInput as error:
        raise refuse(param, str(error)) from None


def read_call(id: str, name: str, arguments: str, param: str) -> ToolCall:
    """Return a tool call that a client sends back. ``arguments`` is JSON text; "" means no arguments.

    Raise RequestError if the text is not a JSON object. The error contains ``param``, the name of the request's field
    with the call, such as "input".
    """
    try:
        values = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        raise RequestError(400, f"{param}: the arguments are not JSON", param=param) from None
    if not isinstance(values, dict):
        raise RequestError(400, f"{param}: the arguments are not a JSON object", param=param)
    return ToolCall(id, name, values, arguments)


def write_arguments(call: ToolCall) -> str:
    """Return the arguments of a call as JSON text, such as '{"query": "Alba"}'."""
    return json.dumps(dict(call.arguments or {}), ensure_ascii=False)


def pieces(text: str) -> Iterator[str]:
    """Yield the text in pieces of at most ``PIECE_CHARACTERS`` characters."""
    for start in range(0, len(text), PIECE_CHARACTERS):
        yield text[start : start + PIECE_CHARACTERS]


def event(data: object, name: str = "") -> str:
    """Return one server-sent event with ``data`` as JSON. If ``name`` is "", the event has no name.

    Example:
        'event: ping\\ndata: {"type": "ping"}\\n\\n'
    """
    opening = f"event: {name}\n" if name else ""
    return f"{opening}data: {json.dumps(data, ensure_ascii=False)}\n\n"
