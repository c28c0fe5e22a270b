"""The transcripts of a bad planner, which tiny-base imitates before reinforcement learning.

The planner reads well: each thought is a fact on the last page that it saw. It answers most questions of one hop. It
never answers a question of two hops: it stops after the first hop, takes any fact, wanders, searches the same page
again, or guesses, and moves that end in the right answer by chance are drawn again. No question has three hops. So the
parts of the right strategy are shown one at a time, and only rewards can teach the agent to compose them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from agent_r1.core.messages import Message, ToolCall
from agent_r1.tasksets.tinywiki.questions import STYLES, conversation
from agent_r1.tasksets.tinywiki.search import retrieve
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


def first_hop(wiki: Wiki, chain: Chain, rng: random.Random) -> Moves:
    """Answer after the first hop, which is right for questions of one hop and too early for others."""
    return _follow(chain.start, [(chain.relations[0], chain.values[0])])


def detour(wiki: Wiki, chain: Chain, rng: random.Random) -> Moves:
    """Search any page first, then answer after the first hop."""
    return (Move("", rng.choice(wiki.titles), final=False), *first_hop(wiki, chain, rng))


def any_fact(wiki: Wiki, chain: Chain, rng: random.Random) -> Moves:
    return _follow(chain.start, [rng.choice(list(wiki.facts[chain.start].items()))])


def wander(wiki: Wiki, chain: Chain, rng: random.Random) -> Moves:
    """Follow the first hop or any fact of the first page, then any fact of the second."""
    page = wiki.facts[chain.start]
    first = (chain.relations[0], chain.values[0]) if rng.random() < _NAMED else rng.choice(list(page.items()))
    return _follow(chain.start, [first, rng.choice(list(wiki.facts[first[1]].items()))])


def repeat(wiki: Wiki, chain: Chain, rng: random.Random) -> Moves:
    """Search the first page twice, then take any fact."""
    return (Move("", chain.start, final=False), *any_fact(wiki, chain, rng))


def guess(wiki: Wiki, chain: Chain, rng: random.Random) -> Moves:
    return (Move("", rng.choice(wiki.titles), final=True),)


_NAMED = 0.5
"""The share of wanderers that follow the first hop of the question."""

SHARES: Mapping[int, Mapping[Strategy, float]] = {
    1: {first_hop: 0.5, detour: 0.2, any_fact: 0.1, wander: 0.1, repeat: 0.05, guess: 0.05},
    2: {first_hop: 0.3, any_fact: 0.1, wander: 0.4, repeat: 0.1, guess: 0.1},
}
"""The probability of each strategy, by the number of hops of the question."""

HOPS = tuple(SHARES)


def plan(wiki: Wiki, chain: Chain, rng: random.Random) -> Moves:
    """Return the planner's moves for a question, one per turn. For two hops they do not end in the right answer."""
    shares = SHARES[len(chain.relations)]
    while True:
        (strategy,) = rng.choices(list(shares), list(shares.values()))
        moves = strategy(wiki, chain, rng)
        if len(chain.relations) == 1 or moves[-1].target != chain.answer:
            return moves


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
