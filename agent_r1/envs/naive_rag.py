"""Naive RAG, the baseline without an agent: one retrieval with the question, one answer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from agent_r1.core.environment import RolloutContext, Transition
from agent_r1.core.errors import AgentR1Error, InvalidInput
from agent_r1.core.messages import Action, Message, Text
from agent_r1.core.task import Task
from agent_r1.core.tool import ToolSpec
from agent_r1.envs.tool_env import MAX_OUTPUT, opening
from agent_r1.tools.function_tool import Tool
from agent_r1.tools.schema import describe_parameters
from agent_r1.tools.tool_errors import truncate_output


class NaiveRag:
    """One turn without tools: the passages found for the question stand before it.

    The question is the text of the task's last user message. The passages are what the agent's own
    search tool returns for it, shown as an agent would see them, so that the two cannot drift apart.

    Args:
        retrieve: the search tool; it takes ``query``, and nothing else that has no default.
        system: a system message to open with, in place of one the task may have.
        max_output: characters shown of the passages; give the value of the agent's ToolEnv.

    Raises:
        InvalidInput: the tool does not take ``query`` alone.
    """

    tools: tuple[ToolSpec, ...] = ()

    def __init__(self, retrieve: Tool, *, system: str | None = None, max_output: int = MAX_OUTPUT) -> None:
        if list(retrieve.spec.parameters.get("required", ())) != ["query"]:
            got = f"the arguments {describe_parameters(retrieve.spec.parameters)}"
            raise InvalidInput(f"tool {retrieve.spec.name!r}", got=got, do="let it need query only")
        self._retrieve, self._system, self._max_output = retrieve, system, max_output

    async def open(self, task: Task, context: RolloutContext) -> OneTurn:
        """Raises AgentR1Error where the retrieval fails: a baseline that read an error would score too low."""
        messages = list(opening(task, self._system))
        users = [index for index, message in enumerate(messages) if message.role == "user"]
        if not users:
            raise InvalidInput(f"task {task.id}", got="no user message", do="ask the question in a user message")
        question = messages[users[-1]].text
        passages = await self._passages(question, task, context)
        messages[users[-1]] = replace(messages[users[-1]], parts=(Text(f"{passages}\n\n{question}"),))
        return OneTurn(tuple(messages))

    async def _passages(self, question: str, task: Task, context: RolloutContext) -> str:
        result = truncate_output(await self._retrieve.run({"query": question}, task, context), self._max_output)
        text = "".join(part.text for part in result.parts if isinstance(part, Text))
        if not result.ok:
            raise AgentR1Error(f"the retrieval for task {task.id} failed: {text}")
        return text


@dataclass(slots=True)
class OneTurn:
    """An episode that ends with its first action, whatever that is."""

    start: tuple[Message, ...]

    async def step(self, action: Action) -> Transition:
        return Transition((), end="terminal")

    async def close(self) -> None:
        """Nothing is held."""
