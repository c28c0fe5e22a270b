"""The area under the ROC curve with ties, its interval over tasks, and the calibration."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from agent_r1.reward_models.config import LossName, RewardModelConfig
from agent_r1.reward_models.evaluation import CalibrationBin, auc, evaluate_scores, separation

CONFIG = RewardModelConfig(out=Path("rm"))


def area_by_pairs(scores: list[float], labels: list[bool]) -> float:
    pairs = [(s, f) for s, one in zip(scores, labels, strict=True) if one
             for f, other in zip(scores, labels, strict=True) if not other]  # fmt: skip
    return sum((s > f) + (s == f) / 2 for s, f in pairs) / len(pairs)


def test_the_area_is_the_share_of_right_pairs_and_ties_count_half() -> None:
    random = torch.Generator().manual_seed(0)
    for _ in range(20):
        scores = torch.randint(0, 5, (12,), generator=random).tolist()
        labels = [True, False, *(torch.rand(10, generator=random) < 0.5).tolist()]
        assert auc(torch.tensor(scores, dtype=torch.float64), torch.tensor(labels)) == pytest.approx(
            area_by_pairs(scores, labels)
        )


def test_without_a_success_or_without_a_failure_there_is_no_area() -> None:
    assert math.isnan(auc(torch.tensor([0.1, 0.2]), torch.tensor([True, True])))
    assert math.isnan(auc(torch.tensor([0.1, 0.2]), torch.tensor([False, False])))


def test_a_score_that_only_knows_how_easy_a_task_is_separates_nothing_within_tasks() -> None:
    tasks = ["easy"] * 10 + ["hard"] * 10
    labels = torch.tensor([True] * 8 + [False] * 2 + [False] * 8 + [True] * 2)
    found = separation([1.0] * 10 + [0.0] * 10, labels, tasks, seed=0)
    assert (found.auc, found.within_tasks) == (pytest.approx(0.8), 0.5)


def test_the_interval_draws_tasks_and_not_attempts() -> None:
    scores = [0.0, 1.0] * 40
    few = separation(scores, torch.tensor([False, True, True, False] * 20), ["a", "a", "b", "b"] * 20, seed=0)
    many = separation(scores, torch.tensor([False, True, True, False] * 20), [str(i // 4) for i in range(80)], seed=0)
    assert (few.low, few.high) == (0.0, 1.0)  # two tasks, of which one is always right and one always wrong
    assert many.low > 0.3 and many.high < 0.7


def test_bins_hold_every_prediction_and_the_error_is_their_weighted_distance() -> None:
    found = evaluate_scores([0.0, 0.95, 1.0, 0.25], [False, True, False, True], list("abcd"), {}, CONFIG)
    assert found.bins == (CalibrationBin(1, 0.0, 0.0), CalibrationBin(1, 0.25, 1.0), CalibrationBin(2, 0.975, 0.5))
    assert found.calibration_error == pytest.approx((0.75 + 2 * 0.475) / 4)
    assert (found.accuracy, found.majority, found.successes) == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(("loss", "accuracy"), [("regression", 1.0), ("pairs", None)])
def test_predicted_rewards_are_compared_with_the_reward_of_a_success_and_have_no_calibration(
    loss: LossName, accuracy: float | None
) -> None:
    rewards = [0.0, 1.0, 2.0, 2.5, 3.5, 4.0]
    config = CONFIG.model_copy(update={"loss": loss, "success": 3.0})
    found = evaluate_scores(rewards, [reward > 3 for reward in rewards], list("abcdef"), {}, config)
    assert (found.accuracy, found.model.auc) == (accuracy, 1.0)
    assert found.calibration_error is None and found.bins == ()
