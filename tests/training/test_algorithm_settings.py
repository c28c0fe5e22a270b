"""A run refuses an algorithm that its settings would make wrong, before it starts."""

from __future__ import annotations

import pytest

from agent_r1.algorithms.presets import ALGORITHMS
from agent_r1.algorithms.registry import build_algorithm
from agent_r1.core.errors import InvalidInput
from agent_r1.trainer.config import TrainerConfig
from agent_r1.training.config import TrainConfig
from agent_r1.training.preflight import check_algorithm_settings

WITHOUT_RATIO = sorted(name for name, algorithm in ALGORITHMS.items() if not algorithm.loss.uses_ratio)


def config_of(name: str, *, minibatches: int = 1, max_staleness: int = 0, **settings: object) -> TrainConfig:
    algorithm = build_algorithm(name, settings)
    trainer = TrainerConfig(minibatches=minibatches)
    return TrainConfig(model="tiny", algorithm=algorithm, trainer=trainer, max_staleness=max_staleness)


@pytest.mark.parametrize("name", WITHOUT_RATIO)
@pytest.mark.parametrize("correction", [{}, {"correction.high": 2.0}, {"correction.rule": "window"}])
def test_a_loss_without_a_ratio_is_refused_with_several_optimizer_steps_per_batch(
    name: str, correction: dict[str, object]
) -> None:
    assert {"maxrl", "opo", "remax", "reinforce", "rft"} <= set(WITHOUT_RATIO)
    check_algorithm_settings(config_of(name, **correction))  # control: one pass over fresh samples
    for settings in (config_of(name, epochs=2, **correction), config_of(name, minibatches=2, **correction)):
        with pytest.raises(InvalidInput, match="policy_gradient with several optimizer steps per batch"):
            check_algorithm_settings(settings)


@pytest.mark.parametrize("name", WITHOUT_RATIO)
def test_a_loss_without_a_ratio_needs_a_correction_for_stale_samples(name: str) -> None:
    check_algorithm_settings(config_of(name, max_staleness=1, **{"correction.high": 2.0}))
    with pytest.raises(InvalidInput, match="policy_gradient with stale samples; set correction"):
        check_algorithm_settings(config_of(name, max_staleness=1))


def test_a_loss_with_a_ratio_may_take_several_optimizer_steps_per_batch() -> None:
    check_algorithm_settings(config_of("maxrl", epochs=10, loss="importance_sampling"))
    check_algorithm_settings(config_of("grpo", epochs=10, minibatches=4, max_staleness=2))
