"""A person in the terminal: talks to a model that calls the tools of a task set, or plays an episode instead of it."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.text import Text as Line

from agent_r1.core.environment import RolloutContext
from agent_r1.core.errors import EngineError, InvalidInput, shorten
from agent_r1.core.messages import Message, Text, ToolCall, ToolSpec, parts_text, to_openai
from agent_r1.core.task import Task
from agent_r1.core.taskset import TaskSet
from agent_r1.core.trajectory import AttemptId, Status
from agent_r1.envs.tool_env import ToolEnv, ToolEpisode
from agent_r1.gateway.episode import ServedModel
from agent_r1.gateway.server import Gateway
from agent_r1.rollout.agent_loop import Agent, chat_client
from agent_r1.rollout.collector import Collector, GroupRequest, NullRecorder, RolloutLimits
from agent_r1.rollout.scripted import ScriptedAgent
from agent_r1.rollout.session import Session, Stopped
from agent_r1.rollout.user_code import format_error
from agent_r1.store.folder import is_run, run_folder
from agent_r1.training.build import resolve_placement
from agent_r1.training.checkpoint_files import find_trained_model
from agent_r1.training.config import RunConfig
from agent_r1.training.metrics import RewardTotals, sum_rewards
from agent_r1.training.policy import load_policy

HELP = """\
NAME text            call a tool that needs one argument, as in: search Alba
/NAME {"key": ..}    call a tool with its arguments as JSON
?                    show this again; Ctrl-D leaves
Anything else is sent as it is, tags included. A line that ends with \\ continues on the next one."""


def format_signature(tool: ToolSpec) -> str:
    """Return a tool's name, arguments and first line of description, in one line."""
    required = set(tool.parameters.get("required", ()))
    properties: Mapping[str, Mapping[str, Any]] = tool.parameters.get("properties", {})
    arguments = [
        f"{name}{'' if name in required else '?'}: {schema.get('type', 'any')}" for name, schema in properties.items()
    ]
    description = tool.description.splitlines()[0] if tool.description else ""
    return f"{tool.name}({', '.join(arguments)})  {description}".rstrip()


def parse_line(line: str, tools: Sequence[ToolSpec]) -> Message:
    """Return the assistant message for a line that a person typed.

    - "/NAME ARGUMENTS" is a call, even if no tool has this name. ARGUMENTS must be a JSON object.
    - "NAME ARGUMENTS" is a call if a tool has this name. If ARGUMENTS starts with "{", ARGUMENTS must be a JSON object.
      Otherwise, ARGUMENTS is the value of one argument.
    - Any other line is text.
    """
    name, _, rest = line.strip().partition(" ")
    if name.startswith("/") and len(name) > 1:
        return _call_with_json(name[1:], rest.strip() or "{}")
    tool = next((tool for tool in tools if tool.name == name), None)
    if tool is None:
        return Message.assistant(line)
    if rest.lstrip().startswith("{"):
        return _call_with_json(name, rest)
    return _call(name, _single_argument(tool, rest.strip()))


def _single_argument(tool: ToolSpec, text: str) -> Mapping[str, Any]:
    required = tool.parameters.get("required", ())
    names = required if len(required) == 1 else list(tool.parameters.get("properties", {}))[:1]
    if not text or not names:
        return {"": text} if text else {}
    if tool.parameters["properties"][names[0]].get("type") == "string":
        return {names[0]: text}
    try:
        return {names[0]: json.loads(text)}
    except ValueError:
        return {names[0]: text}


def _call_with_json(name: str, arguments: str) -> Message:
    try:
        parsed = json.loads(arguments)
    except ValueError:
        parsed = None
    if isinstance(parsed, dict):
        return _call(name, parsed)
    return Message.assistant(f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>')


def _call(name: str, arguments: Mapping[str, Any]) -> Message:
    return Message("assistant", (Text(""),), (ToolCall("call_0", name, arguments, ""),))


class Terminal:
    """An object that reads lines from standard input (a terminal or a pipe), and prints messages on a console."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def print(self, text: str) -> None:
        """Print a text. Control characters are replaced, so that the text cannot control the terminal."""
        safe = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
        self._console.print(Line(safe), soft_wrap=True)

    def show(self, messages: Sequence[Message]) -> None:
        """Print messages with their calls. An image is printed as its type, its size and its hash."""
        for message in messages:
            calls = (f"{call.name}({json.dumps(call.arguments, ensure_ascii=False)})" for call in message.calls)
            self.print(f"{message.role}: {' '.join(filter(None, (parts_text(message.parts), *calls)))}")

    def read(self, prompt: str = "> ") -> str:
        """Print ``prompt``, and return the text that the person types."""
        text = self._read_line(prompt)
        while text.endswith("\\"):
            text = text[:-1] + "\n" + self._read_line(". ")
        return text

    def _read_line(self, prompt: str) -> str:
        # Ctrl-C raises KeyboardInterrupt at once. asyncio's own handler would wait for the event loop, which is
        # blocked.
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            line = input(prompt)
        finally:
            signal.signal(signal.SIGINT, handler)
        if not sys.stdin.isatty():
            self.print(line)
        return line.encode("utf-8", "replace").decode("utf-8")


EPISODE_SECONDS = 86400.0

LEFT = "left"


@dataclass(frozen=True, slots=True)
class PlayResult:
    """The result of an episode that a person played."""

    task: str
    status: str
    turns: int
    rewards: RewardTotals = field(default_factory=dict)  # the total of each reward; empty if the episode was not scored
    answers: tuple[str, ...] = ()  # the right answers; () if no answer is known
    reason: str | None = None  # why the episode failed; None if it did not fail

    @property
    def text(self) -> str:
        after = f"after {self.turns} {'turn' if self.turns == 1 else 'turns'}"
        if self.status == LEFT:
            return f"left {after}; nothing was scored"
        reason = f" ({self.reason})" if self.reason else ""
        rewards = ", ".join(
            f"{name} {'unscored' if total is None else f'{total:g}'}" for name, total in self.rewards.items()
        )
        gold = [f"gold: {' or '.join(self.answers)}"] if self.answers else []
        return "\n".join([f"{self.status} {after}{reason}", f"rewards: {rewards or 'none'}", *gold])

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class HumanPlayer:
    """A person who acts instead of the policy. If the person leaves, ``respond`` raises EngineError."""

    def __init__(self, console: Console, tools: Sequence[ToolSpec]) -> None:
        self._terminal, self._tools = Terminal(console), tools
        self.shown, self.turns, self.has_left = 0, 0, False

    def respond(self, conversation: tuple[Message, ...], turn: int) -> Message:
        self.show(conversation[self.shown :])
        self.shown, self.turns = len(conversation), turn
        if turn == 0:
            self._print_help()
        try:
            line = self._read()
        except (EOFError, KeyboardInterrupt):
            self.has_left = True
            self._terminal.print("")  # end the line of the open prompt
            raise EngineError("the person left") from None
        self.shown += 1  # the message is on the screen, because the person typed it there
        return parse_line(line, self._tools)

    def show(self, messages: Sequence[Message]) -> None:
        self._terminal.show(messages)

    def _print_help(self) -> None:
        self._terminal.print("\n".join(("", *(f"tool: {format_signature(tool)}" for tool in self._tools), HELP, "")))

    def _read(self) -> str:
        while True:
            text = self._terminal.read()
            if text.strip() == "?":
                self._print_help()
            elif text.strip():
                return text


def play(
    taskset: TaskSet, console: Console, *, split: str = "", number: int | None = None, seed: int = 0
) -> PlayResult:
    """Let a person play one episode: task ``number`` of ``split``, or a random one of the first evaluation split."""
    tasks = taskset.tasks(split or taskset.evaluation[0])
    if number is None:
        task = random.Random(seed).choice(tasks)
    elif number < len(tasks):
        task = tasks[number]
    else:
        raise InvalidInput("--number", got=number, do=f"give one below {len(tasks)}")
    person = HumanPlayer(console, taskset.env_for_split(task.split).tools)
    console.print(Line(f"{taskset.name}, task {task.id}"))
    try:
        return asyncio.run(_play(taskset, task, person))
    except KeyboardInterrupt:  # Ctrl-C while a tool was running
        return PlayResult(task.id, LEFT, person.turns)


async def _play(taskset: TaskSet, task: Task, person: HumanPlayer) -> PlayResult:
    agent = ScriptedAgent(taskset.env_for_split(task.split), lambda attempt: person.respond)
    limits = RolloutLimits(concurrency=1, episode_seconds=EPISODE_SECONDS, retries=0)
    collector = Collector(agent, taskset.scorers, NullRecorder(), "play", limits)
    async with aclosing(collector.collect([GroupRequest(0, task, 1)])) as groups:
        (trajectory,) = [group.trajectories[0] async for group in groups]
    if person.has_left:
        return PlayResult(task.id, LEFT, person.turns)
    person.show(trajectory.messages[person.shown :])
    rewards = sum_rewards(trajectory) if trajectory.rewards else {}  # a failed episode has no rewards
    status, turns = trajectory.status.value, len(trajectory.turns)
    return PlayResult(task.id, status, turns, rewards, _gold_answers(taskset, task), trajectory.reason)


def _gold_answers(taskset: TaskSet, task: Task) -> tuple[str, ...]:
    answers = task.data.get("answers", ())
    if answers:
        return (answers,) if isinstance(answers, str) else tuple(map(str, answers))
    with suppress(Exception):  # an error in a user's solutions must not lose the result of the episode
        solutions = taskset.solutions(task).gold if taskset.solutions else ()
        messages = [solution.respond(task.messages, 0) for solution in solutions]
        return tuple(message.text for message in messages if not message.calls)[:1]
    return ()


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
    env, tasks = taskset.env_for_split(split), taskset.tasks(split)
    if not isinstance(env, ToolEnv):
        got = f"{taskset.name}, whose environment is a {type(env).__name__}"
        raise InvalidInput("task set", got=got, do="give one whose environment is a ToolEnv, or a model alone")
    if number >= len(tasks):
        raise InvalidInput("--number", got=number, do=f"give one below {len(tasks)}")
    task = tasks[number]
    system = tuple(message for message in task.messages if message.role == "system")
    questions = [message.text for message in task.messages if message.role == "user"]
    return env, Task(task.id, system, task.data, task.split), questions[-1] if questions else ""


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
    """Serve ``config.model`` over HTTP, until SIGINT or SIGTERM arrives."""
    torch.set_num_threads(config.threads)
    folder = run_folder(config.model)
    name = str(find_trained_model(folder)) if is_run(folder) else config.model
    policy = load_policy(config.model_copy(update={"model": name}), None, config.engine.dtype)
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
