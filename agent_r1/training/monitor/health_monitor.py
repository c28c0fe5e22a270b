"""The doctor: sees every group before it is learned from, and every step after it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from agent_r1.core.errors import RunStopped
from agent_r1.core.events import LogEvent, Recorder
from agent_r1.core.weights import PolicyVersion
from agent_r1.trainer.updater import PolicyUpdater, SelectedGroup, UpdateReport
from agent_r1.training.config import TrainConfig
from agent_r1.training.monitor.checks import Finding, GradientSpikeDetector, metric_checks, tool_warnings, check_no_signal, check_weights, check_memory_reduced, check_group_integrity
from agent_r1.training.monitor.circuit_breaker import CircuitBreaker
from agent_r1.training.monitor.state import MonitorState

log = logging.getLogger(__name__)

BREAKER_STEPS = 3
"""The breaker looks back on no more than so many steps, so that a short run has one too.."""

LEAST_GROUPS, LEAST_ATTEMPTS = 4, 32
"""..but on so many groups, or attempts where that is fewer: what fails of less than these is no more than warned of."""


class HealthMonitor:
    """Looks after a run. What it finds is a warning, or ends the run with RunStopped."""

    def __init__(self, config: TrainConfig, updater: PolicyUpdater, recorder: Recorder, folder: Path) -> None:
        bound = config.monitor
        asked = config.groups_per_step * config.group_size * min(BREAKER_STEPS, config.steps)
        self._updater, self._recorder, self._folder = updater, recorder, folder
        self._group_size = config.group_size
        least = min(LEAST_GROUPS * config.group_size, LEAST_ATTEMPTS)
        self._idle_steps = min(bound.idle_steps, max(bound.patience, config.steps))
        self._breaker = CircuitBreaker(bound.failure_share, max(min(bound.failure_window, asked), least))
        self._bounds, self._spikes = metric_checks(bound, config.max_staleness), GradientSpikeDetector(bound.gradient_spike)
        self._micro_tokens = updater.micro_tokens
        self._groups = 0
        self._in_a_row: dict[str, int] = {}

    def receive(self, selected: SelectedGroup) -> None:
        """See a group before it is learned from.

        Raises RunStopped where it is torn, or where too many of the last attempts failed: the weights are then those
        of the last step.
        """
        finding = check_group_integrity(selected.group, self._groups, self._group_size, self._updater.needs_greedy)
        if finding is not None:
            raise self._stopped(str(finding))
        self._groups += 1
        failures = self._breaker.saw(selected.group, selected.selection.excluded)
        if failures is not None:
            raise self._stopped(failures)

    def examine(self, update: UpdateReport, served: PolicyVersion) -> tuple[Finding, ...]:
        """Return the findings on a step; ``served`` is the version that the engine serves after it."""
        before, self._micro_tokens = self._micro_tokens, update.micro_tokens
        looked = (
            check_weights(served, self._updater.publish().version),
            check_no_signal(update, self._idle_steps),
            check_memory_reduced(before, update.micro_tokens),
            self._spikes.look(update.metrics),
            *tool_warnings(self._breaker),
            *(bound.look(update.metrics) for bound in self._bounds),
        )
        found = tuple(finding for finding in looked if finding is not None)
        self._in_a_row = {one.check: self._in_a_row.get(one.check, 0) + 1 for one in found}
        return found

    async def tell(self, findings: Sequence[Finding]) -> None:
        """Write down what was found in a step. Raises RunStopped where that ends the run."""
        await self._recorder.record(*(LogEvent("warning", str(finding)) for finding in findings))
        for finding in findings:
            times = self._in_a_row[finding.check]
            if finding.patience is not None and times >= finding.patience:
                raise self._stopped(f"{times} steps in a row, {finding}" if times > 1 else str(finding))
            log.warning("%s", finding)

    def state(self) -> MonitorState:
        """What is remembered once a step was examined."""
        return MonitorState(self._groups, self._breaker.state(), tuple(self._spikes.norms), self._in_a_row)

    def restore(self, state: MonitorState) -> None:
        """Remember what ``state`` holds; nothing was seen yet."""
        self._groups, self._in_a_row = state.groups, dict(state.in_a_row)
        self._breaker.restore(state.breaker)
        self._spikes.norms.extend(state.norms)

    def _stopped(self, why: str) -> RunStopped:
        version = self._updater.publish().version.number
        return RunStopped(
            f"the run was stopped: {why}\n"
            f"The weights are version {version}; nothing was learned since. What was lived is in {self._folder}"
        )
