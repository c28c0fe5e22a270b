"""Advantages from returns alone: success does not depend on the order in which rewards are summed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from agent_r1.algorithms.presets import ALGORITHMS
from agent_r1.algorithms.registry import build_algorithm
from agent_r1.algorithms.types import ModelOutputs
from agent_r1.core.trajectory import Trajectory
from agent_r1.data.batch import TrainingBatch, TrainingSample, assemble_batch, select_trainable
from agent_r1.data.sequences import pack_prefix_tree


def trajectory_of(make: Any, *rewards: float) -> Trajectory:
    """Return an attempt with one turn per reward."""
    turns = [
        make.turn(index, [1], [2], parent=index - 1 if index else None, rewards={"step": reward})
        for index, reward in enumerate(rewards)
    ]
    trajectory: Trajectory = make.trajectory(turns)
    return trajectory


def batch_of(samples: tuple[TrainingSample, ...]) -> TrainingBatch:
    return assemble_batch(samples, pack_prefix_tree)


@pytest.mark.parametrize(("rewards", "is_success"), [([0.1] * 10, True), ([0.1] * 9 + [0.0999], False)])
def test_attempts_that_the_filter_keeps_are_imitated(rewards: list[float], is_success: bool, make: Any) -> None:
    rft = ALGORITHMS["rft"]
    selection = select_trainable(make.groups(trajectory_of(make, *rewards)), {})
    assert bool(rft.select(selection, 0).samples) == is_success
    advantage = rft.compute_token_weights(batch_of(selection.samples), ModelOutputs()).advantage
    assert advantage.tolist() == [float(is_success)] * 10


@pytest.mark.parametrize(("last", "is_success"), [(-0.3, False), (-0.2999, True)])
def test_a_return_of_zero_is_no_success(last: float, is_success: bool, make: Any) -> None:
    # 0.1 + 0.2 - 0.3 is 5.6e-17 in floating point
    selection = select_trainable(make.groups(trajectory_of(make, 0.1, 0.2, last)), {})
    algorithm = build_algorithm("reinforce", {"sft_coef": 0.3})
    weight = algorithm.compute_token_weights(batch_of(selection.samples), ModelOutputs()).sft_weight
    assert weight is not None and torch.allclose(weight, torch.tensor(0.1 * is_success, dtype=torch.float64))
