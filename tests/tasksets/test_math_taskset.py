"""The math task set in training: answers verified in processes that may be killed, one interpreter per episode."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from extras import requires

from agent_r1.core import errors as packages
from agent_r1.core.errors import InvalidInput
from agent_r1.core.task import Task
from agent_r1.core.taskset import TaskSet
from agent_r1.core.trajectory import AttemptId, Status, Trajectory
from agent_r1.sandbox.sandbox import Sandbox
from agent_r1.tasksets import build
from agent_r1.tasksets.math import scorer
from agent_r1.tasksets.math.scorer import LONGEST, AnswerChecker, Checked

pytestmark = requires("math_verify", "math")

HANGS = "9^{9^{9^{9}}}"


def check(*pairs: tuple[str, str], seconds: float = 20.0) -> list[Checked]:
    checker = AnswerChecker(seconds)

    async def both() -> list[Checked]:
        return [await checker.check(gold, answer, "") for gold, answer in pairs]

    return asyncio.run(both())


def test_equal_mathematics_is_equal_in_every_form() -> None:
    same = [("0.5", r"\frac{1}{2}"), ("1,000", "1000"), ("18", r"\$18"), (r"\text{Ann}", "Ann"), ("5", "x=5")]
    other = [
        ("18", "17"),
        ("18", "18, 17"),
        ("(1,2)", "(2,1)"),
        (r"\text{Ann}", r"\text{Bob}"),
        ("18", ""),
        ("18", "}{"),
    ]
    assert [each.correct for each in check(*same, *other)] == [True] * len(same) + [False] * len(other)


def test_an_answer_that_hangs_is_wrong_and_its_process_is_replaced() -> None:
    check(("1", "1"))  # the import takes place before the time limit starts
    found = check(("2^{3}", HANGS), ("2", "2"), seconds=2.0)  # otherwise a policy could avoid a reward of 0 by hanging
    assert found == [Checked(False, "it cannot be computed: score timed out"), Checked(True)]
    (unknown,) = check(("2", "3"), seconds=1e-4)  # nothing can be computed, so there is no verdict
    assert unknown.correct is None
    assert "math_verify" not in sys.modules  # sympy is never imported in this process


def test_an_answer_that_kills_its_process_has_a_score(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [each.correct for each in check(("2", "2"), ("2", "\x00"), ("2", "2"))] == [True, False, True]
    checker = AnswerChecker(5.0)

    async def killed() -> tuple[Checked, Checked]:
        hanging = asyncio.create_task(checker.check("2^{3}", HANGS, ""))
        await asyncio.sleep(1.5)
        for pid in verifiers():
            os.kill(pid, 9)
        return await hanging, await checker.check("2", "2", "")

    dead, after = asyncio.run(killed())
    assert dead.correct is False and "ended" in dead.reason  # as after running out of memory
    assert after == Checked(True)


def verifiers() -> list[int]:
    """Return the forked verifier processes."""
    servers = [
        pid for pid in children(os.getpid()) if "math.verifier" in Path(f"/proc/{pid}/cmdline").read_text("utf-8")
    ]
    return [pid for server in servers for pid in children(server)]


def children(parent: int) -> list[int]:
    tasks = Path(f"/proc/{parent}/task").iterdir()
    return [int(pid) for task in tasks for pid in (task / "children").read_text("utf-8").split()]


def test_an_endless_answer_is_wrong_without_being_parsed() -> None:
    assert check(("2", "2" * (LONGEST + 1)))[0].correct is False


@pytest.fixture
def taskset(sandbox: Sandbox, rows_file: Callable[..., Path]) -> TaskSet:
    rows = ({"question": f"What is {n} + {n}?", "answer": f"{n} + {n} = {2 * n}\n#### {2 * n}"} for n in range(10, 40))
    return build("math", rows_file(*rows), None, 0)


def rewards(trajectory: Trajectory) -> dict[str, Any]:
    return dict(trajectory.rewards)


def test_right_answers_score_1_and_form_is_a_separate_reward(taskset: TaskSet, run_attempts: Any, call: Any) -> None:
    task = taskset.tasks("test")[0]
    gold = task.data["answer"]
    assert rewards(*run_attempts(taskset, [task], [rf"So \boxed{{{gold}}}."])) == {"correct": 1.0, "form": 1.0}
    assert rewards(*run_attempts(taskset, [task], [rf"So \boxed{{{gold}0}}."])) == {"correct": 0.0, "form": 1.0}
    assert rewards(*run_attempts(taskset, [task], [f"So {gold}."])) == {"correct": 0.0, "form": 0.0}
    # A malformed call fails the form, not the answer.
    invalid = ["<tool_call>\nnonsense\n</tool_call>", rf"\boxed{{{gold}}}"]
    assert rewards(*run_attempts(taskset, [task], invalid)) == {"correct": 1.0, "form": 0.0}
    (endless,) = run_attempts(taskset, [task], [call("python", "1")] * 5)
    assert (endless.status, rewards(endless)) == (Status.OUT_OF_TURNS, {"correct": 0.0, "form": 0.0})


def test_answers_are_looked_for_outside_of_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    monkeypatch.setattr(scorer, "stated_answer", lambda text: threads.append(threading.current_thread()))
    attempt = Trajectory(AttemptId("run", "t", 0, 0), "t", (), Status.COMPLETED, answer="a long text")
    scored = asyncio.run(scorer.MathScorer(AnswerChecker()).score([attempt], Task("t", "Who?", {"answer": "1"})))
    assert scored == ({"correct": 0.0, "form": 0.0},)
    assert len(threads) == 1 and threads[0] is not threading.main_thread()


def test_an_answer_that_cannot_be_scored_is_neither_right_nor_wrong(
    taskset: TaskSet, run_attempts: Any, monkeypatch: Any
) -> None:
    async def hung(self: AnswerChecker, gold: str, answer: str, question: str) -> Checked:
        return Checked(None, "score timed out")

    monkeypatch.setattr(AnswerChecker, "check", hung)
    assert rewards(*run_attempts(taskset, taskset.tasks("test")[:1], [r"\boxed{1}"])) == {"correct": None, "form": 1.0}


def test_episodes_have_separate_interpreters_that_are_closed(taskset: TaskSet, run_attempts: Any, call: Any) -> None:
    def reply(text: str) -> str:
        turn = text.count("<|im_start|>assistant")
        if turn == 1:
            return call("python", "try:\n    n += 1\nexcept NameError:\n    n = 1\nprint('n is', n)")
        return call("python", "print('later', n + 41)") if turn == 2 else r"\boxed{1}"

    before = set(children(os.getpid())) | set(verifiers())
    trajectories = run_attempts(taskset, taskset.tasks("train")[:6], reply, 4)
    observations = [[turn.observation[0].text for turn in trajectory.turns[:2]] for trajectory in trajectories]
    assert observations == [["n is 1\n", "later 42\n"]] * 24
    again = run_attempts(taskset, taskset.tasks("train")[:6], reply, 4)
    tokens = [[[(turn.new_ids, turn.action_ids) for turn in t.turns] for t in some] for some in (trajectories, again)]
    assert tokens[0] == tokens[1]  # equal bits, independent of timing
    left = [pid for pid in children(os.getpid()) if pid not in before and "verifier" not in cmdline(pid)]
    assert left == []


def cmdline(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text("utf-8")


def test_a_missing_package_is_reported_in_one_line(rows_file: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for data, corpus, expected in ((None, None, "--data for math: got nothing"), (rows_file(), "c", "corpus: got c")):
        with pytest.raises(InvalidInput, match=expected):
            build("math", data, corpus, 0)
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match=r"pip install 'agent-r1\[math\]'"):
        build("math", rows_file(), None, 0)
