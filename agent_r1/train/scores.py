"""From the rewards of a trajectory to the numbers of the table."""

from __future__ import annotations

from dataclasses import dataclass

from agent_r1.core.trajectory import Trajectory

EXACT = ("em", "exact_match")
"""Names under which worlds report exact match."""


@dataclass(frozen=True, slots=True)
class Answered:
    """How one attempt was scored. One that failed, or could not be scored, answered nothing right.

    ``measure`` is what ``em`` is: "exact match", or the first reward of a world that has none.
    """

    em: float
    f1: float
    measure: str = "exact match"

    @property
    def exact(self) -> bool:
        return self.measure == "exact match"


def answered(trajectory: Trajectory) -> Answered:
    """Exact match and F1. A world without them is measured by its first reward, and by it alone."""
    numbers = {name: float(value) for name, value in trajectory.rewards.items() if isinstance(value, int | float)}
    exact = next((numbers[name] for name in EXACT if name in numbers), None)
    if exact is not None:
        return Answered(exact, numbers.get("f1", exact))
    for name, value in numbers.items():
        return Answered(value, value, f"reward {name!r}")
    return Answered(0.0, 0.0)
