"""The environments of a task set behind the protocol of OpenEnv, so that trainers of other projects can use them.

In each session, a client acts as the policy of the agent loop. So it sees the observations and rewards of a run.
"""

from __future__ import annotations

import asyncio
import hmac
import random
import secrets
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from agent_r1.core.environment import env_of
from agent_r1.core.errors import AgentR1Error, InvalidInput, import_extra
from agent_r1.core.messages import Message, Text, ToolCall, join_texts, parts_text, to_openai
from agent_r1.core.task import Task
from agent_r1.core.taskset import TaskSet
from agent_r1.core.trajectory import STATUS_POLICY, Trajectory, total_reward, weighted_rewards
from agent_r1.rollout.collector import Collector, GroupRequest, NullRecorder, RolloutLimits
from agent_r1.web import BackgroundServer
from agent_r1.workers.server import LOOPBACK_NAMES, WorkerLimits, check_token, is_loopback

EPISODE_SECONDS = 86_400.0
WEIGHT = "reward_weights."


class ClientAction(BaseModel):
    """An action: a text, which can have calls as ``<tool_call>{..}</tool_call>``, or a call, perhaps with a text."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text", "call_tool"] = "text"
    text: str = ""
    tool_name: str = ""
    arguments: dict[str, Any] = {}
    metadata: dict[str, Any] = {}

    def message(self) -> Message:
        calls = (ToolCall("call_0", self.tool_name, self.arguments, ""),) if self.type == "call_tool" else ()
        return Message("assistant", (Text(self.text),), calls)


class ClientObservation(BaseModel):
    """What a client sees after an action, or after the reset.

    ``reward`` is the total that a run trains on, at the end of the episode. ``metadata`` has the task and its tools at
    the beginning, and at the end the status and each reward.
    """

    text: str = ""
    messages: list[dict[str, Any]] = []  # the new messages, in the form of OpenAI
    done: bool = False
    reward: float | None = None
    metadata: dict[str, Any] = {}


class ServedEnvironment:
    """The environment of a client's session for OpenEnv's server, and the client of MCP with which it calls tools."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, taskset: TaskSet) -> None:
        self._taskset = taskset
        self._attempt: asyncio.Task[Trajectory] | None = None
        self._conversations: asyncio.Queue[tuple[Message, ...]] = asyncio.Queue()
        self._actions: asyncio.Queue[Message] = asyncio.Queue()
        self._num_shown = 0  # messages that the client knows
        self.state = {"step_count": 0}
        self._env = taskset.env  # of the task
        self.mcp_client = self

    def get_metadata(self) -> dict[str, str]:
        return {"name": self._taskset.name, "description": f"The environment of the task set {self._taskset.name}."}

    async def reset_async(
        self, seed: int | None = None, split: str = "train", index: int | None = None, **others: Any
    ) -> ClientObservation:
        """Begin an episode with a task of a split: the one at ``index``, or one that ``seed`` chooses."""
        self.close()
        seed = secrets.randbits(31) if seed is None else seed
        tasks = self._taskset.tasks(split) if isinstance(split, str) else ()
        if not tasks or (index is not None and (type(index) is not int or not 0 <= index < len(tasks))):
            do = f"give one of the splits {', '.join(self.list_splits())}, and an index below its number of tasks"
            raise InvalidInput("task", got=f"split {split!r}, index {index!r}", do=do)
        task = tasks[random.Random(seed).randrange(len(tasks)) if index is None else index]
        self._conversations, self._actions = asyncio.Queue(), asyncio.Queue()
        self._num_shown, self.state = 0, {"step_count": 0}
        self._env = env_of(self._taskset.env_for_split(split), task)
        self._attempt = asyncio.create_task(self._play(task, seed))
        tools = [tool.to_openai() for tool in self._env.tools]
        return (await self._observe(self._attempt)).model_copy(update={"metadata": {"task": task.id, "tools": tools}})

    async def step_async(self, action: ClientAction, timeout_s: float | None = None) -> ClientObservation:
        if self._attempt is None or self._attempt.done():
            got = "an action, and no episode has begun, or it is over"
            raise InvalidInput("step", got=got, do="reset the environment in the same session, of a WebSocket")
        self.state["step_count"] += 1
        self._actions.put_nowait(action.message())
        return await self._observe(self._attempt)

    def close(self) -> None:
        """End the episode. The server calls this in another thread."""
        if self._attempt is not None:
            with suppress(RuntimeError):  # the event loop is closed
                self._attempt.get_loop().call_soon_threadsafe(self._attempt.cancel)

    async def _play(self, task: Task, seed: int) -> Trajectory:
        from agent_r1.rollout.scripted import ScriptedAgent  # imported here, because it imports transformers

        conversations, actions = self._conversations, self._actions

        async def respond(conversation: tuple[Message, ...], turn: int) -> Message:
            conversations.put_nowait(conversation)
            return await actions.get()

        agent = ScriptedAgent(self._env, lambda attempt: respond)
        limits = RolloutLimits(concurrency=1, episode_seconds=EPISODE_SECONDS, retries=0)
        collector = Collector(agent, self._taskset.scorers, NullRecorder(), "openenv", limits, seed=seed)
        async with aclosing(collector.collect([GroupRequest(0, task, 1)])) as groups:
            (trajectory,) = [group.trajectories[0] async for group in groups]
            return trajectory

    async def _observe(self, attempt: asyncio.Task[Trajectory]) -> ClientObservation:
        asked = asyncio.create_task(self._conversations.get())
        await asyncio.wait([asked, attempt], return_when=asyncio.FIRST_COMPLETED)
        if attempt.cancelled():
            asked.cancel()
            raise AgentR1Error("the session was closed during the action: its client left, or was idle for too long")
        conversation = asked.result() if asked.done() else attempt.result().messages
        new = conversation[self._num_shown :]
        self._num_shown = len(conversation) + 1  # with the client's next action
        text = join_texts(parts_text(message.parts) for message in new)
        observation = ClientObservation(text=text, messages=[to_openai(message) for message in new])
        if asked.done():
            return observation
        asked.cancel()
        trajectory = attempt.result()
        if STATUS_POLICY[trajectory.status] != "train":
            raise AgentR1Error(f"{trajectory.status}: {trajectory.reason}")
        recipe = self._taskset.recipe.items()
        weights = {name.removeprefix(WEIGHT): value for name, value in recipe if name.startswith(WEIGHT)}
        rewards: dict[str, float] = {}
        for reward in weighted_rewards(trajectory, {}):
            rewards[reward.name] = rewards.get(reward.name, 0.0) + reward.value
        metadata = {"status": trajectory.status.value, "rewards": rewards}
        total = total_reward(trajectory, weights)
        return observation.model_copy(update={"done": True, "reward": total, "metadata": metadata})

    def list_splits(self) -> list[str]:
        others = (self._taskset.validation, *self._taskset.evaluation)
        return list(dict.fromkeys(["train", *filter(None, others)]))

    def num_tasks(self, split: str) -> int:
        return len(self._taskset.tasks(split))

    # ---- tools by MCP

    @asynccontextmanager
    async def mcp_session(self) -> AsyncIterator[None]:
        yield

    def is_connected(self) -> bool:
        return True

    async def list_tools(self) -> list[dict[str, Any]]:
        return [
            {"name": tool.name, "description": tool.description, "input_schema": dict(tool.parameters)}
            for tool in self._env.tools
        ]

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> dict[str, str]:
        action = ClientAction(type="call_tool", tool_name=name, arguments=arguments)
        return {"data": (await self.step_async(action)).text}


class _Guard:
    # OpenEnv's server asks for no token, and would answer web pages that the user of this machine visits.

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope.get("headers", ()))
        given = headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        allowed = hmac.compare_digest(given, self._token.encode()) if self._token else b"origin" not in headers
        refusal: ASGIApp = JSONResponse({"error": "the token is missing or wrong"}, 401)
        if scope["type"] == "websocket":
            refusal = WebSocketClose(1008)
        await (self._app if allowed or scope["type"] == "lifespan" else refusal)(scope, receive, send)


class OpenEnvServer:
    """A server of OpenEnv with the environments of a task set, in the event loop of the caller."""

    def __init__(
        self, taskset: TaskSet, limits: WorkerLimits, *, token: str = "", host: str = "127.0.0.1", port: int = 0
    ) -> None:
        check_token(host, token)
        http_server = import_extra("openenv.core.env_server.http_server", extra="openenv")
        types = import_extra("openenv.core.env_server.types", extra="openenv")
        taskset = replace(taskset, tasks=cache(taskset.tasks))
        config = types.ConcurrencyConfig(max_concurrent_envs=limits.episodes, session_timeout=limits.idle_seconds)
        make_app = partial(http_server.create_fastapi_app, concurrency_config=config, env_name=taskset.name)
        self._app = make_app(partial(ServedEnvironment, taskset), ClientAction, ClientObservation)
        # Else a request over HTTP that cannot be used would be answered with status 500.
        self._app.add_exception_handler(InvalidInput, lambda _, error: JSONResponse({"detail": str(error)}, 422))
        hosts = [*LOOPBACK_NAMES, host] if is_loopback(host) else ["*"]
        self._app.add_middleware(_Guard, token=token)
        self._app.add_middleware(TrustedHostMiddleware, allowed_hosts=hosts)
        self._host, self._port = host, port
        self._server: BackgroundServer | None = None

    @property
    def url(self) -> str:
        assert self._server is not None, "the server was not started"
        return f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{self._server.port}"

    def start(self) -> None:
        """Start to answer requests in the event loop of the caller. Raise InvalidInput if the port is in use."""
        self._server = BackgroundServer(self._app, self._host, self._port, lifespan="on")

    async def close(self) -> None:
        if self._server is not None:
            await self._server.close()
