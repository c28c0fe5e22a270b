"""Schedules that change the weights of rewards during a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class RewardSchedule:
    """A factor for the weight of a reward, which changes with the step.

    ``points`` are pairs (step, factor). Between two points, the factor is interpolated linearly. Before the first point
    and after the last point, the factor is constant.

    Example:
        >>> RewardSchedule.parse("1:0, 11:1").factor(6)
        0.5
    """

    points: tuple[tuple[int, float], ...]

    @classmethod
    def parse(cls, text: str) -> RewardSchedule:
        """Parse a list of STEP:FACTOR, such as ``1:0,50:1``. Raise ValueError if ``text`` is not such a list."""
        points = []
        for part in text.split(","):
            step, colon, factor = part.partition(":")
            if not colon or not step.strip().isdecimal() or len(step.strip()) > 9:
                raise ValueError(f"give STEP:FACTOR,STEP:FACTOR, such as 1:0,50:1; this part is neither: {part!r}")
            points.append((int(step), float(factor)))
        if any(after <= before for (before, _), (after, _) in pairwise(points)):
            raise ValueError("give rising steps, such as 1:0,50:1")
        if not all(math.isfinite(factor) for _, factor in points):
            raise ValueError("give finite factors, such as 1:0,50:1")
        return cls(tuple(points))

    def factor(self, step: int) -> float:
        """Return the factor for the weight of the reward at ``step``. The first step of a run is step 1."""
        for (start, low), (end, high) in pairwise(self.points):
            if start <= step <= end:
                return low + (high - low) * (step - start) / (end - start)
        return self.points[0][1] if step < self.points[0][0] else self.points[-1][1]


def weights_at(weights: Mapping[str, float], schedules: Mapping[str, RewardSchedule], step: int) -> dict[str, float]:
    """Return the weight of each reward at ``step``, multiplied by the factor of its schedule if there is one.

    A reward that has a schedule but no weight has weight 1.
    """
    return {**weights, **{name: weights.get(name, 1.0) * one.factor(step) for name, one in schedules.items()}}
