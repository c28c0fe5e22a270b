"""Parts that do not fit together are refused, and say why."""

from __future__ import annotations

import inspect
import re
from typing import ClassVar

import pytest
import torch

from agent_r1.algorithms import validation as fit
from agent_r1.algorithms.advantages.advantage import Advantage
from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.component import Need
from agent_r1.algorithms.presets import ALGORITHMS
from agent_r1.algorithms.registry import build_algorithm
from agent_r1.algorithms.types import Estimate, ModelOutputs
from agent_r1.algorithms.validation import check_algorithm, incompatibilities
from agent_r1.core.errors import InvalidInput
from agent_r1.data.batch import TrainingBatch

OBJECTIONS: dict[str, tuple[str, dict[str, object]]] = {
    "surrogate gmpo is made for the ratio of a turn or trajectory, not of a token": ("grpo", {"loss": "gmpo"}),
    "anchor sampler does nothing here": ("reinforce", {"ratio_denominator": "sampler"}),
    "correction.level token would tear apart what ratio trajectory takes together": ("gspo", {"correction.high": 2.0}),
    "the ratio holds the disagreement of sampler and trainer already": ("dppo", {"correction.high": 2.0}),
    "masks.advantage does nothing here": ("grpo", {"masks.advantage": False}),
    "masks.loss cannot be off alone": ("ppo", {"masks.loss": False}),
    "masks.loss cannot be off here: no sampler chose the observations": ("dppo", {"masks.loss": False}),
    "observation and masks.loss off are two ways of learning observations": ("echo", {"masks.loss": False}),
    "a KL in the reward is k1": ("reinforce++", {"kl.estimator": "k2"}),
    "k1 has no gradient in expectation": ("grpo", {"kl.estimator": "k1"}),
    "set filters.zero_variance and filters.top_variance to none": ("ppo", {"filters.zero_variance": 0.1}),
    "leave out shaping.length and shaping.turns": ("ppo", {"shaping.length": 0.1}),
    "filters.greedy asks for a greedy attempt that this advantage does not need": ("grpo", {"filters.greedy": True}),
    "set filters.greedy": ("remax", {"filters.greedy": False}),
    "refill does nothing without a filter that leaves a group out by itself": ("ppo", {"max_refill_rounds": 2}),
    "zero_variance looks at rewards as they came": ("grpo", {"shaping.length": 0.1}),
    "the greedy attempt's reward is as it came": ("remax", {"shaping.process_scale": "largest"}),
    "correction.low does nothing where ratios are truncated": ("grpo", {"correction.low": 0.1}),
    "nothing is between rejection.low 2 and rejection.high 1.01": ("grpo", {"rejection.low": 2.0}),
    "kl.horizon does nothing without kl.target": ("grpo", {"kl.horizon": 10.0}),
    "filters.success and advantage.threshold say both what is enough": ("rft", {"advantage.threshold": 0.5}),
    "shaping does nothing here: advantage separate_rewards": ("gdpo", {"shaping.length": 0.1}),
    "a KL in the reward does nothing here": ("gdpo", {"kl.estimator": "k1", "kl.placement": "reward"}),
    "length is given with aggregation 'constant', and only with it": ("grpo", {"length": 10}),
}

AGAIN: dict[str, tuple[str, dict[str, object]]] = {
    "surrogate dppo is made for the ratio of a token, not of a turn": ("dppo", {"ratio_level": "turn"}),
    "rejection.level token would tear apart what ratio turn": ("steppo", {"rejection.level": "token"}),
    "set filters.zero_variance and filters.top_variance to none": ("reinforce", {"filters.top_variance": 0.5}),
    "refill does nothing without": ("gigpo", {"max_refill_rounds": 2, "filters.top_variance": 0.5}),
    "zero_variance looks at rewards": ("grpo", {"kl.placement": "reward", "kl.estimator": "k1"}),
    "nothing is between correction.low 5": ("grpo", {"correction.rule": "window", "correction.low": 5.0}),
    "masks.loss cannot be off here": ("grpo", {"masks.loss": False, "rejection.level": "trajectory"}),
    "leave out shaping.length and shaping.turns": ("reinforce", {"shaping.turns": 0.1}),
    "length is given with aggregation 'constant', and only with it": ("dr-grpo", {"length": "none"}),
    "shaping does nothing here: advantage teacher": ("distillation", {"shaping.process_scale": "largest"}),
}


@pytest.mark.parametrize("cases", [OBJECTIONS, AGAIN])
def test_what_does_not_fit_is_refused_with_a_reason(cases: dict[str, tuple[str, dict[str, object]]]) -> None:
    for reason, (name, settings) in cases.items():
        with pytest.raises(InvalidInput) as caught:
            build_algorithm(name, settings)
        said = str(caught.value)
        assert said.startswith(f"algorithm {name}: got parts that do not fit; ") and reason in said, said
        assert "\n" not in said


class Priceless(Advantage):
    """An advantage that asks for a critic and has no terms for it."""

    needs: ClassVar[frozenset[Need]] = frozenset({"critic"})
    formula = "0"

    def compute(self, batch: TrainingBatch, outputs: ModelOutputs) -> Tensor:
        return Estimate(torch.zeros_like(batch.token_rewards))


def test_an_advantage_with_a_critic_has_the_critics_terms() -> None:
    with pytest.raises(InvalidInput, match="an advantage that needs a critic extends WithCritic"):
        check_algorithm(Algorithm(name="priceless", advantage=Priceless()))


def test_every_objection_has_a_case() -> None:
    # control: a new one without a case is seen; the one of a user's own advantage stands above
    assert len(re.findall(r"\byield f?\"", inspect.getsource(fit))) == len(OBJECTIONS) + 1


@pytest.mark.parametrize("name", ALGORITHMS)
def test_no_row_has_an_objection(name: str) -> None:
    assert list(incompatibilities(ALGORITHMS[name])) == []
    check_algorithm(ALGORITHMS[name])


def test_parts_that_do_fit_are_taken() -> None:
    for name, settings in (
        ("gspo", {"correction.level": "trajectory", "rejection.level": "trajectory"}),
        ("steppo", {"rejection.level": "turn"}),
        ("ppo", {"masks.advantage": False}),
        ("ppo", {"masks.advantage": False, "masks.loss": False}),
        ("grpo", {"masks.loss": False}),
        ("grpo", {"loss": "gmpo", "ratio_level": "turn"}),
        ("grpo", {"aggregation": "constant", "length": 100}),
        ("grpo", {"max_refill_rounds": 2}),
        ("gdpo", {"kl.coefficient": 0.1}),
    ):
        build_algorithm(name, settings)
