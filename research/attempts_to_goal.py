"""Attempts and sampled tokens until half of a run's training attempts are right, and medians with runs that never are.

Exact match is measured on the training attempts, sampled at temperature 1: no question is asked twice in a run, so that
the policy was trained on none of them before.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from agent_r1.store.reader import RunReader

GOAL = 0.5

WINDOW = 2
"""The number of steps over which exact match is averaged."""

RESAMPLES = 10_000
"""The number of bootstrap samples of an interval."""


@dataclass(frozen=True, slots=True)
class Curve:
    """The exact match of each step of a run, and the attempts and sampled tokens up to the step, inclusive."""

    em: tuple[float, ...]
    attempts: tuple[int, ...]
    tokens: tuple[int, ...]

    def reached(self) -> int | None:
        """Return the index of the first step at which the mean exact match of ``WINDOW`` steps is at least ``GOAL``.

        Return None if there is no such step.
        """
        ends = range(WINDOW, len(self.em) + 1)
        return next((end - 1 for end in ends if statistics.fmean(self.em[end - WINDOW : end]) >= GOAL), None)

    def attempts_to_goal(self) -> float:
        """Return the number of attempts until the goal is reached; infinity if it is not."""
        place = self.reached()
        return math.inf if place is None else self.attempts[place]

    def tokens_to_goal(self) -> float:
        """Return the number of sampled tokens until the goal is reached; infinity if it is not."""
        place = self.reached()
        return math.inf if place is None else self.tokens[place]


def read_curve(folder: Path) -> Curve:
    """Return the curve of the finished run in ``folder``."""
    with closing(RunReader(folder)) as reader:
        em, tokens = reader.curve("em"), reader.curve("tokens")
        size = reader.config()["groups_per_step"] * reader.config()["group_size"]
    steps = sorted(em)
    return Curve(
        tuple(em[step] for step in steps),
        tuple(size * (number + 1) for number in range(len(steps))),
        tuple(map(round, itertools.accumulate(tokens[step] for step in steps))),
    )


@dataclass(frozen=True, slots=True)
class Median:
    """A median over runs with its 95 % interval. An infinite value is beyond the end of the runs."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        """Return the median as text, such as ``2,688 (2,560-never)``."""
        value, low, high = ("never" if math.isinf(n) else f"{n:,.0f}" for n in (self.value, self.low, self.high))
        return value if value == low == high == "never" else f"{value} ({low}-{high})"


def median(values: Sequence[float]) -> Median:
    """Return the median of ``values``, with an interval by a bootstrap over them. Infinity counts as a large value.

    Example:
        median([3.0, 1.0, math.inf]).value == 3.0
    """
    generator = random.Random(0)
    drawn = sorted(statistics.median_low(generator.choices(values, k=len(values))) for _ in range(RESAMPLES))
    low, high = (drawn[int(q * (RESAMPLES - 1))] for q in (0.025, 0.975))
    return Median(statistics.median_low(values), low, high)
