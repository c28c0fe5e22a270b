"""``@tool`` turns a typed Python function with a docstring into a tool that an agent can call."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import math
import re
import sys
import time
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Protocol, TypeVar, overload

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError

from agent_r1.core.arguments import describe_parameters
from agent_r1.core.environment import RolloutContext
from agent_r1.core.errors import InvalidInput
from agent_r1.core.images import decode_image
from agent_r1.core.messages import ContentPart, Image, Text, ToolResult, ToolSpec
from agent_r1.core.task import Task
from agent_r1.core.threads import run_in_thread
from agent_r1.sandbox.sandbox import Sandbox, validate_sandbox
from agent_r1.tools.execution import (
    DEFAULT_TIMEOUT,
    BatchFunction,
    CallBatcher,
    CallFailure,
    CallOutcome,
    CallTimeout,
    ReturnValue,
    run_with_timeout,
)
from agent_r1.tools.tool_errors import ToolErrorKind, error_result, validation_errors

_log = logging.getLogger(__name__)


class Resource(Protocol):
    async def close(self) -> None: ...


_R = TypeVar("_R", bound=Resource)
_Opened = TypeVar("_Opened", bound=Resource, covariant=True)


class Opener(Protocol[_Opened]):
    """An object that opens one resource per episode. All tools with the same opener share this resource."""

    async def open(self, task: Task, context: RolloutContext) -> _Opened:
        """Open a resource and return it. A cancelled call must close everything that it has opened."""
        ...


class Resources:
    """The open resources of one episode, such as an interpreter. They are closed at the end of the episode.

    An async tool with a parameter of type ``Resources`` receives the resources of its episode.
    """

    def __init__(self, task: Task, context: RolloutContext) -> None:
        self._task, self._context = task, context
        self._openings: dict[Opener[Any], asyncio.Task[Any]] = {}
        self._closing: asyncio.Task[None] | None = None

    async def get(self, opener: Opener[_R]) -> _R:
        """Return the resource of ``opener`` in this episode. The first call opens the resource.

        If the first call is cancelled or times out, the resource is still opened, for later calls. If opening the
        resource fails, all calls raise the same error. Raise RuntimeError if the episode has ended.
        """
        if self._closing is not None:
            raise RuntimeError("the episode is over")
        if opener not in self._openings:
            self._openings[opener] = asyncio.create_task(opener.open(self._task, self._context))
        resource: _R = await asyncio.shield(self._openings[opener])
        return resource

    async def close(self) -> None:
        """Close all open resources, even if the caller is cancelled. Errors are logged."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        for opening in self._openings.values():
            opening.cancel()
        opened = await asyncio.gather(*self._openings.values(), return_exceptions=True)
        closings = (resource.close() for resource in opened if not isinstance(resource, BaseException))
        for outcome in await asyncio.gather(*closings, return_exceptions=True):
            if isinstance(outcome, BaseException):
                reason = f"{type(outcome).__name__}: {outcome}"
                _log.warning("closing a resource of %s failed: %s", self._context.id, reason)


_SECTION = re.compile(r"(Args|Arguments|Returns|Raises|Yields|Examples?|Notes?|Attributes|Warnings?):\s*$")
_ENTRY = re.compile(r"(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


def parse_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the text before the first section of a docstring, and the descriptions in its section ``Args:``.

    Example:
        >>> parse_docstring("Add up.\\n\\nArgs:\\n    a: one\\n        number.\\n    b (int): another.")
        ('Add up.', {'a': 'one number.', 'b': 'another.'})
    """
    summary: list[str] = []
    entries: list[str] = []
    target = summary
    for line in inspect.cleandoc(text).splitlines():
        if section := _SECTION.match(line):
            target = entries if section[1].startswith("Arg") else []
        elif target is entries and line and not line[0].isspace():
            target = []  # a line without indentation ends the entries
        else:
            target.append(line)
    paragraphs = re.split(r"\n\s*\n", "\n".join(summary))
    arguments: dict[str, str] = {}
    name = None
    for line in inspect.cleandoc("\n".join(["", *entries])).splitlines():
        if entry := _ENTRY.match(line):
            name = entry[1]
            arguments[name] = entry[2].strip()
        elif name is not None:
            arguments[name] = f"{arguments[name]} {line.strip()}".strip()
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs).strip(), arguments


MAX_SHOWN_ERRORS = 5
"""The largest number of wrong arguments that an error message explains."""


@dataclass(frozen=True, slots=True)
class InvalidArguments:
    """Why a tool was not run: the wrong arguments, and the list of the expected ones."""

    reason: str


Bind = Callable[[Mapping[str, Any], Task, RolloutContext, Resources], "dict[str, Any] | InvalidArguments"]
"""A function that validates the arguments of the policy, and returns all keyword arguments for the tool's function.

The function of the tool can also need the task, the context or the resources of the episode.
"""


def _parse_signature(function: Callable[..., Any], descriptions: Mapping[str, str]) -> tuple[dict[str, Any], Bind]:
    # Return the JSON schema of the arguments, and the function that validates them.
    def invalid(got: str, do: str) -> InvalidInput:
        return InvalidInput(f"tool {function.__name__!r}", got=got, do=do)

    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise invalid(f"annotations that cannot be read ({error})", "define its types at module level") from error
    parameters = inspect.signature(function).parameters
    for name, parameter in parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise invalid(f"the parameter {parameter}", "use parameters that can be named one by one")
        if name not in hints:
            raise invalid(f"no type for the parameter {name!r}", f"annotate it, e.g. {name}: str")
    if unknown := sorted(descriptions.keys() - parameters.keys()):
        raise invalid(f"a docstring that explains {', '.join(unknown)}", "explain only arguments that exist")
    injected = {name: hints[name] for name in parameters if hints[name] in (Task, RolloutContext, Resources)}
    names = tuple(name for name in parameters if name not in injected)
    fields: dict[str, Any] = {}
    for index, name in enumerate(names):
        # A description of None would replace the description in an annotation.
        text, default = descriptions.get(name), parameters[name].default
        field = Field(alias=name, description=text) if text else Field(alias=name)
        # The fields are named p0, p1, .., because pydantic does not accept every name.
        fields[f"p{index}"] = Annotated[hints[name], field], ... if default is inspect.Parameter.empty else default
    try:
        config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)
        model = create_model("Arguments", __config__=config, **fields)
        whole = _remove_titles(model.model_json_schema())
    except PydanticUserError as error:
        got = f"a parameter without a JSON schema ({str(error).splitlines()[0]})"
        raise invalid(got, "use plain types or pydantic models") from error
    order = ("type", "properties", "required", "$defs")
    schema = {"type": "object", "properties": {}} | {key: whole[key] for key in order if key in whole}
    return schema, partial(_bind, model, schema, names, injected)


def _remove_titles(node: Any) -> Any:
    if isinstance(node, dict):
        return {
            key: _remove_titles(value) for key, value in node.items() if key != "title" or not isinstance(value, str)
        }
    return [_remove_titles(item) for item in node] if isinstance(node, list) else node


def _bind(
    model: type[BaseModel],
    schema: Mapping[str, Any],
    names: tuple[str, ...],
    injected: Mapping[str, type],
    arguments: Mapping[str, Any],
    task: Task,
    context: RolloutContext,
    resources: Resources,
) -> dict[str, Any] | InvalidArguments:
    try:
        fields = model.model_validate(dict(arguments))
        if wrong := next(_not_finite(fields.model_dump(by_alias=True, exclude_unset=True)), None):
            return InvalidArguments(f"{wrong}: give a finite number. Expected: {describe_parameters(schema)}")
    except ValidationError as error:
        return InvalidArguments(f"{_describe_errors(error)}. Expected: {describe_parameters(schema)}")
    except Exception as error:  # a validator of the user's own types can raise any exception
        return InvalidArguments(f"{type(error).__name__}. Expected: {describe_parameters(schema)}")
    keywords = {name: value for name, (_, value) in zip(names, fields, strict=True)}
    available: dict[type, Any] = {Task: task, RolloutContext: context, Resources: resources}
    return keywords | {name: available[kind] for name, kind in injected.items()}


def _not_finite(value: object, path: str = "") -> Iterator[str]:
    if isinstance(value, float) and not math.isfinite(value):
        yield path
    elif isinstance(value, Mapping | list | tuple):
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in pairs:
            yield from _not_finite(item, f"{path}.{key}" if path else str(key))


def _describe_errors(error: ValidationError) -> str:
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    texts = []
    for item in errors[:MAX_SHOWN_ERRORS]:
        message = "there is no such argument" if item["type"] == "extra_forbidden" else item["msg"]
        texts.append(f"{'.'.join(map(str, item['loc']))}: {message}")
    return "; ".join([*texts, "and more"] if len(errors) > MAX_SHOWN_ERRORS else texts)


_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")  # the names that model providers and chat templates accept


@dataclass(frozen=True, slots=True, eq=False)
class Tool:
    """A function that the policy can call.

    Attributes:
        spec: the name, description and parameters that the policy sees.
        function: performs the action of a call, if the tool has no batcher.
        bind: validates the arguments of a call.
        timeout: the time limit of a call in seconds; None to use the limit of the environment.
        sandbox: the isolation under which the tool runs code written by the policy; None if the tool runs no such code.
    """

    spec: ToolSpec
    function: Callable[..., Any]
    bind: Bind
    timeout: float | None = None
    batcher: CallBatcher | None = None
    sandbox: str | None = None

    async def run(
        self,
        arguments: Mapping[str, Any],
        task: Task,
        context: RolloutContext,
        default_timeout: float = DEFAULT_TIMEOUT,
        resources: Resources | None = None,
    ) -> ToolResult:
        """Run one call and return its result. An error becomes a result whose text explains the error to the agent.

        Only a cancellation and an interrupt, such as Ctrl-C, are raised. ``default_timeout`` is the time limit in
        seconds for a tool without its own limit. If ``resources`` is None, the call opens and closes its own.
        """
        start = time.monotonic()
        timeout = self.timeout or default_timeout
        call_resources = Resources(task, context) if resources is None else resources
        try:
            keywords = self.bind(arguments, task, context, call_resources)
            if isinstance(keywords, InvalidArguments):
                text = f"{self.spec.name} was not run. Wrong arguments: {keywords.reason}."
                result = error_result(ToolErrorKind.INVALID_ARGUMENTS, text)
            else:
                if self.batcher is not None:
                    outcome = await self.batcher.run(keywords, context.id.sort_key, timeout)
                else:
                    outcome = await run_with_timeout(partial(self.function, **keywords), timeout)
                result = await to_tool_result(self.spec.name, outcome)
        finally:
            if resources is None:
                await call_resources.close()
        return replace(result, seconds=time.monotonic() - start)


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...
@overload
def tool(
    *,
    name: str | None = None,
    timeout: float | None = None,
    batch: BatchFunction | None = None,
    sandbox: Sandbox | str | None = None,
) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    timeout: float | None = None,
    batch: BatchFunction | None = None,
    sandbox: Sandbox | str | None = None,
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Turn a typed function with a docstring into a tool. Use it as ``@tool`` or ``@tool(name=..., ...)``.

    The text of the docstring before the first section is the description of the tool. The entries of ``Args:`` (Google
    style) are the descriptions of the arguments. A parameter with the type ``Task``, ``RolloutContext`` or
    ``Resources`` receives the value of the running episode and is hidden from the policy.

    The function is sync (and runs in a thread) or async. It returns text, an image (an Image or an image of pillow), a
    list of texts and images, a value that JSON can represent, or a ToolResult. If the function raises an exception, the
    agent sees the error as the result of the call.

    Args:
        timeout: the time limit of one call in seconds (default: the limit of the environment).
        batch: a sync or async function that executes the waiting calls of all episodes together, instead of
            ``function``. ``batch`` takes a list with the keyword arguments of each call, and returns a list with the
            results in the same order. If ``batch`` raises an exception or returns a wrong number of results, ``batch``
            is called again for each call alone. If ``batch`` exceeds the time limit, all calls in the list fail.
        sandbox: a declaration of how code written by the policy is isolated: the Sandbox in which the tool runs the
            code, or ``"none: .."`` with a reason if the code is not isolated. Leave ``sandbox`` out if the tool runs no
            such code.

    Raises:
        InvalidInput: if the name or the sandbox is not valid; if the docstring has no description; or
            if a parameter has no type or no JSON schema.

    Example:
        >>> @tool
        ... def add(a: int, b: int = 1) -> int:
        ...     '''Add two numbers.
        ...
        ...     Args:
        ...         a: the first.
        ...     '''
        ...     return a + b
        >>> add.spec.parameters["properties"]["a"]
        {'description': 'the first.', 'type': 'integer'}
    """
    level = validate_sandbox(sandbox)

    def build(function: Callable[..., Any]) -> Tool:
        if not inspect.isroutine(function):
            raise InvalidInput("tool", got=repr(function), do="give a function")
        called = function.__name__ if name is None else name
        if not _NAME.fullmatch(called):
            do = "use 1 to 64 letters, digits, _ or - (@tool(name=...))"
            raise InvalidInput("tool name", got=repr(called), do=do)
        summary, descriptions = parse_docstring(function.__doc__ or "")
        if not summary:
            raise InvalidInput(f"tool {called!r}", got="no docstring", do="say in its docstring what the tool does")
        schema, bind = _parse_signature(function, descriptions)
        batcher = None if batch is None else CallBatcher(batch)
        return Tool(ToolSpec(called, summary, schema), function, bind, timeout, batcher, level)

    return build if function is None else build(function)


async def to_tool_result(name: str, outcome: CallOutcome) -> ToolResult:
    """Convert the outcome of a call of the tool ``name`` to the ToolResult that the agent sees.

    A text stays as it is, an image becomes a part of the result, and other values become JSON. An exception, a timeout
    or an unusable value becomes a failed result.
    """
    value = outcome.value if isinstance(outcome, ReturnValue) else None
    content = value.parts if isinstance(value, ToolResult) else value
    if any(map(_is_image, content if isinstance(content, list | tuple) else (content,))):
        return await run_in_thread(_convert, name, outcome)  # decoding an image can take long
    return _convert(name, outcome)


def _convert(name: str, outcome: CallOutcome) -> ToolResult:
    if isinstance(outcome, CallFailure):
        return error_result(ToolErrorKind.RAISED, f"{name} failed: {outcome.reason}")
    if isinstance(outcome, CallTimeout):
        text = f"{name} did not finish within {outcome.seconds:g} seconds and was stopped."
        return error_result(ToolErrorKind.TIMED_OUT, text)
    value = outcome.value
    try:
        if isinstance(value, ToolResult) and not any(validation_errors(value)):
            result = value
        elif isinstance(value, str):
            result = ToolResult((Text(value),), ok=True)
        elif (parts := _image_parts(value)) is not None:
            result = ToolResult(parts, ok=True)
        else:
            result = ToolResult((Text(json.dumps(value, ensure_ascii=False, allow_nan=False)),), ok=True)
        for part in result.parts:
            if isinstance(part, Image):
                decode_image(part.data)  # otherwise a damaged image would end the attempt at its next prompt
        return result
    except InvalidInput as error:  # from an image
        return error_result(ToolErrorKind.BAD_RESULT, f"{name} failed: {error}")
    except (TypeError, ValueError, RecursionError):  # from json
        text = f"{name} failed: its result ({type(value).__name__}) is neither text nor a value JSON can hold."
        return error_result(ToolErrorKind.BAD_RESULT, text)


def _image_parts(value: object) -> tuple[ContentPart, ...] | None:
    values: Any = value if isinstance(value, list | tuple) else (value,)
    if not any(map(_is_image, values)) or not all(isinstance(one, str) or _is_image(one) for one in values):
        return None
    images = (one if isinstance(one, Image | str) else Image.from_pil(one) for one in values)
    return tuple(Text(one) if isinstance(one, str) else one for one in images)


def _is_image(value: object) -> bool:
    pillow = sys.modules.get("PIL.Image")  # None if no code has imported Pillow yet
    return isinstance(value, Image) or (pillow is not None and isinstance(value, pillow.Image))
