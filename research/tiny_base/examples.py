"""The training examples of tiny-base: token sequences with a mask of the tokens to predict."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from agent_r1.core.messages import Message, ToolCall, ToolSpec
from agent_r1.renderers.template_renderer import TemplateRenderer
from agent_r1.tasksets.tinywiki.questions import STYLES, conversation
from agent_r1.tasksets.tinywiki.wiki import CLASSES, ENTITIES, RELATIONS, Chain, Wiki, draw, retrieve, search
from research.tiny_base import examples as planner


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


TOOLS = (search.spec,)


@dataclass(frozen=True, slots=True)
class Example:
    """A token sequence. ``targets[i]`` is True if token ``i`` has to be predicted from the tokens before it.

    Example:
        Example(ids=(7, 8, 9, 7, 8), targets=(False, False, False, False, True))
    """

    ids: tuple[int, ...]
    targets: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Mix:
    """The number of examples of each kind in a batch."""

    repetitions: int
    lookups: int = 0
    transcripts: int = 0
    readings: int = 0


class ExampleMaker:
    """Draws training examples."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        self._renderer, self._rng = TemplateRenderer(tokenizer), random.Random(seed)
        self._words = [token for word in (*ENTITIES, *RELATIONS) for token in self._renderer.encode(word)]

    def batch(self, mix: Mix) -> list[Example]:
        """Return examples about a new wiki of the training class, so that no fact can be memorized."""
        wiki = draw(CLASSES["train"], self._rng)
        return [
            *(self.repetition() for _ in range(mix.repetitions)),
            *(self.lookup(wiki) for _ in range(mix.lookups)),
            *(self.transcript(wiki) for _ in range(mix.transcripts)),
            *(self.reading(wiki) for _ in range(mix.readings)),
        ]

    def repetition(self) -> Example:
        """Return random words, noise, then a suffix of the same words: an exercise that teaches copying.

        All lengths vary, so that copying from a fixed distance does not work.
        """
        rng = self._rng
        words = rng.sample(self._words, rng.randint(4, 16))
        noise = [rng.choices(self._words, k=rng.randint(0, 8)) for _ in range(2)]
        again = words[rng.randint(0, len(words) - 3) :]
        before = [*noise[0], *words, *noise[1], again[0]]
        return Example((*before, *again[1:]), (False,) * len(before) + (True,) * (len(again) - 1))

    def lookup(self, wiki: Wiki) -> Example:
        """Return a question of one hop, one or two pages, and the fact: an exercise in reading what a question names.

        The page of the question is the last one. The targets are the fact and the answer tag.
        """
        chain = wiki.chain(1, self._rng)
        pages = [wiki.page(title) for title in (*self._rng.sample(wiki.titles, self._rng.randint(0, 1)), chain.start)]
        fact = f"{chain.relations[0]} {chain.answer}.\n<answer>"
        before = self._renderer.encode("\n".join([planner.ask(chain, self._rng), *pages]) + "\n")
        after = self._renderer.encode(fact)
        return Example((*before, *after), (False,) * len(before) + (True,) * len(after))

    def transcript(self, wiki: Wiki) -> Example:
        """Return a conversation of the bad planner."""
        return self.conversation(planner.transcript(wiki, self._rng), TOOLS)

    def reading(self, wiki: Wiki) -> Example:
        """Return a question that is given together with its page, and the answer."""
        return self.conversation(planner.reading(wiki, self._rng), ())

    def conversation(self, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...]) -> Example:
        return conversation_example(self._renderer, messages, tools)


def conversation_example(
    renderer: TemplateRenderer, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...]
) -> Example:
    """Return the example of a conversation; its targets are the assistant's messages, including the end tokens."""
    header = renderer.encode("<|im_start|>assistant\n")  # the word alone may occur in a user's message
    ids = renderer.encode(renderer.render_text(messages, tools))
    targets, speaking = [], False
    for end, token in enumerate(ids, start=1):
        targets.append(speaking)
        speaking = ids[end - len(header) : end] == header or (speaking and token != renderer.end_token_id)
    return Example(ids, tuple(targets))
