"""``ToolEnv``: the world of an agent that calls tools. The tools say what happened; it says what that means."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent_r1.core.environment import RolloutContext, Transition, weakest_sandbox
from agent_r1.core.errors import AgentR1Error, InvalidInput
from agent_r1.core.messages import Action, Message, ToolCall
from agent_r1.core.task import Task
from agent_r1.core.tool import ToolResult, ToolSpec
from agent_r1.core.trajectory import Scorer
from agent_r1.rewards.scoring import FunctionScorer, RewardFunction, named
from agent_r1.sandbox import Sandbox, validate_sandbox
from agent_r1.tools.execution import DEFAULT_TIMEOUT
from agent_r1.tools.function_tool import Tool, tool
from agent_r1.tools.resources import Resources
from agent_r1.tools.tool_errors import malformed_call_result, truncate_output, unknown_tool_result

TurnRewards = Callable[[Action, Sequence[ToolResult]], Mapping[str, float]]
"""Process rewards by name, of one action and what its calls gave; called for every action, () where none was run."""

CallRewards = Callable[[ToolCall, ToolResult], Mapping[str, float]]
"""Process rewards by name, of one call and what it gave; called for every call that got a result."""

MAX_OUTPUT = 2000
"""Characters of a tool's output that an agent is shown where nothing else is said."""


class ToolEnv:
    """An agent with tools, and at most ``max_turns`` actions.

    An action without calls ends the episode (terminal). Otherwise its calls run at the same time, and
    their results come back as tool messages in the order of the calls. A call that cannot be read, names
    no tool or has wrong arguments gets an explanation as its result, and the episode goes on. The calls of
    action number ``max_turns`` are not run, as no turn is left to use what they give: the episode is truncated.

    Args:
        tools: tools, or plain functions that :func:`tool` can take.
        rewards: functions ``(trajectory, task) -> float`` or a mapping of names to floats, sync or async.
        max_turns: actions per episode.
        system: a system message to open with, in place of one the task may have.
        max_output: characters shown of a tool's output; the rest is cut, and marked.
        timeout: seconds a call may take, for tools that do not say themselves.
        turn_rewards: gives process rewards to an action as a whole, sync.
        call_rewards: gives process rewards to a call, sync. A call that was answered with an explanation
            has one too, with ``result.ok`` False; the calls of the last turn, which are not run, have none.
        sandbox: where code that the policy wrote runs that no tool speaks of (a server of tools, one of these two
            functions); ``"none: .."``, and by what, where nothing holds it.

    Where one of the two raises or gives anything but finite numbers, the episode fails. A name belongs to one
    level: a call, a turn or the trajectory.

    Raises:
        InvalidInput: two tools or two rewards of one name, or a limit that is not positive.
    """

    def __init__(
        self,
        tools: Sequence[Tool | Callable[..., Any]],
        rewards: Sequence[RewardFunction] = (),
        *,
        max_turns: int = 5,
        system: str | None = None,
        max_output: int = MAX_OUTPUT,
        timeout: float = DEFAULT_TIMEOUT,
        turn_rewards: TurnRewards | None = None,
        call_rewards: CallRewards | None = None,
        sandbox: Sandbox | str | None = None,
    ) -> None:
        for what, limit in (("max_turns", max_turns), ("max_output", max_output), ("timeout", timeout)):
            if not limit > 0:
                raise InvalidInput(what, got=limit, do="give a number > 0")
        self.by_name = _by_name(tools)
        self.tools: tuple[ToolSpec, ...] = tuple(tool.spec for tool in self.by_name.values())
        self.scorers: tuple[Scorer, ...] = (FunctionScorer(named(rewards)),) if rewards else ()
        self.max_turns, self.system, self.max_output, self.timeout = max_turns, system, max_output, timeout
        self.turn_rewards, self.call_rewards = turn_rewards, call_rewards
        self._said = validate_sandbox(sandbox)

    @property
    def sandbox(self) -> str | None:
        """Where code that the policy wrote is held weakest_sandbox; None where none runs."""
        return weakest_sandbox([self._said, *(tool.sandbox for tool in self.by_name.values())])

    async def open(self, task: Task, context: RolloutContext) -> ToolEpisode:
        return ToolEpisode(self, task, context, opening(task, self.system), Resources(task, context))


@dataclass(slots=True)
class ToolEpisode:
    """One attempt in a ToolEnv. ``resources`` are what its tools hold, ``taken`` counts the actions so far."""

    env: ToolEnv
    task: Task
    context: RolloutContext
    start: tuple[Message, ...]
    resources: Resources
    taken: int = field(default=0, init=False)

    async def step(self, action: Action) -> Transition:
        self.taken += 1
        calls = action.message.calls
        if not calls:
            return Transition((), self._turn_rewards(action, ()), end="terminal")
        if self.taken >= self.env.max_turns:
            return Transition((), self._turn_rewards(action, ()), end="truncated")
        results = tuple(await asyncio.gather(*(self._run(call) for call in calls)))
        messages = tuple(
            Message("tool", result.parts, call_id=call.id) for call, result in zip(calls, results, strict=True)
        )
        rewards, call_rewards = self._turn_rewards(action, results), self._call_rewards(calls, results)
        return Transition(messages, rewards, results=results, call_rewards=call_rewards)

    async def close(self) -> None:
        """Close what the tools opened for this episode."""
        await self.resources.close()

    async def _run(self, call: ToolCall) -> ToolResult:
        return truncate_output(await self._result(call), self.env.max_output)

    async def _result(self, call: ToolCall) -> ToolResult:
        if call.error is not None or call.arguments is None:
            return malformed_call_result(call.error or "it has no arguments")
        tool = self.env.by_name.get(call.name)
        if tool is None:
            return unknown_tool_result(call.name, tuple(self.env.by_name))
        return await tool.run(call.arguments, self.task, self.context, self.env.timeout, self.resources)

    def _turn_rewards(self, action: Action, results: tuple[ToolResult, ...]) -> Mapping[str, float]:
        if self.env.turn_rewards is None:
            return {}
        return _finite("turn_rewards", self.env.turn_rewards(action, results))

    def _call_rewards(
        self, calls: tuple[ToolCall, ...], results: tuple[ToolResult, ...]
    ) -> tuple[Mapping[str, float], ...]:
        given = self.env.call_rewards
        if given is None:
            return ()
        return tuple(_finite("call_rewards", given(call, result)) for call, result in zip(calls, results, strict=True))


def _finite(what: str, given: Mapping[str, float]) -> Mapping[str, float]:
    """The rewards that a user's function gave. Raises AgentR1Error where one is not finite."""
    rewards = {name: float(value) for name, value in given.items()}
    wrong = [f"{name}={value}" for name, value in rewards.items() if not math.isfinite(value)]
    if wrong:
        raise AgentR1Error(f"{what} gave {', '.join(wrong)}, which is no reward")
    return rewards


def opening(task: Task, system: str | None) -> tuple[Message, ...]:
    """The task's messages; ``system``, where given, opens them in place of the task's own system message."""
    if system is None:
        return task.messages
    return (Message.system(system), *(message for message in task.messages if message.role != "system"))


def _by_name(tools: Sequence[Tool | Callable[..., Any]]) -> dict[str, Tool]:
    by_name: dict[str, Tool] = {}
    for entry in tools:
        made = entry if isinstance(entry, Tool) else tool(entry)
        if made.spec.name in by_name:
            raise InvalidInput("tools", got=f"two named {made.spec.name!r}", do="give each its own name")
        by_name[made.spec.name] = made
    return by_name
