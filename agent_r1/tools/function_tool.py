"""``@tool`` turns a typed Python function with a docstring into a tool that an agent can call."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import re
import sys
import time
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Annotated, Any, Protocol, TypeVar, overload

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError

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
        """Open a resource and return it. If this method raises, the call that needs the resource fails.

        If this method is cancelled, it must close everything that it has opened.
        """
        ...


class Resources:
    """The open resources of one episode.

    An async tool with a parameter of type ``Resources`` receives the resources of its episode.

    Example:
        browsers = Browsers()       # its ``async def open(task, context)`` starts a browser

        @tool
        async def visit(url: str, resources: Resources) -> str:
            '''Read a page.'''
            browser = await resources.get(browsers)     # the same browser in each call of the episode
            return await browser.text(url)
    """

    def __init__(self, task: Task, context: RolloutContext) -> None:
        self._task, self._context = task, context
        self._openings: dict[Opener[Any], asyncio.Task[Any]] = {}
        self._closing: asyncio.Task[None] | None = None

    async def get(self, opener: Opener[_R]) -> _R:
        """Return the resource of ``opener`` in this episode. The first call opens the resource.

        If the first call is cancelled or times out, the resource is still opened, for later calls. If opening the
        resource fails, the first call and all later calls raise the same error.

        Raises:
            RuntimeError: if the episode has ended.
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


@dataclass(frozen=True, slots=True)
class Docstring:
    """A parsed docstring: the text before the first section, and the description of each argument.

    Example:
        Docstring(summary="Look passages up.", arguments={"query": "the text to look for."})
    """

    summary: str
    arguments: Mapping[str, str]


def parse_docstring(text: str) -> Docstring:
    """Parse a docstring into its summary and the descriptions in its section ``Args:``.

    Example:
        >>> parse_docstring("Add up.\\n\\nArgs:\\n    a: one\\n        number.\\n    b (int): another.").arguments
        {'a': 'one number.', 'b': 'another.'}
    """
    summary: list[str] = []
    arguments: list[str] = []
    target = summary
    for line in inspect.cleandoc(text).splitlines():
        if section := _SECTION.match(line):
            target = arguments if section[1].startswith("Arg") else []
        elif target is arguments and line and not line[0].isspace():
            target = []  # a line without indentation ends the entries
        else:
            target.append(line)
    return Docstring(
        _join_paragraphs(summary), _parse_entries(inspect.cleandoc("\n".join(["", *arguments])).splitlines())
    )


def _join_paragraphs(lines: list[str]) -> str:
    paragraphs = re.split(r"\n\s*\n", "\n".join(lines))
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs).strip()


def _parse_entries(lines: list[str]) -> dict[str, str]:
    entries: dict[str, str] = {}
    name = None
    for line in lines:
        if entry := _ENTRY.match(line):
            name = entry[1]
            entries[name] = entry[2].strip()
        elif name is not None:
            entries[name] = f"{entries[name]} {line.strip()}".strip()
    return entries


MAX_SHOWN_ERRORS = 5
"""The largest number of wrong arguments that an error message explains."""


@dataclass(frozen=True, slots=True)
class InvalidArguments:
    """The result of a validation that failed. ``reason`` explains the problem and lists the expected arguments."""

    reason: str


class Signature(Protocol):
    """An object that validates the arguments that a policy sends to a tool."""

    def bind(
        self, arguments: Mapping[str, Any], task: Task, context: RolloutContext, resources: Resources
    ) -> dict[str, Any] | InvalidArguments:
        """Return all keyword arguments for the tool's function, or InvalidArguments if ``arguments`` are not valid.

        The function can also need ``task``, ``context`` or ``resources``, the objects of the running episode. The
        result contains the objects that the function needs.
        """
        ...


@dataclass(frozen=True, slots=True)
class FunctionSignature:
    """The signature of a typed Python function.

    Attributes:
        model: a pydantic model that validates the arguments. Its fields are named p0, p1, .., because pydantic does not
            accept every name. The alias of a field is the name of the parameter.
        names: the parameters that the policy fills in, in the order of the fields of ``model``.
        injected: the name and the type of each parameter that the policy does not fill in. The type is Task,
            RolloutContext or Resources.
        schema: the JSON schema of the parameters in ``names``.
    """

    model: type[BaseModel]
    names: tuple[str, ...]
    injected: Mapping[str, type]
    schema: Mapping[str, Any]

    def bind(
        self, arguments: Mapping[str, Any], task: Task, context: RolloutContext, resources: Resources
    ) -> dict[str, Any] | InvalidArguments:
        """Return all keyword arguments for the function, or InvalidArguments if ``arguments`` are not valid.

        Missing arguments get their defaults. Safe conversions, such as "3" to 3, are made.
        """
        try:
            fields = self.model.model_validate(dict(arguments))
        except ValidationError as error:
            return InvalidArguments(f"{_describe_errors(error)}. Expected: {describe_parameters(self.schema)}")
        except Exception as error:  # a validator of the user's own types can raise any exception
            return InvalidArguments(f"{type(error).__name__}. Expected: {describe_parameters(self.schema)}")
        keywords = {name: value for name, (_, value) in zip(self.names, fields, strict=True)}
        available: dict[type, Any] = {Task: task, RolloutContext: context, Resources: resources}
        return keywords | {name: available[kind] for name, kind in self.injected.items()}


def describe_parameters(schema: Mapping[str, Any]) -> str:
    """Return a short text that lists the parameters in the JSON schema of an object.

    Example:
        >>> schema = {"properties": {"query": {"type": "string"}, "k": {"type": "integer"}}, "required": ["query"]}
        >>> describe_parameters(schema)
        'query (string), k (integer, optional)'
    """
    required = schema.get("required", ())
    parameters = (
        f"{name} ({_describe_type(kind)}{'' if name in required else ', optional'})"
        for name, kind in schema.get("properties", {}).items()
    )
    return ", ".join(parameters) or "no arguments"


def parse_signature(function: Callable[..., Any], docs: Docstring) -> FunctionSignature:
    """Return the signature of a function, from its annotations, defaults and docstring.

    Raises:
        InvalidInput: if the annotations cannot be read; if a parameter has no type, has no JSON schema or cannot be
            passed by name; or if the docstring describes an argument that does not exist.
    """
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        got = f"annotations that cannot be read ({error})"
        raise _invalid_tool(function, got, "define its types at module level") from error
    parameters = inspect.signature(function).parameters
    for parameter in parameters.values():
        _check_parameter(function, parameter, hints)
    unknown = sorted(docs.arguments.keys() - parameters.keys())
    if unknown:
        got = f"a docstring that explains {', '.join(unknown)}"
        raise _invalid_tool(function, got, "explain only arguments that exist")
    injected = {name: hints[name] for name in parameters if hints[name] in (Task, RolloutContext, Resources)}
    names = tuple(name for name in parameters if name not in injected)
    fields: dict[str, Any] = {
        f"p{index}": _make_field(name, hints[name], parameters[name].default, docs.arguments.get(name))
        for index, name in enumerate(names)
    }
    try:
        config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)
        model = create_model("Arguments", __config__=config, **fields)
        return FunctionSignature(model, names, injected, _json_schema(model))
    except PydanticUserError as error:
        got = f"a parameter without a JSON schema ({str(error).splitlines()[0]})"
        raise _invalid_tool(function, got, "use plain types or pydantic models") from error


def _check_parameter(function: Callable[..., Any], parameter: inspect.Parameter, hints: Mapping[str, Any]) -> None:
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        raise _invalid_tool(function, f"the parameter {parameter}", "use parameters that can be named one by one")
    if parameter.name not in hints:
        got = f"no type for the parameter {parameter.name!r}"
        raise _invalid_tool(function, got, f"annotate it, e.g. {parameter.name}: str")


def _make_field(name: str, annotation: Any, default: Any, description: str | None) -> tuple[Any, Any]:
    field = Field(alias=name, description=description) if description else Field(alias=name)
    return Annotated[annotation, field], ... if default is inspect.Parameter.empty else default


def _json_schema(model: type[BaseModel]) -> dict[str, Any]:
    schema = _remove_titles(model.model_json_schema())
    order = ("type", "properties", "required", "$defs")
    return {"type": "object", "properties": {}} | {key: schema[key] for key in order if key in schema}


def _remove_titles(node: Any) -> Any:
    if isinstance(node, dict):
        return {
            key: _remove_titles(value) for key, value in node.items() if key != "title" or not isinstance(value, str)
        }
    return [_remove_titles(item) for item in node] if isinstance(node, list) else node


def _describe_errors(error: ValidationError) -> str:
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    texts = []
    for item in errors[:MAX_SHOWN_ERRORS]:
        message = "there is no such argument" if item["type"] == "extra_forbidden" else item["msg"]
        texts.append(f"{'.'.join(map(str, item['loc']))}: {message}")
    return "; ".join([*texts, "and more"] if len(errors) > MAX_SHOWN_ERRORS else texts)


def _describe_type(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_describe_type(option) for option in schema["anyOf"])
    if "enum" in schema:
        return "one of " + ", ".join(map(repr, schema["enum"]))
    return str(schema.get("type", "object" if "$ref" in schema else "anything"))


def _invalid_tool(function: Callable[..., Any], got: str, do: str) -> InvalidInput:
    return InvalidInput(f"tool {function.__name__!r}", got=got, do=do)


_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")  # the names that model providers and chat templates accept


@dataclass(frozen=True, slots=True, eq=False)
class Tool:
    """A function that the policy can call.

    Attributes:
        spec: the name, description and parameters that the policy sees.
        function: performs the action of a call, if the tool has no batcher.
        signature: validates the arguments of a call.
        timeout: the time limit of a call in seconds; None to use the limit of the environment.
        batcher: executes the calls in batches.
        sandbox: the isolation under which the tool runs code written by the policy; None if the tool runs no such code.
    """

    spec: ToolSpec
    function: Callable[..., Any]
    signature: Signature
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

        Only a cancellation and an interrupt, such as Ctrl-C, are raised.

        Args:
            arguments: the arguments that the policy sent. This method validates them.
            default_timeout: the time limit in seconds for a tool that has no time limit of its own.
            resources: the resources of the episode. If None, the call opens and closes its own resources.
        """
        start = time.monotonic()
        timeout = self.timeout or default_timeout
        call_resources = Resources(task, context) if resources is None else resources
        try:
            keywords = self.signature.bind(arguments, task, context, call_resources)
            if isinstance(keywords, InvalidArguments):
                text = f"{self.spec.name} was not run. Wrong arguments: {keywords.reason}."
                result = error_result(ToolErrorKind.INVALID_ARGUMENTS, text)
            elif self.batcher is not None:
                outcome = await self.batcher.run(keywords, context.id.sort_key, timeout)
                result = await to_tool_result(self.spec.name, outcome)
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
        function: the function that performs the action.
        name: the name of the tool (default: the name of the function).
        timeout: the time limit of one call in seconds (default: the limit of the environment).
        batch: a sync or async function that executes the waiting calls of all episodes together, instead of
            ``function``. ``batch`` takes a list with the keyword arguments of each call, and returns a list with the
            results in the same order. If ``batch`` raises an exception or returns a wrong number of results, ``batch``
            is called again for each call alone. If ``batch`` exceeds the time limit, all calls in the list fail.
        sandbox: a declaration of how code written by the policy is isolated: the Sandbox in which the tool runs the
            code, or ``"none: .."`` with a reason if the code is not isolated. Leave ``sandbox`` out if the tool runs no
            such code.

    Raises:
        InvalidInput: if the name, the time limit or the sandbox is not valid; if the docstring has no description; or
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
    if function is None:
        level = validate_sandbox(sandbox)
        return lambda function: replace(_build_tool(function, name, timeout, batch), sandbox=level)
    return _build_tool(function, name, timeout, batch)


def _build_tool(
    function: Callable[..., Any], name: str | None, timeout: float | None, batch: BatchFunction | None
) -> Tool:
    if not inspect.isroutine(function):
        raise InvalidInput("tool", got=repr(function), do="give a function")
    name = function.__name__ if name is None else name
    if not _NAME.fullmatch(name):
        raise InvalidInput("tool name", got=repr(name), do="use 1 to 64 letters, digits, _ or - (@tool(name=...))")
    if timeout is not None and not timeout > 0:
        raise InvalidInput(f"timeout of tool {name!r}", got=timeout, do="give a number of seconds > 0")
    docs = parse_docstring(function.__doc__ or "")
    if not docs.summary:
        raise InvalidInput(f"tool {name!r}", got="no docstring", do="say in its docstring what the tool does")
    signature = parse_signature(function, docs)
    spec = ToolSpec(name, docs.summary, signature.schema)
    return Tool(spec, function, signature, timeout, None if batch is None else CallBatcher(batch))


async def to_tool_result(name: str, outcome: CallOutcome) -> ToolResult:
    """Convert the outcome of a call to the ToolResult that the agent sees.

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
        images = [part for part in result.parts if isinstance(part, Image)]
        if images and find_spec("PIL") is not None:  # without pillow, no model reads images
            for image in images:
                decode_image(image.data)
        return result
    except InvalidInput as error:  # from an image
        return error_result(ToolErrorKind.BAD_RESULT, f"{name} failed: {error}")
    except (TypeError, ValueError, RecursionError):  # from json
        text = f"{name} failed: its result ({type(value).__name__}) is neither text nor a value JSON can hold."
        return error_result(ToolErrorKind.BAD_RESULT, text)


def _image_parts(value: object) -> tuple[ContentPart, ...] | None:
    values: Any = value if isinstance(value, list | tuple) else (value,)
    if not any(_is_image(one) for one in values) or not all(isinstance(one, str) or _is_image(one) for one in values):
        return None
    images = (one if isinstance(one, Image | str) else Image.from_pil(one) for one in values)
    return tuple(Text(one) if isinstance(one, str) else one for one in images)


def _is_image(value: object) -> bool:
    pillow = sys.modules.get("PIL.Image")  # None if no code has imported Pillow yet
    return isinstance(value, Image) or (pillow is not None and isinstance(value, pillow.Image))
