"""The report of an attempt: its conversation (with tool calls and rewards), its group, and its tokens."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.rule import Rule
from rich.table import Table
from rich.text import Text
from tokenizers import Tokenizer

from agent_r1.commands.show_attempts import status_text, summary_json
from agent_r1.commands.show_tokens import (
    StateToken,
    TurnTokens,
    largest_advantage,
    state_text,
    token_lines,
    token_table,
)
from agent_r1.commands.terminal import safe
from agent_r1.core.messages import Message, ToolCall, parts_text
from agent_r1.core.token_record import TokenRecord
from agent_r1.core.trajectory import Trajectory, Turn
from agent_r1.store import AttemptSummary, RunReader
from agent_r1.store.codec import encode_value
from agent_r1.viewer.text import duration, number, one_line, timing_text, visible
from agent_r1.viewer.tokens import read_tokenizer, token_texts

LABEL_WIDTH = 11


@dataclass(frozen=True, slots=True)
class AttemptReport:
    """The content of ``agent-r1 show RUN ATTEMPT``.

    Attributes:
        trajectory: None if the attempt has not ended.
        siblings: all attempts of the group, including this attempt.
        tokens: the tokens of each turn; None if tokens are not shown.
        record_tokens: the run's setting ``record_tokens``. In each step, the advantages and the trainer's
            log-probabilities of the tokens are recorded for at most ``record_tokens`` groups.
        values: the critic's value of the state before each action, by the index of the turn.
    """

    summary: AttemptSummary
    trajectory: Trajectory | None
    siblings: tuple[AttemptSummary, ...]
    tokens: tuple[TurnTokens, ...] | None
    record_tokens: int
    values: Mapping[int, float]

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON object.

        The report has the keys of :func:`summary_json`, and the key ``siblings``. If the attempt has ended, there are
        also ``answer``, ``start_time``, ``wait_seconds``, ``rewards``, ``start`` and ``turns``.
        """
        data: dict[str, Any] = summary_json(self.summary)
        if self.trajectory is not None:
            data["answer"] = self.trajectory.answer
            data["start_time"], data["wait_seconds"] = self.trajectory.start_time, self.trajectory.wait_seconds
            data["rewards"] = {name: encode_value(value) for name, value in self.trajectory.rewards.items()}
            data["start"] = [_message_json(message) for message in self.trajectory.start]
            data["turns"] = [
                _turn_json(turn, self.trajectory, self.values.get(turn.index)) for turn in self.trajectory.turns
            ]
            for turn, tokens in zip(data["turns"], self.tokens or (), strict=False):
                turn.update(tokens.to_json())
        data["siblings"] = [summary_json(sibling) for sibling in self.siblings]
        return data


def read_attempt(
    folder: Path, reader: RunReader, summary: AttemptSummary, model: Path | None, with_tokens: bool
) -> AttemptReport:
    """Return the report of an attempt.

    ``model`` is the folder of the run's model. The tokenizer of the model is used if the run has saved no tokenizer.
    """
    trajectory = reader.trajectory(summary.attempt)
    tokens = None
    records = {record.turn: record for record in reader.token_records(summary.attempt)}
    if with_tokens and trajectory is not None:
        tokenizer = read_tokenizer(folder, model)
        tokens = tuple(_turn_tokens(turn, records.get(turn.index), tokenizer) for turn in trajectory.turns)
    groups = int(reader.config().get("record_tokens", 0))
    firsts = {turn: record.values[0] for turn, record in records.items() if record.values}
    values = {turn: value for turn, value in firsts.items() if math.isfinite(value)}
    return AttemptReport(summary, trajectory, reader.siblings(summary.attempt), tokens, groups, values)


def _turn_tokens(turn: Turn, record: TokenRecord | None, tokenizer: Tokenizer | None) -> TurnTokens:
    state = map(StateToken, turn.new_ids, token_texts(turn.new_ids, tokenizer))
    return TurnTokens(tuple(state), tuple(token_lines(turn, record, token_texts(turn.action_ids, tokenizer))))


def _message_json(message: Message) -> dict[str, Any]:
    return {"role": message.role, "text": parts_text(message.parts)}


def _turn_json(turn: Turn, trajectory: Trajectory, value: float | None) -> dict[str, Any]:
    return {
        "turn": turn.index,
        "parent": turn.parent,
        "kind": turn.kind,
        "finish_reason": turn.finish_reason,
        "state": [_message_json(message) for message in trajectory.new_context(turn)],
        "text": turn.action.text,
        "calls": [_call_json(turn, index, call) for index, call in enumerate(turn.action.message.calls)],
        "rewards": dict(turn.rewards),
        "value": value,
        "timing": None if turn.timing is None else asdict(turn.timing),
        "observation": [_message_json(message) for message in turn.observation],
    }


def _call_json(turn: Turn, index: int, call: ToolCall) -> dict[str, Any]:
    result = turn.results[index] if index < len(turn.results) else None
    return {
        "name": call.name,
        "arguments": encode_value(call.arguments),
        "raw": call.raw,
        "error": call.error or (result and result.error),
        "result": None if result is None else parts_text(result.parts),
        "seconds": None if result is None else result.seconds,
        "rewards": dict(turn.call_rewards[index]) if index < len(turn.call_rewards) else {},
    }


@dataclass(frozen=True, slots=True)
class AttemptText:
    """Prints the report of an attempt in the terminal, with the package ``rich``.

    If the tokens are shown, only the first and the last tokens of a long prompt or tool result are printed. With
    ``prints_all_tokens``, all tokens are printed.
    """

    report: AttemptReport
    prints_all_tokens: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        report = self.report
        yield _head(report.summary)
        yield _facts(report)
        if report.trajectory is not None:
            yield ""
            yield _labelled(_message_lines(report.trajectory.start))
            yield from self._turns(report.trajectory, options.max_width)
        yield Rule(Text(_group_title(report), "bold"), align="left", style="dim")
        yield _siblings(report)

    def _turns(self, trajectory: Trajectory, width: int) -> RenderResult:
        tokens = self.report.tokens
        largest = largest_advantage(line for turn in tokens or () for line in turn.action)
        contexts = _context_lengths(trajectory.turns)
        for turn in trajectory.turns:
            title = _turn_title(turn, contexts[turn.index], self.report.values.get(turn.index))
            yield Rule(Text(title, "bold"), align="left", style="dim")
            if tokens is not None:
                yield _labelled([("state", state_text(tokens[turn.index].state, self.prints_all_tokens))])
            yield _labelled(_message_lines(trajectory.new_context(turn)))
            yield _labelled(_turn_lines(turn))
            if turn.timing is not None:
                yield _labelled([("time", Text(timing_text(turn.timing), "dim"))])
            if tokens is not None and turn.action_ids:
                yield token_table(tokens[turn.index].action, largest, width)
        if tokens is not None and not self.report.summary.has_token_records:
            yield Text(_no_records(self.report.record_tokens), "yellow")


def _no_records(groups: int) -> str:
    each = f"each step records the attempts of {groups} groups" if groups else "the run records no tokens"
    return f"The numbers of the trainer are not known: {each} (--record_tokens {groups})."


def _head(summary: AttemptSummary) -> Text:
    reward = "" if summary.reward is None else f"  reward {number(summary.reward)}"
    return Text.assemble((visible(str(summary.attempt)), "bold"), "  ", status_text(summary), (reward, "bold"))


def _facts(report: AttemptReport) -> Table:
    summary, trajectory = report.summary, report.trajectory
    counted = {"turn": summary.turns, "token": summary.action_tokens, "call": summary.calls}
    counts = ", ".join(f"{count:,} {name}{'' if count == 1 else 's'}" for name, count in counted.items())
    counts += f" ({summary.call_errors} with an error)" if summary.call_errors else ""
    lines = [
        ("fate", Text(_fate_text(summary))),
        ("size", Text(f"{counts}, {duration(summary.seconds)}")),
        ("weights", Text(f"version {summary.version}")),
    ]
    if summary.status_reason:
        lines.insert(0, ("reason", safe(summary.status_reason, "red")))
    if trajectory is not None:
        lines += [("time", Text(_times(trajectory)))] if trajectory.start_time else []
        lines.append(("rewards", _rewards(trajectory.rewards)))
        if trajectory.answer is not None:
            lines.append(("answer", safe(trajectory.answer)))
    return _labelled(lines)


def _times(trajectory: Trajectory) -> str:
    """Return a line about the times of an attempt.

    Example:
        "from 2026-11-23 01:51:39 on, after 0.2 s of waiting; engine 1.9 s, environment 4.1 s"
    """
    timings = [turn.timing for turn in trajectory.turns if turn.timing is not None]
    engine, environment = sum(one.engine_seconds for one in timings), sum(one.env_seconds for one in timings)
    start = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(trajectory.start_time))
    waited = f", after {duration(trajectory.wait_seconds)} of waiting" if trajectory.wait_seconds >= 0.001 else ""
    return f"from {start} on{waited}; engine {duration(engine)}, environment {duration(environment)}"


def _fate_text(summary: AttemptSummary) -> str:
    if summary.fate is None:
        return "pending: no update has used it yet"
    text = f"{summary.fate} at step {summary.step}"
    if summary.credit is not None:
        text += f", advantages add up to {number(summary.credit, 3)}"
    return f"{text}: {visible(summary.fate_reason)}" if summary.fate_reason else text


def _rewards(rewards: Mapping[str, Any]) -> Text:
    text = Text()
    for name, value in rewards.items():
        values = value if isinstance(value, tuple) else (value,)
        shown = "not computed" if value is None else ", ".join(number(one) for one in values)
        total = math.fsum(one for one in values if one is not None)
        style = "green" if total > 0 else "red" if total < 0 or value is None else "dim"
        text.append("   " if text else "").append(f"{one_line(name, 60)} ").append(shown, style)
    return text


def _context_lengths(turns: Sequence[Turn]) -> list[int]:
    """Return the number of tokens that the policy saw before each action."""
    lengths: list[int] = []
    for turn in turns:
        before = 0 if turn.parent is None else lengths[turn.parent] + len(turns[turn.parent].action_ids)
        lengths.append(before + len(turn.new_ids))
    return lengths


def _turn_title(turn: Turn, context: int, value: float | None) -> str:
    parts = [f"turn {turn.index}", f"{len(turn.action_ids)} tokens after {context}", turn.finish_reason]
    if turn.parent != (turn.index - 1 if turn.index else None):
        parts.append("a new branch" if turn.parent is None else f"continues turn {turn.parent}")
    parts += [turn.kind] if turn.kind != "act" else []
    parts += [] if value is None else [f"value {number(value, 3)}"]
    return " · ".join(parts)


def _message_lines(messages: Sequence[Message]) -> Iterator[tuple[str, Text]]:
    for message in messages:
        yield message.role, safe(parts_text(message.parts))
        for call in message.calls:
            yield "call", _call_text(call)


def _turn_lines(turn: Turn) -> Iterator[tuple[str, Text]]:
    text = turn.action.text
    yield "policy", safe(text) if text else Text("(no text)", "dim")
    calls = turn.action.message.calls
    for index, call in enumerate(calls):
        yield from _call_lines(turn, index, call)
    answered = {call.id for call in calls[: len(turn.results)]}
    for message in turn.observation:
        if message.call_id is None or message.call_id not in answered:
            yield message.role, safe(parts_text(message.parts))
    if turn.rewards:
        yield "reward", _rewards(turn.rewards)


def _call_lines(turn: Turn, index: int, call: ToolCall) -> Iterator[tuple[str, Text]]:
    result = turn.results[index] if index < len(turn.results) else None
    seconds = f"  {number(result.seconds, 2)} s" if result is not None and result.seconds else ""
    yield "call", _call_text(call).append(seconds, "dim")
    error = call.error or (result.error if result is not None else None)
    if error:
        yield "  error", safe(error, "red")
    if result is not None:
        answers = (message for message in turn.observation if message.call_id == call.id)
        shown = next(answers, None)  # what the policy saw, which can be shorter than the result
        yield "  result", safe(parts_text(result.parts if shown is None else shown.parts))
    if index < len(turn.call_rewards) and turn.call_rewards[index]:
        yield "  reward", _rewards(turn.call_rewards[index])


def _call_text(call: ToolCall) -> Text:
    if call.arguments is None:
        arguments = one_line(call.raw, 300)
    else:
        arguments = ", ".join(
            f"{one_line(name, 60)}={one_line(repr(value), 300)}" for name, value in call.arguments.items()
        )
    return Text.assemble((one_line(call.name, 100), "bold cyan"), f"({arguments})")


def _labelled(lines: Iterable[tuple[str, Text]]) -> Table:
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(style="dim", width=LABEL_WIDTH, no_wrap=True, overflow="ellipsis")
    grid.add_column(overflow="fold")
    for label, text in lines:
        grid.add_row(Text(label), text)
    return grid


def _group_title(report: AttemptReport) -> str:
    rewards = [sibling.reward for sibling in report.siblings if sibling.reward is not None]
    mean = f", mean reward {number(math.fsum(rewards) / len(rewards), 3)}" if rewards else ""
    return f"group {report.summary.attempt.group_id} · {len(report.siblings)} attempts{mean}"


def _siblings(report: AttemptReport) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    header = ("", "attempt", "reward", "credit", "turns", "tokens", "errors", "status")
    for name in header:
        grid.add_column(justify="right" if name in header[2:7] else "left", no_wrap=True)
    grid.add_row(*(Text(name, "dim") for name in header))
    for one in report.siblings:
        current = one.attempt == report.summary.attempt
        place = ".".join(map(str, one.attempt.sort_key))
        counts = (str(one.turns), str(one.action_tokens), str(one.call_errors or ""))
        cells = (">" if current else "", place, number(one.reward, 3), number(one.credit, 3), *counts)
        grid.add_row(*cells, status_text(one), style="bold" if current else "")
    return grid
