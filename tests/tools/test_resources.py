"""Resources of tools are opened once per episode, at first use, and closed with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from running_tools import failure, run, text_of

from agent_r1.core.environment import RolloutContext
from agent_r1.core.messages import Action, ToolCall
from agent_r1.core.task import Task
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.tools.function_tool import Resources, Tool, tool
from agent_r1.tools.tool_errors import ToolErrorKind

Says = Callable[..., Action]
Calls = Callable[..., ToolCall]
Play = Callable[..., list[list[str]]]


@dataclass
class Page:
    """A resource that keeps lines and records its closing in ``notebook``."""

    notebook: Notebook
    lines: list[str] = field(default_factory=list)

    async def close(self) -> None:
        self.notebook.happened.append("closed")
        if "burn" in self.lines:
            raise OSError("it burned")


@dataclass(eq=False)
class Notebook:
    """Opens pages and records their openings and closings."""

    fails: bool = False
    slow: float = 0.0
    happened: list[str] = field(default_factory=list)

    async def open(self, task: Task, context: RolloutContext) -> Page:
        self.happened.append("opened")
        await asyncio.sleep(self.slow)
        if self.fails:
            raise ValueError("no paper")
        return Page(self)

    def tool(self, name: str = "write", timeout: float | None = None) -> Tool:
        @tool(name=name, timeout=timeout)
        async def write(line: str, resources: Resources, seconds: float = 0.0) -> str:
            """Write a line."""
            page = await resources.get(self)
            page.lines.append(line)
            await asyncio.sleep(seconds)
            return "|".join(page.lines)

        return write


@pytest.fixture
def play(task: Task, context: Any, make_action: Says, call: Calls) -> Play:
    def play(env: ToolEnv, *actions: tuple[tuple[str, dict[str, Any]], ...]) -> list[list[str]]:
        async def live() -> list[list[str]]:
            episode = await env.open(task, context())
            try:
                steps = [
                    make_action("", *(call(name, f"c{i}", **given) for i, (name, given) in enumerate(calls)))
                    for calls in actions
                ]
                return [[message.text for message in (await episode.step(action)).messages] for action in steps]
            finally:
                await episode.close()

        return asyncio.run(live())

    return play


def writes(line: str, name: str = "write") -> tuple[str, dict[str, Any]]:
    return name, {"line": line}


def test_calls_of_an_episode_share_a_resource(play: Play) -> None:
    notebook = Notebook(slow=0.05)
    env = ToolEnv([notebook.tool(), notebook.tool("note")])
    _, (after,) = play(env, (writes("a"), writes("b", "note")), (writes("c"),))
    assert sorted(after.split("|")) == ["a", "b", "c"]
    assert notebook.happened == ["opened", "closed"]


def test_episodes_share_nothing(task: Task, context: Any, make_action: Says, call: Calls) -> None:
    notebook = Notebook()
    env = ToolEnv([notebook.tool()])

    async def two_episodes() -> list[str]:
        episodes = [await env.open(task, context(member)) for member in range(2)]
        answers = [
            (await episode.step(make_action("", call("write", line=line)))).messages[0].text
            for episode, line in zip((*episodes, episodes[0]), "abc", strict=True)
        ]
        for episode in episodes:
            await episode.close()
        return answers

    assert asyncio.run(two_episodes()) == ["a", "b", "a|c"]
    assert notebook.happened == ["opened"] * 2 + ["closed"] * 2


def test_a_failed_opening_is_reported_and_not_repeated(play: Play) -> None:
    notebook = Notebook(fails=True)
    answers = play(ToolEnv([notebook.tool()]), (writes("a"),), (writes("b"),))
    assert answers == [["write failed: ValueError: no paper"]] * 2
    assert notebook.happened == ["opened"]


def test_an_opening_continues_if_its_first_call_times_out(play: Play) -> None:
    notebook = Notebook(slow=0.3)
    env = ToolEnv([notebook.tool("hasty", timeout=0.05), notebook.tool()])
    ((hasty, patient),) = play(env, (writes("a", "hasty"), writes("b")))
    assert (hasty, patient) == ("hasty did not finish within 0.05 seconds and was stopped.", "b")
    assert notebook.happened == ["opened", "closed"]


def test_a_call_outside_an_episode_opens_and_closes_its_own_resources(task: Task, context: Any) -> None:
    notebook = Notebook()
    assert text_of(run(notebook.tool(), {"line": "a"}, task, context())) == "a"
    assert notebook.happened == ["opened", "closed"]
    assert failure(notebook.tool(), {}, task, context())[0] == ToolErrorKind.INVALID_ARGUMENTS
    assert notebook.happened == ["opened", "closed"]


@pytest.mark.parametrize(("slow", "happened"), [(0.0, ["opened", "closed"]), (99.0, ["opened"])])
def test_a_cancelled_episode_closes_open_resources_and_cancels_openings(
    slow: float, happened: list[str], task: Task, context: Any, make_action: Says, call: Calls
) -> None:
    notebook = Notebook(slow=slow)
    env = ToolEnv([notebook.tool()])

    async def cancelled() -> set[asyncio.Task[Any]]:
        episode = await env.open(task, context())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await episode.step(make_action("", call("write", line="a", seconds=99)))
        await episode.close()
        return asyncio.all_tasks() - {asyncio.current_task()}  # type: ignore[arg-type]

    assert asyncio.run(cancelled()) == set()
    assert notebook.happened == happened


def test_an_error_at_closing_is_logged_and_the_others_are_closed(
    task: Task, context: Any, caplog: pytest.LogCaptureFixture
) -> None:
    burning, calm = Notebook(), Notebook()

    async def closed() -> None:
        resources = Resources(task, context())
        (await resources.get(burning)).lines.append("burn")
        await resources.get(calm)
        await resources.close()
        await resources.close()
        with pytest.raises(RuntimeError, match="over"):
            await resources.get(calm)

    asyncio.run(closed())
    assert burning.happened == calm.happened == ["opened", "closed"]
    assert "OSError: it burned" in caplog.text


def test_closing_continues_if_its_caller_is_cancelled(task: Task, context: Any) -> None:
    closed = []

    class Slow:
        async def open(self, task: Task, context: RolloutContext) -> Slow:
            return self

        async def close(self) -> None:
            await asyncio.sleep(0.1)
            closed.append(True)

    async def impatient() -> None:
        resources = Resources(task, context())
        await resources.get(Slow())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await resources.close()
        await asyncio.sleep(0.2)

    asyncio.run(impatient())
    assert closed == [True]
