"""The ``python`` tool: a sandboxed Python interpreter that keeps its variables until the episode ends."""

from __future__ import annotations

from dataclasses import dataclass, replace

from agent_r1.core.environment import RolloutContext
from agent_r1.core.messages import Text, ToolResult
from agent_r1.core.task import Task
from agent_r1.sandbox.config import SandboxConfig
from agent_r1.sandbox.process import ExecutionResult, ExecutionStatus, Output
from agent_r1.sandbox.sandbox import Interpreter, Sandbox
from agent_r1.tools.function_tool import Resources, Tool, tool
from agent_r1.tools.tool_errors import ToolErrorKind, error_result

_RESTARTED = "[The interpreter was restarted: variables and imports of earlier calls are gone.]\n"
_LOST = "The next call starts a fresh interpreter: variables and imports are gone."
_MAX_WAIT = 600.0
"""The seconds that a call can wait for a free sandbox slot and for earlier calls of the same action."""


def python_tool(sandbox: Sandbox | SandboxConfig | None = None) -> Tool:
    """Return a tool named ``python`` that runs code and shows its output. Variables stay until the episode ends.

    The field ``data`` of a call's ToolResult is the :class:`ExecutionResult`. If the code times out, crashes or prints
    too much, the call fails, and the next call starts a fresh interpreter. Raise InvalidInput if the isolation level is
    not available on this machine.

    Example:
        env = ToolEnv(tools=[python_tool(SandboxConfig(limits=Limits(seconds=5)))], rewards=[exact_match])
    """
    runner = sandbox if isinstance(sandbox, Sandbox) else Sandbox(sandbox)
    opener = _InterpreterOpener(runner)

    @tool(timeout=runner.config.limits.seconds + _MAX_WAIT, sandbox=runner)
    async def python(code: str, resources: Resources) -> ToolResult:
        """Run Python code. Variables, functions and imports stay for later calls. Print what you want to see.

        Args:
            code: the code to run; the value of its last expression is shown too.
        """
        interpreter = await resources.get(opener)
        return format_result(await interpreter.run(code))

    return python


@dataclass(frozen=True, slots=True, eq=False)
class _InterpreterOpener:
    sandbox: Sandbox

    async def open(self, task: Task, context: RolloutContext) -> Interpreter:
        return self.sandbox.interpreter()


def format_result(result: ExecutionResult) -> ToolResult:
    """Return the result that the agent sees: the output of the code, then the error if the code failed."""
    text = "".join([_RESTARTED if result.restarted else "", _format(result.stdout), _format(result.stderr)])
    if result.ok:
        return ToolResult((Text(text or "(nothing was printed)"),), ok=True, data=result)
    problem = result.error if result.alive else f"[{result.status}: {result.error}] {_LOST}"
    timed_out = result.status is ExecutionStatus.TIMED_OUT
    kind = ToolErrorKind.TIMED_OUT if timed_out else ToolErrorKind.RAISED
    return replace(error_result(kind, f"{text}{problem.strip()}"), data=result)


def _format(output: Output) -> str:
    return output.text + (f"\n[cut here: {output.dropped} more bytes]\n" if output.dropped else "")
