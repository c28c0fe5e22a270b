"""One attempt as people read it: turns, tool calls, rewards and tokens. The web page and the terminal show it alike."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from agent_r1.core.events import TokenRecord
from agent_r1.core.messages import Image, Message, parts_text
from agent_r1.core.trajectory import Rewards, Trajectory, Turn, TurnTiming
from agent_r1.viewer.text import as_json
from agent_r1.viewer.tokens import Token, make_tokens, token_texts


@dataclass(frozen=True, slots=True)
class MessageView:
    """A message. ``text`` has a line for each tool call after the text of the message."""

    role: str
    text: str
    reasoning: str = ""
    images: tuple[Image, ...] = ()


@dataclass(frozen=True, slots=True)
class CallView:
    """A tool call with what the policy saw of its result."""

    name: str
    arguments: Mapping[str, Any] | None  # None if they could not be parsed from ``raw``, the sampled text
    raw: str
    error: str  # why the call could not be parsed, or the error of the tool, or ""
    result: str | None
    seconds: float  # the time that the tool took; 0.0 if not known
    rewards: Mapping[str, float]
    images: tuple[Image, ...] = ()


@dataclass(frozen=True, slots=True)
class TurnView:
    """A turn."""

    index: int
    parent: int | None
    kind: str
    branch: int  # the index of the turn's branch in the trajectory tree
    finish_reason: str
    versions: tuple[int, ...]  # the versions of the weights that sampled the action
    context: int  # how many tokens the policy saw before the action
    # the new messages before the action, if the context was rewritten; otherwise () because the messages are
    # ``Conversation.start`` or the observation of an earlier turn
    state: tuple[MessageView, ...]
    state_tokens: tuple[tuple[int, str], ...]  # (id, text) of the new tokens of the prompt, if asked for
    num_tokens: int
    tokens: tuple[Token, ...]  # the tokens of the action; () if there are too many to show them one by one
    text: str
    rewards: Mapping[str, float]
    calls: tuple[CallView, ...]
    observation: tuple[MessageView, ...]  # the messages that are not the result of a call
    timing: TurnTiming | None
    value: float | None  # of the state, by the critic or by continuations, if recorded


@dataclass(frozen=True, slots=True)
class Conversation:
    """The conversation of an attempt. ``answer`` is what an agent program returned, or None."""

    start: tuple[MessageView, ...]
    answer: str | None
    turns: tuple[TurnView, ...]
    rewards: Rewards
    start_time: float
    wait_seconds: float

    @property
    def branches(self) -> int:
        return len({turn.branch for turn in self.turns})

    @property
    def longest_text(self) -> int:
        """The number of characters of the longest text."""
        return max(map(len, self._texts()), default=0)

    def _texts(self) -> Iterator[str]:
        yield self.answer or ""
        messages = [*self.start]
        for turn in self.turns:
            messages += [*turn.state, *turn.observation]
            yield turn.text
            for call in turn.calls:
                yield from (call.raw, call.result or "")
        for message in messages:
            yield from (message.text, message.reasoning)


def make_conversation(
    trajectory: Trajectory,
    records: Sequence[TokenRecord],
    tokenizer: Tokenizer | None,
    most_tokens: int | None,
    with_state: bool = False,
) -> Conversation:
    """Return the conversation of an attempt.

    Args:
        tokenizer: decodes the tokens. If None, each token is shown as its id.
        most_tokens: the maximum number of tokens shown one by one; None: no limit. A turn that does not fit has none.
        with_state: whether the tokens of prompts and tool results are shown too.
    """
    by_turn = {record.turn: record for record in records}
    turns: list[TurnView] = []
    continued: set[int] = set()
    num_branches, left = 0, math.inf if most_tokens is None else most_tokens
    for turn in trajectory.turns:
        record = by_turn.get(turn.index)
        fits = len(turn.action_ids) <= left
        tokens = tuple(make_tokens(turn, record, tokenizer)) if fits else ()
        left -= len(tokens)
        parent = None if turn.parent is None else turns[turn.parent]
        # A second turn that continues the same parent starts another branch, as a turn without a parent does.
        if parent is None or parent.index in continued:
            branch, num_branches = num_branches, num_branches + 1
        else:
            branch = parent.branch
        if parent is not None:
            continued.add(parent.index)
        before = 0 if parent is None else parent.context + parent.num_tokens
        call_ids = {call.id for call in turn.action.message.calls}
        turns.append(
            TurnView(
                index=turn.index,
                parent=turn.parent,
                kind=turn.kind,
                branch=branch,
                finish_reason=turn.finish_reason,
                versions=tuple(sorted({span.version for span in turn.version_spans})),
                context=before + len(turn.new_ids),
                state=tuple(map(_message, trajectory.new_context(turn))),
                state_tokens=tuple(zip(turn.new_ids, token_texts(turn.new_ids, tokenizer), strict=True))
                if with_state
                else (),
                num_tokens=len(turn.action_ids),
                tokens=tokens,
                text=turn.action.text,
                rewards=turn.rewards,
                calls=tuple(_calls(turn)),
                observation=tuple(_message(one) for one in turn.observation if one.call_id not in call_ids),
                timing=turn.timing,
                value=record.values[0] if record is not None and record.values else None,
            )
        )
    return Conversation(
        start=tuple(map(_message, trajectory.start)),
        answer=trajectory.answer,
        turns=tuple(turns),
        rewards=trajectory.rewards,
        start_time=trajectory.start_time,
        wait_seconds=trajectory.wait_seconds,
    )


def _calls(turn: Turn) -> Iterator[CallView]:
    answers = {message.call_id: message for message in turn.observation if message.call_id is not None}
    for index, call in enumerate(turn.action.message.calls):
        result = turn.results[index] if index < len(turn.results) else None
        answer = answers.get(call.id)
        # What the policy saw can be shorter than the result of the tool.
        parts = answer.parts if answer is not None else result.parts if result is not None else None
        yield CallView(
            name=call.name,
            arguments=call.arguments,
            raw=call.raw if call.arguments is None else "",
            error=call.error or (result.error if result is not None and not result.ok else "") or "",
            result=None if parts is None else parts_text(parts),
            seconds=0.0 if result is None else result.seconds or 0.0,
            rewards=turn.call_rewards[index] if index < len(turn.call_rewards) else {},
            images=tuple(part for part in parts or () if isinstance(part, Image)),
        )


def _message(message: Message) -> MessageView:
    calls = (f"{one.name} {one.raw if one.arguments is None else as_json(one.arguments)}" for one in message.calls)
    lines = filter(None, [parts_text(message.parts), *calls])
    return MessageView(message.role, "\n".join(lines), message.reasoning or "", message.images)
