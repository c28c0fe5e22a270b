"""One attempt in a terminal: its conversation with tool calls and rewards, its group, and its tokens."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from agent_r1.commands.show_run import safe
from agent_r1.core.trajectory import STATUS_POLICY, Rewards, Status
from agent_r1.store.reader import AttemptSummary
from agent_r1.store.rows import encode_value
from agent_r1.viewer.conversation import CallView, Conversation, MessageView, TurnView
from agent_r1.viewer.text import duration, number, one_line, reward_texts, timing_text, visible
from agent_r1.viewer.tokens import NUMBERS, Token

_IMPORTANCE = ("advantage", "engine", "trainer", "gap", "entropy", "value", "weight")
"""The columns with numbers, the most important first. A narrow terminal shows only the most important columns."""

_NUMBER_WIDTH, _OTHER_WIDTH, _TEXT_WIDTH, LABEL_WIDTH = 10, 38, 22, 11

MAX_STATE_TOKENS = 200  # of a prompt or of tool results that are printed for a turn; ``--json`` has all

_LOWERED = ("color(215)", "color(208)", "color(202)", "color(196)")
"""The colors of negative advantages (orange), from small to large absolute values."""
_RAISED = ("color(117)", "color(75)", "color(39)", "color(33)")
"""The colors of positive advantages (blue), from small to large values."""

_SIGNS = {"plus": "green", "minus": "red", "missing": "red", "zero": "dim"}


def attempt_json(
    summary: AttemptSummary, conversation: Conversation | None, siblings: Sequence[AttemptSummary]
) -> dict[str, Any]:
    """Return an attempt as a JSON object: its summary, its group, and its conversation if it has ended."""
    data = _summary_json(summary) | {"siblings": [_summary_json(sibling) for sibling in siblings]}
    if conversation is not None:
        # The bytes of images are not JSON; their sha256 names them.
        shown = asdict(conversation, dict_factory=lambda items: {key: one for key, one in items if key != "data"})
        for call in (call for turn in shown["turns"] for call in turn["calls"]):
            call["arguments"] = encode_value(call["arguments"])
        data |= shown
    return data


def _summary_json(summary: AttemptSummary) -> dict[str, Any]:
    return {**asdict(summary), "attempt": str(summary.attempt), "task": summary.attempt.task}


@dataclass(frozen=True, slots=True)
class AttemptText:
    """Prints an attempt, which has no ``conversation`` before its end, with ``siblings``, its whole group."""

    summary: AttemptSummary
    conversation: Conversation | None
    siblings: Sequence[AttemptSummary]
    with_tokens: bool
    record_tokens: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield _head(self.summary)
        yield _facts(self.summary, self.conversation)
        if self.conversation is not None:
            yield ""
            yield _labelled(_message_lines(self.conversation.start))
            yield from self._turns(self.conversation, options.max_width)
        yield Rule(Text(self._group_title(), "bold"), align="left", style="dim")
        yield self._group()

    def _turns(self, conversation: Conversation, width: int) -> RenderResult:
        advantages = (token.advantage for turn in conversation.turns for token in turn.tokens)
        largest = max((abs(one) for one in advantages if one is not None), default=0.0)
        for turn in conversation.turns:
            yield Rule(Text(_turn_title(turn), "bold"), align="left", style="dim")
            if self.with_tokens:
                yield _labelled([("state", state_text([text for _, text in turn.state_tokens]))])
            yield _labelled([*_message_lines(turn.state), *_turn_lines(turn)])
            if turn.timing is not None:
                yield _labelled([("time", Text(timing_text(turn.timing), "dim"))])
            if turn.tokens:
                yield token_table(turn.tokens, largest, width)
        if self.with_tokens and not self.summary.has_token_records:
            groups = self.record_tokens
            each = f"each step records the attempts of {groups} groups" if groups else "the run records no tokens"
            yield Text(f"The numbers of the trainer are not known: {each} (--record_tokens {groups}).", "yellow")

    def _group_title(self) -> str:
        rewards = [sibling.reward for sibling in self.siblings if sibling.reward is not None]
        mean = f", mean reward {number(math.fsum(rewards) / len(rewards), 3)}" if rewards else ""
        return f"group {self.summary.attempt.group_id} · {len(self.siblings)} attempts{mean}"

    def _group(self) -> Table:
        grid = Table.grid(padding=(0, 2, 0, 0))
        header = ("", "attempt", "reward", "credit", "turns", "tokens", "errors", "status")
        for name in header:
            grid.add_column(justify="right" if name in header[2:7] else "left", no_wrap=True)
        grid.add_row(*(Text(name, "dim") for name in header))
        for one in self.siblings:
            current = one.attempt == self.summary.attempt
            place = ".".join(map(str, one.attempt.sort_key))
            counts = (str(one.turns), str(one.action_tokens), str(one.call_errors or ""))
            cells = (">" if current else "", place, number(one.reward, 3), number(one.credit, 3), *counts)
            grid.add_row(*cells, _status_text(one), style="bold" if current else "")
        return grid


def _status_text(summary: AttemptSummary) -> Text:
    if summary.status is None:
        return Text("in progress", "cyan")
    failed = "yellow" if STATUS_POLICY[summary.status] == "train" else "red"
    return Text(summary.status.value.replace("_", " "), "" if summary.status is Status.COMPLETED else failed)


def _head(summary: AttemptSummary) -> Text:
    reward = "" if summary.reward is None else f"  reward {number(summary.reward)}"
    return Text.assemble((visible(str(summary.attempt)), "bold"), "  ", _status_text(summary), (reward, "bold"))


def _facts(summary: AttemptSummary, conversation: Conversation | None) -> Table:
    counted = {"turn": summary.turns, "token": summary.action_tokens, "call": summary.calls}
    counts = ", ".join(f"{count:,} {name}{'' if count == 1 else 's'}" for name, count in counted.items())
    counts += f" ({summary.call_errors} with an error)" if summary.call_errors else ""
    lines = [("reason", safe(summary.status_reason, "red"))] if summary.status_reason else []
    lines += [
        ("fate", Text(_fate_text(summary))),
        ("size", Text(f"{counts}, {duration(summary.seconds)}")),
        ("weights", Text(f"version {summary.version}")),
    ]
    if conversation is not None:
        lines += [("time", Text(_times(conversation)))] if conversation.start_time else []
        lines.append(("rewards", _rewards(conversation.rewards)))
        lines += [] if conversation.answer is None else [("answer", safe(conversation.answer))]
    return _labelled(lines)


def _times(conversation: Conversation) -> str:
    # Such as "from 2026-11-23 01:51:39 on, after 0.2 s of waiting; engine 1.9 s, environment 4.1 s".
    timings = [turn.timing for turn in conversation.turns if turn.timing is not None]
    engine, environment = sum(one.engine_seconds for one in timings), sum(one.env_seconds for one in timings)
    start = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(conversation.start_time))
    waited = f", after {duration(conversation.wait_seconds)} of waiting" if conversation.wait_seconds >= 0.001 else ""
    return f"from {start} on{waited}; engine {duration(engine)}, environment {duration(environment)}"


def _fate_text(summary: AttemptSummary) -> str:
    if summary.fate is None:
        return "pending: no update has used it yet"
    text = f"{summary.fate} at step {summary.step}"
    if summary.credit is not None:
        text += f", advantages add up to {number(summary.credit, 3)}"
    return f"{text}: {visible(summary.fate_reason)}" if summary.fate_reason else text


def _rewards(rewards: Rewards) -> Text:
    text = Text()
    for name, value, sign in reward_texts(rewards):
        text.append("   " if text else "").append(f"{name} ").append(value, _SIGNS[sign])
    return text


def _turn_title(turn: TurnView) -> str:
    parts = [f"turn {turn.index}", f"{turn.num_tokens} tokens after {turn.context}", turn.finish_reason]
    if turn.parent != (turn.index - 1 if turn.index else None):
        parts.append("a new branch" if turn.parent is None else f"continues turn {turn.parent}")
    parts += [turn.kind] if turn.kind != "act" else []
    parts += [] if turn.value is None else [f"value {number(turn.value, 3)}"]
    return " · ".join(parts)


def _message_lines(messages: Sequence[MessageView]) -> Iterator[tuple[str, Text]]:
    return ((message.role, safe(message.text)) for message in messages)


def _turn_lines(turn: TurnView) -> Iterator[tuple[str, Text]]:
    yield "policy", safe(turn.text) if turn.text else Text("(no text)", "dim")
    for call in turn.calls:
        yield "call", _call_text(call)
        if call.error:
            yield "  error", safe(call.error, "red")
        if call.result is not None:
            yield "  result", safe(call.result)
        if call.rewards:
            yield "  reward", _rewards(call.rewards)
    yield from _message_lines(turn.observation)
    if turn.rewards:
        yield "reward", _rewards(turn.rewards)


def _call_text(call: CallView) -> Text:
    if call.arguments is None:
        arguments = one_line(call.raw, 300)
    else:
        named: Mapping[str, Any] = call.arguments
        arguments = ", ".join(f"{one_line(name, 60)}={one_line(repr(value), 300)}" for name, value in named.items())
    seconds = f"  {number(call.seconds, 2)} s" if call.seconds else ""
    return Text.assemble((one_line(call.name, 100), "bold cyan"), f"({arguments})", (seconds, "dim"))


def _labelled(lines: Iterable[tuple[str, Text]]) -> Table:
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(style="dim", width=LABEL_WIDTH, no_wrap=True, overflow="ellipsis")
    grid.add_column(overflow="fold")
    for label, text in lines:
        grid.add_row(Text(label), text)
    return grid


def state_text(tokens: Sequence[str]) -> Text:
    """Return the tokens of a state as dimmed text, with a vertical bar between two tokens."""
    shown = [_without_breaks(token) for token in tokens]
    text = Text(f"{len(tokens):,} token{'' if len(tokens) == 1 else 's'}, not trained\n", "dim")
    left_out = len(tokens) - MAX_STATE_TOKENS
    if left_out <= 0:
        return text.append("│".join(shown), "dim")
    half = MAX_STATE_TOKENS // 2
    text.append("│".join(shown[:half]), "dim")
    text.append(f" … {left_out:,} tokens left out (--json has them) … ", "yellow")
    return text.append("│".join(shown[-half:]), "dim")


def token_table(tokens: Sequence[Token], largest: float, width: int) -> Table:
    """Return the action tokens of a turn, colored by advantage, of which ``largest`` gets the strongest color."""
    known = [name for name in _IMPORTANCE if any(NUMBERS[name](token) is not None for token in tokens)]
    fitting = known[: max(1, (width - _OTHER_WIDTH) // _NUMBER_WIDTH)]
    shown = [name for name in NUMBERS if name in fitting]
    grid = Table.grid(padding=(0, 1, 0, 0))
    for name in ("", "token", "id", "loss", *shown):
        is_text = name == "token"
        grid.add_column(
            justify="left" if is_text else "right",
            no_wrap=True,
            overflow="ellipsis",
            max_width=_TEXT_WIDTH if is_text else None,
            min_width=_NUMBER_WIDTH - 1 if name in shown else None,
        )
    grid.add_row(*(Text(name, "dim") for name in ("", "token", "id", "loss", *shown)))
    for position, token in enumerate(tokens):
        style = "dim" if token.weight == 0 else advantage_style(token.advantage, largest)
        loss = "-" if token.weight is None else str(int(token.weight != 0))
        numbers = (Text(_format(NUMBERS[name](token)), style if name == "advantage" else "") for name in shown)
        grid.add_row(Text(str(position), "dim"), Text(_one_line(token.text), style), str(token.id), loss, *numbers)
    return grid


def advantage_style(advantage: float | None, largest: float) -> str:
    """Return the color of an advantage; "" if the advantage is 0 or not known."""
    if not advantage or not largest:
        return ""
    level = min(3, int(4 * abs(advantage) / largest))
    return (_RAISED if advantage > 0 else _LOWERED)[level]


def _format(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if abs(value) >= 5e-4 or value == 0 else f"{value:.1e}"


def _one_line(text: str) -> str:
    # A token that begins or ends with a space, or is empty, would look like another one.
    line = _without_breaks(text)
    return line.replace(" ", "␣") if line != line.strip() or not line else line


def _without_breaks(text: str) -> str:
    return visible(text).replace("\n", "↵").replace("\t", "⇥")
