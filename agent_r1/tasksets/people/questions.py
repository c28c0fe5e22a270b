"""Questions about invented people. To answer a question, an agent must find one fact or a chain of facts."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

from agent_r1.core.errors import InvalidInput
from agent_r1.core.messages import Message
from agent_r1.core.task import Task
from agent_r1.tasksets.people.vocabulary import HELD_OUT_PERSONAL, HELD_OUT_VALUED, PERSONAL, VALUED
from agent_r1.tasksets.people.world import Chain, WorldKey, open_world

KNOWN = frozenset(relation.name for relation in (*PERSONAL, *VALUED))
UNSEEN = frozenset((HELD_OUT_PERSONAL.name, HELD_OUT_VALUED.name))


@dataclass(frozen=True, slots=True)
class Split:
    """How the questions of a split are drawn.

    Attributes:
        owner: the name of the list with the surnames of the people: "train", "validation" or "test". No surname is in
            two lists.
        worlds: the number of worlds (sets of people).
        tasks: the number of questions.
        hops: how many facts a question needs. The numbers are used in turn: with (1, 2), the questions need 1, 2, 1,
            2, .. facts.
        held_out_wordings: whether pages and questions use wordings that are not used in training.
        last: the possible names of the last relation in a question's chain of facts. In "Who is the boss of Ann's
            brother?", the first relation is "brother", and the last relation is "boss".

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
"""The splits. A question with n hops needs a chain of n facts. Training questions have one or two hops.

The splits ``1-hop`` to ``5-hop`` are test splits. The other test splits have one or two hops, and one difference from
training:

- ``paraphrased``: the wordings of pages and questions.
- ``renamed-tool``: the name of the search tool.
- ``unseen-relation``: the last relation of each question.
"""

_TRIES = 10_000
"""The maximum number of attempts to draw a new question.

An attempt fails if the random chain of facts ends too early, or if the question has already been drawn.
"""


def tasks(split: str, seed: int, training_hops: tuple[int, ...] = SPLITS["train"].hops) -> tuple[Task, ...]:
    """Return the tasks of a split. Only the tasks of ``train`` depend on ``seed`` and ``training_hops``.

    ``training_hops`` replaces ``Split.hops``. Equal arguments give equal tasks in the same order. Raises InvalidInput
    if the split is unknown.
    """
    if split not in SPLITS:
        raise InvalidInput("people split", got=split, do=f"give one of {', '.join(SPLITS)}")
    recipe = replace(SPLITS[split], hops=training_hops) if split == "train" else SPLITS[split]
    prefix = f"{seed}/" if recipe.owner == "train" else ""
    asked: set[str] = set()
    return tuple(_draw_task(split, prefix, recipe, index, asked) for index in range(recipe.tasks))


def world_of(task: Task) -> WorldKey:
    key = task.data["world"]
    assert isinstance(key, WorldKey)
    return key


def _draw_task(split: str, prefix: str, recipe: Split, index: int, asked: set[str]) -> Task:
    """Return the task with the number ``index`` of the split ``split``. Its random question is not in ``asked``.

    The question is added to ``asked``. ``recipe`` says how the questions of the split are drawn. The names of the
    worlds (sets of people) begin with ``prefix``: with the prefix "0/", the worlds are "0/0", "0/1", .. (see
    ``WorldKey``). Raises InvalidInput if no new question is found.
    """
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
    """Return a question that asks for the last value of ``chain``.

    If ``held_out_wording`` is True, the wording is one that no training question uses. Otherwise the wording is drawn
    from the wordings of the training questions.

    Example:
        "In which city was the teacher of the rival of Clara Hale born?"
    """
    *way, last = chain.relations
    person = "".join(f"the {relation.noun} of " for relation in reversed(way)) + chain.start
    wording = last.held_out_question if held_out_wording else rng.choice(last.questions)
    return wording.format(x=person)
