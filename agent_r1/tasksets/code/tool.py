"""The tool ``run_tests``: the agent tries its solution on the public examples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agent_r1.core.messages import Text, ToolResult
from agent_r1.core.task import Task
from agent_r1.sandbox.process import ExecutionResult, ExecutionStatus
from agent_r1.sandbox.sandbox import Sandbox
from agent_r1.tasksets.code.exam import Exam
from agent_r1.tasksets.code.examples import Example
from agent_r1.tools.function_tool import Tool, tool
from agent_r1.tools.tool_errors import ToolErrorKind, error_result

RUN_TESTS = "run_tests"

_TRIAL = (Path(__file__).parent / "inside" / "trial.py").read_text()
WAIT = 600.0
"""Seconds that a call can wait for a free slot of the sandbox."""


def run_tests_tool(sandbox: Sandbox) -> Tool:
    """Return the tool ``run_tests``. The ``data`` of a tool result is an :class:`ExecutionResult`.

    The text of a result must not decide a reward, because the solution can print any text.
    """

    @tool(name=RUN_TESTS, timeout=sandbox.config.limits.seconds + WAIT, sandbox=sandbox)
    async def run_tests(code: str, task: Task) -> ToolResult:
        """Run a solution on the examples of the task; see what it prints, what it raises, and what it gets wrong.

        Args:
            code: the whole solution, as Python source.
        """
        exam: Exam = task.data["exam"]
        return format_trial(await sandbox.run(trial_program(code, exam, task.data["examples"])))

    return run_tests


def trial_program(code: str, exam: Exam, examples: Sequence[Example]) -> str:
    """Return the source of a program that runs the solution ``code`` on the examples and prints the failures."""
    pairs = [(example.call, example.wanted) for example in examples]
    before = exam.given or exam.setup  # imports and helper functions for the examples, without tests
    return f"{_TRIAL}\ntry_out({before!r}, {code!r}, {exam.after!r}, {pairs!r})"


def format_trial(outcome: ExecutionResult) -> ToolResult:
    """Convert the outcome of a :func:`trial_program` to a result of the tool ``run_tests``.

    If the program does not end normally, for example after a time-out, the tool result is an error. If the program ends
    normally, the tool result is no error, even if the solution is wrong.
    """
    text = outcome.stdout.text + outcome.stderr.text
    if outcome.ok:
        return ToolResult((Text(text),), ok=True, data=outcome)
    fault = ToolErrorKind.TIMED_OUT if outcome.status is ExecutionStatus.TIMED_OUT else ToolErrorKind.RAISED
    told = error_result(fault, f"{text}[{outcome.status}: {outcome.error.strip()}]")
    return ToolResult(told.parts, ok=False, error=told.error, data=outcome)
