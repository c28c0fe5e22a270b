"""The circuit breaker: when it opens, what it says, and what it only doubts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from failing import calling, failing, group_of, left_out, lived

from agent_r1.core.attempt_id import AttemptId
from agent_r1.core.messages import Text
from agent_r1.core.trajectory import Status
from agent_r1.data.training_sample import Excluded
from agent_r1.tools.tool_errors import ToolErrorKind
from agent_r1.training.monitor.checks import tool_warnings
from agent_r1.training.monitor.circuit_breaker import ADVICE, CALLS, CircuitBreaker


def test_a_breaker_opens_as_soon_as_more_than_its_share_of_a_window_failed() -> None:
    breaker = CircuitBreaker(0.5, window=8)
    groups = [failing(4, 4), failing(0, 4, 1), failing(0, 4, 2), failing(3, 4, 3), failing(2, 4, 4)]
    said = [breaker.saw(group, left_out(group)) for group in groups]
    # 4 of 4 may be followed by 4 that are well; 4 of 8 are not more than half; then 0 and 3 of 8; then 5 of 8
    assert [text is not None for text in said] == [False, False, False, False, True]


def test_the_diagnosis_groups_reasons_names_an_attempt_and_says_what_to_do() -> None:
    breaker = CircuitBreaker(0.5, window=6)
    breaker.saw(failing(3, 3), left_out(failing(3, 3)))
    unscored = group_of(*(lived(member, 1) for member in range(3)), serial=1)
    text = breaker.saw(
        unscored, [Excluded(unscored.trajectories[0].attempt, "reward em could not be scored: KeyError: 'gold'")]
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
        "  to go on all the same: --monitor.failure_share 1",
    ]


def test_the_diagnosis_fits_on_one_screen_whatever_failed() -> None:
    breaker = CircuitBreaker(0.5, window=60)
    members = [lived(n, 0, status=list(ADVICE)[n % 4], reason=f"{chr(97 + n % 26) * (n + 1)} " * 50) for n in range(60)]
    group = group_of(*members, serial=0)
    text = breaker.saw(group, left_out(group))
    assert text is not None and len(text.splitlines()) <= 20 and max(map(len, text.splitlines())) <= 120


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
    breaker, group = CircuitBreaker(0.5, window=4, calls=4), calling(*errors)
    text = breaker.saw(group, [])
    assert (text is not None) is opens
    if text is not None:
        assert text.startswith("the last 4 calls of the tool 'search' all failed, for one reason\n     4 x search fail")
        assert str(AttemptId("run", "t", 0, 0)) in text
    assert CircuitBreaker(1.0, window=4, calls=4).saw(group, []) is None


def test_calls_that_the_agent_got_wrong_are_not_held_against_the_tool() -> None:
    (trajectory,) = calling("closed", "closed", "closed", "closed").trajectories
    (turn,) = trajectory.turns
    wrong = tuple(replace(result, error=ToolErrorKind.INVALID_ARGUMENTS) for result in turn.results)
    group = group_of(replace(trajectory, turns=(replace(turn, results=wrong),)), serial=0)
    assert CircuitBreaker(0.5, window=4, calls=4).saw(group, []) is None


def test_a_breaker_that_goes_on_opens_where_it_would_have() -> None:
    before, after, forgetful = CircuitBreaker(0.5, window=8), CircuitBreaker(0.5, window=8), CircuitBreaker(0.5, window=8)
    first, second = failing(3, 4), failing(2, 4, 1)
    assert before.saw(first, left_out(first)) is None
    after.restore(before.state())
    assert after.saw(second, left_out(second)) == before.saw(second, left_out(second)) is not None
    assert forgetful.saw(second, left_out(second)) is None


def test_a_tool_that_quotes_what_it_was_asked_fails_for_one_cause() -> None:
    (trajectory,) = calling(*["closed"] * CALLS).trajectories
    (turn,) = trajectory.turns
    errors = [f"search failed: KeyError: 'Alba: river {chr(97 + n % 26)}'" for n in range(CALLS)]
    results = tuple(replace(result, parts=(Text(error),)) for result, error in zip(turn.results, errors, strict=True))
    group = group_of(replace(trajectory, turns=(replace(turn, results=results),)), serial=0)
    text = CircuitBreaker(0.5, window=8).saw(group, [])
    assert text is not None and f"the last {CALLS} calls of the tool 'search' all failed" in text


def test_calls_that_all_fail_for_different_causes_are_warned_of() -> None:
    breaker = CircuitBreaker(0.5, window=8, calls=4)
    assert breaker.saw(calling("closed", "busy", "closed", "busy"), []) is None
    (finding,) = tool_warnings(breaker)
    assert finding.patience is None and str(finding).startswith("tool search: the last calls of the tool 'search' all")
    assert breaker.saw(calling(None, serial=1), []) is None
    assert list(tool_warnings(breaker)) == []


def test_a_few_calls_that_fail_at_first_are_no_broken_tool_however_short_the_run() -> None:
    breaker = CircuitBreaker(0.5, window=4)
    assert breaker.saw(calling(*["closed"] * (CALLS - 1)), []) is None and list(tool_warnings(breaker)) == []
    assert breaker.saw(calling("closed", serial=1), []) is not None


def test_greedy_attempts_that_fail_count() -> None:
    breaker = CircuitBreaker(0.3, window=6)
    groups = [
        replace(failing(0, 2, n), greedy=lived(2, n, status=Status.ENGINE_FAILED, reason="gone")) for n in range(2)
    ]
    assert breaker.saw(groups[0], []) is None
    assert "2 x engine_failed: gone" in (breaker.saw(groups[1], []) or "")


def test_a_breaker_that_goes_on_remembers_calls() -> None:
    before, after, forgetful = CircuitBreaker(0.5, window=4), CircuitBreaker(0.5, window=4), CircuitBreaker(0.5, window=4)
    assert before.saw(calling(*["closed"] * 63), []) is None
    assert forgetful.saw(calling("closed"), []) is None
    after.restore(before.state())
    assert after.state() == before.state()
    assert after.saw(calling("closed", serial=1), []) is not None
