"""``ToolEnv``: the environment of an agent that calls tools."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from agent_r1.core.arguments import describe_parameters
from agent_r1.core.environment import RolloutContext, Transition, weakest_sandbox
from agent_r1.core.errors import AgentR1Error, InvalidInput
from agent_r1.core.messages import Action, Message, Text, ToolCall, ToolResult, ToolSpec, join_texts
from agent_r1.core.task import Task, check_messages, check_text
from agent_r1.core.trajectory import Scorer
from agent_r1.rewards.scoring import FunctionScorer, RewardFunction, functions_by_name
from agent_r1.sandbox.sandbox import Sandbox, validate_sandbox
from agent_r1.tools.execution import DEFAULT_TIMEOUT
from agent_r1.tools.function_tool import Resources, Tool, tool
from agent_r1.tools.tool_errors import malformed_call_result, truncate_output, unknown_tool_result

TurnRewards = Callable[[Action, Sequence[ToolResult]], Mapping[str, float]]
"""A function (action, results of its calls) -> process rewards by name. It is called for every action."""

CallRewards = Callable[[ToolCall, ToolResult], Mapping[str, float]]
"""A function (call, its result) -> process rewards by name. It is called for every call that was run."""

MAX_OUTPUT = 2000
"""The default maximum number of characters of a tool's output. A longer output is cut."""


class ToolEnv:
    """The environment of an agent that calls tools.

    An action without calls ends the episode (terminal). Otherwise the calls run concurrently, and their results become
    tool messages in the order of the calls. A call that is malformed, names an unknown tool or has wrong arguments gets
    an explanation as its result. If action number ``max_turns`` has calls, the calls are not run, and the episode is
    truncated.

    Rewards exist on three levels: calls, turns and the trajectory. Rewards on different levels must have different
    names. If ``turn_rewards`` or ``call_rewards`` raises or returns a number that is not finite, the episode fails.

    Args:
        tools: tools, or plain functions, which :func:`tool` converts.
        rewards: sync or async functions ``(trajectory, task)`` that return a number or a mapping of names to numbers.
        system: a system message that replaces the task's system message. None keeps the task's system message.
        examples: messages after the system message in every prompt, such as a solved task. The policy is never trained
            on the examples.
        max_output: the maximum number of characters of a tool's output. A longer output is cut.
        timeout: the time limit of a call in seconds, for tools without their own time limit.
        turn_rewards: a sync function ``(action, results)`` that returns process rewards for an action.
        call_rewards: a sync function ``(call, result)`` that returns process rewards for one call. If the call is wrong
            or fails, ``result.ok`` is False.
        sandbox: a declaration of how code written by the policy is isolated: the Sandbox in which the tools run the
            code, or ``"none: .."`` with a reason if the code is not isolated. The environment itself isolates nothing.
            Needed only for tools that do not declare a sandbox, such as the tools of a server.
    """

    def __init__(
        self,
        tools: Sequence[Tool | Callable[..., Any]],
        rewards: Sequence[RewardFunction] = (),
        *,
        max_turns: int = 5,
        system: str | None = None,
        examples: Sequence[Message] = (),
        max_output: int = MAX_OUTPUT,
        timeout: float = DEFAULT_TIMEOUT,
        turn_rewards: TurnRewards | None = None,
        call_rewards: CallRewards | None = None,
        sandbox: Sandbox | str | None = None,
    ) -> None:
        for name, limit in (("max_turns", max_turns), ("max_output", max_output), ("timeout", timeout)):
            if not limit > 0:
                raise InvalidInput(name, got=limit, do="give a number > 0")
        self.tools_by_name: dict[str, Tool] = {}
        for item in tools:
            made = item if isinstance(item, Tool) else tool(item)
            if made.spec.name in self.tools_by_name:
                raise InvalidInput("tools", got=f"two named {made.spec.name!r}", do="give each its own name")
            self.tools_by_name[made.spec.name] = made
        self.tools: tuple[ToolSpec, ...] = tuple(tool.spec for tool in self.tools_by_name.values())
        self.scorers: tuple[Scorer, ...] = (FunctionScorer(functions_by_name(rewards)),) if rewards else ()
        for spec in self.tools:
            check_text(f"tool {spec.name!r}", json.dumps(spec.to_openai(), ensure_ascii=False, default=str))
        check_opening(system, examples)
        self.max_turns, self.system, self.max_output, self.timeout = max_turns, system, max_output, timeout
        self.examples = tuple(examples)
        self.turn_rewards, self.call_rewards = turn_rewards, call_rewards
        self._sandbox = validate_sandbox(sandbox)

    @property
    def sandbox(self) -> str | None:
        """The weakest isolation under which a tool runs code of the policy; None if no tool runs such code."""
        return weakest_sandbox([self._sandbox, *(tool.sandbox for tool in self.tools_by_name.values())])

    async def open(self, task: Task, context: RolloutContext) -> ToolEpisode:
        start = opening_messages(task, self.system, self.examples)
        return ToolEpisode(self, task, context, start, Resources(task, context))


@dataclass(slots=True)
class ToolEpisode:
    env: ToolEnv
    task: Task
    context: RolloutContext
    start: tuple[Message, ...]
    resources: Resources
    num_actions: int = field(default=0, init=False)

    async def step(self, action: Action) -> Transition:
        self.num_actions += 1
        calls = action.message.calls
        end: Literal["terminal", "truncated"] | None = None
        if not calls:
            end = "terminal"
        elif self.num_actions >= self.env.max_turns:
            end, calls = "truncated", ()  # no turn remains that could use the results
        results = tuple(await asyncio.gather(*(self._run(call) for call in calls)))
        pairs = list(zip(calls, results, strict=True))
        messages = tuple(Message("tool", result.parts, call_id=call.id) for call, result in pairs)
        rewards: Mapping[str, float] = {}
        if (turn_rewards := self.env.turn_rewards) is not None:
            rewards = _check_rewards("turn_rewards", turn_rewards(action, results))
        call_rewards: tuple[Mapping[str, float], ...] = ()
        if (reward := self.env.call_rewards) is not None:
            call_rewards = tuple(_check_rewards("call_rewards", reward(call, result)) for call, result in pairs)
        return Transition(messages, rewards, end, results, call_rewards)

    async def close(self) -> None:
        await self.resources.close()

    async def _run(self, call: ToolCall) -> ToolResult:
        if call.error is not None or call.arguments is None:
            result = malformed_call_result(call.error or "it has no arguments")
        elif (tool := self.env.tools_by_name.get(call.name)) is None:
            result = unknown_tool_result(call.name, tuple(self.env.tools_by_name))
        else:
            result = await tool.run(call.arguments, self.task, self.context, self.env.timeout, self.resources)
        return truncate_output(result, self.env.max_output)


def _check_rewards(source: str, rewards: Mapping[str, float]) -> Mapping[str, float]:
    numbers = {name: float(value) for name, value in rewards.items()}
    wrong = [f"{name}={value}" for name, value in numbers.items() if not math.isfinite(value)]
    if wrong:
        raise AgentR1Error(f"{source} gave {', '.join(wrong)}, which is no reward")
    return numbers


def check_opening(system: str | None, examples: Sequence[Message]) -> None:
    """Raise InvalidInput if ``system`` or ``examples`` cannot be written into a prompt."""
    if system is not None:
        check_text("system", system)
    check_messages("examples", examples)


def opening_messages(task: Task, system: str | None, examples: Sequence[Message] = ()) -> tuple[Message, ...]:
    """Return the system message (by default the task's own), the examples, then the other messages of the task."""
    if not examples and system is None:
        return task.messages
    given = [message for message in task.messages if message.role == "system"]
    rest = [message for message in task.messages if message.role != "system"]
    return (*(given if system is None else [Message.system(system)]), *examples, *rest)


class NaiveRag:
    """An environment with one turn and no tools. Its prompt contains passages that were retrieved for the question.

    The question is the text of the task's last user message. The passages are put before the question.

    Args:
        retrieve: the search tool. To compare an agent with this baseline, give the agent's search tool. ``query`` must
            be the only required argument of the tool.
        system: a system message that replaces the task's system message. None: the task's system message is kept.
        examples: messages after the system message in every prompt.
        max_output: the largest number of characters of the passages, as in the agent's ToolEnv.
    """

    tools: tuple[ToolSpec, ...] = ()

    def __init__(
        self,
        retrieve: Tool,
        *,
        system: str | None = None,
        examples: Sequence[Message] = (),
        max_output: int = MAX_OUTPUT,
    ) -> None:
        if list(retrieve.spec.parameters.get("required", ())) != ["query"]:
            got = f"the arguments {describe_parameters(retrieve.spec.parameters)}"
            raise InvalidInput(f"tool {retrieve.spec.name!r}", got=got, do="let it need query only")
        check_opening(system, examples)
        self._retrieve, self._max_output = retrieve, max_output
        self._system, self._examples = system, tuple(examples)

    async def open(self, task: Task, context: RolloutContext) -> SingleTurnEpisode:
        """Retrieve the passages, and return the episode. Raise AgentR1Error if the retrieval fails."""
        messages = list(opening_messages(task, self._system, self._examples))
        users = [index for index, message in enumerate(messages) if message.role == "user"]
        if not users:
            raise InvalidInput(f"task {task.id}", got="no user message", do="ask the question in a user message")
        question = messages[users[-1]].text
        result = await self._retrieve.run({"query": question}, task, context)
        parts = truncate_output(result, self._max_output).parts
        passages = join_texts(part.text for part in parts if isinstance(part, Text))
        if not result.ok:
            raise AgentR1Error(f"the retrieval for task {task.id} failed: {passages}")
        messages[users[-1]] = replace(messages[users[-1]], parts=(Text(f"{passages}\n\n{question}"),))
        return SingleTurnEpisode(tuple(messages))


@dataclass(slots=True)
class SingleTurnEpisode:
    start: tuple[Message, ...]

    async def step(self, action: Action) -> Transition:
        return Transition((), end="terminal")

    async def close(self) -> None: ...
