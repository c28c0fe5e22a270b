"""The generated worlds, played through the real chat format: by seed, exactly repeatable, masks as they should be."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from agent_r1.core.acting import Sampling
from agent_r1.core.messages import Message, to_openai
from agent_r1.core.solution import Solution
from agent_r1.core.task import Task
from agent_r1.core.trajectory import Trajectory
from agent_r1.core.world import World
from agent_r1.model.load import load_tokenizer
from agent_r1.rollout.agent import Agent
from agent_r1.rollout.chat import Chat
from agent_r1.rollout.collector import Limits
from agent_r1.rollout.formats.hermes import CLOSE, OPEN
from agent_r1.rollout.scripted_engine import ScriptedEngine
from agent_r1.tasks import build
from agent_r1.tasks.tinywiki.model import TINY_BASE_FOLDER
from agent_r1.train.evaluate import Method, attempts

NAMES = ("memory", "orders", "unreliable")
Play = Callable[[World, Task, Solution], Trajectory]


def written(message: Message) -> str:
    """The message as a policy writes it."""
    calls = [json.dumps(call["function"]) for call in to_openai(message).get("tool_calls", ())]
    return message.text + "".join(f"{OPEN}\n{call}\n{CLOSE}" for call in calls)


@pytest.fixture(scope="module")
def play() -> Play:
    chat = Chat(load_tokenizer(str(TINY_BASE_FOLDER)))

    def play(world: World, task: Task, solution: Solution) -> Trajectory:
        turn = iter(range(100))
        engine = ScriptedEngine(chat, lambda prompt: written(solution.act((), next(turn))))
        agent = Agent(engine, chat, Sampling(max_tokens=10_000), 100_000)
        method = Method("solution", agent, world.env)
        (group,) = asyncio.run(attempts(method, world.scorers, [task], 1, Limits(retries=0)))
        return group.trajectories[0]

    return play


@pytest.mark.parametrize("name", NAMES)
def test_tasks_depend_on_the_seed_alone_and_test_tasks_not_even_on_that(name: str) -> None:
    first, again, other = (build(name, None, None, seed) for seed in (0, 0, 1))
    assert first.tasks("train") == again.tasks("train")
    drawn, redrawn = ([task.messages for task in world.tasks("train")] for world in (first, other))
    assert drawn != redrawn
    for split in first.evaluation:
        assert first.tasks(split) == other.tasks(split)


@pytest.mark.parametrize("name", NAMES)
def test_lived_again_an_episode_is_the_same(name: str, play: Play) -> None:
    world = build(name, None, None, seed=0)
    assert world.solutions is not None
    task = world.tasks("train")[5]
    (solution, *_) = world.solutions(task).gold

    def tokens() -> list[tuple[object, ...]]:
        return [(turn.new_ids, turn.action_ids) for turn in play(world, task, solution).turns]

    assert tokens() == tokens()


def test_what_a_user_says_is_no_action(play: Play) -> None:
    """Each turn's state gains what the user said; the action's tokens are those of the agent alone."""
    chat = Chat(load_tokenizer(str(TINY_BASE_FOLDER)))
    world = build("memory", None, None, seed=0)
    task = next(task for task in world.tasks("train") if len(task.data["told"].turns) == 4)
    assert world.solutions is not None
    (solution, *_) = world.solutions(task).gold
    lived = play(world, task, solution)
    assert len(lived.turns) == 4
    for turn, said in zip(lived.turns, task.data["told"].turns, strict=True):
        observed = chat.tokenizer.decode(turn.new_ids)
        acted = chat.tokenizer.decode(turn.action_ids)
        assert said in observed and said not in acted
        assert "Noted" not in observed


def test_a_solution_of_another_wish_earns_nothing(play: Play) -> None:
    """The control of the checks above."""
    world = build("orders", None, None, seed=0)
    assert world.solutions is not None
    task = world.tasks("test")[0]
    (solution, *_) = world.solutions(task).gold
    wish = task.data["wish"]
    order = next(number for number in task.data["orders"] if number != wish.order)
    other = replace(task, data={**task.data, "wish": replace(wish, order=order)})
    assert play(world, task, solution).rewards["served"] == 1.0
    assert play(world, other, solution).rewards["served"] == 0.0
