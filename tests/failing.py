"""Groups whose attempts or calls failed, for the tests of the doctor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agent_r1.core.attempt_id import AttemptId
from agent_r1.core.inference import PolicyVersionSpan
from agent_r1.core.messages import Action, Message, Text, ToolCall
from agent_r1.core.task import Task
from agent_r1.core.tool import ToolResult
from agent_r1.core.trajectory import Group, Status, Trajectory, Turn
from agent_r1.data.training_sample import Excluded
from agent_r1.tools.tool_errors import ToolErrorKind


def lived(member: int, serial: int = 3, retry: int = 0, status: Status = Status.COMPLETED, **more: Any) -> Trajectory:
    return Trajectory(AttemptId("run", "t", serial, member, retry), "t", (), status, **more)


def group_of(*trajectories: Trajectory, serial: int = 3, **more: Any) -> Group:
    return Group(serial, Task("t", ()), trajectories, **more)


def failing(count: int, of: int, serial: int = 0, status: Status = Status.ENGINE_FAILED) -> Group:
    reasons = {member: f"EngineError: port {4000 + member} is closed" for member in range(count)}
    members = [
        lived(member, serial, status=status, reason=reasons[member]) if member < count else lived(member, serial)
        for member in range(of)
    ]
    return group_of(*members, serial=serial)


def left_out(group: Group) -> list[Excluded]:
    return [Excluded(t.attempt, f"{t.status}: {t.reason}") for t in group.trajectories if t.reason]


def calling(*errors: str | None, serial: int = 0) -> Group:
    """A group of one attempt, which searched once for each error that the search met; None: it met none."""
    calls = tuple(ToolCall(f"c{n}", "search", {}, "") for n in range(len(errors)))
    results = tuple(
        ToolResult((Text(f"search failed: port {n} is {error}"),), ok=error is None, error=error and ToolErrorKind.RAISED)
        for n, error in enumerate(errors)
    )
    action = Action(Message.assistant("", calls), "")
    turn = Turn(0, None, (1,), (2,), (-1.0,), (PolicyVersionSpan(0, 0),), "stop", action, results=results)
    return group_of(replace(lived(0, serial), turns=(turn,)), serial=serial)
