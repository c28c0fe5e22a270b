"""The health monitor: each check finds its problem and nothing else, and findings stop a run at the right step."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from failing import calling, excluded, failing, group_of, make_trajectory
from learning_fixtures import Make

from agent_r1.config import Layer, resolve
from agent_r1.core.errors import InvalidInput, RunStopped
from agent_r1.core.events import Event
from agent_r1.core.inference import PolicyVersion
from agent_r1.core.messages import Text
from agent_r1.core.taskset import TaskSet
from agent_r1.core.trajectory import AttemptId, Group, Status, Trajectory
from agent_r1.data.batch import Excluded, Selection, TrainingSample, select_trainable
from agent_r1.tools.tool_errors import ToolErrorKind
from agent_r1.trainer.updater import SelectedGroup, Trained, UpdateReport, reward_metrics
from agent_r1.training.config import MonitorConfig, TrainConfig
from agent_r1.training.monitor import (
    ADVICE,
    CALL_WINDOW,
    CORRELATION,
    MAX_REASON_LENGTH,
    PROXY,
    TRUE,
    HealthMonitor,
    MonitorState,
    check_calls,
    check_contrast,
    check_entropy,
    check_logprob_gap,
    check_memory,
    check_reward_hacking,
    check_validation,
    check_weights,
    describe_attempts,
    diagnose,
    proxy_metrics,
    record_group,
    shorten_reason,
    true_reward,
)
from agent_r1.training.preflight import check_reward_weights

MICRO_TOKENS = TrainConfig().trainer.micro_tokens


def after(*groups: Group, window: int = 256, state: MonitorState | None = None) -> MonitorState:
    state = state or MonitorState()
    for group in groups:
        state = record_group(state, group, excluded(group), window)
    return state


def with_errors(group: Group, *errors: ToolErrorKind | str) -> Group:
    """Return the group of one attempt with other errors (or other texts of errors) of its calls."""
    (trajectory,) = group.trajectories
    (turn,) = trajectory.turns
    results = tuple(
        replace(result, error=error) if isinstance(error, ToolErrorKind) else replace(result, parts=(Text(error),))
        for result, error in zip(turn.results, errors, strict=True)
    )
    return group_of(replace(trajectory, turns=(replace(turn, results=results),)), group_id=0)


def test_a_run_is_stopped_when_more_than_the_share_of_a_window_failed() -> None:
    groups = [failing(4, 4), failing(0, 4, 1), failing(0, 4, 2), failing(3, 4, 3), failing(2, 4, 4)]
    # the first 4 fail, but 4 successes could follow; 4 of 8 is not more than half; then 0, 3 and 5 of 8
    states = [after(*groups[: n + 1], window=8) for n in range(len(groups))]
    assert [diagnose(state, 0.5, 8, "RUN") is not None for state in states] == [False, False, False, False, True]
    assert diagnose(states[-1], 1.0, 8, "RUN") is None


def test_the_diagnosis_groups_reasons_with_an_example_and_advice() -> None:
    unscored = group_of(*(make_trajectory(member, 1) for member in range(3)), group_id=1)
    reason = "reward em could not be scored: KeyError: 'gold'"
    state = record_group(after(failing(3, 3)), unscored, [Excluded(unscored.trajectories[0].attempt, reason)], 6)
    text = diagnose(state, 0.5, 6, "RUN")
    assert text is not None and text.splitlines() == [
        "4 of the last 6 attempts failed; a share of 0.5 in 6 is the limit",
        "     3 x engine_failed: EngineError: port 4002 is closed",
        "         for example run:0.2.0:t: agent-r1 show RUN 0.2.0",
        "     1 x reward em could not be scored: KeyError: 'gold'",
        "         for example run:1.0.0:t: agent-r1 show RUN 1.0.0",
        "what to do",
        f"  engine_failed: {ADVICE[Status.ENGINE_FAILED]}",
        f"  unscored: {ADVICE['unscored']}",
        "  to continue nevertheless: --monitor.failure_share 1",
    ]


def test_a_long_reason_keeps_the_place_in_the_users_file() -> None:
    reason = f"environment_failed: the agent raised ValueError: {'no page ' * 20}(agent.py:12, in find)"
    assert shorten_reason(reason).startswith("environment_failed: the agent raised")
    assert shorten_reason(reason).endswith("no page no page (agent.py:12, in find)")
    assert len(shorten_reason(reason)) == len(shorten_reason("x" * 500)) == MAX_REASON_LENGTH
    assert shorten_reason("ValueError: short (agent.py:12, in find)") == "ValueError: short (agent.py:12, in find)"


@pytest.mark.parametrize(
    ("group", "is_found"),
    [
        (calling(*["closed"] * CALL_WINDOW), True),
        (calling(*["closed"] * (CALL_WINDOW - 1)), False),
        (calling("closed", None, *["closed"] * (CALL_WINDOW - 2)), False),
        (calling(None, *["closed"] * CALL_WINDOW), True),  # only the last calls count
        (calling("busy", *["closed"] * (CALL_WINDOW - 1)), False),  # two causes
        (with_errors(calling(*["closed"] * 64), *[ToolErrorKind.INVALID_ARGUMENTS] * 64), False),
        (
            with_errors(calling(*["closed"] * 64), *(f"search failed: KeyError: '{chr(97 + n)}'" for n in range(64))),
            True,
        ),
    ],
)
def test_a_run_is_stopped_when_the_last_calls_of_a_tool_failed_for_one_cause(group: Group, is_found: bool) -> None:
    text = diagnose(after(group), 0.5, 8, "RUN")
    assert (text is not None) is is_found
    assert (
        text is None or f"the last {CALL_WINDOW} calls of the tool 'search' all failed, for one cause\n    64 x" in text
    )
    assert diagnose(after(group), 1.0, 8, "RUN") is None


def version(checksum: str = "ab", number: int = 4) -> PolicyVersion:
    return PolicyVersion(number, step=4, checksum=checksum * 32)


def test_other_weights_and_reduced_memory_are_found() -> None:
    assert check_weights(version("ab"), version("ab")) is None and check_memory(4096, 4096) is None
    other, less = check_weights(version("cd"), version("ab")), check_memory(700, 4096)
    assert other is not None and other.patience == 1 and "cdcdcdcdcdcd" in str(other)
    assert check_weights(version("ab", 3), version("ab")) is not None
    assert less is not None and less.patience is None and "700 tokens instead of 4096" in str(less)


@pytest.mark.parametrize(
    ("gap", "staleness", "is_found"),
    [(1e-5, 0.0, False), (0.02, 0.0, True), (math.nan, 0.0, True), (3.0, 2.0, False), (None, 0.0, False)],
)
def test_a_log_probability_gap_of_tokens_under_the_newest_weights_is_found(
    gap: float | None, staleness: float, is_found: bool
) -> None:
    metrics = {"staleness": staleness} | ({} if gap is None else {"logprob_gap": gap})
    assert (check_logprob_gap(metrics, 0.01, 3) is not None) == is_found


START = (0.2, 0.2, 0.2, 0.2, 0.2)


@pytest.mark.parametrize(
    ("entropy", "start", "is_found"),
    [
        (0.019, START, True),
        (0.021, START, False),
        (0.0, START[:4], False),  # the entropy of the start is not known yet
        (None, START, False),
        (0.0, (0.0,) * 5, False),  # the policy was deterministic from the beginning
    ],
)
def test_an_entropy_far_below_its_start_is_found(
    entropy: float | None, start: tuple[float, ...], is_found: bool
) -> None:
    assert (check_entropy(entropy, start) is not None) == is_found


def untrained(*reasons: str, skipped: float = 0.0, failed: float = 0.0) -> UpdateReport:
    outcomes = tuple(Excluded(AttemptId("run", "t", 0, n), reason) for n, reason in enumerate(reasons))
    metrics = {"reward": 0.25, "skipped_steps": skipped, "failed": failed}
    return UpdateReport(1, version(), metrics, outcomes, MICRO_TOKENS)


def trained(step: int = 1, **metrics: float) -> UpdateReport:
    outcomes = (Trained(AttemptId("run", "t", step, 0), 1.0),)
    return UpdateReport(step, version(), {"reward": 0.5, "staleness": 0.0, **metrics}, outcomes, MICRO_TOKENS)


def test_a_step_that_trained_no_attempt_is_found_with_its_most_common_reasons() -> None:
    stale = ("stale: sampled 3 updates ago", "stale: sampled 4 updates ago")
    finding = check_contrast(untrained(*("zero variance",) * 3, *stale, "a", "b"))
    assert finding is not None and finding.warn_after == 1
    assert "(3 x zero variance, 2 x stale: sampled # updates ago, 1 x a); use tasks that" in str(finding)
    assert check_contrast(untrained("the loss or a gradient was not finite", skipped=1.0)) is None
    failed = check_contrast(untrained("a", "a", "zero variance", failed=2.0))
    assert failed is not None and "remove the cause of the failures" in str(failed)


@pytest.mark.parametrize(
    ("constant", "is_found"), [(0.91, True), (0.9, False), (1.0, True), (math.nan, False), (None, False)]
)
def test_groups_without_a_contrast_are_found(constant: float | None, is_found: bool) -> None:
    metrics = {} if constant is None else {"constant_groups": constant}
    assert (check_contrast(trained(**metrics)) is not None) == is_found


@pytest.mark.parametrize(
    ("em", "rewards", "since", "is_found"),
    [
        (0.69, (0.2, 0.3, 0.7, 0.8), 2, True),
        (0.69, (0.7, 0.8, 0.2, 0.3), 2, False),  # the reward falls too: nothing contradicts
        (0.95, (0.2, 0.3, 0.7, 0.8), 2, False),  # within two standard errors of 40 questions
        (0.99, (0.2, 0.3, 0.7, 0.8), 0, False),  # this is the best step
        (0.69, (0.7, 0.8), 2, False),  # no step before the best one is known
        (0.69, (math.nan, 0.3, math.nan, 0.8), 2, True),  # steps without a trainable attempt do not count
        (0.69, (9.0, 9.0, 0.2, 0.3), 1, True),  # only as many steps before the best one count as after it
    ],
)
def test_a_validation_that_falls_while_the_reward_rises_is_found(
    em: float, rewards: tuple[float, ...], since: int, is_found: bool
) -> None:
    assert (check_validation(em, 0.99, 40, rewards, since) is not None) == is_found


def sample(index: int, group: int, reward: float) -> TrainingSample:
    return TrainingSample(make_trajectory(index, group), group, (), reward, ())


def test_the_contrast_of_groups_is_measured() -> None:
    rewards = {0: (0.0, 1.0), 1: (0.5, 0.5), 2: (0.1, 0.3), 3: (1.0,)}
    samples = tuple(sample(i, group, x) for group, values in rewards.items() for i, x in enumerate(values))
    metrics = reward_metrics(Selection(samples, ()), Selection(samples, ()))
    assert metrics["reward_spread"] == pytest.approx((0.5 + 0.0 + 0.1) / 3)
    assert metrics["constant_groups"] == pytest.approx(1 / 3)
    lonely = Selection((sample(0, 0, 1.0),), ())
    assert math.isnan(reward_metrics(lonely, lonely)["constant_groups"])


def history(proxy: float, true: float, steps: int = 20, noise: float = 0.02) -> list[tuple[float, float]]:
    """Return means of steps in which the two rewards change by ``proxy`` and ``true`` in all, with noise."""
    shuffle = random.Random(0)
    return [
        (0.3 + proxy * step / steps + shuffle.gauss(0, noise), 0.5 + true * step / steps + shuffle.gauss(0, noise))
        for step in range(steps)
    ]


@pytest.mark.parametrize(
    ("proxy", "true", "is_found"),
    [(0.5, -0.3, True), (0.5, 0.3, False), (-0.5, -0.3, False), (0.5, 0.0, False), (0.0, -0.3, False)],
)
def test_only_a_rise_with_a_fall_of_the_true_reward_is_found(proxy: float, true: float, is_found: bool) -> None:
    assert (check_reward_hacking(history(proxy, true)) is not None) == is_found


def test_noise_alone_is_rarely_found_and_short_runs_never() -> None:
    assert check_reward_hacking(history(5.0, -5.0, steps=6)) is None
    found = 0
    for run in range(40):
        rises = [step / 40 + random.Random(f"p{run}.{step}").gauss(0, 0.05) for step in range(40)]
        steps = [(rise, random.Random(f"t{run}.{step}").gauss(0.5, 0.05)) for step, rise in enumerate(rises)]
        found += any(check_reward_hacking(steps[:end]) for end in range(41))
    assert found <= 8, "a reward that rises, and a true reward that only varies"


# The means of a run on a reward that one answer always earns: it was trained for 14 steps of 60 attempts.
HACKED = tuple(
    zip(
        (0.15, 0.30, 0.08, 0.53, 0.63, 0.73, 0.83, 0.82, 0.83, 0.82, 0.87, 0.70, 0.85, 0.92),
        (0.50, 0.47, 0.02, 0.27, 0.13, 0.20, 0.17, 0.17, 0.22, 0.13, 0.15, 0.12, 0.17, 0.17),
        strict=True,
    )
)


def test_a_true_reward_that_falls_in_the_first_steps_is_found_soon() -> None:
    assert [end for end in range(15) if check_reward_hacking(HACKED[:end])] == [14]
    assert not any(check_reward_hacking([(reward, reward) for reward, _ in HACKED[:end]]) for end in range(15))


@pytest.mark.parametrize(
    ("weights", "rewards", "expected"),
    [
        ({"exact_match": 0.0}, (), "exact_match"),  # of an own file, whose rewards are known after scoring
        ({"em": 0.0, "exact_match": 0.0}, ("exact_match",), "exact_match"),
        ({"em": 0.0}, ("f1",), ""),
        ({"exact_match": 0.5}, (), ""),
        ({}, (), ""),
    ],
)
def test_exact_match_of_weight_0_is_the_true_reward(
    weights: Mapping[str, float], rewards: Sequence[str], expected: str
) -> None:
    assert true_reward(TrainConfig(reward_weights=dict(weights)), rewards) == expected


def test_the_metrics_compare_the_weighted_return_with_the_true_reward() -> None:
    make = Make()
    attempts = [
        make.trajectory(make.chain(([1], [2])), {"style": style, "em": em}, member=member)
        for member, (style, em) in enumerate([(1.0, 0.0), (0.0, 1.0), (0.5, None), (0.5, 0.0)])
    ]
    group = make.groups(*attempts)[0]
    selected = SelectedGroup(group, select_trainable([group], {"style": 2.0, "em": 0.0}), True)
    metrics = proxy_metrics([selected], "em")
    assert metrics[PROXY] == pytest.approx(1.0) and metrics[TRUE] == pytest.approx(1 / 3)
    assert metrics[CORRELATION] == pytest.approx(-(3**0.5) / 2)
    assert proxy_metrics([selected], "unknown") == {}


def test_a_true_reward_that_does_not_exist_is_refused(micro: TaskSet) -> None:
    config = resolve(TrainConfig, [Layer("test", {"monitor.true_reward": "emm"}), Layer("r", micro.recipe)])
    with pytest.raises(InvalidInput, match="did you mean 'em'"):
        check_reward_weights(config, micro)


@dataclass
class Log:
    events: list[Event] = field(default_factory=list)

    async def record(self, *events: Event) -> None:
        self.events += events


def make_monitor(
    state: MonitorState | None = None, tools: Sequence[str] = (), **settings: Any
) -> tuple[HealthMonitor, Log]:
    config, log = TrainConfig(groups_per_step=2, group_size=2, **settings), Log()
    return HealthMonitor(config, log, Path("runs/x"), state or MonitorState(), tools), log


def take_steps(
    monitor: HealthMonitor,
    *steps: UpdateReport | Mapping[str, float],
    served: PolicyVersion | None = None,
    attempts: Sequence[Trajectory] = (),
) -> None:
    async def take() -> None:
        for step in steps:
            update = step if isinstance(step, UpdateReport) else trained(**step)
            await monitor.report(monitor.on_step(update, attempts, served or version(), version(), {}))

    asyncio.run(take())


WRONG = {"logprob_gap": 1.0}


def test_a_healthy_run_has_no_findings() -> None:
    monitor, log = make_monitor()
    take_steps(monitor, *[{"logprob_gap": 1e-5, "skipped_steps": 0.0, "entropy": 0.3, "constant_groups": 0.2}] * 9)
    assert log.events == []


def test_a_finding_stops_the_run_only_after_consecutive_steps(caplog: Any) -> None:
    monitor, log = make_monitor()
    take_steps(monitor, WRONG, {}, WRONG, WRONG)
    assert len(log.events) == len(caplog.records) == 1 and "logprob_gap" in caplog.text
    with pytest.raises(RunStopped, match="3 steps in a row, logprob_gap") as stopped:
        take_steps(monitor, WRONG)
    assert "agent-r1 show x" in str(stopped.value)
    patient, _ = make_monitor(monitor=MonitorConfig(patience=9))
    take_steps(patient, *[WRONG] * 8)
    with pytest.raises(RunStopped, match="weights: the engine does not serve"):
        take_steps(make_monitor()[0], {}, served=version("cd"))


def test_a_warning_is_repeated_ever_more_rarely_also_if_good_steps_are_between() -> None:
    monitor, log = make_monitor()
    take_steps(monitor, *[untrained("zero variance"), {}] * 60)
    assert len(log.events) == 2 and "(in 10 steps so far)" in str(log.events[1])


def test_a_run_in_which_nothing_is_trained_says_what_its_attempts_did() -> None:
    cut = [make_trajectory(n, 0, status=Status.OUT_OF_TOKENS, rewards={"right": 0.0}) for n in range(2)]
    (called,) = calling(None).trajectories
    attempts = [*cut, replace(called, rewards={"right": 0.0})]
    assert describe_attempts(attempts, 32, has_tools=False).count(";") == 2  # nothing about calls
    monitor, log = make_monitor(max_tokens=32, tools=["search"])
    take_steps(monitor, untrained("zero variance"), attempts=attempts)
    (warning,) = map(str, log.events)
    assert "2 of 3 attempts were cut (max_tokens 32); 1 of 3 had a valid call; reward right was 0 in all" in warning


def test_a_step_in_which_every_call_is_invalid_names_the_tools() -> None:
    unknown = with_errors(calling(*["no"] * 8), *[ToolErrorKind.UNKNOWN_TOOL] * 8).trajectories
    finding = check_calls(unknown, ["boom"])
    assert finding is not None
    assert "all 8 calls of the step are invalid; 8 name a tool that does not exist, such as 'search'" in finding.text
    assert "the tools are: boom" in finding.text
    own = check_calls(unknown, ())  # each task has its own tools
    assert own is not None and "the tools are" not in own.text
    assert check_calls(with_errors(calling(*["no"] * 7), *[ToolErrorKind.UNKNOWN_TOOL] * 7).trajectories, []) is None
    mixed = [*[ToolErrorKind.UNKNOWN_TOOL] * 7, ToolErrorKind.RAISED]
    assert check_calls(with_errors(calling(*["no"] * 8), *mixed).trajectories, ["boom"]) is None


def test_a_run_in_which_every_attempt_failed_is_no_success_however_short_it_is() -> None:
    monitor, _ = make_monitor(steps=9)
    monitor.on_group(selected(failing(2, 2, 0)))
    with pytest.raises(RunStopped, match="2 of the last 2 attempts failed"):
        monitor.on_end()
    monitor.on_group(selected(calling(None, group_id=1)))
    monitor.on_end()
    lenient, _ = make_monitor(steps=9, monitor=MonitorConfig(failure_share=1.0))
    lenient.on_group(selected(failing(2, 2, 0)))
    lenient.on_end()


@pytest.mark.parametrize(
    ("settings", "rewards", "trusted"),
    [
        ({"reward_weights": {"em": 0.0}}, ("f1", "em"), "em"),
        ({"reward_weights": {"em": 0.0}, "monitor": MonitorConfig(true_reward="f1")}, ("f1", "em"), "f1"),
        ({"reward_weights": {"words": 0.0}}, ("words", "right"), ""),  # it may be no measure of success
        ({}, ("em",), ""),
        ({}, (), ""),
    ],
)
def test_a_metric_of_weight_zero_is_the_true_reward(settings: Any, rewards: Any, trusted: str) -> None:
    assert true_reward(TrainConfig(**settings), rewards) == trusted


@pytest.mark.parametrize("stop", [3, 5, 8])
def test_an_entropy_that_stays_low_is_a_warning_also_after_a_resume(stop: int) -> None:
    steps = [{"entropy": entropy} for entropy in (0.2,) * 5 + (0.01,) * 6]
    monitor, log = make_monitor()
    take_steps(monitor, *steps[:9])
    assert log.events == []
    take_steps(monitor, *steps[9:])
    assert len(log.events) == 1 and "entropy 0.01" in str(log.events[0])
    before, first = make_monitor()
    take_steps(before, *steps[:stop])
    resumed, second = make_monitor(before.state)
    take_steps(resumed, *steps[stop:])
    assert [*first.events, *second.events] == log.events and resumed.state == monitor.state


def test_a_falling_validation_is_one_warning_for_each_best_step() -> None:
    monitor, log = make_monitor()
    take_steps(monitor, *({"reward": reward} for reward in (0.1, 0.1, 0.5, 0.6)))
    assert monitor.on_validation(4, 0.99, 2, 0.99) == []
    (finding,) = monitor.on_validation(4, 0.4, 2, 0.99)
    asyncio.run(monitor.report((finding,)))
    assert len(log.events) == 1 and "while the training reward rises" in str(log.events[0])
    restored, _ = make_monitor(monitor.state)
    for one in (monitor, restored):
        assert one.on_validation(4, 0.3, 2, 0.99) == [] and len(one.on_validation(4, 0.3, 3, 0.99)) == 1


def hacking_steps(monitor: HealthMonitor, steps: Sequence[tuple[float, float]]) -> list[int]:
    """Return the numbers of the steps in which the monitor warns."""
    warned: list[int] = []
    for number, (proxy, true) in enumerate(steps):
        findings = monitor.on_step(trained(), (), version(), version(), {PROXY: proxy, TRUE: true})
        warned += [number] * len(findings)
    return warned


def test_a_run_on_a_hackable_reward_gets_one_warning_also_if_it_is_resumed() -> None:
    steps, (whole, _), (stopped, _) = history(0.5, -0.4, steps=40), make_monitor(), make_monitor()
    (warned,) = hacking_steps(whole, steps)
    assert 9 <= warned < 39
    assert hacking_steps(stopped, steps[: warned - 1]) == []
    assert hacking_steps(make_monitor(stopped.state)[0], steps[warned - 1 :]) == [1]


def selected(group: Group) -> SelectedGroup:
    return SelectedGroup(group, select_trainable([group], {}), has_signal=True)


@pytest.mark.parametrize(("steps_of_run", "groups"), [(2, 3), (3, 4), (50, 4)])
def test_failures_stop_a_short_run_too_also_after_a_resume(steps_of_run: int, groups: int) -> None:
    monitor, _ = make_monitor(steps=steps_of_run)
    for group_id in range(groups - 1):
        monitor.on_group(selected(failing(2, 2, group_id)))
    resumed, _ = make_monitor(monitor.state, steps=steps_of_run)
    for one in (monitor, resumed):
        with pytest.raises(RunStopped, match=f"{2 * groups} of the last {2 * groups} attempts failed"):
            one.on_group(selected(failing(2, 2, groups - 1)))
