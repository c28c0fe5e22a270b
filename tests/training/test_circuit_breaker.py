"""When the circuit breaker opens, its diagnosis, and failures that only cause a warning."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from failing import calling, excluded, failing, group_of, make_trajectory

from agent_r1.core.messages import Text
from agent_r1.core.trajectory import AttemptId, Status
from agent_r1.data.training_sample import Excluded
from agent_r1.tools.tool_errors import ToolErrorKind
from agent_r1.training.monitor import (
    ADVICE,
    CALL_WINDOW,
    MAX_REASON_LENGTH,
    CircuitBreaker,
    shorten_reason,
    tool_warnings,
)


def test_it_opens_when_more_than_the_share_of_a_window_failed() -> None:
    breaker = CircuitBreaker(0.5, window=8)
    groups = [failing(4, 4), failing(0, 4, 1), failing(0, 4, 2), failing(3, 4, 3), failing(2, 4, 4)]
    diagnoses = [breaker.record(group, excluded(group)) for group in groups]
    # the first 4 fail, but 4 successes could follow; 4 of 8 is not more than half; then 0, 3 and 5 of 8
    assert [text is not None for text in diagnoses] == [False, False, False, False, True]


def test_the_diagnosis_groups_reasons_with_an_example_and_advice() -> None:
    breaker = CircuitBreaker(0.5, window=6)
    breaker.record(failing(3, 3), excluded(failing(3, 3)))
    unscored = group_of(*(make_trajectory(member, 1) for member in range(3)), group_id=1)
    text = breaker.record(
        unscored, [Excluded(unscored.trajectories[0].attempt, "reward em could not be scored: KeyError: 'gold'")]
    )
    assert text is not None and text.splitlines() == [
        "4 of the last 6 attempts failed; a share of 0.5 in 6 is the limit",
        "     3 x engine_failed: EngineError: port 4000 is closed",
        "         for example run:0.0.0:t: agent-r1 show RUN 0.0.0",
        "     1 x reward em could not be scored: KeyError: 'gold'",
        "         for example run:1.0.0:t: agent-r1 show RUN 1.0.0",
        "what to do",
        f"  engine_failed: {ADVICE[Status.ENGINE_FAILED]}",
        "  unscored: a reward function raised or returned no finite number, or the policy sampled no token: "
        "test the function (docs/rewards.md)",
        "  to continue nevertheless: --monitor.failure_share 1",
    ]


def test_a_long_reason_keeps_the_place_in_the_users_file() -> None:
    reason = f"environment_failed: the agent raised ValueError: {'no page ' * 20}(agent.py:12, in find)"
    assert shorten_reason(reason).endswith("no page no p.. (agent.py:12, in find)")
    assert len(shorten_reason(reason)) == len(shorten_reason("x" * 500)) == MAX_REASON_LENGTH
    assert shorten_reason("ValueError: short (agent.py:12, in find)") == "ValueError: short (agent.py:12, in find)"


def test_the_diagnosis_fits_on_one_screen_whatever_failed() -> None:
    breaker = CircuitBreaker(0.5, window=60)
    members = [
        make_trajectory(n, 0, status=list(ADVICE)[n % 4], reason=f"{chr(97 + n % 26) * (n + 1)} " * 50)
        for n in range(60)
    ]
    group = group_of(*members, group_id=0)
    text = breaker.record(group, excluded(group))
    assert text is not None and len(text.splitlines()) <= 20 and max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize(
    ("errors", "opens"),
    [
        (["closed"] * 4, True),
        (["closed"] * 3, False),  # fewer than the window
        (["closed", "closed", None, "closed", "closed", "closed"], False),
        ([None, "closed", "closed", "closed", "closed"], True),  # only the last ones count
        (["closed", "closed", "busy", "closed"], False),  # two causes
    ],
)
def test_it_opens_when_the_last_calls_of_a_tool_failed_for_one_cause(errors: list[Any], opens: bool) -> None:
    breaker, group = CircuitBreaker(0.5, window=4, call_window=4), calling(*errors)
    text = breaker.record(group, [])
    assert (text is not None) is opens
    if text is not None:
        assert text.startswith("the last 4 calls of the tool 'search' all failed, for one reason\n     4 x search fail")
        assert str(AttemptId("run", "t", 0, 0)) in text
    assert CircuitBreaker(1.0, window=4, call_window=4).record(group, []) is None


def test_invalid_calls_do_not_count_as_failures_of_the_tool() -> None:
    (trajectory,) = calling("closed", "closed", "closed", "closed").trajectories
    (turn,) = trajectory.turns
    wrong = tuple(replace(result, error=ToolErrorKind.INVALID_ARGUMENTS) for result in turn.results)
    group = group_of(replace(trajectory, turns=(replace(turn, results=wrong),)), group_id=0)
    assert CircuitBreaker(0.5, window=4, call_window=4).record(group, []) is None


def test_a_restored_breaker_opens_at_the_same_group() -> None:
    before, after, forgetful = (
        CircuitBreaker(0.5, window=8),
        CircuitBreaker(0.5, window=8),
        CircuitBreaker(0.5, window=8),
    )
    first, second = failing(3, 4), failing(2, 4, 1)
    assert before.record(first, excluded(first)) is None
    after.load_state(before.state())
    assert after.record(second, excluded(second)) == before.record(second, excluded(second)) is not None
    assert forgetful.record(second, excluded(second)) is None


def test_errors_that_quote_the_arguments_have_one_cause() -> None:
    (trajectory,) = calling(*["closed"] * CALL_WINDOW).trajectories
    (turn,) = trajectory.turns
    errors = [f"search failed: KeyError: 'Alba: river {chr(97 + n % 26)}'" for n in range(CALL_WINDOW)]
    results = tuple(replace(result, parts=(Text(error),)) for result, error in zip(turn.results, errors, strict=True))
    group = group_of(replace(trajectory, turns=(replace(turn, results=results),)), group_id=0)
    text = CircuitBreaker(0.5, window=8).record(group, [])
    assert text is not None and f"the last {CALL_WINDOW} calls of the tool 'search' all failed" in text


def test_calls_that_fail_for_different_causes_are_a_warning() -> None:
    breaker = CircuitBreaker(0.5, window=8, call_window=4)
    assert breaker.record(calling("closed", "busy", "closed", "busy"), []) is None
    (finding,) = tool_warnings(breaker)
    assert finding.patience is None and str(finding).startswith("tool search: the last calls of the tool 'search' all")
    assert breaker.record(calling(None, group_id=1), []) is None
    assert list(tool_warnings(breaker)) == []


def test_fewer_failed_calls_than_the_window_do_not_open_it() -> None:
    breaker = CircuitBreaker(0.5, window=4)
    assert breaker.record(calling(*["closed"] * (CALL_WINDOW - 1)), []) is None and list(tool_warnings(breaker)) == []
    assert breaker.record(calling("closed", group_id=1), []) is not None


def test_failed_greedy_attempts_count() -> None:
    breaker = CircuitBreaker(0.3, window=6)
    groups = [
        replace(failing(0, 2, n), greedy=make_trajectory(2, n, status=Status.ENGINE_FAILED, reason="gone"))
        for n in range(2)
    ]
    assert breaker.record(groups[0], []) is None
    assert "2 x engine_failed: gone" in (breaker.record(groups[1], []) or "")


def test_a_restored_breaker_has_the_earlier_calls() -> None:
    before, after, forgetful = (
        CircuitBreaker(0.5, window=4),
        CircuitBreaker(0.5, window=4),
        CircuitBreaker(0.5, window=4),
    )
    assert before.record(calling(*["closed"] * 63), []) is None
    assert forgetful.record(calling("closed"), []) is None
    after.load_state(before.state())
    assert after.state() == before.state()
    assert after.record(calling("closed", group_id=1), []) is not None
