"""The page of one attempt: its conversation with tokens, tools and rewards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from agent_r1.core.events import TokenRecord
from agent_r1.core.messages import ContentPart, Image, Message, ToolCall, ToolResult, parts_text
from agent_r1.core.trajectory import Trajectory, Turn
from agent_r1.viewer.text import as_json, duration, number, shortened, timing_text, visible
from agent_r1.viewer.tokens import Scale, Token, TokenFigures, figures_of, make_scales, make_tokens, token_texts


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward as text. ``value`` can be a list separated by commas. ``sign`` is "plus", "minus" or "zero"."""

    name: str
    value: str
    sign: str


@dataclass(frozen=True, slots=True)
class MessageText:
    role: str
    text: str
    reasoning: str = ""
    images: tuple[Image, ...] = ()


@dataclass(frozen=True, slots=True)
class CallView:
    """A tool call with its result, as text for the page.

    Attributes:
        arguments: a pair (name, value) for each argument; () if the arguments could not be parsed.
        raw: the sampled text of arguments that could not be parsed; otherwise "".
        error: why the call could not be parsed, or the kind of the tool's error; otherwise "".
    """

    name: str
    arguments: tuple[tuple[str, str], ...]
    raw: str
    error: str
    result: str | None
    seconds: str
    rewards: tuple[Reward, ...]
    images: tuple[Image, ...] = ()


@dataclass(frozen=True, slots=True)
class TurnView:
    """A turn, as text for the page.

    Attributes:
        parent: the index of the turn that this turn continues, or None.
        branch: the index of the turn's branch in the trajectory tree.
        versions: the versions of the weights that sampled the action, such as "3" or "3, 4".
        context: how many tokens the policy saw before the action.
        state: the new messages before the action. If the page already shows the messages as ``Conversation.start`` or
            as the observation of an earlier turn, ``state`` is ().
        tokens: the tokens of the action; () if the tokens are not shown one by one.
    """

    index: int
    parent: int | None
    kind: str
    branch: int
    finish_reason: str
    versions: str
    context: int
    state: tuple[MessageText, ...]
    num_tokens: int
    tokens: tuple[Token, ...]
    text: str
    rewards: tuple[Reward, ...]
    calls: tuple[CallView, ...]
    observation: tuple[MessageText, ...]
    timing: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """The conversation of an attempt, as text for the page.

    Attributes:
        answer: the answer that an agent program returned, or None.
        branches: the number of branches of the trajectory tree.
        is_shortened: whether a text was cut.
    """

    start: tuple[MessageText, ...]
    answer: str | None
    turns: tuple[TurnView, ...]
    rewards: tuple[Reward, ...]
    branches: int
    is_shortened: bool


@dataclass(frozen=True, slots=True)
class RecordedAttempt:
    """An attempt with the recorded numbers of its action tokens, such as log-probabilities and advantages."""

    trajectory: Trajectory
    records: tuple[TokenRecord, ...]

    def figures(self) -> list[list[TokenFigures]]:
        """Return the numbers of each action token, such as its advantage: one list per turn, one entry per token."""
        by_turn = {record.turn: record for record in self.records}
        return [figures_of(turn, by_turn.get(turn.index)) for turn in self.trajectory.turns]


def shared_scales(attempts: Iterable[RecordedAttempt], group: Iterable[TokenRecord]) -> tuple[Scale, ...]:
    """Return the color scales for the tokens of ``attempts``: one for the advantages, one for the entropies, and so on.

    The strongest color stands for the largest absolute advantage in the whole group, even if this advantage is on
    another page.
    """
    figures = [one for attempt in attempts for turn in attempt.figures() for one in turn]
    if any("advantage" in one for one in figures):
        figures += [{"advantage": advantage} for record in group for advantage in record.advantages]
    return make_scales(figures)


def make_conversation(
    attempt: RecordedAttempt, scales: Sequence[Scale], tokenizer: Tokenizer | None, most: int, most_tokens: int
) -> Conversation:
    """Return the conversation of an attempt for a page.

    Args:
        scales: the color scales for values of tokens, such as advantages (see :func:`shared_scales`).
        tokenizer: decodes the tokens. If None, each token is shown as its id.
        most: the maximum number of characters of each text.
        most_tokens: the maximum number of tokens shown one by one. A turn that does not fit is shown only as text.
    """
    trajectory, branches = attempt.trajectory, _branches(attempt.trajectory.turns)
    contexts = _context_lengths(trajectory.turns)
    views, left = [], most_tokens
    for turn, figures in zip(trajectory.turns, attempt.figures(), strict=True):
        fits = len(turn.action_ids) <= left
        texts = token_texts(turn.action_ids, tokenizer) if fits else []
        tokens = tuple(make_tokens(turn, figures, scales, texts)) if fits else ()
        left -= len(tokens)
        state = tuple(_message(message, most) for message in trajectory.new_context(turn))
        views.append(_turn_view(turn, state, tokens, branches[turn.index], contexts[turn.index], most))
    return Conversation(
        start=tuple(_message(message, most) for message in trajectory.start),
        answer=None if trajectory.answer is None else visible(shortened(trajectory.answer, most)),
        turns=tuple(views),
        rewards=tuple(_rewards(trajectory.rewards)),
        branches=len(set(branches.values())),
        is_shortened=any(len(text) > most for text in _texts(trajectory)),
    )


def _texts(trajectory: Trajectory) -> Iterator[str]:
    for message in trajectory.start:
        yield from (message.text, message.reasoning or "")
    yield trajectory.answer or ""
    for turn in trajectory.turns:
        yield from (message.text for message in trajectory.new_context(turn))
        yield turn.action.text
        yield from (message.text for message in turn.observation)


def _turn_view(
    turn: Turn, state: tuple[MessageText, ...], tokens: tuple[Token, ...], branch: int, context: int, most: int
) -> TurnView:
    message = turn.action.message
    answers = {message.call_id: message for message in turn.observation if message.call_id is not None}
    calls = tuple(_call(turn, number_of, call, answers, most) for number_of, call in enumerate(message.calls))
    answered = {call.id for call in message.calls}
    rest = [message for message in turn.observation if message.call_id is None or message.call_id not in answered]
    versions = sorted({span.version for span in turn.version_spans})
    return TurnView(
        index=turn.index,
        parent=turn.parent,
        kind=turn.kind,
        branch=branch,
        finish_reason=turn.finish_reason,
        versions=", ".join(map(str, versions)),
        context=context,
        state=state,
        num_tokens=len(turn.action_ids),
        tokens=tokens,
        text=visible(shortened(turn.action.text, most)),
        rewards=tuple(_rewards(turn.rewards)),
        calls=calls,
        observation=tuple(_message(message, most) for message in rest),
        timing="" if turn.timing is None else timing_text(turn.timing),
    )


def _call(turn: Turn, index: int, call: ToolCall, answers: Mapping[str, Message], most: int) -> CallView:
    result: ToolResult | None = turn.results[index] if index < len(turn.results) else None
    answer = answers.get(call.id)
    parts = answer.parts if answer is not None else result.parts if result is not None else None
    arguments = () if call.arguments is None else tuple(_arguments(call.arguments, most))
    return CallView(
        name=visible(shortened(call.name, 200)),
        arguments=arguments,
        raw=visible(shortened(call.raw, most)) if call.arguments is None else "",
        error=visible(
            shortened(call.error or (result.error if result is not None and not result.ok else "") or "", 500)
        ),
        result=None if parts is None else _text_of(parts, most),
        seconds="" if result is None or not result.seconds else duration(result.seconds),
        rewards=tuple(_rewards(turn.call_rewards[index])) if index < len(turn.call_rewards) else (),
        images=tuple(part for part in parts or () if isinstance(part, Image)),
    )


def _arguments(arguments: Mapping[str, Any], most: int) -> Iterator[tuple[str, str]]:
    for name, value in arguments.items():
        text = value if isinstance(value, str) else as_json(value)
        yield visible(shortened(str(name), 200)), visible(shortened(text, most))


def _message(message: Message, most: int) -> MessageText:
    reasoning = visible(shortened(message.reasoning or "", most))
    calls = [f"{call.name} {call.raw if call.arguments is None else as_json(call.arguments)}" for call in message.calls]
    lines = [_text_of(message.parts, most), *(visible(shortened(call, most)) for call in calls)]
    return MessageText(message.role, "\n".join(line for line in lines if line), reasoning, message.images)


def _text_of(parts: Sequence[ContentPart], most: int) -> str:
    return visible(shortened(parts_text(parts), most))


def _rewards(rewards: Mapping[str, Any]) -> Iterator[Reward]:
    for name, value in rewards.items():
        if isinstance(value, tuple):
            shown, total = ", ".join(number(one) for one in value[:50]), float(sum(value))
        else:
            shown, total = "not computed" if value is None else number(value), value or 0.0
        sign = "plus" if total > 0 else "minus" if total < 0 else "zero"
        yield Reward(visible(shortened(name, 100)), shown, sign)


def _branches(turns: Sequence[Turn]) -> dict[int, int]:
    branches: dict[int, int] = {}
    continued: set[int] = set()
    for turn in turns:
        if turn.parent is None or turn.parent in continued or turn.parent not in branches:
            branches[turn.index] = len(set(branches.values()))
        else:
            branches[turn.index] = branches[turn.parent]
        if turn.parent is not None:
            continued.add(turn.parent)
    return branches


def _context_lengths(turns: Sequence[Turn]) -> dict[int, int]:
    lengths: dict[int, int] = {}
    actions = {turn.index: len(turn.action_ids) for turn in turns}
    for turn in turns:
        before = 0 if turn.parent is None else lengths.get(turn.parent, 0) + actions.get(turn.parent, 0)
        lengths[turn.index] = before + len(turn.new_ids)
    return lengths
