"""The effect of the terms of an algorithm on a tiny model that is trained on its own episodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from updating import make_updater, update

from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.registry import build_algorithm
from agent_r1.core.trajectory import Group

PROMPTS = torch.arange(4).repeat_interleave(16)[:, None]
OBSERVATION = [14, 15, 13]
RewardFn = Callable[[int, float], float]
"""(sampled token, random number in [0, 1)) -> reward."""


@torch.no_grad()
def logprob_table(model: PreTrainedModel) -> Tensor:
    """Return the log-probabilities of the token after each of the questions 0 .. 3: (4, 16)."""
    return model(input_ids=torch.arange(4)[:, None]).logits[:, -1].double().log_softmax(-1)


def divergence(model: PreTrainedModel, other: PreTrainedModel) -> float:
    """Return KL(model || other) of a token after the questions."""
    p, q = logprob_table(model), logprob_table(other)
    return float((p.exp() * (p - q)).sum(-1).mean())


def entropy(model: PreTrainedModel) -> float:
    p = logprob_table(model)
    return float(-(p.exp() * p).sum(-1).mean())


@torch.no_grad()
def observed_logprob(model: PreTrainedModel) -> float:
    """Return the mean log-probability of the observation after question 1 and answer 2."""
    ids = torch.tensor([[1, 2, *OBSERVATION]])
    logprobs = model(input_ids=ids).logits[0, 1:-1].log_softmax(-1)
    return float(logprobs[range(3), OBSERVATION].mean())


def sample_groups(make: Any, model: PreTrainedModel, random: torch.Generator, reward: RewardFn) -> list[Group]:
    """Sample sixteen attempts at each question: a sampled token, an observation, and a fixed token."""
    logprobs = logprob_table(model)[PROMPTS[:, 0]].float()
    sampled = torch.multinomial(logprobs.exp(), 1, generator=random)
    noise = torch.rand(len(PROMPTS), generator=random).tolist()
    trajectories = []
    for index, (question, token) in enumerate(zip(PROMPTS[:, 0].tolist(), sampled[:, 0].tolist(), strict=True)):
        first = make.turn(0, [question], [token], logprobs=[float(logprobs[index, token])])
        second = make.turn(1, OBSERVATION, [0], parent=0)
        rewards = {"score": reward(token, noise[index])}
        trajectories.append(make.trajectory((first, second), rewards, group=question, member=index % 16))
    return make.groups(*trajectories)


def train(
    make: Any,
    algorithm: Algorithm,
    *,
    start: PreTrainedModel | None = None,
    teacher: PreTrainedModel | None = None,
    reward: RewardFn = lambda token, noise: noise,
    updates: int = 25,
) -> PreTrainedModel:
    """Return a model after updates on its own attempts.

    Args:
        start: its weights are loaded after the reference policy was copied from the initial ones.
    """
    model, random = make.model(), torch.Generator().manual_seed(0)
    updater = make_updater(model, algorithm, teacher=teacher, learning_rate=3e-3, critic_learning_rate=1e-2)
    if start is not None:
        updater.load_weights(start.state_dict())
    for _ in range(updates):
        update(updater, sample_groups(make, model, random, reward))
    return model


def test_a_kl_penalty_pulls_the_policy_back_to_the_reference(make: Any) -> None:
    initial, distant = make.model(), make.model(seed=1)
    with_kl = divergence(train(make, build_algorithm("reinforce++", {"kl.coefficient": 3.0}), start=distant), initial)
    without_kl = divergence(train(make, build_algorithm("reinforce++", {"kl": "none"}), start=distant), initial)
    assert with_kl < 0.3 * divergence(distant, initial) < without_kl


@pytest.mark.parametrize(
    ("name", "settings"), [("distillation", {}), ("top-k-distillation", {"distillation.top_k": 4})]
)
def test_distillation_moves_towards_the_teacher(name: str, settings: dict[str, object], make: Any) -> None:
    teacher, other = make.model(seed=1), make.model(seed=2)
    model = train(make, build_algorithm(name, settings), teacher=teacher)
    assert divergence(model, teacher) < 0.2 * divergence(make.model(), teacher)
    assert divergence(model, other) > divergence(model, teacher) * 5  # control


def test_an_entropy_bonus_raises_entropy(make: Any) -> None:
    with_bonus, without = (
        entropy(train(make, build_algorithm("reinforce", {"entropy_coef": weight}))) for weight in (1.0, 0.0)
    )
    assert with_bonus > entropy(make.model()) + 0.2 and with_bonus > without + 0.2


def test_echo_learns_to_predict_observations_and_grpo_does_not(make: Any) -> None:
    before = observed_logprob(make.model())
    assert observed_logprob(train(make, build_algorithm("echo", {"observation_nll_coef": 1.0}))) > before + 1.0
    assert observed_logprob(train(make, build_algorithm("grpo", {}))) < before + 0.5


def test_the_supervised_term_repeats_successful_actions(make: Any) -> None:
    # without differences in reward only the supervised term has a gradient
    algorithm = build_algorithm("reinforce", {"sft_coef": 1.0})
    model = train(make, algorithm, reward=lambda token, noise: float(token == 5))
    assert logprob_table(model)[:, 5].exp().min() > 0.5 > logprob_table(make.model())[:, 5].exp().max()
    unmoved = train(make, build_algorithm("reinforce", {}), reward=lambda token, noise: 1.0)
    assert torch.equal(logprob_table(unmoved), logprob_table(make.model()))  # control
