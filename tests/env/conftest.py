"""What the tests of the environment need again and again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from sandboxed import sandbox_or_skip

from agent_r1.core.attempt import Attempt
from agent_r1.core.messages import Action, Call, Message
from agent_r1.core.task import Task, ToolResult
from agent_r1.core.trajectory import Status, Trajectory, Turn
from agent_r1.core.world import Context
from agent_r1.env.sandbox import Limits, Sandbox


@pytest.fixture(scope="session")
def task() -> Task:
    return Task("t/1", (Message.user("Who rules Alba?"),), {"answers": ("Bruno", "Bruno I")})


@pytest.fixture(scope="session")
def context() -> Callable[[int], Context]:
    """The context of attempt number ``member``."""
    return lambda member=0: Context(Attempt("run", "t/1", 0, member), seed=member)


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
        return Trajectory(Attempt("run", "t/1", 0, 0), "t/1", made, status)

    return build


@pytest.fixture(scope="session")
def call() -> Callable[..., Call]:
    """A well-formed call with an id."""
    return lambda name, id="c0", /, **arguments: Call(id, name, arguments, "")


@pytest.fixture(scope="session")
def sandbox() -> Sandbox:
    """The default level, small limits."""
    return sandbox_or_skip(Limits(seconds=5, memory=2**28, disk=2**20, output=1000))
