"""Components that do not fit together are refused, with the reason."""

from __future__ import annotations

import inspect
import re
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from agent_r1.algorithms import validation
from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.presets import ALGORITHMS
from agent_r1.algorithms.registry import build_algorithm
from agent_r1.algorithms.types import Advantage, ModelOutputs, Need
from agent_r1.algorithms.validation import check_algorithm, incompatibilities
from agent_r1.core.errors import InvalidInput
from agent_r1.data.batch import TrainingBatch

INCOMPATIBILITIES: dict[str, tuple[str, dict[str, object]]] = {
    "loss gmpo is defined for the ratio of a turn or trajectory, not of a token": ("grpo", {"loss": "gmpo"}),
    "ratio_denominator sampler has no effect": ("reinforce", {"ratio_denominator": "sampler"}),
    "rejection.level token would split the units of ratio_level trajectory": ("gspo", {"rejection.level": "token"}),
    "ratio_denominator sampler already corrects the mismatch of sampler and trainer": (
        "dppo",
        {"correction.high": 2.0},
    ),
    "masks.advantage has no effect": ("grpo", {"masks.advantage": False}),
    "masks.loss cannot be off alone": ("ppo", {"masks.loss": False}),
    "masks.loss cannot be off here: observations were not sampled": ("dppo", {"masks.loss": False}),
    "observation_nll_coef and masks.loss off are two ways of training on observations": ("echo", {"masks.loss": False}),
    "token_mask is a rule for actions: leave masks.loss on": (
        "grpo",
        {"token_mask": "top_entropy", "masks.loss": False},
    ),
    "no covariance is between token_mask.low 5 and token_mask.high 5": ("clip-cov", {"token_mask.low": 5.0}),
    "kl_cov needs the policy before the update": ("reinforce", {"kl_cov.share": 0.1}),
    "kl_cov penalizes the distance from pi_old": ("dppo", {"kl_cov.share": 0.1}),
    "a KL in the reward is k1": ("reinforce++", {"kl.estimator": "k2"}),
    "k1 has no gradient in expectation": ("grpo", {"kl.estimator": "k1"}),
    "set constant_groups to keep, and filters.top_variance to none": ("ppo", {"constant_groups": "drop"}),
    "leave out shaping.length and shaping.turns": ("ppo", {"shaping.length": 0.1}),
    "advantage.scale with_variance counts the groups that constant_groups drop removes": (
        "dapo",
        {"advantage.scale": "with_variance"},
    ),
    "filters.greedy needs a greedy attempt, which this advantage does not use": ("grpo", {"filters.greedy": True}),
    "set filters.greedy": ("remax", {"filters.greedy": False}),
    "max_refill_rounds has no effect if nothing removes whole groups": ("ppo", {"max_refill_rounds": 2}),
    "the baseline of a role is over rewards as they are": ("rae", {"shaping.process_scale": "largest"}),
    "a success is a return above a threshold": ("rft", {"shaping.process_scale": "largest"}),
    "the greedy attempt's reward is neither shaped nor penalized": ("remax", {"shaping.process_scale": "largest"}),
    "correction.low has no effect if ratios are truncated": ("grpo", {"correction.low": 0.1}),
    "nothing is between rejection.low 2 and rejection.high 1.01": ("grpo", {"rejection.low": 2.0}),
    "kl.horizon has no effect without kl.target": ("grpo", {"kl.horizon": 10.0}),
    "kl.bound has no effect: it bounds k3": ("grpo", {"kl.estimator": "k2", "kl.bound": 10.0}),
    "kl.sync_alpha has no effect without kl.sync_steps": ("grpo", {"kl.sync_alpha": 0.25}),
    "shaping.overlong leaves no length without penalty": ("grpo", {"shaping.overlong.max_tokens": 100}),
    "filters.success and advantage.threshold both define success": ("rft", {"advantage.threshold": 0.5}),
    "shaping has no effect: advantage separate_rewards": ("gdpo", {"shaping.length": 0.1}),
    "a KL in the reward has no effect": ("gdpo", {"kl.estimator": "k1", "kl.placement": "reward"}),
    "length is given with aggregation 'constant', and only with it": ("grpo", {"length": 10}),
    "returns of continuations are neither shaped": ("vineppo-turn", {"shaping.turns": 0.1}),
    "turns of a group of equal returns differ": ("vineppo-turn", {"constant_groups": "drop"}),
    "advantage zero trains nothing alone": ("top-k-distillation", {"distillation": "none"}),
}

FURTHER_CASES: dict[str, tuple[str, dict[str, object]]] = {
    "rejection.level token would split the units of ratio_level turn": ("steppo", {"rejection.level": "token"}),
    "max_refill_rounds has no effect if nothing": ("gigpo", {"max_refill_rounds": 2, "filters.top_variance": 0.5}),
    "nothing is between correction.low 5": ("grpo", {"correction.rule": "window", "correction.low": 5.0}),
    "masks.loss cannot be off here": ("grpo", {"masks.loss": False, "rejection.level": "trajectory"}),
    "length is given with aggregation 'constant', and only with it": ("dr-grpo", {"length": "none"}),
}


def test_components_that_do_not_fit_are_refused_with_the_reason() -> None:
    for reason, (name, settings) in (*INCOMPATIBILITIES.items(), *FURTHER_CASES.items()):
        with pytest.raises(InvalidInput) as caught:
            build_algorithm(name, settings)
        text = str(caught.value)
        assert text.startswith(f"algorithm {name}: got components that do not fit; ") and reason in text, text
        assert "\n" not in text


class CriticWithoutSettings(Advantage):
    """An advantage that needs a critic, but does not extend WithCritic."""

    needs: ClassVar[frozenset[Need]] = frozenset({"critic"})
    formula = "0"

    def compute(self, batch: TrainingBatch, outputs: ModelOutputs) -> Tensor:
        return torch.zeros_like(batch.token_rewards)


def test_an_advantage_that_needs_a_critic_must_extend_with_critic() -> None:
    with pytest.raises(InvalidInput, match="an advantage that needs a critic extends WithCritic"):
        check_algorithm(Algorithm(name="mine", advantage=CriticWithoutSettings()))


def test_every_incompatibility_has_a_case() -> None:
    # control: a new one without a case is detected; the test above covers a user's own advantage
    assert len(re.findall(r"\byield f?\"", inspect.getsource(validation))) == len(INCOMPATIBILITIES) + 1


def test_no_preset_has_an_incompatibility() -> None:
    for algorithm in ALGORITHMS.values():
        assert list(incompatibilities(algorithm)) == []


def test_components_that_fit_are_accepted() -> None:
    for name, settings in (
        ("gspo", {"correction.level": "trajectory", "rejection.level": "trajectory"}),
        ("gspo", {"correction.level": "token"}),
        ("steppo", {"rejection.level": "turn"}),
        ("ppo", {"masks.advantage": False}),
        ("ppo", {"masks.advantage": False, "masks.loss": False}),
        ("grpo", {"masks.loss": False}),
        ("grpo", {"loss": "gmpo", "ratio_level": "turn"}),
        ("grpo", {"aggregation": "constant", "length": 100}),
        ("grpo", {"max_refill_rounds": 2, "constant_groups": "drop"}),
        ("gdpo", {"kl.coefficient": 0.1}),
    ):
        build_algorithm(name, settings)
