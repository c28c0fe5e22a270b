"""A bad planner's transcripts: what tiny-base learns to do before reinforcement learning.

The planner reads well: whatever it thinks stands on the last page it saw. Its flaw is strategy: where the question
leads on it mostly answers at once, it takes any fact of a page, searches the same page again, or guesses without a
search. All of this is left to chance at every turn, so now and then it follows a question to its end, and
reinforcement has something to find.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from agent_r1.core.messages import Call, Message
from agent_r1.tasks.tinywiki.questions import STYLES, conversation
from agent_r1.tasks.tinywiki.retriever import retrieve
from agent_r1.tasks.tinywiki.wiki import Chain, Wiki

HOPS = (1, 2, 2, 3)
"""Lengths of the questions it is asked, drawn with equal chance."""

GUESS, REPEAT, STRAY, EARLY = 0.10, 0.10, 0.30, 0.65
"""How likely it is to answer without a search, to search the first page twice, to take any fact of a page (and to be
lost from there on), and to answer although the question leads on."""


@dataclass(frozen=True, slots=True)
class Move:
    """One turn: a thought, then a search for ``target`` or, where ``final``, the answer ``target``.

    Example:
        Move("mayor Bruno.", "Bruno", final=False)
    """

    thought: str
    target: str
    final: bool


def plan(wiki: Wiki, chain: Chain, rng: random.Random) -> tuple[Move, ...]:
    """What the planner does about a question, turn by turn."""
    if rng.random() < GUESS:
        return (Move("", rng.choice(wiki.titles), final=True),)
    searches = 2 if rng.random() < REPEAT else 1
    facts = _read(wiki, chain, rng)
    return follow(chain.start, facts, searches)


def follow(start: str, facts: list[tuple[str, str]], searches: int = 1) -> tuple[Move, ...]:
    """Search ``start``, walk along facts (relation, value), and answer the last value."""
    last = len(facts) - 1
    walk = [Move(f"{relation} {value}.", value, index == last) for index, (relation, value) in enumerate(facts)]
    return (*[Move("", start, final=False)] * searches, *walk)


def _read(wiki: Wiki, chain: Chain, rng: random.Random) -> list[tuple[str, str]]:
    """The facts it takes, page by page, until it answers."""
    facts: list[tuple[str, str]] = []
    at, lost = chain.start, False
    for leads_on in zip(chain.relations, chain.values, strict=True):
        lost = lost or rng.random() < STRAY
        facts.append(rng.choice(list(wiki.facts[at].items())) if lost else leads_on)
        at = facts[-1][1]
        if rng.random() < EARLY:
            break
    return facts


def transcript(wiki: Wiki, rng: random.Random) -> tuple[Message, ...]:
    """One conversation of the bad planner."""
    chain = wiki.chain(rng.choice(HOPS), rng)
    messages = list(conversation(ask(chain, rng)))
    for move in plan(wiki, chain, rng):
        messages += _turn(move, wiki)
    return tuple(messages)


def reading(wiki: Wiki, rng: random.Random) -> tuple[Message, ...]:
    """The page is given with the question: the planner reads the first hop off it, and answers that."""
    chain = wiki.chain(rng.choice(HOPS), rng)
    question = ask(chain, rng)
    given = f"{retrieve(wiki, question)}\n\n{question}"
    return (*conversation(given), _said(Move(f"{chain.relations[0]} {chain.values[0]}.", chain.values[0], True)))


def ask(chain: Chain, rng: random.Random) -> str:
    return rng.choice(list(STYLES.values()))(chain)


def _turn(move: Move, wiki: Wiki) -> list[Message]:
    said = _said(move)
    return [said] if move.final else [said, Message.tool(retrieve(wiki, move.target), "call_0")]


def _said(move: Move) -> Message:
    if move.final:
        return Message.assistant("\n".join([move.thought] * bool(move.thought) + [f"<answer>{move.target}</answer>"]))
    return Message.assistant(move.thought, (Call("call_0", "search", {"query": move.target}, ""),))
