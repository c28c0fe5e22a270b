"""Policy updaters for tests, and a blocking call of their update."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel

from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.registry import build_algorithm
from agent_r1.core.trajectory import Group
from agent_r1.trainer.config import TrainerConfig
from agent_r1.trainer.single_process import SingleProcessTrainer
from agent_r1.trainer.updater import PolicyUpdater, UpdateReport


def make_updater(
    model: PreTrainedModel,
    algorithm: Algorithm | str = "grpo",
    *,
    temperature: float = 1.0,
    reward_weights: Mapping[str, float] | None = None,
    seed: int = 0,
    steps: int = 1000,
    teacher: PreTrainedModel | None = None,
    example_coef: float = 0.0,
    **config: Any,
) -> PolicyUpdater:
    """Return an updater that trains ``model`` in this process; ``config`` are fields of TrainerConfig."""
    if isinstance(algorithm, str):
        algorithm = build_algorithm(algorithm, {})
    settings = TrainerConfig(**config)
    trainer = SingleProcessTrainer(model, algorithm, settings, temperature=temperature, teacher=teacher)
    weights = reward_weights or {}
    return PolicyUpdater(
        trainer, algorithm, settings, reward_weights=weights, seed=seed, steps=steps, example_coef=example_coef
    )


def update(updater: PolicyUpdater, groups: Sequence[Group]) -> UpdateReport:
    """Select and train the groups, and wait until that is done."""
    return asyncio.run(updater.update([updater.select(group) for group in groups]))
