"""The generated task sets, played through the real renderer: seeds, repeatability, and masks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import pytest

from agent_r1.core.environment import RolloutContext
from agent_r1.core.inference import SamplingParams
from agent_r1.core.messages import Message, to_openai
from agent_r1.core.task import Task
from agent_r1.core.taskset import ReferenceSolution, ReferenceSolutions, TaskSet
from agent_r1.core.trajectory import AttemptId, Status, Trajectory
from agent_r1.model.load import load_tokenizer
from agent_r1.renderers.formats.json_formats import CLOSE, OPEN
from agent_r1.renderers.template_renderer import TemplateRenderer
from agent_r1.rollout.agent_loop import Agent
from agent_r1.rollout.collector import RolloutLimits
from agent_r1.rollout.scripted import ScriptedEngine
from agent_r1.tasksets.tinywiki.model import TINY_BASE_FOLDER
from agent_r1.training.evaluate import Method, attempts
from environments import memory, orders, unreliable

TASKSETS = (memory, orders, unreliable)
Play = Callable[[TaskSet, Task, ReferenceSolution], Trajectory]


def written(message: Message) -> str:
    """Return the message as the text that a policy samples."""
    calls = [json.dumps(call["function"]) for call in to_openai(message).get("tool_calls", ())]
    return message.text + "".join(f"{OPEN}\n{call}\n{CLOSE}" for call in calls)


@pytest.fixture(scope="module")
def play() -> Play:
    renderer = TemplateRenderer(load_tokenizer(str(TINY_BASE_FOLDER)))

    def play(taskset: TaskSet, task: Task, solution: ReferenceSolution) -> Trajectory:
        turn = iter(range(100))
        engine = ScriptedEngine(renderer, lambda prompt: written(solution.respond((), next(turn))))
        agent = Agent(engine, renderer, SamplingParams(max_tokens=10_000), 100_000)
        method = Method("solution", agent, taskset.env)
        (group,) = asyncio.run(attempts(method, taskset.scorers, [task], 1, RolloutLimits(retries=0)))
        return group.trajectories[0]

    return play


@pytest.mark.parametrize("module", TASKSETS)
def test_training_tasks_depend_on_the_seed_only_and_test_tasks_are_fixed(module: ModuleType) -> None:
    first, again, other = (module.build(seed) for seed in (0, 0, 1))
    assert first.tasks("train") == again.tasks("train")
    drawn, redrawn = ([task.messages for task in taskset.tasks("train")] for taskset in (first, other))
    assert drawn != redrawn
    for split in first.evaluation:
        assert first.tasks(split) == other.tasks(split)


@pytest.mark.parametrize("module", TASKSETS)
def test_a_repeated_episode_is_equal(module: ModuleType, play: Play) -> None:
    taskset = module.build(seed=0)
    assert taskset.solutions is not None
    task = taskset.tasks("train")[5]
    (solution, *_) = taskset.solutions(task).gold

    def tokens() -> list[tuple[object, ...]]:
        return [(turn.new_ids, turn.action_ids) for turn in play(taskset, task, solution).turns]

    assert tokens() == tokens()


def test_a_users_message_is_not_part_of_the_action(play: Play) -> None:
    renderer = TemplateRenderer(load_tokenizer(str(TINY_BASE_FOLDER)))
    taskset = memory.build(seed=0)
    task = next(task for task in taskset.tasks("train") if len(task.data["told"].turns) == 4)
    assert taskset.solutions is not None
    (solution, *_) = taskset.solutions(task).gold
    trajectory = play(taskset, task, solution)
    assert len(trajectory.turns) == 4
    for turn, text in zip(trajectory.turns, task.data["told"].turns, strict=True):
        observed = renderer.tokenizer.decode(turn.new_ids)
        acted = renderer.tokenizer.decode(turn.action_ids)
        assert text in observed and text not in acted
        assert "Noted" not in observed


def test_a_solution_of_another_request_earns_nothing(play: Play) -> None:
    taskset = orders.build(seed=0)
    assert taskset.solutions is not None
    task = taskset.tasks("test")[0]
    (solution, *_) = taskset.solutions(task).gold
    wish = task.data["wish"]
    order = next(number for number in task.data["orders"] if number != wish.order)
    other = replace(task, data={**task.data, "wish": replace(wish, order=order)})
    assert play(taskset, task, solution).rewards["served"] == 1.0
    assert play(taskset, other, solution).rewards["served"] == 0.0


@pytest.fixture(scope="module")
def shop() -> tuple[TaskSet, Task, ReferenceSolutions]:
    taskset = orders.build(seed=0)
    task = next(task for task in taskset.tasks("train") if task.data["wish"].field == "colour")
    assert taskset.solutions is not None
    return taskset, task, taskset.solutions(task)


def test_only_a_finished_conversation_counts_as_served(
    shop: tuple[TaskSet, Task, ReferenceSolutions], play: Play
) -> None:
    taskset, task, solutions = shop
    endless = [each for each in solutions.wrong if each.name in ("the price in calls only", "told, and never ended")]
    trajectories = [play(taskset, task, solution) for solution in endless]
    assert [each.status for each in trajectories] == [Status.OUT_OF_TURNS] * 2
    assert [(each.rewards["state"], each.rewards["served"]) for each in trajectories] == [(1.0, 0.0)] * 2


def customer_replies(task: Task, *texts: str) -> list[str]:
    context = RolloutContext(AttemptId("run", task.id, 0, 0), 0)
    replies = (orders.Customer().reply(task, (Message.assistant(text),), context) for text in texts)
    return [asyncio.run(reply).text for reply in replies]


def test_the_customer_answers_one_thing_at_a_time(shop: tuple[TaskSet, Task, ReferenceSolutions]) -> None:
    _, task, _ = shop
    wish = task.data["wish"]
    one = "One question at a time, please."
    assert customer_replies(task, "number colour city?", "Number? Colour?") == [one, one]
    found = f"I have found order number {wish.order}. What colour shall it be?"
    assert customer_replies(task, "What is its number?", found) == [
        f"It is order {wish.order}.",
        f"Make it {wish.value}.",
    ]
