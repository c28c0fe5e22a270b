"""Episodes in text environments of Gymnasium."""

from __future__ import annotations

import asyncio

import pytest
from extras import requires

from agent_r1.core.errors import AgentR1Error, InvalidInput
from agent_r1.core.messages import Message
from agent_r1.core.task import Task
from agent_r1.envs.games import Gymnasium
from agent_r1.tools.tool_errors import ToolErrorKind

pytestmark = requires("gymnasium", "gymnasium")

DIRECTIONS = ("left", "down", "right", "up")
LAKE = {"render_mode": "ansi", "is_slippery": False}


def test_actions_are_given_by_name_or_number(play_episode) -> None:
    lake = Gymnasium("FrozenLake-v1", DIRECTIONS, LAKE)
    path = ("down", "Down", "2", "right", "down", "2")
    first, transitions = asyncio.run(play_episode(lake.env, lake.tasks(1)[0], *path))
    assert first.startswith("Answer with one of: left, down, right, up.") and "[S]FFF" in first
    assert "[F]HFH" in transitions[0].messages[0].text
    assert [transition.end for transition in transitions] == [None] * 5 + ["terminal"]
    assert [transition.results[0].data for transition in transitions] == [0.0] * 5 + [1.0]


def test_text_that_is_not_an_action_is_explained_and_changes_nothing(play_episode) -> None:
    lake = Gymnasium("FrozenLake-v1", DIRECTIONS, LAKE)
    _, (wrong, far, moved) = asyncio.run(play_episode(lake.env, lake.tasks(1)[0], "swim", "7", "down"))
    for transition in (wrong, far):
        assert "is no action. The actions are: left, down, right, up." in transition.messages[0].text
        assert transition.results[0].error == ToolErrorKind.INVALID_ARGUMENTS
    assert "[F]HFH" in moved.messages[0].text


def test_the_seed_comes_from_the_task(play_episode) -> None:
    cards = Gymnasium("Blackjack-v1", ("stick", "hit"))
    tasks = [*cards.tasks(5, instruction="Hit or stick?"), Task("any", ())]

    async def dealt(seed: int) -> list[str]:
        return [(await play_episode(cards.env, task, seed=seed))[0] for task in tasks]

    one, two = asyncio.run(dealt(1)), asyncio.run(dealt(2))
    assert one[:5] == two[:5] and len(set(one)) > 3
    assert one[0].startswith("Hit or stick?\n\n[")
    assert one[5] != two[5]  # a task without a seed differs by attempt


def test_custom_environments_are_found_by_import(play_episode) -> None:
    echo = Gymnasium("hostile_gymnasium:Echo-v0")
    first, (echoed, refused) = asyncio.run(
        play_episode(echo.env, Task("t", (Message.user("Speak."),)), "hello", "x" * 99)
    )
    assert first == "Speak.\n\nspeak" and echoed.messages[0].text == "hello"
    assert not refused.results[0].ok
    with pytest.raises(AgentR1Error, match="the game broke"):
        asyncio.run(play_episode(echo.env, Task("t", ()), "raise"))
    slow = Gymnasium("hostile_gymnasium:Echo-v0", timeout=4.0)
    with pytest.raises(AgentR1Error, match="no answer within 4 seconds"):
        asyncio.run(play_episode(slow.env, Task("t", ()), "hang"))


@pytest.mark.parametrize(
    ("name", "actions", "line"),
    [
        ("FrozenLake-v1", ("left", "right"), "got 2 names; name the actions of Discrete"),
        ("Pendulum-v1", (), "got Box; wrap it so that its actions are Discrete or Text"),
    ],
)
def test_an_unsuitable_game_is_an_error_of_one_line(name: str, actions: tuple[str, ...], line: str) -> None:
    with pytest.raises(InvalidInput, match=line) as caught:
        Gymnasium(name, actions)
    assert "\n" not in str(caught.value)
