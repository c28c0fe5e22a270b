"""Naive RAG, the baseline without an agent: one retrieval with the question, one answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from agent_r1.core.environment import RolloutContext, Transition
from agent_r1.core.errors import AgentR1Error, InvalidInput
from agent_r1.core.messages import Action, Message, Text
from agent_r1.core.task import Task
from agent_r1.core.tool import ToolSpec
from agent_r1.envs.tool_env import MAX_OUTPUT, opening_messages
from agent_r1.tools.function_tool import Tool
from agent_r1.tools.schema import describe_parameters
from agent_r1.tools.tool_errors import truncate_output


class NaiveRag:
    """One turn without tools, with the passages for the question put before it.

    The question is the text of the task's last user message. The passages come from the agent's own search tool and are
    truncated as for the agent, so that the baseline and the agent read the same text.

    Args:
        retrieve: the search tool; ``query`` must be its only required argument.
        system: a system message that replaces the system message of the task, if it has one.
        examples: messages that follow the system message in every prompt, such as passages with a question, and its
            answer.
        max_output: the number of characters shown of the passages; use the value of the agent's ToolEnv.

    Raises:
        InvalidInput: if ``query`` is not the only required argument of the tool.
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
        self._retrieve, self._max_output = retrieve, max_output
        self._system, self._examples = system, tuple(examples)

    async def open(self, task: Task, context: RolloutContext) -> SingleTurnEpisode:
        """Retrieve the passages and return the episode.

        Raises:
            AgentR1Error: if the retrieval fails: a baseline that reads an error message would score too low.
        """
        messages = list(opening_messages(task, self._system, self._examples))
        users = [index for index, message in enumerate(messages) if message.role == "user"]
        if not users:
            raise InvalidInput(f"task {task.id}", got="no user message", do="ask the question in a user message")
        question = messages[users[-1]].text
        result = await self._retrieve.run({"query": question}, task, context)
        parts = truncate_output(result, self._max_output).parts
        passages = "".join(part.text for part in parts if isinstance(part, Text))
        if not result.ok:
            raise AgentR1Error(f"the retrieval for task {task.id} failed: {passages}")
        messages[users[-1]] = replace(messages[users[-1]], parts=(Text(f"{passages}\n\n{question}"),))
        return SingleTurnEpisode(tuple(messages))


@dataclass(slots=True)
class SingleTurnEpisode:
    """An episode that ends with its first action."""

    start: tuple[Message, ...]

    async def step(self, action: Action) -> Transition:
        return Transition((), end="terminal")

    async def close(self) -> None: ...
