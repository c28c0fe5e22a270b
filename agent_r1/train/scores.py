"""From the rewards of a trajectory to the numbers of the table."""

from __future__ import annotations

from dataclasses import dataclass

from agent_r1.core.trajectory import Trajectory

EXACT = ("em", "exact_match")
"""Names under which worlds report exact match."""


@dataclass(frozen=True, slots=True)
class Answered:
    """How one attempt was scored. One that failed, or could not be scored, answered nothing right."""

    em: float
    f1: float


def answered(trajectory: Trajectory) -> Answered:
    """Exact match and F1. A world without them is measured by its first reward, and by it alone."""
    numbers = {name: value for name, value in trajectory.rewards.items() if isinstance(value, int | float)}
    first = next(iter(numbers.values()), 0.0)
    em = next((numbers[name] for name in EXACT if name in numbers), first)
    return Answered(float(em), float(numbers.get("f1", em)))
