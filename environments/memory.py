"""Memory over turns: the user states one fact per turn, and then asks for the first fact.

The *distance* is the number of facts between the first fact and the question. If old turns are dropped from the prompt,
the score falls at large distances.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from agent_r1.core.environment import RolloutContext
from agent_r1.core.errors import InvalidInput
from agent_r1.core.messages import Message
from agent_r1.core.task import Task
from agent_r1.core.taskset import ReferenceSolutions, TaskSet
from agent_r1.envs.user_env import Reply, UserEnv
from agent_r1.rewards.scoring import FunctionScorer, exact_match
from agent_r1.tasksets.answers import answer, reference
from agent_r1.tasksets.tinywiki.model import TINY_BASE_RECIPE
from agent_r1.tasksets.tinywiki.questions import INSTRUCTION
from agent_r1.tasksets.tinywiki.wiki import ENTITIES, RELATIONS

DISTANCES: Mapping[str, tuple[int, ...]] = {
    "train": (1, 2, 3),
    "validation": (1, 2, 3),
    "distance-1": (1,),
    "distance-3": (3,),
    "distance-8": (8,),
}
"""The distances of each split. A distance is the number of facts between the first fact and the question.

The tasks of a split use its distances in turn: in ``train``, the distances of the tasks are 1, 2, 3, 1, 2, 3, ..
"""

TASKS = 400
"""The number of tasks of every split except ``train``. ``train`` has four times as many tasks."""

MAX_TURNS = 16


@dataclass(frozen=True, slots=True)
class Facts:
    """The messages of the user: one fact per turn, then a question about the first fact. No word is in two facts.

    Example:
        Facts(("Alba: mayor Bruno.", "Corin: river Dovra.", "What is the mayor of Alba?"), answer="Bruno")
    """

    turns: tuple[str, ...]
    answer: str


class FactUser:
    """A simulated user that sends its messages in order, whatever the agent replies, and then ends the conversation."""

    async def reply(self, task: Task, said: Sequence[Message], context: RolloutContext) -> Reply:
        told: Facts = task.data["told"]
        spoken = sum(message.role == "assistant" and not message.calls for message in said)
        return Reply(told.turns[spoken]) if spoken < len(told.turns) else Reply("", end=True)


def build(seed: int) -> TaskSet:
    """Build the task set. ``seed`` determines the training tasks."""
    return TaskSet(
        name="memory",
        env=UserEnv([], FactUser(), max_turns=MAX_TURNS),
        tasks=lru_cache(lambda split: tasks(split, seed)),
        scorers=(FunctionScorer({"em": exact_match}),),
        rewards=("em",),
        recipe={**TINY_BASE_RECIPE, "max_tokens": 16},
        evaluation=tuple(split for split in DISTANCES if split.startswith("distance")),
        validation="validation",
        solutions=solutions,
    )


def tasks(split: str, seed: int) -> tuple[Task, ...]:
    """Return the tasks of a split. Only the tasks of ``train`` depend on ``seed``.

    Equal arguments give equal tasks in the same order. Raises InvalidInput if the split is unknown.
    """
    if split not in DISTANCES:
        raise InvalidInput("split of memory", got=split, do=f"give one of {', '.join(DISTANCES)}")
    drawn, count = (f"train/{seed}", 4 * TASKS) if split == "train" else (split, TASKS)
    return tuple(_task(split, index, random.Random(f"memory/{drawn}/{index}")) for index in range(count))


def _task(split: str, index: int, rng: random.Random) -> Task:
    distance = DISTANCES[split][index % len(DISTANCES[split])]
    told = draw_facts(distance, rng)
    messages = (INSTRUCTION, Message.user(told.turns[0]))
    return Task(f"{split}/{index}", messages, {"answers": (told.answer,), "told": told}, split)


def draw_facts(distance: int, rng: random.Random) -> Facts:
    names = rng.sample(ENTITIES, 2 * (distance + 1))
    relations = rng.sample(RELATIONS, distance + 1)
    facts = list(zip(names[::2], relations, names[1::2], strict=True))
    title, relation, answer = facts[0]
    question = f"What is the {relation} of {title}?"
    return Facts((*(f"{name}: {what} {value}." for name, what, value in facts), question), answer)


def solutions(task: Task) -> ReferenceSolutions:
    told: Facts = task.data["told"]
    noted = [Message.assistant("Noted.") for _ in told.turns[1:]]
    newest = told.turns[-2].rstrip(".").rpartition(" ")[2]
    too_early = [answer(told.answer), *noted]
    return ReferenceSolutions(
        gold=(reference("the fact told first", *noted, answer(told.answer)),),
        wrong=(
            reference("the fact told last", *noted, answer(newest)),
            reference("the answer before it is asked for", *too_early),
            reference("no answer", *noted, Message.assistant("I forgot.")),
        ),
        expected_rewards={"em": 1.0},
    )
