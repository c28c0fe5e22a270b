"""A person plays an episode: sees what a policy sees, says what a policy may say, and is scored like one."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.text import Text as Line

from agent_r1.core.errors import EngineError, InvalidInput
from agent_r1.core.messages import Media, Message
from agent_r1.core.task import Task
from agent_r1.core.taskset import TaskSet
from agent_r1.core.tool import ToolSpec
from agent_r1.core.trajectory import Trajectory
from agent_r1.rollout.collector import Collector, Limits, Order
from agent_r1.rollout.scripted_agent import Performer
from agent_r1.training.config import PlayConfig
from agent_r1.training.human_input import HELP, read, signature
from agent_r1.training.null_recorder import Unrecorded, at_once
from agent_r1.training.reward_totals import Marks, marks_of

PATIENCE = 86400.0
"""Seconds that an episode may take: a person thinks."""


LEFT = "left"
"""The status of an episode whose person did not wait for its end."""


@dataclass(frozen=True, slots=True)
class Played:
    """An episode that was played, and the right answers where its task has any.

    Example:
        Played("style-a/7", "completed", 3, {"em": 1.0, "f1": 1.0}, ("Bruno",))
    """

    task: str
    status: str
    turns: int
    rewards: Marks = field(default_factory=dict)
    answers: tuple[str, ...] = ()
    reason: str | None = None

    @property
    def text(self) -> str:
        """The end of the episode, as a person reads it."""
        after = f"after {self.turns} {'turn' if self.turns == 1 else 'turns'}"
        if self.status == LEFT:
            return f"left {after}; nothing was scored"
        why = f" ({self.reason})" if self.reason else ""
        rewards = ", ".join(
            f"{name} {'unscored' if mark is None else f'{mark:g}'}" for name, mark in self.rewards.items()
        )
        gold = [f"gold: {' or '.join(self.answers)}"] if self.answers else []
        return "\n".join([f"{self.status} {after}{why}", f"rewards: {rewards or 'none'}", *gold])

    def to_json(self) -> dict[str, Any]:
        """The JSON of ``play``."""
        return asdict(self)


class Person:
    """The ``Act`` of a person: shows what is new in the conversation, and reads what is said next.

    Leaving (Ctrl-D, Ctrl-C, the end of a pipe) fails the engine, as nothing more will be said.
    """

    def __init__(self, console: Console, tools: Sequence[ToolSpec]) -> None:
        self._console, self._tools = console, tools
        self.seen, self.turns, self.left = 0, 0, False

    def act(self, conversation: tuple[Message, ...], turn: int) -> Message:
        self.show(conversation[self.seen :])
        self.seen, self.turns = len(conversation), turn
        if turn == 0:
            self._help()
        try:
            line = self._said()
        except (EOFError, KeyboardInterrupt):
            self.left = True
            self._print("")  # the prompt stands open
            raise EngineError("the person left") from None
        self.seen += 1  # what was typed need not be shown
        return read(line, self._tools)

    def show(self, messages: Sequence[Message]) -> None:
        for message in messages:
            parts = (f"[{part.mime}]" if isinstance(part, Media) else part.text for part in message.parts)
            self._print(f"{message.role}: {''.join(parts)}")

    def _help(self) -> None:
        self._print("\n".join(("", *(f"tool: {signature(tool)}" for tool in self._tools), HELP, "")))

    def _said(self) -> str:
        """The next line that is not empty, with those it goes on in."""
        said = _line("> ", self._print)
        if said.strip() == "?":
            self._help()
        while said.endswith("\\"):
            said = said[:-1] + "\n" + _line(". ", self._print)
        return said if said.strip() not in ("", "?") else self._said()

    def _print(self, text: str) -> None:
        """As it stands; a page must not be able to steer the terminal."""
        safe = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
        self._console.print(Line(safe), soft_wrap=True)


def _line(prompt: str, echo: Callable[[str], None]) -> str:
    """A typed line; one that comes from a pipe is shown, as a terminal shows what is typed.

    It is waited for in the event loop's own thread. There Ctrl-C has to raise: asyncio's handler would only tell the
    loop, which is waiting here.
    """
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        line = input(prompt)
    finally:
        signal.signal(signal.SIGINT, handler)
    if not sys.stdin.isatty():
        echo(line)
    return line.encode("utf-8", "replace").decode("utf-8")


def play(config: PlayConfig, world: TaskSet, console: Console) -> Played:
    """One episode, in the terminal or from a pipe. Raises InvalidInput where there is no such task."""
    task = _chosen(config, world)
    person = Person(console, world.env_for_split(task.split).tools)
    console.print(Line(f"{world.name}, task {task.id}"))
    try:
        return asyncio.run(_play(world, task, person))
    except KeyboardInterrupt:  # while a tool was at work
        return _left(task, person)


def _chosen(config: PlayConfig, world: TaskSet) -> Task:
    tasks = world.tasks(config.split or world.evaluation[0])
    if config.number is None:
        return random.Random(config.seed).choice(tasks)
    if config.number >= len(tasks):
        raise InvalidInput("--number", got=config.number, do=f"give one below {len(tasks)}")
    return tasks[config.number]


async def _play(world: TaskSet, task: Task, person: Person) -> Played:
    performer = Performer(world.env_for_split(task.split), lambda attempt: person.act)
    limits = Limits(concurrency=1, episode_seconds=PATIENCE, retries=0)
    collector = Collector(performer.agent, performer, world.scorers, Unrecorded(), "play", limits)
    async with aclosing(collector.collect([Order(0, task, 1)], at_once)) as groups:
        (lived,) = [group.trajectories[0] async for group in groups]
    if person.left:
        return _left(task, person)
    person.show(lived.messages[person.seen :])
    gold = _gold(world, task)
    return Played(task.id, lived.status.value, len(lived.turns), _earned(lived), gold, reason=lived.reason)


def _gold(world: TaskSet, task: Task) -> tuple[str, ...]:
    """The answers that a task names; without any, what the first right solution says that needs no tool."""
    named = task.data.get("answers", ())
    if named:
        return (named,) if isinstance(named, str) else tuple(map(str, named))
    with suppress(Exception):  # solutions may be a user's: a broken one must not cost the episode that was played
        said = [each.act(task.messages, 0) for each in world.solutions(task).gold] if world.solutions else []
        return tuple(message.text for message in said if not message.calls)[:1]
    return ()


def _left(task: Task, person: Person) -> Played:
    return Played(task.id, LEFT, person.turns)


def _earned(lived: Trajectory) -> Marks:
    """What the episode earned; nothing where it failed, whatever was given on the way."""
    return marks_of(lived) if lived.rewards else {}
