"""Chat in the terminal: a person talks to a model that can call the tools of a task set."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console

from agent_r1.core.environment import RolloutContext, env_of
from agent_r1.core.errors import InvalidInput, shorten
from agent_r1.core.messages import Message, to_openai
from agent_r1.core.task import Task
from agent_r1.core.taskset import TaskSet
from agent_r1.core.trajectory import AttemptId, Status
from agent_r1.envs.tool_env import ToolEnv, ToolEpisode
from agent_r1.gateway.episode import ServedModel
from agent_r1.gateway.server import Gateway
from agent_r1.rollout.agent_loop import Agent, chat_client
from agent_r1.rollout.session import Session, Stopped
from agent_r1.rollout.user_code import format_error
from agent_r1.store.saved_weights import find_folder
from agent_r1.training.build import resolve_placement
from agent_r1.training.config import RunConfig
from agent_r1.training.play import Terminal, format_signature
from agent_r1.training.policy import load_policy

HELP = """\
/tools    list the tools that the model can call
/reset    start a new conversation
/quit     leave; Ctrl-D and Ctrl-C leave too
Anything else is sent to the model. A line that ends with \\ continues on the next one."""

MAX_QUESTION = 2000


@dataclass(frozen=True, slots=True)
class ChatResult:
    messages: tuple[Message, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON output of ``agent-r1 chat``: {"messages": [..]}, with messages in the OpenAI format."""
        return {"messages": list(map(to_openai, self.messages))}


def chat(
    config: RunConfig,
    taskset: TaskSet | None,
    console: Console,
    *,
    temperature: float = 0.0,
    split: str = "",
    number: int = 0,
) -> ChatResult:
    """Let a person talk to the model ``config.model``, with the tools of ``taskset``. Return the last conversation."""
    torch.set_num_threads(config.threads)
    env, task, question = _opening(taskset, split, number)
    policy = load_policy(config, taskset, config.engine.dtype)
    engine = resolve_placement(None, config).engine(policy, config)
    agent = policy.agent(engine, config, temperature)
    terminal = Terminal(console)
    terminal.print(HELP)
    if question:
        terminal.print(f"A question of task {task.id}, whose data the tools use:\n{shorten(question, MAX_QUESTION)}")
    running = _Chat(agent, env, task, terminal)
    try:
        asyncio.run(running.run())
    except KeyboardInterrupt:  # Ctrl-C while the model or a tool was running
        console.print()
    return ChatResult(running.messages)


def _opening(taskset: TaskSet | None, split: str, number: int) -> tuple[ToolEnv, Task, str]:
    if taskset is None:
        return ToolEnv(tools=[]), Task("chat", ()), ""
    split = split or taskset.evaluation[0]
    tasks = taskset.tasks(split)
    if number >= len(tasks):
        raise InvalidInput("--number", got=number, do=f"give one below {len(tasks)}")
    task = tasks[number]
    env = env_of(taskset.env_for_split(split), task)
    if not isinstance(env, ToolEnv):
        got = f"{taskset.name}, whose environment is a {type(env).__name__}"
        raise InvalidInput("task set", got=got, do="give one whose environment is a ToolEnv, or a model alone")
    system = tuple(message for message in task.messages if message.role == "system")
    questions = [message.text for message in task.messages if message.role == "user"]
    return env, replace(task, messages=system), questions[-1] if questions else ""


class _Chat:
    def __init__(self, agent: Agent, env: ToolEnv, task: Task, terminal: Terminal) -> None:
        self._agent, self._env, self._task, self._terminal = agent, env, task, terminal
        self._conversations = 0
        self._session: Session | None = None
        self._episode: ToolEpisode | None = None
        self.messages: tuple[Message, ...] = ()

    async def run(self) -> None:
        try:
            while (text := self._read()) is not None:
                match text.strip():
                    case "":
                        continue
                    case "/reset":
                        await self._close()
                        self._terminal.print("a new conversation")
                    case "/tools":
                        self._terminal.print("\n".join(map(format_signature, self._env.tools)) or "no tools")
                    case "/help" | "?":
                        self._terminal.print(HELP)
                    case _:
                        await self._answer(Message.user(text))
        finally:
            conversation = self.messages
            await self._close()
            self.messages = conversation
            await self._agent.engine.close()

    def _read(self) -> str | None:
        try:
            text = self._terminal.read("you> ")
        except (EOFError, KeyboardInterrupt):
            self._terminal.print("")  # end the line of the open prompt
            return None
        return None if text.strip() in ("/quit", "/exit") else text

    async def _answer(self, message: Message) -> None:
        try:
            session, episode = await self._continue(message)
            episode.num_actions = 0  # the limit of actions applies to each message of the person
            while True:
                action = await session.respond(self.messages, self._env.tools)
                if isinstance(action, Stopped):
                    return self._explain(action)
                self._add(action.message)
                if not action.message.calls:
                    return
                transition = await episode.step(action)
                if transition.end is not None:
                    limit = self._env.max_turns
                    return self._terminal.print(f"({limit} actions in a row are the limit; the calls were not run)")
                session.observe(transition)
                self._add(*transition.messages)
        except Exception as error:  # of the environment, which is code of a user
            self._terminal.print(f"(the environment failed: {format_error(error)})")

    async def _continue(self, message: Message) -> tuple[Session, ToolEpisode]:
        if self._session is not None and self._episode is not None:
            self.messages = (*self.messages, message)
            return self._session, self._episode
        agent, attempt = self._agent, AttemptId("chat", self._task.id, 0, self._conversations)
        self._conversations += 1
        models: Mapping[str, Any] = {"policy": chat_client(agent.engine, agent.renderer, agent.params)}
        context = RolloutContext(attempt, attempt.seed(agent.seed), models=models)
        self._session = agent.open_session(attempt)
        task = Task(self._task.id, (*self._task.messages, message), self._task.data, self._task.split)
        self._episode = await self._env.open(task, context)
        self.messages = self._episode.start
        return self._session, self._episode

    def _add(self, *messages: Message) -> None:
        self.messages = (*self.messages, *messages)
        self._terminal.show(messages)

    def _explain(self, stopped: Stopped) -> None:
        if stopped.status is Status.OUT_OF_TOKENS:
            limit = self._agent.context_length
            self._terminal.print(f"(the context of {limit} tokens is full; /reset starts a new conversation)")
        else:
            self._terminal.print(f"(no answer: {stopped.reason or stopped.status.value})")

    async def _close(self) -> None:
        session, episode = self._session, self._episode
        self._session, self._episode, self.messages = None, None, ()
        if session is not None:
            await session.close()
        if episode is not None:
            await episode.close()


def serve(config: RunConfig, port: int, key: str | None, on_started: Callable[[str, str], None]) -> None:
    """Serve ``config.model`` over HTTP, until SIGINT or SIGTERM arrives.

    Raises InvalidInput if the model cannot be loaded or the port is in use.
    """
    torch.set_num_threads(config.threads)
    found = config.model_copy(update={"model": find_folder(config.model)})
    policy = load_policy(found, None, config.engine.dtype)
    agent = policy.agent(resolve_placement(None, config).engine(policy, config), config, 1.0)
    asyncio.run(_serve(agent, config.model, port, key, on_started))


async def _serve(agent: Agent, name: str, port: int, key: str | None, on_started: Callable[[str, str], None]) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    gateway = Gateway(port)
    try:
        await gateway.start()
        on_started(gateway.base_url, gateway.register(ServedModel(agent, name), key))
        await stopped.wait()
    finally:
        await gateway.close()
        await agent.engine.close()
