"""The report of an attempt: its conversation (with tool calls and rewards), its group, and its tokens."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pvariance
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.rule import Rule
from rich.table import Table
from rich.text import Text
from tokenizers import Tokenizer

from agent_r1.commands.show_attempts import status_text, summary_json
from agent_r1.commands.show_run import safe
from agent_r1.core.errors import InvalidInput
from agent_r1.core.events import TokenRecord
from agent_r1.core.messages import Message, ToolCall, parts_text
from agent_r1.core.trajectory import AttemptId, Trajectory, Turn, can_be_summed, weighted_rewards
from agent_r1.store.attempt_list import AttemptFilter, AttemptSummary
from agent_r1.store.reader import RunReader
from agent_r1.store.rows import encode_value
from agent_r1.viewer.text import duration, number, one_line, timing_text, visible
from agent_r1.viewer.tokens import read_tokenizer, token_texts

NUMBERS = ("engine", "trainer", "gap", "advantage", "entropy", "value", "weight")
"""The columns with numbers in the token table, from left to right."""

_IMPORTANCE = ("advantage", "engine", "trainer", "gap", "entropy", "value", "weight")
"""The columns with numbers, the most important first. A narrow terminal shows only the most important columns."""

_NUMBER_WIDTH, _OTHER_WIDTH, _TEXT_WIDTH = 10, 38, 22

MAX_STATE_TOKENS = 200
"""The largest number of prompt tokens or tool-result tokens that are printed for a turn. If a turn has more, only the
first and the last tokens are printed, unless the user asks for all tokens."""

_LOWERED = ("color(215)", "color(208)", "color(202)", "color(196)")
"""The colors of negative advantages (orange), from small to large absolute values."""
_RAISED = ("color(117)", "color(75)", "color(39)", "color(33)")
"""The colors of positive advantages (blue), from small to large values."""


@dataclass(frozen=True, slots=True)
class TokenLine:
    """One action token with its numbers. A number that was not recorded is None.

    Attributes:
        loss_mask: whether the policy loss includes the token.
        engine: the log-probability in the engine that sampled the token.
        trainer: the log-probability in the trainer before the update.
        gap: ``trainer`` minus ``engine``.
        weight: the weight of the token in the policy loss.
    """

    id: int
    text: str
    loss_mask: bool | None
    engine: float | None
    trainer: float | None
    gap: float | None
    advantage: float | None
    entropy: float | None
    value: float | None
    weight: float | None

    def number(self, name: str) -> float | None:
        found: float | None = asdict(self)[name]
        return found


def token_lines(turn: Turn, record: TokenRecord | None, texts: Sequence[str]) -> Iterator[TokenLine]:
    """Yield one line for each action token of a turn.

    ``record`` holds the trainer's numbers for the tokens, such as advantages; None if the run recorded no such numbers
    for the turn. ``texts`` holds the text of each action token.
    """
    unknown = (math.nan,) * len(turn.action_ids)
    blank = TokenRecord(AttemptId("", "", 0, 0), turn.index, unknown, unknown, unknown, unknown)
    known = record or blank
    numbers = (known.logprobs, known.advantages, known.loss_weights, known.entropies, known.values or unknown)
    for token_id, text, engine, trainer, advantage, weight, entropy, value in zip(
        turn.action_ids, texts, turn.logprobs, *numbers, strict=True
    ):
        yield TokenLine(
            id=token_id,
            text=text,
            loss_mask=None if math.isnan(weight) else weight != 0,
            engine=_finite(engine),
            trainer=_finite(trainer),
            gap=_finite(trainer - engine),
            advantage=_finite(advantage),
            entropy=_finite(entropy),
            value=_finite(value),
            weight=_finite(weight),
        )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def largest_advantage(lines: Iterable[TokenLine]) -> float:
    """Return the largest absolute advantage of the tokens; 0 if no advantage is known."""
    return max((abs(line.advantage) for line in lines if line.advantage is not None), default=0.0)


@dataclass(frozen=True, slots=True)
class StateToken:
    """A token that the policy saw and did not sample, such as a token of a tool result."""

    id: int
    text: str


@dataclass(frozen=True, slots=True)
class TurnTokens:
    """The tokens of a turn.

    Attributes:
        state: the tokens of the prompt that are new in this turn, such as the tokens of a tool result.
        action: the tokens that the policy sampled.
    """

    state: tuple[StateToken, ...]
    action: tuple[TokenLine, ...]

    def to_json(self) -> dict[str, list[dict[str, Any]]]:
        return {"state_tokens": [*map(asdict, self.state)], "tokens": [*map(asdict, self.action)]}


def state_text(tokens: Sequence[StateToken], prints_all: bool) -> Text:
    """Return the tokens of a state as dimmed text, with a vertical bar between two tokens.

    If there are more than MAX_STATE_TOKENS tokens, the middle tokens are left out, unless ``prints_all`` is true.
    """
    left_out = 0 if prints_all else max(0, len(tokens) - MAX_STATE_TOKENS)
    shown = [_without_breaks(token.text) for token in tokens]
    text = Text(f"{len(tokens):,} token{'' if len(tokens) == 1 else 's'}, not trained\n", "dim")
    if not left_out:
        return text.append("│".join(shown), "dim")
    half = MAX_STATE_TOKENS // 2
    text.append("│".join(shown[:half]), "dim")
    text.append(f" … {left_out:,} tokens left out (--all_tokens prints them) … ", "yellow")
    return text.append("│".join(shown[-half:]), "dim")


def token_table(lines: Sequence[TokenLine], largest: float, width: int) -> Table:
    """Return the table of the action tokens of a turn. The colors show the advantages.

    ``largest`` is the absolute advantage that gets the strongest color. A narrow table has fewer columns.
    """
    known = [name for name in _IMPORTANCE if any(line.number(name) is not None for line in lines)]
    fitting = known[: max(1, (width - _OTHER_WIDTH) // _NUMBER_WIDTH)]
    shown = [name for name in NUMBERS if name in fitting]
    header = ("", "token", "id", "loss", *shown)
    grid = Table.grid(padding=(0, 1, 0, 0))
    for name in header:
        is_text = name == "token"
        grid.add_column(
            justify="left" if is_text else "right",
            no_wrap=True,
            overflow="ellipsis",
            max_width=_TEXT_WIDTH if is_text else None,
            min_width=_NUMBER_WIDTH - 1 if name in shown else None,
        )
    grid.add_row(*(Text(name, "dim") for name in header))
    for position, line in enumerate(lines):
        style = "dim" if line.loss_mask is False else advantage_style(line.advantage, largest)
        loss = "-" if line.loss_mask is None else str(int(line.loss_mask))
        numbers = (Text(_format(line.number(name)), style if name == "advantage" else "") for name in shown)
        grid.add_row(Text(str(position), "dim"), Text(_one_line(line.text), style), str(line.id), loss, *numbers)
    return grid


def advantage_style(advantage: float | None, largest: float) -> str:
    """Return the color of an advantage; "" if the advantage is 0 or not known.

    ``largest`` is the absolute advantage that gets the strongest color.
    """
    if not advantage or not largest:
        return ""
    level = min(3, int(4 * abs(advantage) / largest))
    return (_RAISED if advantage > 0 else _LOWERED)[level]


def _format(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if abs(value) >= 5e-4 or value == 0 else f"{value:.1e}"


def _one_line(text: str) -> str:
    """Return the text of a token as one line. Line breaks and tabs become visible characters.

    If the line begins or ends with a space, all spaces in the line become visible characters too.
    """
    line = _without_breaks(text)
    return line.replace(" ", "␣") if line != line.strip() or not line else line


def _without_breaks(text: str) -> str:
    return visible(text).replace("\n", "↵").replace("\t", "⇥")


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


BINS = 5
"""The number of bins of the calibration. Each bin has about the same number of predictions."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """A prediction of the critic at one turn.

    Attributes:
        value: the sum of rewards that the critic predicted before the action of the turn.
        reward: the actual sum: the weighted rewards of the turn and of all later turns, plus the weighted rewards for
            the trajectory as a whole.
    """

    turn: int
    value: float
    reward: float


@dataclass(frozen=True, slots=True)
class CriticRow:
    """A summary of several predictions: one row of a table.

    Attributes:
        name: such as "turn 0".
        count: the number of predictions.
        value: the mean of V, the ``value`` of each prediction.
        reward: the mean of G, the ``reward`` of each prediction.
        explained: the explained variance 1 - Var(G - V) / Var(G). NaN if all G are equal.
    """

    name: str
    count: int
    value: float
    reward: float
    explained: float


@dataclass(frozen=True, slots=True)
class CriticReport:
    """The content of ``agent-r1 show RUN --critic``.

    Attributes:
        rows: one summary of all predictions, then one summary for each turn.
        bins: one summary for each range of predicted values.
        calibration_error: the mean of |mean predicted value - mean actual reward| over ``bins``. Each bin has the
            number of its predictions as weight.
    """

    rows: tuple[CriticRow, ...]
    bins: tuple[CriticRow, ...]
    calibration_error: float

    def to_json(self) -> dict[str, Any]:
        return {
            "states": [asdict(row) for row in self.rows],
            "calibration": [asdict(row) for row in self.bins],
            "calibration_error": self.calibration_error,
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield _table("states before", self.rows)
        yield Text(f"\ncalibration: the values differ by {number(self.calibration_error, 3)} on average", "bold")
        yield _table("values", self.bins)


def read_critic(reader: RunReader) -> CriticReport:
    """Return the report on the critic of a run. Raise InvalidInput if the run recorded no values."""
    weights = reader.config().get("reward_weights", {})
    predictions: list[Prediction] = []
    for summary in reader.list_attempts(AttemptFilter(recorded=True), limit=-1):
        trajectory = reader.trajectory(summary.attempt)
        if trajectory is not None:
            first = {one.turn: one.values[0] for one in reader.token_records(summary.attempt) if one.values}
            predictions += _predictions(trajectory, first, weights)
    if not predictions:
        do = "show a run of an algorithm with a critic, such as ppo, with --record_tokens above 0"
        raise InvalidInput("critic", got="a run without recorded values", do=do)
    return make_report(predictions)


def _predictions(trajectory: Trajectory, values: dict[int, float], weights: dict[str, float]) -> Iterator[Prediction]:
    """Yield a prediction for each turn in ``values``. Skip turns whose value or sum of rewards is not finite.

    ``values`` has the critic's value before each action, by the index of the turn.
    """
    rewards = list(weighted_rewards(trajectory, weights))
    for turn, value in values.items():
        following = [one.value for one in rewards if one.turn is None or one.turn >= turn]
        if math.isfinite(value) and all(map(can_be_summed, following)):
            yield Prediction(turn, value, math.fsum(following))


def make_report(predictions: Sequence[Prediction]) -> CriticReport:
    turns = sorted({one.turn for one in predictions})
    rows = [_row("all turns", predictions)]
    rows += [_row(f"turn {turn}", [one for one in predictions if one.turn == turn]) for turn in turns]
    ranked = sorted(predictions, key=lambda one: one.value)
    edges = [index * len(ranked) // BINS for index in range(BINS + 1)]
    parts = [ranked[start:end] for start, end in pairwise(edges) if end > start]
    bins = [_row(f"{number(part[0].value, 2)} to {number(part[-1].value, 2)}", part) for part in parts]
    error = math.fsum(one.count * abs(one.value - one.reward) for one in bins) / len(ranked)
    return CriticReport(tuple(rows), tuple(bins), error)


def _row(name: str, predictions: Sequence[Prediction]) -> CriticRow:
    values, rewards = [one.value for one in predictions], [one.reward for one in predictions]
    total = pvariance(rewards)
    left = pvariance([reward - value for reward, value in zip(rewards, values, strict=True)])
    return CriticRow(name, len(predictions), fmean(values), fmean(rewards), 1 - left / total if total else math.nan)


def _table(name: str, rows: Iterable[CriticRow]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in (name, "states", "mean value", "mean reward after", "explained variance"):
        table.add_column(title, justify="left" if title == name else "right", no_wrap=True)
    for row in rows:
        explained = "-" if math.isnan(row.explained) else number(row.explained, 3)
        table.add_row(row.name, f"{row.count:,}", number(row.value, 3), number(row.reward, 3), explained)
    return table
