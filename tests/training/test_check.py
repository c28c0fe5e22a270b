"""Checking a task set: solutions are played in its environment, and unexpected results are listed."""

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest

from agent_r1.core.errors import InvalidInput
from agent_r1.core.messages import Message
from agent_r1.core.task import Task
from agent_r1.core.taskset import ReferenceSolution, ReferenceSolutions, TaskSet, script, tool_call
from agent_r1.core.trajectory import Trajectory
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.rewards.scoring import FunctionScorer, exact_match
from agent_r1.tools.function_tool import tool
from agent_r1.training.check import CheckReport, check
from agent_r1.training.progress import SilentProgress

say = Message.assistant
PAGES = {"Alba": "Bruno", "Corin": 'Dovra\t{"a": é 漢 🦉}'}


@tool
def look_up(title: str) -> str:
    """Find a page."""
    return PAGES[title]


def tasks(split: str) -> Sequence[Task]:
    return [Task(title, (Message.user(title),), {"answers": (name,)}, split) for title, name in PAGES.items()]


def read_it(conversation: tuple[Message, ...], turn: int) -> Message:
    """Finds the answer in what the tool said: no script could know it."""
    return (
        tool_call("look_up", title=conversation[0].text)
        if turn == 0
        else say(f"<answer>{conversation[-1].text}</answer>")
    )


NOTHING = ReferenceSolution("nothing", script(say("")))


def solutions(task: Task) -> ReferenceSolutions:
    return ReferenceSolutions((ReferenceSolution("read", read_it),), (NOTHING,), {"exact_match": 1.0})


def taskset(**changes: object) -> TaskSet:
    env = ToolEnv([look_up], max_turns=3)
    made = TaskSet("towns", env, tasks, (FunctionScorer({"exact_match": exact_match}),), solutions=solutions)
    return replace(made, **changes)  # type: ignore[arg-type]


def checked(changed: TaskSet) -> CheckReport:
    return check(changed, SilentProgress())


def reasons(found: CheckReport) -> set[str]:
    return {failure.reason for failure in found.failures}


def test_a_solution_may_depend_on_the_conversation_and_any_text_is_preserved() -> None:
    found = checked(taskset())
    assert found.passed and (found.gold.passed, found.wrong.passed) == (4, 4)  # train and test


def test_a_wrong_solution_that_earns_the_rewards_is_detected() -> None:
    def twice(task: Task) -> ReferenceSolutions:
        return replace(solutions(task), wrong=(ReferenceSolution("too good", read_it), NOTHING))

    found = checked(taskset(solutions=twice))
    assert reasons(found) == {"wrong, but earned exact_match 1"} and (found.wrong.played, found.wrong.passed) == (8, 4)
    assert {(failure.task, failure.solution) for failure in found.failures} == {
        ("Alba", "too good"),
        ("Corin", "too good"),
    }


def test_a_wrong_solution_that_could_not_be_scored_fails() -> None:
    def unable(trajectory: Trajectory, task: Task) -> float:
        if trajectory.last_text:
            return 1.0
        raise ValueError("no text")

    assert reasons(checked(taskset(scorers=(FunctionScorer({"exact_match": unable}),)))) == {
        "exact_match could not be scored"
    }


def test_process_rewards_can_be_expected() -> None:
    env = ToolEnv([look_up], call_rewards=lambda call, result: {"found": float(result.ok)})
    full = {"exact_match": 1.0, "found": 1.0}
    assert checked(taskset(env=env, solutions=lambda task: replace(solutions(task), expected_rewards=full))).passed
    more = {"exact_match": 1.0, "found": 2.0}
    found = checked(taskset(env=env, solutions=lambda task: replace(solutions(task), expected_rewards=more)))
    assert reasons(found) == {"gold, but earned found 1 of 2"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"gold": ()}, "it has no gold solution"),
        ({"wrong": ()}, "it has no wrong solution"),
        ({"expected_rewards": {}}, "its solutions name no reward"),
    ],
)
def test_solutions_that_prove_nothing_fail(change: dict, reason: str) -> None:
    assert reason in reasons(checked(taskset(solutions=lambda task: replace(solutions(task), **change))))


def test_an_exception_while_creating_solutions_names_the_task() -> None:
    def broken(task: Task) -> ReferenceSolutions:
        raise KeyError("chain")

    with pytest.raises(InvalidInput, match="task Alba: got KeyError"):
        checked(taskset(solutions=broken))


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ([1], "it returned an object of type list, not ReferenceSolutions"),
        (ReferenceSolutions((1,), (NOTHING,), {"exact_match": 1.0}), "1 is not a ReferenceSolution"),  # type: ignore[arg-type]
        (ReferenceSolutions((NOTHING,), (NOTHING,), ["exact_match"]), "expected_rewards is ['exact_match']"),  # type: ignore[arg-type]
    ],
)
def test_invalid_solutions_name_the_task(given: object, error: str) -> None:
    with pytest.raises(InvalidInput, match=f"task Alba: got TypeError: {re.escape(error)}"):
        checked(taskset(solutions=lambda task: given))


def test_a_task_set_without_solutions_is_refused() -> None:
    with pytest.raises(InvalidInput, match="solutions of towns: got none"):
        checked(taskset(solutions=None))


def test_the_sampled_tasks_depend_on_the_seed() -> None:
    many = [Task(str(i), (Message.user("Alba"),), {"answers": ("Bruno",)}) for i in range(100)]
    seen: list[list[str]] = []

    def noted(task: Task) -> ReferenceSolutions:
        seen[-1].append(task.id)
        return solutions(task)

    for seed in (0, 0, 1):
        seen.append([])
        check(taskset(tasks=lambda split: many, solutions=noted), SilentProgress(), n=5, seed=seed)
    assert seen[0] == seen[1] != seen[2] and len(seen[0]) == 10
