"""Trajectories as episodes leave them, small and complete."""

from collections.abc import Callable
from pathlib import Path

import pytest

from agent_r1.core.acting import Span
from agent_r1.core.attempt import Attempt
from agent_r1.core.messages import Action, Call, Message, Text
from agent_r1.core.task import ToolResult
from agent_r1.core.trajectory import Status, Trajectory, Turn


def make_turn(index: int) -> Turn:
    call = Call("call_0", "search", {"query": "Alba", "k": 3}, '{"name": "search"}')
    return Turn(
        index=index,
        parent=index - 1 if index else None,
        new_ids=(5, 6, 7 + index),
        action_ids=(9, 2),
        logprobs=(-0.1 / 3, -1e-17),
        spans=(Span(0, 4), Span(1, 5)),
        stop="stop",
        action=Action(Message.assistant("look", (call,), reasoning="who?"), "look <tool_call>"),
        observation=(Message.tool("Alba : capital Bruno .", "call_0"),),
        results=(ToolResult((Text("Alba"),), True, None, {"titles": ("Alba", "Bruno")}, 0.25),),
        rewards={"format": -0.5},
    )


@pytest.fixture
def live() -> Callable[..., Trajectory]:
    """``live(group, member, turns)`` is a trajectory of one attempt in the run ``demo``."""

    def make(group: int = 0, member: int = 0, turns: int = 3) -> Trajectory:
        attempt = Attempt("demo", f"style-a/{group}", group, member)
        return Trajectory(
            attempt=attempt,
            task_id=attempt.task,
            turns=tuple(make_turn(index) for index in range(turns)),
            status=Status.OUT_OF_TURNS,
            truncated=True,
            rewards={"exact_match": 1.0, "steps": tuple(0.5 for _ in range(turns)), "judge": None},
            reason="no turns left",
            start=(Message.system("Answer."), Message.user("Who rules Alba?")),
            seconds=1.5,
        )

    return make


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the run of a test goes; it does not exist yet."""
    return tmp_path / "runs" / "demo"
