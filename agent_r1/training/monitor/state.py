"""The state that the health monitor carries from step to step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from agent_r1.training.monitor.circuit_breaker import CircuitBreakerState


@dataclass(frozen=True, slots=True)
class MonitorState:
    """The state of a health monitor. It is part of a checkpoint, so that a resumed run is warned and stopped at the
    same step as an uninterrupted one.

    Attributes:
        groups: the number of groups seen, which is the id of the next group.
        breaker: the state of the circuit breaker.
        gradient_norms: the last gradient norms.
        streaks: for each check, the number of consecutive steps, up to the last one, in which it found something.

    Example:
        MonitorState(16, CircuitBreakerState((None, FailedAttempt(..), None)), (0.42, 0.4), {"logprob_gap": 2})
    """

    groups: int = 0
    breaker: CircuitBreakerState = field(default_factory=CircuitBreakerState)
    gradient_norms: tuple[float, ...] = ()
    streaks: Mapping[str, int] = field(default_factory=dict)
