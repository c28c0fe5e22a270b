"""The training examples of tiny-base: token sequences with a mask of the tokens to predict."""

from __future__ import annotations

import random
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from agent_r1.core.messages import Message, ToolSpec
from agent_r1.renderers.template_renderer import TemplateRenderer
from agent_r1.tasksets.tinywiki.search import search
from agent_r1.tasksets.tinywiki.wiki import CLASSES, ENTITIES, RELATIONS, Wiki, draw
from research.tiny_base import planner

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
