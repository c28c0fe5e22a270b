"""How well the critic of a run predicts: explained variance by turn, and calibration."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import fmean, pvariance
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from agent_r1.core.errors import InvalidInput
from agent_r1.core.trajectory import Trajectory
from agent_r1.core.weighted_rewards import can_be_summed, weighted_rewards
from agent_r1.store import AttemptFilter, RunReader
from agent_r1.viewer.text import number

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
