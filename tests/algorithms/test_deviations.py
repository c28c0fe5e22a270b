"""What a preset says of its differences from its paper is true of its settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensors import close, numbers
from updating import make_updater, update

from agent_r1.algorithms.presets import ALGORITHMS
from agent_r1.algorithms.registry import build_algorithm
from agent_r1.algorithms.types import ModelOutputs
from agent_r1.data.batch import assemble_batch, select_trainable
from agent_r1.data.sequences import pack_prefix_tree


@pytest.mark.parametrize(
    ("over", "baseline"),
    [
        ("trajectories", (1.0 + 0.0) / 2),
        ("turns", (1.0 + 0.0 + 0.0 + 0.0) / 4),  # the second attempt has three turns
    ],
)
def test_gigpo_averages_the_return_over_trajectories_or_over_turns(over: str, baseline: float, make: Any) -> None:
    long = make.chain(([1], [2]), ([1], [2]), ([1], [2]))
    attempts = (
        make.trajectory(make.chain(([1], [2])), {"score": 1.0}),
        make.trajectory(long, {"score": 0.0}, member=1),
    )
    batch = assemble_batch(select_trainable(make.groups(*attempts), {}).samples, pack_prefix_tree)
    algorithm = build_algorithm("gigpo", {"advantage.average_over": over, "advantage.turn_weight": 0.0})
    advantage = algorithm.compute_token_weights(batch, ModelOutputs()).advantage
    assert close(advantage, numbers(1 - baseline, -baseline, -baseline, -baseline))


def test_distillation_pulls_towards_the_teacher_from_the_present_policy_not_from_the_sampler(make: Any) -> None:
    # The sampler gave the token probability e^-6, the policy now gives it more than the teacher: push it down.
    turns = [make.turn(0, [1], [2], logprobs=[-6.0])]
    batch = assemble_batch(select_trainable(make.groups(make.trajectory(turns)), {}).samples, pack_prefix_tree)
    outputs = ModelOutputs(old_logprobs=numbers(-0.1), teacher_logprobs=numbers(-0.2))
    assert close(ALGORITHMS["distillation"].compute_token_weights(batch, outputs).advantage, numbers(-0.1))


def test_an_update_on_stale_samples_distills_from_the_policy_before_it(make: Any) -> None:
    model, teacher = make.model(), make.model(seed=1)
    updater = make_updater(model, "distillation", learning_rate=1e-2, teacher=teacher)
    groups = make.random_groups(0)  # the recorded log-probability of each token is -1
    fresh, stale = update(updater, groups).metrics, update(updater, groups).metrics
    assert stale["staleness"] == 1 and fresh["staleness"] == 0
    batch = assemble_batch(select_trainable(groups, {}).samples, pack_prefix_tree)
    assert torch.equal(batch.sampler_logprobs, torch.full_like(batch.sampler_logprobs, -1.0))
    # log pi_teacher + 1 has the spread of log pi_teacher alone; the policy's own adds to it
    assert stale["advantage_std"] != pytest.approx(fresh["advantage_std"], rel=1e-3)
