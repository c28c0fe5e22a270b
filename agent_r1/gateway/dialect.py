"""Dialects: the formats in which clients write requests and read answers. Helpers that all dialects use."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from agent_r1.core.messages import ToolCall
from agent_r1.core.tool import ToolSpec
from agent_r1.gateway.chat import Answer, ChatRequest, RequestError

log = logging.getLogger(__name__)

Json = dict[str, Any]
Body = TypeVar("Body", bound=BaseModel)

PIECE_CHARACTERS = 32
"""The largest number of characters in one event of a stream."""


MAX_STOP_STRINGS, MAX_STOP_CHARACTERS = 16, 256
"""The largest number of stop strings, and of their characters. They are compared after each sampled token."""


class Exchange(Protocol):
    """One request in a dialect: what it asks for, and how its answer is written."""

    @property
    def chat(self) -> ChatRequest:
        """The request, independent of the dialect."""
        ...

    @property
    def streams(self) -> bool:
        """Whether the client wants the answer as server-sent events."""
        ...

    def to_json(self, answer: Answer) -> Json:
        """Return the body of the response."""
        ...

    def to_events(self, answer: Answer) -> Iterator[str]:
        """Yield the server-sent events of the response."""
        ...


@dataclass(frozen=True, slots=True)
class Dialect:
    """A dialect.

    Attributes:
        paths: the paths of its requests.
        read: returns the exchange that the body of a request begins. Raises RequestError if the body is invalid.
        error: returns the body of a response with an error.
    """

    paths: tuple[str, ...]
    read: Callable[[Json], Exchange]
    error: Callable[[RequestError], Json]


class Strict(BaseModel):
    """A part of a request in which an unknown field is an error, because it could ask for something else."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Lenient(BaseModel):
    """A part of a request in which unknown fields are ignored: a message that a client sends back can have many."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)


def read_body(kind: type[Body], data: Json) -> Body:
    """Return the body of a request as ``kind``. Raise RequestError with the first error if it is invalid."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        param = ".".join(map(str, first["loc"]))
        message = "this argument is not supported" if first["type"] == "extra_forbidden" else first["msg"]
        raise RequestError(400, f"{param}: {message}", param=param) from None


def refuse(param: str, message: str) -> RequestError:
    """Return the error of a request that asks for something that is not supported."""
    return RequestError(400, f"{param}: {message}", code="unsupported_value", param=param)


def read_stop_strings(given: Sequence[str] | None, param: str) -> tuple[str, ...]:
    """Return the stop strings of a request. Raise RequestError if they are too many, too long or empty."""
    strings = tuple(given or ())
    if len(strings) > MAX_STOP_STRINGS:
        raise refuse(param, f"got {len(strings)} stop strings; at most {MAX_STOP_STRINGS} are supported")
    for string in strings:
        if not 1 <= len(string) <= MAX_STOP_CHARACTERS:
            raise refuse(param, f"a stop string has 1 to {MAX_STOP_CHARACTERS} characters, got {len(string)}")
    return strings


def requires_call(choice: object, tools: Sequence[ToolSpec]) -> bool:
    """Return whether a ``tool_choice`` requires a call, of any tool or of the only one.

    Raise RequestError if it names one of several tools.
    """
    if choice is None or choice in ("auto", "none"):
        return False
    only = [tool.name for tool in tools] if len(tools) == 1 else []
    named = choice.get("function", choice) if isinstance(choice, dict) else {}
    if choice in ("required", "any") or (isinstance(named, dict) and [named.get("name")] == only):
        return True
    raise refuse("tool_choice", f"got {choice!r}; calls are sampled, not forced: use 'auto', 'required' or 'none'")


def read_tool(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> ToolSpec:
    """Return the specification of a tool that a client describes. A tool without parameters has none."""
    return ToolSpec(name, description or "", parameters or {"type": "object", "properties": {}})


def warn_about_ignored(request: ChatRequest) -> None:
    """Log a warning for each argument of a request that has no effect, once per argument."""
    for argument in request.ignored:
        _warn_once(argument)


@cache
def _warn_once(argument: str) -> None:
    log.warning("the agent sends %s, which has no effect", argument)


def read_call(id: str, name: str, arguments: str, param: str) -> ToolCall:
    """Return a call that a client sends back. ``arguments`` is JSON text; "" stands for no arguments."""
    try:
        values = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        raise RequestError(400, f"{param}: the arguments are not JSON", param=param) from None
    if not isinstance(values, dict):
        raise RequestError(400, f"{param}: the arguments are not a JSON object", param=param)
    return ToolCall(id, name, values, arguments)


def write_arguments(call: ToolCall) -> str:
    """Return the arguments of a call as JSON text."""
    return json.dumps(dict(call.arguments or {}), ensure_ascii=False)


def pieces(text: str) -> Iterator[str]:
    """Yield the text in the pieces in which a stream sends it."""
    for start in range(0, len(text), PIECE_CHARACTERS):
        yield text[start : start + PIECE_CHARACTERS]


def event(data: object, name: str = "") -> str:
    """Return a server-sent event."""
    opening = f"event: {name}\n" if name else ""
    return f"{opening}data: {json.dumps(data, ensure_ascii=False)}\n\n"
