"""Helpers that run a tool in tests."""

from __future__ import annotations

import asyncio
from typing import Any

from agent_r1.core.environment import RolloutContext
from agent_r1.core.messages import Text, ToolResult
from agent_r1.core.task import Task
from agent_r1.tools.function_tool import Tool


def run(
    made: Tool, arguments: dict[str, Any], task: Task, context: RolloutContext, timeout: float = 60.0
) -> ToolResult:
    return asyncio.run(made.run(arguments, task, context, timeout))


def text_of(result: ToolResult) -> str:
    return "".join(part.text for part in result.parts if isinstance(part, Text))


def failure(
    made: Tool, arguments: dict[str, Any], task: Task, context: RolloutContext, timeout: float = 60.0
) -> tuple[str, str]:
    """Return the error and the text of a call that must fail."""
    result = run(made, arguments, task, context, timeout)
    assert not result.ok
    return str(result.error), text_of(result)
