"""Environments on workers: the same results as in the process of the run, and what happens if a worker fails."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from served_environments import DESCRIPTION, serving

from agent_r1.cli import main
from agent_r1.core.environment import RolloutContext, Transition
from agent_r1.core.errors import InvalidInput
from agent_r1.core.messages import Action, Image, Message, Text, ToolResult, ToolSpec
from agent_r1.core.task import Task
from agent_r1.core.trajectory import AttemptId
from agent_r1.workers.client import (
    RemoteEnv,
    RemoteEnvironmentError,
    WorkerError,
    WorkerPool,
    check_workers,
)
from agent_r1.workers.protocol import TOKEN_VARIABLE, EnvironmentConfig
from agent_r1.workers.server import EnvironmentWorker, WorkerLimits

PIXEL = Image.from_data_url(
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
ACTION = Action(Message.assistant("look"), "look")


@dataclass
class Scripted:
    """An environment, and an episode of it, whose steps a function takes."""

    respond: Callable[[Action, RolloutContext], Awaitable[Transition]]
    tools: tuple[ToolSpec, ...] = ()
    start: tuple[Message, ...] = (Message("user", (PIXEL, Text("Look."))),)
    opened: list[tuple[Task, RolloutContext]] = field(default_factory=list)
    num_closed: int = 0

    async def open(self, task: Task, context: RolloutContext) -> Scripted:
        self.opened.append((task, context))
        return self

    async def step(self, action: Action) -> Transition:
        return await self.respond(action, self.opened[-1][1])

    async def close(self) -> None:
        self.num_closed += 1


async def seen(action: Action, context: RolloutContext) -> Transition:
    result = ToolResult((PIXEL, Text("a map")), True, None, {"titles": ("Alba", 1.5), 3: None}, 0.25)
    message = Message("tool", result.parts, call_id="call_0")
    return Transition((message,), {"seen": 1.0}, None, (result,), ({"found": 0.1 + 0.2},))


def context_of(**models: Any) -> RolloutContext:
    return RolloutContext(AttemptId("run", "t", 3, 1, 2), seed=2**60 + 1, models=models)


def visit(visiting: Callable[[RemoteEnv], Awaitable[Any]], *workers: EnvironmentWorker, **limits: Any) -> Any:
    """Return the result of ``await visiting(env)`` with an environment on workers."""
    config = EnvironmentConfig(workers=tuple(worker.url for worker in workers), **limits)

    async def run() -> Any:
        pool = WorkerPool(config, DESCRIPTION)
        try:
            return await visiting(RemoteEnv(Scripted(seen), "env", pool))
        finally:
            await pool.close()

    return asyncio.run(run())


def test_tasks_and_outcomes_arrive_as_they_were() -> None:
    env, data = Scripted(seen), {"answers": ("Bruno",), "size": 0.1, 7: [None, {"deep": (1, 2)}]}
    task = Task("t/1", [Message.system("Answer."), Message("user", (Text("Where?"), PIXEL))], data, "validation")

    async def play(remote: RemoteEnv) -> tuple[Message, ...]:
        episode = await remote.open(task, context_of())
        assert await episode.step(ACTION) == await seen(ACTION, context_of())
        await episode.close()
        return episode.start

    with serving({"env": env}) as worker:
        start = visit(play, worker)
        assert (worker.num_episodes, env.num_closed) == (0, 1)
    assert start == env.start and start[0].images[0].data == PIXEL.data
    ((arrived, context),) = env.opened
    assert arrived == task and arrived.data == data and arrived.messages[1].images[0].data == PIXEL.data
    assert (context.id, context.seed) == (context_of().id, context_of().seed)


def test_errors_and_values_that_cannot_be_sent_name_their_cause() -> None:
    async def fail(action: Action, context: RolloutContext) -> Transition:
        if action.text == "raise":
            raise ValueError("no such page")
        return Transition((), results=(ToolResult((), True, data=object()),))

    async def play(remote: RemoteEnv) -> None:
        with pytest.raises(RemoteEnvironmentError, match="no task 't' of the split 'train' with this data"):
            await remote.open(Task("t", "?", {"answers": {"Bruno", "Alba"}}), context_of())
        episode = await remote.open(own, context_of())
        with pytest.raises(RemoteEnvironmentError, match=r"ValueError: no such page \(test_environment_workers.py"):
            await episode.step(Action(Message.assistant(""), "raise"))
        with pytest.raises(RemoteEnvironmentError, match="data of a tool result has an object of type object"):
            await episode.step(ACTION)
        await episode.close()

    env, own = Scripted(fail), Task("t", "?", {"answers": {"Bruno"}})
    with serving({"env": env}, tasks={"train": [own]}) as worker:
        visit(play, worker)
    assert env.opened[0][0] is own


def test_an_environment_queries_models_of_the_run() -> None:
    async def ask(action: Action, context: RolloutContext) -> Transition:
        both = [context.models["user"]((Message("user", (Text(text), PIXEL)),)) for text in ("one", "two")]
        replies = await asyncio.gather(*both, context.models["judge"](()), return_exceptions=True)
        return Transition(tuple(Message.user(str(getattr(reply, "text", reply))) for reply in replies))

    async def user(messages: tuple[Message, ...]) -> Message:
        return Message.assistant(f"{messages[0].text} with {len(messages[0].images[0].data)} bytes")

    async def judge(messages: tuple[Message, ...]) -> Message:
        raise ValueError("no judge")

    async def play(remote: RemoteEnv) -> list[str]:
        episode = await remote.open(Task("t", "?"), context_of(user=user, judge=judge))
        transition = await episode.step(ACTION)
        await episode.close()
        return [message.text for message in transition.messages]

    with serving({"env": Scripted(ask)}) as worker:
        one, two, failed = visit(play, worker)
    assert (one, two) == tuple(f"{text} with {len(PIXEL.data)} bytes" for text in ("one", "two"))
    assert failed.startswith("ValueError: no judge")


def test_a_worker_has_no_more_episodes_than_its_limit_and_closes_those_that_are_idle() -> None:
    env = Scripted(seen)

    async def play(remote: RemoteEnv) -> None:
        first = await remote.open(Task("t", "?"), context_of())
        second = asyncio.ensure_future(remote.open(Task("t", "?"), context_of()))
        for _ in range(5):  # longer than a second episode takes to open
            await first.step(ACTION)
        assert len(env.opened) == 1
        await first.close()
        idle = await second
        while worker.num_episodes:
            await asyncio.sleep(0.01)
        with pytest.raises(WorkerError, match="no such episode"):
            await idle.step(ACTION)

    with serving({"env": env}, limits=WorkerLimits(idle_seconds=0.2)) as worker:
        visit(play, worker, episodes=1)
    assert env.num_closed == 2


def test_a_worker_that_hangs_fails_its_attempts_and_gets_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_r1.workers.client.STALL_SECONDS", 2.0)
    released = threading.Event()

    async def hang(action: Action, context: RolloutContext) -> Transition:
        released.wait()  # it blocks the event loop of the worker
        return Transition(())

    async def play(remote: RemoteEnv) -> None:
        stuck = await remote.open(Task("t", "?"), context_of())
        with pytest.raises(WorkerError, match="it does not report its health: ReadTimeout"):
            await stuck.step(ACTION)
        others = [await remote.open(Task("t", "?"), context_of()) for _ in range(3)]
        with pytest.raises(WorkerError, match="failed"):
            await stuck.step(ACTION)
        released.set()
        for episode in (stuck, *others):
            await episode.close()

    other = Scripted(seen)
    with serving({"env": Scripted(hang)}) as hanging, serving({"env": other}) as working:
        try:
            visit(play, hanging, working)
        finally:
            released.set()  # otherwise the worker could not stop
    assert len(other.opened) == other.num_closed == 3


def test_a_worker_that_comes_back_is_used_if_it_has_the_same_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_r1.workers.client.RECHECK_SECONDS", 0.0)

    async def play(remote: RemoteEnv) -> None:
        with serving({"env": Scripted(seen)}, port=0) as worker:
            port = int(worker.url.rpartition(":")[2])
            pool = WorkerPool(EnvironmentConfig(workers=(worker.url,)), DESCRIPTION)
            gone = await RemoteEnv(Scripted(seen), "env", pool).open(Task("t", "?"), context_of())
        with pytest.raises(WorkerError, match="ConnectError"):
            await gone.step(ACTION)
        other = DESCRIPTION.model_copy(update={"fingerprints": {"tasks": "x"}})
        back = serving({"env": Scripted(seen)}, other, port=port)
        with back, pytest.raises(WorkerError, match="it came back with other tasks"):
            await RemoteEnv(Scripted(seen), "env", pool).open(Task("t", "?"), context_of())
        with serving({"env": Scripted(seen)}, port=port):
            await (await RemoteEnv(Scripted(seen), "env", pool).open(Task("t", "?"), context_of())).close()
        await pool.close()

    with serving({}) as unused:
        visit(play, unused)


@pytest.mark.parametrize(
    ("changes", "token", "message"),
    [
        ({}, "another token", "the token is missing or wrong: set AGENT_R1_WORKER_TOKEN"),
        ({"taskset": "other"}, "the token", "with the task set 't' instead of 'other'"),
        ({"fingerprints": {"tasks": "a", "tools": "c"}}, "the token", "with other tools (by their sha256)"),
    ],
)
def test_a_worker_that_does_not_fit_is_refused_in_one_line(
    changes: dict[str, Any], token: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, token)
    with serving({}, token="the token") as worker, pytest.raises(InvalidInput) as refused:
        check_workers(EnvironmentConfig(workers=(worker.url,)), DESCRIPTION.model_copy(update=changes))
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_a_token_with_a_line_end_is_sent_without_it_and_no_message_repeats_a_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving({}, token="the token") as worker:
        monkeypatch.setenv(TOKEN_VARIABLE, "the token\n")
        check_workers(EnvironmentConfig(workers=(worker.url,)), DESCRIPTION)
        monkeypatch.setenv(TOKEN_VARIABLE, "the token\nanother line")
        with pytest.raises(InvalidInput, match=f"{TOKEN_VARIABLE}: got 22 characters") as refused:
            check_workers(EnvironmentConfig(workers=(worker.url,)), DESCRIPTION)
    assert "the token" not in str(refused.value)


def test_requests_that_a_web_page_could_send_are_refused() -> None:
    with serving({}) as worker:
        assert (
            httpx.post(f"{worker.url}/episodes", content=b"{}", headers={"content-type": "text/plain"}).status_code
            == 415
        )
        assert httpx.get(f"{worker.url}/health", headers={"host": "evil.example"}).status_code == 400


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve-env", "tinywiki", "--host", "0.0.0.0"], "token: got none, and the worker listens on 0.0.0.0"),
        (["serve-env", "tinywiki", "--token", "short"], "token: got 5 characters"),
        (["train", "--environment.workers", "http://127.0.0.1:9"], "environment worker: got http://127.0.0.1:9"),
        (["train", "--environment.workers", "127.0.0.1:9"], "is not an address"),
        (["train", "--environment.episodes", "3"], "only with environment.workers"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
