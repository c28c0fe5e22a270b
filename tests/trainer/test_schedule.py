"""Learning rates follow transformers' schedules, in every step of a run and after resuming."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from transformers import get_scheduler
from updating import make_updater, update

from agent_r1.model.checksum import weights_checksum
from agent_r1.trainer.config import ScheduleConfig
from agent_r1.trainer.schedule import learning_rate_factor

STEPS = 12


def rates_of(name: str, **shape: Any) -> list[float]:
    """Return the learning rates of an optimizer that transformers' schedule drives in the usual way."""
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    schedule = get_scheduler(name, optimizer, num_warmup_steps=3, num_training_steps=STEPS, **shape)
    rates = []
    for _ in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, rates_of("constant_with_warmup")),
        ({"name": "linear"}, rates_of("linear")),
        ({"name": "cosine"}, rates_of("cosine")),
    ],
)
def test_factors_are_the_learning_rates_of_transformers_schedules(settings: Any, expected: list[float]) -> None:
    config = ScheduleConfig(warmup_steps=3, **settings)
    assert [learning_rate_factor(config, step, STEPS) for step in range(1, STEPS + 1)] == pytest.approx(expected)
    ratio = ScheduleConfig(warmup_ratio=0.25, **settings)  # 3 of 12 steps
    assert [learning_rate_factor(ratio, step, STEPS) for step in range(1, STEPS + 1)] == pytest.approx(expected)


def test_a_decay_ends_at_its_minimum_and_can_follow_a_plateau() -> None:
    config = ScheduleConfig(name="linear", decay_ratio=0.5, min_ratio=0.4)
    factors = [learning_rate_factor(config, step, 4) for step in range(1, 6)]
    assert factors == pytest.approx([1.0, 1.0, 1.0, 0.7, 0.4])
    late = ScheduleConfig(name="linear", warmup_steps=2, decay_ratio=0.5)  # the last half of all steps
    factors = [learning_rate_factor(late, step, 8) for step in range(1, 10)]
    assert factors == pytest.approx([0.0, 0.5, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0])


def test_without_a_schedule_the_learning_rate_is_the_configured_one() -> None:
    assert {learning_rate_factor(ScheduleConfig(), step, STEPS) for step in range(1, 30)} == {1.0}


@pytest.mark.parametrize(
    "settings", [{"warmup_steps": 2, "warmup_ratio": 0.1}, {"min_ratio": 0.1}, {"decay_ratio": 0.1}]
)
def test_settings_that_contradict_each_other_or_have_no_effect_are_refused(settings: Any) -> None:
    with pytest.raises(ValidationError, match=r"leave one out|have no effect"):
        ScheduleConfig(**settings)


def test_each_step_reports_its_learning_rates_and_applies_them(make: Any) -> None:
    model = make.model()
    schedule = ScheduleConfig(warmup_steps=2)
    updater = make_updater(model, "ppo", learning_rate=1e-2, critic_learning_rate=1e-3, schedule=schedule, steps=3)
    weights, found = [weights_checksum(model)], []
    for _ in range(3):
        metrics = update(updater, make.random_groups(0)).metrics
        found.append((metrics["learning_rate"], metrics["critic_learning_rate"]))
        weights.append(weights_checksum(model))
    assert found == [(0.0, 0.0), (0.5e-2, 0.5e-3), (1e-2, 1e-3)]
    assert weights[0] == weights[1] != weights[2] != weights[3]  # the first step of a warm-up has learning rate 0


def test_a_resumed_run_continues_the_schedule_bit_by_bit(make: Any) -> None:
    settings: Any = {"learning_rate": 1e-2, "schedule": ScheduleConfig(name="cosine"), "steps": 4}

    def train(updates: int, updater: Any) -> None:
        for _ in range(updates):
            update(updater, make.random_groups(0))

    model = make.model()
    updater = make_updater(model, **settings)
    train(2, updater)
    state, weights = updater.state(), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    train(2, updater)
    resumed = make_updater(make.model(), **settings)
    resumed.load_weights(weights)
    resumed.load_state(state)
    train(2, resumed)
    assert resumed.publish().version == updater.publish().version
    constant = make_updater(make.model(), learning_rate=1e-2)  # control: the schedule decides the bits
    train(4, constant)
    assert constant.publish().version.checksum != updater.publish().version.checksum
