"""Questions about generated wikis, in several wordings. To answer a question, an agent must find a chain of facts."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from agent_r1.core.errors import InvalidInput
from agent_r1.core.messages import Message
from agent_r1.core.task import Task
from agent_r1.tasksets.tinywiki.wiki import UNSEEN, UNSEEN_RELATION, Chain, open_wiki

INSTRUCTION = Message.system("Reply with <answer>name</answer>.")


def _nested(chain: Chain) -> str:
    return "".join(f"the {relation} of " for relation in reversed(chain.relations))


def _forward(chain: Chain) -> str:
    return ", then ".join(f"the {relation}" for relation in chain.relations)


# For the chain Alba -capital-> .. -mayor-> ..:
# style-a: What is the mayor of the capital of Alba?
# style-b: Start at Alba. Take the capital, then the mayor. Who is it?
STYLES: Mapping[str, Callable[[Chain], str]] = {
    "style-a": lambda chain: f"What is {_nested(chain)}{chain.start}?",
    "style-b": lambda chain: f"Start at {chain.start}. Take {_forward(chain)}. Who is it?",
}
"""The wordings of training questions, by name. A wording is a function that turns a chain of facts into a question."""

PARAPHRASES: Mapping[str, Callable[[Chain], str]] = {
    "who": lambda chain: f"Who is {_nested(chain)}{chain.start}?",
    "command": lambda chain: f"Find {_nested(chain)}{chain.start}.",
    "topic": lambda chain: f"{chain.start}: what is {_nested(chain)}it?",
    "swapped": lambda chain: f"Take {_forward(chain)}. Start at {chain.start}. Who is it?",
}
"""Wordings that are not trained on, by name.

The model tiny-base knows every word of the written questions, so the questions test new wordings and not new words.
"""

_WORDINGS = {**STYLES, **PARAPHRASES}


def conversation(question: str) -> tuple[Message, ...]:
    return (INSTRUCTION, Message.user(question))


@dataclass(frozen=True, slots=True)
class Split:
    """How the questions of a split are drawn.

    Attributes:
        owner: the class of the wikis: "train", "validation", "test" or ``UNSEEN``.
        wikis: the number of wikis.
        tasks: the number of questions.
        kinds: the kinds of questions, as pairs (name of the wording, number of facts in the chain). The kinds are used
            in turn: in the example below, the questions need 1, 2, 1, 2, .. facts.
        relation: a relation that every chain must contain, or None.

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
    # A third of the validation questions has three hops: the best checkpoint should answer these, too.
    "validation": Split("validation", wikis=4, tasks=240, kinds=_IN_DOMAIN + 2 * _THREE_HOP),
    "style-a": Split("test", wikis=4, tasks=400, kinds=tuple(("style-a", hops) for hops in _HOPS)),
    "style-b": Split("test", wikis=4, tasks=400, kinds=tuple(("style-b", hops) for hops in _HOPS)),
    "three-hop": Split("test", wikis=4, tasks=400, kinds=_THREE_HOP),
    # Naive RAG, which searches once, can answer these questions.
    "one-hop": Split("test", wikis=4, tasks=400, kinds=tuple((style, 1) for style in STYLES)),
    "paraphrased": Split("test", wikis=4, tasks=400, kinds=tuple((w, hops) for hops in _HOPS for w in PARAPHRASES)),
    "renamed-tool": Split("test", wikis=4, tasks=400, kinds=_IN_DOMAIN),
    "unseen-relation": Split(UNSEEN, wikis=4, tasks=400, kinds=_IN_DOMAIN, relation=UNSEEN_RELATION),
}
"""The splits, by name. A question with n hops needs a chain of n facts."""

_TRIES = 1000
"""The maximum number of questions that are drawn for one task, until one is new and has the required relation.

If no drawn question is suitable, the task gets the last question.
"""


@lru_cache(maxsize=32)
def tasks(split: str, seed: int) -> tuple[Task, ...]:
    """Return the tasks of a split. Only the tasks of ``train`` depend on ``seed``.

    Equal arguments give equal tasks in the same order. Raises InvalidInput if the split is unknown.
    """
    if split not in SPLITS:
        raise InvalidInput("tinywiki split", got=split, do=f"give one of {', '.join(SPLITS)}")
    made = SPLITS[split]
    prefix = f"train/{seed}" if made.owner == "train" else made.owner
    asked: set[tuple[str, str]] = set()  # (wiki, question)
    return tuple(_task(split, prefix, made, index, asked) for index in range(made.tasks))


def _task(split: str, prefix: str, made: Split, index: int, asked: set[tuple[str, str]]) -> Task:
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
