"""Reward functions compare the final action with the gold answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agent_r1.core.errors import InvalidInput
from agent_r1.core.messages import Action, Message, Text, ToolCall, ToolResult
from agent_r1.core.task import Task
from agent_r1.rewards.scoring import exact_match, f1, final_answer, gated_exact_match, sub_match
from agent_r1.tools.tool_errors import ToolErrorKind, error_result

FINE = ToolResult((Text("page"),), ok=True)
RIGHT, WRONG, NONE = "<answer>the Bruno</answer>", "<answer>Bruno the great</answer>", "Bruno"


def test_rewards_compare_the_final_answer_with_the_best_gold_answer(
    task: Task, make_action: Any, make_trajectory: Any
) -> None:
    attempts = [
        make_trajectory(
            (make_action("<answer>Carla</answer>", ToolCall("c", "s", {}, "")), [FINE]), (make_action(text), [])
        )
        for text in (RIGHT, WRONG, NONE)
    ]
    assert [exact_match(attempt, task) for attempt in attempts] == [1.0, 0.0, 0.0]
    assert [f1(attempt, task) for attempt in attempts] == [1.0, pytest.approx(2 / 3), 0.0]
    assert [sub_match(attempt, task) for attempt in attempts] == [1.0, 1.0, 0.0]


def test_without_turns_there_is_no_answer(task: Task, make_trajectory: Any) -> None:
    assert final_answer(make_trajectory()) is None
    assert exact_match(make_trajectory(), task) == 0.0


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("Bruno", "Bruno"), (" Bruno\n", "Bruno"), ("So: <answer>Bruno</answer>.", "Bruno"), ("", None), (" ", None)],
)
def test_the_returned_answer_of_an_agent_program_replaces_the_last_text(
    make_action: Any, make_trajectory: Any, answer: str, expected: str | None
) -> None:
    calling = make_trajectory((make_action("<answer>Carla</answer>", ToolCall("c", "s", {}, "")), [FINE]))
    for trajectory in (calling, make_trajectory((make_action("<answer>Carla</answer>"), []))):
        assert final_answer(replace(trajectory, answer=answer)) == expected


def test_an_answer_beside_a_call_is_not_final(make_action: Any, make_trajectory: Any, call: Any) -> None:
    assert final_answer(make_trajectory((make_action(RIGHT), []))) == "the Bruno"
    assert final_answer(make_trajectory((make_action(RIGHT, call("search")), []))) is None


def test_an_answer_inside_reasoning_does_not_count(make_trajectory: Any) -> None:
    message = Message.assistant("I do not know.", reasoning="perhaps <answer>Bruno</answer>")
    text = "<think>perhaps <answer>Bruno</answer></think>I do not know."
    assert final_answer(make_trajectory((Action(message, text), []))) is None


@pytest.mark.parametrize(
    ("final", "result", "unread", "reward"),
    [
        (RIGHT, FINE, None, 1.0),
        (WRONG, FINE, None, 0.0),
        (NONE, FINE, None, -0.5),
        (RIGHT, error_result(ToolErrorKind.UNKNOWN_TOOL, ""), None, -0.5),
        (RIGHT, error_result(ToolErrorKind.INVALID_ARGUMENTS, ""), None, -0.5),
        (RIGHT, error_result(ToolErrorKind.MALFORMED_CALL, ""), "no JSON", -0.5),
        (NONE, error_result(ToolErrorKind.MALFORMED_CALL, ""), "no JSON", -1.0),
        (RIGHT, error_result(ToolErrorKind.RAISED, ""), None, 1.0),
        (RIGHT, ToolResult((Text("no such page"),), ok=False, error="no such page"), None, 1.0),
    ],
)
def test_gated_exact_match_takes_its_four_values(
    final: str,
    result: ToolResult,
    unread: str | None,
    reward: float,
    task: Task,
    make_action: Any,
    make_trajectory: Any,
    call: Any,
) -> None:
    called = ToolCall("c0", "search", None if unread else {}, "", unread)
    attempt = make_trajectory(
        (make_action("", call("search")), [FINE]), (make_action("", called), [result]), (make_action(final), [])
    )
    assert gated_exact_match(attempt, task) == reward


def test_a_malformed_call_without_an_answer_gets_the_lowest_reward(
    task: Task, make_action: Any, make_trajectory: Any, call: Any
) -> None:
    cut_off = make_action("", ToolCall("c", "search", None, "{", "cut off"))
    assert gated_exact_match(make_trajectory((make_action("", call("search")), [FINE]), (cut_off, [])), task) == -1.0
    assert gated_exact_match(make_trajectory((make_action("", call("search")), [])), task) == -0.5


@pytest.mark.parametrize("data", [{}, {"answers": ()}, {"answers": "Bruno"}, {"answers": (1,)}, {"answer": ("Bruno",)}])
def test_a_task_without_gold_answers_is_refused(data: dict[str, Any], make_action: Any, make_trajectory: Any) -> None:
    with pytest.raises(InvalidInput, match="task t/9"):
        exact_match(make_trajectory((make_action(RIGHT), [])), Task("t/9", (), data))
