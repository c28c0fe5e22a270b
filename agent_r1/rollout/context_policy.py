"""Context policies: how much of an episode the policy sees before each action.

A context policy proposes contexts for the history of the episode, the most complete first. The agent loop uses the
first one that leaves room for a whole action. If the context is not the previous one with new messages appended, a new
branch of the trajectory begins: all its tokens are observations, including the policy's own earlier messages.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from agent_r1.core.messages import Message, Text
from agent_r1.rollout.config import ContextPolicyConfig

Messages = tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Exchange:
    """An action and the observation that followed."""

    action: Message
    observation: Messages

    @property
    def messages(self) -> Messages:
        return (self.action, *self.observation)


@dataclass(frozen=True, slots=True)
class History:
    """An episode so far: its opening messages, the exchanges since, and the policy's notes on summarized exchanges.

    Example:
        History((Message.user("Who?"),), (Exchange(call, (page,)),), "Bruno rules.").messages
        is ("Who?" with the notes below it, call, page)
    """

    start: Messages
    exchanges: tuple[Exchange, ...] = ()
    notes: str = ""

    @property
    def messages(self) -> Messages:
        return self.with_exchanges(self.exchanges)

    def with_exchanges(self, exchanges: Sequence[Exchange]) -> Messages:
        """Return the opening with the notes, followed by some of the exchanges."""
        start = with_notes(self.start, f"Your notes so far:\n{self.notes}") if self.notes else self.start
        return (*start, *(message for exchange in exchanges for message in exchange.messages))

    def append(self, action: Message, observation: Messages) -> History:
        """Return the history with one more exchange."""
        return replace(self, exchanges=(*self.exchanges, Exchange(action, observation)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextPolicy(ABC):
    """Base class of context policies.

    Attributes:
        keep_turns: the latest exchanges that are not rewritten.
        after_tokens: nothing is rewritten until the context exceeds this number of tokens.
    """

    keep_turns: int = 2
    after_tokens: int = 0

    @abstractmethod
    def candidates(self, history: History) -> Iterator[Messages]:
        """Yield at least one context, the most complete first."""

    def summary_request(self, history: History, fits: bool) -> Message | None:
        """Return a request to summarize the history before the next action, or None.

        Args:
            fits: whether the full history leaves room for an action.
        """
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Append(ContextPolicy):
    """Keep the whole history."""

    def candidates(self, history: History) -> Iterator[Messages]:
        yield history.messages


@dataclass(frozen=True, slots=True, kw_only=True)
class Window(ContextPolicy):
    """Keep the opening and the latest exchanges."""

    def candidates(self, history: History) -> Iterator[Messages]:
        for count in _countdown(min(self.keep_turns, len(history.exchanges))):
            yield history.with_exchanges(history.exchanges[-count:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncate(ContextPolicy):
    """Cut results older than the latest exchanges to ``max_characters``; drop the oldest exchanges if needed."""

    max_characters: int = 200

    def candidates(self, history: History) -> Iterator[Messages]:
        for uncut in _countdown(self.keep_turns):
            yield history.with_exchanges(self._cut(history.exchanges, uncut))
        for count in _countdown(len(history.exchanges) - 1):
            yield history.with_exchanges(self._cut(history.exchanges[-count:], 1))

    def _cut(self, exchanges: Sequence[Exchange], uncut: int) -> list[Exchange]:
        older = [
            replace(
                exchange,
                observation=tuple(_shortened(message, self.max_characters) for message in exchange.observation),
            )
            for exchange in exchanges[:-uncut]
        ]
        return [*older, *exchanges[-uncut:]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary(ContextPolicy):
    """Let the policy summarize the history once it exceeds ``keep_turns`` exchanges or leaves no room for an action.

    The episode then continues from the opening and the summary. A summary is an action like any other: sampled,
    recorded and trained. If it has no text besides reasoning and tool calls, the history stays as it is.
    """

    def candidates(self, history: History) -> Iterator[Messages]:
        yield history.messages
        for count in _countdown(len(history.exchanges) - 1):
            yield history.with_exchanges(history.exchanges[-count:])

    def summary_request(self, history: History, fits: bool) -> Message | None:
        too_long = len(history.exchanges) > self.keep_turns or not fits
        return SUMMARY_REQUEST if history.exchanges and too_long else None


SUMMARY_REQUEST = Message.user(
    "Sum up what you found and what is left to do. You will see only the task and this summary. Do not call tools."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence(ContextPolicy):
    """Keep the most relevant ``max_lines`` lines of the results older than the latest exchanges.

    Lines are ranked by the words that they share with the task and the latest exchanges; rare words weigh more. The
    rest of the older exchanges is dropped.
    """

    max_lines: int = 3

    def candidates(self, history: History) -> Iterator[Messages]:
        if len(history.exchanges) <= self.keep_turns:
            yield history.messages
        for latest in _countdown(min(self.keep_turns, len(history.exchanges) - 1)):
            for lines in _countdown(self.max_lines):
                yield self._context(history, latest, lines)
        yield history.with_exchanges(history.exchanges[-1:])

    def _context(self, history: History, count: int, lines: int) -> Messages:
        latest = history.exchanges[-count:]
        older = [message.text for exchange in history.exchanges[:-count] for message in exchange.observation]
        query = [message.text for message in history.start if message.role == "user"]
        query += [message.text for exchange in latest for message in exchange.messages]
        chosen = best_lines(older, "\n".join(query), lines)
        start = with_notes(history.start, "What you found so far:\n" + "\n".join(chosen)) if chosen else history.start
        return replace(history, start=start).with_exchanges(latest)


def best_lines(texts: Sequence[str], query: str, count: int) -> list[str]:
    """Return the ``count`` lines that share most words with ``query``, in their original order.

    The weight of a word is log(1 + number of lines / number of lines with the word).

    Example:
        >>> best_lines(["Alba: mayor Bruno.\\nIt rains."], "Who is mayor of Alba?", 1)
        ['Alba: mayor Bruno.']
    """
    lines = list(dict.fromkeys(line.strip() for text in texts for line in text.splitlines() if line.strip()))
    words = [_words(line) for line in lines]
    frequency = Counter(word for line_words in words for word in line_words)
    query_words = _words(query)
    # fsum: the score must not depend on the order in which a set is iterated
    scores = [math.fsum(math.log1p(len(lines) / frequency[word]) for word in line & query_words) for line in words]
    best = sorted(range(len(lines)), key=lambda index: (-scores[index], -index))[:count]
    return [lines[index] for index in sorted(best)]


def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", text.lower()))


def with_notes(start: Messages, notes: str) -> Messages:
    """Return the opening messages with notes appended to the last user message, which every template accepts."""
    last = max((index for index, message in enumerate(start) if message.role == "user"), default=None)
    if last is None:
        return (*start, Message.user(notes))
    return (*start[:last], _with_text(start[last], notes), *start[last + 1 :])


def with_request(messages: Messages, request: Message) -> Messages:
    """Return the messages with a user's request at the end.

    It is appended to a final user message, because some templates refuse two user messages in a row.
    """
    if messages and messages[-1].role == "user":
        return (*messages[:-1], _with_text(messages[-1], request.text))
    return (*messages, request)


def _with_text(message: Message, text: str) -> Message:
    return replace(message, parts=(*message.parts, Text(f"\n\n{text}")))


def _shortened(message: Message, max_characters: int) -> Message:
    text = message.text
    if len(text) <= max_characters:
        return message
    cut = f"{text[:max_characters]}\n[cut here: {len(text) - max_characters} more characters]"
    return replace(message, parts=(Text(cut),))


def _countdown(count: int) -> range:
    """Return count, count - 1, .., 1."""
    return range(count, 0, -1)


def build_context_policy(config: ContextPolicyConfig) -> ContextPolicy:
    """Return the context policy that the settings describe."""
    keep, after = config.keep_turns, config.after_tokens
    match config.name:
        case "append":
            return Append()
        case "window":
            return Window(keep_turns=keep, after_tokens=after)
        case "truncate":
            return Truncate(keep_turns=keep, after_tokens=after, max_characters=config.max_characters)
        case "summary":
            return Summary(keep_turns=keep, after_tokens=after)
        case "evidence":
            return Evidence(keep_turns=keep, after_tokens=after, max_lines=config.max_lines)
