"""The monitor warns if the policy stops to explore, if groups have no contrast, and if validation falls."""

from __future__ import annotations

import math

import pytest
from failing import make_trajectory

from agent_r1.data.training_sample import Selection, TrainingSample
from agent_r1.trainer.report import reward_metrics
from agent_r1.training.monitor import check_contrast, check_entropy, check_validation

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
    assert (check_entropy(entropy, start, 0.1) is not None) == is_found


@pytest.mark.parametrize(
    ("constant", "is_found"), [(0.91, True), (0.9, False), (1.0, True), (math.nan, False), (None, False)]
)
def test_groups_without_a_contrast_are_found(constant: float | None, is_found: bool) -> None:
    metrics = {"reward": 0.5} | ({} if constant is None else {"constant_groups": constant})
    assert (check_contrast(metrics, 0.9) is not None) == is_found


@pytest.mark.parametrize(
    ("em", "rewards", "since", "is_found"),
    [
        (0.69, (0.2, 0.3, 0.7, 0.8), 2, True),
        (0.69, (0.7, 0.8, 0.2, 0.3), 2, False),  # the reward falls too: nothing contradicts
        (0.95, (0.2, 0.3, 0.7, 0.8), 2, False),  # within two standard errors of 40 questions
        (0.99, (0.2, 0.3, 0.7, 0.8), 0, False),  # this is the best step
        (0.69, (0.7, 0.8), 2, False),  # no step before the best one is known
        (0.69, (math.nan, 0.3, math.nan, 0.8), 2, True),  # steps without a trainable attempt do not count
    ],
)
def test_a_validation_that_falls_while_the_reward_rises_is_found(
    em: float, rewards: tuple[float, ...], since: int, is_found: bool
) -> None:
    assert (check_validation(em, 0.99, 40, rewards, since) is not None) == is_found


def test_only_as_many_steps_before_the_best_one_count_as_after_it() -> None:
    assert check_validation(0.5, 0.99, 40, (9.0, 9.0, 0.2, 0.3), 1) is not None


def test_the_finding_says_what_to_do() -> None:
    finding = check_validation(0.69, 0.99, 40, (0.2, 0.3, 0.7, 0.8), 2)
    assert finding is not None and finding.patience is None
    assert "the best was 0.99, 2 steps ago" in str(finding) and "0.25 before the best step, 0.75 since" in str(finding)


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
