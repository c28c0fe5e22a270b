"""The health monitor of a run."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from agent_r1.core.errors import RunStopped
from agent_r1.core.events import LogEvent, Recorder
from agent_r1.core.weights import PolicyVersion
from agent_r1.model.weights import product_precision
from agent_r1.store.folder import run_argument
from agent_r1.trainer.updater import PolicyUpdater, SelectedGroup, UpdateReport
from agent_r1.training.config import TrainConfig
from agent_r1.training.monitor.checks import (
    LOGPROB_GAP,
    Finding,
    GradientSpikeDetector,
    check_critic,
    check_effective_share,
    check_group_integrity,
    check_memory_reduced,
    check_no_signal,
    check_weights,
    metric_checks,
    tool_warnings,
)
from agent_r1.training.monitor.circuit_breaker import CircuitBreaker
from agent_r1.training.monitor.learning_checks import (
    START_STEPS,
    check_contrast,
    check_entropy,
    check_validation,
)
from agent_r1.training.monitor.reward_hacking import PROXY, TRUE, check_reward_hacking
from agent_r1.training.monitor.state import MonitorState

_log = logging.getLogger(__name__)

MAX_WINDOW_STEPS = 3
"""The maximum size, in steps, of the window of recent attempts in which the circuit breaker counts failures.

A short run would end before a larger window is full.
"""

REWARD_HISTORY = 1000

MIN_WINDOW_GROUPS, MIN_WINDOW_ATTEMPTS = 4, 32
"""The minimum size of the circuit breaker's window: the attempts in 4 groups or 32 attempts, whichever is smaller."""


class HealthMonitor:
    """A monitor that looks for problems of a training run. A problem leads to a warning, or stops the run.

    The monitor checks each group before the trainer uses the group, and each training step after the step has ended.
    """

    def __init__(self, config: TrainConfig, updater: PolicyUpdater, recorder: Recorder, folder: Path) -> None:
        limits = config.monitor
        self._updater, self._recorder, self._folder = updater, recorder, folder
        self._group_size = config.group_size
        # A run with few steps, for example a test run, only gets warnings.
        self._idle_patience = limits.idle_steps if config.steps > limits.idle_steps else None
        longest = config.groups_per_step * config.group_size * min(MAX_WINDOW_STEPS, config.steps)
        shortest = min(MIN_WINDOW_GROUPS * config.group_size, MIN_WINDOW_ATTEMPTS)
        window = max(min(limits.failure_window, longest), shortest)
        self._breaker = CircuitBreaker(limits.failure_share, window, run=run_argument(folder))
        trainer, engine = product_precision(config.trainer.dtype), product_precision(config.engine.dtype)
        checks = metric_checks(limits, config.max_staleness, trainer, engine)
        # Guided tokens are sampled from another distribution than the policy's, whose difference is the guidance.
        guided = config.decode.method != "plain"
        self._metric_checks = tuple(check for check in checks if not (guided and check.metric == LOGPROB_GAP))
        self._limits, self._questions = limits, config.evaluate_n
        self._start_entropies: tuple[float, ...] = ()
        self._rewards: deque[float] = deque(maxlen=REWARD_HISTORY)
        self._validation_warned = 0
        self._proxies: deque[tuple[float, float]] = deque(maxlen=REWARD_HISTORY)
        self._hacking_warned = False
        self._spikes = GradientSpikeDetector(limits.gradient_spike)
        self._micro_tokens = updater.micro_tokens
        self._groups = 0
        self._streaks: dict[str, int] = {}

    def on_group(self, selected: SelectedGroup) -> None:
        """Check a group before the trainer uses the group.

        Raises:
            RunStopped: :func:`check_group_integrity` found a problem, too many recent attempts failed, or a tool always
                fails.
        """
        finding = check_group_integrity(selected.group, self._groups, self._group_size, self._updater.needs_greedy)
        if finding is not None:
            raise self._stopped(str(finding))
        self._groups += 1
        diagnosis = self._breaker.record(selected.group, selected.selection.excluded)
        if diagnosis is not None:
            raise self._stopped(diagnosis)

    def on_step(self, update: UpdateReport, served: PolicyVersion) -> tuple[Finding, ...]:
        """Check a training step, and return the findings to report.

        ``served`` is the version of the engine's weights after the update.
        """
        before, self._micro_tokens = self._micro_tokens, update.micro_tokens
        results = (
            check_weights(served, self._updater.publish().version),
            check_no_signal(update, self._idle_patience),
            check_memory_reduced(before, update.micro_tokens),
            self._spikes.check(update.metrics),
            check_critic(update.metrics, self._limits.critic_steps),
            check_effective_share(update.metrics),
            check_entropy(update.metrics.get("entropy"), self._start_entropies, self._limits.entropy_share),
            check_contrast(update.metrics, self._limits.constant_share),
            *tool_warnings(self._breaker),
            *(check.check(update.metrics) for check in self._metric_checks),
        )
        self._rewards.append(update.metrics["reward"])
        if "entropy" in update.metrics and len(self._start_entropies) < START_STEPS:
            self._start_entropies += (update.metrics["entropy"],)
        findings = tuple(finding for finding in results if finding is not None)
        self._streaks = {finding.check: self._streaks.get(finding.check, 0) + 1 for finding in findings}
        return tuple(finding for finding in findings if self._streaks[finding.check] >= finding.warn_after)

    def on_validation(self, step: int, em: float, best_step: int, best: float) -> tuple[Finding, ...]:
        """Return a finding if the validation score fell below the best score while the training reward rose.

        ``em`` is the exact match after ``step``. ``best`` is the highest exact match so far, which was measured after
        ``best_step``. At most one finding is returned for each ``best_step``.
        """
        finding = check_validation(em, best, self._questions, tuple(self._rewards), step - best_step)
        if finding is None or self._validation_warned == best_step:
            return ()
        self._validation_warned = best_step
        return (finding,)

    def on_proxy(self, metrics: Mapping[str, float]) -> tuple[Finding, ...]:
        """Return a finding the first time that the policy seems to exploit its reward.

        ``metrics`` are the :func:`~agent_r1.training.monitor.reward_hacking.proxy_metrics` of the step.
        """
        if TRUE not in metrics:
            return ()
        self._proxies.append((metrics[PROXY], metrics[TRUE]))
        finding = check_reward_hacking(tuple(self._proxies), self._limits.true_reward_steps)
        if finding is None or self._hacking_warned:
            return ()
        self._hacking_warned = True
        return (finding,)

    async def report(self, findings: Sequence[Finding]) -> None:
        """Record the findings of the last step as warnings, and print them.

        Raises:
            RunStopped: a check had findings in ``Finding.patience`` consecutive steps.
        """
        await self._recorder.record(*(LogEvent("warning", str(finding)) for finding in findings))
        for finding in findings:
            streak = self._streaks.get(finding.check, 1)
            if finding.patience is not None and streak >= finding.patience:
                raise self._stopped(f"{streak} steps in a row, {finding}" if streak > 1 else str(finding))
            _log.warning("%s", finding)

    def state(self) -> MonitorState:
        return MonitorState(
            groups=self._groups,
            breaker=self._breaker.state(),
            gradient_norms=tuple(self._spikes.norms),
            streaks=self._streaks,
            start_entropies=self._start_entropies,
            rewards=tuple(self._rewards),
            validation_warned=self._validation_warned,
            proxies=tuple(self._proxies),
            hacking_warned=self._hacking_warned,
        )

    def load_state(self, state: MonitorState) -> None:
        """Continue from ``state``. Call this method before the first group is checked."""
        self._groups, self._streaks = state.groups, dict(state.streaks)
        self._breaker.load_state(state.breaker)
        self._spikes.norms.extend(state.gradient_norms)
        self._start_entropies, self._validation_warned = state.start_entropies, state.validation_warned
        self._rewards.extend(state.rewards)
        self._proxies.extend(state.proxies)
        self._hacking_warned = state.hacking_warned

    def _stopped(self, reason: str) -> RunStopped:
        version = self._updater.publish().version.number
        return RunStopped(
            f"the run was stopped: {reason}\n"
            f"The weights are version {version}, unchanged since. The recorded attempts are in {self._folder}: "
            f"agent-r1 show {self._breaker.run} --attempts"
        )
