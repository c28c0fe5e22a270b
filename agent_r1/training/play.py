"""Play an episode in the terminal. A person acts instead of the policy, and sees what the policy would see."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.text import Text as Line

from agent_r1.core.errors import EngineError, InvalidInput
from agent_r1.core.messages import Message
from agent_r1.core.task import Task
from agent_r1.core.tasks import run_protected
from agent_r1.core.taskset import TaskSet
from agent_r1.core.tool import ToolSpec
from agent_r1.rollout.collector import Collector, GroupRequest, RolloutLimits
from agent_r1.rollout.scripted_agent import ScriptedAgent
from agent_r1.training.config import PlayConfig
from agent_r1.training.human_input import HELP, format_signature, parse_line
from agent_r1.training.null_recorder import NullRecorder, no_gate
from agent_r1.training.reward_totals import RewardTotals, sum_rewards
from agent_r1.training.terminal import Terminal

EPISODE_SECONDS = 86400.0

LEFT = "left"


@dataclass(frozen=True, slots=True)
class PlayResult:
    """The result of an episode that a person played.

    Attributes:
        rewards: the total of each reward; empty if the episode was not scored.
        answers: the right answers; () if no answer is known.
        reason: why the episode failed; None if it did not fail.

    Example:
        PlayResult(task="style-a/7", status="completed", turns=3, rewards={"em": 1.0, "f1": 1.0}, answers=("Bruno",))
    """

    task: str
    status: str
    turns: int
    rewards: RewardTotals = field(default_factory=dict)
    answers: tuple[str, ...] = ()
    reason: str | None = None

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
    """A person who acts instead of the policy. ``respond`` prints new messages, and reads the next action.

    If the person leaves (Ctrl-D, Ctrl-C, or the end of a pipe), ``respond`` raises EngineError, which ends the episode.

    Attributes:
        shown: the number of messages on the screen.
        turns: the number of completed turns.
    """

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
        """Return the next non-empty text that the person types. For "?", print the help and read again."""
        while True:
            text = self._terminal.read()
            if text.strip() == "?":
                self._print_help()
            elif text.strip():
                return text


def play(config: PlayConfig, taskset: TaskSet, console: Console) -> PlayResult:
    """Let a person play one episode of ``taskset`` in the terminal or from a pipe, and return the result.

    Raises InvalidInput if the split has no task with the index ``config.number``.
    """
    tasks = taskset.tasks(config.split or taskset.evaluation[0])
    if config.number is None:
        task = random.Random(config.seed).choice(tasks)
    elif config.number < len(tasks):
        task = tasks[config.number]
    else:
        raise InvalidInput("--number", got=config.number, do=f"give one below {len(tasks)}")
    person = HumanPlayer(console, taskset.env_for_split(task.split).tools)
    console.print(Line(f"{taskset.name}, task {task.id}"))
    try:
        return run_protected(_play(taskset, task, person))
    except KeyboardInterrupt:  # Ctrl-C while a tool was running
        return PlayResult(task.id, LEFT, person.turns)


async def _play(taskset: TaskSet, task: Task, person: HumanPlayer) -> PlayResult:
    agent = ScriptedAgent(taskset.env_for_split(task.split), lambda attempt: person.respond)
    limits = RolloutLimits(concurrency=1, episode_seconds=EPISODE_SECONDS, retries=0)
    collector = Collector(agent, taskset.scorers, NullRecorder(), "play", limits)
    async with aclosing(collector.collect([GroupRequest(0, task, 1)], no_gate)) as groups:
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
