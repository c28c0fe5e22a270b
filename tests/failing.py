"""Groups whose attempts or calls failed, for the tests of the health monitor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agent_r1.core.inference import PolicyVersionSpan
from agent_r1.core.messages import Action, Message, Text, ToolCall, ToolResult
from agent_r1.core.task import Task
from agent_r1.core.trajectory import AttemptId, Group, Status, Trajectory, Turn
from agent_r1.data.batch import Excluded
from agent_r1.tools.tool_errors import ToolErrorKind


def make_trajectory(
    index: int, group_id: int = 3, retry: int = 0, status: Status = Status.COMPLETED, **more: Any
) -> Trajectory:
    return Trajectory(AttemptId("run", "t", group_id, index, retry), "t", (), status, **more)


def group_of(*trajectories: Trajectory, group_id: int = 3, **more: Any) -> Group:
    return Group(group_id, Task("t", ()), trajectories, **more)


def failing(count: int, size: int, group_id: int = 0, status: Status = Status.ENGINE_FAILED) -> Group:
    reasons = {index: f"EngineError: port {4000 + index} is closed" for index in range(count)}
    members = [
        make_trajectory(index, group_id, status=status, reason=reasons[index])
        if index < count
        else make_trajectory(index, group_id)
        for index in range(size)
    ]
    return group_of(*members, group_id=group_id)


def excluded(group: Group) -> list[Excluded]:
    return [Excluded(t.attempt, f"{t.status}: {t.reason}") for t in group.trajectories if t.reason]


def calling(*errors: str | None, group_id: int = 0) -> Group:
    """Return a group of one attempt with one search call per error; None is a call that succeeded."""
    calls = tuple(ToolCall(f"c{n}", "search", {}, "") for n in range(len(errors)))
    results = tuple(
        ToolResult(
            (Text(f"search failed: port {n} is {error}"),), ok=error is None, error=error and ToolErrorKind.RAISED
        )
        for n, error in enumerate(errors)
    )
    action = Action(Message.assistant("", calls), "")
    turn = Turn(0, None, (1,), (2,), (-1.0,), (PolicyVersionSpan(0, 0),), "stop", action, results=results)
    return group_of(replace(make_trajectory(0, group_id), turns=(turn,)), group_id=group_id)
