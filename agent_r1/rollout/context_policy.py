"""Context rules: what of an episode the policy sees before it acts.

A rule offers views of what was lived, the mildest first; the agent takes the first that leaves room for a whole
action. A view that is not what the policy saw so far, grown by what is new, starts a new branch of the trajectory:
everything in it is an observation there, also what the policy once said itself.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from agent_r1.core.messages import Message, Text
from agent_r1.rollout.config import ViewConfig

Messages = tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Exchange:
    """An action, and what it led to."""

    action: Message
    observed: Messages

    @property
    def messages(self) -> Messages:
        return (self.action, *self.observed)


@dataclass(frozen=True, slots=True)
class Lived:
    """An episode so far: the messages that opened it, the exchanges since, and the policy's notes on older ones.

    Example:
        Lived((Message.user("Who?"),), (Exchange(call, (page,)),), "Bruno rules.").messages
        is ("Who?" with the notes below it, call, page)
    """

    start: Messages
    exchanges: tuple[Exchange, ...] = ()
    notes: str = ""

    @property
    def messages(self) -> Messages:
        return self.seen(self.exchanges)

    def seen(self, exchanges: Sequence[Exchange]) -> Messages:
        """The start, with the notes, and some exchanges."""
        start = noted(self.start, f"Your notes so far:\n{self.notes}") if self.notes else self.start
        return (*start, *(message for exchange in exchanges for message in exchange.messages))

    def after(self, action: Message, observed: Messages) -> Lived:
        return replace(self, exchanges=(*self.exchanges, Exchange(action, observed)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextRule(ABC):
    """``turns``: the latest exchanges that stay as they are. ``after``: tokens up to which nothing is rewritten."""

    turns: int = 2
    after: int = 0

    @abstractmethod
    def views(self, lived: Lived) -> Iterator[Messages]:
        """What the policy may be shown, the mildest view first; at least one."""

    def asks(self, lived: Lived, fits: bool) -> Message | None:
        """What the policy is asked to say to itself first; ``fits`` says whether all that was lived has room."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Append(ContextRule):
    """Everything."""

    def views(self, lived: Lived) -> Iterator[Messages]:
        yield lived.messages


@dataclass(frozen=True, slots=True, kw_only=True)
class Window(ContextRule):
    """The start and the latest exchanges."""

    def views(self, lived: Lived) -> Iterator[Messages]:
        for count in _down(min(self.turns, len(lived.exchanges))):
            yield lived.seen(lived.exchanges[-count:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncate(ContextRule):
    """Results older than the latest exchanges are cut to ``characters``; where that is too much, the oldest go."""

    characters: int = 200

    def views(self, lived: Lived) -> Iterator[Messages]:
        for whole in _down(self.turns):
            yield lived.seen(self._cut(lived.exchanges, whole))
        for count in _down(len(lived.exchanges) - 1):
            yield lived.seen(self._cut(lived.exchanges[-count:], 1))

    def _cut(self, exchanges: Sequence[Exchange], whole: int) -> list[Exchange]:
        older = [
            replace(exchange, observed=tuple(_shortened(message, self.characters) for message in exchange.observed))
            for exchange in exchanges[:-whole]
        ]
        return [*older, *exchanges[-whole:]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary(ContextRule):
    """The policy sums up what it did, once there are more than ``turns`` exchanges or no room, and goes on from the
    start and its summary. The summary is an action like any other: sampled, recorded, trained. Where it says nothing
    (a thought, a call), all stays as it was."""

    def views(self, lived: Lived) -> Iterator[Messages]:
        yield lived.messages
        for count in _down(len(lived.exchanges) - 1):
            yield lived.seen(lived.exchanges[-count:])

    def asks(self, lived: Lived, fits: bool) -> Message | None:
        return SUM_UP if lived.exchanges and (len(lived.exchanges) > self.turns or not fits) else None


SUM_UP = Message.user(
    "Sum up what you found and what is left to do. You will see only the task and this summary. Do not call tools."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence(ContextRule):
    """Of results older than the latest exchanges the ``pieces`` (lines) that share most with the task and those
    exchanges; the rare words count most. The rest of the older exchanges goes."""

    pieces: int = 3

    def views(self, lived: Lived) -> Iterator[Messages]:
        if len(lived.exchanges) <= self.turns:
            yield lived.messages
        for whole in _down(min(self.turns, len(lived.exchanges) - 1)):
            for pieces in _down(self.pieces):
                yield self._seen(lived, whole, pieces)
        yield lived.seen(lived.exchanges[-1:])

    def _seen(self, lived: Lived, whole: int, pieces: int) -> Messages:
        latest = lived.exchanges[-whole:]
        older = [message.text for exchange in lived.exchanges[:-whole] for message in exchange.observed]
        asked = [message.text for message in lived.start if message.role == "user"]
        asked += [message.text for exchange in latest for message in exchange.messages]
        chosen = best_lines(older, "\n".join(asked), pieces)
        kept = replace(lived, start=noted(lived.start, "What you found so far:\n" + "\n".join(chosen)))
        return (kept if chosen else lived).seen(latest)


def best_lines(texts: Sequence[str], asked: str, count: int) -> list[str]:
    """The ``count`` lines that share most with ``asked``, in their order; a word weighs log(1 + lines / lines with it).

    Example:
        >>> best_lines(["Alba: mayor Bruno.\\nIt rains."], "Who is mayor of Alba?", 1)
        ['Alba: mayor Bruno.']
    """
    lines = list(dict.fromkeys(line.strip() for text in texts for line in text.splitlines() if line.strip()))
    words = [_words(line) for line in lines]
    spread = Counter(word for held in words for word in held)
    wanted = _words(asked)
    scores = [math.fsum(math.log1p(len(lines) / spread[word]) for word in held & wanted) for held in words]
    best = sorted(range(len(lines)), key=lambda place: (-scores[place], -place))[:count]
    return [lines[place] for place in sorted(best)]


def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", text.lower()))


def noted(start: Messages, notes: str) -> Messages:
    """The opening messages with notes below the last thing that a user said: no template minds that."""
    place = max((place for place, message in enumerate(start) if message.role == "user"), default=None)
    if place is None:
        return (*start, Message.user(notes))
    return (*start[:place], _below(start[place], notes), *start[place + 1 :])


def requested(messages: Messages, request: Message) -> Messages:
    """The messages and then a user's request, below what a user said last: some templates take no two in a row."""
    if messages and messages[-1].role == "user":
        return (*messages[:-1], _below(messages[-1], request.text))
    return (*messages, request)


def _below(message: Message, text: str) -> Message:
    return replace(message, parts=(*message.parts, Text(f"\n\n{text}")))


def _shortened(message: Message, characters: int) -> Message:
    text = message.text
    if len(text) <= characters:
        return message
    cut = f"{text[:characters]}\n[cut here: {len(text) - characters} more characters]"
    return replace(message, parts=(Text(cut),))


def _down(count: int) -> range:
    """count, count - 1, .., 1."""
    return range(count, 0, -1)


def rule_of(config: ViewConfig) -> ContextRule:
    """The rule that a configuration names."""
    turns, after = config.turns, config.after
    match config.rule:
        case "append":
            return Append()
        case "window":
            return Window(turns=turns, after=after)
        case "truncate":
            return Truncate(turns=turns, after=after, characters=config.characters)
        case "summary":
            return Summary(turns=turns, after=after)
        case "evidence":
            return Evidence(turns=turns, after=after, pieces=config.pieces)
