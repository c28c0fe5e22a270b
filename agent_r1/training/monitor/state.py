"""The state of the health monitor between two steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from agent_r1.training.monitor.circuit_breaker import CircuitBreakerState


@dataclass(frozen=True, slots=True)
class MonitorState:
    """The state of a health monitor.

    A checkpoint contains the state. So a resumed run gets warnings, and is stopped, at the same steps as a run without
    an interruption.

    Attributes:
        groups: the number of groups that were checked, which is the id of the next group.
        breaker: the state of the circuit breaker.
        gradient_norms: the recent gradient norms, oldest first.
        streaks: for each check with a finding in the last step, the number of consecutive steps with a finding.
        start_entropies: the entropies of the first steps of the run.
        rewards: the mean rewards of the last steps, oldest first.
        validation_warned: the best step by validation at the time of the last warning that the validation score fell;
            0 if there was no such warning. While this step stays the best, the monitor does not warn again.
        proxies: (mean reward, mean true reward) of the last steps, oldest first; () without ``monitor.true_reward``.
        hacking_warned: whether the monitor has warned that the policy exploits the reward.

    Example:
        MonitorState(16, CircuitBreakerState((None, FailedAttempt(..), None)), (0.42, 0.4), {"logprob_gap": 2})
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
