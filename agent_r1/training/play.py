"""Play an episode in the terminal. A person acts instead of the policy, and sees what the policy would see."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.text import Text as Line

from agent_r1.core.environment import env_of
from agent_r1.core.errors import EngineError, InvalidInput
from agent_r1.core.messages import Message, Text, ToolCall, ToolSpec, parts_text
from agent_r1.core.task import Task
from agent_r1.core.taskset import TaskSet
from agent_r1.rollout.collector import Collector, GroupRequest, NullRecorder, RolloutLimits
from agent_r1.rollout.scripted import ScriptedAgent
from agent_r1.training.metrics import RewardTotals, sum_rewards

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
    taskset: TaskSet, console: Console, *, split: str = "train", number: int | None = None, seed: int = 0
) -> PlayResult:
    """Let a person play one episode: task ``number`` of ``split``, or a random one."""
    tasks = taskset.tasks(split)  # who plays test tasks tunes prompts on them
    if number is None:
        task = random.Random(seed).choice(tasks)
    elif number < len(tasks):
        task = tasks[number]
    else:
        raise InvalidInput("--number", got=number, do=f"give one below {len(tasks)}")
    person = HumanPlayer(console, env_of(taskset.env_for_split(split), task).tools)
    console.print(Line(f"{taskset.name}, task {task.id}"))
    try:
        return asyncio.run(_play(taskset, split, task, person))
    except KeyboardInterrupt:  # Ctrl-C while a tool was running
        return PlayResult(task.id, LEFT, person.turns)


async def _play(taskset: TaskSet, split: str, task: Task, person: HumanPlayer) -> PlayResult:
    agent = ScriptedAgent(taskset.env_for_split(split), lambda attempt: person.respond)
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
