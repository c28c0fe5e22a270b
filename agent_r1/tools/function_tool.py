"""``@tool``: a typed Python function with a docstring becomes a tool that an agent can call."""

from __future__ import annotations

import inspect
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, overload

from agent_r1.core.environment import RolloutContext
from agent_r1.core.errors import InvalidInput
from agent_r1.core.messages import Text
from agent_r1.core.task import Task
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

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")  # what model providers and chat templates agree on


@dataclass(frozen=True, slots=True, eq=False)
class Tool:
    """Does one atomic action and reports what happened.

    ``timeout`` is in seconds; None leaves it to the environment. With a ``coalescer`` calls are
    executed in batches, otherwise ``function`` is called for each. ``sandbox`` says in which level of it, and which
    layers, the tool runs code that the policy wrote; None where it runs none.
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
        """Run one call. What goes wrong is a result whose text tells the agent; only cancellation passes through.

        ``resources`` are those of the episode; without any, the call has its own and closes them.
        """
        started = time.monotonic()
        held = Resources(task, context) if resources is None else resources
        try:
            result = await self._result(arguments, task, context, self.timeout or default_timeout, held)
        finally:
            if resources is None:
                await held.close()
        return replace(result, seconds=time.monotonic() - started)

    async def _result(
        self, arguments: Mapping[str, Any], task: Task, context: RolloutContext, timeout: float, resources: Resources
    ) -> ToolResult:
        keywords = self.signature.bind(arguments, task, context, resources)
        if isinstance(keywords, InvalidArguments):
            return error_result(ToolErrorKind.INVALID_ARGUMENTS, f"{self.spec.name} was not run. Wrong arguments: {keywords.reason}.")
        if self.batcher is not None:
            outcome = await self.batcher.run(keywords, context.id.sort_key, timeout)
        else:
            outcome = await run_with_timeout(partial(self.function, **keywords), timeout)
        return to_tool_result(self.spec.name, outcome)


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

    The docstring's text up to ``Args:`` describes the tool, its entries the arguments (Google style).
    Parameters annotated with ``Task``, ``RolloutContext`` or ``Resources`` get those of the running episode; the policy
    does not see them. The function may be sync (it runs in a thread) or async, and returns text, a value that JSON
    can hold, or a ToolResult. What it raises is told to the agent.

    Args:
        function: what the tool does.
        name: what the policy calls it; the function's own name where not given.
        timeout: seconds one call may take; the environment's where not given.
        batch: does many calls at once. It takes a list with the keyword arguments of each call and returns
            (sync or async) the list of their results in the same order. Calls that wait at the same time,
            across episodes, are then executed together, and the function itself serves as the description
            only. A batch that raises is run again call by call, so that one bad call fails alone; one that
            takes too long fails as a whole.
        sandbox: where the tool runs code that the policy wrote; ``"none: .."``, and by what, where nothing holds it.

    Raises:
        InvalidInput: no docstring, a parameter without a type, or one that no JSON schema describes.

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
        return lambda function: replace(_build(function, name, timeout, batch), sandbox=level)
    return _build(function, name, timeout, batch)


def _build(function: Callable[..., Any], name: str | None, timeout: float | None, batch: BatchFunction | None) -> Tool:
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


def to_tool_result(name: str, outcome: CallOutcome) -> ToolResult:
    """What running the tool ``name`` came to, as its result."""
    match outcome:
        case ReturnValue(value=ToolResult() as result) if not any(validation_errors(result)):
            return result
        case ReturnValue(value=str() as text):
            return ToolResult((Text(text),), ok=True)
        case ReturnValue(value=value):
            return _rendered(name, value)
        case CallFailure(reason=reason):
            return error_result(ToolErrorKind.RAISED, f"{name} failed: {reason}")
        case CallTimeout(seconds=seconds):
            return error_result(ToolErrorKind.TIMED_OUT, f"{name} did not finish within {seconds:g} seconds and was stopped.")


def _rendered(name: str, value: object) -> ToolResult:
    """The value as JSON text."""
    try:
        return ToolResult((Text(json.dumps(value, ensure_ascii=False, allow_nan=False)),), ok=True)
    except (TypeError, ValueError, RecursionError):
        kind = type(value).__name__
        return error_result(
            ToolErrorKind.BAD_RESULT, f"{name} failed: its result ({kind}) is neither text nor a value JSON can hold."
        )
