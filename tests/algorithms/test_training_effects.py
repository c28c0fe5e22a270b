"""What the parts of an algorithm pull a policy towards, on a tiny model that lives its own episodes."""

from __future__ import annotations

import math
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

ASKED = torch.arange(4).repeat_interleave(16)[:, None]
OBSERVED = [14, 15, 13]
Reward = Callable[[int, float], float]


@torch.no_grad()
def table(model: PreTrainedModel) -> Tensor:
    """(4, 16) log-probabilities of the token after each of the questions 0 .. 3."""
    return model(input_ids=torch.arange(4)[:, None]).logits[:, -1].double().log_softmax(-1)


def divergence(model: PreTrainedModel, other: PreTrainedModel) -> float:
    """KL(model || other) of a token after the questions."""
    p, q = table(model), table(other)
    return float((p.exp() * (p - q)).sum(-1).mean())


def entropy(model: PreTrainedModel) -> float:
    p = table(model)
    return float(-(p.exp() * p).sum(-1).mean())


@torch.no_grad()
def observed_logprob(model: PreTrainedModel) -> float:
    """Mean log-probability of what is observed after question 1 and answer 2."""
    ids = torch.tensor([[1, 2, *OBSERVED]])
    logprobs = model(input_ids=ids).logits[0, 1:-1].log_softmax(-1)
    return float(logprobs[range(3), OBSERVED].mean())


def live(make: Any, model: PreTrainedModel, random: torch.Generator, reward: Reward) -> list[Group]:
    """Sixteen attempts at each question: a token, an observation, and a token that never changes."""
    logprobs = table(model)[ASKED[:, 0]].float()
    said = torch.multinomial(logprobs.exp(), 1, generator=random)
    luck = torch.rand(len(ASKED), generator=random).tolist()
    lived = []
    for place, (question, token) in enumerate(zip(ASKED[:, 0].tolist(), said[:, 0].tolist(), strict=True)):
        first = make.turn(0, [question], [token], logprobs=[float(logprobs[place, token])])
        second = make.turn(1, OBSERVED, [0], parent=0)
        earned = {"score": reward(token, luck[place])}
        lived.append(make.trajectory((first, second), earned, group=question, member=place % 16))
    return make.groups(*lived)


def learn(
    make: Any,
    row: Algorithm,
    *,
    start: PreTrainedModel | None = None,
    teacher: PreTrainedModel | None = None,
    reward: Reward = lambda token, luck: luck,
    updates: int = 25,
) -> PreTrainedModel:
    """A model after updates on its own attempts; ``start``: whose weights it has once the reference is kept."""
    model, random = make.model(), torch.Generator().manual_seed(0)
    updater = make_updater(model, row, teacher=teacher, learning_rate=3e-3, critic_learning_rate=1e-2)
    if start is not None:
        updater.load_weights(start.state_dict())
    for _ in range(updates):
        update(updater, live(make, model, random, reward))
    return model


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("grpo", {"kl.coefficient": 1.0}),
        ("grpo", {"kl.coefficient": 1.0, "kl.estimator": "k2"}),
        ("grpo", {"kl.coefficient": 1.0, "kl.estimator": "k3_unbiased"}),
        ("reinforce++", {"kl.coefficient": 3.0}),
    ],
)
def test_a_kl_pulls_the_policy_back_to_where_it_began(name: str, settings: dict[str, object], make: Any) -> None:
    began, strayed = make.model(), make.model(seed=1)
    back = divergence(learn(make, build_algorithm(name, settings), start=strayed), began)
    alone = divergence(learn(make, build_algorithm(name, {"kl": "none"}), start=strayed), began)
    assert back < 0.3 * divergence(strayed, began) < alone


def test_distillation_moves_towards_the_teacher(make: Any) -> None:
    teacher, other = make.model(seed=1), make.model(seed=2)
    model = learn(make, build_algorithm("distillation", {}), teacher=teacher)
    assert divergence(model, teacher) < 0.2 * divergence(make.model(), teacher)
    assert divergence(model, other) > divergence(model, teacher) * 5  # control


def test_an_entropy_bonus_raises_entropy(make: Any) -> None:
    with_bonus, without = (
        entropy(learn(make, build_algorithm("reinforce", {"entropy_coef": weight}))) for weight in (1.0, 0.0)
    )
    assert with_bonus > entropy(make.model()) + 0.2 and with_bonus > without + 0.2


def test_echo_learns_what_the_world_says_and_grpo_does_not(make: Any) -> None:
    before = observed_logprob(make.model())
    assert observed_logprob(learn(make, build_algorithm("echo", {"observation_nll_coef": 1.0}))) > before + 1.0
    assert observed_logprob(learn(make, build_algorithm("grpo", {}))) < before + 0.5


def test_imitation_repeats_what_earned_something(make: Any) -> None:
    # without differences in reward nothing but imitation is left
    row = build_algorithm("reinforce", {"sft_coef": 1.0})
    model = learn(make, row, reward=lambda token, luck: float(token == 5))
    assert table(model)[:, 5].exp().min() > 0.5 > table(make.model())[:, 5].exp().max()
    steady = build_algorithm("reinforce", {"sft_coef": 1.0})
    assert entropy(learn(make, steady, reward=lambda token, luck: 1.0)) < entropy(make.model())
    unmoved = learn(make, build_algorithm("reinforce", {}), reward=lambda token, luck: 1.0)
    assert torch.equal(table(unmoved), table(make.model()))  # control


def test_the_coefficient_rises_while_the_policy_is_far_and_is_kept_in_the_state(make: Any) -> None:
    row = build_algorithm("grpo", {"kl.coefficient": 0.1, "kl.target": 1e-4, "kl.horizon": 640})
    model, random = make.model(), torch.Generator().manual_seed(0)
    updater = make_updater(model, row)
    weights = make.model(seed=1).state_dict()
    updater.load_weights(weights)
    coefficients = [
        update(updater, live(make, model, random, lambda token, luck: luck)).metrics["kl_coefficient"]
        for _ in range(3)
    ]
    grown = math.exp(0.2 * 64 / 640)  # 20 % off, 64 of 640 trajectories
    assert coefficients == pytest.approx([0.1, 0.1 * grown, 0.1 * grown**2])
    state = updater.state()
    assert state.scalars["kl_coefficient"] == pytest.approx(0.1 * grown**3)
    fresh = make.model()
    restored = make_updater(fresh, row)
    restored.load_weights(model.state_dict())
    restored.load_state(state)
    groups = live(make, fresh, random, lambda token, luck: luck)
    assert update(restored, groups).metrics["kl_coefficient"] == pytest.approx(0.1 * grown**3)
