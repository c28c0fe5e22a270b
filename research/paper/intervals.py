"""Means over runs with their confidence intervals, by Student's t."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over ``count`` runs. ``half`` is half the width of its 95 % interval, None for a single run.

    Example:
        Estimate(mean=0.5, half=0.2484, count=3)
    """

    mean: float
    half: float | None
    count: int

    @property
    def verdict(self) -> str:
        """The direction of a difference; "not resolved" if its interval includes 0, "equal" if all runs agree on 0."""
        if self.half is None:
            return "one run is not enough"
        if self.mean == self.half == 0:
            return "equal"
        if abs(self.mean) <= self.half:
            return "not resolved"
        return "lower" if self.mean < 0 else "higher"


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean and the 95 % interval, mean +- t * s / sqrt(n), t with n - 1 degrees of freedom (Student 1908).

    Raises:
        statistics.StatisticsError: if there are no values.

    Example:
        >>> estimate([0.4, 0.5, 0.6])
        Estimate(mean=0.5, half=0.2484..., count=3)
    """
    count = len(values)
    mean = statistics.fmean(values)
    if count == 1:
        return Estimate(mean, None, 1)
    return Estimate(mean, student_975(count - 1) * statistics.stdev(values) / math.sqrt(count), count)


def student_975(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t with ``freedom`` >= 1 degrees of freedom, by bisection.

    Example:
        >>> student_975(2)
        4.3026...
    """
    low, high = 1.0, 13.0  # the quantile is 12.71 for 1 degree of freedom and falls to 1.96 as they grow
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _two_sided_probability(middle, freedom) < 0.95 else (low, middle)
    return high


def _two_sided_probability(t: float, freedom: int) -> float:
    """Return P(|T| <= t), a finite sum for integer degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    odd = freedom % 2
    term, total = math.cos(angle) if odd else 1.0, 0.0
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= (power + 1) / (power + 2) * math.cos(angle) ** 2
    share = math.sin(angle) * total
    return 2 / math.pi * (angle + share) if odd else share
