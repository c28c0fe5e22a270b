"""Naive RAG, the baseline without an agent: one retrieval for the question, then one answer."""

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
    """An environment with one turn and no tools. Its prompt contains passages that were retrieved for the question.

    The question is the text of the task's last user message. The passages are put before the question.

    Args:
        retrieve: the search tool. To compare an agent with this baseline, give the agent's search tool. ``query`` must
            be the only required argument of the tool.
        system: a system message that replaces the task's system message. None: the task's system message is kept.
        examples: messages after the system message in every prompt.
        max_output: the largest number of characters of the passages, as in the agent's ToolEnv.

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
        """Retrieve the passages, and return the episode.

        Raises:
            InvalidInput: if the task has no user message.
            AgentR1Error: if the retrieval fails.
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
    start: tuple[Message, ...]

    async def step(self, action: Action) -> Transition:
        return Transition((), end="terminal")

    async def close(self) -> None: ...
