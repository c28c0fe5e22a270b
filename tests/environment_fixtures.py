"""What the tests of the environment need again and again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from sandboxed import sandbox_or_skip

from agent_r1.core.attempt_id import AttemptId
from agent_r1.core.environment import RolloutContext
from agent_r1.core.messages import Action, Message, ToolCall
from agent_r1.core.task import Task
from agent_r1.core.tool import ToolResult
from agent_r1.core.trajectory import Status, Trajectory, Turn
from agent_r1.sandbox import Limits, Sandbox


@pytest.fixture(scope="session")
def task() -> Task:
    return Task("t/1", (Message.user("Who rules Alba?"),), {"answers": ("Bruno", "Bruno I")})


@pytest.fixture(scope="session")
def context() -> Callable[[int], RolloutContext]:
    """The context of attempt number ``member``."""
    return lambda member=0: RolloutContext(AttemptId("run", "t/1", 0, member), seed=member)


@pytest.fixture(scope="session")
def says() -> Callable[..., Action]:
    """An action that says a text and makes calls."""
    return lambda text="", *calls: Action(Message.assistant(text, calls), text)


@pytest.fixture(scope="session")
def attempt_of() -> Callable[..., Trajectory]:
    """The trajectory of some actions, each with the results of its calls."""

    def build(*turns: tuple[Action, Sequence[ToolResult]], status: Status = Status.COMPLETED) -> Trajectory:
        made = tuple(
            Turn(index, index - 1 if index else None, (), (), (), (), "stop", action, results=tuple(results))
            for index, (action, results) in enumerate(turns)
        )
        return Trajectory(AttemptId("run", "t/1", 0, 0), "t/1", made, status)

    return build


@pytest.fixture(scope="session")
def call() -> Callable[..., ToolCall]:
    """A well-formed call with an id."""
    return lambda name, id="c0", /, **arguments: ToolCall(id, name, arguments, "")


@pytest.fixture(scope="session")
def sandbox() -> Sandbox:
    """The default level, small limits."""
    return sandbox_or_skip(Limits(seconds=5, memory=2**28, disk=2**20, output=1000))
