"""Code as it is trained on: write, try, mend; judged by tests that nobody saw."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_r1.core.attempt_id import AttemptId
from agent_r1.core.errors import InvalidInput
from agent_r1.core.messages import Action, Message, Text, ToolCall
from agent_r1.core.taskset import TaskSet
from agent_r1.core.tool import ToolResult
from agent_r1.core.trajectory import Status, Trajectory, Turn
from agent_r1.sandbox import Sandbox, Verdict
from agent_r1.tasksets import build
from agent_r1.tasksets.code.exam import Exam
from agent_r1.tasksets.code.scorer import extract_solution, repair_rates

RIGHT, WRONG, RAISES = (f"def double(x):\n    return {value}" for value in ("2 * x", "2", "x.no"))


@pytest.fixture
def taskset(sandbox: Sandbox, rows_file: Callable[..., Path]) -> TaskSet:
    tests = ["assert double(1) == 2", "assert double(5) == 10"]
    rows = ({"task_id": n, "text": f"Double it, {n} ways.", "code": RIGHT, "test_list": tests} for n in range(30))
    return build("code", rows_file(*rows), None, 0)


def block(source: str) -> str:
    return f"Here it is.\n```python\n{source}\n```"


def marks(passed: float | None, form: float, first: float | None) -> dict[str, float | None]:
    return {"passed": passed, "form": form, "first_passed": first}


@pytest.mark.parametrize(
    ("script", "wanted"),
    [
        ([block(RIGHT)], marks(1, 1, 1)),
        ([block(WRONG)], marks(0, 1, 0)),
        (["try " + RIGHT, block(RIGHT)], marks(1, 1, 1)),
        (["try " + WRONG, block(RIGHT)], marks(1, 1, 0)),  # mended, though the example had passed
        (["try " + RAISES, "try " + RIGHT, block(RIGHT)], marks(1, 1, 0)),
        (["try " + RIGHT, block(WRONG)], marks(0, 1, 1)),
        (["try " + RIGHT, RIGHT], marks(0, 0, 1)),
        (["<tool_call>\nnonsense\n</tool_call>", block(RIGHT)], marks(1, 0, 1)),
        ([block(RIGHT) + "\n" + block(WRONG)], marks(0, 1, 0)),
        ([f"```python\n{RIGHT}"], marks(0, 0, 0)),
        ([""], marks(0, 0, 0)),
        (["try " + RIGHT] * 5, marks(0, 0, 1)),
    ],
)
def test_every_way_to_solve_is_scored(script: list[str], wanted: Any, taskset: TaskSet, live: Any, call: Any) -> None:
    said = [call("run_tests", text[4:]) if text.startswith("try ") else text for text in script]
    (lived,) = live(taskset, taskset.tasks("test")[:1], said)
    assert lived.rewards == wanted
    assert lived.status == (Status.OUT_OF_TURNS if len(script) == 5 else Status.COMPLETED)


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
def test_the_agent_sees_what_its_code_does(code: str, shown: str, taskset: TaskSet, live: Any, call: Any) -> None:
    (lived,) = live(taskset, taskset.tasks("test")[:1], [call("run_tests", code), block(RIGHT)])
    (seen,) = lived.turns[0].observation
    assert shown in seen.text and "double(5)" not in seen.text
    (result,) = lived.turns[0].results
    assert result.ok is not shown.startswith("[died")
    assert all(isinstance(part, Text) for part in result.parts)


def test_the_rate_of_repairs_is_counted_over_many_episodes_at_once(taskset: TaskSet, live: Any, call: Any) -> None:
    ways = ([block(RIGHT)], [block(WRONG)], [call("run_tests", WRONG), block(RIGHT)], [call("run_tests", WRONG), ""])

    def reply(text: str) -> str:
        way = ways[int(text.split("Double it, ")[1].split()[0]) % 4]
        return way[text.count("<|im_start|>assistant") - 1]

    tasks = sorted(taskset.tasks("all"), key=lambda task: int(task.id.rpartition("/")[2]))[:24]
    lived = live(taskset, tasks, reply)
    assert [t.rewards["passed"] for t in lived] == [1, 0, 1, 0] * 6
    assert taskset.measures is not None
    assert taskset.measures(lived) == pytest.approx(
        {"first_pass_rate": 1 / 4, "no_second_try_rate": 2 / 3, "fix_rate": 1.0}
    )


def lived(passed: float | None, first: float | None, codes: int = 2) -> Trajectory:
    call = ToolCall("call_0", "run_tests", {"code": WRONG}, "")
    tried = Action(Message("assistant", (Text(""),), (call,) * (codes - 1)), "")
    results = (ToolResult((Text(""),), ok=True),) * (codes - 1)
    said = Action(Message.assistant(block(WRONG)), block(WRONG))
    turns = (
        Turn(0, None, (), (), (), (), "stop", tried, results=results),
        Turn(1, 0, (), (), (), (), "stop", said),
    )
    return Trajectory(AttemptId("r", "t", 0, 0), "t", turns, Status.COMPLETED, rewards=marks(passed, 1, first))


def test_the_rate_of_repairs_looks_at_judged_first_failures_only() -> None:
    assert repair_rates([lived(1, 0), lived(0, 0), lived(0, 1), lived(None, 0)]) == {
        "first_pass_rate": 1 / 3,
        "no_second_try_rate": 0.0,
        "fix_rate": 0.5,
    }
    # Whoever never tries a second time has mended nothing, and failed to mend nothing.
    assert repair_rates([lived(1, 0), lived(0, 0, codes=1)]) == {
        "first_pass_rate": 0.0,
        "no_second_try_rate": 0.5,
        "fix_rate": 1.0,
    }
    assert repair_rates([lived(1, 1)]) == {"first_pass_rate": 1.0}
    assert repair_rates([lived(None, None)]) == {} == repair_rates([])


def test_what_could_not_be_judged_is_not_scored(taskset: TaskSet, live: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(self: Exam, sandbox: Sandbox, solution: str) -> Verdict:
        return Verdict(None, "no more namespaces")

    monkeypatch.setattr(Exam, "judge", broken)
    (attempt,) = live(taskset, taskset.tasks("test")[:1], [block(RIGHT)])
    assert attempt.rewards == marks(None, 1, None)


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
def test_a_solution_is_a_whole_block(text: str, solution: str | None) -> None:
    assert extract_solution(text) == solution


def test_the_world_is_what_the_doors_need(taskset: TaskSet, rows_file: Any) -> None:
    assert taskset.recipe["sandbox"] == "bubblewrap" and taskset.sandbox is not None
    assert taskset.sandbox.startswith("bubblewrap: ")
    assert (len(taskset.tasks("all")), taskset.whole) == (30, "all")
    for data, corpus, told in ((None, None, "--data for code: got nothing"), (rows_file(), "c", "corpus: got c")):
        with pytest.raises(InvalidInput, match=told):
            build("code", data, corpus, 0)
