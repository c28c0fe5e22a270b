"""``@tool`` turns a typed Python function with a docstring into a tool that an agent can call."""

from __future__ import annotations

import inspect
import json
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any, overload

from agent_r1.core.environment import RolloutContext
from agent_r1.core.errors import InvalidInput
from agent_r1.core.images import decode_image
from agent_r1.core.messages import ContentPart, Image, Text
from agent_r1.core.task import Task
from agent_r1.core.threads import run_in_thread
from agent_r1.core.tool import ToolResult, ToolSpec
from agent_r1.sandbox import Sandbox, validate_sandbox
from agent_r1.tools.batching import BatchFunction, CallBatcher
from agent_r1.tools.docstring import parse_docstring
from agent_r1.tools.execution import (
    DEFAULT_TIMEOUT,
    CallFailure,
    CallOutcome,
    CallTimeout,
    ReturnValue,
    run_with_timeout,
)
from agent_r1.tools.resources import Resources
from agent_r1.tools.schema import InvalidArguments, Signature, parse_signature
from agent_r1.tools.tool_errors import ToolErrorKind, error_result, validation_errors

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
    """Return the content parts of an image, or of a list or tuple of images and texts; None for any other value.

    Raises:
        InvalidInput: an image cannot be used.
    """
    values: Any = value if isinstance(value, list | tuple) else (value,)
    if not any(_is_image(one) for one in values) or not all(isinstance(one, str) or _is_image(one) for one in values):
        return None
    images = (one if isinstance(one, Image | str) else Image.from_pil(one) for one in values)
    return tuple(Text(one) if isinstance(one, str) else one for one in images)


def _is_image(value: object) -> bool:
    pillow = sys.modules.get("PIL.Image")  # None if no code has imported Pillow yet
    return isinstance(value, Image) or (pillow is not None and isinstance(value, pillow.Image))
