"""Attempts are counted by status, retried ones included, and failed calls by whose error it was."""

from dataclasses import replace

from agent_r1.core.messages import Action, Message, ToolResult
from agent_r1.core.task import Task
from agent_r1.core.trajectory import AttemptId, Group, Status, Trajectory, Turn
from agent_r1.tools.tool_errors import ToolErrorKind
from agent_r1.training.metrics import compute_rollout_metrics


def turn(*errors):
    results = tuple(ToolResult((), ok=error is None, error=error) for error in errors)
    return Turn(0, None, (1,), (2,), (-1.0,), (), "stop", Action(Message.assistant(""), ""), results=results)


def trajectory(member, status, *errors, retry=0, **rewards):
    return Trajectory(AttemptId("run", "t", 0, member, retry), "t", (turn(*errors),), status, rewards=rewards)


def test_attempts_that_ended_normally_without_a_finite_reward_are_counted():
    attempts = [trajectory(n, Status.COMPLETED, em=em) for n, em in enumerate((1.0, None, float("nan"), (1.0, 2.0)))]
    group = Group(0, Task("t", ()), (*attempts, trajectory(4, Status.REWARD_FAILED)))
    assert (compute_rollout_metrics([group])["unscored"], compute_rollout_metrics([group])["reward_failed"]) == (
        2.0,
        1.0,
    )


def test_the_turns_that_no_other_turn_continues_are_branches():
    turns = tuple(replace(turn(), index=index, parent=parent) for index, parent in enumerate((None, 0, 0, 2, None)))
    attempt = replace(trajectory(0, Status.COMPLETED), turns=turns)
    assert compute_rollout_metrics([Group(0, Task("t", ()), (attempt,))])["branches"] == 3.0


def test_every_status_is_counted_under_its_name():
    group = Group(
        0,
        Task("t", ()),
        (
            trajectory(0, Status.COMPLETED, None, ToolErrorKind.TIMED_OUT, ToolErrorKind.UNKNOWN_TOOL),
            trajectory(1, Status.OUT_OF_TURNS, None, ToolErrorKind.MALFORMED_CALL, retry=1),
        ),
        greedy=trajectory(2, Status.COMPLETED, None, retry=1),
        retried=(trajectory(1, Status.ENGINE_FAILED, ToolErrorKind.RAISED), trajectory(2, Status.ENGINE_FAILED)),
    )
    counts = compute_rollout_metrics([group, group])
    assert {name: count for name, count in counts.items() if count} == {
        "completed": 2.0,
        "out_of_turns": 2.0,
        "engine_failed": 2.0,
        "retried": 2.0,
        "calls": 12.0,
        "invalid_calls": 4.0,
        "failed_calls": 4.0,
        "turns": 1.0,
        "branches": 1.0,
        "attempt_tokens": 1.0,
    }
    assert set(counts) >= {status.value for status in Status}
    assert not any(compute_rollout_metrics([]).values())
