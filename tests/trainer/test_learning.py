"""Each algorithm learns: in a small world made by hand, sampled from the model itself, reward rises."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from agent_r1.algorithms.presets import ALGORITHMS
from agent_r1.core.trajectory import Group, Trajectory
from agent_r1.trainer.config import TrainerConfig
from agent_r1.trainer.learner import Learner

QUESTIONS = 4
MEMBERS = 16
UPDATES = 100


@torch.no_grad()
def draw(model: PreTrainedModel, prompts: torch.Tensor, random: torch.Generator) -> tuple[list[int], list[float]]:
    """One token after each prompt (B, T), sampled at temperature 1, and its log-probability."""
    table = model(input_ids=prompts).logits[:, -1].log_softmax(-1)
    tokens = torch.multinomial(table.exp(), 1, generator=random)
    return tokens[:, 0].tolist(), table.gather(-1, tokens)[:, 0].tolist()


def live(make: Any, model: PreTrainedModel, random: torch.Generator) -> list[Group]:
    """Asked q, the right call is token q + 4; asked again, the right answer is q + 8. One point each."""
    asked = [question for question in range(QUESTIONS) for _ in range(MEMBERS)]
    calls, first = draw(model, torch.tensor([[question] for question in asked]), random)
    seen = torch.tensor([[question, call, 15, question] for question, call in zip(asked, calls, strict=True)])
    answers, second = draw(model, seen, random)

    def trajectory(place: int) -> Trajectory:
        question, call, answer = asked[place], calls[place], answers[place]
        turns = make.chain(([question], [call]), ([15, question], [answer]))
        recorded = [
            replace(turn, logprobs=(values[place],)) for turn, values in zip(turns, (first, second), strict=True)
        ]
        rewards = {"call": (float(call == question + 4), 0.0), "answer": float(answer == question + 8)}
        return make.trajectory(recorded, rewards, group=question, member=place % MEMBERS)

    return make.groups(*(trajectory(place) for place in range(len(asked))))


def rewards_while_learning(name: str, make: Any, *, honest: bool) -> tuple[float, float]:
    """Mean reward of the first and of the last five updates."""
    model, random = make.model(spread=0.02), torch.Generator().manual_seed(0)
    config = TrainerConfig(learning_rate=3e-3, critic_learning_rate=1e-2)
    learner = Learner(model, ALGORITHMS[name], config, temperature=1.0, reward_weights={}, seed=0)
    earned: list[float] = []
    for _ in range(UPDATES):
        groups = live(make, model, random)
        earned.append(learner.update(groups).metrics["reward"] if honest else learn_from_noise(learner, groups, random))
    return sum(earned[:5]) / 5, sum(earned[-5:]) / 5


def learn_from_noise(learner: Learner, groups: list[Group], random: torch.Generator) -> float:
    """Update on rewards that have nothing to do with what was done; the true mean reward."""
    everyone = [trajectory for group in groups for trajectory in group.trajectories]
    noisy = [
        replace(
            group,
            trajectories=tuple(
                replace(trajectory, rewards={"noise": float(torch.rand((), generator=random))})
                for trajectory in group.trajectories
            ),
        )
        for group in groups
    ]
    learner.update(noisy)
    return sum(trajectory.rewards["call"][0] + trajectory.rewards["answer"] for trajectory in everyone) / len(everyone)


@pytest.mark.parametrize("name", ["grpo", "steppo", "reinforce++", "gigpo"])
def test_reward_rises(name: str, make: Any) -> None:
    before, after = rewards_while_learning(name, make, honest=True)
    assert before < 0.6 and after > 1.6  # of 2


def test_reward_does_not_rise_on_rewards_without_meaning(make: Any) -> None:
    before, after = rewards_while_learning("grpo", make, honest=False)
    assert after < before + 0.3
