"""From the rewards of a trajectory to the numbers of the table."""

from __future__ import annotations

import math
from dataclasses import dataclass

from agent_r1.core.trajectory import Rewards, Trajectory

EXACT = ("em", "exact_match")
"""Names under which worlds report exact match."""


@dataclass(frozen=True, slots=True)
class Answered:
    """How one attempt was scored. ``measure`` is what ``em`` is: exact match, or a world's first reward.

    ``sub`` is the sub-match, None in worlds that do not report one. An attempt that failed, or whose measure could
    not be computed, counts as wrong; ``failure`` then says why.
    """

    em: float
    f1: float
    sub: float | None = None
    measure: str = "exact match"
    failure: str | None = None

    @property
    def exact(self) -> bool:
        return self.measure == "exact match"


def pass_at_k(attempts: int, right: int, k: int) -> float:
    """The chance that of k attempts at a question one is right, where ``right`` of ``attempts`` were: an unbiased
    estimate, 1 - C(attempts - right, k) / C(attempts, k), for k <= attempts (Chen et al. 2021, 2107.03374, equation 1).

    Example:
        >>> pass_at_k(attempts=4, right=1, k=2)
        0.5
    """
    return 1.0 - math.comb(attempts - right, k) / math.comb(attempts, k)


def answered(trajectory: Trajectory) -> Answered:
    """Exact match, F1 and sub-match. A world without them is measured by its first reward, and by it alone."""
    rewards = trajectory.rewards
    if not rewards:
        return Answered(0.0, 0.0, failure=trajectory.reason or "it was not scored")
    name = next((name for name in EXACT if name in rewards), next(iter(rewards)))
    measure = "exact match" if name in EXACT else f"reward {name!r}"
    value = _number(rewards, name)
    if value is None:
        return Answered(0.0, 0.0, measure=measure, failure=trajectory.reason or f"{name} could not be scored")
    f1 = _number(rewards, "f1")
    return Answered(value, value if f1 is None else f1, _number(rewards, "sub_match"), measure)


def _number(rewards: Rewards, name: str) -> float | None:
    """The reward of the whole trajectory: a reward per turn adds up."""
    value = rewards.get(name)
    return sum(value) if isinstance(value, tuple) else value
