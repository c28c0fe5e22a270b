"""Naive RAG reads the output of the agent's search tool and answers once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agent_r1.core.environment import Episode
from agent_r1.core.errors import AgentR1Error
from agent_r1.core.messages import Message, Text, ToolResult
from agent_r1.core.task import Task
from agent_r1.envs.tool_env import NaiveRag, ToolEnv
from agent_r1.tools.function_tool import tool


@tool
def search(query: str, k: int = 2) -> str:
    """Search."""
    return f"{k} passages on {query}: " + "x" * 50


def opened(env: NaiveRag, task: Task, context: Any) -> Episode:
    return asyncio.run(env.open(task, context()))


def test_the_passages_are_put_before_the_question(task: Task, context: Any) -> None:
    episode = opened(NaiveRag(search), task, context)
    question = task.messages[0].text
    assert [message.text for message in episode.start] == [f"2 passages on {question}: {'x' * 50}\n\n{question}"]


@pytest.mark.parametrize("max_output", [2000, 30])
def test_the_passages_are_those_that_an_agent_sees_for_the_same_query(
    max_output: int, task: Task, context: Any, make_action: Any, call: Any
) -> None:
    async def as_agent() -> str:
        episode = await ToolEnv([search], max_output=max_output).open(task, context())
        transition = await episode.step(make_action("", call("search", query=task.messages[0].text)))
        return transition.messages[0].text

    start = opened(NaiveRag(search, max_output=max_output), task, context).start
    assert start[0].text == f"{asyncio.run(as_agent())}\n\n{task.messages[0].text}"


def test_only_the_last_user_message_and_a_given_system_message_change(context: Any) -> None:
    task = Task(
        "t", (Message.system("use tools"), Message.user("hi"), Message.assistant("hello"), Message.user("who?"))
    )
    kept, replaced = (opened(NaiveRag(search, system=system), task, context).start for system in (None, "read"))
    assert (
        [message.role for message in kept]
        == [message.role for message in replaced]
        == ["system", "user", "assistant", "user"]
    )
    assert kept[:3] == task.messages[:3]
    assert replaced[0].text == "read"
    assert replaced[1:] == kept[1:]
    assert kept[3].text.startswith("2 passages on who?")


def test_the_first_action_ends_the_episode(task: Task, context: Any, make_action: Any, call: Any) -> None:
    env = NaiveRag(search)
    assert env.tools == ()
    for action in (make_action("<answer>x</answer>"), make_action("", call("search", query="x"))):
        transition = asyncio.run(opened(env, task, context).step(action))
        assert (transition.end, transition.messages) == ("terminal", ())


def test_a_failed_retrieval_is_an_error(task: Task, context: Any) -> None:
    @tool(name="search")
    def broken(query: str) -> ToolResult:
        """Search."""
        return ToolResult((Text("the index is gone"),), ok=False, error="gone")

    with pytest.raises(AgentR1Error, match="the index is gone"):
        opened(NaiveRag(broken), task, context)
