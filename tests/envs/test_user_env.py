"""Environments whose other side is a user."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from agent_r1.core.environment import RolloutContext, Transition
from agent_r1.core.messages import Action, Message, ToolCall
from agent_r1.core.task import Task
from agent_r1.envs.user_env import ModelUser, Reply, UserEnv

Says = Callable[..., Action]
Contexts = Callable[..., RolloutContext]
TASK = Task("t", (Message.system("Serve."), Message.user("Hello.")), {"wish": "tea"})


class Counting:
    """Says how many messages it has heard, and leaves at 'bye'."""

    def __init__(self) -> None:
        self.heard: list[Sequence[Message]] = []

    async def reply(self, task: Task, said: Sequence[Message], context: RolloutContext) -> Reply:
        self.heard.append(tuple(said))
        return Reply(f"{len(said)} messages", end=said[-1].text == "bye")


def ring() -> str:
    """Ring a bell."""
    return "ding"


def broken() -> str:
    """Break."""
    raise ValueError("no")


def lived(env: UserEnv, context: RolloutContext, *actions: Action) -> list[Transition]:
    async def live() -> list[Transition]:
        episode = await env.open(TASK, context)
        steps = [await episode.step(action) for action in actions]
        await episode.close()
        return steps

    return asyncio.run(live())


def test_what_is_said_goes_to_the_user_and_calls_go_to_tools(
    make_action: Says, call: Callable[..., ToolCall], context: Contexts
) -> None:
    user = Counting()
    env = UserEnv([ring], user)
    rung, answered, left = lived(
        env, context(), make_action("", call("ring")), make_action("What?"), make_action("bye")
    )
    assert [message.text for message in rung.messages] == ["ding"] and rung.messages[0].role == "tool"
    assert [(message.role, message.text) for message in answered.messages] == [("user", "5 messages")]
    assert left == Transition((), end="terminal")
    assert [message.role for message in user.heard[0]] == ["system", "user", "assistant", "tool", "assistant"]
    assert len(user.heard) == 2


def test_actions_are_counted_those_that_speak_and_those_whose_tool_fails(
    make_action: Says, call: Callable[..., ToolCall], context: Contexts
) -> None:
    env = UserEnv([broken], Counting(), max_turns=3)
    failed, spoken, last = lived(
        env, context(), make_action("", call("broken")), make_action("What?"), make_action("And?")
    )
    assert not failed.results[0].ok and "broken failed" in failed.messages[0].text
    assert (failed.end, spoken.end, last.end) == (None, None, "truncated")
    called = lived(env, context(), make_action("a"), make_action("b"), make_action("", call("broken")))
    assert called[-1].end == "truncated" and called[-1].results == ()


def test_a_user_that_leaves_with_the_last_action_ends_the_episode_itself(make_action: Says, context: Contexts) -> None:
    assert lived(UserEnv([], Counting(), max_turns=1), context(), make_action("bye"))[-1].end == "terminal"


def test_a_user_that_a_model_plays_hears_itself_as_the_model_and_the_agent_as_its_user(
    make_action: Says, call: Callable[..., ToolCall], context: Contexts
) -> None:
    asked: list[tuple[Message, ...]] = []

    async def ask(messages: tuple[Message, ...]) -> Message:
        asked.append(messages)
        return Message.assistant("Tea, please." if len(asked) == 1 else "DONE")

    env = UserEnv([ring], ModelUser(lambda task: f"You want {task.data['wish']}.", "DONE", ask))
    steps = lived(env, context(), make_action("", call("ring")), make_action("What?"), make_action("Here."))
    assert [(message.role, message.text) for message in asked[1]] == [
        ("system", "You want tea."),
        ("user", "(The conversation begins.)"),
        ("assistant", "Hello."),
        ("user", "What?"),
        ("assistant", "Tea, please."),
        ("user", "Here."),
    ]
    assert steps[1].messages[0].text == "Tea, please." and steps[2].end == "terminal"


class Noting:
    """A model that plays a user: it says these texts, and keeps what it was asked."""

    def __init__(self, *texts: str) -> None:
        self.asked: list[list[tuple[str, str]]] = []
        self._texts = iter(texts)

    async def ask(self, messages: tuple[Message, ...]) -> Message:
        self.asked.append([(message.role, message.text) for message in messages])
        return Message.assistant(next(self._texts))

    @property
    def user(self) -> ModelUser:
        return ModelUser(lambda task: "You want tea.", "DONE", self.ask)


PART, OPENING = ("system", "You want tea."), ("user", "(The conversation begins.)")


def test_a_user_that_a_model_plays_sees_no_call_well_made_or_not(make_action: Says, context: Contexts) -> None:
    model = Noting("Tea.")
    unread = ToolCall("c0", "ring", None, "{", "it is not closed")
    calls = (make_action("I peek.", ToolCall("c1", "ring", {}, "")), make_action("I try <tool_call>{", unread))
    lived(UserEnv([ring], model.user), context(), *calls, make_action("What?"))
    assert model.asked == [[PART, OPENING, ("assistant", "Hello."), ("user", "What?")]]


def test_the_sides_alternate_whatever_was_said(make_action: Says, context: Contexts) -> None:
    """Two messages of a user open the task, and some chat templates refuse sides that do not alternate."""
    model = Noting("Tea.", "DONE")
    task = Task("t", (Message.user("Hello."), Message.user("Anyone?")), {})

    async def live() -> None:
        episode = await UserEnv([], model.user).open(task, context())
        for action in (make_action(""), make_action("What?")):
            await episode.step(action)

    asyncio.run(live())
    first = [PART, OPENING, ("assistant", "Hello.\nAnyone?"), ("user", "(says nothing)")]
    assert model.asked == [first, [*first, ("assistant", "Tea."), ("user", "What?")]]


def test_a_model_that_says_nothing_is_asked_again_and_then_leaves(make_action: Says, context: Contexts) -> None:
    spoke = Noting(" ", "Tea.")
    (step,) = lived(UserEnv([], spoke.user), context(), make_action("What?"))
    assert [message.text for message in step.messages] == ["Tea."] and step.end is None
    assert spoke.asked[1][-1] == ("user", "What?\n(You said nothing. Please answer.)")
    assert lived(UserEnv([], Noting("", " ").user), context(), make_action("What?")) == [Transition((), end="terminal")]
