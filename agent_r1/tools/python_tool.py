"""The ``python`` tool: an interpreter that an episode keeps between its calls, in the sandbox."""

from __future__ import annotations

from dataclasses import dataclass

from agent_r1.core.environment import RolloutContext
from agent_r1.core.messages import Text
from agent_r1.core.task import Task
from agent_r1.core.tool import ToolResult
from agent_r1.sandbox import ExecutionResult, ExecutionStatus, Interpreter, Output, Sandbox, SandboxConfig
from agent_r1.tools.function_tool import Tool, tool
from agent_r1.tools.resources import Resources
from agent_r1.tools.tool_errors import ToolErrorKind, error_result

_RESTARTED = "[The interpreter was restarted: variables and imports of earlier calls are gone.]\n"
_LOST = "The next call starts a fresh interpreter: variables and imports are gone."
_WAIT = 600.0
"""Seconds a call may wait, for the calls of the same action before it and for a place; then it is given up."""

_FAULTS = {
    ExecutionStatus.RAISED: ToolErrorKind.RAISED,
    ExecutionStatus.OUT_OF_MEMORY: ToolErrorKind.RAISED,
    ExecutionStatus.DIED: ToolErrorKind.RAISED,
    ExecutionStatus.FLOODED: ToolErrorKind.RAISED,
    ExecutionStatus.NOT_STARTED: ToolErrorKind.RAISED,
    ExecutionStatus.TIMED_OUT: ToolErrorKind.TIMED_OUT,
}


def python_tool(sandbox: Sandbox | SandboxConfig | None = None) -> Tool:
    """A tool named ``python`` that runs code and shows what it prints. Variables stay for the episode.

    The call's :class:`ExecutionResult` is the result's ``data``, for rewards. Code that hangs, dies or floods costs its call:
    the agent is told, and the next call has a fresh interpreter.

    Args:
        sandbox: where code runs; a configuration makes one, None one with the defaults.

    Raises:
        InvalidInput: the sandbox's level does not hold on this machine.

    Example:
        env = ToolEnv(tools=[python_tool(SandboxConfig(limits=Limits(seconds=5)))], rewards=[exact_match])
    """
    place = sandbox if isinstance(sandbox, Sandbox) else Sandbox(sandbox)
    interpreters = _Interpreters(place)

    @tool(timeout=place.config.limits.seconds + _WAIT, sandbox=place)
    async def python(code: str, resources: Resources) -> ToolResult:
        """Run Python code. Variables, functions and imports stay for later calls. Print what you want to see.

        Args:
            code: the code to run; the value of its last expression is shown too.
        """
        interpreter = await resources.get(interpreters)
        return format_result(await interpreter.run(code))

    return python


@dataclass(frozen=True, slots=True, eq=False)
class _Interpreters:
    """Opens an interpreter for each episode."""

    sandbox: Sandbox

    async def open(self, task: Task, context: RolloutContext) -> Interpreter:
        return self.sandbox.interpreter()


def format_result(outcome: ExecutionResult) -> ToolResult:
    """The outcome as an agent reads it: what was printed, then what went wrong."""
    notes = [_RESTARTED] if outcome.restarted else []
    text = "".join([*notes, *map(_shown, (outcome.stdout, outcome.stderr))])
    if outcome.ok:
        return ToolResult((Text(text or "(nothing was printed)"),), ok=True, data=outcome)
    problem = outcome.error if outcome.alive else f"[{outcome.ended}: {outcome.error}] {_LOST}"
    told = error_result(_FAULTS[outcome.ended], f"{text}{problem.strip()}")
    return ToolResult(told.parts, ok=False, error=told.error, data=outcome)


def _shown(output: Output) -> str:
    return output.text + (f"\n[cut here: {output.dropped} more bytes]\n" if output.dropped else "")
