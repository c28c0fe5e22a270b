"""The multi-turn questions of bfcl-eval: states of the simulated APIs, requests of the user, refused calls."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest

from agent_r1.core.environment import RolloutContext, env_of
from agent_r1.core.errors import InvalidInput
from agent_r1.core.messages import Action, Message
from agent_r1.core.task import Task
from agent_r1.core.taskset import ReferenceSolutions, TaskSet, tool_call
from agent_r1.core.trajectory import AttemptId
from agent_r1.tasksets import build
from agent_r1.tasksets.answers import reference
from agent_r1.training.check import check
from agent_r1.training.progress import SilentProgress
from environments.bfcl.multi_turn import forget

pytestmark = pytest.mark.skipif(find_spec("bfcl_eval") is None, reason="bfcl-eval is not installed (docs/environments)")
PATH = "environments/bfcl/multi_turn.py"
DONE = Message.assistant("Done.")


@pytest.fixture(scope="module")
def multi() -> TaskSet:
    return build(PATH)


def task_of(multi: TaskSet, name: str) -> Task:
    splits = ("train", *multi.evaluation)
    return next(task for split in splits for task in multi.tasks(split) if task.id == name)


def kept_states() -> list[str]:
    module = import_module("bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils")
    return [name for name in vars(module) if name.startswith("attempt")]


def test_the_ground_truth_passes_and_undone_requests_fail(multi: TaskSet) -> None:
    report = check(multi, SilentProgress(), n=2)
    assert (report.failures, report.gold.passed, report.wrong.passed) == ((), 6, 18)
    assert kept_states() == []


def test_training_has_no_number_of_a_held_out_task(multi: TaskSet) -> None:
    numbers = [{task.id.rpartition("_")[2] for task in multi.tasks(split)} for split in ("train", *multi.evaluation)]
    assert list(map(len, numbers)) == [160, 40, 40] and numbers[1] == numbers[2] and not numbers[0] & numbers[1]
    with pytest.raises(InvalidInput, match="live"):
        multi.tasks("live")


def test_states_are_compared_and_not_the_way_to_them(multi: TaskSet) -> None:
    task = task_of(multi, "multi_turn_base_0")
    make, file = tool_call("mkdir", dir_name="temp"), "final_report.pdf"
    first = (tool_call("cd", folder="document"), make, tool_call("mv", source=file, destination="temp"))
    second = (tool_call("cd", folder="temp"), tool_call("grep", file_name=file, pattern="budget analysis"))
    third = tool_call("sort", file_name=file)
    move = tool_call("mv", source="previous_report.pdf", destination="temp")
    compare = tool_call("diff", file_name1=file, file_name2="previous_report.pdf")
    fourth = (tool_call("cd", folder=".."), move, tool_call("cd", folder="temp"), compare)

    def play(*requests: Sequence[Message]) -> Any:
        return reference(str(len(requests)), *(message for calls in requests for message in (*calls, DONE)))

    refused = tool_call("touch", file_name="x", no_such_argument=1)
    given = ReferenceSolutions(
        gold=(
            play(first, second, [third], fourth),
            play((*first, tool_call("pwd"), refused, make), second, [third], fourth),  # nothing more is changed
        ),
        wrong=(
            play(first, second, [third], (*fourth, tool_call("touch", file_name="x"))),
            play(first, second, [third], (*fourth[:2], fourth[2])),  # the result of the last call is missing
            play(first, second, [third]),
            play((*first, *second, third, *fourth), (), (), ()),  # all that the user would ask for, at once
        ),
        expected_rewards={"correct": 1.0},
    )
    alone = replace(multi, tasks=lambda split: (task,), solutions=lambda task: given, evaluation=())
    report = check(alone, SilentProgress(), n=1)
    failures = [(one.solution, one.reason) for one in report.failures]
    # three requests: the script ends, and with it the attempt
    assert failures == [("3", failures[0][1])] and "not scored" in failures[0][1]
    assert (report.gold.passed, report.wrong.passed) == (2, 3)


def test_calls_are_run_in_order_on_the_states_of_one_attempt(multi: TaskSet) -> None:
    task = task_of(multi, "multi_turn_base_0")

    async def play(*actions: Message) -> list[list[str]]:
        episode = await env_of(multi.env, task).open(task, RolloutContext(AttemptId("run", task.id, 0, 0), 0))
        texts = [[message.text for message in (await episode.step(Action(one, ""))).messages] for one in actions]
        await episode.close()
        return texts

    make, enter = tool_call("mkdir", dir_name="new").calls, tool_call("cd", folder="new").calls
    both = Message.assistant("", (*make, *enter))
    ((_, entered), (where,), asked) = asyncio.run(play(both, tool_call("pwd"), DONE))
    assert "new" in entered and where == '{"current_working_directory": "/workspace/new"}'
    assert asked == [task.data["entry"]["question"][1][0]["content"]]
    # another attempt has its own states; text that is no value of JSON, or no argument, is never evaluated
    evil = {"folder": "x", "a=__import__('os').abort(), folder": "y"}
    ((missing,), (refused,), (odd,)) = asyncio.run(
        play(Message.assistant("", enter), tool_call("cd", **evil), tool_call("cd", folder=float("nan")))
    )
    assert "error" in missing and "unknown a=__import__" in refused and "no JSON" in odd
    assert kept_states() == []


def test_states_are_forgotten_while_other_attempts_add_theirs() -> None:
    stop = threading.Event()
    state = vars(import_module("bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils"))

    def add_and_remove() -> None:
        while not stop.is_set():
            state.update({f"other{n}": None for n in range(50)})
            for n in range(50):
                del state[f"other{n}"]

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    other = threading.Thread(target=add_and_remove)
    other.start()
    try:
        for _ in range(5000):
            forget("attempt")
    finally:
        stop.set()
        other.join()
        sys.setswitchinterval(interval)
