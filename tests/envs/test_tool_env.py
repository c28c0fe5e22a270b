"""``ToolEnv``: the outcome of actions."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from agent_r1.core.environment import Env, Transition
from agent_r1.core.errors import AgentR1Error, InvalidInput
from agent_r1.core.messages import Action, Message, ToolCall, ToolResult
from agent_r1.core.task import Task
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.tools.function_tool import tool
from agent_r1.tools.tool_errors import ToolErrorKind


@tool
def add(a: int, b: int = 1) -> int:
    """Add up."""
    return a + b


def shout(text: str) -> str:
    """Shout."""
    return text.upper()


def exact(trajectory: Any, task: Task) -> float:
    return 1.0


Play = Callable[..., list[Transition]]


@pytest.fixture
def play(task: Task, context: Any) -> Play:
    def run(env: Env, *actions: Action) -> list[Transition]:
        async def steps() -> list[Transition]:
            episode = await env.open(task, context())
            transitions = [await episode.step(action) for action in actions]
            await episode.close()
            return transitions

        return asyncio.run(steps())

    return run


def texts(transition: Transition) -> list[str]:
    return [message.text for message in transition.messages]


def test_an_episode_opens_with_the_system_message_and_the_task(task: Task, context: Any) -> None:
    with_system = Task("t", (Message.system("the task's own"), Message.user("q")))
    opened = [
        asyncio.run(ToolEnv([add], system=system).open(given, context())).start
        for system, given in ((None, task), ("be brief", task), (None, with_system), ("be brief", with_system))
    ]
    assert [[message.role for message in start] for start in opened] == [["user"], *[["system", "user"]] * 3]
    assert [start[0].text for start in opened] == ["Who rules Alba?", "be brief", "the task's own", "be brief"]


def test_an_action_without_calls_ends_the_episode(play: Play, make_action: Any) -> None:
    (last,) = play(ToolEnv([add]), make_action("<answer>3</answer>"))
    assert last == Transition((), {}, "terminal")


def test_results_are_in_the_order_of_the_calls(play: Play, make_action: Any, call: Any) -> None:
    action = make_action("", call("add", "x", a=1), call("shout", "y", text="hi"), call("add", "z", a=2, b=2))
    (step,) = play(ToolEnv([add, shout]), action)
    assert [(message.role, message.call_id, message.text) for message in step.messages] == [
        ("tool", "x", "2"),
        ("tool", "y", "HI"),
        ("tool", "z", "4"),
    ]
    assert step.end is None
    assert [result.ok for result in step.results] == [True] * 3


def test_calls_of_an_action_run_concurrently(play: Play, make_action: Any, call: Any) -> None:
    all_running = asyncio.Barrier(4)

    @tool
    async def wait(number: int) -> int:
        """Wait for the other calls."""
        await all_running.wait()
        return number

    (step,) = play(ToolEnv([wait]), make_action("", *(call("wait", f"c{i}", number=i) for i in range(4))))
    assert texts(step) == ["0", "1", "2", "3"]


def test_each_kind_of_wrong_call_has_its_own_explanation(play: Play, make_action: Any, call: Any) -> None:
    calls = (
        ToolCall("c0", "add", None, '{"name": "add", "arg', "it is not valid JSON: unterminated string"),
        ToolCall("c1", "add", None, "{}"),
        call("ad", "c2", a=1),
        call("zzz", "c3", a=1),
        call("add", "c4", x=1),
        call("add", "c5", a="one"),
    )
    (step,) = play(ToolEnv([add, shout]), make_action("", *calls))
    assert [message.call_id for message in step.messages] == [f"c{i}" for i in range(6)]
    assert [result.error for result in step.results] == [
        *[ToolErrorKind.MALFORMED_CALL] * 2,
        *[ToolErrorKind.UNKNOWN_TOOL] * 2,
        *[ToolErrorKind.INVALID_ARGUMENTS] * 2,
    ]
    assert len(set(texts(step))) == 6
    assert "unterminated string" in texts(step)[0]
    assert "no arguments" in texts(step)[1]
    assert texts(step)[2] == "There is no tool 'ad'. Did you mean 'add'? The tools are: add, shout."
    assert texts(step)[3] == "There is no tool 'zzz'. The tools are: add, shout."
    assert "a: Field required; x: there is no such argument" in texts(step)[4]
    assert "a: Input should be a valid integer" in texts(step)[5]


def test_the_episode_is_truncated_after_max_turns_and_the_last_calls_are_not_run(
    play: Play, make_action: Any, call: Any
) -> None:
    ran = []

    @tool
    def note(n: int) -> str:
        """Note."""
        ran.append(n)
        return "noted"

    steps = play(ToolEnv([note], max_turns=3), *(make_action("", call("note", n=n)) for n in range(3)))
    assert [step.end for step in steps] == [None, None, "truncated"]
    assert (steps[2].messages, steps[2].results, ran) == ((), (), [0, 1])


@pytest.mark.parametrize(("length", "expected"), [(10, "x" * 10), (13, "x" * 10 + "\n[cut here: 3 more characters]")])
def test_long_output_is_truncated_with_a_note(
    length: int, expected: str, play: Play, make_action: Any, call: Any
) -> None:
    @tool
    def repeat(n: int) -> str:
        """Repeat."""
        return "x" * n

    (step,) = play(ToolEnv([repeat], max_output=10), make_action("", call("repeat", n=length)))
    assert texts(step) == [expected]
    assert step.results[0].parts == step.messages[0].parts


def test_the_timeout_of_the_environment_applies_to_tools_without_one(play: Play, make_action: Any, call: Any) -> None:
    @tool
    async def slow() -> str:
        """Be slow."""
        await asyncio.sleep(1.0)
        return "done"

    (step,) = play(ToolEnv([slow], timeout=0.05), make_action("", call("slow")))
    assert step.results[0].error == ToolErrorKind.TIMED_OUT


def test_turn_rewards_get_the_action_and_its_results(play: Play, make_action: Any, call: Any) -> None:
    def per_turn(action: Action, results: Sequence[ToolResult]) -> Mapping[str, float]:
        return {"useful": sum(result.ok for result in results), "words": len(action.text.split())}

    env = ToolEnv([add], turn_rewards=per_turn, max_turns=3)
    steps = play(
        env,
        make_action("one two", call("add", a=1), call("add")),
        make_action("", call("sub")),
        make_action("", call("add", a=1)),
    )
    assert [step.rewards for step in steps] == [
        {"useful": 1.0, "words": 2.0},
        {"useful": 0.0, "words": 0.0},
        {"useful": 0.0, "words": 0.0},
    ]


def test_a_turn_reward_that_is_not_a_number_fails_the_episode(play: Play, make_action: Any) -> None:
    with pytest.raises(AgentR1Error):
        play(ToolEnv([add], turn_rewards=lambda action, results: {"r": math.nan}), make_action("done"))


def successful(call: ToolCall, result: ToolResult) -> Mapping[str, float]:
    return {"ok": result.ok, f"calls of {call.name}": 1}


def test_each_call_with_a_result_has_its_own_reward(play: Play, make_action: Any, call: Any) -> None:
    calls = (call("add", a=1), call("sub"), ToolCall("c", "", None, "{", "it is not valid JSON"), call("add", a="x"))
    steps = play(
        ToolEnv([add], call_rewards=successful, max_turns=3),
        make_action("", *calls),
        make_action("", calls[0]),
        make_action("no"),
    )
    assert [step.call_rewards for step in steps] == [
        (
            {"ok": 1.0, "calls of add": 1.0},
            {"ok": 0.0, "calls of sub": 1.0},
            {"ok": 0.0, "calls of ": 1.0},
            {"ok": 0.0, "calls of add": 1.0},
        ),
        ({"ok": 1.0, "calls of add": 1.0},),
        (),
    ]
    assert all(step.rewards == {} for step in steps)


@pytest.mark.parametrize(
    "arguments",
    [
        {"tools": [add, add]},
        {"tools": [add], "rewards": [exact, exact]},
        {"tools": [add], "rewards": [lambda trajectory, task: 1.0]},
        {"tools": [add], "max_turns": 0},
        {"tools": [add], "max_output": 0},
        {"tools": [add], "timeout": -1.0},
        {"tools": [lambda x: x]},
    ],
)
def test_invalid_arguments_are_refused_at_construction(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        ToolEnv(**arguments)


def test_cancelling_a_step_stops_its_calls(task: Task, context: Any, make_action: Any, call: Any) -> None:
    ended = []

    @tool
    async def wait() -> str:
        """Wait."""
        try:
            await asyncio.sleep(5)
        finally:
            ended.append("ended")
        return "done"

    async def cancel() -> None:
        episode = await ToolEnv([wait]).open(task, context())
        step = asyncio.create_task(episode.step(make_action("", call("wait"), call("wait"))))
        await asyncio.sleep(0.02)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step

    asyncio.run(cancel())
    assert ended == ["ended", "ended"]
