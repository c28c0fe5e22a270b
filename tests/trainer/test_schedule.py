"""Learning rates follow a schedule that fits into the run, in every step and after resuming."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from transformers import get_scheduler
from updating import make_updater, update

from agent_r1.config import Layer
from agent_r1.core.errors import InvalidInput
from agent_r1.core.taskset import TaskSet
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.model.weights import weights_checksum
from agent_r1.trainer.config import ScheduleConfig
from agent_r1.trainer.optimizer import learning_rate_schedule
from agent_r1.training.config import TrainConfig, resolve_config

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


def factors_of(config: ScheduleConfig, steps: int) -> list[float]:
    return list(map(learning_rate_schedule(config, steps), range(1, steps + 1)))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, rates_of("constant_with_warmup")),
        ({"name": "linear"}, rates_of("linear")),
        ({"name": "cosine"}, rates_of("cosine")),
    ],
)
def test_factors_are_those_of_transformers_with_the_warmup_one_step_ahead(settings: Any, expected: list[float]) -> None:
    expected = [*expected[1:4], *expected[3:]]  # without the first step, which has learning rate 0
    config = ScheduleConfig(warmup_steps=3, **settings)
    assert factors_of(config, STEPS) == pytest.approx(expected)


def test_a_decay_ends_at_its_minimum_and_can_follow_a_plateau() -> None:
    config = ScheduleConfig(name="linear", decay_ratio=0.5, min_ratio=0.4)
    assert factors_of(config, 4) == pytest.approx([1.0, 1.0, 1.0, 0.7])
    assert learning_rate_schedule(config, 4)(5) == pytest.approx(0.7)  # after its end a curve keeps its last rate
    late = ScheduleConfig(name="linear", warmup_steps=2, decay_ratio=0.5)  # the last half of all steps
    assert factors_of(late, 8) == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25])
    raised = ScheduleConfig(name="linear", warmup_steps=4, min_ratio=0.2)
    assert factors_of(raised, 8)[:4] == pytest.approx([0.4, 0.6, 0.8, 1.0])


@pytest.mark.parametrize(
    ("settings", "steps", "message"),
    [
        ({"warmup_steps": 20}, 10, "shorter warm-up in trainer.schedule: it has 20 steps"),
        ({"name": "cosine", "warmup_steps": 6, "decay_ratio": 0.5}, 10, "6 steps of warm-up and 5 of decay"),
        ({"name": "linear", "decay_ratio": 0.02}, 10, "the decay has no effect in 0 steps"),
    ],
)
def test_a_run_with_too_few_steps_for_its_schedule_is_refused(settings: Any, steps: int, message: str) -> None:
    layers = [Layer("a.toml", {"model": "m", "steps": steps, "trainer": {"schedule": settings}})]
    with pytest.raises(InvalidInput, match=f"^steps: got {steps}; give more steps, or .*{message}"):
        resolve_config(TrainConfig, layers, TaskSet("demo", ToolEnv([]), lambda split: [], ()))


@pytest.mark.parametrize("settings", [{"min_ratio": 0.1}, {"decay_ratio": 0.1}])
def test_settings_without_effect_are_refused(settings: Any) -> None:
    with pytest.raises(ValidationError, match="have no effect"):
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
    assert found == [(0.5e-2, 0.5e-3), (1e-2, 1e-3), (1e-2, 1e-3)]
    assert len(set(weights)) == 4  # the first step of a warm-up changes the weights too
