"""Costs of calls and tokens, log-probability and form of an attempt, and answers that a tool result contains."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agent_r1.core.messages import Text, ToolCall, ToolResult
from agent_r1.core.task import Task
from agent_r1.core.trajectory import Trajectory
from agent_r1.rewards.scoring import TERMS
from agent_r1.tools.tool_errors import ToolErrorKind, error_result

PAGE = ToolResult((Text("Alba: the capital is Bruno-Town."),), ok=True)


def values(trajectory: Trajectory, task: Task) -> dict[str, float]:
    return {name: term(trajectory, task) for name, term in TERMS.items()}


def test_an_attempt_without_calls_costs_only_its_tokens(task: Task, make_action: Any, make_trajectory: Any) -> None:
    attempt = make_trajectory((make_action("<answer>Bruno</answer>"), []))
    assert values(attempt, task)["logprob"] == 0
    attempt = replace(attempt, turns=(replace(attempt.turns[0], action_ids=(1, 2, 3), logprobs=(-3.0, 0.0, -1.5)),))
    found = values(attempt, task)
    expected = {"calls": 0, "repeated_calls": 0, "failed_calls": 0, "tokens": 3, "format": 1, "grounded": 0}
    assert found == {**expected, "logprob": -1.5}


def test_equal_calls_are_repeated_whatever_the_order_of_their_arguments(
    task: Task, make_action: Any, make_trajectory: Any, call: Any
) -> None:
    first, same = call("s", "c0", query="Alba", page=1), call("s", "c1", page=1, query="Alba")
    other, broken = call("s", "c2", query="Bruno"), ToolCall("c3", "s", None, "{", error="no JSON")
    attempt = make_trajectory(
        (make_action("", first), [PAGE]),
        (make_action("", same, other), [PAGE, error_result(ToolErrorKind.RAISED, "x")]),
        (make_action("", broken, broken), [error_result(ToolErrorKind.MALFORMED_CALL, "x")] * 2),
        (make_action("<answer>the bruno town</answer>"), []),
    )
    found = values(attempt, task)
    assert (found["calls"], found["repeated_calls"], found["failed_calls"]) == (5, 2, 3)
    assert (found["format"], found["grounded"]) == (0, 0)  # "BrunoTown" in the page is another word


def test_an_answer_is_grounded_if_a_result_contains_it_as_whole_words(
    task: Task, make_action: Any, make_trajectory: Any, call: Any
) -> None:
    def grounded(answer: str) -> float:
        search = (make_action("", call("s", query="Alba")), [PAGE])
        return TERMS["grounded"](make_trajectory(search, (make_action(answer), [])), task)

    answers = ("The capital", "apital", "", "Carla")
    assert [grounded(f"<answer>{answer}</answer>") for answer in answers] == [1, 0, 0, 0]
    assert grounded("the capital") == 0  # no final answer
