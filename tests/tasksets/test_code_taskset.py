"""The code task set in training: write, test and fix code, graded by hidden tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_r1.core.errors import InvalidInput
from agent_r1.core.messages import Action, Message, Text, ToolCall, ToolResult
from agent_r1.core.taskset import TaskSet
from agent_r1.core.trajectory import AttemptId, Status, Trajectory, Turn
from agent_r1.sandbox.process import Verdict
from agent_r1.sandbox.sandbox import Sandbox
from agent_r1.tasksets import build
from agent_r1.tasksets.code import extract_solution, repair_rates
from agent_r1.tasksets.code.problems import Exam

RIGHT, WRONG, RAISES = (f"def double(x):\n    return {value}" for value in ("2 * x", "2", "x.no"))


@pytest.fixture
def taskset(sandbox: Sandbox, rows_file: Callable[..., Path]) -> TaskSet:
    tests = ["assert double(1) == 2", "assert double(5) == 10"]
    rows = ({"task_id": n, "text": f"Double it, {n} ways.", "code": RIGHT, "test_list": tests} for n in range(30))
    return build("code", rows_file(*rows), None, 0)


def block(source: str) -> str:
    return f"Here it is.\n```python\n{source}\n```"


def expected_rewards(passed: float | None, form: float, first: float | None) -> dict[str, float | None]:
    return {"passed": passed, "form": form, "first_passed": first}


@pytest.mark.parametrize(
    ("script", "wanted"),
    [
        ([block(RIGHT)], expected_rewards(1, 1, 1)),
        ([block(WRONG)], expected_rewards(0, 1, 0)),
        (["try " + RIGHT, block(RIGHT)], expected_rewards(1, 1, 1)),
        (["try " + WRONG, block(RIGHT)], expected_rewards(1, 1, 0)),  # fixed, although the example had passed
        (["try " + RAISES, "try " + RIGHT, block(RIGHT)], expected_rewards(1, 1, 0)),
        (["try " + RIGHT, block(WRONG)], expected_rewards(0, 1, 1)),
        (["try " + RIGHT, RIGHT], expected_rewards(0, 0, 1)),
        (["<tool_call>\nnonsense\n</tool_call>", block(RIGHT)], expected_rewards(1, 0, 1)),
        ([block(RIGHT) + "\n" + block(WRONG)], expected_rewards(0, 1, 0)),
        ([f"```python\n{RIGHT}"], expected_rewards(0, 0, 0)),
        ([""], expected_rewards(0, 0, 0)),
        (["try " + RIGHT] * 5, expected_rewards(0, 0, 1)),
    ],
)
def test_each_kind_of_solution_is_scored(
    script: list[str], wanted: Any, taskset: TaskSet, run_attempts: Any, call: Any
) -> None:
    texts = [call("run_tests", text[4:]) if text.startswith("try ") else text for text in script]
    (trajectory,) = run_attempts(taskset, taskset.tasks("test")[:1], texts)
    assert trajectory.rewards == wanted
    assert trajectory.status == (Status.OUT_OF_TURNS if len(script) == 5 else Status.COMPLETED)


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        (RIGHT, "1 of 1 examples pass.\n"),
        (RIGHT.replace("2 *", "3 *"), "double(1) should give 2, and gives 3\n0 of 1 examples pass.\n"),
        (f"print('hello')\n{RIGHT}", "hello\n1 of 1 examples pass.\n"),
        (RAISES, "    return x.no\n           ^^^^\nAttributeError: 'int' object has no attribute 'no'"),
        ("def double(x:", "SyntaxError: '(' was never closed"),
        ("raise SystemExit", "SystemExit"),
        ("import os; os._exit(3)", "[died: the process ended (exit status 3)]"),
    ],
)
def test_the_agent_sees_the_results_of_its_code(
    code: str, shown: str, taskset: TaskSet, run_attempts: Any, call: Any
) -> None:
    (trajectory,) = run_attempts(taskset, taskset.tasks("test")[:1], [call("run_tests", code), block(RIGHT)])
    (message,) = trajectory.turns[0].observation
    assert shown in message.text and "double(5)" not in message.text
    (result,) = trajectory.turns[0].results
    assert result.ok is not shown.startswith("[died")
    assert all(isinstance(part, Text) for part in result.parts)


def test_the_fix_rate_is_counted_over_concurrent_episodes(taskset: TaskSet, run_attempts: Any, call: Any) -> None:
    ways = ([block(RIGHT)], [block(WRONG)], [call("run_tests", WRONG), block(RIGHT)], [call("run_tests", WRONG), ""])

    def reply(text: str) -> str:
        way = ways[int(text.split("Double it, ")[1].split()[0]) % 4]
        return way[text.count("<|im_start|>assistant") - 1]

    tasks = sorted(taskset.tasks("all"), key=lambda task: int(task.id.rpartition("/")[2]))[:24]
    trajectories = run_attempts(taskset, tasks, reply)
    assert [t.rewards["passed"] for t in trajectories] == [1, 0, 1, 0] * 6
    assert taskset.measures is not None
    assert taskset.measures(trajectories) == pytest.approx(
        {"first_pass_rate": 1 / 4, "no_second_try_rate": 2 / 3, "fix_rate": 1.0}
    )


def make_trajectory(passed: float | None, first: float | None, codes: int = 2) -> Trajectory:
    call = ToolCall("call_0", "run_tests", {"code": WRONG}, "")
    tried = Action(Message("assistant", (Text(""),), (call,) * (codes - 1)), "")
    results = (ToolResult((Text(""),), ok=True),) * (codes - 1)
    answer = Action(Message.assistant(block(WRONG)), block(WRONG))
    turns = (
        Turn(0, None, (), (), (), (), "stop", tried, results=results),
        Turn(1, 0, (), (), (), (), "stop", answer),
    )
    return Trajectory(
        AttemptId("r", "t", 0, 0), "t", turns, Status.COMPLETED, rewards=expected_rewards(passed, 1, first)
    )


def test_the_fix_rate_counts_graded_first_failures_only() -> None:
    assert repair_rates(
        [make_trajectory(1, 0), make_trajectory(0, 0), make_trajectory(0, 1), make_trajectory(None, 0)]
    ) == {
        "first_pass_rate": 1 / 3,
        "no_second_try_rate": 0.0,
        "fix_rate": 0.5,
    }
    # An agent without a second try has no fix rate.
    assert repair_rates([make_trajectory(1, 0), make_trajectory(0, 0, codes=1)]) == {
        "first_pass_rate": 0.0,
        "no_second_try_rate": 0.5,
        "fix_rate": 1.0,
    }
    assert repair_rates([make_trajectory(1, 1)]) == {"first_pass_rate": 1.0}
    assert repair_rates([make_trajectory(None, None)]) == {} == repair_rates([])


def test_an_ungraded_solution_is_not_scored(
    taskset: TaskSet, run_attempts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(self: Exam, sandbox: Sandbox, solution: str) -> Verdict:
        return Verdict(None, "no more namespaces")

    monkeypatch.setattr(Exam, "judge", broken)
    (attempt,) = run_attempts(taskset, taskset.tasks("test")[:1], [block(RIGHT)])
    assert attempt.rewards == expected_rewards(None, 1, None)


@pytest.mark.parametrize(
    ("text", "solution"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("```python\na\n```\nor\n```python\nb\n```  \n", "b\n"),
        ("```\nx = 1\n```", None),
        ("```python\n \n```", None),
        ("```python x = 1 ```", None),
        ("```python\nx = '''\n```", "x = '''\n"),
        ("```python\na\n```\n```python\nb", "a\n"),
        ("```py\na\n```", "a\n"),
        ("```Python\na\n```", "a\n"),
        ("```python3 \na\n```", "a\n"),
        ("1. here:\n   ```python\n   if a:\n     b\n   ```", "if a:\n  b\n"),
        ("```python\r\na\r\n```", "a\n"),
        ("```python\na\n``` done", "a\n"),
        ("<think>b</think>```python\na\n```", "a\n"),
        ("draft\n```python\na\n\n```python\nb\n```", "b\n"),
        ("```pythonic\na\n```", None),
    ],
)
def test_a_solution_is_a_complete_code_block(text: str, solution: str | None) -> None:
    assert extract_solution(text) == solution


def test_the_taskset_is_complete(taskset: TaskSet, rows_file: Any) -> None:
    assert taskset.recipe["sandbox"] == "bubblewrap" and taskset.sandbox is not None
    assert taskset.sandbox.startswith("bubblewrap: ")
    assert (len(taskset.tasks("all")), taskset.whole) == (30, "all")
    for data, corpus, expected in ((None, None, "--data for code: got nothing"), (rows_file(), "c", "corpus: got c")):
        with pytest.raises(InvalidInput, match=expected):
            build("code", data, corpus, 0)
