"""Plain functions as a scorer: a failed function gives Unscored with a reason, never 0.0."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from agent_r1.core.errors import InvalidInput
from agent_r1.core.task import Task
from agent_r1.core.trajectory import AttemptId, Rewards, Scores, Status, Trajectory, Unscored
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.rewards.scoring import FunctionScorer

TASK = Task("t", ())


def group_of(size: int) -> list[Trajectory]:
    return [Trajectory(AttemptId("run", "t", 0, member), "t", (), Status.COMPLETED) for member in range(size)]


def score(functions: dict[str, Callable[..., Any]], size: int = 1, timeout: float = 60.0) -> tuple[Rewards, ...]:
    return tuple(map(plain, asyncio.run(FunctionScorer(functions, timeout).score(group_of(size), TASK))))


def plain(scores: Scores) -> Rewards:
    """Return the scores with None for Unscored."""
    return {name: None if isinstance(value, Unscored) else value for name, value in scores.items()}


def member(trajectory: Trajectory, task: Task) -> float:
    return trajectory.attempt.sample_index


async def later(trajectory: Trajectory, task: Task) -> float:
    await asyncio.sleep(0.01 * (3 - trajectory.attempt.sample_index))
    return 10.0 + trajectory.attempt.sample_index


def test_each_trajectory_gets_its_own_rewards_by_name_in_order() -> None:
    assert score({"member": member, "later": later}, size=3) == (
        {"member": 0.0, "later": 10.0},
        {"member": 1.0, "later": 11.0},
        {"member": 2.0, "later": 12.0},
    )


def test_rewards_are_named_after_their_functions() -> None:
    (scorer,) = ToolEnv([], rewards=[member, later]).scorers
    assert asyncio.run(scorer.score(group_of(1), TASK)) == ({"member": 0.0, "later": 10.0},)


def test_the_keys_of_a_returned_mapping_name_the_rewards() -> None:
    assert score({"both": lambda trajectory, task: {"em": True, "f1": 0.5}}) == ({"em": 1.0, "f1": 0.5},)


def raising(trajectory: Trajectory, task: Task) -> float:
    raise ValueError("the judge\nis away")


def leaving(trajectory: Trajectory, task: Task) -> float:
    raise SystemExit


def forgetful(trajectory: Trajectory, task: Task) -> None:
    return None


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (raising, "ValueError: the judge is away"),
        (leaving, "SystemExit"),
        (forgetful, "NoneType"),
        (lambda trajectory, task: float("nan"), "nan"),
        (lambda trajectory, task: -math.inf, "-inf"),
        (lambda trajectory, task: "1.0", "str"),
        (lambda trajectory, task: [1.0], "list"),
        (lambda trajectory, task: 10**400, "too large"),
        (lambda trajectory, task: len(1), "TypeError"),
    ],
)
def test_an_unscored_reward_has_a_one_line_reason(function: Callable[..., Any], reason: str) -> None:
    functions = {"r": function, "fine": member}
    (scores,) = asyncio.run(FunctionScorer(functions).score(group_of(1), TASK))
    assert plain(scores) == {"r": None, "fine": 0.0}
    assert isinstance(scores["r"], Unscored) and reason in scores["r"].reason and "\n" not in scores["r"].reason


def test_one_bad_value_of_a_mapping_does_not_affect_the_others() -> None:
    assert score({"both": lambda trajectory, task: {"em": None, "f1": 0.5}}) == ({"em": None, "f1": 0.5},)


def test_two_functions_that_return_the_same_name_are_unscored() -> None:
    assert score({"em": member, "more": lambda trajectory, task: {"em": 1.0}}) == ({"em": None},)


def test_a_hanging_reward_is_unscored_in_time_and_delays_no_other() -> None:
    def hangs_for_one(trajectory: Trajectory, task: Task) -> float:
        time.sleep(3600 if trajectory.attempt.sample_index == 1 else 0)
        return 1.0

    assert score({"r": hangs_for_one}, size=3, timeout=2.0) == ({"r": 1.0}, {"r": None}, {"r": 1.0})


odd_values = st.one_of(
    st.floats(),
    st.integers(),
    st.booleans(),
    st.none(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.lists(st.floats(), max_size=2),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(odd_values | st.dictionaries(st.text(max_size=3), odd_values, max_size=3), min_size=1, max_size=8))
def test_a_reward_is_a_finite_number_or_unscored(values: list[Any]) -> None:
    def give(trajectory: Trajectory, task: Task) -> Any:
        return values[trajectory.attempt.sample_index]

    for given_value, rewards in zip(values, score({"r": give}, size=len(values)), strict=True):
        pairs = given_value.items() if isinstance(given_value, dict) else [("r", given_value)]
        assert rewards == {name: expected(value) for name, value in pairs}


def expected(value: Any) -> float | None:
    try:
        return float(value) if isinstance(value, int | float) and math.isfinite(float(value)) else None
    except OverflowError:
        return None


def test_per_turn_rewards_with_one_bad_number_are_unscored(make_trajectory, make_action, task):
    def by_turn(trajectory, task):
        return (0.5, 1)

    def broken(trajectory, task):
        return (0.5, float("nan"))

    scorer = FunctionScorer({"by_turn": by_turn, "broken": broken})
    (rewards,) = asyncio.run(scorer.score([make_trajectory((make_action("a"), ()), (make_action("b"), ()))], task))
    assert plain(rewards) == {"by_turn": (0.5, 1.0), "broken": None}


def test_a_function_that_raises_is_reported_with_its_file_and_line() -> None:
    def keyed(trajectory: Trajectory, task: Task) -> float:
        return {}["gold"]

    (scores,) = asyncio.run(FunctionScorer({"keyed": keyed}).score(group_of(1), TASK))
    line = keyed.__code__.co_firstlineno + 1
    assert scores == {"keyed": Unscored(f"KeyError: 'gold' (test_scoring.py:{line}, in keyed)")}


@pytest.mark.parametrize(
    "function",
    [
        lambda completions, answer, **kwargs: [1.0],
        lambda prompts, completions: [1.0],
        lambda data_source, solution_str, ground_truth, extra_info=None: 1.0,
        lambda text: 1.0,
        lambda trajectory, task, gold: 1.0,
        lambda task, trajectory: 1.0,
        lambda response, label: 1.0,
        lambda output, target: 1.0,
        lambda state, info: 1.0,
        lambda solution, ground_truth: 1.0,
        lambda trajectory, answer: 1.0,
    ],
)
def test_a_reward_function_with_other_parameters_is_refused_before_it_is_called(function: Any) -> None:
    with pytest.raises(InvalidInput, match=r"reward right: got a function with the parameters \(.*; write def f\("):
        FunctionScorer({"right": function})


def test_a_reward_function_can_name_its_parameters_as_it_likes_and_have_more_with_defaults() -> None:
    FunctionScorer({"own": lambda t, _, scale=2.0: scale, "any": lambda *args, **more: 1.0, "builtin": max})
    FunctionScorer({"own": lambda trajectory, task, completions=None: 1.0, "named": lambda *two, answer="": 1.0})


@pytest.mark.parametrize("value", [None, "text", 1.0])
def test_a_reward_that_is_no_function_is_refused(value: Any) -> None:
    with pytest.raises(InvalidInput, match=rf"reward x: got {value!r}; give a function"):
        FunctionScorer({"x": value})
