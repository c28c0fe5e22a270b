"""The python tool: variables are kept, errors are shown, and lost interpreters are reported."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from agent_r1.core.messages import Action, ToolCall, ToolResult
from agent_r1.core.task import Task
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.sandbox.config import Limits
from agent_r1.sandbox.process import ExecutionResult, ExecutionStatus, Output
from agent_r1.sandbox.sandbox import Sandbox
from agent_r1.tools.python_tool import format_result, python_tool
from agent_r1.tools.tool_errors import ToolErrorKind

Says = Callable[..., Action]
Calls = Callable[..., ToolCall]


@pytest.fixture
def episode(
    sandbox: Sandbox, task: Task, context: Any, make_action: Says, call: Calls
) -> Callable[..., list[ToolResult]]:
    def live(*actions: tuple[str, ...]) -> list[ToolResult]:
        quick = Sandbox(sandbox.config.model_copy(update={"limits": Limits(seconds=0.5, output=1000)}))
        env = ToolEnv(tools=[python_tool(quick)], max_turns=99)

        async def steps() -> list[ToolResult]:
            opened = await env.open(task, context())
            try:
                transitions = [
                    await opened.step(
                        make_action("", *(call("python", f"c{i}", code=code) for i, code in enumerate(cells)))
                    )
                    for cells in actions
                ]
                return [result for transition in transitions for result in transition.results]
            finally:
                await opened.close()

        return asyncio.run(steps())

    return live


def text(result: ToolResult) -> str:
    return result.parts[0].text  # type: ignore[union-attr]


def test_variables_are_kept_between_calls_and_actions(episode: Any) -> None:
    results = episode(("x = 6", "y = 7"), ("print(x * y)",), ("x + y",))
    assert [(result.ok, text(result)) for result in results] == [
        (True, "(nothing was printed)"),
        (True, "(nothing was printed)"),
        (True, "42\n"),
        (True, "13\n"),
    ]


def test_episodes_share_nothing(episode: Any) -> None:
    episode(("x = 1",))
    assert "NameError" in text(episode(("x",))[0])


def test_an_error_is_shown_with_the_output_before_it(episode: Any) -> None:
    result = episode(("print('so far')\n1 / 0",))[0]
    assert (result.ok, result.error) == (False, ToolErrorKind.RAISED)
    assert text(result).startswith("so far\nTraceback")
    assert text(result).endswith("ZeroDivisionError: division by zero")
    assert result.data.status is ExecutionStatus.RAISED


def test_a_call_that_hangs_is_stopped_and_the_next_one_has_a_fresh_interpreter(episode: Any) -> None:
    _, hung, after, later = episode(("x = 1",), ("while True: pass",), ("print('x' in globals())",), ("1",))
    assert (hung.ok, hung.error) == (False, ToolErrorKind.TIMED_OUT)
    assert "stopped after 0.5 seconds" in text(hung) and "fresh interpreter" in text(hung)
    assert text(after) == "[The interpreter was restarted: variables and imports of earlier calls are gone.]\nFalse\n"
    assert text(later) == "1\n"


def test_output_that_is_too_long_is_truncated(episode: Any) -> None:
    assert "[cut here: 4001 more bytes]" in text(episode(("print('x' * 5000)",))[0])


@pytest.mark.parametrize("ended", [ended for ended in ExecutionStatus if ended is not ExecutionStatus.OK])
def test_each_status_is_explained(ended: ExecutionStatus) -> None:
    result = format_result(ExecutionResult(ended, stdout=Output(b"so far\n"), error="why"))
    assert not result.ok and result.error in set(ToolErrorKind)
    assert "so far" in text(result) and "why" in text(result)
