"""Episodes in games of TextArena."""

from __future__ import annotations

import asyncio
import random

import pytest
from extras import requires

from agent_r1.core.errors import AgentR1Error, InvalidInput
from agent_r1.core.task import Task
from agent_r1.envs.games import TextArena, random_move

pytestmark = requires("textarena", "textarena")


def test_a_game_for_one_shows_new_messages_and_a_final_reward(play_episode) -> None:
    game = TextArena("GuessTheNumber-v0", {"max_number": 4})
    (task,) = game.tasks(1)
    first, transitions = asyncio.run(play_episode(game.env, task, *(f"[{number}]" for number in range(1, 5))))
    assert "between 1 and 4" in first
    shown_texts = [transition.messages[0].text for transition in transitions if transition.messages]
    assert set(shown_texts) <= {"The target number is higher."}  # no prompt, no history, none of its own actions
    won = next(transition for transition in transitions if transition.end)
    assert won.end == "terminal" and won.results[0].data == 1.0


def test_attempts_at_a_task_have_the_same_game_and_tasks_differ(play_episode) -> None:
    game = TextArena("LightsOut-v0")
    one, other = game.tasks(2)

    async def first(task: Task, seed: int) -> str:
        return (await play_episode(game.env, task, seed=seed))[0]

    async def three() -> list[str]:
        return await asyncio.gather(first(one, 1), first(one, 2), first(other, 1))

    same, again, different = asyncio.run(three())
    assert same == again != different


def test_the_opponent_draws_from_the_seed_of_the_attempt(play_episode) -> None:
    game = TextArena("TicTacToe-v0")
    (task,) = game.tasks(1)

    async def replies(*seeds: int) -> list[str]:
        played = await asyncio.gather(*(play_episode(game.env, task, "[4]", seed=seed) for seed in seeds))
        return [transitions[0].messages[0].text for _, transitions in played]

    shown_texts = asyncio.run(replies(*range(6), 0))
    assert all("Player 1: [" in text and "Available Moves" in text for text in shown_texts)
    assert shown_texts[0] == shown_texts[6] and len(set(shown_texts)) > 1


def test_a_custom_opponent_plays_to_the_end(play_episode) -> None:
    game = TextArena("Nim-v0", opponent="hostile_games:cautious")
    actions = ("[0 2]", "[1 4]", "[2 2]", "[2 1]", "[2 1]")  # leaves an even rest each time, then takes the last
    _, transitions = asyncio.run(play_episode(game.env, game.tasks(1)[0], *actions[:4]))
    assert [transition.end for transition in transitions] == [None, None, None, "terminal"]
    assert transitions[-1].results[0].data in (1.0, -1.0)


def test_an_opponent_that_hangs_fails_its_episode(play_episode) -> None:
    game = TextArena("Nim-v0", opponent="hostile_games:stubborn", timeout=4.0)
    with pytest.raises(AgentR1Error, match="no answer within 4 seconds"):
        asyncio.run(play_episode(game.env, game.tasks(1)[0], "[0 1]"))


def test_random_moves_are_those_that_the_game_lists() -> None:
    moves = {random_move("Board [9]\nAvailable Moves: '[1]', '[2 3]'", random.Random(seed)) for seed in range(20)}
    assert moves == {"[1]", "[2 3]"}
    with pytest.raises(ValueError, match="lists no moves"):
        random_move("What now? [9]", random.Random(0))


def test_an_unsuitable_game_is_an_error_of_one_line(play_episode) -> None:
    with pytest.raises(InvalidInput, match="got 'GuesTheNumber-v0'; did you mean 'GuessTheNumber-v0'"):
        TextArena("GuesTheNumber-v0")
    crowd = TextArena("ThreePlayerTicTacToe-v0")
    with pytest.raises(AgentR1Error, match="more than two players"):
        asyncio.run(play_episode(crowd.env, crowd.tasks(1)[0]))


def test_tasks_have_different_seeds_and_splits() -> None:
    tasks = TextArena("LightsOut-v0").tasks(3, 2, seed=1)
    assert [task.split for task in tasks] == ["train"] * 3 + ["test"] * 2
    assert len({task.data["seed"] for task in tasks}) == len({task.id for task in tasks}) == 5
