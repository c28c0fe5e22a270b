"""The transcripts of a bad planner, which tiny-base imitates before reinforcement learning.

The planner reads well: each thought is a fact on the last page it saw. Its flaw is strategy: mostly it answers too
early, takes any fact, wanders, searches the same page again, or guesses. One time in seven it follows the question
to its end, so that reinforcement learning can find this strategy.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from agent_r1.core.messages import Message, ToolCall
from agent_r1.tasksets.tinywiki.questions import STYLES, conversation
from agent_r1.tasksets.tinywiki.retriever import retrieve
from agent_r1.tasksets.tinywiki.wiki import Chain, Wiki


@dataclass(frozen=True, slots=True)
class Move:
    """One turn: a thought, then a search for ``target`` or, if ``final``, the answer ``target``.

    Example:
        Move("mayor Bruno.", "Bruno", final=False)
    """

    thought: str
    target: str
    final: bool


Moves = tuple[Move, ...]
Strategy = Callable[[Wiki, Chain, random.Random], Moves]


def _follow(start: str, facts: list[tuple[str, str]]) -> Moves:
    """Search ``start``, follow the facts (relation, value), and answer the last value."""
    last = len(facts) - 1
    walk = [Move(f"{relation} {value}.", value, index == last) for index, (relation, value) in enumerate(facts)]
    return (Move("", start, final=False), *walk)


def right(wiki: Wiki, chain: Chain, rng: random.Random) -> Moves:
    return _follow(chain.start, list(zip(chain.relations, chain.values, strict=True)))


def early(wiki: Wiki, chain: Chain, rng: random.Random) -> Moves:
    """Answer after the first hop, which is right only for questions of one hop."""
    return _follow(chain.start, [(chain.relations[0], chain.values[0])])


def any_fact(wiki: Wiki, chain: Chain, rng: random.Random) -> Moves:
    return _follow(chain.start, [rng.choice(list(wiki.facts[chain.start].items()))])


def wander(wiki: Wiki, chain: Chain, rng: random.Random) -> Moves:
    """Follow two random facts."""
    first = rng.choice(list(wiki.facts[chain.start].items()))
    return _follow(chain.start, [first, rng.choice(list(wiki.facts[first[1]].items()))])


def repeat(wiki: Wiki, chain: Chain, rng: random.Random) -> Moves:
    """Search the first page twice, then take any fact."""
    return (Move("", chain.start, final=False), *any_fact(wiki, chain, rng))


def guess(wiki: Wiki, chain: Chain, rng: random.Random) -> Moves:
    return (Move("", rng.choice(wiki.titles), final=True),)


SHARES: Mapping[Strategy, float] = {right: 0.15, early: 0.35, any_fact: 0.15, wander: 0.15, guess: 0.10, repeat: 0.10}
"""The probability of each strategy."""

HOPS = (1, 2, 2, 3)


def plan(wiki: Wiki, chain: Chain, rng: random.Random) -> Moves:
    """Return the planner's moves for a question, one per turn."""
    (strategy,) = rng.choices(list(SHARES), list(SHARES.values()))
    return strategy(wiki, chain, rng)


def transcript(wiki: Wiki, rng: random.Random) -> tuple[Message, ...]:
    """Return one conversation of the bad planner."""
    chain = wiki.chain(rng.choice(HOPS), rng)
    messages = list(conversation(ask(chain, rng)))
    for move in plan(wiki, chain, rng):
        messages += _turn(move, wiki)
    return tuple(messages)


def reading(wiki: Wiki, rng: random.Random) -> tuple[Message, ...]:
    """Return a conversation in which the page is given: the planner reads the first hop from it and answers that."""
    chain = wiki.chain(rng.choice(HOPS), rng)
    question = ask(chain, rng)
    given = f"{retrieve(wiki, question)}\n\n{question}"
    return (*conversation(given), _message(Move(f"{chain.relations[0]} {chain.values[0]}.", chain.values[0], True)))


def ask(chain: Chain, rng: random.Random) -> str:
    return rng.choice(list(STYLES.values()))(chain)


def _turn(move: Move, wiki: Wiki) -> list[Message]:
    message = _message(move)
    return [message] if move.final else [message, Message.tool(retrieve(wiki, move.target), "call_0")]


def _message(move: Move) -> Message:
    if move.final:
        return Message.assistant("\n".join([move.thought] * bool(move.thought) + [f"<answer>{move.target}</answer>"]))
    return Message.assistant(move.thought, (ToolCall("call_0", "search", {"query": move.target}, ""),))
