"""Environments with a user."""

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
    """Replies with the number of messages, and leaves at 'bye'."""

    def __init__(self) -> None:
        self.conversations: list[Sequence[Message]] = []

    async def reply(self, task: Task, messages: Sequence[Message], context: RolloutContext) -> Reply:
        self.conversations.append(tuple(messages))
        return Reply(f"{len(messages)} messages", end=messages[-1].text == "bye")


def ring() -> str:
    """Ring a bell."""
    return "ding"


def broken() -> str:
    """Break."""
    raise ValueError("no")


def run_episode(env: UserEnv, context: RolloutContext, *actions: Action) -> list[Transition]:
    async def live() -> list[Transition]:
        episode = await env.open(TASK, context)
        steps = [await episode.step(action) for action in actions]
        await episode.close()
        return steps

    return asyncio.run(live())


def test_messages_go_to_the_user_and_calls_to_tools(
    make_action: Says, call: Callable[..., ToolCall], context: Contexts
) -> None:
    user = Counting()
    env = UserEnv([ring], user)
    rung, answered, left = run_episode(
        env, context(), make_action("", call("ring")), make_action("What?"), make_action("bye")
    )
    assert [message.text for message in rung.messages] == ["ding"] and rung.messages[0].role == "tool"
    assert [(message.role, message.text) for message in answered.messages] == [("user", "5 messages")]
    assert left == Transition((), end="terminal")
    assert [message.role for message in user.conversations[0]] == ["system", "user", "assistant", "tool", "assistant"]
    assert len(user.conversations) == 2


def test_all_actions_count_toward_max_turns(
    make_action: Says, call: Callable[..., ToolCall], context: Contexts
) -> None:
    env = UserEnv([broken], Counting(), max_turns=3)
    failed, spoken, last = run_episode(
        env, context(), make_action("", call("broken")), make_action("What?"), make_action("And?")
    )
    assert not failed.results[0].ok and "broken failed" in failed.messages[0].text
    assert (failed.end, spoken.end, last.end) == (None, None, "truncated")
    called = run_episode(env, context(), make_action("a"), make_action("b"), make_action("", call("broken")))
    assert called[-1].end == "truncated" and called[-1].results == ()


def test_a_model_user_sees_itself_as_assistant_and_the_agent_as_user(
    make_action: Says, call: Callable[..., ToolCall], context: Contexts
) -> None:
    prompts: list[tuple[Message, ...]] = []

    async def ask(messages: tuple[Message, ...]) -> Message:
        prompts.append(messages)
        return Message.assistant("Tea, please." if len(prompts) == 1 else "DONE")

    env = UserEnv([ring], ModelUser(lambda task: f"You want {task.data['wish']}.", "DONE", ask))
    steps = run_episode(env, context(), make_action("", call("ring")), make_action("What?"), make_action("Here."))
    assert [(message.role, message.text) for message in prompts[1]] == [
        ("system", "You want tea."),
        ("user", "(The conversation begins.)"),
        ("assistant", "Hello."),
        ("user", "What?"),
        ("assistant", "Tea, please."),
        ("user", "Here."),
    ]
    assert steps[1].messages[0].text == "Tea, please." and steps[2].end == "terminal"


class RecordingModel:
    """A model client that replies with given texts and records its prompts."""

    def __init__(self, *texts: str) -> None:
        self.prompts: list[list[tuple[str, str]]] = []
        self._texts = iter(texts)

    async def ask(self, messages: tuple[Message, ...]) -> Message:
        self.prompts.append([(message.role, message.text) for message in messages])
        return Message.assistant(next(self._texts))

    @property
    def user(self) -> ModelUser:
        return ModelUser(lambda task: "You want tea.", "DONE", self.ask)


PART, OPENING = ("system", "You want tea."), ("user", "(The conversation begins.)")


def test_the_roles_alternate_in_the_prompt_of_a_model_user(make_action: Says, context: Contexts) -> None:
    # some chat templates reject roles that do not alternate
    model = RecordingModel("Tea.", "DONE")
    task = Task("t", (Message.user("Hello."), Message.user("Anyone?")), {})

    async def live() -> None:
        episode = await UserEnv([], model.user).open(task, context())
        for action in (make_action(""), make_action("What?")):
            await episode.step(action)

    asyncio.run(live())
    first = [PART, OPENING, ("assistant", "Hello.\nAnyone?"), ("user", "(says nothing)")]
    assert model.prompts == [first, [*first, ("assistant", "Tea."), ("user", "What?")]]


def test_a_model_user_with_two_empty_replies_ends_the_conversation(make_action: Says, context: Contexts) -> None:
    model = RecordingModel(" ", "Tea.")
    (step,) = run_episode(UserEnv([], model.user), context(), make_action("What?"))
    assert [message.text for message in step.messages] == ["Tea."] and step.end is None
    assert model.prompts[1][-1] == ("user", "What?\n(You said nothing. Please answer.)")
    assert run_episode(UserEnv([], RecordingModel("", " ").user), context(), make_action("What?")) == [
        Transition((), end="terminal")
    ]
