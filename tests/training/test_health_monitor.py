"""The doctor: every check finds what it is for and nothing else, and what it finds ends a run when it should."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from failing import failing, group_of, lived

from agent_r1 import cli
from agent_r1.core.attempt_id import AttemptId
from agent_r1.core.errors import RunStopped
from agent_r1.core.events import AttemptFate, Event, LogEvent
from agent_r1.core.task import Task
from agent_r1.core.trajectory import Group, Trajectory
from agent_r1.core.weights import Weights
from agent_r1.data.training_sample import Selection, select_trainable
from agent_r1.trainer.learner import Update
from agent_r1.training import run
from agent_r1.training.config import TrainConfig
from agent_r1.training.monitor.checks import Spikes, bounds, idle, same_weights, shrunk, torn
from agent_r1.training.monitor.config import DoctorConfig
from agent_r1.training.monitor.health_monitor import Doctor
from agent_r1.training.monitor.state import DoctorState

HEALTHY = {"staleness": 0.0, "skipped_steps": 0.0, "first_ratio_deviation": 1e-6, "logprob_gap": 1e-5}
DEFAULT = DoctorConfig()


def found(metrics: Mapping[str, float], max_staleness: int = 0) -> dict[str, int | None]:
    looked = [bound.look({**HEALTHY, **metrics}) for bound in bounds(DEFAULT, max_staleness)]
    return {finding.check: finding.patience for finding in looked if finding is not None}


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
def test_numbers_out_of_their_bounds_are_found(metrics: dict[str, float], checks: dict[str, int]) -> None:
    assert found(metrics) == checks


def test_probabilities_of_older_weights_may_differ() -> None:
    assert found({"staleness": 2.0, "logprob_gap": 3.0, "first_ratio_deviation": 3.0}, max_staleness=2) == {}


def test_a_step_in_which_nothing_was_learned_has_nothing_to_look_at() -> None:
    assert [bound.look({"reward": math.nan, "failed": 8.0}) for bound in bounds(DEFAULT, 0)] == [None] * 4


def test_a_gradient_far_above_the_usual_is_found_once_there_is_a_usual() -> None:
    spikes = Spikes(times=10)
    norms = [100.0, 1.0, 1.2, 0.8, 1.1, 9.0, 12.0, 1.0]
    seen = [spikes.look({"policy_gradient_norm": norm}) is not None for norm in norms]
    assert seen == [False] * 6 + [True, False]
    assert spikes.look({}) is None


def test_weights_and_memory() -> None:
    assert same_weights("ab" * 32, "ab" * 32) is None and shrunk(4096, 4096) is None
    other, less = same_weights("cd" * 32, "ab" * 32), shrunk(4096, 700)
    assert other is not None and other.patience == 1 and "cdcdcdcdcdcd" in str(other)
    assert less is not None and less.patience is None and "700 tokens" in str(less)


def taught_nothing(*reasons: str, skipped: float = 0.0) -> Update:
    fates = tuple(AttemptFate(AttemptId("run", "t", 0, n), "dropped", 1, reason) for n, reason in enumerate(reasons))
    return Update(1, 0, {"reward": 0.25, "skipped_steps": skipped}, fates, TrainConfig().trainer.micro_tokens)


def test_a_step_that_taught_nothing_is_found_with_its_most_common_reasons() -> None:
    finding = idle(taught_nothing("zero variance", "stale: sampled 3 updates ago", "a", "stale: sampled 4 updates ago",
                                  "b", "zero variance", "zero variance"), 20)  # fmt: skip
    assert finding is not None and finding.patience == 20
    assert (
        finding.value == "3 x zero variance, 2 x stale: sampled # updates ago, 1 x a, 1 other reasons; mean reward 0.25"
    )
    assert idle(taught_nothing("the loss or a gradient was not finite", skipped=1.0), 20) is None
    some = taught_nothing("zero variance")
    assert idle(replace(some, fates=(*some.fates, AttemptFate(AttemptId("run", "t", 0, 9), "trained", 1))), 20) is None


@pytest.mark.parametrize(("steps_of_run", "last"), [(2, None), (3, 3), (7, 7), (50, 20)])
def test_a_run_that_learns_nothing_at_all_is_stopped(steps_of_run: int, last: int | None) -> None:
    doctor, log = doctor_of(steps=steps_of_run)

    async def go() -> None:
        for _ in range(steps_of_run):
            await doctor.tell(await doctor.examine(taught_nothing("zero variance")))

    if last is None:
        asyncio.run(go())
    else:
        with pytest.raises(RunStopped, match=f"{last} steps in a row, nothing_learned: .*1 x zero variance"):
            asyncio.run(go())
    assert len(log.events) == (last or steps_of_run)


WHOLE = group_of(lived(0), lived(1, retry=2), retried=(lived(1), lived(1, retry=1)))


def test_a_whole_group_is_no_finding() -> None:
    assert torn(WHOLE, 3, 2, greedy=False) is None
    greedy = replace(WHOLE, greedy=lived(2, retry=1), retried=(*WHOLE.retried, lived(2)))
    assert torn(greedy, 3, 2, greedy=True) is None


@pytest.mark.parametrize(
    "group",
    [
        group_of(lived(0)),
        group_of(lived(0), lived(0)),
        group_of(lived(1), lived(0)),
        group_of(lived(0), lived(1), lived(2)),
        group_of(lived(0), lived(1, serial=4)),
        group_of(lived(0, serial=4), lived(1, serial=4), serial=4),
        replace(WHOLE, task=Task("other", ())),
        replace(WHOLE, retried=()),
        replace(WHOLE, retried=WHOLE.retried * 2),
        replace(WHOLE, retried=(*WHOLE.retried, lived(0))),
    ],
)
def test_a_torn_group_ends_a_run_at_once(group: Group) -> None:
    finding = torn(group, 3, 2, greedy=False)
    assert finding is not None and finding.patience == 1


def of_another(trajectory: Trajectory, **changes: Any) -> Trajectory:
    return replace(trajectory, attempt=replace(trajectory.attempt, **changes))


@pytest.mark.parametrize(
    "group",
    [
        WHOLE,
        replace(WHOLE, greedy=lived(3)),
        replace(WHOLE, greedy=of_another(lived(2), group_id=9, task="other")),
        replace(WHOLE, greedy=of_another(lived(2), run="other")),
        replace(WHOLE, greedy=lived(2), retried=tuple(of_another(t, group_id=77, task="zzz") for t in WHOLE.retried)),
        replace(WHOLE, greedy=lived(2), trajectories=(of_another(lived(0), run="other"), WHOLE.trajectories[1])),
    ],
)
def test_a_greedy_attempt_is_there_and_all_are_of_one_run_group_and_task(group: Group) -> None:
    finding = torn(group, 3, 2, greedy=True)
    assert finding is not None and finding.patience == 1


@dataclass
class FakeLearner:
    version: int = 4
    micro_tokens: int = TrainConfig().trainer.micro_tokens
    asks_greedy: bool = False

    def weights(self) -> Weights:
        return Weights(self.version, "module", None, "ab" * 32)

    def admission(self, group: Group) -> Selection:
        return select_trainable([group], {})


@dataclass
class FakeEngine:
    held: str = "ab" * 32

    async def digest(self) -> str:
        return self.held


@dataclass
class Log:
    events: list[Event] = field(default_factory=list)

    async def record(self, *events: Event) -> None:
        self.events += events


def doctor_of(engine: FakeEngine | None = None, **settings: Any) -> tuple[Doctor, Log]:
    config, log = TrainConfig(groups_per_step=2, group_size=2, **settings), Log()
    made = Doctor(config, FakeLearner(), engine or FakeEngine(), log, Path("runs/x"))  # type: ignore[arg-type]
    return made, log


def steps(doctor: Doctor, *metrics: Mapping[str, float]) -> None:
    async def take() -> None:
        for step, changed in enumerate(metrics, start=1):
            fates = (AttemptFate(AttemptId("run", "t", step, 0), "trained", step, credit=1.0),)
            update = Update(step, step, {**HEALTHY, **changed}, fates, TrainConfig().trainer.micro_tokens)
            await doctor.tell(await doctor.examine(update))

    asyncio.run(take())


WRONG = {"logprob_gap": 1.0}


def test_a_healthy_run_is_left_in_peace() -> None:
    doctor, log = doctor_of()
    steps(doctor, *[{}] * 9)
    assert log.events == []


def test_what_goes_on_for_its_patience_ends_the_run_and_what_stops_does_not(caplog: Any) -> None:
    doctor, log = doctor_of()
    steps(doctor, WRONG, WRONG, {}, WRONG, WRONG)
    assert [event.kind for event in log.events if isinstance(event, LogEvent)] == ["warning"] * 4
    assert len(caplog.records) == 4 and "logprob_gap" in caplog.text
    with pytest.raises(RunStopped, match="3 steps in a row, logprob_gap") as stopped:
        steps(doctor, WRONG)
    assert "version 4" in str(stopped.value) and "runs/x" in str(stopped.value)
    patient, log = doctor_of(doctor=DoctorConfig(patience=9))
    steps(patient, *[WRONG] * 8)
    assert len(log.events) == 8


def test_other_weights_in_the_engine_end_the_run_at_once() -> None:
    doctor, log = doctor_of(FakeEngine("cd" * 32))
    with pytest.raises(RunStopped, match="weights: the engine does not hold"):
        steps(doctor, {})
    assert len(log.events) == 1


def test_a_group_is_seen_before_anything_is_learned_from_it() -> None:
    doctor, _ = doctor_of()
    doctor.restore(DoctorState(groups=7))
    doctor.receive(group_of(lived(0, 7), lived(1, 7), serial=7))
    with pytest.raises(RunStopped, match="group: a group is not what was asked for"):
        doctor.receive(group_of(lived(0, 7), lived(1, 7), serial=7))


NORMS = [{"policy_gradient_norm": norm} for norm in (1.0, 1.2, 0.8, 1.1, 0.9, 12.0, 1.0, 30.0)]


@pytest.mark.parametrize("stop", range(len(NORMS)))
def test_a_doctor_that_goes_on_from_a_state_says_what_it_would_have_said(stop: int) -> None:
    (whole, said), (before, first) = doctor_of(), doctor_of()
    steps(whole, *NORMS)
    steps(before, *NORMS[:stop])
    (after, second), (forgetful, _) = doctor_of(), doctor_of()
    after.restore(before.state())
    steps(after, *NORMS[stop:])
    assert [*first.events, *second.events] == said.events and len(said.events) == 2
    assert after.state() == whole.state()
    steps(forgetful, *NORMS[stop:])
    assert (stop == 0) == (forgetful.state() == whole.state())


@pytest.mark.parametrize(("steps_of_run", "groups"), [(2, 3), (3, 4), (50, 4)])
def test_a_short_run_has_a_breaker_too_of_four_groups_at_least(steps_of_run: int, groups: int) -> None:
    doctor, _ = doctor_of(steps=steps_of_run)
    for serial in range(groups - 1):
        doctor.receive(failing(2, 2, serial))
    with pytest.raises(RunStopped, match=f"{2 * groups} of the last {2 * groups} attempts failed"):
        doctor.receive(failing(2, 2, groups - 1))


def test_a_run_of_fewer_groups_is_only_warned() -> None:
    doctor, log = doctor_of(steps=1)
    for serial in range(2):
        doctor.receive(failing(2, 2, serial))
    steps(doctor, {})
    assert [str(event).count("failures: many of the first attempts failed (4 of 4") for event in log.events] == [1]


def test_the_command_prints_the_whole_diagnosis_and_fails(monkeypatch: Any, capsys: Any, tmp_path: Path) -> None:
    def stopped(*_: object) -> None:
        raise RunStopped("the run was stopped: 3 of 4\n     3 x broken\nwhat to do")

    monkeypatch.setattr(run, "train", stopped)
    assert cli.main(["train", "--quiet", "--run", str(tmp_path / "run")]) == cli.FAILED
    assert capsys.readouterr().err == "agent-r1: the run was stopped: 3 of 4\n     3 x broken\nwhat to do\n"
