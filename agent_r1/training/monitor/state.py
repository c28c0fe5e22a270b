"""The state of the health monitor between two steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from agent_r1.training.monitor.circuit_breaker import CircuitBreakerState


@dataclass(frozen=True, slots=True)
class MonitorState:
    """The state of a health monitor, saved in each checkpoint.

    The entries of each tuple are in the order of the training steps.

    Attributes:
        groups: the number of checked groups. The next group has this number as its id.
        streaks: the number of consecutive steps with a finding, by the name of the check.
        start_entropies: the entropies of the first steps.
        validation_warned: the training step that had the best validation score when the monitor last warned that the
            score fell. 0 if the monitor never warned that the score fell.
        proxies: (mean return, mean true reward) of each recent step; () without the setting ``monitor.true_reward``.

    Example:
        MonitorState(groups=16, gradient_norms=(0.42, 0.4), streaks={"logprob_gap": 2})
    """

    groups: int = 0
    breaker: CircuitBreakerState = field(default_factory=CircuitBreakerState)
    gradient_norms: tuple[float, ...] = ()
    streaks: Mapping[str, int] = field(default_factory=dict)
    start_entropies: tuple[float, ...] = ()
    rewards: tuple[float, ...] = ()
    validation_warned: int = 0
    proxies: tuple[tuple[float, float], ...] = ()
    hacking_warned: bool = False
