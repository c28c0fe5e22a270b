"""Context policies: how much of an episode the policy sees before each action.

A context policy proposes contexts, the most complete context first. The agent loop uses the first one that leaves room
for a whole action. A context that does not continue the previous context begins a new branch of the trajectory. All
tokens in the first prompt of a branch are observations.
"""

from __future__ import annotations

import math
import re
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agent_r1.core.messages import Message, Text, parts_text

ContextPolicyName = Literal["append", "window", "truncate", "summary", "evidence"]


class ContextPolicyConfig(BaseModel):
    """How much of a long episode the policy sees before each action."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    name: ContextPolicyName = "append"
    """The context policy: "append" (the policy sees the whole episode), "window", "truncate", "summary" or "evidence";
    see docs/models.md."""

    keep_turns: int = Field(default=2, ge=1)
    """With "window", "truncate" and "evidence": number of latest turns that the policy sees unchanged, if there is
    room. With "summary": the policy writes a summary after keep_turns + 1 turns, or earlier if the context has no room.
    The summary replaces all turns so far."""

    after_tokens: int = Field(default=0, ge=0)
    """The context is not rewritten until it is longer than this number of tokens, or leaves no room for an action."""

    max_characters: int = Field(default=200, ge=1)
    """With the context policy "truncate": number of characters to which each older tool result is cut. The tool results
    of the latest turns (keep_turns) stay whole."""

    max_lines: int = Field(default=3, ge=1)
    """With the context policy "evidence": number of lines that are kept in total from all older tool results. The tool
    results of the latest turns (keep_turns) stay whole."""

    @model_validator(mode="after")
    def _refuse_settings_without_effect(self) -> Self:
        own: tuple[str, ...] = {"truncate": ("max_characters",), "evidence": ("max_lines",)}.get(self.name, ())
        used = {"name"} if self.name == "append" else {"name", "keep_turns", "after_tokens", *own}
        for name, field in type(self).model_fields.items():
            if name not in used and dict(self)[name] != field.default:
                raise ValueError(f"context_policy.{name} has no effect with the policy {self.name}: leave it out")
        return self


Messages = tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Exchange:
    """An action of the policy, and the messages of the observation that followed the action."""

    action: Message
    observation: Messages


@dataclass(frozen=True, slots=True)
class History:
    """An unfinished episode. A summary can replace its earlier exchanges."""

    start: Messages  # the opening messages
    exchanges: tuple[Exchange, ...] = ()  # after the last summary
    notes: str = ""  # the last summary that the model wrote

    @property
    def messages(self) -> Messages:
        return self.with_exchanges(self.exchanges)

    def with_exchanges(self, exchanges: Sequence[Exchange]) -> Messages:
        """Return the opening messages, followed by the messages of ``exchanges``."""
        start = with_notes(self.start, f"Your notes so far:\n{self.notes}") if self.notes else self.start
        return (*start, *(message for one in exchanges for message in (one.action, *one.observation)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextPolicy(ABC):
    """Base class of context policies, with the settings of :class:`ContextPolicyConfig` that all of them have."""

    keep_turns: int = 2
    after_tokens: int = 0

    @abstractmethod
    def candidates(self, history: History) -> Iterator[Messages]:
        """Yield at least one context (the messages that the model sees), the most complete one first."""

    def summary_request(self, history: History, fits: bool) -> Message | None:
        """Return a message that asks the model to summarize the history, or None if no summary is needed."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Append(ContextPolicy):
    """A context policy that keeps the whole history. It rewrites no context, however long the context is."""

    after_tokens: int = sys.maxsize  # so the agent loop never asks for candidates

    def candidates(self, history: History) -> Iterator[Messages]:
        yield history.messages


@dataclass(frozen=True, slots=True, kw_only=True)
class Window(ContextPolicy):
    """A context policy that keeps the opening messages, and the latest ``keep_turns`` actions and observations."""

    def candidates(self, history: History) -> Iterator[Messages]:
        for count in _countdown(min(self.keep_turns, len(history.exchanges))):
            yield history.with_exchanges(history.exchanges[-count:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncate(ContextPolicy):
    """A context policy that cuts old observations to ``max_characters`` characters, and leaves out their images.

    At first, the latest ``keep_turns`` observations stay whole. If the context has no room for an action, more
    observations are cut, the oldest first, but never the latest one. If this is not enough, the oldest actions and
    observations are dropped.
    """

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
    """A context policy that replaces all exchanges so far by a summary, which the trained model writes.

    The summary is sampled, recorded and trained like an action. A summary without text replaces nothing.
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
    """A context policy that keeps the latest ``keep_turns`` exchanges, and :func:`best_lines` of older observations."""

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
        query += [message.text for one in latest for message in (one.action, *one.observation)]
        chosen = best_lines(older, "\n".join(query), lines)
        start = with_notes(history.start, "What you found so far:\n" + "\n".join(chosen)) if chosen else history.start
        return replace(history, start=start).with_exchanges(latest)


def best_lines(texts: Sequence[str], query: str, count: int) -> list[str]:
    r"""Return the ``count`` lines of ``texts`` with the highest scores, in the order of ``texts``.

    Let n be the number of lines, and m(w) the number of lines with the word w. The score of a line is the sum of
    log(1 + n / m(w)) over the words w that the line shares with ``query``. If two lines have equal scores, the later
    line is preferred. Equal lines count once.

    Example:
        >>> best_lines(["Alba: mayor Bruno.\nIt rains."], "Who is mayor of Alba?", 1)
        ['Alba: mayor Bruno.']
    """
    lines = list(dict.fromkeys(line.strip() for text in texts for line in text.splitlines() if line.strip()))
    words = [_words(line) for line in lines]
    frequency = Counter(word for line_words in words for word in line_words)
    query_words = _words(query)
    # fsum is exact, so the score does not depend on the order in which Python iterates over a set
    scores = [math.fsum(math.log1p(len(lines) / frequency[word]) for word in line & query_words) for line in words]
    best = sorted(range(len(lines)), key=lambda index: (-scores[index], -index))[:count]
    return [lines[index] for index in sorted(best)]


def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", text.lower()))


def with_notes(start: Messages, notes: str) -> Messages:
    """Return the opening messages with ``notes`` at the end of the last user message, or as a new user message."""
    # no second user message, because some chat templates refuse two adjacent ones
    last = max((index for index, message in enumerate(start) if message.role == "user"), default=None)
    if last is None:
        return (*start, Message.user(notes))
    return (*start[:last], _with_text(start[last], notes), *start[last + 1 :])


def with_request(messages: Messages, request: Message) -> Messages:
    """Return the messages with a user's request at the end."""
    if messages and messages[-1].role == "user":
        return (*messages[:-1], _with_text(messages[-1], request.text))
    return (*messages, request)


def _with_text(message: Message, text: str) -> Message:
    return replace(message, parts=(*message.parts, Text(f"\n\n{text}")))


def _shortened(message: Message, max_characters: int) -> Message:
    text = parts_text(message.parts)  # an image takes more of the context than the line that names it
    if len(text) <= max_characters:
        return message.with_images_as_text()
    cut = f"{text[:max_characters]}\n[cut here: {len(text) - max_characters} more characters]"
    return replace(message, parts=(Text(cut),))


def _countdown(count: int) -> range:
    return range(count, 0, -1)


def build_context_policy(config: ContextPolicyConfig) -> ContextPolicy:
    """Return the context policy that ``config`` names, with its settings."""
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
