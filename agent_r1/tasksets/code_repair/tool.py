"""The tool ``try``: the agent edits one line of a function, and the tool runs the task's visible test on the result."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

from agent_r1.core.messages import ToolResult
from agent_r1.core.task import Task
from agent_r1.sandbox.sandbox import Sandbox
from agent_r1.tasksets.code.tool import WAIT, format_trial, trial_program
from agent_r1.tasksets.code_repair.bugs import Bug
from agent_r1.tasksets.code_repair.edits import apply_edit
from agent_r1.tasksets.code_repair.examples import TRY
from agent_r1.tasksets.code_repair.mutations import mutations
from agent_r1.tools.function_tool import Tool, tool
from agent_r1.tools.tool_errors import ToolErrorKind, error_result


def bug_of(task: Task) -> Bug:
    bug = task.data["bug"]
    assert isinstance(bug, Bug)
    return bug


def try_tool(sandbox: Sandbox) -> Tool:
    """Return the tool ``try``. The tool edits the function as the agent asks, and runs the visible test in ``sandbox``.

    The visible test is the only test of the function that the agent sees.
    """

    @tool(name=TRY, timeout=sandbox.config.limits.seconds + WAIT, sandbox=sandbox)
    async def try_edit(edit: str, task: Task) -> ToolResult:
        """Run the function with this line on the test.

        Args:
            edit: the line
        """
        bug = bug_of(task)
        source = apply_edit(bug.source, bug.proposals, edit)
        return _no_edit(bug) if source is None else await _visible_result(bug, source, sandbox)

    return try_edit


def shuffled_try_tool(sandbox: Sandbox, others: Sequence[Bug]) -> Tool:
    """Return a tool ``try`` for a control experiment: its results say nothing about the agent's edit.

    The tool draws a function from ``others``, edits a random line of the function, runs the visible test of the
    function, and returns the result. But if the agent's edit is invalid, the tool returns an error, as the tool of
    :func:`try_tool` does.
    """

    @tool(name=TRY, timeout=sandbox.config.limits.seconds + WAIT, sandbox=sandbox)
    async def try_edit(edit: str, task: Task) -> ToolResult:
        """Run the function with this line on the test.

        Args:
            edit: the line
        """
        bug = bug_of(task)
        source = apply_edit(bug.source, bug.proposals, edit)
        if source is None:
            return _no_edit(bug)
        rng = random.Random(hashlib.sha256(f"{task.id} {source}".encode()).digest())
        other = rng.choice(others)
        edited = rng.choice(other.proposals or [one.source for one in mutations(other.source)])
        return await _visible_result(other, edited, sandbox)

    return try_edit


def _no_edit(bug: Bug) -> ToolResult:
    wanted = f"a number from 1 to {len(bug.proposals)}" if bug.proposals else "a line that is similar to the wrong one"
    return error_result(ToolErrorKind.INVALID_ARGUMENTS, f"That changes nothing: write {wanted}.")


async def _visible_result(bug: Bug, source: str, sandbox: Sandbox) -> ToolResult:
    return format_trial(await sandbox.run(trial_program(source, bug.problem.exam, bug.tests[:1])))
