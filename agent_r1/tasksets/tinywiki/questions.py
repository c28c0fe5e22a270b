"""Questions about chains of facts, in two styles, and the splits made of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from agent_r1.core.errors import InvalidInput
from agent_r1.core.messages import Message
from agent_r1.core.task import Task
from agent_r1.tasksets.tinywiki.names import UNSEEN_RELATION
from agent_r1.tasksets.tinywiki.paraphrases import PARAPHRASES
from agent_r1.tasksets.tinywiki.wiki import UNSEEN, Chain, open_wiki

INSTRUCTION = Message.system("Reply with <answer>name</answer>.")


def nested(chain: Chain) -> str:
    """Style a: the last relation comes first.

    Example:
        "What is the capital of the mayor of Alba?"
    """
    return "What is " + "".join(f"the {relation} of " for relation in reversed(chain.relations)) + f"{chain.start}?"


def forward(chain: Chain) -> str:
    """Style b: the relations in the order in which they are followed.

    Example:
        "Start at Alba. Take the mayor, then the capital. Who is it?"
    """
    return f"Start at {chain.start}. Take " + ", then ".join(f"the {r}" for r in chain.relations) + ". Who is it?"


STYLES: Mapping[str, Callable[[Chain], str]] = {"style-a": nested, "style-b": forward}
"""The wordings of questions in training."""

_WORDINGS = {**STYLES, **PARAPHRASES}


def conversation(question: str) -> tuple[Message, ...]:
    """Return the messages that open an episode."""
    return (INSTRUCTION, Message.user(question))


@dataclass(frozen=True, slots=True)
class Split:
    """The recipe of a split: its wikis, and the wordings and lengths through which its questions rotate.

    If ``relation`` is given, every question asks for it.

    Example:
        Split("test", wikis=4, tasks=400, kinds=(("style-a", 1), ("style-a", 2)))
    """

    owner: str
    wikis: int
    tasks: int
    kinds: tuple[tuple[str, int], ...]
    relation: str | None = None


_HOPS = (1, 2, 2, 2)
_IN_DOMAIN = tuple((style, hops) for hops in _HOPS for style in STYLES)
_THREE_HOP = tuple((style, 3) for style in STYLES)

SPLITS: Mapping[str, Split] = {
    "train": Split("train", wikis=40, tasks=4000, kinds=_IN_DOMAIN),
    "validation": Split("validation", wikis=4, tasks=240, kinds=_IN_DOMAIN + 2 * _THREE_HOP),
    "style-a": Split("test", wikis=4, tasks=400, kinds=tuple(("style-a", hops) for hops in _HOPS)),
    "style-b": Split("test", wikis=4, tasks=400, kinds=tuple(("style-b", hops) for hops in _HOPS)),
    "three-hop": Split("test", wikis=4, tasks=400, kinds=_THREE_HOP),
    "one-hop": Split("test", wikis=4, tasks=400, kinds=tuple((style, 1) for style in STYLES)),
    "paraphrased": Split("test", wikis=4, tasks=400, kinds=tuple((w, hops) for hops in _HOPS for w in PARAPHRASES)),
    "renamed-tool": Split("test", wikis=4, tasks=400, kinds=_IN_DOMAIN),
    "unseen-relation": Split(UNSEEN, wikis=4, tasks=400, kinds=_IN_DOMAIN, relation=UNSEEN_RELATION),
}
"""Questions rotate through the kinds, so that any prefix of a split is balanced.

A quarter of the questions is 1-hop, the rest 2-hop. RL never trains on 3-hop questions. A third of the validation
questions, whose wikis share no fact with the test wikis, is 3-hop, because the checkpoint chosen by validation has to
hold up there as well. ``one-hop`` is a control: a reader that is given the right page has to know the answer. The last
three splits try the agent on other wordings, on a renamed tool, and on a relation that is in no page of training.
"""


_TRIES = 1000
"""Chains drawn for one question; a wiki has far more than a split needs."""


def tasks(split: str, seed: int) -> tuple[Task, ...]:
    """Return the tasks of a split, always in the same order. ``seed`` draws the training wikis only.

    Raises InvalidInput for an unknown split.
    """
    if split not in SPLITS:
        raise InvalidInput("tinywiki split", got=split, do=f"give one of {', '.join(SPLITS)}")
    made = SPLITS[split]
    prefix = f"train/{seed}" if made.owner == "train" else made.owner
    asked: set[tuple[str, str]] = set()
    return tuple(_task(split, prefix, made, index, asked) for index in range(made.tasks))


def _task(split: str, prefix: str, made: Split, index: int, asked: set[tuple[str, str]]) -> Task:
    """Draw a question that its wiki has not had yet, and add it to ``asked``."""
    wording, hops = made.kinds[index % len(made.kinds)]
    wiki = f"{prefix}/{index // len(made.kinds) % made.wikis}"
    rng = random.Random(f"{prefix}/{split}/{index}")
    for _ in range(_TRIES):
        chain = open_wiki(wiki).chain(hops, rng)
        question = _WORDINGS[wording](chain)
        if (wiki, question) not in asked and (made.relation is None or made.relation in chain.relations):
            break
    asked.add((wiki, question))
    data = {"answers": (chain.answer,), "wiki": wiki, "chain": chain}
    return Task(f"{split}/{index}", conversation(question), data, split)
