"""Environments whose other side is a user."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from agent_r1.core.errors import AgentR1Error
from agent_r1.core.messages import Action, Call, Message
from agent_r1.core.task import Task
from agent_r1.core.world import Context, Transition
from agent_r1.env.users import ModelUser, Reply, UserEnv

Says = Callable[..., Action]
Contexts = Callable[..., Context]
TASK = Task("t", (Message.system("Serve."), Message.user("Hello.")), {"wish": "tea"})


class Counting:
    """Says how many messages it has heard, and leaves at 'bye'."""

    def __init__(self) -> None:
        self.heard: list[Sequence[Message]] = []

    async def reply(self, task: Task, said: Sequence[Message], context: Context) -> Reply:
        self.heard.append(tuple(said))
        return Reply(f"{len(said)} messages", end=said[-1].text == "bye")


def ring() -> str:
    """Ring a bell."""
    return "ding"


def broken() -> str:
    """Break."""
    raise ValueError("no")


def lived(env: UserEnv, context: Context, *actions: Action) -> list[Transition]:
    async def live() -> list[Transition]:
        episode = await env.open(TASK, context)
        steps = [await episode.step(action) for action in actions]
        await episode.close()
        return steps

    return asyncio.run(live())


def test_what_is_said_goes_to_the_user_and_calls_go_to_tools(
    says: Says, call: Callable[..., Call], context: Contexts
) -> None:
    user = Counting()
    env = UserEnv([ring], user)
    rung, answered, left = lived(env, context(), says("", call("ring")), says("What?"), says("bye"))
    assert [message.text for message in rung.messages] == ["ding"] and rung.messages[0].role == "tool"
    assert [(message.role, message.text) for message in answered.messages] == [("user", "5 messages")]
    assert left == Transition((), end="terminal")
    assert [message.role for message in user.heard[0]] == ["system", "user", "assistant", "tool", "assistant"]
    assert len(user.heard) == 2


def test_actions_are_counted_those_that_speak_and_those_whose_tool_fails(
    says: Says, call: Callable[..., Call], context: Contexts
) -> None:
    env = UserEnv([broken], Counting(), max_turns=3)
    failed, spoken, last = lived(env, context(), says("", call("broken")), says("What?"), says("And?"))
    assert not failed.results[0].ok and "broken failed" in failed.messages[0].text
    assert (failed.end, spoken.end, last.end) == (None, None, "truncated")
    called = lived(env, context(), says("a"), says("b"), says("", call("broken")))
    assert called[-1].end == "truncated" and called[-1].results == ()


def test_a_user_that_leaves_with_the_last_action_ends_the_episode_itself(says: Says, context: Contexts) -> None:
    assert lived(UserEnv([], Counting(), max_turns=1), context(), says("bye"))[-1].end == "terminal"


def test_a_user_that_a_model_plays_hears_itself_as_the_model_and_the_agent_as_its_user(
    says: Says, call: Callable[..., Call], context: Contexts
) -> None:
    asked: list[tuple[Message, ...]] = []

    async def ask(messages: tuple[Message, ...]) -> Message:
        asked.append(messages)
        return Message.assistant("Tea, please." if len(asked) == 1 else "DONE")

    env = UserEnv([ring], ModelUser(ask, lambda task: f"You want {task.data['wish']}.", "DONE"))
    steps = lived(env, context(), says("", call("ring")), says("What?"), says("Here."))
    assert [(message.role, message.text) for message in asked[1]] == [
        ("system", "You want tea."),
        ("assistant", "Hello."),
        ("user", "What?"),
        ("assistant", "Tea, please."),
        ("user", "Here."),
    ]
    assert steps[1].messages[0].text == "Tea, please." and steps[2].end == "terminal"


def test_a_model_that_says_nothing_fails_the_episode(says: Says, context: Contexts) -> None:
    async def ask(messages: tuple[Message, ...]) -> Message:
        return Message.assistant(" ")

    with pytest.raises(AgentR1Error, match="said nothing"):
        lived(UserEnv([], ModelUser(ask, lambda task: "", "DONE")), context(), says("What?"))
