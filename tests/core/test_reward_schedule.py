"""Weights of rewards by step: linear between points, constant outside, and 0 as if the reward were not there."""

import pytest

from agent_r1.core.trajectory import RewardSchedule
from agent_r1.trainer.updater import weights_at


def test_the_factor_is_linear_between_points_and_constant_outside() -> None:
    schedule = RewardSchedule.parse("2:0, 4:1, 8:0.5")
    assert [schedule.factor(step) for step in (1, 2, 3, 4, 6, 8, 100)] == [0, 0, 0.5, 1, 0.75, 0.5, 0.5]
    assert RewardSchedule.parse("5:0.3").factor(1) == 0.3


def test_rewards_without_a_schedule_keep_their_weight() -> None:
    schedules = {"calls": RewardSchedule.parse("1:0,11:1"), "bonus": RewardSchedule.parse("1:2")}
    assert weights_at({"em": 0.5, "calls": -0.1}, schedules, 6) == {"em": 0.5, "calls": -0.05, "bonus": 2.0}


@pytest.mark.parametrize(
    "text", ["", "1", "1:", "a:1", "-1:1", "2:1,2:0", "3:1,2:0", "1:nan", "1:inf", "1:1,", "9" * 9999]
)
def test_a_text_that_is_no_schedule_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"give|float"):
        RewardSchedule.parse(text)
