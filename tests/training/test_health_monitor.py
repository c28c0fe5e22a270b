"""Each health check finds its problem and nothing else, and findings stop a run at the right step."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from failing import failing, group_of, make_trajectory

from agent_r1 import cli
from agent_r1.core.errors import RunStopped
from agent_r1.core.events import Event, LogEvent
from agent_r1.core.inference import PolicyVersion, WeightUpdate
from agent_r1.core.task import Task
from agent_r1.core.trajectory import AttemptId, Group, Trajectory
from agent_r1.data.training_sample import Excluded, select_trainable
from agent_r1.trainer.report import Trained
from agent_r1.trainer.updater import SelectedGroup, UpdateReport
from agent_r1.training import run
from agent_r1.training.config import MonitorConfig, TrainConfig
from agent_r1.training.monitor import (
    GradientSpikeDetector,
    HealthMonitor,
    MonitorState,
    check_effective_share,
    check_group_integrity,
    check_memory_reduced,
    check_no_signal,
    check_weights,
    metric_checks,
)

HEALTHY = {"reward": 0.5, "staleness": 0.0, "skipped_steps": 0.0, "first_ratio_deviation": 1e-6, "logprob_gap": 1e-5}
DEFAULT = MonitorConfig()


def found(metrics: Mapping[str, float], max_staleness: int = 0) -> dict[str, int | None]:
    findings = [check.check({**HEALTHY, **metrics}) for check in metric_checks(DEFAULT, max_staleness)]
    return {finding.check: finding.patience for finding in findings if finding is not None}


@pytest.mark.parametrize(
    ("metrics", "checks"),
    [
        ({}, {}),
        ({"skipped_steps": 1.0}, {"skipped_steps": 3}),
        ({"first_ratio_deviation": 2e-3}, {"first_ratio_deviation": 3}),
        ({"logprob_gap": 0.02}, {"logprob_gap": 3}),
        ({"staleness": 1.0}, {"staleness": 1}),
        ({"logprob_gap": math.nan, "first_ratio_deviation": math.nan}, {"logprob_gap": 3, "first_ratio_deviation": 3}),
        ({"skipped_steps": math.nan}, {"skipped_steps": 3}),
    ],
)
def test_metrics_above_their_limits_are_found(metrics: dict[str, float], checks: dict[str, int]) -> None:
    assert found(metrics) == checks


def test_probabilities_under_older_weights_may_differ() -> None:
    assert found({"staleness": 2.0, "logprob_gap": 3.0, "first_ratio_deviation": 3.0}, max_staleness=2) == {}


def test_a_step_without_an_update_has_no_metrics_to_check() -> None:
    assert [check.check({"reward": math.nan, "failed": 8.0}) for check in metric_checks(DEFAULT, 0)] == [None] * 4


def test_a_gradient_spike_is_found_once_there_is_a_median() -> None:
    spikes = GradientSpikeDetector(factor=10)
    norms = [100.0, 1.0, 1.2, 0.8, 1.1, 9.0, 12.0, 1.0]
    seen = [spikes.check({"policy_gradient_norm": norm}) is not None for norm in norms]
    assert seen == [False] * 6 + [True, False]
    assert spikes.check({}) is None


@pytest.mark.parametrize(("share", "is_found"), [(0.5, False), (0.49, True), (math.nan, True), (None, False)])
def test_importance_weights_that_leave_few_tokens_are_a_warning(share: float | None, is_found: bool) -> None:
    finding = check_effective_share({} if share is None else {"correction/effective_share": share})
    assert (finding is not None) == is_found
    assert finding is None or (finding.patience is None and "algorithm.correction.level to token" in str(finding))


def version(checksum: str = "ab", number: int = 4) -> PolicyVersion:
    return PolicyVersion(number, step=4, checksum=checksum * 32)


def test_other_weights_and_reduced_memory_are_found() -> None:
    assert check_weights(version("ab"), version("ab")) is None and check_memory_reduced(4096, 4096) is None
    other, less = check_weights(version("cd"), version("ab")), check_memory_reduced(4096, 700)
    assert other is not None and other.patience == 1 and "cdcdcdcdcdcd" in str(other)
    assert check_weights(version("ab", 3), version("ab")) is not None
    assert less is not None and less.patience is None and "700 tokens" in str(less)


def without_signal(*reasons: str, skipped: float = 0.0, failed: float = 0.0) -> UpdateReport:
    outcomes = tuple(Excluded(AttemptId("run", "t", 0, n), reason) for n, reason in enumerate(reasons))
    metrics = {"reward": 0.25, "skipped_steps": skipped, "failed": failed}
    return UpdateReport(1, version(), metrics, outcomes, TrainConfig().trainer.micro_tokens)


def test_a_step_without_signal_is_found_with_its_most_common_reasons() -> None:
    stale = ("stale: sampled 3 updates ago", "stale: sampled 4 updates ago")
    finding = check_no_signal(without_signal(*("zero variance",) * 3, *stale, "a", "b"), 20)
    assert finding is not None and finding.patience == 20
    assert (
        finding.value == "3 x zero variance, 2 x stale: sampled # updates ago, 1 x a, 1 other reasons; mean reward 0.25"
    )
    assert check_no_signal(without_signal("the loss or a gradient was not finite", skipped=1.0), 20) is None
    some = without_signal("zero variance")
    assert (
        check_no_signal(replace(some, outcomes=(*some.outcomes, Trained(AttemptId("run", "t", 0, 9), 1.0))), 20) is None
    )


def test_a_step_without_signal_advises_on_failures_if_most_attempts_failed() -> None:
    reasons = ["reward em could not be scored: KeyError: 'gold' (agent.py:12, in em)"] * 3 + ["zero variance"]
    failing, equal = (check_no_signal(without_signal(*reasons, failed=failed), 20) for failed in (3.0, 2.0))
    assert failing is not None and failing.do.startswith("remove the cause of the failures")
    assert failing.value.startswith(
        "3 x reward em could not be scored: KeyError: 'gold' (agent.py:12, in em), 1 x zero"
    )
    assert equal is not None and equal.do.startswith("use tasks that are solved sometimes")


@pytest.mark.parametrize(("steps_of_run", "last"), [(2, None), (3, None), (20, None), (21, 20), (50, 20)])
def test_a_run_that_never_learns_is_stopped_unless_it_is_short(steps_of_run: int, last: int | None) -> None:
    monitor, log = make_monitor(steps=steps_of_run)

    async def go() -> None:
        for _ in range(steps_of_run):
            await monitor.report(monitor.on_step(without_signal("zero variance"), version()))

    if last is None:
        asyncio.run(go())
    else:
        with pytest.raises(RunStopped, match=f"{last} steps in a row, nothing_learned: .*1 x zero variance"):
            asyncio.run(go())
    assert len(log.events) == (last or steps_of_run)


WHOLE = group_of(
    make_trajectory(0), make_trajectory(1, retry=2), retried=(make_trajectory(1), make_trajectory(1, retry=1))
)


def test_a_complete_group_is_no_finding() -> None:
    assert check_group_integrity(WHOLE, 3, 2, greedy=False) is None
    greedy = replace(WHOLE, greedy=make_trajectory(2, retry=1), retried=(*WHOLE.retried, make_trajectory(2)))
    assert check_group_integrity(greedy, 3, 2, greedy=True) is None


@pytest.mark.parametrize(
    "group",
    [
        group_of(make_trajectory(0)),
        group_of(make_trajectory(0), make_trajectory(0)),
        group_of(make_trajectory(1), make_trajectory(0)),
        group_of(make_trajectory(0), make_trajectory(1), make_trajectory(2)),
        group_of(make_trajectory(0), make_trajectory(1, group_id=4)),
        group_of(make_trajectory(0, group_id=4), make_trajectory(1, group_id=4), group_id=4),
        replace(WHOLE, task=Task("other", ())),
        replace(WHOLE, retried=()),
        replace(WHOLE, retried=WHOLE.retried * 2),
        replace(WHOLE, retried=(*WHOLE.retried, make_trajectory(0))),
    ],
)
def test_an_incomplete_or_mixed_group_stops_a_run_at_once(group: Group) -> None:
    finding = check_group_integrity(group, 3, 2, greedy=False)
    assert finding is not None and finding.patience == 1


def of_another(trajectory: Trajectory, **changes: Any) -> Trajectory:
    return replace(trajectory, attempt=replace(trajectory.attempt, **changes))


@pytest.mark.parametrize(
    "group",
    [
        WHOLE,
        replace(WHOLE, greedy=make_trajectory(3)),
        replace(WHOLE, greedy=of_another(make_trajectory(2), group_id=9, task="other")),
        replace(WHOLE, greedy=of_another(make_trajectory(2), run="other")),
        replace(
            WHOLE,
            greedy=make_trajectory(2),
            retried=tuple(of_another(t, group_id=77, task="zzz") for t in WHOLE.retried),
        ),
        replace(
            WHOLE,
            greedy=make_trajectory(2),
            trajectories=(of_another(make_trajectory(0), run="other"), WHOLE.trajectories[1]),
        ),
    ],
)
def test_a_missing_or_foreign_greedy_attempt_is_found(group: Group) -> None:
    finding = check_group_integrity(group, 3, 2, greedy=True)
    assert finding is not None and finding.patience == 1


@dataclass
class FakeUpdater:
    micro_tokens: int = TrainConfig().trainer.micro_tokens
    needs_greedy: bool = False

    def publish(self) -> WeightUpdate:
        return WeightUpdate(version(), "shared_memory", None)


def selected(group: Group) -> SelectedGroup:
    return SelectedGroup(group, select_trainable([group], {}), has_signal=True)


@dataclass
class Log:
    events: list[Event] = field(default_factory=list)

    async def record(self, *events: Event) -> None:
        self.events += events


def make_monitor(**settings: Any) -> tuple[HealthMonitor, Log]:
    config, log = TrainConfig(groups_per_step=2, group_size=2, **settings), Log()
    return HealthMonitor(config, FakeUpdater(), log, Path("runs/x")), log  # type: ignore[arg-type]


def take_steps(monitor: HealthMonitor, *metrics: Mapping[str, float], served: PolicyVersion | None = None) -> None:
    async def take() -> None:
        for step, changed in enumerate(metrics, start=1):
            outcomes = (Trained(AttemptId("run", "t", step, 0), 1.0),)
            micro_tokens = TrainConfig().trainer.micro_tokens
            update = UpdateReport(step, version(), {**HEALTHY, **changed}, outcomes, micro_tokens)
            await monitor.report(monitor.on_step(update, served or version()))

    asyncio.run(take())


WRONG = {"logprob_gap": 1.0}


def test_a_healthy_run_has_no_findings() -> None:
    monitor, log = make_monitor()
    take_steps(monitor, *[{}] * 9)
    assert log.events == []


def test_a_finding_stops_the_run_only_after_consecutive_steps(caplog: Any) -> None:
    monitor, log = make_monitor()
    take_steps(monitor, WRONG, WRONG, {}, WRONG, WRONG)
    assert [event.kind for event in log.events if isinstance(event, LogEvent)] == ["warning"] * 4
    assert len(caplog.records) == 4 and "logprob_gap" in caplog.text
    with pytest.raises(RunStopped, match="3 steps in a row, logprob_gap") as stopped:
        take_steps(monitor, WRONG)
    assert "version 4" in str(stopped.value) and "runs/x" in str(stopped.value)
    patient, log = make_monitor(monitor=MonitorConfig(patience=9))
    take_steps(patient, *[WRONG] * 8)
    assert len(log.events) == 8


def test_a_critic_that_explains_nothing_for_some_steps_is_a_warning() -> None:
    nothing, something = ({"critic/explained_variance": value} for value in (0.01, 0.3))
    monitor, log = make_monitor(monitor=MonitorConfig(critic_steps=3))
    take_steps(monitor, nothing, nothing, something, nothing, nothing)
    assert log.events == []
    after, log = make_monitor(monitor=MonitorConfig(critic_steps=3))
    after.load_state(monitor.state())
    take_steps(after, nothing, nothing, something, {}, nothing)
    warnings = [event.detail for event in log.events if isinstance(event, LogEvent)]
    assert len(warnings) == 2 and all("trainer.critic_epochs" in warning for warning in warnings)


def test_other_weights_in_the_engine_stop_the_run_at_once() -> None:
    monitor, log = make_monitor()
    with pytest.raises(RunStopped, match="weights: the engine does not serve"):
        take_steps(monitor, {}, served=version("cd"))
    assert len(log.events) == 1


def test_a_group_with_the_wrong_id_stops_the_run() -> None:
    monitor, _ = make_monitor()
    monitor.load_state(MonitorState(groups=7))
    monitor.on_group(selected(group_of(make_trajectory(0, 7), make_trajectory(1, 7), group_id=7)))
    with pytest.raises(RunStopped, match="group: a group is not the requested one"):
        monitor.on_group(selected(group_of(make_trajectory(0, 7), make_trajectory(1, 7), group_id=7)))


NORMS = [{"policy_gradient_norm": norm} for norm in (1.0, 1.2, 0.8, 1.1, 0.9, 12.0, 1.0, 30.0)]


@pytest.mark.parametrize("stop", range(len(NORMS)))
def test_a_restored_monitor_reports_the_same_findings(stop: int) -> None:
    (whole, expected), (before, first) = make_monitor(), make_monitor()
    take_steps(whole, *NORMS)
    take_steps(before, *NORMS[:stop])
    (after, second), (forgetful, _) = make_monitor(), make_monitor()
    after.load_state(before.state())
    take_steps(after, *NORMS[stop:])
    assert [*first.events, *second.events] == expected.events and len(expected.events) == 2
    assert after.state() == whole.state()
    take_steps(forgetful, *NORMS[stop:])
    assert (stop == 0) == (forgetful.state() == whole.state())


ENTROPIES = [{"entropy": entropy, "reward": 0.5} for entropy in (0.2,) * 5 + (0.01,) * 6]


@pytest.mark.parametrize("stop", [3, 5, 8])
def test_an_entropy_that_stays_low_is_a_warning_also_after_a_resume(stop: int) -> None:
    monitor, log = make_monitor()
    take_steps(monitor, *ENTROPIES[:9])
    assert log.events == []
    take_steps(monitor, *ENTROPIES[9:])
    assert len(log.events) == 2 and all("entropy 0.01" in str(event) for event in log.events)
    before, first = make_monitor()
    take_steps(before, *ENTROPIES[:stop])
    after, second = make_monitor()
    after.load_state(before.state())
    take_steps(after, *ENTROPIES[stop:])
    assert [*first.events, *second.events] == log.events


def test_a_falling_validation_is_one_warning_for_each_best_step() -> None:
    monitor, log = make_monitor()
    take_steps(monitor, *({"reward": reward} for reward in (0.1, 0.1, 0.5, 0.6)))
    assert monitor.on_validation(4, 0.99, 2, 0.99) == ()
    (finding,) = monitor.on_validation(4, 0.4, 2, 0.99)
    asyncio.run(monitor.report((finding,)))
    assert len(log.events) == 1 and "validation: it falls while the training reward rises" in str(log.events[0])
    restored, _ = make_monitor()
    restored.load_state(monitor.state())
    for one in (monitor, restored):
        assert one.on_validation(4, 0.3, 2, 0.99) == () and len(one.on_validation(4, 0.3, 3, 0.99)) == 1


@pytest.mark.parametrize(("steps_of_run", "groups"), [(2, 3), (3, 4), (50, 4)])
def test_the_breaker_of_a_short_run_has_a_window_of_at_least_four_groups(steps_of_run: int, groups: int) -> None:
    monitor, _ = make_monitor(steps=steps_of_run)
    for group_id in range(groups - 1):
        monitor.on_group(selected(failing(2, 2, group_id)))
    with pytest.raises(RunStopped, match=f"{2 * groups} of the last {2 * groups} attempts failed"):
        monitor.on_group(selected(failing(2, 2, groups - 1)))


def test_a_run_with_fewer_groups_only_gets_a_warning() -> None:
    monitor, log = make_monitor(steps=1)
    for group_id in range(2):
        monitor.on_group(selected(failing(2, 2, group_id)))
    take_steps(monitor, {})
    assert [str(event).count("failures: many of the first attempts failed (4 of 4") for event in log.events] == [1]


def test_the_command_prints_the_diagnosis_and_fails(monkeypatch: Any, capsys: Any, tmp_path: Path) -> None:
    def stopped(*_: object) -> None:
        raise RunStopped("the run was stopped: 3 of 4\n     3 x broken\nwhat to do")

    monkeypatch.setattr(run, "train", stopped)
    assert cli.main(["train", "--quiet", "--run", str(tmp_path / "run")]) == cli.FAILED
    assert capsys.readouterr().err == "agent-r1: the run was stopped: 3 of 4\n     3 x broken\nwhat to do\n"
