"""The environments of a task set behind OpenEnv's protocol, through the client of the package openenv."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import httpx
import pytest
from extras import requires

from agent_r1 import web
from agent_r1.cli import main
from agent_r1.core.environment import Env, Environments, RolloutContext
from agent_r1.core.errors import AgentR1Error
from agent_r1.core.messages import Message, ToolSpec
from agent_r1.core.task import Task
from agent_r1.core.taskset import TaskSet, script, tool_call
from agent_r1.core.trajectory import total_reward
from agent_r1.rollout.collector import Collector, GroupRequest, NullRecorder, RolloutLimits
from agent_r1.rollout.scripted import ScriptedAgent
from agent_r1.tasksets import build
from agent_r1.workers.openenv import ClientAction, OpenEnvServer, ServedEnvironment
from agent_r1.workers.server import WorkerLimits

pytestmark = requires("openenv", "openenv")

TOKEN = "a long secret"


@pytest.fixture(scope="module")
def taskset() -> TaskSet:
    return build("tinywiki", None, None, 0, None)


@contextmanager
def serving(taskset: TaskSet, **options: Any) -> Iterator[str]:
    """Serve a task set in a thread with an event loop of its own."""
    started, urls, loop, stop = threading.Event(), [], asyncio.new_event_loop(), asyncio.Event()
    server = OpenEnvServer(taskset, options.pop("limits", WorkerLimits(episodes=4)), **options)

    async def serve() -> None:
        server.start()
        urls.append(server.url)
        started.set()
        await stop.wait()
        await server.close()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    started.wait()
    try:
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


@pytest.fixture(scope="module")
def url(taskset: TaskSet) -> Iterator[str]:
    with serving(taskset) as address:
        yield address


def converse(url: str, conversation: Callable[[Any], Awaitable[Any]], **options: Any) -> Any:
    """Return the result of ``await conversation(client)`` with OpenEnv's client in a session of its own."""

    async def run() -> Any:
        client = import_module("openenv.core.generic_client").GenericEnvClient
        async with client(url, **options) as connected:
            return await conversation(connected)

    return asyncio.run(run())


def by_agent_loop(taskset: TaskSet, *actions: Message) -> Any:
    """Return the trajectory of the first task in the agent loop, with scores."""
    agent = ScriptedAgent(taskset.env, lambda attempt: script(*actions))
    collector = Collector(agent, taskset.scorers, NullRecorder(), "run", RolloutLimits())

    async def run() -> Any:
        (group,) = [group async for group in collector.collect([GroupRequest(0, taskset.tasks("train")[0], 1)])]
        return group.trajectories[0]

    return asyncio.run(run())


@pytest.mark.parametrize("right", [True, False])
def test_a_client_sees_the_observations_and_rewards_of_the_agent_loop(url: str, taskset: TaskSet, right: bool) -> None:
    task = taskset.tasks("train")[0]
    (gold,) = task.data["answers"]
    answer = f"<answer>{gold if right else 'nobody'}</answer>"
    expected = by_agent_loop(
        taskset, tool_call("search", query=task.data["chain"].start), tool_call("find"), Message.assistant(answer)
    )

    async def conversation(client: Any) -> list[Any]:
        return [
            await client.reset(split="train", index=0),
            await client.step(
                {"type": "call_tool", "tool_name": "search", "arguments": {"query": task.data["chain"].start}}
            ),
            await client.step({"text": '<tool_call>{"name": "find", "arguments": {}}</tool_call>'}),
            await client.step({"text": answer}),
        ]

    results = converse(url, conversation)
    opening, page, unknown, end = (result.observation for result in results)
    assert [message["content"] for message in opening["messages"]] == [message.text for message in task.messages]
    assert opening["metadata"]["task"] == task.id
    assert [tool["function"]["name"] for tool in opening["metadata"]["tools"]] == ["search"]
    shown = [message.text for message in expected.messages if message.role == "tool"]
    assert [page["text"], unknown["text"]] == shown and gold in shown[0] and "find" in shown[1]
    assert [result.done for result in results] == [False, False, False, True]
    assert [result.reward for result in results] == [None, None, None, float(right)]
    weights = {"f1": 0.0, "found": 0.0}
    assert results[-1].reward == total_reward(expected, weights) and end["metadata"]["status"] == expected.status
    assert end["metadata"]["rewards"] == {"found": 1.0, "em": float(right), "f1": float(right)}


def test_a_seed_chooses_the_task_and_sessions_are_apart(url: str) -> None:
    async def conversation(client: Any) -> list[str]:
        return [(await client.reset(seed=seed)).observation["metadata"]["task"] for seed in (1, 2, 1)]

    first, other, again = converse(url, conversation)
    assert first == again != other

    async def two(client: Any) -> Any:
        async with import_module("openenv.core.generic_client").GenericEnvClient(url) as second:
            await client.reset(index=0)
            await second.reset(index=1)
            return (await client.step({"text": "<answer>x</answer>"})).done, (await second.state())["step_count"]

    assert converse(url, two) == (True, 0)


def test_each_task_has_the_tools_of_its_own_environment(taskset: TaskSet) -> None:
    async def conversation(client: Any) -> list[dict[str, Any]]:
        return (await client.reset(index=0)).observation["metadata"]["tools"]  # type: ignore[no-any-return]

    with serving(replace(taskset, env=Environments({"": taskset.env}))) as url:
        assert [tool["function"]["name"] for tool in converse(url, conversation)] == ["search"]


def test_a_mistake_of_a_client_is_an_error_and_the_session_goes_on(url: str) -> None:
    async def conversation(client: Any) -> float:
        with pytest.raises(RuntimeError, match="no episode has begun"):
            await client.step({"text": "hello"})
        with pytest.raises(RuntimeError, match=r"got split 'train', index 999999; give one of the splits train, "):
            await client.reset(index=999999)
        with pytest.raises(RuntimeError, match="VALIDATION_ERROR"):
            await client.step({"word": "hello"})
        await client.reset(index=0)
        assert (await client.step({"text": "<answer>x</answer>"})).done
        with pytest.raises(RuntimeError, match="it is over; reset"):
            await client.step({"text": "hello"})
        return (await client.reset(index=0)).done

    assert converse(url, conversation) is False


@pytest.mark.parametrize(
    ("path", "message", "reason"),
    [
        *[("reset", {"index": index}, f"task: got split 'train', index {index!r}; ") for index in ("1", True, 1.5, -1)],
        *[("reset", {"split": split}, f"task: got split {split!r}, index None; ") for split in (3, True, [], {})],
        ("reset", {"split": "none"}, "tinywiki split: got none; give one of train, "),
        ("tinywiki/num_tasks", {"split": "none"}, "tinywiki split: got none; give one of train, "),
        *[("step", {"action": action}, "step: got an action, and no episode") for action in ({}, {"text": "hello"})],
    ],
)
def test_a_mistake_of_a_client_over_http_is_one_line(url: str, path: str, message: Any, reason: str) -> None:
    answer = httpx.post(f"{url}/{path}", json=message)
    assert answer.status_code == 422 and answer.json()["detail"].startswith(reason)


def test_tools_are_listed_and_called_by_mcp(url: str, taskset: TaskSet) -> None:
    start = taskset.tasks("train")[0].data["chain"].start

    async def conversation() -> Any:
        async with import_module("openenv.core.mcp_client").MCPToolClient(url) as client:
            (tool,) = await client.list_tools()
            await client.reset(index=0)
            return tool, await client.call_tool("search", query=start)

    tool, page = asyncio.run(conversation())
    assert tool.name == "search" and tool.input_schema == taskset.env.tools[0].parameters
    assert taskset.tasks("train")[0].data["answers"][0] in page
    assert {"name": "validation", "type": "validation"} in httpx.get(f"{url}/tinywiki/splits").json()
    count = httpx.post(f"{url}/tinywiki/num_tasks", json={"split": "train"}).json()["num_tasks"]
    assert count == len(taskset.tasks("train"))


@dataclass
class Counted:
    """An environment that counts its open episodes."""

    env: Env
    tools: tuple[ToolSpec, ...]
    num_open: int = 0

    async def open(self, task: Task, context: RolloutContext) -> Counted:
        self.num_open += 1
        self.episode = await self.env.open(task, context)
        self.start, self.step = self.episode.start, self.episode.step
        return self

    async def close(self) -> None:
        await self.episode.close()
        self.num_open -= 1


def test_an_episode_that_is_left_is_closed(taskset: TaskSet) -> None:
    env = Counted(taskset.env, taskset.env.tools)

    async def leave(client: Any) -> None:
        for _ in range(3):
            await client.reset(index=0)
        assert env.num_open >= 1

    with serving(replace(taskset, env=env)) as url:
        converse(url, leave)
        end = time.monotonic() + 60
        while env.num_open:
            assert time.monotonic() < end
            time.sleep(0.01)


def test_a_step_in_a_session_that_is_closed_meanwhile_has_a_reason(taskset: TaskSet) -> None:
    async def play() -> None:
        session = ServedEnvironment(replace(taskset, scorers=(_Slow(),)))
        await session.reset_async(index=0)
        step = asyncio.create_task(session.step_async(ClientAction(text="<answer>x</answer>")))
        await asyncio.sleep(0.1)
        session.close()
        with pytest.raises(AgentR1Error, match="the session was closed during the action"):
            await step

    asyncio.run(play())


class _Slow:
    async def score(self, group: Any, task: Task) -> Any:
        await asyncio.Event().wait()


def test_a_message_that_would_hold_up_others_is_refused(url: str) -> None:
    async def conversation(client: Any) -> None:
        await client.reset(index=0)
        with pytest.raises(Exception, match="1009"):
            await client.step({"text": "x" * 300_000})

    converse(url, conversation)


def test_a_connection_that_waits_long_is_kept(taskset: TaskSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "HEADER_SECONDS", 0.1)

    async def conversation(client: Any) -> bool:
        await client.reset(index=0)
        await asyncio.sleep(0.5)
        return bool((await client.step({"text": "<answer>x</answer>"})).done)

    with serving(taskset) as url:
        assert converse(url, conversation)


def test_a_token_is_asked_for_and_web_pages_are_refused(
    url: str, taskset: TaskSet, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(taskset, token=TOKEN) as guarded:
        with pytest.raises(ConnectionError):
            converse(guarded, lambda client: client.reset())
        headers = {"Authorization": f"Bearer {TOKEN}"}
        assert not converse(guarded, lambda client: client.reset(), headers=headers).done
        assert httpx.get(f"{guarded}/health").status_code == 401
    assert httpx.get(f"{url}/health").json()["status"] == "healthy"
    assert httpx.get(f"{url}/health", headers={"Origin": "https://example.com"}).status_code == 401
    assert httpx.get(f"{url}/health", headers={"Host": "example.com"}).status_code == 400
    assert main(["serve-env", "tinywiki", "--protocol", "openenv", "--host", "0.0.0.0"]) == 2
    assert "token: got none, and the worker listens on 0.0.0.0" in capsys.readouterr().err
