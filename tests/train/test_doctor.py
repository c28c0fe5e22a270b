"""The doctor: every check finds what it is for and nothing else, and what it finds ends a run when it should."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from agent_r1 import cli
from agent_r1.core.acting import Span, Weights
from agent_r1.core.attempt import Attempt
from agent_r1.core.errors import RunStopped
from agent_r1.core.messages import Action, Call, Message, Text
from agent_r1.core.record import Event, Fate, Happened
from agent_r1.core.task import Task, ToolResult
from agent_r1.core.trajectory import Group, Status, Trajectory, Turn
from agent_r1.env.feedback import Fault
from agent_r1.learn.learner import Update
from agent_r1.learn.samples import Admission, LeftOut, admit
from agent_r1.train import run
from agent_r1.train.config import TrainConfig
from agent_r1.train.doctor.checks import Spikes, bounds, idle, same_weights, shrunk, torn
from agent_r1.train.doctor.config import DoctorConfig
from agent_r1.train.doctor.doctor import Doctor
from agent_r1.train.doctor.failures import ADVICE, Breaker
from agent_r1.train.doctor.state import DoctorState

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
        ({"logprob_gap": math.nan, "first_ratio_deviation": math.nan}, {}),  # a refused step says so itself
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
    fates = tuple(Fate(Attempt("run", "t", 0, n), "dropped", 1, reason) for n, reason in enumerate(reasons))
    return Update(1, 0, {"reward": 0.25, "skipped_steps": skipped}, fates, TrainConfig().learner.micro_tokens)


def test_a_step_that_taught_nothing_is_found_with_its_most_common_reasons() -> None:
    finding = idle(taught_nothing("zero variance", "stale: sampled 3 updates ago", "a", "stale: sampled 4 updates ago",
                                  "b", "zero variance", "zero variance"), 20)  # fmt: skip
    assert finding is not None and finding.patience == 20
    assert (
        finding.value == "3 x zero variance, 2 x stale: sampled # updates ago, 1 x a, 1 other reasons; mean reward 0.25"
    )
    assert idle(taught_nothing("the loss or a gradient was not finite", skipped=1.0), 20) is None
    some = taught_nothing("zero variance")
    assert idle(replace(some, fates=(*some.fates, Fate(Attempt("run", "t", 0, 9), "trained", 1))), 20) is None


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


def lived(member: int, serial: int = 3, retry: int = 0, status: Status = Status.COMPLETED, **more: Any) -> Trajectory:
    return Trajectory(Attempt("run", "t", serial, member, retry), "t", (), status, **more)


def group_of(*trajectories: Trajectory, serial: int = 3, **more: Any) -> Group:
    return Group(serial, Task("t", ()), trajectories, **more)


WHOLE = group_of(lived(0), lived(1, retry=2), retried=(lived(1), lived(1, retry=1)))


def test_a_whole_group_is_no_finding() -> None:
    assert torn(WHOLE, 3, 2) is None
    greedy = replace(WHOLE, greedy=lived(2, retry=1), retried=(*WHOLE.retried, lived(2)))
    assert torn(greedy, 3, 2) is None


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
    finding = torn(group, 3, 2)
    assert finding is not None and finding.patience == 1


def failing(count: int, of: int, serial: int = 0, status: Status = Status.ENGINE_FAILED) -> Group:
    reasons = {member: f"EngineError: port {4000 + member} is closed" for member in range(count)}
    members = [
        lived(member, serial, status=status, reason=reasons[member]) if member < count else lived(member, serial)
        for member in range(of)
    ]
    return group_of(*members, serial=serial)


def left_out(group: Group) -> list[LeftOut]:
    return [LeftOut(t.attempt, f"{t.status}: {t.reason}") for t in group.trajectories if t.reason]


def test_a_breaker_opens_as_soon_as_more_than_its_share_of_a_window_failed() -> None:
    breaker = Breaker(0.5, window=8)
    groups = [failing(4, 4), failing(0, 4, 1), failing(0, 4, 2), failing(3, 4, 3), failing(2, 4, 4)]
    said = [breaker.saw(group, left_out(group)) for group in groups]
    # 4 of 4 may be followed by 4 that are well; 4 of 8 are not more than half; then 0 and 3 of 8; then 5 of 8
    assert [text is not None for text in said] == [False, False, False, False, True]


def test_the_diagnosis_groups_reasons_names_an_attempt_and_says_what_to_do() -> None:
    breaker = Breaker(0.5, window=6)
    breaker.saw(failing(3, 3), left_out(failing(3, 3)))
    unscored = group_of(*(lived(member, 1) for member in range(3)), serial=1)
    text = breaker.saw(
        unscored, [LeftOut(unscored.trajectories[0].attempt, "reward em could not be scored: KeyError: 'gold'")]
    )
    assert text is not None and text.splitlines() == [
        "4 of the last 6 attempts failed; a share of 0.5 in 6 is the limit",
        "     3 x engine_failed: EngineError: port 4000 is closed",
        "         for example run:0.0.0:t",
        "     1 x reward em could not be scored: KeyError: 'gold'",
        "         for example run:1.0.0:t",
        "what to do",
        f"  engine_failed: {ADVICE[Status.ENGINE_FAILED]}",
        "  unscored: a reward gave no finite number, or the policy no token: call it on the example's trajectory",
        "  to go on all the same: --doctor.failure_share 1",
    ]


def test_the_diagnosis_fits_on_one_screen_whatever_failed() -> None:
    breaker = Breaker(0.5, window=60)
    members = [lived(n, 0, status=list(ADVICE)[n % 4], reason=f"{chr(97 + n % 26) * (n + 1)} " * 50) for n in range(60)]
    group = group_of(*members, serial=0)
    text = breaker.saw(group, left_out(group))
    assert text is not None and len(text.splitlines()) <= 20 and max(map(len, text.splitlines())) <= 120


def calling(*errors: str | None, serial: int = 0) -> Group:
    """A group of one attempt, which searched once for each error that the search met; None: it met none."""
    calls = tuple(Call(f"c{n}", "search", {}, "") for n in range(len(errors)))
    results = tuple(
        ToolResult((Text(f"search failed: port {n} is {error}"),), ok=error is None, error=error and Fault.RAISED)
        for n, error in enumerate(errors)
    )
    action = Action(Message.assistant("", calls), "")
    turn = Turn(0, None, (1,), (2,), (-1.0,), (Span(0, 0),), "stop", action, results=results)
    return group_of(replace(lived(0, serial), turns=(turn,)), serial=serial)


@pytest.mark.parametrize(
    ("errors", "opens"),
    [
        (["closed"] * 4, True),
        (["closed"] * 3, False),  # no window yet
        (["closed", "closed", None, "closed", "closed", "closed"], False),
        ([None, "closed", "closed", "closed", "closed"], True),  # only the last ones count
        (["closed", "closed", "busy", "closed"], False),  # for two reasons
    ],
)
def test_a_breaker_opens_where_all_the_last_calls_of_a_tool_failed_alike(errors: list[Any], opens: bool) -> None:
    breaker, group = Breaker(0.5, window=4), calling(*errors)
    text = breaker.saw(group, [])
    assert (text is not None) is opens
    if text is not None:
        assert text.startswith("the last 4 calls of the tool 'search' all failed, for one reason\n     4 x search fail")
        assert str(Attempt("run", "t", 0, 0)) in text
    assert Breaker(1.0, window=4).saw(group, []) is None


def test_calls_that_the_agent_got_wrong_are_not_held_against_the_tool() -> None:
    (trajectory,) = calling("closed", "closed", "closed", "closed").trajectories
    (turn,) = trajectory.turns
    wrong = tuple(replace(result, error=Fault.INVALID_ARGUMENTS) for result in turn.results)
    group = group_of(replace(trajectory, turns=(replace(turn, results=wrong),)), serial=0)
    assert Breaker(0.5, window=4).saw(group, []) is None


def test_a_breaker_that_goes_on_remembers_calls() -> None:
    before, after, forgetful = Breaker(0.5, window=4), Breaker(0.5, window=4), Breaker(0.5, window=4)
    assert before.saw(calling("closed", "closed", "closed"), []) is None
    assert forgetful.saw(calling("closed"), []) is None
    after.restore(before.state())
    assert after.state() == before.state()
    assert after.saw(calling("closed", serial=1), []) is not None


def test_a_breaker_that_goes_on_opens_where_it_would_have() -> None:
    before, after, forgetful = Breaker(0.5, window=8), Breaker(0.5, window=8), Breaker(0.5, window=8)
    first, second = failing(3, 4), failing(2, 4, 1)
    assert before.saw(first, left_out(first)) is None
    after.restore(before.state())
    assert after.saw(second, left_out(second)) == before.saw(second, left_out(second)) is not None
    assert forgetful.saw(second, left_out(second)) is None


@dataclass
class FakeLearner:
    version: int = 4
    micro_tokens: int = TrainConfig().learner.micro_tokens

    def weights(self) -> Weights:
        return Weights(self.version, "module", None, "ab" * 32)

    def admission(self, group: Group) -> Admission:
        return admit([group], {})


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
            fates = (Fate(Attempt("run", "t", step, 0), "trained", step, credit=1.0),)
            update = Update(step, step, {**HEALTHY, **changed}, fates, TrainConfig().learner.micro_tokens)
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
    assert [event.kind for event in log.events if isinstance(event, Happened)] == ["warning"] * 4
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


@pytest.mark.parametrize(("steps_of_run", "groups"), [(1, 2), (3, 4), (50, 4)])
def test_a_short_run_has_a_breaker_too(steps_of_run: int, groups: int) -> None:
    doctor, _ = doctor_of(steps=steps_of_run)
    for serial in range(groups - 1):
        doctor.receive(failing(2, 2, serial))
    with pytest.raises(RunStopped, match=f"{2 * groups} of the last {2 * groups} attempts failed"):
        doctor.receive(failing(2, 2, groups - 1))


def test_the_command_prints_the_whole_diagnosis_and_fails(monkeypatch: Any, capsys: Any, tmp_path: Path) -> None:
    def stopped(*_: object) -> None:
        raise RunStopped("the run was stopped: 3 of 4\n     3 x broken\nwhat to do")

    monkeypatch.setattr(run, "train", stopped)
    assert cli.main(["train", "--quiet", "--run", str(tmp_path / "run")]) == cli.FAILED
    assert capsys.readouterr().err == "agent-r1: the run was stopped: 3 of 4\n     3 x broken\nwhat to do\n"
