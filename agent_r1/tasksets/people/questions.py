"""Questions about chains of facts, the splits made of them, and the examples in the prompt."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from agent_r1.core.errors import InvalidInput
from agent_r1.core.messages import Message
from agent_r1.core.task import Task
from agent_r1.tasksets.people.vocabulary import HELD_OUT_PERSONAL, HELD_OUT_VALUED, PERSONAL, VALUED
from agent_r1.tasksets.people.world import Chain, WorldKey, open_world

KNOWN = frozenset(relation.name for relation in (*PERSONAL, *VALUED))
UNSEEN = frozenset((HELD_OUT_PERSONAL.name, HELD_OUT_VALUED.name))


@dataclass(frozen=True, slots=True)
class Split:
    """The recipe of a split: the class of its people, its worlds, and the numbers of hops through which it rotates.

    Attributes:
        owner: the class of surnames.
        worlds: how many worlds the questions are about.
        tasks: how many questions there are.
        hops: the numbers of hops of the questions.
        held_out_wordings: pages and questions use wordings that are never trained on.
        last: the last relation of a question is one of these.

    Example:
        Split("test", worlds=10, tasks=400, hops=(2,))
    """

    owner: str
    worlds: int
    tasks: int
    hops: tuple[int, ...]
    held_out_wordings: bool = False
    last: frozenset[str] = KNOWN


SPLITS: Mapping[str, Split] = {
    "train": Split("train", worlds=100, tasks=8000, hops=(1, 2)),
    "validation": Split("validation", worlds=10, tasks=240, hops=(1, 2)),
    **{f"{hops}-hop": Split("test", worlds=10, tasks=400, hops=(hops,)) for hops in (1, 2, 3, 4, 5)},
    "paraphrased": Split("test", worlds=10, tasks=400, hops=(1, 2), held_out_wordings=True),
    "renamed-tool": Split("test", worlds=10, tasks=400, hops=(1, 2)),
    "unseen-relation": Split("test", worlds=10, tasks=400, hops=(1, 2), last=UNSEEN),
}
"""Training has questions of one and two hops. Three and more hops, ``paraphrased``, ``renamed-tool`` and
``unseen-relation`` change what is constant in training; they are never trained on."""

_TRIES = 10_000
"""Walks drawn for one question; most end too early or on another relation."""


def tasks(split: str, seed: int) -> tuple[Task, ...]:
    """Return the tasks of a split, always in the same order. ``seed`` draws the training worlds only.

    Raises InvalidInput for an unknown split.
    """
    if split not in SPLITS:
        raise InvalidInput("people split", got=split, do=f"give one of {', '.join(SPLITS)}")
    recipe = SPLITS[split]
    prefix = f"{seed}/" if recipe.owner == "train" else ""
    asked: set[str] = set()
    return tuple(_draw_task(split, prefix, recipe, index, asked) for index in range(recipe.tasks))


def world_of(task: Task) -> WorldKey:
    """Return the world that a task is about."""
    key = task.data["world"]
    assert isinstance(key, WorldKey)
    return key


def _draw_task(split: str, prefix: str, recipe: Split, index: int, asked: set[str]) -> Task:
    """Draw a question that the split does not have yet, and add it to ``asked``."""
    hops = recipe.hops[index % len(recipe.hops)]
    number = f"{prefix}{index // len(recipe.hops) % recipe.worlds}"
    key = WorldKey(recipe.owner, number, recipe.held_out_wordings, recipe.last == UNSEEN)
    world = open_world(key)
    rng = random.Random(f"people/{prefix}{split}/{index}")
    for _ in range(_TRIES):
        chain = world.chain(hops, recipe.last, rng)
        if chain is None:
            continue
        text = question(chain, recipe.held_out_wordings, rng)
        if f"{number}: {text}" not in asked:
            asked.add(f"{number}: {text}")
            data = {"answers": (chain.answer,), "world": key, "chain": chain}
            return Task(f"{split}/{index}", (Message.user(text),), data, split)
    raise InvalidInput(
        "people split", got=f"{split} with {recipe.tasks} tasks", do="ask for fewer: its worlds are exhausted"
    )


def question(chain: Chain, held_out_wording: bool, rng: random.Random) -> str:
    """Return a question for the last value of a chain.

    Example:
        "In which city was the teacher of the rival of Clara Hale born?"
    """
    *way, last = chain.relations
    person = "".join(f"the {relation.noun} of " for relation in reversed(way)) + chain.start
    wording = last.held_out_question if held_out_wording else rng.choice(last.questions)
    return wording.format(x=person)
