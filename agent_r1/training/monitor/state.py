"""What the doctor remembers from step to step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from agent_r1.training.monitor.failures import BreakerState


@dataclass(frozen=True, slots=True)
class DoctorState:
    """With it a run that is resumed is warned and stopped where it would have been without the stop.

    ``groups`` were seen, which is the next one's serial number; ``breaker`` is what it looks back on, ``norms`` are the
    last gradient norms, and ``in_a_row`` says in how many of the last steps in a row each check found something.

    Example:
        DoctorState(16, BreakerState((None, Failed(..), None)), (0.42, 0.4), {"logprob_gap": 2})
    """

    groups: int = 0
    breaker: BreakerState = field(default_factory=BreakerState)
    norms: tuple[float, ...] = ()
    in_a_row: Mapping[str, int] = field(default_factory=dict)
