"""``run_tests``: what an agent tries its solution with. It knows the examples of the task, and nothing of the exam."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agent_r1.core.messages import Text
from agent_r1.core.task import Task
from agent_r1.core.tool import ToolResult
from agent_r1.sandbox import Ended, Outcome, Sandbox
from agent_r1.tasksets.code.exam import Exam
from agent_r1.tasksets.code.examples import Example
from agent_r1.tools.function_tool import Tool, tool
from agent_r1.tools.tool_errors import Fault, failed

RUN_TESTS = "run_tests"

_TRIAL = (Path(__file__).parent / "inside" / "trial.py").read_text()
_WAIT = 600.0
"""Seconds a call may wait for a place to run in."""


def run_tests_tool(sandbox: Sandbox) -> Tool:
    """The tool. A call's :class:`Outcome` is the result's ``data``, and no verdict: a program can print anything."""

    @tool(name=RUN_TESTS, timeout=sandbox.config.limits.seconds + _WAIT, sandbox=sandbox)
    async def run_tests(code: str, task: Task) -> ToolResult:
        """Run a solution on the examples of the task; see what it prints, what it raises, and what it gets wrong.

        Args:
            code: the whole solution, as Python source.
        """
        exam: Exam = task.data["exam"]
        return shown_trial(await sandbox.run(trial(code, exam, task.data["examples"])))

    return run_tests


def trial(code: str, exam: Exam, examples: Sequence[Example]) -> str:
    """The program that tries a solution out."""
    pairs = [(example.call, example.wanted) for example in examples]
    before = exam.given or exam.setup  # the imports that a test may need; never a test
    return f"{_TRIAL}\ntry_out({before!r}, {code!r}, {exam.after!r}, {pairs!r})"


def shown_trial(outcome: Outcome) -> ToolResult:
    """The outcome as an agent reads it. A solution that is wrong is no fault of the call; one that does not end is."""
    text = outcome.stdout.text + outcome.stderr.text
    if outcome.ok:
        return ToolResult((Text(text),), ok=True, data=outcome)
    fault = Fault.TIMED_OUT if outcome.ended is Ended.TIMED_OUT else Fault.RAISED
    told = failed(fault, f"{text}[{outcome.ended}: {outcome.error.strip()}]")
    return ToolResult(told.parts, ok=False, error=told.error, data=outcome)
