"""Attempts are counted by how they ended, tries again included, and calls by whose fault it was."""

from agent_r1.core.attempt_id import AttemptId
from agent_r1.core.messages import Action, Message
from agent_r1.core.task import Task
from agent_r1.core.tool import ToolResult
from agent_r1.core.trajectory import Group, Status, Trajectory, Turn
from agent_r1.tools.tool_errors import Fault
from agent_r1.training.rollout_metrics import tally


def turn(*faults):
    results = tuple(ToolResult((), ok=fault is None, error=fault) for fault in faults)
    return Turn(0, None, (1,), (2,), (-1.0,), (), "stop", Action(Message.assistant(""), ""), results=results)


def lived(member, status, *faults, retry=0, **rewards):
    return Trajectory(AttemptId("run", "t", 0, member, retry), "t", (turn(*faults),), status, rewards=rewards)


def test_attempts_that_ended_well_and_have_no_score_are_counted():
    attempts = [lived(n, Status.COMPLETED, em=em) for n, em in enumerate((1.0, None, float("nan"), (1.0, 2.0)))]
    group = Group(0, Task("t", ()), (*attempts, lived(4, Status.REWARD_FAILED)))
    assert (tally([group])["unscored"], tally([group])["reward_failed"]) == (2.0, 1.0)


def test_every_status_is_counted_under_its_name():
    group = Group(
        0,
        Task("t", ()),
        (
            lived(0, Status.COMPLETED, None, Fault.TIMED_OUT, Fault.UNKNOWN_TOOL),
            lived(1, Status.OUT_OF_TURNS, None, Fault.MALFORMED_CALL, retry=1),
        ),
        greedy=lived(2, Status.COMPLETED, None, retry=1),
        retried=(lived(1, Status.ENGINE_FAILED, Fault.RAISED), lived(2, Status.ENGINE_FAILED)),
    )
    counts = tally([group, group])
    assert {name: count for name, count in counts.items() if count} == {
        "completed": 2.0,
        "out_of_turns": 2.0,
        "engine_failed": 2.0,
        "retried": 2.0,
        "calls": 12.0,
        "invalid_calls": 4.0,
        "failed_calls": 4.0,
    }
    assert set(counts) >= {status.value for status in Status}
    assert not any(tally([]).values())
